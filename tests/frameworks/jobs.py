"""Jobs on real ranks that frameworks set up by themselves, and digests of their states."""

import hashlib
import inspect
import os
import socket
import subprocess
import sys

import torch
import torch.distributed as dist
from accelerate import DistributedType, PartialState

from dcp_tensorizer._index.container import is_index

from ..e2e.training import bits, full
from ..lab import ranks
from ..lab.processes import ROOT

# All of them: to import one takes each rank longer than its test.
ranks._IMPORTED += ["accelerate", "lightning.fabric", "lightning.pytorch", "torchtitan.models.llama3", "transformers"]


def run_job(world_size, fn, *args, killed=False, timeout=150.0):
    """Runs ``fn(rank, *args)`` on every rank, in the environment of torchrun; returns each rank's result."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return ranks.run_ranks(
        world_size,
        _work,
        port,
        fn,
        *args,
        distributed=False,
        killed=range(world_size) if killed else (),
        timeout=timeout,
    )


def _work(rank, port, fn, *args):
    os.environ |= {
        "RANK": str(rank.index),
        "LOCAL_RANK": str(rank.index),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_WORLD_SIZE": str(rank.world_size),
        "MASTER_PORT": str(port),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TOKENIZERS_PARALLELISM": "false",
    }
    result = fn(rank.index, *args)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return result


def run_python(*arguments):
    """Runs Python with these arguments in a separate process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def let_accelerate_shard():
    """Pretends to Accelerate that there is a GPU, without which it does not turn FSDP on."""
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU


def die():
    """Ends all ranks as a crash does, once all of them have called this."""
    dist.barrier()
    ranks.kill_self()


def digests(state):
    """Returns the SHA-256 of each tensor of nested state dicts, gathered from all ranks, and all other values."""
    return dict(_digests(full(state), ()))


def _digests(value, path):
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _digests(value[key], (*path, key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _digests(item, (*path, number))
    elif isinstance(value, torch.Tensor):
        yield path, (str(value.dtype), tuple(value.shape), hashlib.sha256(bits(value).numpy().tobytes()).hexdigest())
    else:
        yield path, value


def is_ours(path):
    """Returns whether this package has saved the checkpoint."""
    return is_index((path / ".metadata").read_bytes())


def takes_what_its_base_takes(cls, module):
    """Checks that the methods that a module overrides take the arguments of the base class's; returns their names.

    All of them by name, and those that have a place by that.
    """
    ours = [base for base in cls.__mro__ if base.__module__ == module]
    names = {name for base in ours for name, value in vars(base).items() if inspect.isfunction(value)}
    base = next(base for base in cls.__mro__ if base.__module__ not in (module, "builtins"))
    overridden = {name for name in names if hasattr(base, name)}
    for name in overridden:
        parameters = inspect.signature(getattr(base, name)).parameters.values()
        known = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        placed = [p.name for p in known if p.kind is not p.KEYWORD_ONLY]
        signature = inspect.signature(getattr(cls, name))
        signature.bind(*placed, **{p.name: p.name for p in known if p.kind is p.KEYWORD_ONLY})
        signature.bind(placed[0], **{p.name: p.name for p in known if p.name != placed[0]})
    return overridden
