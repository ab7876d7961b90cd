"""Checks that checkpointers of other libraries, which save by DCP, save and load by this package under ``install()``.

``python -m benchmarks.dcp_users transformers torchtune nemo_automodel``, in an environment that has the libraries.
Training with them need not work there. Each checkpointer saves a model and an optimizer on two ranks of gloo, and loads
them. The loaded values are compared with the saved ones bit for bit.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dcp_tensorizer import install
from dcp_tensorizer._index.container import is_index

_RANKS = 2


def _trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 32))
    fully_shard(model, mesh=init_device_mesh("cpu", (_RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _values(state: Any) -> list[torch.Tensor]:
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    return [leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf.clone() for leaf in leaves]


def _transformers(folder: Path) -> str:
    """Saves the optimizer by `save_optimizer_distributed`, which passes the folder as ``checkpoint_id``."""
    from transformers.distributed.checkpoint import load_optimizer_distributed, save_optimizer_distributed

    model, optimizer = _trained(0)
    save_optimizer_distributed(model, optimizer, str(folder / "optimizer"))
    other_model, other = _trained(1)
    load_optimizer_distributed(other_model, other, str(folder / "optimizer"))
    _compare(optimizer.state_dict(), other.state_dict())
    return "optimizer"


def _torchtune(folder: Path) -> str:
    """Saves model and optimizer asynchronously by `DistributedCheckpointer`, which finds the newest checkpoint."""
    from torchtune.training.checkpointing._checkpointer import DistributedCheckpointer

    model, optimizer = _trained(0)
    checkpointer = DistributedCheckpointer(checkpoint_dir=str(folder), output_dir=str(folder))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    checkpointer.save_checkpoint(state, epoch=1, save_async=True)
    checkpointer._checkpoint_future.result()
    other_model, other = _trained(1)
    loaded = {"model": other_model.state_dict(), "optimizer": other.state_dict()["state"]}
    checkpointer.load_checkpoint(loaded)
    _compare(state, loaded)
    return next(path.name for path in folder.iterdir() if (path / ".metadata").exists())


def _nemo_automodel(folder: Path) -> str:
    """Saves a state by `Checkpointer.save_distributed_state`, which also saves optimizers."""
    from nemo_automodel.components.checkpoint.checkpointing import Checkpointer

    model, optimizer = _trained(0)
    other_model, other = _trained(1)
    checkpointer = Checkpointer.__new__(Checkpointer)  # its constructor requires the configuration of a whole recipe
    checkpointer.process_group = None
    states = [_State(model, optimizer), _State(other_model, other)]
    checkpointer.save_distributed_state(states[0], "state", str(folder))
    checkpointer.load_distributed_state(states[1], "state", str(folder))
    _compare(states[0].state_dict(), states[1].loaded)
    return "state"


class _State:
    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
        self.loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def _compare(saved: Any, loaded: Any) -> None:
    pairs = list(zip(_values(saved), _values(loaded), strict=True))
    assert pairs
    assert all(torch.equal(a, b) for a, b in pairs), "what was loaded is not what was saved"


CASES: dict[str, Callable[[Path], str]] = {
    "transformers": _transformers,
    "torchtune": _torchtune,
    "nemo_automodel": _nemo_automodel,
}


def _rank(rank: int, name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=_RANKS)
    install()
    place = folder / "saved"
    place.mkdir(exist_ok=True)
    dist.barrier()
    checkpoint = place / CASES[name](place)
    if rank == 0:
        ours = is_index((checkpoint / ".metadata").read_bytes()[:64])
        versions = f"{name} {importlib.metadata.version(name)}, torch {torch.__version__}"
        print(f"{versions}: {'this package' if ours else 'torch'} has saved, and what was loaded is what was saved")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=CASES)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in parser.parse_args().names:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, args=(name, Path(folder)), nprocs=_RANKS)


if __name__ == "__main__":
    main()
