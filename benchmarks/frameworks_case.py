"""One framework, with this package or in its own way: saves while it trains, then loads what it has saved last.

``python -m benchmarks.frameworks_case '{"framework": ..., "ours": ..., "saves": ..., "layers": ..., "folder": ...}'``
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from .ranks import leave_results, left_results

WORLD = 2
_WIDTH = 2048


class Accelerate:
    """`Accelerator.save_state` and `load_state` with FSDP2."""

    def __init__(self, ours: bool, layers: int) -> None:
        from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState

        from dcp_tensorizer import install

        if ours:
            install()
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU  # else it does not shard on the CPU
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1, state_dict_type="SHARDED_STATE_DICT"
        )
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = make_model(layers)
        self.model, optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        self.optimizer = optimizer.optimizer
        self.save: Callable[[Path], object] = self.accelerator.save_state
        self.load: Callable[[Path], object] = self.accelerator.load_state

    def wait(self) -> None:
        """It has waited in `save`."""


class Fabric:
    """`Fabric.save` and `load`, by its ModelParallelStrategy or by ours."""

    def __init__(self, ours: bool, layers: int) -> None:
        import lightning.fabric
        from lightning.fabric.strategies import ModelParallelStrategy

        from dcp_tensorizer.lightning import TensorizerFabricStrategy

        kind = TensorizerFabricStrategy if ours else ModelParallelStrategy
        strategy = kind(_parallelize, data_parallel_size=WORLD, tensor_parallel_size=1)
        self.fabric = lightning.fabric.Fabric(accelerator="cpu", devices=WORLD, strategy=strategy)
        self.fabric.launch()
        wrapped = self.fabric.setup_module(make_model(layers))
        prepared = self.fabric.setup_optimizers(torch.optim.AdamW(wrapped.parameters()))
        self.model, self.optimizer = wrapped.module, prepared.optimizer
        self.state = {"model": wrapped, "optimizer": prepared}
        self.wait = strategy.wait_for_save if ours else lambda: None

    def save(self, path: Path) -> None:
        self.fabric.save(path, self.state)

    def load(self, path: Path) -> None:
        self.fabric.load(path, self.state)


class Torchtitan:
    """torchtitan's CheckpointManager, or ours, with ``async_mode="async"``."""

    def __init__(self, ours: bool, layers: int) -> None:
        from torchtitan.components.checkpointer import CheckpointManager
        from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

        from dcp_tensorizer.torchtitan import TensorizerCheckpointManager

        dist.init_process_group("gloo")
        self.model = fully_shard(make_model(layers))
        group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.001})
        config = OptimizersContainer.Config(param_groups=[group], implementation="foreach")
        optimizers = config.build(model_parts=[self.model])
        (self.optimizer,) = optimizers.optimizers
        manager = TensorizerCheckpointManager if ours else CheckpointManager
        options = {"interval": 1, "async_mode": "async", "last_save_model_only": False, "keep_latest_k": 0}
        self.manager = manager.Config(enable=True, folder="steps", **options).build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=optimizers,
            lr_schedulers=_Nothing(),
            states={},
            sd_adapter=None,
            base_folder="",
        )
        self.manager.exclude_from_loading = ["dataloader"]
        self.wait = self.manager.maybe_wait_for_saving

    def save(self, path: Path) -> None:
        self.manager.folder = str(path.parent)
        self.manager.save(int(path.name.partition("-")[2]))

    def load(self, path: Path) -> None:
        self.manager.folder = str(path.parent)
        self.manager.load(int(path.name.partition("-")[2]))


FRAMEWORKS = {"accelerate": Accelerate, "lightning": Fabric, "torchtitan": Torchtitan}


class _Nothing:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def make_model(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))


def _parallelize(model: nn.Module, mesh: Any) -> nn.Module:
    return fully_shard(model, mesh=mesh["data_parallel"])


def train(job: Any) -> None:
    """One step with gradients that are made up."""
    for parameter in job.model.parameters():
        parameter.grad = torch.rand_like(parameter)
    job.optimizer.step()
    job.optimizer.zero_grad()


def digest(job: Any) -> str:
    """SHA-256 of this rank's shards of model and optimizer, by key."""
    found = hashlib.sha256()
    for state in get_state_dict(job.model, job.optimizer):
        _digest(state, found)
    return found.hexdigest()


def _digest(value: Any, found: Any) -> None:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            found.update(str(key).encode())
            _digest(value[key], found)
    elif isinstance(value, torch.Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        found.update(local.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def measure(job: Any, folder: Path, saves: int) -> dict[str, Any]:
    """Seconds that training waited for each save, and until it was durable; the first save is not counted.

    Then the state is changed, and loaded again: is it what was saved, bit for bit?
    """
    stalls, durable = [], []
    for number in range(1, saves + 2):
        train(job)
        dist.barrier()
        started = time.perf_counter()
        job.save(folder / f"step-{number}")
        stalls.append(time.perf_counter() - started)
        job.wait()
        dist.barrier()
        durable.append(time.perf_counter() - started)
    saved = digest(job)
    train(job)
    changed = digest(job) != saved
    job.load(folder / f"step-{saves + 1}")
    equal = changed and digest(job) == saved
    nbytes = 3 * sum(parameter.to_local().nbytes for parameter in job.model.parameters())  # with AdamW's moments
    return {"stalls": stalls[1:], "durable": durable[1:], "equal": equal, "nbytes": nbytes}


def _rank(rank: int, case: dict[str, Any], folder: str, port: int) -> None:
    os.dup2(2, 1)  # frameworks print; the results do not go this way
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "LOCAL_WORLD_SIZE": str(WORLD),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
    }
    job = FRAMEWORKS[case["framework"]](case["ours"], case["layers"])
    mine = measure(job, Path(folder), case["saves"])
    leave_results(folder, mine)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    case = json.loads(sys.argv[1])
    os.environ["OMP_NUM_THREADS"] = "1"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(dir=case["folder"]) as folder:
        mp.spawn(_rank, args=(case, folder, port), nprocs=WORLD)
        print(left_results(folder))


if __name__ == "__main__":
    main()
