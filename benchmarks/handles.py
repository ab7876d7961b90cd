"""What a writer for every save costs, as frameworks make them, beside one writer for all saves, and torch's own.

``python -m benchmarks.handles``
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from dcp_tensorizer import TensorizerStorageWriter

from .case import Case, in_ranks
from .harness import Content, cell, quotient, run, run_cases, spread, table, whole
from .pages import Goal, goals, page

_TENSORS, _ELEMENTS = 10, 100_000
_WARM_UP = 4
_HANDLES = 500
_WORLDS = (1, 4)
_KINDS = ("one writer", "a writer for every save", "torch, a writer for every save")


def measure(options: argparse.Namespace, folder: Path) -> Content:
    cases = [{"ranks": world, "saves": options.saves, "folder": str(folder)} for world in _WORLDS]
    results = whole(run_cases(measure_case, cases, 1))
    return {"saves": options.saves, "worlds": {str(r["case"]["ranks"]): r["ranks"][0] for r in results}}


def measure_case(case: Case, folder: Path) -> list[Any]:
    return in_ranks(_saves, case["ranks"], case, folder)


def _saves(case: Case, folder: Path) -> dict[str, Any]:
    """Saves in each way in turn, and times how long each save takes from the call to the commit."""
    state = {f"rank{dist.get_rank()}.w{n}": torch.randn(_ELEMENTS) for n in range(_TENSORS)}
    kept = TensorizerStorageWriter(f"{folder}/ours")
    makers: dict[str, Callable[[], Any]] = {
        _KINDS[0]: lambda: kept,
        _KINDS[1]: lambda: TensorizerStorageWriter(f"{folder}/ours"),
        _KINDS[2]: lambda: FileSystemWriter(f"{folder}/torch"),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for number in range(_WARM_UP + case["saves"]):
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
    kept.close()
    return {"seconds": seconds, "held": held}


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


def render(content: Content) -> str:
    """The page of results."""
    rows: list[list[str]] = []
    wanted: list[Goal] = []
    for world, found in content["worlds"].items():
        spreads = {kind: spread(values) for kind, values in found["seconds"].items()}
        rows.append([world, *(cell(spreads[kind], lambda s: f"{1000 * s:.0f}") for kind in _KINDS)])
        medians = [values["median"] for values in spreads.values() if values is not None]
        more = 1000 * (medians[1] - medians[0])
        wanted.append((f"ms that a writer for every save costs, {world} rank(s)", "<= 10", more))
        torchs = quotient(spreads[_KINDS[1]], spreads[_KINDS[2]])
        wanted.append((f"time of a save by a writer of its own / torch's, {world} rank(s)", "", torchs))
        for name, value in found["held"].items():
            wanted.append((f"{name} that {_HANDLES} more writers leave, {world} rank(s)", "<= 0", value))
    return page(
        content,
        "A writer for every save",
        _WHAT,
        f"{content['saves']} saves of each kind, in turns, after {_WARM_UP} that do not count.",
        "handles",
        table(("ranks", *(f"{kind} (ms)" for kind in _KINDS)), rows),
        goals(wanted, form="{:.2f}".format),
    )


OPTIONS = {"saves": {"type": int, "default": 20, "help": "of each kind, that are measured"}}

if __name__ == "__main__":
    run("handles", measure, render, about=__doc__, options=OPTIONS)
