"""Threads that wait for servers in parallel, threads for background work, and time limits."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any, Generic, TypeVar

from .forks import Finalizer, free_in_child, in_child

_T = TypeVar("_T")
_Subject = TypeVar("_Subject")

_REQUESTS_AT_ONCE = 16
_CHECK_SECONDS = 0.001


class Deadline:
    """The common end of several waits, ``timeout`` seconds from now; None: never."""

    def __init__(self, timeout: float | None) -> None:
        self._end = None if timeout is None else time.monotonic() + timeout

    @property
    def left(self) -> float | None:
        """The seconds that are left, at least 0; None if there is no limit."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def within(self, seconds: float) -> float:
        """``seconds``, or what is left if that is less."""
        left = self.left
        return seconds if left is None else min(seconds, left)


NEVER = Deadline(None)


class Patience:
    """A timeout without progress, for a caller that polls.

    Between two checks at most ``between_checks`` seconds count, and at most a third of ``timeout``. So a job that was
    suspended does not time out: while it was, neither side could make progress.
    """

    def __init__(self, timeout: float, between_checks: float) -> None:
        self._timeout, self._between_checks = timeout, min(between_checks, timeout / 3)
        self.renew()

    def renew(self) -> None:
        """Records progress: the time begins again."""
        self._waited, self._last = 0.0, time.monotonic()

    def within(self, seconds: float) -> float:
        """``seconds``, or what is left if that is less."""
        return min(seconds, max(0.0, self._timeout - self._waited))

    def is_over(self) -> bool:
        """Checks the time; returns whether there has been no progress for too long."""
        now = time.monotonic()
        self._waited, self._last = self._waited + min(now - self._last, self._between_checks), now
        return self._waited >= self._timeout


class Hung(Exception):
    """An operation has timed out. Its thread is left behind."""


class Workers(ThreadPoolExecutor):
    """A pool of threads whose `shutdown` always waits for the work, because the caller then frees what the work uses.

    If a signal handler raises an exception meanwhile, such as KeyboardInterrupt, it is raised when the work is done.
    Once the main thread has ended, Python starts no more threads. Then the calling thread does the work.
    """

    def __init__(self, max_workers: int, thread_name_prefix: str) -> None:
        super().__init__(max_workers, thread_name_prefix)
        self._unfinished: set[Future[Any]] = set()
        self._is_shut = False

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        work = _Work(lambda: fn(*args, **kwargs))
        try:
            future: Future[_T] = super().submit(work)
            self._unfinished.add(future)
            future.add_done_callback(self._unfinished.discard)
            return future
        except RuntimeError as error:
            if self._is_shut or not str(error).startswith("cannot schedule"):
                work.drop()  # no more threads can be started, but a running one may have taken it
                raise
        except BaseException:  # raised by a signal handler: a thread may or may not have taken the work
            work.drop()
            raise
        inline: Future[_T] = Future()
        _run(inline, work)
        return inline

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_shut = True
        super().shutdown(wait=False, cancel_futures=cancel_futures)
        if wait:
            _surely(self._wait)
            super().shutdown()

    def _wait(self) -> None:
        # Without a lock: an exception of a signal handler could leave it locked, and the work would wait for it.
        while self._unfinished:
            time.sleep(_CHECK_SECONDS)


class _Work(Generic[_T]):
    """An operation that runs at most once."""

    def __init__(self, operation: Callable[[], _T]) -> None:
        self._operation: Callable[[], _T] | None = operation
        self._doing = free_in_child(threading.Lock())

    def __call__(self) -> _T:
        with self._doing:
            operation, self._operation = self._operation, None
            if operation is None:
                raise CancelledError
            return operation()

    def drop(self) -> None:
        """Keeps the operation from beginning; if it is running, waits for it."""
        self._operation = None
        _surely(self._doing.acquire)
        self._doing.release()


def _surely(wait: Callable[[], object]) -> None:
    """Waits to the end. If signal handlers raise exceptions meanwhile, the last one is raised then."""
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

    Before Python 3.13 ``is_alive`` cannot be trusted: after an exception of a signal handler in ``join``, such as
    KeyboardInterrupt, it is False. A thread that ends removes itself from ``threading.enumerate``; only the main thread
    does not.
    """
    return thread in threading.enumerate() and (thread is not threading.main_thread() or thread.is_alive())


def in_threads(operation: Callable[[_Subject], _T], subjects: Sequence[_Subject]) -> list[_T]:
    """Calls ``operation`` for each subject, in parallel, because each call waits for a server.

    Returns the results in the order of ``subjects``. Raises what a call raises.
    """
    if len(subjects) < 2:
        return [operation(subject) for subject in subjects]
    with Workers(_REQUESTS_AT_ONCE, thread_name_prefix="requests") as pool:
        return list(pool.map(operation, subjects))


def in_background(operation: Callable[[], _T], *, name: str = "request", daemon: bool = False) -> Future[_T]:
    """Starts ``operation`` in a thread of its own; returns a future of its result.

    If no thread can be started, the calling thread runs it. The interpreter does not wait for a ``daemon`` at its exit.
    """
    future: Future[_T] = Future()
    try:
        threading.Thread(target=_run, args=(future, operation), name=name, daemon=daemon).start()
    except RuntimeError:  # no more threads: the interpreter is ending, or a limit of the system
        _run(future, operation)
        error = future.exception()
        if error is not None and not isinstance(error, Exception):
            raise error from None
    return future


def in_time(operation: Callable[[], _T], timeout: float) -> _T:
    """Runs an operation that may hang in the kernel; raises `Hung` after ``timeout`` seconds.

    Then its thread is left behind, and the interpreter's exit does not wait for it. An exception of a signal handler is
    raised once the operation is over or given up.
    """
    doing, end = in_background(operation, name="in-time", daemon=True), Deadline(timeout)
    _surely(lambda: wait_for([doing], end.left))
    if not doing.done():
        raise Hung
    return doing.result()


def cores() -> int:
    """The number of cores that this process may use, as a limit for threads that compute.

    The ranks of a node share its cores; ``torchrun`` sets their number. A rank that is bound to cores uses
    these alone.
    """
    share = max(1, (os.cpu_count() or 1) // (ranks_of_node() or 1))
    return min(share, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else share


def ranks_of_node() -> int | None:
    """The number of ranks on this node, according to ``torchrun`` or another launcher; None if unknown."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(ranks) if ranks.isdecimal() and int(ranks) else None


def _run(future: Future[_T], operation: Callable[[], _T]) -> None:
    try:
        future.set_result(operation())
    except BaseException as error:
        future.set_exception(error)
        del future  # breaks the cycle of the future, its error and the error's traceback


# --- the switch interval during a save --------------------------------------------------------------------------------
#
# A thread that needs the interpreter waits until its holder releases it, or until the switch interval is over: 5 ms by
# default. A save needs it some hundred times: after each system call, and after many of torch's operations. If a
# training loop holds it, the save waits 5 ms each time. And while the save plans, training waits 5 ms after each of its
# own operations.
#
# With 0.5 ms, a save of 1,000 tensors beside a pure Python loop is durable after 0.19 s instead of 0.49 s, at the same
# speed of the loop. Beside small matrix products the longest gap in a save of 5,000 tensors is 4 ms instead of 9 ms.
# With 0.1 ms such a loop loses a fifth of its speed to the switching.
#
# The interval belongs to the whole process. It is short while a save works on a thread of its own, and is set back
# afterwards. If the program sets another one meanwhile, that one stays. The short one stays if the program reads it
# meanwhile and sets it again later.

_SECONDS = 0.0005
_FIRST_RELEASE = 0.0001  # the time in which the other thread wakes up
_RESOLUTION = 2e-6  # Python keeps whole microseconds


class Borrowed(Generic[_T]):
    """A setting of the whole process that is changed while it has users, and then restored.

    ``change`` changes it, and returns the program's value, or None if that stays. ``restore`` restores that value,
    unless the program has set another one meanwhile.
    """

    def __init__(self, change: Callable[[], _T | None], restore: Callable[[_T], object]) -> None:
        self._change, self._restore = change, restore
        # Reentrant, because a signal handler or the collector may interrupt its holder.
        self._lock = free_in_child(threading.RLock())
        self._users: set[object] = set()
        self._before: _T | None = None  # the program's, while it is changed
        in_child(self, Borrowed._return)  # none of the threads that use it is in a forked child

    def use(self, user: object) -> bool:
        """Adds a user; returns whether that has changed the setting."""
        with self._lock:
            self._users.add(user)
            if self._before is not None:
                return False
            self._before = self._change()
            return self._before is not None

    def leave(self, user: object, last: Callable[[], object] = lambda: None) -> None:
        """Removes a user. After the last one, calls ``last`` and restores the setting."""
        with self._lock:
            self._users.discard(user)
            if not self._users and self._before is not None:
                try:
                    last()
                finally:
                    self._return()

    def _return(self) -> None:
        self._users.clear()
        before, self._before = self._before, None
        if before is not None:
            self._restore(before)


def _shorten() -> float | None:
    before = sys.getswitchinterval()
    if before <= _SECONDS:
        return None
    sys.setswitchinterval(_SECONDS)
    return before


def _set_back(before: float) -> None:
    if abs(sys.getswitchinterval() - _SECONDS) < _RESOLUTION:
        sys.setswitchinterval(before)


_interval = Borrowed(_shorten, _set_back)


class ShortSwitchInterval:
    """A short switch interval of the process, until `end` or until this object is freed.

    Threads that are waiting wait for the old interval. So the calling thread first releases the interpreter to them:
    one may be training, and has just started this thread.
    """

    def __init__(self) -> None:
        _interval.use(id(self))
        self._end = Finalizer(self, _interval.leave, id(self))
        time.sleep(_FIRST_RELEASE)

    def end(self) -> None:
        """Restores the switch interval, unless others still need it. Idempotent."""
        self._end()
