"""Threads for requests that wait for a server at the same time, and for work beside other work; waits that end."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["NEVER", "Deadline", "Workers", "cores", "in_background", "in_threads", "is_running"]

_T = TypeVar("_T")
_Subject = TypeVar("_Subject")

_REQUESTS_AT_ONCE = 16


class Deadline:
    """One end for several waits, one after the other.

    Args:
        timeout: Seconds from now; None for never.
    """

    def __init__(self, timeout: float | None) -> None:
        self._end = None if timeout is None else time.monotonic() + timeout

    @property
    def left(self) -> float | None:
        """Seconds that are left, at least 0; None for any number."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def within(self, seconds: float) -> float:
        """So many seconds, or what is left if that is less."""
        left = self.left
        return seconds if left is None else min(seconds, left)


NEVER = Deadline(None)


class Workers(ThreadPoolExecutor):
    """A pool of threads for work that must be done, whatever interrupts it and whenever it begins.

    When the main thread has ended, for threads that live on and for ``atexit``, Python starts no more threads: then the
    calling thread does what is submitted.
    """

    def __init__(self, max_workers: int, thread_name_prefix: str) -> None:
        super().__init__(max_workers, thread_name_prefix)
        self._unfinished: set[Future[Any]] = set()

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        try:
            future = super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            if "interpreter shutdown" not in str(error):
                raise
            future = Future()
            _run(future, lambda: fn(*args, **kwargs))
            return future
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Waits for the work, and not only for its threads: see `is_running`."""
        super().shutdown(wait=False, cancel_futures=cancel_futures)
        if wait:
            concurrent.futures.wait(list(self._unfinished))
            super().shutdown()


def is_running(thread: threading.Thread) -> bool:
    """Whether a thread has been started, and has not ended.

    Before Python 3.13 ``is_alive`` cannot be trusted. If a signal's handler raises in the middle of ``join``, a
    KeyboardInterrupt say, it takes the thread for one that has ended.
    """
    return thread in threading.enumerate()


def in_threads(operation: Callable[[_Subject], _T], subjects: Sequence[_Subject]) -> list[_T]:
    """Calls ``operation`` for several files, or parts of one, at once, because each call waits for a server.

    Returns the results in the order of ``subjects``. Raises what a call raises.
    """
    if len(subjects) < 2:
        return [operation(subject) for subject in subjects]
    with Workers(_REQUESTS_AT_ONCE, thread_name_prefix="requests") as pool:
        return list(pool.map(operation, subjects))


def in_background(operation: Callable[[], _T], *, name: str = "request", daemon: bool = False) -> Future[_T]:
    """Starts ``operation`` in a thread of its own, for a result that is needed later.

    Args:
        operation: What to do. Where no thread can be started, the calling thread does it.
        name: Of the thread.
        daemon: The end of the interpreter does not wait for it.
    """
    future: Future[_T] = Future()
    try:
        threading.Thread(target=_run, args=(future, operation), name=name, daemon=daemon).start()
    except RuntimeError:  # the interpreter is ending and starts no more, or the system has no more
        _run(future, operation)
        error = future.exception()
        if error is not None and not isinstance(error, Exception):
            raise error from None
    return future


def cores() -> int:
    """How many cores this process may use: a bound for threads that compute.

    The ranks of a node share its cores. ``torchrun`` says how many they are. A rank that is bound to cores has those.
    """
    share = max(1, (os.cpu_count() or 1) // (ranks_of_node() or 1))
    return min(share, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else share


def ranks_of_node() -> int | None:
    """How many ranks share this node, as ``torchrun`` and other launchers say; None if nothing says it."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(ranks) if ranks.isdecimal() and int(ranks) else None


def _run(future: Future[_T], operation: Callable[[], _T]) -> None:
    try:
        future.set_result(operation())
    except BaseException as error:
        future.set_exception(error)
        del future  # or else the error's traceback would refer to it, and it to the error
