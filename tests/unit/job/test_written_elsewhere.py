"""What a rank need not stage: only what the last save's plan gave to others, if nothing has changed on any rank."""

from __future__ import annotations

from typing import Any

import torch

from dcp_tensorizer import SavePlanner
from dcp_tensorizer._job.saves import Replicas


class _Agreement:
    """Of two ranks, of which the other one says the same or sees a difference."""

    is_alone = False

    def __init__(self) -> None:
        self.other = 0
        self.asked = 0

    def largest(self, *numbers: int) -> list[int]:
        self.asked += 1
        return [max(number, self.other) for number in numbers]


def _replicas() -> tuple[Replicas, Any]:
    planner, agreement = SavePlanner(), _Agreement()
    planner.written_elsewhere = frozenset({"b"})
    return Replicas(planner, agreement), agreement  # type: ignore[arg-type]


def test_only_what_is_as_it_was_is_left_to_others() -> None:
    """Not in the first save, nor after a failure, a change here or elsewhere, or without a state; all ranks ask."""
    replicas, agreement = _replicas()
    state = {"a": torch.ones(2), "b": torch.ones(3)}
    other = {**state, "c": 1}
    nothing: frozenset[str] = frozenset()
    assert replicas.omitted(state, follows=False) == nothing
    assert replicas.omitted(state, follows=True) == {"b"}
    assert replicas.omitted(state, follows=False) == nothing  # the save before failed
    assert replicas.omitted(other, follows=True) == nothing
    assert replicas.omitted(other, follows=True) == {"b"}
    assert replicas.omitted(None, follows=True) == nothing
    assert replicas.omitted(other, follows=False) == nothing
    agreement.other = 1
    assert replicas.omitted(other, follows=True) == nothing
    assert agreement.asked == 8


def test_one_rank_asks_nobody() -> None:
    """There is nobody to leave anything to."""
    replicas, agreement = _replicas()
    agreement.is_alone = True
    assert replicas.omitted({"a": 1}, follows=True) == frozenset()
    assert agreement.asked == 0


def test_a_state_that_cannot_be_looked_at_is_not_as_it_was() -> None:
    """This rank asks nevertheless: the others wait for it."""
    replicas, agreement = _replicas()
    state = {"a": torch.ones(2), "b": torch.nn.LazyLinear(3).weight}
    assert replicas.omitted(state, follows=True) == frozenset()
    assert replicas.omitted(state, follows=True) == frozenset()
    assert agreement.asked == 2
