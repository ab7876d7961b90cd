"""Values that hypothesis makes for several test modules."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from dcp_tensorizer._index.layouts import Region


@st.composite
def regions(draw: st.DrawFn, shape: Sequence[int]) -> Region:
    """A region of a tensor; it has elements if the tensor has some."""
    bounds = [sorted(draw(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)))) for n in shape]
    return Region(tuple(a for a, _ in bounds), tuple(b - a + 1 for a, b in bounds))
