"""One contender of the MLPerf-shaped benchmark, in a process of its own: prints its times as one line of JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter

from .limits import evict
from .ranks import leave_results, left_results
from .savers import State

_HALVES = 195  # fp16 parameters of a rank
_FLOATS = 3  # and, in fp32: their master copy and the two moments of Adam, flat
_BYTES_EACH = 2 + 4 * _FLOATS  # for a parameter
_WAITS = timedelta(minutes=10)


class _Dcp:
    """`dcp.save` and `dcp.load` with a storage writer and reader."""

    def __init__(self, writer: Callable[..., Any], reader: Callable[..., Any]) -> None:
        self._writer, self._reader = writer, reader

    def save(self, state: State, folder: Path) -> None:
        dcp.save(state, storage_writer=self._writer(folder))

    def load(self, state: State, folder: Path) -> None:
        dcp.load(state, storage_reader=self._reader(folder))


class _TorchSave:
    """A file of each rank, as MLPerf Storage writes it: `torch.save` and an fsync."""

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
    """What a rank has: random numbers under keys of its own."""
    parameters = nbytes // _BYTES_EACH
    generator = torch.Generator().manual_seed(rank)
    state = {
        f"rank{rank}.{name}": torch.rand(parameters, generator=generator) for name in ("master", "exp_avg", "variance")
    }
    each = parameters // _HALVES
    halves = state[f"rank{rank}.master"].half()
    return state | {f"rank{rank}.layer{n}": halves[n * each : (n + 1) * each].clone() for n in range(_HALVES)}


def _measure(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """All writes, then all reads from a cold disk. A time is that of the slowest rank."""
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
            evict(folder)  # also what was read before: to reclaim it would take time of this load
        reads.append(_timed(lambda where=where: contender.load(state, where)))
    intact = all(torch.equal(state[key], tensor) for key, tensor in wanted.items())
    return {"writes": writes, "reads": reads, "intact": intact, "bytes": sum(t.nbytes for t in state.values())}


def _timed(action: Callable[[], None]) -> float:
    dist.barrier()
    started = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - started


def _rank(rank: int, case: dict[str, Any], folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_WORLD_SIZE": str(case["ranks"])}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=case["ranks"], timeout=_WAITS
    )
    leave_results(folder, _measure(case, Path(folder)))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    case = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory(dir=case["folder"]) as folder:
        mp.spawn(_rank, args=(case, folder), nprocs=case["ranks"])
        print(left_results(folder))


if __name__ == "__main__":
    main()
