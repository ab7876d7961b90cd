"""When a job saves: the schedule of saves, stop signals, and the decision of all ranks in each call to `save`."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from .._memory.copies import NOTHING_IN_MEMORY, MemoryVote
from .._runtime.forks import Home, in_child
from .._runtime.validation import check_timeout
from .metrics import GoodputClock
from .ranks import Agreement

SaveInterval = float | Literal["auto"] | tuple[float, float]


class Action(enum.Enum):
    NOTHING = enum.auto()
    SAVE = enum.auto()
    JOIN = enum.auto()
    """Use the result of the last save, which saves this step."""
    KEEP = enum.auto()
    """Use the existing checkpoint of this step."""
    HOLD = enum.auto()
    """Hold the step only in memory: no save is due, or the previous save still runs."""


@dataclass(frozen=True, slots=True)
class Vote:
    """Facts that a rank knows. After the all-reduce, a flag is set if any rank set it.

    Of the facts in `_RANK0_FLAGS`, only those of the first rank count.

    Attributes:
        stop: The rank has received a stop signal.
        force: The rank's caller wants to save, even if no save is due.
        is_last: The last save saves this step, and has not failed.
        is_there: A checkpoint of the step exists on the job's branch.
        failures: The number of saves that have failed in a row; 0 if a call to `save` has raised their error since.
        must_write: If a save is due, the rank's caller wants the step on storage, not only in memory.
        is_busy: The previous save still runs, and the rank can hold this step in memory instead of saving it.
        is_lost: Another run has taken the lease of the folder.
    """

    step: int
    stop: bool = False
    force: bool = False
    is_due: bool = False
    is_last: bool = False
    is_there: bool = False
    failures: int = 0
    must_write: bool = False
    is_busy: bool = False
    is_due_in_memory: bool = False
    is_lost: bool = False
    memory: MemoryVote = NOTHING_IN_MEMORY

    @property
    def asks_for_save(self) -> bool:
        return self.stop or self.force or self.is_due

    def numbers(self, *, is_first: bool) -> list[int]:
        """Returns the numbers for the all-reduce, which computes their maximum over all ranks."""
        own = [getattr(self, name) if is_first or name not in _RANK0_FLAGS else 0 for name in _FLAGS]
        return [self.step, -self.step, *own, *self.memory]


_RANK0_FLAGS = {"is_due", "is_last", "is_there", "failures", "is_lost"}
_FLAGS = [field.name for field in dataclasses.fields(Vote) if field.name not in ("step", "memory")]


def decide(agreement: Agreement, vote: Vote) -> tuple[Action, Vote]:
    """Decides by one all-reduce. Returns the action and the joint vote, which are the same on each rank.

    Raises `ValueError` if the ranks are at different steps, and `WriteError` if a rank is gone.
    """
    highest, lowest, *numbers = agreement.largest(*vote.numbers(is_first=agreement.is_first))
    if highest != -lowest:
        raise ValueError(
            f"the ranks save different steps, from {-lowest} to {highest}. Save the same step on every rank."
        )
    known: dict[str, Any] = dict(zip(_FLAGS, map(bool, numbers), strict=False))
    memory = MemoryVote(*map(bool, numbers[len(_FLAGS) :]))
    vote = Vote(highest, **known | {"failures": numbers[_FLAGS.index("failures")]}, memory=memory)
    if not vote.asks_for_save:
        action = Action.HOLD if vote.is_due_in_memory and not memory.ends else Action.NOTHING
    elif vote.is_last:
        action = Action.JOIN
    elif vote.is_there:
        action = Action.KEEP
    else:
        can_hold = not (vote.stop or vote.force or vote.must_write or memory.ends)
        action = Action.HOLD if vote.is_busy and can_hold else Action.SAVE
    return action, vote


# --- when a save is due -----------------------------------------------------------------------------------------------


class SavePolicy:
    """Schedule of saves, and of steps that are held only in memory.

    A save is due at the first step at or after each multiple of ``every``, or when ``interval`` has passed. Without
    either, every step is due. The first step at or after each multiple of ``every_in_memory``, if it is not None, is
    due in memory.

    ``interval`` is in seconds. With ``"auto"``, or a pair of bounds, it is computed from the cost of saves and the
    frequency of failures.
    """

    def __init__(
        self,
        every: int | None,
        interval: SaveInterval | None,
        every_in_memory: int | None = None,
        *,
        clock: GoodputClock,
    ) -> None:
        self._every = every
        self._every_in_memory = every_in_memory
        self._clock = clock
        self._bounds = None if interval is None else _bounds(interval)
        self.record_save(0, is_due=True)

    @property
    def interval(self) -> float:
        """Returns the current interval between two saves in seconds; infinite if no interval is set."""
        if self._bounds is None:
            return math.inf
        shortest, longest = self._bounds
        if shortest == longest:
            return shortest
        return min(max(self._clock.report().young_interval(), shortest), longest)

    def is_due(self, step: int) -> bool:
        if self._every is None and self._bounds is None:
            return True
        by_steps = self._every is not None and step // self._every > self._saved // self._every
        return by_steps or self._clock.now() - self._saved_at >= self.interval

    def is_due_in_memory(self, step: int) -> bool:
        every = self._every_in_memory
        return every is not None and step // every > self._held // every

    def record_save(self, step: int, *, is_due: bool) -> None:
        """Records a step that is saved or held, or that the job resumes from. ``is_due``: the step counts as saved."""
        self._held = step
        if is_due:
            self._saved, self._saved_at = step, self._clock.now()


def check_interval(interval: object) -> SaveInterval:
    """Returns ``save_interval`` in plain types. Raises `TypeError` or `ValueError` if it is invalid."""
    if isinstance(interval, str):
        if interval != "auto":
            raise TypeError(f"save_interval must be a number of seconds, a pair of them, or 'auto', got {interval!r}")
        return "auto"
    if not isinstance(interval, tuple | list):
        return check_timeout(interval, name="save_interval")
    if len(interval) != 2:
        raise ValueError(f"save_interval must be a pair (shortest, longest) in seconds, got {interval!r}.")
    shortest = check_timeout(interval[0], least=0.0, name="save_interval")
    longest = check_timeout(interval[1], name="save_interval")
    if shortest > longest:
        raise ValueError(f"save_interval must have the shorter interval first, got {interval!r}.")
    return shortest, longest


def _bounds(interval: SaveInterval) -> tuple[float, float]:
    if isinstance(interval, tuple):
        return interval
    return (0.0, math.inf) if interval == "auto" else (interval, interval)


# --- signals that ask a job to stop -----------------------------------------------------------------------------------

_handled: set[int] = set()  # the signals that managers of this process handle, or have handled
_forking = threading.local()

_SAME_SIGNAL_SECONDS = 5.0


class StopSignals:
    """Handlers of stop signals. The first signal sets ``seen``; a second one acts as it would without these handlers.

    They also call the earlier handler of the signal, except Python's own for SIGINT. Signals within 5 seconds count as
    one: a scheduler may signal a job and its launcher, which signals the job again.
    """

    def __init__(self, signals: Sequence[int]) -> None:
        try:
            self._signals = tuple(signal.Signals(number) for number in signals)
        except (TypeError, ValueError) as error:
            raise TypeError(f"stop_signals must be signals, such as signal.SIGTERM, got {signals!r}.") from error
        if fixed := {signal.SIGKILL, signal.SIGSTOP} & set(self._signals):
            names = ", ".join(sorted(number.name for number in fixed))
            raise ValueError(f"stop_signals must not contain {names}: no program can handle SIGKILL or SIGSTOP.")
        if self._signals and threading.current_thread() is not threading.main_thread():
            raise ValueError("only the main thread can handle signals. Make the manager there, or pass stop_signals=()")
        self.seen = False
        self._first = 0.0
        self._before: dict[int, Any] = {}
        self._over = False
        self._home = Home()
        in_child(self, StopSignals.uninstall)  # SIGTERM must end a data loader's worker

    def install(self) -> None:
        try:
            for number in self._signals:
                self._before[number] = signal.signal(number, self._handle)
                _handled.add(number)
        except BaseException:
            self.uninstall()
            raise

    def uninstall(self) -> None:
        """Restores the earlier handlers, unless others have been set since. Idempotent.

        Only the main thread can set handlers. After a call on another thread, a handler is restored when its signal
        arrives.
        """
        self._over = True
        if threading.current_thread() is threading.main_thread():
            for number in self._before:
                self._put_back(number)

    def _put_back(self, number: int) -> bool:
        """Restores the earlier handler of a signal.

        Returns False if another handler has been set since, or if Python did not set the earlier one.
        """
        before = self._before[number]
        if before is None or signal.getsignal(number) != self._handle:
            return False
        signal.signal(number, before)
        return True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_second = self.seen and time.monotonic() - self._first > _SAME_SIGNAL_SECONDS
        is_over = self._over or not self._home.is_here  # in a child, before the handlers are restored
        if (is_second or is_over) and self._put_back(number):
            signal.raise_signal(number)
            return
        if not self.seen:
            self._first = time.monotonic()
            self.seen = True
        before = self._before[number]
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)


# A child may receive a signal before it has restored the handlers. Python's C handler would only set a flag, which
# Python clears after a fork. So the forking thread blocks the signals until the child has restored the handlers.


def _block_signals() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _handled) if _handled else None


def _unblock_signals() -> None:
    mask, _forking.mask = getattr(_forking, "mask", None), None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_unblock_signals)
