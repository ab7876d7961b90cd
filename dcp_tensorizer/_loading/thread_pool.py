"""Threads that work through operations: few where those keep them busy, more where they wait for the storage."""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["work_through"]

_T = TypeVar("_T")
# So many times as long as it was busy, a thread has been at work, if it waits for the storage and not just for others
# that share its core, or for the interpreter lock. From its beginning on: that takes longer to show, but one operation
# that was interrupted shows nothing, and twice as many threads as cores read what is in the page cache a tenth slower.
_WAITING = 4
# Whose bytes came from a disk, more than so many of them, waits for it, too, even if decrypting or copying them keeps
# it busy for half of the time.
_FROM_DISK = 0.5
_RUSAGE_THREAD = getattr(resource, "RUSAGE_THREAD", None)


def work_through(operations: Iterable[_T], run: Callable[[_T], int], *, first: int, most: int) -> None:
    """Calls ``run`` with every operation; raises what it raises, and then begins no other.

    Args:
        operations: In the order in which they are begun.
        run: Called by several threads at once; returns how many bytes it has read.
        first: Threads that begin.
        most: Threads there may be, when those that have begun wait most of the time.
    """
    remaining = deque(operations)
    workers: list[Future[None]] = []

    def work() -> None:
        """Does one operation after the other: a future for each would cost more than a small read."""
        began, used, from_disk = time.perf_counter(), time.thread_time(), _read_from_disk()
        done = nbytes = 0
        try:
            while True:
                try:
                    operation = remaining.popleft()
                except IndexError:
                    return
                nbytes += run(operation)
                done += 1
                if done & (done - 1):  # looking takes time: after the first one, the second, the fourth, ...
                    continue
                wall, busy = time.perf_counter() - began, time.thread_time() - used
                waits = wall > _WAITING * busy or _read_from_disk() - from_disk > _FROM_DISK * nbytes
                if waits and remaining and len(workers) < most:
                    workers.append(pool.submit(work))
        except BaseException:
            remaining.clear()
            raise

    with ThreadPoolExecutor(most, thread_name_prefix="dcp-read") as pool:
        try:
            workers += [pool.submit(work) for _ in range(min(first, most, len(remaining)))]
            for worker in workers:  # and those that join meanwhile
                worker.result()
        except BaseException:  # also a KeyboardInterrupt, which no worker sees
            remaining.clear()
            raise


def _read_from_disk() -> int:
    """Bytes that the kernel has read from disks for the calling thread; not all network filesystems count them."""
    return 0 if _RUSAGE_THREAD is None else resource.getrusage(_RUSAGE_THREAD).ru_inblock * 512
