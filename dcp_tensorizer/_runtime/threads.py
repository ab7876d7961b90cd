"""Thread pools for requests, background threads, and timeouts."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any, TypeVar

_T = TypeVar("_T")
_Subject = TypeVar("_Subject")

_REQUESTS_AT_ONCE = 16
_CHECK_SECONDS = 0.001


class Deadline:
    """The common end of several waits, ``timeout`` seconds from now, or never if that is None."""

    def __init__(self, timeout: float | None) -> None:
        self._end = None if timeout is None else time.monotonic() + timeout

    @property
    def left(self) -> float | None:
        """Returns the remaining seconds, at least 0, or None without a limit."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def within(self, seconds: float) -> float:
        """Returns ``seconds``, or the remaining seconds if they are fewer."""
        left = self.left
        return seconds if left is None else min(seconds, left)


NEVER = Deadline(None)


class ProgressTimeout:
    """A timeout since the last progress, for a caller that polls.

    The time between two checks counts as at most ``between_checks`` seconds, and at most a third of ``timeout``. So a
    suspended job does not time out: neither side could make progress while the job was suspended.
    """

    def __init__(self, timeout: float, between_checks: float) -> None:
        self._timeout, self._between_checks = timeout, min(between_checks, timeout / 3)
        self.renew()

    def renew(self) -> None:
        self._waited, self._last = 0.0, time.monotonic()

    def within(self, seconds: float) -> float:
        return min(seconds, max(0.0, self._timeout - self._waited))

    def is_over(self) -> bool:
        """Checks the time. Returns whether the timeout has passed without progress."""
        now = time.monotonic()
        self._waited, self._last = self._waited + min(now - self._last, self._between_checks), now
        return self._waited >= self._timeout


class Hung(Exception):
    """An operation that timed out. Its thread may still run."""


class Workers(ThreadPoolExecutor):
    """A thread pool whose `shutdown` waits until no work runs, because the caller then frees the memory that work uses.

    `shutdown` delays an exception from a signal handler, such as KeyboardInterrupt, until the work is done. If such an
    exception interrupts `submit`, the work may have begun. After the main thread has ended, Python starts no threads,
    so `submit` runs the work in the calling thread. It does the same if the thread limit is reached.
    """

    def __init__(self, max_workers: int, thread_name_prefix: str = "") -> None:
        super().__init__(max_workers, thread_name_prefix)
        self._interrupted: list[Future[Any]] = []  # `_threads` may lack the thread of such work

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        work = functools.partial(fn, *args, **kwargs)
        taken: Future[_T] = Future()
        try:
            return super().submit(_run_if_free, taken, work)
        except BaseException as error:  # from a signal handler, or no thread can be started
            is_taken = not taken.cancel()  # the pool queues the work before it starts a thread
            if not (is_thread_limit(error) or is_exit(error)):
                if is_taken:
                    self._interrupted.append(taken)
                raise
        if is_taken:
            return taken
        inline: Future[_T] = Future()
        _run(inline, work)
        return inline

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=cancel_futures)
        if wait:
            _uninterrupted(self._join)

    def _join(self) -> None:
        super().shutdown()
        while any(map(is_running, self._threads)):  # before Python 3.13, after an interrupted join
            time.sleep(_CHECK_SECONDS)
        wait_for(self._interrupted)


def _run_if_free(taken: Future[_T], work: Callable[[], _T]) -> _T:
    """Runs work, unless it was cancelled. ``taken`` gets the same result."""
    if not taken.set_running_or_notify_cancel():
        raise CancelledError
    _run(taken, work)
    try:
        return taken.result()
    finally:
        del taken  # breaks the cycle of the future, its error and the error's traceback


def is_thread_limit(error: BaseException) -> bool:
    """Returns whether no thread could be started because a limit is reached."""
    return isinstance(error, RuntimeError) and str(error).endswith("start new thread")


def is_exit(error: BaseException) -> bool:
    """Returns whether no thread could be started because the interpreter exits."""
    return isinstance(error, RuntimeError) and str(error).endswith("interpreter shutdown")


def _uninterrupted(wait: Callable[[], object]) -> None:
    """Calls ``wait`` until it returns. Then raises the last exception from a signal handler that interrupted it."""
    interrupted: BaseException | None = None
    while True:
        try:
            wait()
            break
        except BaseException as error:
            interrupted = error
    if interrupted is not None:
        try:
            raise interrupted
        finally:
            del interrupted  # breaks the cycle of the exception and this frame


def is_running(thread: threading.Thread) -> bool:
    """Returns whether a thread has been started and has not ended.

    Before Python 3.13 ``is_alive`` is not reliable: it is False after an exception from a signal handler in ``join``,
    such as KeyboardInterrupt. A thread that ends removes itself from ``threading.enumerate``, except the main thread.
    """
    return thread in threading.enumerate() and (thread is not threading.main_thread() or thread.is_alive())


def in_threads(operation: Callable[[_Subject], _T], subjects: Sequence[_Subject]) -> list[_T]:
    """Calls ``operation`` for each subject in parallel threads, 16 at most.

    Returns the results in the order of ``subjects``. If calls fail, raises the exception of the first of them in that
    order.
    """
    if len(subjects) < 2:
        return [operation(subject) for subject in subjects]
    with Workers(_REQUESTS_AT_ONCE, thread_name_prefix="requests") as pool:
        return list(pool.map(operation, subjects))


def in_background(operation: Callable[[], _T], *, name: str = "request", daemon: bool = False) -> Future[_T]:
    """Starts ``operation`` in a new thread. Returns a future of its result.

    If no thread can be started, the calling thread runs ``operation``. At exit the interpreter does not wait for a
    ``daemon`` thread.
    """
    future: Future[_T] = Future()
    try:
        threading.Thread(target=_run, args=(future, operation), name=name, daemon=daemon).start()
    except RuntimeError:  # the interpreter is exiting, or the thread limit is reached
        _run(future, operation)
        error = future.exception()
        if error is not None and not isinstance(error, Exception):
            raise error from None
    return future


def in_time(operation: Callable[[], _T], timeout: float) -> _T:
    """Runs an operation that may hang in the kernel. Raises `Hung` after ``timeout`` seconds.

    After a timeout the thread may still run, and the interpreter's exit does not wait for it. Exceptions from signal
    handlers are delayed until the operation has ended or timed out.
    """
    doing, end = in_background(operation, name="in-time", daemon=True), Deadline(timeout)
    _uninterrupted(lambda: wait_for([doing], end.left))
    if not doing.done():
        raise Hung
    return doing.result()


def cores() -> int:
    """Returns the number of cores that this process may use, as a limit for threads that compute.

    That is the rank's share of the node's cores, and at most the number of cores that the rank is bound to.
    """
    share = max(1, (os.cpu_count() or 1) // (ranks_of_node() or 1))
    return min(share, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else share


def ranks_of_node() -> int | None:
    """Returns the number of ranks on this node, as ``torchrun`` or another launcher sets it, or None."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(ranks) if ranks.isdecimal() and int(ranks) else None


def _run(future: Future[_T], operation: Callable[[], _T]) -> None:
    try:
        future.set_result(operation())
    except BaseException as error:
        future.set_exception(error)
        del future  # breaks the cycle of the future, its error and the error's traceback
