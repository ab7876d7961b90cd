"""What a forked child lets go of, before it does anything.

A child has its parent's objects, but not the threads, the processes and the memory that they stand for. To end one of
those in the child would end it for the parent. Locks stay as they were at that moment, held by threads that are not
there.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["in_child"]

_T = TypeVar("_T")

# Not a WeakKeyDictionary, which calls Python code when an owner goes. What a signal's handler raises in the middle of
# that, a SystemExit say, is dropped by the interpreter.
_owners: dict[int, tuple[weakref.ref[Any], Callable[[Any], object]]] = {}


def in_child(owner: _T, let_go: Callable[[_T], object]) -> None:
    """Has ``let_go(owner)`` called in each child that this process forks, as long as the owner lives.

    It must not wait for a lock.
    """
    for number, (reference, _) in list(_owners.items()):
        if reference() is None:
            _owners.pop(number, None)
    _owners[id(owner)] = weakref.ref(owner), let_go


def _let_go() -> None:
    # All are kept until the last one has let go: to let go may free others, whose finalizers would end what they have.
    owners = [(reference(), let_go) for reference, let_go in list(_owners.values())]
    for owner, let_go in owners:
        if owner is not None:
            with suppress(Exception):  # the others have their turn
                let_go(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
