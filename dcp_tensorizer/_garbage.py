"""Python's garbage collector, put off while only live objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["garbage_stays"]


@contextmanager
def garbage_stays() -> Iterator[None]:
    """No collections within it, and what is made counts as old afterwards: a with statement, or a decorator.

    Where thousands of objects are made that all live on, the collector goes through them and through all of torch's
    for nothing: a third of the time in which 5,000 small tensors are loaded. Off, it would count them all the same, and
    do so in what comes next, DCP's planning: another third. Not for what takes seconds, since garbage of other threads
    stays, too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else these would thaw
            gc.freeze()
            gc.unfreeze()  # to the oldest generation, from wherever they were; neither looks at a single one
        if was_enabled:
            gc.enable()
