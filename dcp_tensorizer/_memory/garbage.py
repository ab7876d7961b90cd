"""Python's garbage collector, put off while only live objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["count_as_old", "garbage_stays"]

_AGEINGS = 64
"""Without a full collection in between: some ten saves. Then one may come, for cycles that were aged and died."""

_aged = 0
_full_collections = 0


@contextmanager
def garbage_stays() -> Iterator[None]:
    """No collections within it, and what is made counts as old afterwards: a with statement, or a decorator.

    Where thousands of objects are made that all live on, the collector goes through them and through all of torch's
    for nothing: a third of the time in which 5,000 small tensors are loaded, and a sixth of a second in which a save
    keeps training from the interpreter. Off, it would count them all the same, and do so in what comes next, DCP's
    planning. Not for what takes seconds, since garbage of other threads stays, too.

    Nothing is changed for a trainer that has switched the collector off, to collect when it likes.
    """
    if not gc.isenabled():
        yield
        return
    gc.collect(1)  # the training thread's garbage must not count as old: it may hold on to memory of a GPU
    gc.disable()
    try:
        yield
    finally:
        _age()
        gc.enable()


def count_as_old() -> None:
    """What lives now counts as old, as what is made in `garbage_stays` does: for what DCP has made."""
    with garbage_stays():
        pass


def _age() -> None:
    """To the oldest generation, from wherever it was, and nothing is looked at; full collections are further off."""
    global _aged, _full_collections
    if (full := gc.get_stats()[-1]["collections"]) != _full_collections:
        _aged, _full_collections = 0, full
    _aged += 1
    if _aged <= _AGEINGS and not gc.get_freeze_count():  # what somebody has frozen would thaw
        gc.freeze()
        gc.unfreeze()
