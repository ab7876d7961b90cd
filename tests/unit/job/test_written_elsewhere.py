"""Tensors that a rank need not stage: those that other ranks wrote in the last save, if nothing has changed."""

from __future__ import annotations

from typing import Any, cast

import torch

from dcp_tensorizer._job.saves import Saves, StepSave
from dcp_tensorizer._job.steps import Step


class _Agreement:
    """Agreement of two ranks. The other rank votes ``other``."""

    def __init__(self, *, is_alone: bool = False) -> None:
        self.is_alone = is_alone
        self.other = 0
        self.calls = 0

    def largest(self, *numbers: int) -> list[int]:
        self.calls += 1
        return [max(number, self.other) for number in numbers]


def _saves(agreement: _Agreement) -> Saves:
    """Makes the saves of a rank. In the last plan, another rank has written the key "b"."""
    nothing: Any = None
    saves = Saves(
        nothing, cast("Any", agreement), nothing, nothing, stages_all=False, after=lambda step: None, exports=None
    )
    saves.planner.written_elsewhere = frozenset({"b"})
    return saves


def _save(*, is_committed: bool) -> StepSave:
    nothing: Any = None
    save = StepSave(nothing, "step-1", nothing)
    save.saved = Step(1, "step-1") if is_committed else None
    return save


def test_only_an_unchanged_state_is_left_to_other_ranks() -> None:
    """A rank stages all after a failed save, a change on any rank, or without a state. Every call is collective."""
    agreement = _Agreement()
    saves, committed, failed = _saves(agreement), _save(is_committed=True), _save(is_committed=False)
    state = {"a": torch.ones(2), "b": torch.ones(3)}
    other = {**state, "c": 1}
    nothing: frozenset[str] = frozenset()
    assert saves._written_elsewhere(state, None) == nothing
    assert saves._written_elsewhere(state, committed) == {"b"}
    assert saves._written_elsewhere(state, failed) == nothing
    assert saves._written_elsewhere(other, committed) == nothing
    assert saves._written_elsewhere(other, committed) == {"b"}
    assert saves._written_elsewhere(None, committed) == nothing
    assert saves._written_elsewhere(other, failed) == nothing
    agreement.other = 1
    assert saves._written_elsewhere(other, committed) == nothing
    assert agreement.calls == 8


def test_one_rank_stages_all() -> None:
    """A single rank makes no reduction."""
    agreement = _Agreement(is_alone=True)
    assert _saves(agreement)._written_elsewhere({"a": 1}, _save(is_committed=True)) == frozenset()
    assert agreement.calls == 0


def test_a_state_without_a_fingerprint_counts_as_changed() -> None:
    """The rank joins the reduction nevertheless, because the other ranks wait for it."""
    agreement = _Agreement()
    saves, committed = _saves(agreement), _save(is_committed=True)
    state = {"a": torch.ones(2), "b": torch.nn.LazyLinear(3).weight}
    assert saves._written_elsewhere(state, committed) == frozenset()
    assert saves._written_elsewhere(state, committed) == frozenset()
    assert agreement.calls == 2
