"""Tests of the runs of bytes of a region."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dcp_tensorizer._tensor_file.regions import runs_of_region


@st.composite
def regions(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    start = [draw(st.integers(0, extent - 1)) for extent in shape]
    size = [draw(st.integers(0, extent - first)) for extent, first in zip(shape, start, strict=True)]
    return shape, start, size


@given(regions())
def test_runs_put_the_region_together(region: tuple[list[int], list[int], list[int]]) -> None:
    """The runs in order are the region's bytes, ascending, and as few as possible."""
    shape, start, size = region
    whole = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    part = np.ascontiguousarray(whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))])
    firsts, nbytes = runs_of_region(shape, start, size, 4)
    memory = whole.tobytes()
    assert b"".join(memory[first : first + nbytes] for first in firsts.tolist()) == part.tobytes()
    assert (np.diff(firsts) > nbytes).all() or len(shape) > 2 or len(firsts) < 2
