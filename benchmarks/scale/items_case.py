"""Cases of many small tensors on one rank."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from dcp_tensorizer import LoadPlanner, SavePlanner, TensorizerStorageReader, TensorizerStorageWriter

from ..case import Case, leave
from ..savers import State, discard
from .summary import PLANNED, TORCH
from .watch import Stopped, limits

_ELEMENTS = 2_500
"""10 kB: 100,000 of them are 1 GB."""
_TICK = 0.001
_GROUP = "model"
"""The only entry of the outermost dict, as in trainers: DCP logs each of these entries twice, 20 us each time."""


def measure(case: Case, folder: Path) -> list[Any]:
    """Saves and loads. If a limit ends it, returns the results so far."""
    torch.set_num_threads(1)
    folder /= "checkpoint"
    state = {f"layers.{number}.weight": torch.full((_ELEMENTS,), float(number)) for number in range(case["size"])}
    found: dict[str, Any] = {"saves": [], "loads": []}
    contender = case["contender"]
    writer: Any = FileSystemWriter(folder) if contender == TORCH else TensorizerStorageWriter(folder)
    try:
        for _ in range(case["saves"]):
            discard(folder)
            with limits():
                found["saves"].append(_save(state, writer, SavePlanner() if contender == PLANNED else None))
        loaded = {key: torch.zeros(_ELEMENTS) for key in state}
        for _ in range(case["loads"]):
            with limits():
                found["loads"].append(_load(loaded, contender, folder))
        if not all(torch.equal(loaded[key], state[key]) for key in state):
            raise AssertionError("what was loaded is not what was saved")
        writer.close()
    except Stopped as stopped:
        leave([{**found, "stopped": str(stopped)}])  # its threads may still run
    return [found]


def _save(state: State, writer: Any, planner: SavePlanner | None) -> dict[str, float]:
    durable: list[float] = []
    with _full_collections() as collections:
        started = time.perf_counter()
        future = dcp.async_save({_GROUP: state}, storage_writer=writer, planner=planner, no_dist=True)
        stall = time.perf_counter() - started
        future.add_done_callback(lambda _: durable.append(time.perf_counter()))
        gap = _longest_gap(durable)
        future.result()
    return {"stall": stall, "durable": durable[0] - started, "gap": gap, "collections": len(collections)}


def _longest_gap(done: list[float]) -> float:
    """Returns the longest time in seconds, until ``done`` is filled, that this thread waited for the GIL.

    It sleeps between attempts: a loop that computes would keep the GIL from the save.
    """
    longest, last = 0.0, time.perf_counter()
    while not done:
        time.sleep(_TICK)
        now = time.perf_counter()
        longest = max(longest, now - last - _TICK)
        last = now
    return longest


def _load(state: State, contender: str, folder: Path) -> float:
    reader: Any = FileSystemReader(folder) if contender == TORCH else TensorizerStorageReader(folder)
    started = time.perf_counter()
    planner = LoadPlanner() if contender == PLANNED else None
    dcp.load({_GROUP: state}, storage_reader=reader, planner=planner, no_dist=True)
    return time.perf_counter() - started


@contextmanager
def _full_collections() -> Iterator[list[int]]:
    """Yields a list that grows by one for each full garbage collection."""
    seen: list[int] = []

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            seen.append(info["generation"])

    gc.callbacks.append(count)
    try:
        yield seen
    finally:
        gc.callbacks.remove(count)
