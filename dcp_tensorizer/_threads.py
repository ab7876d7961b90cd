"""Threads for single pieces of work, and how many cores there are for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["in_threads", "cores", "in_background"]

_T = TypeVar("_T")


_AT_ONCE = 16


def in_threads(operation: Callable[[str], _T], names: Sequence[str]) -> list[_T]:
    """Does the same to several files, each of which takes a request: its results; raises what it raises."""
    if len(names) < 2:
        return [operation(name) for name in names]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="requests") as pool:
        return list(pool.map(operation, names))


def in_background(operation: Callable[[], _T]) -> Future[_T]:
    """Begins a request whose answer is wanted later."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="request")
    try:
        return pool.submit(operation)
    except RuntimeError:  # the interpreter is ending, and starts no more threads
        future: Future[_T] = Future()
        try:
            future.set_result(operation())
        except Exception as error:
            future.set_exception(error)
        return future
    finally:
        pool.shutdown(wait=False)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
