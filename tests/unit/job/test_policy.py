"""The decision of all ranks about a step, from the votes of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dcp_tensorizer._job.policy import Action, Vote, decide
from dcp_tensorizer._job.ranks import Agreement
from dcp_tensorizer._memory.copies import MemoryVote

NONE = Vote(5)


class Others(Agreement):
    """Agreement with other ranks that vote ``others``. If this rank is not the first, the first of them is."""

    def __init__(self, rank: int, *others: Vote) -> None:
        super().__init__(None)
        self.rank = rank
        self._others = [other.numbers(is_first=number == 0 and rank > 0) for number, other in enumerate(others)]

    def largest(self, *numbers: int) -> list[int]:
        return [max(values) for values in zip(numbers, *self._others, strict=True)]


@pytest.mark.parametrize(
    ("changes", "action"),
    [
        ({}, Action.NOTHING),
        ({"is_last": True, "is_there": True}, Action.NOTHING),
        ({"is_due": True}, Action.SAVE),
        ({"force": True}, Action.SAVE),
        ({"stop": True}, Action.SAVE),
        ({"stop": True, "is_last": True, "is_there": True}, Action.JOIN),
        ({"is_due": True, "is_there": True}, Action.KEEP),
        ({"is_due": True, "is_busy": True}, Action.HOLD),
        ({"is_due": True, "is_busy": True, "must_write": True}, Action.SAVE),
        ({"force": True, "is_busy": True}, Action.SAVE),
        ({"stop": True, "is_busy": True}, Action.SAVE),
        ({"is_busy": True, "must_write": True}, Action.NOTHING),
        ({"is_due_in_memory": True}, Action.HOLD),
        ({"is_due_in_memory": True, "is_due": True}, Action.SAVE),
        ({"is_due_in_memory": True, "is_due": True, "is_busy": True}, Action.HOLD),
    ],
)
def test_one_rank(changes: dict[str, bool], action: Action) -> None:
    """A step is saved if a save is due, forced or the last, unless the step exists or its save is in progress."""
    vote = replace(NONE, **changes)
    assert decide(Agreement(None), vote) == (action, vote)


def test_what_other_ranks_know_does_not_count() -> None:
    """Clocks and listings of other ranks may differ, so only the first rank's count."""
    vote = replace(NONE, is_due=True, is_last=True, is_there=True, failures=3)
    assert decide(Others(1, NONE), vote) == (Action.NOTHING, NONE)
    first = replace(NONE, is_due=True, failures=2)
    assert decide(Others(1, first), NONE) == (Action.SAVE, first)
    assert decide(Others(0, vote), NONE) == (Action.NOTHING, NONE)


@pytest.mark.parametrize("name", ["stop", "force"])
def test_a_signal_or_a_wish_of_any_rank_counts(name: str) -> None:
    """One rank's stop signal or force is enough."""
    other = replace(NONE, **{name: True})
    assert decide(Others(0, other), NONE) == (Action.SAVE, other)


def test_what_any_rank_says_of_its_memory_counts() -> None:
    """One rank is enough whose save runs, which could not hold a state, or which has stopped holding states."""
    due = replace(NONE, is_due=True)
    other = replace(NONE, is_busy=True, memory=MemoryVote(has_failed=True))
    assert decide(Others(0, other), due) == (Action.HOLD, replace(other, is_due=True))
    other = replace(NONE, is_busy=True, must_write=True, memory=MemoryVote(ends=True))
    assert decide(Others(0, other), due) == (Action.SAVE, replace(other, is_due=True))


def test_that_another_run_has_the_folder_is_the_first_ranks_to_say() -> None:
    """All ranks learn that the lease is lost, whatever the action is."""
    lost = replace(NONE, is_lost=True)
    assert decide(Agreement(None), lost)[1].is_lost
    assert decide(Others(1, lost), NONE)[1].is_lost
    assert not decide(Others(1, NONE), lost)[1].is_lost


def test_ranks_at_different_steps() -> None:
    """The error names the lowest and the highest step."""
    with pytest.raises(ValueError, match="the ranks save different steps, from 5 to 7"):
        decide(Others(0, Vote(7)), NONE)


def test_what_any_rank_says_of_copies_counts() -> None:
    """One rank is enough whose copy runs or failed, which makes no more copies, or whose partner is claimed."""
    running, failed = (replace(NONE, memory=MemoryVote(**{name: True})) for name in ("copy_runs", "copy_failed"))
    assert decide(Others(1, failed), running)[1].memory == MemoryVote(copy_runs=True, copy_failed=True)
    ended = replace(NONE, memory=MemoryVote(copies_end=True, is_superseded=True))
    assert decide(Others(1, ended), NONE)[1].memory == MemoryVote(copies_end=True, is_superseded=True)
