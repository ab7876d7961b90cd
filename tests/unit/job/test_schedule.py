"""When a save is due."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_tensorizer._index.schema import SaveRecord
from dcp_tensorizer._job.metrics import ASSUMED, GoodputClock
from dcp_tensorizer._job.policy import SaveInterval, SavePolicy, check_interval


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def policy_of(every: int | None, interval: SaveInterval | None, time: Time | None = None) -> SavePolicy:
    return SavePolicy(every, interval, clock=GoodputClock(time or Time()))


@given(every=st.integers(1, 9), calls=st.lists(st.integers(1, 5), max_size=40))
def test_each_multiple_is_saved_once(every: int, calls: list[int]) -> None:
    """A save is due if a multiple has been reached or passed since the last save, however far apart the calls are."""
    policy, step, last = policy_of(every, None), 0, 0
    for stride in calls:
        step += stride
        is_due = any(number % every == 0 for number in range(last + 1, step + 1))
        assert policy.is_due(step) == is_due
        if is_due:
            policy.record_save(step, is_due=True)
            last = step


def test_seconds_are_counted_from_the_last_save() -> None:
    """A save is due when the interval has passed since the last save."""
    clock = Time()
    policy = policy_of(None, 10.0, clock)
    due = []
    for clock.now in (9.0, 10.0, 11.0, 19.9, 20.0):
        due.append(policy.is_due(1))
        if due[-1]:
            policy.record_save(1, is_due=True)
    assert due == [False, True, False, False, True]


def test_either_is_enough() -> None:
    """With both intervals, either makes a save due. Without intervals, every step is due."""
    clock = Time()
    policy = policy_of(5, 10.0, clock)
    assert [policy.is_due(step) for step in (4, 5)] == [False, True]
    clock.now = 10.0
    assert policy.is_due(4)
    assert policy_of(None, None).is_due(0)


def saved(time: Time, clock: GoodputClock, stall: float, durable: float) -> None:
    """Records a save from its start to its commit, and resets the time."""
    begun = time.now
    time.now = begun + stall
    clock.stalled(begun, saves=True)
    time.now = begun + durable
    clock.saved(begun)
    time.now = begun


def test_an_interval_that_sets_itself_follows_costs_and_failures() -> None:
    """Young's interval is longer for costly saves and shorter after failures. At first every step is due."""
    time = Time()
    clock = GoodputClock(time)
    policy = SavePolicy(None, "auto", clock=clock)
    assert policy.is_due(1)
    saved(time, clock, stall=0.5, durable=4.0)
    policy.record_save(1, is_due=True)
    assert policy.interval == pytest.approx((2 * 0.5 * ASSUMED) ** 0.5)
    time.now = 3 * ASSUMED  # it has not failed meanwhile
    assert policy.interval == pytest.approx((2 * 0.5 * 4 * ASSUMED) ** 0.5)
    clock.resume(SaveRecord(1, None, (), {}, lived=3 * ASSUMED, restarts=2))
    assert clock.report().mean_time_between_failures == pytest.approx(ASSUMED)
    clock.resume(SaveRecord(1, None, (), {}, lived=3 * ASSUMED, restarts=2, is_end=True))
    assert clock.restarts == 2


def test_a_save_is_never_due_before_the_last_is_durable() -> None:
    """Otherwise training would wait for the last save."""
    time = Time()
    clock = GoodputClock(time)
    policy = SavePolicy(None, "auto", clock=clock)
    saved(time, clock, stall=0.001, durable=90.0)
    assert policy.interval == 90.0


@pytest.mark.parametrize(("bounds", "interval"), [((60, 3600), 60.0), ((0, 5), 5.0), ([7.0, 7.0], 7.0)])
def test_an_interval_has_bounds(bounds: SaveInterval, interval: float) -> None:
    """The interval stays between the bounds that users pass."""
    time = Time()
    clock = GoodputClock(time)
    saved(time, clock, stall=0.1, durable=1.0)
    assert SavePolicy(None, check_interval(bounds), clock=clock).interval == interval


@pytest.mark.parametrize(
    ("interval", "message"),
    [
        ("10m", "save_interval must be a number of seconds, a pair of them, or 'auto', got '10m'"),
        ((1, 2, 3), "must be a pair"),
        ((9, 3), "the shorter interval first"),
        ((-1, 3), "at least 0 seconds"),
        (0, "more than 0 seconds"),
    ],
)
def test_an_interval_that_makes_no_sense_is_refused(interval: Any, message: str) -> None:
    """The error names the argument and its value."""
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        check_interval(interval)


def test_a_policy_counts_what_is_saved_and_what_is_held_apart() -> None:
    """After a step is only held in memory, a save stays due. A restored step counts as saved and held."""
    policy = SavePolicy(10, None, 3, clock=GoodputClock(Time()))
    assert (policy.is_due(10), policy.is_due_in_memory(10)) == (True, True)
    policy.record_save(10, is_due=False)
    assert (policy.is_due(11), policy.is_due_in_memory(11)) == (True, False)
    policy.record_save(11, is_due=True)
    assert (policy.is_due(12), policy.is_due_in_memory(12)) == (False, True)
    policy.record_save(29, is_due=True)
    assert [(policy.is_due(step), policy.is_due_in_memory(step)) for step in (29, 30)] == [(False, False), (True, True)]


def test_no_step_is_due_in_memory_by_default() -> None:
    """Without ``survive_every`` no step is due in memory."""
    policy = policy_of(None, None)
    policy.record_save(7, is_due=True)
    assert (policy.is_due(8), policy.is_due_in_memory(8)) == (True, False)
