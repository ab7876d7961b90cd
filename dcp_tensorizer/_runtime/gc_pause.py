"""Python's garbage collector, paused while only live objects are made.

Without the pause, a save of 20,000 small tensors makes 4 full collections, and 3 with `SavePlanner`.
One of them comes while training waits. With the pause and `SavePlanner` there are none.

The collector is the whole process's, and so the trainer's. Its switch (``gc.disable``), its thresholds and what is
frozen are left as the trainer has them, whichever thread changes them meanwhile.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .forks import free_in_child, in_child

_AGEINGS = 96
"""Without a full collection in between: some ten saves. Then one may come, for cycles that were aged and died."""
_FROZEN_BY_PYTHON = 1000 if sys.version_info[:2] == (3, 12) else 0
"""Python 3.12 begins with some 375 frozen objects, and nothing is lost if they thaw. A trainer freezes many more."""


class _Collector:
    """Pauses the collector as long as any thread uses the pause."""

    def __init__(self) -> None:
        # Taken twice by one thread where the handler of a signal has interrupted it, and saves.
        self._lock = free_in_child(threading.RLock())
        self._users: set[object] = set()
        self._thresholds: tuple[int, int, int] | None = None  # the trainer's, while it is paused
        self._aged = 0
        self._full_collections = 0
        in_child(self, _Collector._let_go)

    def _let_go(self) -> None:
        """Lets go in a forked child: none of the threads that use the pause is there."""
        self._users.clear()
        thresholds, self._thresholds = self._thresholds, None
        if thresholds is not None and gc.get_threshold() == (0, *thresholds[1:]):
            gc.set_threshold(*thresholds)

    def pause(self, user: object) -> None:
        """Nothing happens where it is paused already, or where the trainer has switched it off."""
        with self._lock:
            self._users.add(user)
            thresholds = gc.get_threshold()
            if self._thresholds is not None or not gc.isenabled() or not thresholds[0]:
                return
            self._thresholds = thresholds
            gc.set_threshold(0, *thresholds[1:])
        gc.collect(1)  # the training thread's garbage must not count as old: it may hold on to memory of a GPU

    def resume(self, user: object, *, ages: bool) -> None:
        """The last user's end is the end of the pause; with ``ages`` what lives then counts as old."""
        with self._lock:
            self._users.discard(user)
            if self._users or self._thresholds is None:
                return
            try:
                if ages and gc.isenabled():
                    self._age()
            finally:
                thresholds, self._thresholds = self._thresholds, None
                if gc.get_threshold() == (0, *thresholds[1:]):  # otherwise the program has set others, and they stay
                    gc.set_threshold(*thresholds)

    def _age(self) -> None:
        """Makes all objects count as old without a look at them; full collections are further off then.

        What another thread freezes after `gc.get_freeze_count` has been asked and before the thawing is thawed, too.
        """
        full = gc.get_stats()[-1]["collections"]
        if full != self._full_collections:
            self._aged, self._full_collections = 0, full
        self._aged += 1
        is_frozen = gc.get_freeze_count() > _FROZEN_BY_PYTHON  # by the trainer, and would thaw
        if self._aged <= _AGEINGS and not is_frozen:
            gc.freeze()
            gc.unfreeze()


_collector = _Collector()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keeps the collector from running, and counts what is made as old afterwards: a with statement, or a decorator.

    Where thousands of objects are made that all live on, the collector goes through them and through all of torch's
    for nothing: a third of the time in which 5,000 small tensors are loaded, and a sixth of a second in which a save
    keeps training from the interpreter. If it were only off, it would go through them in what comes next, DCP's
    planning. Not for what takes seconds, since garbage of other threads stays, too.

    If it is left by an exception, nothing counts as old: what failed is in a cycle with the exception, and would keep
    its memory until a full collection.

    It is paused by its first threshold, which is 0 meanwhile. Nothing is changed for a trainer that has switched the
    collector off, to collect when it likes. One that sets the first threshold to 0 in this very time gets back the
    threshold from before.
    """
    user = object()
    is_done = False
    try:
        _collector.pause(user)
        yield
        is_done = True
    finally:
        _collector.resume(user, ages=is_done)


def age_objects() -> None:
    """Counts what lives now as old, as `collector_paused` does with what is made in it: for what DCP has made."""
    with collector_paused():
        pass
