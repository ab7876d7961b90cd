"""A workload shaped like MLPerf Storage's checkpointing, smaller: `python -m benchmarks.mlperf` (about 8 minutes).

Each of eight ranks writes its part of a model and its optimizer ten times, each time with an fsync. Then the ranks read
all ten checkpoints from a cold disk. This is not a result of MLPerf: the model is cut down to 0.5 GB a rank.
"""

from __future__ import annotations

import argparse
import os
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
from .harness import Content, cell, figure, quotient, rates, run, run_cases, spread, table
from .limits import evict
from .pages import Goal, glossary, goals, page
from .savers import State

_HALVES = 195  # fp16 parameters of a rank
_FLOATS = 3  # and, in fp32: their master copy and the two moments of Adam, flat
_BYTES_EACH = 2 + 4 * _FLOATS  # for a parameter


class _Dcp:
    def __init__(self, writer: Callable[..., Any], reader: Callable[..., Any]) -> None:
        self._writer, self._reader = writer, reader

    def save(self, state: State, folder: Path) -> None:
        dcp.save(state, storage_writer=self._writer(folder))

    def load(self, state: State, folder: Path) -> None:
        dcp.load(state, storage_reader=self._reader(folder))


class _TorchSave:
    """A file per rank, as MLPerf Storage writes it: `torch.save` and an fsync."""

    def save(self, state: State, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        with open(folder / f"rank-{dist.get_rank()}.pt", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, state: State, folder: Path) -> None:
        loaded = torch.load(folder / f"rank-{dist.get_rank()}.pt")
        for key, tensor in state.items():
            tensor.copy_(loaded[key])


CONTENDERS: dict[str, Callable[[], Any]] = {
    "dcp_tensorizer": lambda: _Dcp(TensorizerStorageWriter, TensorizerStorageReader),
    "torch FileSystemWriter, dcp.save": lambda: _Dcp(FileSystemWriter, FileSystemReader),
    "torch.save and fsync": _TorchSave,
}


def make_state(rank: int, nbytes: int) -> State:
    parameters = nbytes // _BYTES_EACH
    generator = torch.Generator().manual_seed(rank)
    state = {
        f"rank{rank}.{name}": torch.rand(parameters, generator=generator) for name in ("master", "exp_avg", "variance")
    }
    each = parameters // _HALVES
    halves = state[f"rank{rank}.master"].half()
    return state | {f"rank{rank}.layer{n}": halves[n * each : (n + 1) * each].clone() for n in range(_HALVES)}


def _times(case: Case, folder: Path) -> dict[str, Any]:
    """The slowest rank counts: each time ends with a barrier."""
    rank = dist.get_rank()
    contender = CONTENDERS[case["contender"]]()
    state = make_state(rank, case["rank_bytes"])
    folders = [folder / f"write-{number}" for number in range(case["times"])]
    writes = [_timed(lambda where=where: contender.save(state, where)) for where in folders]
    wanted = {key: tensor.clone() for key, tensor in list(state.items())[-2:]}
    reads = []
    for where in folders:
        for tensor in state.values():
            tensor.zero_()
        if rank == 0:
            evict(folder)  # also the files of earlier loads: to reclaim their pages would take time of this load
        reads.append(_timed(lambda where=where: contender.load(state, where)))
    intact = all(torch.equal(state[key], tensor) for key, tensor in wanted.items())
    return {"writes": writes, "reads": reads, "intact": intact, "bytes": sum(t.nbytes for t in state.values())}


def _timed(action: Callable[[], None]) -> float:
    dist.barrier()
    started = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - started


def measure_case(case: Case, folder: Path) -> list[Any]:
    return in_ranks(_times, case["ranks"], case, folder, environment={"LOCAL_WORLD_SIZE": str(case["ranks"])})


# --- the page ---------------------------------------------------------------------------------------------------------

_OURS, _DCP, _PLAIN = CONTENDERS
_WHAT = (
    "{ranks} ranks on one machine each save 195 fp16 tensors and three large fp32 ones, {gigabytes:.2f} GB a rank, "
    "{times} times. Each save is durable before the next begins. Then each rank loads each of the checkpoints; the "
    "page cache is emptied before. This is shaped like the checkpointing of MLPerf Storage, with a model cut down, and "
    "is no result of it."
)
_WHO = {
    _OURS: "`dcp.save` and `dcp.load` with this package. It checks all checksums.",
    _DCP: "the same with torch's own writer and reader.",
    _PLAIN: "a file of each rank by `torch.save` and `fsync`, read by `torch.load`: what MLPerf Storage runs.",
}


def measure(options: argparse.Namespace, folder: Path) -> Content:
    base = {"ranks": options.ranks, "times": options.times, "rank_bytes": options.megabytes * 10**6}
    cases = [{"contender": name, **base, "folder": str(folder)} for name in CONTENDERS]
    return {"results": run_cases(measure_case, cases, 1)}


def summarise(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the bytes of all ranks and the seconds of writes and reads, or the error, by contender."""
    found = {}
    for result in results:
        name = result["case"]["contender"]
        if "error" in result:
            found[name] = {"error": result["error"]}
            continue
        first = result["ranks"][0]  # each time is from barrier to barrier, so rank 0's times hold for all ranks
        found[name] = {
            "bytes": sum(rank["bytes"] for rank in result["ranks"]),
            "write": spread(first["writes"]),
            "read": spread(first["reads"]),
            "intact": all(rank["intact"] for rank in result["ranks"]),
        }
    return found


def render(content: dict[str, Any]) -> str:
    case = content["results"][0]["case"]
    summary = summarise(content["results"])
    what = _WHAT.format(ranks=case["ranks"], times=case["times"], gigabytes=case["rank_bytes"] / 1e9)
    how_often = f"{case['times']} writes, then {case['times']} reads, of each contender, one contender after the other."
    rows = []
    for name, entry in summary.items():
        if "error" in entry:
            rows.append((name, "-", "-", entry["error"]))
            continue
        write, read = (cell(rates(entry[kind], entry["bytes"]), "{:.2f}".format) for kind in ("write", "read"))
        rows.append((name, write, read, "yes" if entry["intact"] else "NO"))
    return page(
        content,
        "MLPerf-shaped checkpoints",
        what,
        how_often,
        "mlperf",
        glossary("Who was measured", _WHO),
        table(("contender", "write (GB/s)", "read, cold (GB/s)", "read what was written"), rows),
        goals(_ratios(summary), form="{:.2f}".format),
    )


def _ratios(summary: dict[str, dict[str, Any]]) -> list[Goal]:
    return [
        (f"{kind} / {peer}", wanted, quotient(figure(summary, peer, kind), figure(summary, _OURS, kind)))
        for kind, wanted in (("write", ">= 3"), ("read", ">= 2"))
        for peer in (_DCP, _PLAIN)
    ]


OPTIONS = {
    "ranks": {"type": int, "default": 8},
    "times": {"type": int, "default": 10},
    "megabytes": {"type": int, "default": 500, "help": "of each rank"},
}

if __name__ == "__main__":
    run("mlperf", measure, render, about=__doc__, options=OPTIONS)
