"""The cost of a save in training frameworks: by this package, and by the framework itself.

``.venv-frameworks/bin/python -m benchmarks.frameworks``, after ``make frameworks`` has made that environment.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from .case import Case, in_ranks
from .harness import Content, Spread, cell, quotient, run, run_cases, spread, table
from .pages import Goal, glossary, goals, page, round_count

WORLD = 2
_WIDTH = 2048


class Accelerate:
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
        """Does nothing: `save` has waited."""


class Fabric:
    def __init__(self, ours: bool, layers: int) -> None:
        import lightning.fabric
        from lightning.fabric.strategies import ModelParallelStrategy

        from dcp_tensorizer.integrations.lightning import TensorizerFabricStrategy

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
    """torchtitan's CheckpointManager, or this package's, with ``async_mode="async"``."""

    def __init__(self, ours: bool, layers: int) -> None:
        from torchtitan.components.checkpointer import CheckpointManager
        from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

        from dcp_tensorizer.integrations.torchtitan import TensorizerCheckpointManager

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


class TorchCheckpointing:
    """This package's manager for torch_checkpointing, or ``dcp.async_save`` of the same state."""

    def __init__(self, ours: bool, layers: int) -> None:
        from torch_checkpointing import ItemSpec
        from torch_checkpointing.default_resharder import DefaultResharder

        from dcp_tensorizer import SavePlanner, TensorizerStorageReader, TensorizerStorageWriter
        from dcp_tensorizer.integrations.torch_checkpointing import TensorizerCheckpointManager

        dist.init_process_group("gloo")
        self.model = fully_shard(make_model(layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self._future: Future[Any] | None = None
        if ours:
            manager = TensorizerCheckpointManager.Config(
                items={"state": ItemSpec(resharder=DefaultResharder())}
            ).build()
            self._save: Callable[[str, dict[str, Any]], Any] = manager.save
            self._load: Callable[[str, dict[str, Any]], object] = lambda path, state: manager.load(path, into=state)
        else:
            writer, group = TensorizerStorageWriter(), dist.new_group(backend="gloo")
            self._save = lambda path, state: dcp.async_save(
                state, checkpoint_id=path, storage_writer=writer, planner=SavePlanner(), process_group=group
            )
            self._load = lambda path, state: dcp.load(state, storage_reader=TensorizerStorageReader(path))

    def save(self, path: Path) -> None:
        self._future = self._save(str(path), self._state())

    def wait(self) -> None:
        assert self._future is not None
        self._future.result()

    def load(self, path: Path) -> None:
        state = self._state()
        self._load(str(path), state)
        model, optimizer = state["state"].values()
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"state": {"model": model, "optimizer": optimizer}}


FRAMEWORKS = {
    "accelerate": Accelerate,
    "lightning": Fabric,
    "torchtitan": Torchtitan,
    "torch_checkpointing": TorchCheckpointing,
}


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
    for parameter in job.model.parameters():
        parameter.grad = torch.rand_like(parameter)
    job.optimizer.step()
    job.optimizer.zero_grad()


def digest(job: Any) -> str:
    """Returns the SHA-256 of this rank's shards of model and optimizer, by key."""
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


def _times(job: Any, folder: Path, saves: int) -> dict[str, Any]:
    """Returns the seconds that training waited for each save, and until it was durable, without the first save.

    Then changes the state, loads it, and compares it with the saved one bit for bit.
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


def _train(case: Case, folder: Path) -> dict[str, Any]:
    os.dup2(2, 1)  # frameworks print; the results do not go this way
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    job = FRAMEWORKS[case["framework"]](case["ours"], case["layers"])
    return _times(job, folder, case["saves"])


def measure_case(case: Case, folder: Path) -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        "LOCAL_WORLD_SIZE": str(WORLD),
        "GROUP_RANK": "0",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
    }
    return in_ranks(_train, WORLD, case, folder, environment=environment, group=False)


# --- the page ---------------------------------------------------------------------------------------------------------

_LINES = {
    "accelerate": ("`install()`", 2),
    "lightning": ("`TensorizerFabricStrategy`", 2),
    "torchtitan": ("`TensorizerCheckpointManager.Config`", 2),
    "torch_checkpointing": ("`TensorizerCheckpointManager.Config`", 2),
}
_OWN = {
    "accelerate": "`save_state` under FSDP2, which calls `dcp.save` and waits",
    "lightning": "`Fabric.save` with `ModelParallelStrategy`, which calls `dcp.save` and waits",
    "torchtitan": '`CheckpointManager` with `async_mode="async"`, which calls `dcp.async_save`',
    "torch_checkpointing": "this package's writer with `dcp.async_save`, for the same state: what its manager adds. "
    "torch_checkpointing's own way is on the [page of saves](save.md)",
}
_BY_DCP = {"torch_checkpointing": "this package by DCP"}
"""The reference of a comparison, if it is not the framework itself."""
_WITHIN = {"torch_checkpointing": "<= 1.1"}
_WHAT = (
    "two ranks on the CPU train a model of {layers} layers with AdamW, {gigabytes:.2f} GB in all. They save each step. "
    "torchtitan's manager runs without torchtitan's trainer, which needs a GPU."
)


def measure(options: argparse.Namespace, folder: Path) -> Content:
    setup = {"saves": options.saves, "layers": options.layers, "folder": str(folder)}
    names = [options.only] if options.only else list(_LINES)
    cases = [{"framework": name, "ours": ours, **setup} for name in names for ours in (True, False)]
    versions = {name: version(name) for name in names}
    results = run_cases(measure_case, cases, options.rounds)
    return {"versions": versions, "layers": options.layers, "results": results}


def render(content: Content) -> str:
    results = content["results"]
    rows: list[tuple[str, ...]] = []
    wanted: list[Goal] = []
    for name in content["versions"]:
        what, lines = _LINES[name]
        ways = {
            ours: [r for r in results if (r["case"]["framework"], r["case"]["ours"]) == (name, ours)]
            for ours in (True, False)
        }
        title = f"{name} {content['versions'][name]}"
        rows.append((title, f"this package: {what}", str(lines), *_measured(ways[True])))
        other = _BY_DCP.get(name, "its own")
        rows.append((title, other, "-", *_measured(ways[False])))
        for key, words in (("stalls", "training waits"), ("durable", "durable after")):
            ratio = quotient(_slowest(ways[True], key), _slowest(ways[False], key))
            wanted.append((f"{name}: {words}, this package / {other}", _WITHIN.get(name, ""), ratio))
    nbytes = [sum(rank["nbytes"] for rank in r["ranks"]) for r in results if "ranks" in r]
    return page(
        content,
        "Frameworks",
        _WHAT.format(layers=content["layers"], gigabytes=max(nbytes, default=0) / 1e9),
        f"{round_count(results)} rounds, each with one process of every kind.",
        "frameworks",
        glossary("What is compared with", {name: _OWN[name] for name in content["versions"]}),
        table(
            ("framework", "way", "lines to write", "training waits (s)", "durable after (s)", "resumed bit for bit"),
            rows,
        ),
        goals(wanted),
    )


def _slowest(results: list[dict[str, Any]], key: str) -> Spread | None:
    """Returns the times of the slowest rank of each save."""
    ranks = [result["ranks"] for result in results if "ranks" in result]
    return spread(max(times) for found in ranks for times in zip(*(rank[key] for rank in found), strict=True))


def _measured(results: list[dict[str, Any]]) -> Iterable[str]:
    yield cell(_slowest(results, "stalls"), "{:.3f}".format)
    yield cell(_slowest(results, "durable"), "{:.3f}".format)
    ranks = [result["ranks"] for result in results if "ranks" in result]
    failed = [result["error"] for result in results if "error" in result]
    equal = bool(ranks) and all(rank["equal"] for found in ranks for rank in found)
    yield f"failed: {failed[0]}" if failed else "yes" if equal else "no"


OPTIONS = {
    "only": {"choices": FRAMEWORKS, "help": "one of them"},
    "rounds": {"type": int, "default": 5},
    "saves": {"type": int, "default": 3, "help": "saves that are measured, in each round"},
    "layers": {"type": int, "default": 8, "help": "of 16.8 MB each; AdamW's state takes twice as much in addition"},
}

if __name__ == "__main__":
    run("frameworks", measure, render, about=__doc__, options=OPTIONS)
