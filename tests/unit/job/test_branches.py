"""Branches: checkpoints that a job has left behind by going back do not count as its own."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from dcp_tensorizer._index.schema import SaveRecord
from dcp_tensorizer._job.steps import TRUNK, Branch, Step, belongs, current_branch, members, new_branch


def saved_as(number: int, branch: Branch = TRUNK, serial: int = 0, saved_at: int = 0) -> Step:
    record = SaveRecord(number, None, branch, {}, serial=serial)
    return Step(number, f"step-{number}", saved_at=saved_at, record=record)


def test_a_branch_has_what_led_to_it() -> None:
    """After a job goes back from 1,000 to 500, the steps beyond 500 stay on another branch."""
    old = [saved_as(number, serial=number) for number in (100, 500, 980, 1000)]
    new = [saved_as(number, new_branch(old[1]), 2000 + number) for number in (600,)]
    later = saved_as(990, new[0].branch, 3000)
    assert [saved.number for saved in members([*old, *new, later], later.branch)] == [100, 500, 600, 990]
    assert [saved.number for saved in members([*old, *new, later], TRUNK)] == [100, 500, 980, 1000]
    assert current_branch([*old, *new, later]) == later.branch


def test_a_branch_that_was_left_is_never_current() -> None:
    """A later serial or time of the left branch does not count."""
    old = saved_as(1000, serial=99, saved_at=99)
    assert current_branch([old, new := saved_as(600, new_branch(saved_as(500)), 1, 1)]) == new.branch


def test_of_two_branches_the_one_saved_last_is_current() -> None:
    """Serials decide. Times decide only for checkpoints without a serial, such as those of a plain writer."""
    start = saved_as(5, new_branch(None), 1, 1000)
    first, second = saved_as(6, new_branch(start), 2, 900), saved_as(7, new_branch(start), 3, 800)
    assert current_branch([start, first, second]) == second.branch
    assert current_branch([start, second, first]) == second.branch
    plain = Step(8, "step-8", saved_at=850)
    assert current_branch([first, second, plain]) == TRUNK
    assert current_branch([first, second, dataclasses.replace(plain, saved_at=700)]) == second.branch


def test_a_job_that_began_anew_has_nothing_of_the_old_one() -> None:
    """The branch of a new job has no branch before it."""
    old, new = saved_as(10, serial=1), saved_as(5, new_branch(None), serial=2)
    assert members([old, new], new.branch) == [new]
    assert current_branch([old, new]) == new.branch
    assert current_branch([]) is None


@given(
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 20)), min_size=1, max_size=30),
    lost=st.sets(st.integers(0, 29)),
    clocks=st.lists(st.integers(0, 9), min_size=30, max_size=30),
)
def test_branches_are_histories(moves: list[tuple[bool, int]], lost: set[int], clocks: list[int]) -> None:
    """A checkpoint is on a job's branch exactly if it is an ancestor, whatever was deleted and clocks show."""
    made: list[tuple[Step, tuple[int, ...]]] = []  # a checkpoint, and the numbers in `made` of its ancestors
    branch, history, step = new_branch(None), (), 0
    for goes_back, by in moves:
        if goes_back and made:
            at = by % len(made)
            saved, before = made[at]
            branch, history, step = new_branch(saved), (*before, at), saved.number
        step += 1 + by % 3
        made.append((saved_as(step, branch, len(made) + 1, clocks[len(made)]), history))
        history = (*history, len(made) - 1)
    left = [number for number in range(len(made)) if number not in lost]
    for number in left:
        own = {n for n in left if belongs(made[n][0], branch)}
        assert own == {n for n in history if n in left}, number
    if left and (len(made) - 1) in left:
        assert current_branch([made[number][0] for number in left]) == branch
