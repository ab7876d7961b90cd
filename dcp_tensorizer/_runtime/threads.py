"""Thread pools for requests, background threads, timeouts, and the switch interval."""

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

    The time between two checks counts for at most ``between_checks`` seconds, and at most a third of ``timeout``. So a
    suspended job does not time out: neither side could make progress while the job was suspended.
    """

    def __init__(self, timeout: float, between_checks: float) -> None:
        self._timeout, self._between_checks = timeout, min(between_checks, timeout / 3)
        self.renew()

    def renew(self) -> None:
        """Records progress, which restarts the timeout."""
        self._waited, self._last = 0.0, time.monotonic()

    def within(self, seconds: float) -> float:
        """Returns ``seconds``, or the remaining seconds if they are fewer."""
        return min(seconds, max(0.0, self._timeout - self._waited))

    def is_over(self) -> bool:
        """Checks the time. Returns whether the timeout has passed without progress."""
        now = time.monotonic()
        self._waited, self._last = self._waited + min(now - self._last, self._between_checks), now
        return self._waited >= self._timeout


class Hung(Exception):
    """An operation that timed out. Its thread may still run."""


class Workers(ThreadPoolExecutor):
    """A thread pool whose `shutdown` always waits for the work, because the caller then frees memory that it uses.

    `shutdown` delays an exception of a signal handler, such as KeyboardInterrupt, until the work is done. After the
    main thread has ended, Python starts no threads, so `submit` runs the work in the calling thread.
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
                work.drop()  # no thread could be started, but a running one may have taken the work
                raise
        except BaseException:  # of a signal handler: a thread may have taken the work
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
        # Polls, because an exception of a signal handler could leave a lock locked that the work needs.
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
        """Prevents the operation from starting. If it is running, waits for it."""
        self._operation = None
        _surely(self._doing.acquire)
        self._doing.release()


def _surely(wait: Callable[[], object]) -> None:
    """Calls ``wait`` until it returns. Then raises the last exception of a signal handler that interrupted it."""
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

    Before Python 3.13 ``is_alive`` is not reliable: it is False after an exception of a signal handler in ``join``,
    such as KeyboardInterrupt. A thread that ends removes itself from ``threading.enumerate``, except the main thread.
    """
    return thread in threading.enumerate() and (thread is not threading.main_thread() or thread.is_alive())


def in_threads(operation: Callable[[_Subject], _T], subjects: Sequence[_Subject]) -> list[_T]:
    """Calls ``operation`` for each subject in parallel threads, because each call waits for a server.

    Returns the results in the order of ``subjects``. Raises the exception of the first call that failed.
    """
    if len(subjects) < 2:
        return [operation(subject) for subject in subjects]
    with Workers(_REQUESTS_AT_ONCE, thread_name_prefix="requests") as pool:
        return list(pool.map(operation, subjects))


def in_background(operation: Callable[[], _T], *, name: str = "request", daemon: bool = False) -> Future[_T]:
    """Starts ``operation`` in a new thread. Returns a future of its result.

    If no thread can be started, the calling thread runs it. At exit the interpreter does not wait for a ``daemon``.
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

    After a timeout the thread may still run, and the interpreter's exit does not wait for it. Exceptions of signal
    handlers are delayed until the operation has ended or timed out.
    """
    doing, end = in_background(operation, name="in-time", daemon=True), Deadline(timeout)
    _surely(lambda: wait_for([doing], end.left))
    if not doing.done():
        raise Hung
    return doing.result()


def cores() -> int:
    """Returns the number of cores that this process may use, as a limit for computing threads.

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


# --- the switch interval during a save --------------------------------------------------------------------------------
#
# A thread that needs the GIL waits until its holder releases it, or for the switch interval, 5 ms by default. A save
# needs the GIL some hundred times: after each system call, and after many of torch's operations. If a training loop
# holds it, the save waits 5 ms each time. While the save plans, training waits 5 ms after each of its own operations.
#
# With 0.5 ms, a save of 1,000 tensors beside a pure Python loop is durable after 0.19 s instead of 0.49 s, and the loop
# is as fast. Beside small matrix products the longest gap in a save of 5,000 tensors is 4 ms instead of 9 ms. With
# 0.1 ms such a loop loses a fifth of its speed to the switching.
#
# The interval is a setting of the whole process. It is short while a save runs in its thread, and restored afterwards.
# If the program sets another interval during the save, that one stays. If the program reads the short interval during
# the save and sets it again later, the short one stays.

_SECONDS = 0.0005
_FIRST_RELEASE = 0.0001  # enough for the other thread to wake up
_RESOLUTION = 2e-6  # Python stores whole microseconds


class Borrowed(Generic[_T]):
    """A setting of the whole process that is changed while it has users, and restored after the last one.

    ``change`` changes the setting and returns the program's value, or returns None if there is nothing to change.
    ``restore`` restores that value, unless the program has set another one since.
    """

    def __init__(self, change: Callable[[], _T | None], restore: Callable[[_T], object]) -> None:
        self._change, self._restore = change, restore
        # Reentrant, because a signal handler or the collector may interrupt its holder.
        self._lock = free_in_child(threading.RLock())
        self._users: set[object] = set()
        self._before: _T | None = None  # the program's value, while the setting is changed
        in_child(self, Borrowed._return)  # a forked child has none of the threads that use the setting

    def use(self, user: object) -> bool:
        """Adds a user. Returns whether that changed the setting."""
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

    A thread that already waits for the GIL waits for the old interval. So the constructor releases the GIL once: the
    training thread may wait, having just started the calling thread.
    """

    def __init__(self) -> None:
        _interval.use(id(self))
        self._end = Finalizer(self, _interval.leave, id(self))
        time.sleep(_FIRST_RELEASE)

    def end(self) -> None:
        """Restores the switch interval, unless it has other users. Idempotent."""
        self._end()
