"""What a forked child has of what belongs to its parent: nothing.

A child has copies of its parent's objects, but not the threads, the processes and the memory that they stand for. To
end one of those in the child would end it for the parent. Locks stay as they were at that moment, held by threads that
are not there. So each object that stands for such a thing says here, when it is made, what becomes of it in a child:

- a lock is free there (`free_in_child`),
- what is to be ended with an object is not ended there (`Finalizer`),
- anything else lets go by a function of its own (`in_child`): a descriptor is closed, a writer begins anew,
- and an object that others ask may ask whether it is still in the process that made it (`Home`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["Finalizer", "Home", "free_in_child", "in_child"]

_T = TypeVar("_T")

# Not a WeakKeyDictionary, which calls Python code when an owner goes. What a signal's handler raises in the middle of
# that, a SystemExit say, is dropped by the interpreter.
_owners: dict[int, tuple[weakref.ref[Any], Callable[[Any], object]]] = {}
_FEW = 64
_most = _FEW  # so many may there be before those that are gone are looked for


def in_child(owner: _T, let_go: Callable[[_T], object]) -> None:
    """Has ``let_go(owner)`` called in each child that this process forks, as long as the owner lives.

    It must not wait for a lock. An owner has one such function.
    """
    global _most
    if len(_owners) >= _most:
        for number, (reference, _) in list(_owners.items()):
            if reference() is None:
                _owners.pop(number, None)
        _most = max(_FEW, 2 * len(_owners))
    _owners[id(owner)] = weakref.ref(owner), let_go


def free_in_child(lock: _T) -> _T:
    """Returns a lock, or a condition, that nobody holds in a forked child but the thread that has forked it."""
    in_child(lock, _free)
    return lock


def _free(lock: Any) -> None:
    is_owned = getattr(lock, "_is_owned", None)  # the forking thread goes on in the child, and gives it back there
    if is_owned is None or not is_owned():
        lock._at_fork_reinit()


class Finalizer(weakref.finalize):  # type: ignore[type-arg]
    """As `weakref.finalize`, in this process alone: a forked child ends nothing that is its parent's."""

    __slots__ = ("__weakref__",)

    def __init__(self, owner: object, end: Callable[..., object], /, *arguments: Any) -> None:
        super().__init__(owner, end, *arguments)
        in_child(self, Finalizer.detach)


class Home:
    """The process that an object belongs to. A copy of the object in a forked child is not at home there."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        in_child(self, Home._leave)

    @property
    def is_here(self) -> bool:
        """Whether this is the process that made it."""
        return self._pid == os.getpid()

    def _leave(self) -> None:
        self._pid = 0  # in another namespace the child may have its parent's number


def _let_go() -> None:
    # All are kept until the last one has let go: to let go may free others, whose finalizers would end what they have.
    owners = [(reference(), let_go) for reference, let_go in list(_owners.values())]
    for owner, let_go in owners:
        if owner is not None:
            with suppress(Exception):  # the others have their turn
                let_go(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
