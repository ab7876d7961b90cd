"""When a save is due."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dcp_tensorizer._managing.policy import SavePolicy, Schedule


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(every=st.integers(1, 9), calls=st.lists(st.integers(1, 5), max_size=40))
def test_each_multiple_is_saved_once(every: int, calls: list[int]) -> None:
    """However far apart the calls are, one is due whenever a multiple has been reached or passed since the last."""
    schedule, step, last = Schedule(every, None), 0, 0
    for stride in calls:
        step += stride
        is_due = any(number % every == 0 for number in range(last + 1, step + 1))
        assert schedule.is_due(step) == is_due
        if is_due:
            schedule.mark(step)
            last = step


def test_seconds_are_counted_from_the_last_save() -> None:
    """A save is due when the interval is over, and then not again before the next one is."""
    clock = Clock()
    schedule = Schedule(None, 10.0, clock=clock)
    due = []
    for clock.now in (9.0, 10.0, 11.0, 19.9, 20.0):
        due.append(schedule.is_due(1))
        if due[-1]:
            schedule.mark(1)
    assert due == [False, True, False, False, True]


def test_either_is_enough() -> None:
    """With both intervals, steps or seconds make a save due; with neither, everything does."""
    clock = Clock()
    schedule = Schedule(5, 10.0, clock=clock)
    assert [schedule.is_due(step) for step in (4, 5)] == [False, True]
    clock.now = 10.0
    assert schedule.is_due(4)
    assert Schedule(None, None).is_due(0)


def test_a_policy_counts_what_is_saved_and_what_is_held_apart() -> None:
    """A step that is held was of memory alone: the save is still due. A restored step is both."""
    policy = SavePolicy(Schedule(10, None), Schedule(3, None))
    assert (policy.is_due(10), policy.is_due_in_memory(10)) == (True, True)
    policy.begin(10, is_due=False)
    assert (policy.is_due(11), policy.is_due_in_memory(11)) == (True, False)
    policy.begin(11, is_due=True)
    assert (policy.is_due(12), policy.is_due_in_memory(12)) == (False, True)
    policy.stand_at(29)
    assert [(policy.is_due(step), policy.is_due_in_memory(step)) for step in (29, 30)] == [(False, False), (True, True)]


def test_without_a_schedule_for_memory_nothing_is_held_by_it() -> None:
    """Whatever step it is."""
    policy = SavePolicy(Schedule(None, None))
    policy.stand_at(7)
    assert (policy.is_due(8), policy.is_due_in_memory(8)) == (True, False)
