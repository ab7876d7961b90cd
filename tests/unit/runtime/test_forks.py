"""Locks, finalizers and mappings in forked children."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import select
import sys
import threading
from collections.abc import Callable

import pytest

from dcp_tensorizer._runtime.forks import Finalizer, Home, free_in_child, in_child, keep_from_children

from ...lab.processes import PACKAGE, is_mapped, is_so_in_child

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")


class _Owner:
    """An object that can be referenced weakly."""


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock, threading.Condition])
def test_a_lock_of_another_thread_is_free_in_a_child(make: Callable[[], threading.Lock]) -> None:
    """A child can take a lock that another thread of the parent holds. In the parent the lock stays held."""
    lock, plain = free_in_child(make()), make()
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with lock, plain:
            is_held.set()
            may_end.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait()
    try:
        assert is_so_in_child(lambda: lock.acquire(blocking=False))
        assert is_so_in_child(lambda: not plain.acquire(blocking=False))
        assert not lock.acquire(blocking=False)
    finally:
        may_end.set()
        holder.join()


def test_a_lock_that_the_forking_thread_holds_stays_held() -> None:
    """The forking thread continues in the child inside its `with` block, and releases the lock there."""
    lock = free_in_child(threading.RLock())

    def leaves_the_block() -> bool:
        lock.release()
        return lock.acquire(blocking=False)

    with lock:
        assert is_so_in_child(leaves_the_block)


def test_a_finalizer_ends_nothing_in_a_child() -> None:
    """A finalizer does nothing in a child, whether its owner is freed there or the child exits."""
    ended: list[str] = []
    owners = [_Owner()]
    finalizer = Finalizer(owners[0], ended.append, "ended")

    def goes() -> bool:
        owners.clear()
        return ended == [] and not finalizer.alive and finalizer() is None

    assert is_so_in_child(goes)
    owners.clear()
    assert ended == ["ended"]


def test_an_owner_that_only_another_thread_holds_ends_nothing_in_a_child() -> None:
    """The child frees owners of the parent's other threads before its fork hooks run, while their locks are held."""
    of_thread, lock, ended = threading.local(), free_in_child(threading.Lock()), os.pipe()
    is_ready, goes_on = threading.Event(), threading.Event()

    def end() -> None:
        os.write(ended[1], b"ended")

    def hold() -> None:
        of_thread.owner = _Owner()
        Finalizer(of_thread.owner, end)
        with lock:
            is_ready.set()
            goes_on.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_ready.wait()
    try:
        assert is_so_in_child(lambda: not select.select([ended[0]], [], [], 0)[0] and lock.acquire(blocking=False))
    finally:
        goes_on.set()
        thread.join()
    assert os.read(ended[0], 5) == b"ended"
    for descriptor in ended:
        os.close(descriptor)


def test_a_copy_is_not_at_home_in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Home.is_here` is false in a child, even if a PID namespace gives the child its parent's pid."""
    home = Home()
    assert home.is_here
    assert is_so_in_child(lambda: not home.is_here)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    of_first = Home()
    assert of_first.is_here
    assert is_so_in_child(lambda: not of_first.is_here)


def test_each_registered_function_runs_once_in_a_child() -> None:
    """An error of one function does not prevent the others. Functions of dead owners are not called."""
    asked: list[str] = []
    first, second, third = _Owner(), _Owner(), _Owner()

    def fails(owner: _Owner) -> None:
        asked.append("fails")
        raise OSError("no")

    in_child(first, fails)
    in_child(second, lambda owner: asked.append("gone"))
    in_child(third, lambda owner: asked.append("called"))
    del second
    assert is_so_in_child(lambda: asked == ["fails", "called"])
    assert asked == []


def test_dead_owners_are_removed() -> None:
    """Thousands of short-lived locks leave no entries behind."""
    from dcp_tensorizer._runtime import forks

    for _ in range(5000):
        free_in_child(threading.Lock())
    # Dead owners are removed when the number of entries has doubled.
    assert len(forks._owners) <= forks._most < 1000


def test_locks_and_finalizers_are_made_for_forks() -> None:
    """No module makes a lock, a condition or a finalizer that forked children would inherit unchanged."""
    made = re.compile(r"(?<!free_in_child\()threading\.(?:R?Lock|Condition)\(|weakref\.finalize\(")
    found = {
        str(path.relative_to(PACKAGE)): made.findall(path.read_text())
        for path in PACKAGE.rglob("*.py")
        if path != PACKAGE / "_runtime" / "forks.py"
    }
    assert {name: uses for name, uses in found.items() if uses} == {}


def test_a_mapping_that_is_kept_from_children() -> None:
    """The child has a hole at the mapping's address, and never unmaps it."""
    mapping = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    keep_from_children(mapping)
    references = sys.getrefcount(mapping)
    assert is_so_in_child(lambda: not is_mapped(address) and sys.getrefcount(mapping) == references + 1)
    assert is_mapped(address)
