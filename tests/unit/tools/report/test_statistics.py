"""Statistics that are computed block by block equal those of all elements."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dcp_tensorizer.tools._report.statistics import BINS, Running, Statistics

from ....lab.states import ALL_DTYPES, filled

NO_ARITHMETIC = {torch.float4_e2m1fn_x2}


def of(values: torch.Tensor, before: torch.Tensor | None = None, cuts: int = 3) -> Statistics:
    """Returns the statistics of a tensor in blocks, each measured by a separate `Running`."""
    running = Running()
    blocks = values.tensor_split(cuts)
    others = [None] * cuts if before is None else before.tensor_split(cuts)
    for block, other in zip(blocks, others, strict=True):
        part = Running()
        part.add(block, other)
        running.take(part)
    return running.result(has_distance=before is not None)


@pytest.mark.parametrize("count", [1000, 100_000], ids=["one piece", "several pieces"])
def test_they_are_those_of_all_elements(count: int) -> None:
    """Moments, extremes and the distance do not depend on the blocks, also if the mean is far from 0."""
    values = torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1e6
    before = values + torch.arange(count, dtype=torch.float64)
    found = of(values, before)
    assert (found.elements, found.zeros, found.nans, found.infinities) == (count, 0, 0, 0)
    assert (found.smallest, found.largest) == (values.min(), values.max())
    assert found.mean == pytest.approx(values.mean().item(), rel=1e-14)
    assert found.deviation == pytest.approx(values.std(correction=0).item(), rel=1e-9)
    assert found.norm == pytest.approx(values.norm().item(), rel=1e-14)
    assert found.distance == pytest.approx(torch.arange(count, dtype=torch.float64).norm().item(), rel=1e-9)


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    """NaNs and infinities are counted, and do not affect moments and the histogram."""
    values = torch.tensor([math.nan, 0.0, -0.0, 3.0, -math.inf, math.inf, -1.0])
    found = of(values, torch.zeros(7))
    assert (found.elements, found.zeros, found.nans, found.infinities) == (7, 2, 1, 2)
    assert (found.smallest, found.largest, found.mean) == (-1.0, 3.0, 0.5)
    assert found.norm == found.distance == math.sqrt(10)
    assert sum(found.histogram) == 4


@pytest.mark.parametrize("values", [torch.tensor([math.nan, math.inf]), torch.empty(0)], ids=["not finite", "none"])
def test_where_nothing_is_finite(values: torch.Tensor) -> None:
    """Without finite elements, the statistics have no numbers."""
    found = of(values, cuts=1)
    assert found == Statistics(len(values), 0, *([1, 1] if len(values) else [0, 0]), *[None] * 7, (), None)


@pytest.mark.parametrize("value", [0.0, -2.5, 1e-30])
def test_one_value(value: float) -> None:
    """Equal elements are all in the middle bin."""
    found = of(torch.full((10,), value))
    assert (found.zeros, found.deviation) == (10 if value == 0 else 0, 0.0)
    assert [at for at, count in enumerate(found.histogram) if count] == [BINS // 2]
    assert sum(found.histogram) == 10


def test_the_histogram_is_that_of_the_elements() -> None:
    """Each bin is exact to the 3% of a fine bin, and outliers are in the first and last bin."""
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    values[:20] = 1000.0
    found = of(values)
    assert found.low is not None and found.high is not None and found.deviation is not None
    assert (found.high < 100, found.largest) == (True, 1000.0)
    exact, _ = np.histogram(np.clip(values.numpy(), found.low, found.high), BINS, (found.low, found.high))
    assert sum(found.histogram) == 200_000
    assert np.abs(np.array(found.histogram) - exact).max() < 0.01 * 200_000


def test_values_beyond_float32() -> None:
    """Values beyond float32 are in the first and last bin."""
    found = of(torch.tensor([-1e300, 1e300, 0.0], dtype=torch.float64))
    assert (found.smallest, found.largest, sum(found.histogram)) == (-1e300, 1e300, 3)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    """Elements of every dtype with arithmetic are counted."""
    values = filled(dtype, (6, 4))
    if dtype in NO_ARITHMETIC:
        with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
            of(values)
        return
    found = of(values)
    assert found.elements == values.numel() * (2 if dtype.is_complex else 1)
    assert found.elements == found.nans + found.infinities + sum(found.histogram)
