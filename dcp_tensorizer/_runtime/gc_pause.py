"""Pauses Python's garbage collector while a save or a load makes many objects that stay alive.

Without the pause, a save of 20,000 small tensors causes 4 full collections, or 3 with `SavePlanner`. Training waits for
one of them. With the pause and `SavePlanner` there are none.

The trainer's settings of the collector (``gc.disable``, the thresholds, frozen objects) are preserved, even if the
trainer changes them during a pause.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from .threads import Borrowed

_AGEINGS = 96
"""After this many calls since the last full collection, about ten saves, `_age` no longer delays the next one.

A full collection frees dead cycles in the oldest generation.
"""
_FROZEN_BY_PYTHON = 1000 if sys.version_info[:2] == (3, 12) else 0
"""Python 3.12 starts with about 375 frozen objects, which may be unfrozen. A trainer that freezes has many more."""


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
_is_frozen = False  # the trainer has frozen objects


def _age() -> None:
    """Moves all objects to the oldest generation without visiting them, which delays full collections.

    Also unfreezes objects that another thread freezes between `gc.get_freeze_count` and `gc.unfreeze`.
    """
    global _aged, _full_collections, _is_frozen
    full = gc.get_stats()[-1]["collections"]
    if full != _full_collections:
        _aged, _full_collections, _is_frozen = 0, full, False
    _aged += 1
    # Ageing would unfreeze the trainer's frozen objects. Counting visits all of them, so it is rarely repeated.
    _is_frozen = _is_frozen or gc.get_freeze_count() > _FROZEN_BY_PYTHON
    if _aged <= _AGEINGS and not _is_frozen:
        gc.freeze()
        gc.unfreeze()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the collector, as a context manager or a decorator. Then moves all objects to the oldest generation.

    While thousands of objects are made that stay alive, the collector visits them and all of torch's objects, and finds
    no garbage. That takes a third of the time of loading 5,000 small tensors. In a save, training waits a sixth of a
    second for it. A pause alone would only delay the collection until DCP's planning, so the end of the pause also
    moves the objects to the oldest generation. Do not pause for long operations: garbage of other threads is not
    collected either.

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
    """Moves all objects to the oldest generation, as `collector_paused` does, for objects that DCP has made."""
    with collector_paused():
        pass
