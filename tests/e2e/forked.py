"""A walk of all live objects in a forked child: what of its parent's it still has."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from dcp_tensorizer._runtime.forks import Descriptor, Home

_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition)


def left_of_parent() -> tuple[list[str], Counter[str]]:
    """What holds a lock, a file, a process or a finalizer of the parent's; and how many of each kind there are."""
    left, seen = list[str](), Counter[str]()
    for owner, name, value in _values():
        kind, has_released = _kind(value)
        if kind:
            seen[kind] += 1
            if not has_released:
                left.append(f"{kind} {owner}.{name}")
    for finalizer, info in list(weakref.finalize._registry.items()):  # type: ignore[attr-defined]
        if info.func.__module__.startswith("dcp_tensorizer"):
            left.append(f"finalizer {info.func.__qualname__}")
        del finalizer
    left += [f"thread {thread.name}" for thread in threading.enumerate() if thread is not threading.main_thread()]
    return left, seen


def _kind(value: Any) -> tuple[str, bool]:
    """Which kind a value is of, and whether the child has let go of it."""
    if isinstance(value, _LOCKS):
        return "lock", value.acquire(blocking=False)
    if isinstance(value, socket.socket):
        return "socket", value.fileno() < 0
    if isinstance(value, Descriptor):
        return "descriptor", not value.is_ours
    if isinstance(value, subprocess.Popen):
        return "process", value.returncode is not None
    if isinstance(value, Home):
        return "home", not value.is_here
    return "", True


def _values() -> Iterator[tuple[str, str, Any]]:
    """The attributes of all objects of the package, and the names of its modules."""
    for module in [module for name, module in list(sys.modules.items()) if name.startswith("dcp_tensorizer")]:
        yield from ((module.__name__, name, value) for name, value in list(vars(module).items()))
    for thing in gc.get_objects():
        kind = type(thing)
        if not str(kind.__module__).startswith("dcp_tensorizer"):  # of a few of torch it is no text
            continue
        slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
        for name in [*getattr(thing, "__dict__", ()), *slots]:
            with suppress(Exception):  # a slot that was never filled
                yield kind.__qualname__, name, getattr(thing, name)
