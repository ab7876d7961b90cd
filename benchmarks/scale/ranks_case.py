"""Cases of real ranks on one machine, with a process group."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, empty, zeros

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter

from ..case import Case, in_ranks
from .summary import OURS

_TENSORS, _ROWS, _COLUMNS = 64, 1024, 512
"""128 MB (134,217,728 bytes) of float32."""


def _seconds(case: Case, folder: Path) -> dict[str, float]:
    rank, ranks = dist.get_rank(), case["size"]
    mesh = init_device_mesh("cpu", (ranks,))
    shape, where = (_ROWS, _COLUMNS), {"device_mesh": mesh, "placements": [Shard(0)]}
    state = {f"layers.{number}.weight": empty(shape, **where) for number in range(_TENSORS)}
    for number, tensor in enumerate(state.values()):
        tensor.to_local().fill_(number * ranks + rank)
    path = folder / "checkpoint"
    seconds = {"save": _save(state, case["contender"], path)}
    loaded = {key: zeros(shape, **where) for key in state}
    seconds["load"] = _load(loaded, case["contender"], path)
    assert all(torch.equal(loaded[key].to_local(), state[key].to_local()) for key in state)
    return seconds


def _save(state: dict[str, DTensor], contender: str, path: Path) -> float:
    """Measures the first save of a job, including the start of the writer, until it is durable."""
    dist.barrier()
    started = time.perf_counter()
    writer: Any = TensorizerStorageWriter(path) if contender == OURS else FileSystemWriter(path)
    dcp.async_save(state, storage_writer=writer).result()
    seconds = time.perf_counter() - started
    writer.close()
    return seconds


def _load(state: dict[str, DTensor], contender: str, path: Path) -> float:
    dist.barrier()
    started = time.perf_counter()
    reader: Any = TensorizerStorageReader(path) if contender == OURS else FileSystemReader(path)
    dcp.load(state, storage_reader=reader)
    return time.perf_counter() - started


def measure(case: Case, folder: Path) -> list[Any]:
    return in_ranks(_seconds, case["size"], case, folder)
