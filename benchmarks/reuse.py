"""What a save costs that does not write again what has not changed: frozen weights, and an adapter that is trained.

``python -m benchmarks.reuse``: ``--base`` and ``--adapter`` give other sizes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash

from dcp_tensorizer import SaveLimits, TensorizerStorageWriter

from .case import Case, in_ranks
from .harness import Content, cell, quotient, run, run_cases, spread, table, whole
from .pages import Goal, goals, page

_MIB = 1 << 20
_WORLDS = (1, 2)
_BASE_TENSORS, _ADAPTER_TENSORS = 64, 32
_WARM_UP = 3  # the first that reuses is the third
_NEVER = 1_000_000
_THREADS = 2
_KINDS = ("reuse_unchanged", "everything is written")


def measure(options: argparse.Namespace, folder: Path) -> Content:
    setup = {"saves": options.saves, "base": options.base, "adapter": options.adapter}
    cases = [{"ranks": world, **setup, "folder": str(folder)} for world in _WORLDS]
    results = whole(run_cases(measure_case, cases, 1))
    return {**setup, "worlds": {str(r["case"]["ranks"]): r["ranks"][0] for r in results}}


def measure_case(case: Case, folder: Path) -> list[Any]:
    return in_ranks(_saves, case["ranks"], case, folder, environment={"LOCAL_WORLD_SIZE": str(case["ranks"])})


def _saves(case: Case, folder: Path) -> dict[str, Any]:
    """Saves in both ways in turn, each to directories of its own, of which the last one stays."""
    rank, world = dist.get_rank(), case["ranks"]
    frozen = _tensors(f"rank{rank}.base", _BASE_TENSORS, case["base"] * _MIB // world)
    trained = _tensors(f"rank{rank}.adapter", _ADAPTER_TENSORS, case["adapter"] * _MIB // world)
    limits = SaveLimits(max_reuses=_NEVER)
    writers = {kind: TensorizerStorageWriter(reuse_unchanged=kind == _KINDS[0], limits=limits) for kind in _KINDS}
    found: dict[str, Any] = {kind: {"seconds": [], "bytes": [], "staging": []} for kind in _KINDS}
    for number in range(_WARM_UP + case["saves"]):
        for tensor in trained.values():
            tensor.add_(1)
        for kind in _KINDS if number % 2 else _KINDS[::-1]:
            path = Path(folder, f"{_KINDS.index(kind)}-{number}")
            dist.barrier()
            started = time.perf_counter()
            writer = writers[kind]
            dcp.async_save(frozen | trained, storage_writer=writer, checkpoint_id=path).result()
            seconds = time.perf_counter() - started
            dist.barrier()
            if rank == 0:
                shutil.rmtree(Path(folder, f"{_KINDS.index(kind)}-{number - 1}"), ignore_errors=True)
            if rank == 0 and number >= _WARM_UP:
                assert writer.last_report is not None
                found[kind]["seconds"].append(seconds)
                found[kind]["staging"].append(writer.last_report.stage_seconds)
                found[kind]["bytes"].append(sum(_new_bytes(file) for file in path.iterdir()))
            dist.barrier()
    found["digests"] = [_digest_seconds(frozen | trained) for _ in range(5)]
    for writer in writers.values():
        writer.close()
    return found


def _tensors(name: str, count: int, nbytes: int) -> dict[str, torch.Tensor]:
    return {f"{name}.{n}": torch.rand(nbytes // count // 4) for n in range(count)}


def _new_bytes(file: Path) -> int:
    """The bytes of a file that this save has written: those of a linked one are older than their name."""
    state = file.stat()
    return 0 if not state.st_mode & 0o200 else state.st_size


def _digest_seconds(state: dict[str, torch.Tensor]) -> float:
    """What XXH3-128 of all tensors takes, with as many threads as a save has."""

    def digest(tensor: torch.Tensor) -> None:
        xxhash.xxh3_128(tensor.numpy()).digest()

    started = time.perf_counter()
    with ThreadPoolExecutor(max(1, _THREADS // int(os.environ["LOCAL_WORLD_SIZE"]))) as pool:
        list(pool.map(digest, state.values()))
    return time.perf_counter() - started


def _what(content: dict[str, Any]) -> str:
    return (
        f"asynchronous saves of {content['base']} MiB that stay as they are and {content['adapter']} MiB that change "
        f"before each save, of all ranks together, from the call to the commit. Each goes to a new directory, and the "
        f"one before is deleted. Files are reused without a limit."
    )


def render(content: dict[str, Any]) -> str:
    """The page of results."""
    rows: list[list[str]] = []
    wanted: list[Goal] = []
    for world, found in content["worlds"].items():
        ranks = f"{world} rank(s)"
        seconds = {kind: spread(found[kind]["seconds"]) for kind in _KINDS}
        written = {kind: spread(found[kind]["bytes"]) for kind in _KINDS}
        staging, digests = spread(found[_KINDS[0]]["staging"]), spread(found["digests"])
        for kind in _KINDS:
            cells = (cell(seconds[kind], "{:.3f}".format), cell(written[kind], lambda n: f"{n / _MIB:.1f}"))
            rows.append([world, kind, *cells, cell(spread(found[kind]["staging"]), "{:.3f}".format)])
        ours, all_written, least = seconds[_KINDS[0]], seconds[_KINDS[1]], written[_KINDS[0]]
        assert ours and least and staging and digests
        more = (least["median"] / _MIB - content["adapter"]) / int(world)
        limit = staging["median"] + digests["median"] + 0.1
        ratio = quotient(ours, all_written)
        wanted.append((f"time / time of a save that writes everything, {ranks}", "<= 0.15", ratio))
        wanted.append((f"or: seconds, {ranks}", f"<= {limit:.3f}", ours))
        wanted.append((f"MiB a rank written beyond what has changed, {ranks}", "<= 0.5", more))
        wanted.append((f"seconds of XXH3-128 of everything, {ranks}", "", digests["median"]))
    note = (
        "The second goal is the sum of the staging copy, of XXH3-128 of everything, and of 0.1 s: a save has to copy "
        "and to look at what it does not write. With the default `SaveLimits(max_reuses=10)` every eleventh save "
        "writes everything."
    )
    return page(
        content,
        "Only what has changed",
        _what(content),
        f"{content['saves']} saves of each kind, in turns, after {_WARM_UP} that do not count.",
        "reuse",
        table(("ranks", "saves", "durable after (s)", "MiB written", "of that staging (s)"), rows),
        goals(wanted, note),
    )


OPTIONS = {
    "saves": {"type": int, "default": 10, "help": "of each kind, that are measured"},
    "base": {"type": int, "default": 1024, "help": "MiB of all ranks that do not change"},
    "adapter": {"type": int, "default": 16, "help": "MiB of all ranks that change"},
}

if __name__ == "__main__":
    run("reuse", measure, render, about=__doc__, options=OPTIONS)
