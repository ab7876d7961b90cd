"""Runs functions on real ranks: separate processes with a gloo group, their tracebacks, and a hard timeout.

The processes are forked from a server that has only imported torch and the package, because these imports take longer
than most tests.
"""

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .. import warm

# The package imports these modules on first use of their names, so the server imports them as well.
_IMPORTED = [
    *(f"dcp_tensorizer.{name}" for name in ("writer", "reader", "planner", "manager", "tools", "integrations.install")),
    "torch._dynamo",  # torch imports it when the first tensor is distributed
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "pytest",
    "psutil",
    "tests.lab.processes",
    "tests.lab.states",
]
_GRACE = 60.0  # for the other ranks, when one has failed: they may wait for it in a collective


@dataclass(frozen=True)
class Rank:
    """The first argument of a function that runs on a rank."""

    index: int
    world_size: int
    saves: dist.ProcessGroup | None
    """A gloo group for saves alone: gloo hangs or aborts when two threads run collectives on one group."""


def run_ranks(world_size, fn, *args, distributed=True, killed=(), timeout=300.0):
    """Runs ``fn(Rank, *args)`` on every rank and returns what each returned, by rank.

    Args:
        distributed: Whether the ranks have a process group.
        killed: Ranks that the function kills: their result is None.
        timeout: Seconds after which every rank stores its stacks and ends.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        multiprocessing.set_forkserver_preload(_IMPORTED)
        started = mp.start_processes(
            _rank,
            (world_size, dict(os.environ), warm.python(), folder, distributed, bool(killed), timeout, fn, args),
            nprocs=world_size,
            join=False,
            start_method="forkserver",
        ).processes
        overdue = _wait(started, killed, timeout + _GRACE)
        failures = [
            _failure(process, folder / str(rank), -signal.SIGKILL if rank in set(killed) - overdue else 0)
            for rank, process in enumerate(started)
        ]
        for process in started:
            process.close()
        assert not any(failures), "".join(f"\n--- rank {n} {f}" for n, f in enumerate(failures) if f)
        return [None if rank in killed else _load(folder / f"{rank}.result") for rank in range(world_size)]


def in_turn(rank, *calls):
    """Runs several functions on a rank, each ``(fn, *args)``, one after the other; returns what each returned."""
    return [fn(rank, *args) for fn, *args in calls]


def attempt(function):
    """Runs something that should fail; returns the error's text and type for each rank whose failure DCP reports."""
    started = time.monotonic()
    try:
        function()
    except torch.distributed.checkpoint.api.CheckpointException as error:
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
    except Exception as error:
        causes = {None: error}
    else:
        causes = {}
    return Failure(causes, time.monotonic() - started)


@dataclass(frozen=True)
class Failure:
    """A failed call on one rank: the causes by rank (None: an error that DCP did not wrap), and how long it took."""

    causes: dict
    seconds: float


def eventually(condition, timeout=300.0):
    """Polls until a condition holds; returns its value, or the last falsy one at the timeout."""
    deadline = time.monotonic() + timeout
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return value


def kill_self():
    """Ends this process as a crash would."""
    os.kill(os.getpid(), signal.SIGKILL)


def _rank(index, world_size, environment, python, folder, distributed, killed, timeout, fn, args):
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_executable(python)  # of the processes that DCP's PROCESS mode starts
    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # DCP's PROCESS mode asks for it
    with open(folder / f"{index}.stacks", "w") as stacks:
        faulthandler.dump_traceback_later(timeout, file=stacks, exit=True)
        try:
            result = _run(index, world_size, folder, distributed, killed, fn, args)
        except BaseException:
            (folder / f"{index}.error").write_text(traceback.format_exc())
            raise SystemExit(1) from None
        finally:
            faulthandler.cancel_dump_traceback_later()
    torch.save(result, folder / f"{index}.result")


def _run(index, world_size, folder, distributed, killed, fn, args):
    if not distributed:
        return fn(Rank(index, world_size, None), *args)
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=index, world_size=world_size, timeout=timedelta(seconds=60)
    )
    result = fn(Rank(index, world_size, dist.new_group(backend="gloo")), *args)
    if dist.is_initialized():
        if not killed:
            dist.barrier()
        dist.destroy_process_group()
    return result


def _wait(processes, killed, seconds):
    """Waits for all, but not for long once one has failed; kills and returns what is left."""
    deadline = time.monotonic() + seconds
    # Does not wait for the sentinels, because a child that a killed rank leaves behind holds them open.
    pending = {os.pidfd_open(process.pid): rank for rank, process in enumerate(processes)}
    while pending and (left := deadline - time.monotonic()) > 0:
        for ended in multiprocessing.connection.wait(list(pending), left):
            os.close(ended)
            rank = pending.pop(ended)
            processes[rank].join()
            if processes[rank].exitcode and rank not in killed:
                deadline = min(deadline, time.monotonic() + _GRACE)
    for descriptor, rank in pending.items():
        os.close(descriptor)
        processes[rank].kill()
        processes[rank].join()
    return set(pending.values())


def _failure(process, stem, expected):
    if process.exitcode == expected:
        return None
    words = [path.read_text() for path in (stem.with_suffix(".error"), stem.with_suffix(".stacks")) if path.exists()]
    return f"ended with {process.exitcode}\n" + "\n".join(words)


def _load(path):
    return torch.load(path, weights_only=False)
