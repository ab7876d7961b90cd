"""What a writer for every save costs, as frameworks make them, beside one writer for all saves, and torch's own.

``python -m benchmarks.handles``, with ``--folder`` on the file system to be measured. ``--redraw`` makes the page again
from the stored results, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint import FileSystemWriter

from dcp_tensorizer import TensorizerStorageWriter

from .harness import cell, machine, rewrite, spread, store, stored, table
from .pages import goals, opening

_TENSORS, _ELEMENTS = 10, 100_000
_WARM_UP = 4
_HANDLES = 500
_KINDS = ("one writer", "a writer for every save", "torch, a writer for every save")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=20, help="of each kind, that are measured")
    parser.add_argument("--folder", default=None, help="where to put the checkpoints")
    parser.add_argument("--redraw", action="store_true", help="from the stored results, without measuring")
    options = parser.parse_args()
    if options.redraw:
        rewrite("handles", render(stored("handles")))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        worlds = {world: _measure(Path(folder), world, options.saves) for world in (1, 4)}
        content = {"machine": machine(folder), "saves": options.saves, "worlds": worlds}
    store("handles", content, render(content))


def _measure(folder: Path, world: int, saves: int) -> dict[str, Any]:
    place = folder / str(world)
    place.mkdir()
    mp.spawn(_rank, (world, str(place), saves), nprocs=world)
    result: dict[str, Any] = json.loads((place / "result.json").read_text())
    return result


def _rank(rank: int, world: int, folder: str, saves: int) -> None:
    """Saves in each way in turn, and times how long each save takes from the call to the commit."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    state = {f"rank{rank}.w{n}": torch.randn(_ELEMENTS) for n in range(_TENSORS)}
    kept = TensorizerStorageWriter(f"{folder}/ours")
    makers: dict[str, Callable[[], Any]] = {
        _KINDS[0]: lambda: kept,
        _KINDS[1]: lambda: TensorizerStorageWriter(f"{folder}/ours"),
        _KINDS[2]: lambda: FileSystemWriter(f"{folder}/torch"),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for number in range(_WARM_UP + saves):
        for kind in (*_KINDS[number % 3 :], *_KINDS[: number % 3]):
            dist.barrier()
            started = time.perf_counter()
            dcp.async_save(state, storage_writer=makers[kind]()).result()
            if number >= _WARM_UP:
                seconds[kind].append(time.perf_counter() - started)
    before = _held()
    writers = [TensorizerStorageWriter(f"{folder}/ours") for _ in range(_HANDLES)]
    for writer in writers[:_WARM_UP]:
        dcp.async_save(state, storage_writer=writer).result()
    held = {name: value - before[name] for name, value in _held().items()}
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps({"seconds": seconds, "held": held}))
    kept.close()
    dist.barrier()
    dist.destroy_process_group()


def _held() -> dict[str, int]:
    """What this process has: children, descriptors, bytes of shared memory."""
    process = psutil.Process()
    mapped = sum(m.size for m in process.memory_maps() if "memfd:dcp_tensorizer" in m.path)
    return {
        "processes": len(process.children()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "bytes of staging buffers": mapped,
    }


_WHAT = (
    f"how long an asynchronous save of {_TENSORS * _ELEMENTS * 4 / 1e6:.0f} MB a rank takes, from the call to the "
    f"commit: by one writer for all saves, by a new one for every save that nobody closes, and by a new one of torch's."
)


def render(content: dict[str, Any]) -> str:
    """The page of results."""
    rows, wanted = [], []
    for world, found in content["worlds"].items():
        spreads = {kind: spread(values) for kind, values in found["seconds"].items()}
        rows.append([str(world), *(cell(spreads[kind], lambda s: f"{1000 * s:.0f}") for kind in _KINDS)])
        medians = [values["median"] for values in spreads.values() if values is not None]
        more = 1000 * (medians[1] - medians[0])
        wanted.append((f"ms that a writer for every save costs, {world} rank(s)", "<= 10", f"{more:.1f}"))
        for name, value in found["held"].items():
            wanted.append((f"{name} that {_HANDLES} more writers leave, {world} rank(s)", "<= 0", f"{value}"))
    how_often = f"{content['saves']} saves of each kind, in turns, after {_WARM_UP} that do not count."
    return "\n\n".join(
        [
            opening("A writer for every save", content["machine"], _WHAT, how_often, "handles"),
            table(("ranks", *(f"{kind} (ms)" for kind in _KINDS)), rows),
            goals(wanted),
        ]
    )


if __name__ == "__main__":
    main()
