"""The retained checkpoints, a function of steps and metrics."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_tensorizer._index.schema import SaveRecord
from dcp_tensorizer._job.retention import Retention
from dcp_tensorizer._job.steps import Step


def measured(number: int, metrics: Mapping[str, float]) -> Step:
    return Step(number, f"step-{number}", record=SaveRecord(number, None, (), metrics))


def steps_of(losses: Mapping[int, float | None]) -> list[Step]:
    return [measured(number, {} if loss is None else {"loss": loss}) for number, loss in losses.items()]


LOSSES = st.dictionaries(st.integers(0, 60), st.none() | st.floats(), min_size=1, max_size=12)
COUNTS = st.none() | st.integers(1, 8)


@given(
    losses=LOSSES, latest=COUNTS, every=COUNTS, best=st.sampled_from([None, "loss", ("loss", "max")]), seed=st.randoms()
)
def test_what_is_kept(
    losses: dict[int, float | None], latest: int | None, every: int | None, best: Any, seed: random.Random
) -> None:
    """The newest, the multiples and the best stay, for any order. If no checkpoint has a loss, all stay."""
    rules = Retention.of(latest, every, best)
    steps = steps_of(losses)
    seed.shuffle(steps)
    kept = rules.retained(steps)
    known = {number: loss for number, loss in losses.items() if loss is not None and not math.isnan(loss)}
    if latest is every is best is None or (best is not None and not known):
        assert kept == set(losses)
        return
    expected = set(sorted(losses)[-(latest or 1) :]) | {n for n in losses if every is not None and n % every == 0}
    if best is not None and known:
        value = min(known.values()) if best == "loss" else max(known.values())
        expected.add(max(number for number, loss in known.items() if loss == value))
    assert kept == expected
    assert max(losses) in kept


@pytest.mark.parametrize(
    ("losses", "mode", "best"),
    [
        ({1: 2.0, 2: 1.0, 3: 1.0, 4: 3.0}, "min", 3),
        ({1: 2.0, 2: 1.0, 3: 1.0, 4: 3.0}, "max", 4),
        ({1: math.nan, 2: 5.0, 3: None}, "min", 2),
        ({1: math.nan, 2: None}, "max", None),
        ({1: math.inf, 2: -math.inf}, "min", 2),
    ],
)
def test_the_best(losses: dict[int, float | None], mode: str, best: int | None) -> None:
    """NaN or a missing value is never best, and among equal values the newest is."""
    found = Retention.of(None, None, ("loss", mode)).best(steps_of(losses))
    assert (None if found is None else found.number) == best


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, None, None), ValueError, "keep_latest must be"),
        ((None, 1.5, None), TypeError, "keep_every must be"),
        ((None, None, 7), TypeError, "keep_best must be"),
        ((None, None, ("loss", "least")), ValueError, "the mode in keep_best must be one of 'max', 'min', got 'least'"),
    ],
)
def test_rules_that_make_no_sense(arguments: Any, error: type[Exception], message: str) -> None:
    """The error names the argument."""
    with pytest.raises(error, match=message):
        Retention.of(*arguments)
