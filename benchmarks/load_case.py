"""The cases of the load benchmark: one format, or a resharded load."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter

from .case import Case, in_ranks
from .limits import cached_read_seconds, direct_read_seconds, evict, fill_cache
from .loaders import FORMATS, Load, nested
from .savers import State
from .scale.watch import peak, reset_peak
from .workloads import WORKLOADS, nbytes, sharded

_THREADS = 4


def _whole(case: Case, folder: Path) -> dict[str, Any]:
    """Loads warm and cold, into memory that has been used before, and checks the loaded values.

    All loaders of a format take turns. With ``limits``, so do raw reads of the same files; warm raw reads fill the same
    memory.
    """
    write, loaders = FORMATS[case["format"]]
    state = WORKLOADS[case["workload"]](case["scale"])
    write(state, folder)
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    loads: dict[str, dict[str, Any]] = {}
    for name, load in loaders.items():
        intact = _loads_intact(load, folder, target, state)
        loads[name] = {"intact": intact, "warm": [], "cold": [], "cpu": [], "peak_bytes": []}
    size = nbytes(state)
    del state
    limits: dict[str, list[float]] = {"warm": [], "cold": [], "cold, cached": []}

    def turn(name: str, kind: str) -> None:
        (evict if kind == "cold" else fill_cache)(folder)  # some loaders leave the page cache as it was
        if name not in loaders:
            limits[kind].append(_raw_seconds(kind, folder, target))
            if kind == "cold":
                evict(folder)
                limits["cold, cached"].append(_raw_seconds("cold, cached", folder, target))
            return
        before = reset_peak()
        started, cpu = time.perf_counter(), time.process_time()
        loaders[name](target, folder)
        loads[name][kind].append(time.perf_counter() - started)
        if kind == "cold":
            loads[name]["cpu"].append(time.process_time() - cpu)
        loads[name]["peak_bytes"].append(peak() - before)

    names = [*loaders, *(["raw"] if case["limits"] else [])]
    for kind in ("warm", "cold"):
        for number in range(case[kind]):
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                turn(name, kind)
    return {"bytes": size, "loads": loads, "limits": limits}


def _loads_intact(load: Load, folder: Path, target: State, state: State) -> bool:
    for tensor in target.values():
        tensor.fill_(1)
    loaded = load(target, folder)
    found = target if loaded is None else {key: loaded[key].data for key in state}
    return all(torch.equal(found[k].view(torch.int32), state[k].view(torch.int32)) for k in state)


def _raw_seconds(kind: str, folder: Path, target: State) -> float:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    if kind == "cold":
        return sum(direct_read_seconds(path, path.stat().st_size, _THREADS) for path in files)
    memory = [tensor.view(torch.uint8).view(-1).numpy().data for tensor in target.values()]
    return cached_read_seconds(files, memory, _THREADS)


def _save_shards(case: Case, folder: Path) -> None:
    path = str(folder / "checkpoint")
    state = sharded(WORKLOADS[case["workload"]](case["scale"]), case["saved"][1])
    with TensorizerStorageWriter() as writer:
        other = FileSystemWriter(path)
        dcp.save(nested(state), storage_writer=writer if _is_ours(case) else other, checkpoint_id=path)


def _load_shards(case: Case, folder: Path) -> dict[str, Any]:
    path = str(folder / "checkpoint")
    state = sharded(WORKLOADS[case["workload"]](case["scale"]), case["loaded"][1], blank=True)
    needed = sum(tensor.to_local().nbytes for tensor in state.values())
    mine: dict[str, dict[str, Any]] = {loader: {"warm": [], "needed": needed} for loader in case["loaders"]}
    for number in range(case["warm"] + 1):
        for loader, measured in mine.items():
            moved: list[int] = []
            reader: Any = FileSystemReader(path)
            if _is_ours(case):
                verify = "verify=False" not in loader
                reader = TensorizerStorageReader(path, verify=verify, on_progress=_keep_total(moved))
            if dist.get_rank() == 0:
                fill_cache(Path(path))
            dist.barrier()
            started = time.perf_counter()
            dcp.load(nested(state), storage_reader=reader)
            measured["moved"] = moved[0] if moved else 0
            if number:  # the first one allocates
                measured["warm"].append(time.perf_counter() - started)
    return mine


def _is_ours(case: Case) -> bool:
    return bool(case["loaders"][0].startswith("dcp_tensorizer"))


def _keep_total(totals: list[int]) -> Callable[[int, int], None]:
    """Returns a callback for progress that stores the last total: before the first read, the total is an estimate."""

    def keep(done: int, total: int) -> None:
        totals[:] = [total]

    return keep


def measure(case: Case, folder: Path) -> list[Any]:
    if "saved" not in case:
        return [_whole(case, folder / "checkpoint")]
    in_ranks(_save_shards, case["saved"][0], case, folder)
    return in_ranks(_load_shards, case["loaded"][0], case, folder)
