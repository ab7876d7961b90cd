"""What all ranks do about a step, from what each of them knows."""

from __future__ import annotations

import dataclasses

import pytest

from dcp_tensorizer._managing.agreement import Agreement
from dcp_tensorizer._managing.copies import NO_COPY, CopyVote
from dcp_tensorizer._managing.policy import Action, Vote, decide

NONE = Vote(5, stop=False, force=False, is_due=False, is_last=False, is_there=False, failures=0)


class Others(Agreement):
    """One of several ranks, the others of which have these numbers."""

    def __init__(self, rank: int, *others: list[int]) -> None:
        super().__init__(None)
        self.rank = rank
        self._others = others

    def largest(self, *numbers: int) -> list[int]:
        others = ([*other, *[0] * (len(numbers) - len(other))] for other in self._others)  # that say nothing of copies
        return [max(values) for values in zip(numbers, *others, strict=True)]


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
    """A step is saved if a save is due, forced or the last one, and it is neither there nor under way."""
    vote = dataclasses.replace(NONE, **changes)
    assert decide(Agreement(None), vote) == (
        action,
        vote.stop,
        0,
        False,
        False,
        vote.stop or vote.force or vote.is_due,
        False,
        NO_COPY,
    )


def test_what_other_ranks_know_does_not_count() -> None:
    """Their clocks and their view of the storage may differ: that is the first rank's to say."""
    vote = dataclasses.replace(NONE, is_due=True, is_last=True, is_there=True, failures=3)
    assert decide(Others(1, [0, 0, 5, -5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), vote) == (
        Action.NOTHING,
        False,
        0,
        False,
        False,
        False,
        False,
        NO_COPY,
    )
    assert decide(Others(1, [0, 0, 5, -5, 1, 0, 0, 2, 0, 0, 0, 0, 0, 0]), NONE) == (
        Action.SAVE,
        False,
        2,
        False,
        False,
        True,
        False,
        NO_COPY,
    )


def test_a_signal_or_a_wish_of_any_rank_counts() -> None:
    """Stop and force are heard from all."""
    assert decide(Others(0, [1, 0, 5, -5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), NONE) == (
        Action.SAVE,
        True,
        0,
        False,
        False,
        True,
        False,
        NO_COPY,
    )
    assert decide(Others(0, [0, 1, 5, -5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), NONE) == (
        Action.SAVE,
        False,
        0,
        False,
        False,
        True,
        False,
        NO_COPY,
    )


def test_what_any_rank_says_of_its_memory_counts() -> None:
    """A save that runs on one rank, a state that one could not keep, and one that keeps none."""
    due = dataclasses.replace(NONE, is_due=True)
    assert decide(Others(0, [0, 0, 5, -5, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0]), due) == (
        Action.HOLD,
        False,
        0,
        True,
        False,
        True,
        False,
        NO_COPY,
    )
    assert decide(Others(0, [0, 0, 5, -5, 0, 0, 0, 0, 1, 1, 0, 0, 1, 0]), due) == (
        Action.SAVE,
        False,
        0,
        False,
        True,
        True,
        False,
        NO_COPY,
    )


def test_that_another_run_has_the_folder_is_the_first_ranks_to_say() -> None:
    """It is known on all ranks then, whatever else is decided."""
    lost = dataclasses.replace(NONE, is_lost=True)
    assert decide(Agreement(None), lost).is_lost
    assert decide(Others(1, [0, 0, 5, -5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]), NONE).is_lost
    assert not decide(Others(1, [0, 0, 5, -5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), lost).is_lost


def test_ranks_at_different_steps() -> None:
    """The error says which."""
    with pytest.raises(ValueError, match="the ranks save different steps, from 5 to 7"):
        decide(Others(0, [0, 0, 7, -7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), NONE)


def test_what_any_rank_says_of_copies_counts() -> None:
    """That one is under way, has failed, or is not made any more; and that another run has the partner."""
    quiet = [0, 0, 5, -5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    vote = dataclasses.replace(NONE, copy=CopyVote(is_running=True))
    assert decide(Others(1, [*quiet, 0, 1, 0, 0]), vote).copy == CopyVote(is_running=True, has_failed=True)
    assert decide(Others(1, [*quiet, 0, 0, 1, 1]), NONE).copy == CopyVote(ends=True, is_superseded=True)
