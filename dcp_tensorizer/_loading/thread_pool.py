"""The threads of a load: few while they are busy, more when they wait for the storage.

Bytes in the page cache keep a core busy: more threads than cores are only in each other's way. Disks and servers keep
threads waiting: they need many reads at once to reach their full speed. Which of the two a load will be is not known
before it begins. On 2 cores, a load from the page cache took 252 ms with 8 threads and 217 ms with few; a load from
the disk of the same machine reached 1.15 GB/s with 8 threads and 0.88 GB/s with few.
"""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple, TypeVar

from .._threads import Workers

__all__ = ["Usage", "run_all", "thread_usage"]

_T = TypeVar("_T")

# A thread waits for the storage if less than a quarter of its time was spent on a core. It may also have waited for a
# core, or for the interpreter lock: twice as many threads as cores read the page cache a tenth slower.
_WAITING_FACTOR = 4
# It waits for a disk, too, if more than half of its bytes came from one: decrypting or copying them may keep it busy
# for half of the time.
_FROM_DISK = 0.5
_RUSAGE_THREAD = getattr(resource, "RUSAGE_THREAD", None)


class Usage(NamedTuple):
    """What a thread has used since some moment in the past.

    Attributes:
        wall_seconds: Time that has passed.
        cpu_seconds: Time that it has spent on a core.
        disk_bytes: What the kernel has read from disks for it. Not every network filesystem counts this.
    """

    wall_seconds: float
    cpu_seconds: float
    disk_bytes: int


def thread_usage() -> Usage:
    """What the calling thread has used."""
    blocks = 0 if _RUSAGE_THREAD is None else resource.getrusage(_RUSAGE_THREAD).ru_inblock
    return Usage(time.perf_counter(), time.thread_time(), blocks * 512)


def run_all(
    operations: Iterable[_T],
    run: Callable[[_T], int],
    *,
    min_threads: int,
    max_threads: int,
    usage: Callable[[], Usage] = thread_usage,
) -> None:
    """Calls ``run`` with every operation, in several threads; raises what it raises, and then begins no other one.

    Args:
        operations: In the order in which they are begun.
        run: Called by several threads at once; returns how many bytes it has read.
        min_threads: How many threads begin.
        max_threads: How many there may be, when those that have begun wait for the storage.
        usage: What the calling thread has used.
    """
    remaining = deque(operations)
    workers: list[Future[None]] = []

    def work() -> None:
        """Runs one operation after the other: a future for each would cost more than a small read."""
        began = usage()
        nbytes = finished = 0
        try:
            while remaining:
                try:
                    operation = remaining.popleft()
                except IndexError:  # another thread has just taken the last one
                    return
                nbytes += run(operation)
                finished += 1
                can_grow = remaining and len(workers) < max_threads
                if can_grow and _is_power_of_two(finished) and _waits_for_storage(began, usage(), nbytes):
                    start()  # noqa: F821  (deleted when no thread runs any more)
        except BaseException:
            remaining.clear()
            raise

    def start() -> None:
        with suppress(RuntimeError):  # the system has no more threads: those that there are do all of it
            workers.append(pool.submit(work))  # noqa: F821  (as above)

    try:
        with Workers(max_threads, "dcp-read") as pool:  # it waits for threads that write to targets
            try:
                for _ in range(min(min_threads, max_threads, len(remaining))):
                    start()
                if not workers:
                    work()
                for worker in workers:  # also those that join meanwhile
                    worker.result()
            except BaseException:  # also a KeyboardInterrupt, which no worker sees
                remaining.clear()
                raise
    finally:
        del (
            work,
            start,
        )  # they refer to themselves, and by `run` to the targets, which would stay until the collector comes


def _is_power_of_two(number: int) -> bool:
    """Looking at the usage takes time. So a thread looks after its first operation, its second, fourth, eighth, ..."""
    return number & (number - 1) == 0


def _waits_for_storage(began: Usage, now: Usage, nbytes: int) -> bool:
    """Whether a thread that has read so many bytes since it began has mostly waited for them.

    All its time counts: a single operation may have taken long because it was interrupted.
    """
    wall = now.wall_seconds - began.wall_seconds
    busy = now.cpu_seconds - began.cpu_seconds
    from_disk = now.disk_bytes - began.disk_bytes
    return wall > _WAITING_FACTOR * busy or from_disk > _FROM_DISK * nbytes
