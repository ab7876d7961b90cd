"""Threads for requests that wait for a server at the same time, and for work beside other work."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["cores", "in_background", "in_threads"]

_T = TypeVar("_T")

_REQUESTS_AT_ONCE = 16


def in_threads(operation: Callable[[str], _T], names: Sequence[str]) -> list[_T]:
    """Calls ``operation`` for several files at once, because each call waits for a server.

    Returns the results in the order of ``names``. Raises what a call raises.
    """
    if len(names) < 2:
        return [operation(name) for name in names]
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE, thread_name_prefix="requests") as pool:
        return list(pool.map(operation, names))


def in_background(operation: Callable[[], _T]) -> Future[_T]:
    """Starts ``operation`` in a thread of its own, for a result that is needed later."""
    future: Future[_T] = Future()
    try:
        threading.Thread(target=_run, args=(future, operation), name="request").start()
    except RuntimeError:  # the interpreter is ending, and starts no more threads
        _run(future, operation)
    return future


def cores() -> int:
    """How many cores this process may use: a bound for threads that compute."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(future: Future[_T], operation: Callable[[], _T]) -> None:
    try:
        future.set_result(operation())
    except BaseException as error:
        future.set_exception(error)
        del future  # or else the error's traceback would refer to it, and it to the error
