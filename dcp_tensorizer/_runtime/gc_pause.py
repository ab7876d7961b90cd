"""Pauses Python's garbage collector while objects are made that all stay alive.

Without the pause, a save of 20,000 small tensors causes 4 full collections, or 3 with `SavePlanner`. Training waits for
one of them. With the pause and `SavePlanner` there are none.

The collector belongs to the trainer. Its switch (``gc.disable``), its thresholds and its frozen objects stay as the
trainer has set them, even if the trainer changes them meanwhile.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from .threads import Borrowed

_AGEINGS = 96
"""Ageings without a full collection in between: some ten saves. Then one may run, for old cycles that have died."""
_FROZEN_BY_PYTHON = 1000 if sys.version_info[:2] == (3, 12) else 0
"""Python 3.12 begins with about 375 frozen objects, which may be unfrozen. A trainer freezes many more."""


def _pause() -> tuple[int, int, int] | None:
    thresholds = gc.get_threshold()
    if not gc.isenabled() or not thresholds[0]:  # the trainer has switched it off
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
    """Makes all objects count as old without visiting them, which delays full collections.

    If another thread freezes objects between the check of `gc.get_freeze_count` and `gc.unfreeze`, they are unfrozen
    too.
    """
    global _aged, _full_collections, _is_frozen
    full = gc.get_stats()[-1]["collections"]
    if full != _full_collections:
        _aged, _full_collections, _is_frozen = 0, full, False
    _aged += 1
    # Ageing would unfreeze what the trainer has frozen. Counting visits all of it, so it is rarely repeated.
    _is_frozen = _is_frozen or gc.get_freeze_count() > _FROZEN_BY_PYTHON
    if _aged <= _AGEINGS and not _is_frozen:
        gc.freeze()
        gc.unfreeze()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the collector for a with statement, or as a decorator. Afterwards all objects count as old.

    While thousands of objects are made that all stay alive, the collector visits them and all of torch's objects in
    vain. That is a third of the time of loading 5,000 small tensors. In a save, training waits a sixth of a second for
    it. A mere pause would only put it off to DCP's planning. So the objects count as old afterwards. It is not for long
    operations, because garbage of other threads stays, too.

    After an exception nothing counts as old. The failed objects are in a cycle with the exception, and as old objects
    they would keep their memory until a full collection.

    The pause sets the collector's first threshold to 0. If the trainer has switched the collector off, nothing changes.
    If the trainer sets that threshold to 0 during a pause, the end of the pause undoes that.
    """
    user = object()
    is_done = False
    try:
        if _collector.use(user):
            gc.collect(1)  # otherwise the trainer's garbage, which may hold memory of a GPU, would count as old
        yield
        is_done = True
    finally:
        _collector.leave(user, lambda: _age() if is_done and gc.isenabled() else None)


def age_objects() -> None:
    """Makes all objects count as old, as after `collector_paused`: for objects that DCP has made."""
    with collector_paused():
        pass
