"""Changes settings of the interpreter for a while: the garbage collector's, and the switch interval.

The trainer's settings (``gc.disable``, the collector's thresholds, frozen objects, the switch interval) are restored
afterwards, unless the trainer has set other values since.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from .forks import Finalizer, free_in_child, in_child

_T = TypeVar("_T")


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


# --- the garbage collector --------------------------------------------------------------------------------------------
#
# A save or a load makes many objects that stay alive. Without a pause of the collector, a save of 20,000 small tensors
# causes 4 full collections, or 3 with `SavePlanner`. Training waits for one of them. With the pause and `SavePlanner`
# there are none.

_AGEINGS = 96
"""The number of calls, those of about ten saves, after which `_age` no longer delays a full collection.

A full collection restarts the count. No other collection frees dead cycles in the oldest generation.
"""
_FROZEN_BY_PYTHON = 1000 if sys.version_info[:2] == (3, 12) else 0
"""Python 3.12 starts with about 375 frozen objects, which may be unfrozen. A trainer's ``gc.freeze`` adds many more."""


def _pause() -> tuple[int, int, int] | None:
    thresholds = gc.get_threshold()
    if not gc.isenabled() or not thresholds[0]:  # the trainer has disabled it
        return None
    gc.set_threshold(0, *thresholds[1:])
    return thresholds


def _end_pause(before: tuple[int, int, int]) -> None:
    if gc.get_threshold() == (0, *before[1:]):
        gc.set_threshold(*before)


_collector = Borrowed(_pause, _end_pause)  # while the first threshold is 0, the collector is paused
_aged = _full_collections = 0


def _age() -> None:
    """Moves all objects to the oldest generation without visiting them, which delays full collections.

    Does nothing after `_AGEINGS` calls, or if the trainer has frozen objects. Also unfreezes objects that another
    thread freezes between `gc.get_freeze_count` and `gc.unfreeze`.
    """
    global _aged, _full_collections
    full = gc.get_stats()[-1]["collections"]
    _aged, _full_collections = (_aged + 1 if full == _full_collections else 1), full
    if _aged <= _AGEINGS and gc.get_freeze_count() > _FROZEN_BY_PYTHON:
        _aged = _AGEINGS + 1  # ageing would unfreeze the trainer's objects; counting them again would visit each
    if _aged <= _AGEINGS:
        gc.freeze()
        gc.unfreeze()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the collector, as a context manager or a decorator. Then moves all objects to the oldest generation.

    Without a pause, while thousands of objects are made that stay alive, the collector visits these and all of torch's
    objects, and finds no garbage. That takes a third of the time of loading 5,000 small tensors. In a save, training
    waits a sixth of a second for it. A pause alone would only delay the collection until DCP's planning, so the end of
    the pause also moves the objects to the oldest generation. Do not pause for long operations: garbage of other
    threads is not collected either.

    After an exception no objects are moved. The objects of the failed call are in a reference cycle with the exception.
    In the oldest generation they would hold their memory until a full collection.

    The pause sets the collector's first threshold to 0. If the trainer has disabled the collector, nothing changes. If
    the trainer sets that threshold to 0 during a pause, the end of the pause restores the earlier value.
    """
    user = object()
    is_done = False
    try:
        if _collector.use(user):
            gc.collect(1)  # the trainer's garbage, which may hold GPU memory, must not reach the oldest generation
        yield
        is_done = True
    finally:
        _collector.leave(user, lambda: _age() if is_done and gc.isenabled() else None)


def age_objects() -> None:
    """Moves all objects, among them those that DCP has made, to the oldest generation, as `collector_paused` does."""
    with collector_paused():
        pass


# --- the switch interval during a save --------------------------------------------------------------------------------
#
# A thread that needs the GIL waits until its holder releases it, or for the switch interval, 5 ms by default. A save
# needs the GIL hundreds of times: after each system call, and after many of torch's operations. If a training loop
# holds the GIL, the save waits 5 ms each time. While the save plans, a training thread that has released the
# GIL waits up to 5 ms to get it back.
#
# With 0.5 ms, a save of 1,000 tensors beside a pure Python loop is durable after 0.19 s instead of 0.49 s, and the loop
# is as fast as with 5 ms. A loop of small matrix products pauses for at most 4 ms during a save of 5,000 tensors,
# instead of 9 ms. With 0.1 ms, it loses a fifth of its speed to the switching.
#
# The interval is short while a save runs in its thread. If the program reads the short interval during the save and
# sets it again later, the short one stays.

_SWITCH_SECONDS = 0.0005
_FIRST_RELEASE = 0.0001  # seconds without the GIL: enough for the training thread to wake up
_RESOLUTION = 2e-6  # Python stores whole microseconds


def _shorten() -> float | None:
    before = sys.getswitchinterval()
    if before <= _SWITCH_SECONDS:
        return None
    sys.setswitchinterval(_SWITCH_SECONDS)
    return before


def _set_back(before: float) -> None:
    if abs(sys.getswitchinterval() - _SWITCH_SECONDS) < _RESOLUTION:
        sys.setswitchinterval(before)


_interval = Borrowed(_shorten, _set_back)


class ShortSwitchInterval:
    """A short switch interval of the process, until `end` or until this object is freed.

    A thread that already waits for the GIL waits for the old interval. The training thread may be such a thread,
    because it has just started the calling thread. So the constructor releases the GIL once.
    """

    def __init__(self) -> None:
        _interval.use(id(self))
        self._end = Finalizer(self, _interval.leave, id(self))
        time.sleep(_FIRST_RELEASE)

    def end(self) -> None:
        """Restores the switch interval, unless it has other users. Idempotent."""
        self._end()
