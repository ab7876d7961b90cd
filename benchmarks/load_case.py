"""One format of the load benchmark, in a process of its own: prints its measurements as one line of JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor, zeros

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter

from .limits import cached_read_seconds, direct_read_seconds, evict, fill_cache
from .loaders import FORMATS, Load, State, nested, quiet
from .ranks import leave_results, left_results
from .workloads import WORKLOADS, nbytes

_THREADS = 4


def measure(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Loads warm and cold, into memory that has been used before, and checks what was loaded.

    All who load one format take turns. With ``limits``, so do raw reads of the same files, into the same memory where
    they are warm.
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
        (evict if kind == "cold" else fill_cache)(folder)  # some leave the page cache as it was
        if name not in loaders:
            limits[kind].append(_raw_seconds(kind, folder, target))
            if kind == "cold":
                evict(folder)
                limits["cold, cached"].append(_raw_seconds("cold, cached", folder, target))
            return
        before = _reset_peak()
        started, cpu = time.perf_counter(), time.process_time()
        loaders[name](target, folder)
        loads[name][kind].append(time.perf_counter() - started)
        if kind == "cold":
            loads[name]["cpu"].append(time.process_time() - cpu)
        loads[name]["peak_bytes"].append(_peak() - before)

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


def _reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def _reshard_rank(rank: int, case: dict[str, Any], folder: str, part: str) -> None:
    quiet()
    world, dim = case[part]
    dist.init_process_group("gloo", init_method=f"file://{folder}/{part}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (world,))
    path = f"{folder}/checkpoint"
    ours = case["loaders"][0].startswith("dcp_tensorizer")
    full = WORKLOADS[case["workload"]](case["scale"])
    if part == "saved":
        state = {key: distribute_tensor(full.pop(key), mesh, [Shard(dim)]) for key in list(full)}
        with TensorizerStorageWriter() as writer:
            dcp.save(nested(state), storage_writer=writer if ours else FileSystemWriter(path), checkpoint_id=path)
    else:
        state = {key: zeros(full.pop(key).shape, device_mesh=mesh, placements=[Shard(dim)]) for key in list(full)}
        needed = sum(tensor.to_local().nbytes for tensor in state.values())
        mine: dict[str, dict[str, Any]] = {loader: {"warm": [], "needed": needed} for loader in case["loaders"]}
        for number in range(case["warm"] + 1):
            for loader, measured in mine.items():
                moved: list[int] = []
                reader: Any = FileSystemReader(path)
                if ours:
                    verify = "verify=False" not in loader
                    reader = TensorizerStorageReader(path, verify=verify, on_progress=_keep_total(moved))
                if rank == 0:
                    fill_cache(Path(path))
                dist.barrier()
                started = time.perf_counter()
                dcp.load(nested(state), storage_reader=reader)
                measured["moved"] = moved[0] if moved else 0
                if number:  # the first one allocates
                    measured["warm"].append(time.perf_counter() - started)
        leave_results(folder, mine)
    dist.barrier()
    dist.destroy_process_group()


def _keep_total(totals: list[int]) -> Callable[[int, int], None]:
    return lambda done, total: totals.append(total) if not totals else None


def main() -> None:
    case = json.loads(sys.argv[1])
    quiet()
    with tempfile.TemporaryDirectory(dir=case["folder"]) as folder:
        if "saved" in case:
            os.environ["OMP_NUM_THREADS"] = "1"
            for part in ("saved", "loaded"):
                mp.spawn(_reshard_rank, args=(case, folder, part), nprocs=case[part][0])
            print(left_results(folder))
        else:
            print(json.dumps([measure(case, Path(folder) / "checkpoint")]))


if __name__ == "__main__":
    main()
