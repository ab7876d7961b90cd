"""Tests of regions of tensors against numpy and plain counting."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dcp_tensorizer._tensor_file.regions import Region, covers, regions_of_range

from ...lab.checkpoints import regions


@st.composite
def partitions(draw: st.DrawFn, whole: Region, depth: int = 4) -> list[Region]:
    """Returns regions that fill a region, which is repeatedly cut in two; parts may be empty."""
    if not depth or not whole.size or draw(st.booleans()):
        return [whole]
    dim = draw(st.integers(0, len(whole.size) - 1))
    at = draw(st.integers(0, whole.size[dim]))
    parts = []
    for begin, end in ((0, at), (at, whole.size[dim])):
        start, size = list(whole.start), list(whole.size)
        start[dim], size[dim] = start[dim] + begin, end - begin
        parts += draw(partitions(Region(tuple(start), tuple(size)), depth - 1))
    return parts


@given(data=st.data(), shape=st.lists(st.integers(1, 6), max_size=3).map(tuple))
def test_a_partition_covers_and_nothing_else_does(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """The result equals that of counting each element, for partitions and for changed ones."""
    chunks = data.draw(partitions(Region((0,) * len(shape), shape)))
    assert covers(shape, chunks)
    number = data.draw(st.integers(0, len(chunks) - 1))
    changed = chunks[:number] + data.draw(st.lists(regions(shape), max_size=2)) + chunks[number + 1 :]
    times = np.zeros(shape, dtype=int)
    for chunk in changed:
        times[tuple(slice(a, a + n) for a, n in zip(chunk.start, chunk.size, strict=True))] += 1
    assert covers(shape, changed) == bool((times == 1).all())


def test_chunks_outside_their_tensor_do_not_cover() -> None:
    """Their number of elements does not matter."""
    assert not covers((4,), [Region((0,), (2,)), Region((4,), (2,))])
    assert not covers((2, 2), [Region((-1, 0), (2, 2))])


def test_nothing_is_covered_by_nothing() -> None:
    """A tensor without elements needs no chunks, and may have empty ones."""
    assert covers((0, 3), [])
    assert covers((0, 3), [Region((0, 0), (0, 3))])
    assert not covers((1, 3), [])


@given(st.data())
def test_regions_of_a_range_cover_it_exactly_and_in_order(data: st.DataObject) -> None:
    """The elements of the regions in order are those of the range, and there are few regions."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=4)))
    count = math.prod(shape)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    elements = np.arange(count).reshape(shape)
    pieces = list(regions_of_range(start, stop, shape))
    parts = [elements[tuple(slice(a, a + n) for a, n in zip(b.start, b.size, strict=True))] for b in pieces]
    assert np.concatenate([part.reshape(-1) for part in parts] or [[]]).tolist() == list(range(start, stop))
    assert len(pieces) <= max(1, 2 * len(shape) - 1)


@given(st.data())
def test_intersections_are_those_of_sets(data: st.DataObject) -> None:
    """The intersection has the elements of both regions, and is None if there are none."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    a, b = data.draw(regions(shape)), data.draw(regions(shape))
    elements = np.arange(math.prod(shape)).reshape(shape)

    def members(region: Region | None) -> set[int]:
        if region is None:
            return set()
        return set(elements[tuple(slice(s, s + n) for s, n in zip(region.start, region.size, strict=True))].reshape(-1))

    assert members(a.intersect(b)) == members(a) & members(b)
