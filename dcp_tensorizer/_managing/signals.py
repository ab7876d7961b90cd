"""The signals that ask a job to stop."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from .._forks import Home, in_child

__all__ = ["StopSignals"]

_handled: set[int] = set()  # by a manager of this process, now or before
_forking = threading.local()

# A launcher passes on the signal that its scheduler sent to it and to us: that is the same one.
_SAME_SIGNAL_SECONDS = 5.0


class StopSignals:
    """Notes that a signal has come, and lets the job go on. A second one does what it would have done without this.

    Handlers that were there before are called as well. Signals that come within 5 seconds count as one: a scheduler
    may signal a job and its launcher, which signals the job again.

    Args:
        signals: Their numbers.

    Attributes:
        seen: A signal has come.

    Raises:
        TypeError: they are no signals.
        ValueError: one cannot be handled, or this is not the main thread, which alone can have handlers.
    """

    def __init__(self, signals: Sequence[int]) -> None:
        try:
            self._signals = tuple(signal.Signals(number) for number in signals)
        except (TypeError, ValueError) as error:
            raise TypeError(f"stop_signals must be signals, as signal.SIGTERM is, and are {signals!r}") from error
        if fixed := {signal.SIGKILL, signal.SIGSTOP} & set(self._signals):
            raise ValueError(f"{', '.join(sorted(number.name for number in fixed))} cannot be handled: leave it out")
        if self._signals and threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "signals can be handled by the main thread alone: make the manager there, or pass stop_signals=()"
            )
        self.seen = False
        self._first = 0.0
        self._before: dict[int, Any] = {}
        self._over = False
        self._home = Home()
        in_child(self, StopSignals.restore)  # a worker of a data loader must end when it is told to

    def install(self) -> None:
        """Puts the handlers in place."""
        try:
            for number in self._signals:
                self._before[number] = signal.signal(number, self._handle)
                _handled.add(number)
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Puts back the handlers that were there before, where nobody has put others. Idempotent.

        On another thread than the main one each goes back when its signal comes.
        """
        self._over = True
        if threading.current_thread() is threading.main_thread():
            for number in self._before:
                self._put_back(number)

    def _put_back(self, number: int) -> bool:
        """Whether the handler is now the one that was there before."""
        before = self._before[number]
        if before is None or signal.getsignal(number) != self._handle:
            return False
        signal.signal(number, before)
        return True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_second = self.seen and time.monotonic() - self._first > _SAME_SIGNAL_SECONDS
        is_over = self._over or not self._home.is_here  # it may come in a child before the handlers are back
        if (is_second or is_over) and self._put_back(number):
            signal.raise_signal(number)
            return
        if not self.seen:
            self._first = time.monotonic()
            self.seen = True
        before = self._before[number]
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)


# A signal that comes to a child before it has put the handlers back would be noted by a handler, and dropped by Python:
# it has to wait, as long as the thread that forks has it blocked.


def _hold_back() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _handled) if _handled else None


def _let_come() -> None:
    mask, _forking.mask = getattr(_forking, "mask", None), None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_back, after_in_parent=_let_come, after_in_child=_let_come)
