"""One contender of the load benchmark, in a process of its own: prints its measurements as one line of JSON."""

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
from .loaders import LOADERS, quiet
from .workloads import WORKLOADS, nbytes

_THREADS = 4


def measure(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Loads warm and cold, into memory that has been used before, and checks what was loaded.

    With ``limits``, each load is preceded by raw reads of the same files, into the same memory where they are warm.
    """
    write, load = LOADERS[case["loader"]]
    state = WORKLOADS[case["workload"]](case["scale"])
    write(state, folder)
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    for tensor in target.values():
        tensor.fill_(1)
    loaded = load(target, folder)
    checked = target if loaded is None else {key: loaded[key].data for key in state}
    intact = all(torch.equal(checked[k].view(torch.int32), state[k].view(torch.int32)) for k in state)
    del loaded, checked
    size = nbytes(state)
    del state
    result: dict[str, Any] = {
        "bytes": size,
        "intact": intact,
        "warm": [],
        "cold": [],
        "peak_bytes": [],
        "preadv": [],
        "direct": [],
    }
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    for kind, count in (("warm", case["warm"]), ("cold", case["cold"])):
        prepare = evict if kind == "cold" else fill_cache  # a reader that goes past the page cache leaves it as it was
        for _ in range(count):
            if case.get("limits"):
                prepare(folder)
                if kind == "cold":
                    seconds = sum(direct_read_seconds(path, path.stat().st_size, _THREADS) for path in files)
                    result["direct"].append(seconds)
                else:
                    memory = [tensor.view(torch.uint8).view(-1).numpy().data for tensor in target.values()]
                    result["preadv"].append(cached_read_seconds(files, memory, _THREADS))
            prepare(folder)
            before = _reset_peak()
            started = time.perf_counter()
            load(target, folder)
            result[kind].append(time.perf_counter() - started)
            result["peak_bytes"].append(_peak() - before)
    return result


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
    ours = case["loader"].startswith("dcp_tensorizer")
    full = WORKLOADS[case["workload"]](case["scale"])
    if part == "saved":
        state = {key: distribute_tensor(full.pop(key), mesh, [Shard(dim)]) for key in list(full)}
        with TensorizerStorageWriter() as writer:
            dcp.save(state, storage_writer=writer if ours else FileSystemWriter(path), checkpoint_id=path)
    else:
        state = {key: zeros(full.pop(key).shape, device_mesh=mesh, placements=[Shard(dim)]) for key in list(full)}
        results = []
        for _ in range(case["warm"] + 1):
            moved: list[int] = []
            reader: Any = FileSystemReader(path)
            if ours:
                verify = "verify=False" not in case["loader"]
                reader = TensorizerStorageReader(path, verify=verify, on_progress=_keep_total(moved))
            dist.barrier()
            started = time.perf_counter()
            dcp.load(state, storage_reader=reader)
            results.append(time.perf_counter() - started)
        needed = sum(tensor.to_local().nbytes for tensor in state.values())
        mine = {"warm": results[1:], "moved": moved[0] if moved else 0, "needed": needed}
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, mine)
        if rank == 0:
            (Path(folder) / "result.json").write_text(json.dumps(gathered))
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
            print((Path(folder) / "result.json").read_text())
        else:
            print(json.dumps([measure(case, Path(folder) / "checkpoint")]))


if __name__ == "__main__":
    main()
