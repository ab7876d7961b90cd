"""`collector_paused`: no collections during a pause, and the trainer's settings afterwards."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from dcp_tensorizer._runtime.interpreter import age_objects, collector_paused

from ...lab.waiting import WAIT, in_thread

THRESHOLDS = (500, 11, 12)


class _Cycle:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Enables the collector, with unusual thresholds."""
    gc.collect()
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    yield
    gc.enable()
    gc.set_threshold(*before)


def collections_while_objects_are_made() -> int:
    """Counts the collections that start while a hundred thousand objects are made."""
    begun: list[str] = []

    def record(phase: str, info: dict[str, int]) -> None:
        begun.extend([phase] if phase == "start" else [])

    gc.callbacks.append(record)
    try:
        made = [[number] for number in range(100_000)]
    finally:
        gc.callbacks.remove(record)
    assert len(made) == 100_000
    return len(begun)


def test_no_collections_during_a_pause() -> None:
    """Pauses nest. After the outer pause the collector runs again."""
    with collector_paused():
        assert collections_while_objects_are_made() == 0
        with collector_paused():
            assert collections_while_objects_are_made() == 0
        assert collections_while_objects_are_made() == 0
    assert collections_while_objects_are_made() > 0
    assert gc.get_threshold() == THRESHOLDS


def test_the_pause_lasts_as_long_as_any_thread_needs_it() -> None:
    """The end of one thread's pause does not end the pause of another thread."""
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


def test_a_disabled_collector_stays_disabled() -> None:
    """If the trainer has called `gc.disable`, a pause changes nothing, and moves no objects."""
    gc.disable()
    with collector_paused():
        assert gc.get_threshold() == THRESHOLDS
        cycle = weakref.ref(_Cycle())
    assert not gc.isenabled()
    assert gc.get_threshold() == THRESHOLDS
    assert cycle() is not None
    gc.collect(1)
    assert cycle() is None


def test_a_threshold_of_zero_stays() -> None:
    """If the trainer has set the first threshold to 0, a pause changes nothing, and moves no objects."""
    gc.set_threshold(0)
    with collector_paused():
        cycle = weakref.ref(_Cycle())
    assert gc.get_threshold()[0] == 0
    gc.collect(1)
    assert cycle() is None


def test_a_collector_that_is_disabled_during_a_pause_stays_disabled() -> None:
    """The end of the pause then moves no objects."""
    with collector_paused():
        in_thread(gc.disable).join(WAIT)
        cycle = weakref.ref(_Cycle())
    assert not gc.isenabled()
    assert gc.get_threshold() == THRESHOLDS
    gc.collect(1)
    assert cycle() is None


def test_thresholds_that_are_set_during_a_pause_stay() -> None:
    """They apply at once, and the end of the pause does not replace them."""
    with collector_paused():
        in_thread(lambda: gc.set_threshold(1000, 5, 5)).join(WAIT)
        assert collections_while_objects_are_made() > 0
    assert gc.get_threshold() == (1000, 5, 5)


def test_an_error_ends_the_pause() -> None:
    """A decorated function that raises ends its pause, at each call."""

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
    """A KeyboardInterrupt at the beginning or at the end of a pause ends the pause."""

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


def test_new_objects_are_moved_to_the_oldest_generation() -> None:
    """After a pause, no collection of young objects visits the new ones."""
    with collector_paused():
        made = [[number] for number in range(100_000)]
    assert gc.get_count()[0] < 1000
    assert any(old is made for old in gc.get_objects(generation=2))


def test_objects_of_a_failed_call_stay_young() -> None:
    """An exception and its objects are in a cycle. In the oldest generation they would hold their memory for long."""
    made: list[list[int]] = []

    @collector_paused()
    def fails() -> None:
        made.append([1])
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert not any(old is made[0] for old in gc.get_objects(generation=2))


def test_garbage_is_collected_before_objects_are_moved() -> None:
    """A step's cycles may hold gigabytes of activations, and the next full collection may be hours away."""
    cycle = weakref.ref(_Cycle())
    age_objects()
    assert cycle() is None


def test_dead_cycles_in_the_oldest_generation_are_collected() -> None:
    """Full collections happen again after a limited number of pauses, even if the program makes few objects."""
    dead = []
    for _ in range(300):
        cycle = _Cycle()
        cycles = [_Cycle() for _ in range(1000)]
        age_objects()
        dead.append(weakref.ref(cycle))
        del cycle, cycles
    assert dead[0]() is None


@pytest.mark.parametrize("when", ["before", "during"])
def test_frozen_objects_stay_frozen(when: str) -> None:
    """A trainer may freeze objects before it forks, before a pause or during one."""
    if when == "before":
        gc.freeze()
    try:
        with collector_paused():
            if when == "during":
                in_thread(gc.freeze).join(WAIT)
            frozen = gc.get_freeze_count()
        assert 0 < gc.get_freeze_count() <= frozen  # some may have been freed
    finally:
        gc.unfreeze()


def test_frozen_objects_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting visits all frozen objects, and a load has thousands of pauses."""
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
