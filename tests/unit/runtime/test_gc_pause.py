"""The garbage collector is paused, never left so, and otherwise as the trainer has it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from dcp_tensorizer._runtime.gc_pause import age_objects, collector_paused

from ...lab.waiting import WAIT, in_thread

THRESHOLDS = (500, 11, 12)


class _Cycle:
    """Something that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """A collector that is on, with thresholds that nobody has by default."""
    gc.collect()
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    yield
    gc.enable()
    gc.set_threshold(*before)


def collections_while_objects_are_made() -> int:
    """How often the collector begins of its own accord while a hundred thousand objects are made."""
    begun: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        begun.extend([phase] if phase == "start" else [])

    gc.callbacks.append(note)
    try:
        made = [[number] for number in range(100_000)]
    finally:
        gc.callbacks.remove(note)
    assert len(made) == 100_000
    return len(begun)


def test_no_collections_within() -> None:
    """Nor within one in it; afterwards there are."""
    with collector_paused():
        assert collections_while_objects_are_made() == 0
        with collector_paused():
            assert collections_while_objects_are_made() == 0
        assert collections_while_objects_are_made() == 0
    assert collections_while_objects_are_made() > 0
    assert gc.get_threshold() == THRESHOLDS


def test_the_pause_lasts_as_long_as_any_thread_needs_it() -> None:
    """The first that is done does not end it for the others."""
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with collector_paused():
            inside.set()
            assert leave.wait(WAIT)

    thread = in_thread(first)
    assert inside.wait(WAIT)
    with collector_paused():
        leave.set()
        thread.join(WAIT)
        assert collections_while_objects_are_made() == 0
    assert gc.get_threshold() == THRESHOLDS


def test_who_has_no_collector_gets_none() -> None:
    """A trainer that collects the young ones when it likes finds the collector as it left it, and its garbage young."""
    gc.disable()
    with collector_paused():
        assert gc.get_threshold() == THRESHOLDS
        cycle = weakref.ref(_Cycle())
    assert not gc.isenabled()
    assert gc.get_threshold() == THRESHOLDS
    assert cycle() is not None
    gc.collect(1)
    assert cycle() is None


def test_a_threshold_of_zero_is_no_collector_either() -> None:
    """The other way of switching it off."""
    gc.set_threshold(0)
    with collector_paused():
        cycle = weakref.ref(_Cycle())
    assert gc.get_threshold()[0] == 0
    gc.collect(1)
    assert cycle() is None


def test_a_trainer_that_switches_it_off_meanwhile_finds_it_off() -> None:
    """On another thread, while a save is in progress; what has been made stays young then."""
    with collector_paused():
        in_thread(gc.disable).join(WAIT)
        cycle = weakref.ref(_Cycle())
    assert not gc.isenabled()
    assert gc.get_threshold() == THRESHOLDS
    gc.collect(1)
    assert cycle() is None


def test_thresholds_that_a_trainer_sets_meanwhile_stay() -> None:
    """They hold at once, and are not replaced by those from before."""
    with collector_paused():
        in_thread(lambda: gc.set_threshold(1000, 5, 5)).join(WAIT)
        assert collections_while_objects_are_made() > 0
    assert gc.get_threshold() == (1000, 5, 5)


def test_an_error_ends_the_pause() -> None:
    """As a decorator, too, call after call."""

    @collector_paused()
    def fails() -> None:
        assert collections_while_objects_are_made() == 0
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            fails()
        assert gc.get_threshold() == THRESHOLDS


@pytest.mark.parametrize("during", ["collect", "get_freeze_count"])
def test_an_interruption_ends_the_pause(during: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while it begins, or while it ends."""

    def interrupt(*arguments: int) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gc, during, interrupt)
        with pytest.raises(KeyboardInterrupt):
            age_objects()
    assert gc.get_threshold() == THRESHOLDS
    with collector_paused():
        assert collections_while_objects_are_made() == 0
    assert gc.get_threshold() == THRESHOLDS


def test_what_was_made_counts_as_old() -> None:
    """So that no collection goes through it a moment later."""
    with collector_paused():
        made = [[number] for number in range(100_000)]
    assert gc.get_count()[0] < 1000
    assert any(old is made for old in gc.get_objects(generation=2))


def test_what_failed_does_not_become_old() -> None:
    """An exception and what it refers to are in a cycle, which would keep their memory until a full collection."""
    made: list[list[int]] = []

    @collector_paused()
    def fails() -> None:
        made.append([1])
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert not any(old is made[0] for old in gc.get_objects(generation=2))


def test_garbage_does_not_become_old() -> None:
    """A step's cycles may hold gigabytes of activations: a collection of old ones may be hours away."""
    cycle = weakref.ref(_Cycle())
    age_objects()
    assert cycle() is None


def test_what_dies_old_is_found() -> None:
    """However often objects are made to count as old, while little else is made: full collections do come again."""
    dead = []
    for _ in range(300):
        cycle = _Cycle()
        cycles = [_Cycle() for _ in range(1000)]
        age_objects()
        dead.append(weakref.ref(cycle))
        del cycle, cycles
    assert dead[0]() is None


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_what_a_trainer_has_frozen_stays_frozen(when: str) -> None:
    """As before it forks, to share memory with its children."""
    if when == "before":
        gc.freeze()
    try:
        with collector_paused():
            if when == "meanwhile":
                in_thread(gc.freeze).join(WAIT)
            frozen = gc.get_freeze_count()
        assert 0 < gc.get_freeze_count() <= frozen  # some may have been freed
    finally:
        gc.unfreeze()


def test_frozen_objects_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To count them visits all of them, and a load has thousands of pauses."""
    counted: list[int] = []
    count = gc.get_freeze_count

    def counting() -> int:
        counted.append(count())
        return counted[-1]

    gc.collect()
    gc.freeze()
    try:
        monkeypatch.setattr(gc, "get_freeze_count", counting)
        for _ in range(10):
            age_objects()
        assert len(counted) == 1
        assert count() >= counted[0] - 100  # some may have been freed
    finally:
        gc.unfreeze()
