"""Ranks: as threads of this process, with torch's own process group for that, or one rank and no process group."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import c10d_logger
from torch.distributed.checkpoint import _nested_dict, default_planner
from torch.distributed.checkpoint import logger as dcp_logger
from torch.testing._internal.distributed import multi_threaded_pg

from .describe import Failed

__all__ = ["threads_as_ranks"]

_WAIT = 90.0  # a save waits a minute for an earlier one that was staged, and that nobody has begun

Run = Callable[[int, Callable[[int], Any]], list[Any]]
"""Runs a function on so many ranks, and returns what each gave; with 0 on one, without a process group."""


class _World(multi_threaded_pg.ThreadLocalWorld):
    """The process groups of the calling thread, or else of the thread that started it: a save's, of its rank's."""

    def _get_world(self) -> Any:
        local = multi_threaded_pg.ThreadLocalWorld._world
        if not hasattr(local, "world"):
            inherited = getattr(threading.current_thread(), "world", None)
            if inherited is not None:
                local.world = inherited
        return super()._get_world()

    @property
    def comms(self) -> list[Any]:
        """What torch 2.11 asks for, and its own class for threads does not have."""
        return []


class _Version(threading.local):
    """torch switches how state dicts are flattened by a variable of a module: here each thread has its own."""

    _derived_version: str | None = None


@contextmanager
def threads_as_ranks() -> Iterator[Run]:
    """While this is entered, threads can be ranks."""
    start = threading.Thread.start
    local = multi_threaded_pg.ThreadLocalWorld._world

    def start_in_world(thread: threading.Thread) -> None:
        thread.world = getattr(local, "world", None)  # type: ignore[attr-defined]
        start(thread)

    version = _Version()
    multi_threaded_pg._install_threaded_pg()
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    isolate(True)
    try:
        with (
            mock.patch.object(dist.distributed_c10d, "_world", _World()),
            mock.patch.object(multi_threaded_pg.ProcessLocalGroup, "_device_types", [torch.device("cpu")]),
            mock.patch.object(threading.Thread, "start", start_in_world),
            # Of torch 2.15; it wants a name that the groups of threads do not have.
            mock.patch.object(dist.distributed_c10d, "_maybe_attach_flight_recorder", _nothing, create=True),
            mock.patch.object(c10d_logger, "_get_msg_dict", _nothing),  # what torch would log: half of its time
            mock.patch.object(dcp_logger, "_get_msg_dict", _nothing),
            mock.patch.object(default_planner, "_version", version),
            mock.patch.object(_nested_dict, "_version", version),
        ):
            yield _run
    finally:
        isolate(False)
        multi_threaded_pg._uninstall_threaded_pg()


def _nothing(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return {}


def _run(size: int, function: Callable[[int], Any]) -> list[Any]:
    if size == 0:
        return [function(0)]
    group = multi_threaded_pg.ProcessLocalGroup
    group.reset()
    store = dist.HashStore()
    excepthook = sys.excepthook  # each process group puts its own around it
    results: list[Any] = [Failed("the rank was ended: another one had failed")] * size

    def rank(number: int) -> None:
        threading.current_thread().world = None  # type: ignore[attr-defined]
        dist.init_process_group("threaded", rank=number, world_size=size, store=store)
        try:
            results[number] = function(number)
        except BaseException as error:
            results[number] = Failed(f"{type(error).__name__}: {error}")
            group.exception_handle(error)  # the others may wait for it in a collective
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=rank, args=(number,), name=f"rank {number}") for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_WAIT)
        if thread.is_alive():  # the ranks wait for one that has failed and gone on: as if they had been killed
            group.exception_handle(TimeoutError("the ranks wait for each other"))
            thread.join(_WAIT)
        if thread.is_alive():
            raise TimeoutError(f"{thread.name} hangs")
    sys.excepthook = excepthook
    return results
