"""Tests whether chunks cover a tensor, against counting, and of the cost for chunks of real shardings."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_tensorizer._tensor_file import regions as module
from dcp_tensorizer._tensor_file.regions import Region, covers, overlapping_pair, regions_of_range
from dcp_tensorizer.errors import MetadataError

COUNT = 1024
PINWHEEL = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]


def rows(count: int) -> tuple[tuple[int, ...], list[Region]]:
    """Returns chunks of rows, of which the last is shorter."""
    return (3 * count - 2, 8), [Region((3 * i, 0), (3 if i < count - 1 else 1, 8)) for i in range(count)]


def columns(count: int) -> tuple[tuple[int, ...], list[Region]]:
    shape, chunks = rows(count)
    return shape[::-1], [Region(chunk.start[::-1], chunk.size[::-1]) for chunk in chunks]


def grid(count: int) -> tuple[tuple[int, ...], list[Region]]:
    side = math.isqrt(count)
    return (2 * side, 3 * side), [Region((2 * i, 3 * j), (2, 3)) for i in range(side) for j in range(side)]


def ragged(count: int) -> tuple[tuple[int, ...], list[Region]]:
    """Returns flat pieces of a tensor of three dimensions, each cut into regions."""
    shape = (40, 30, 700)
    step = math.prod(shape) // (count // 4) + 11
    pieces = range(0, math.prod(shape), step)
    return shape, [r for a in pieces for r in regions_of_range(a, min(a + step, math.prod(shape)), shape)]


def bricks(count: int) -> tuple[tuple[int, ...], list[Region]]:
    """Returns chunks of which every other row is cut at other columns: not a grid."""
    side, chunks = math.isqrt(count), []
    for row in range(side):
        lines = [0, *range(2 + row % 2, 2 * side, 2), 2 * side + 1]
        chunks += [Region((row, a), (1, b - a)) for a, b in itertools.pairwise(lines)]
    return (side, 2 * side + 1), chunks


def pinwheels(count: int) -> tuple[tuple[int, ...], list[Region]]:
    """Returns chunks that no straight cut separates."""
    side = math.isqrt(count // 5)
    places = [(3 * i, 3 * j) for i in range(side) for j in range(side)]
    chunks = [Region((x + start[0], y + start[1]), size) for x, y in places for start, size in PINWHEEL]
    return (3 * side, 3 * side), chunks


def nested_pinwheels(count: int) -> tuple[tuple[int, ...], list[Region]]:
    """Returns pinwheels inside each other, which no straight cut separates."""
    rings = count // 4
    side, chunks = 2 * rings + 1, [Region((rings, rings), (1, 1))]
    for i in range(rings):
        n = side - 2 * i - 1
        chunks += [Region((i, i), (1, n)), Region((i, i + n), (n, 1))]
        chunks += [Region((i + n, i + 1), (1, n)), Region((i + 1, i), (n, 1))]
    return (side, side), chunks


TILINGS = [rows, columns, grid, ragged, bricks, pinwheels, nested_pinwheels]


@pytest.mark.parametrize("order", ["in order", "shuffled", "strided"])
@pytest.mark.parametrize("tiling", [rows, columns, grid, ragged, bricks], ids=lambda tiling: tiling.__name__)
def test_a_check_takes_n_log_n_comparisons(
    tiling: Callable[[int], tuple[Any, list[Region]]], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of real shardings are sorted, and are not compared in pairs."""
    for count in (COUNT, 2 * COUNT):
        shape, chunks = tiling(count)
        if order == "shuffled":
            random.Random(count).shuffle(chunks)
        elif order == "strided":
            chunks = [chunk for offset in range(16) for chunk in chunks[offset::16]]
        counted = Counted(np, searchsorted=0, unique=0, lexsort=0, append=0)
        with monkeypatch.context() as patch:
            patch.setattr(module, "np", counted)
            assert covers(shape, chunks)
        assert counted.calls["lexsort"] == 0
        assert max(counted.calls.values()) <= len(shape)


class Counted:
    """A module whose functions count their calls."""

    def __init__(self, module: Any, **calls: int) -> None:
        self.module = module
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        if name in self.calls:
            self.calls[name] += 1
        return getattr(self.module, name)


def test_chunks_of_no_sharding_are_refused_before_they_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny index may describe millions of chunks that must all be compared with each other."""
    shape, chunks = nested_pinwheels(256)
    assert covers(shape, chunks)
    monkeypatch.setattr(module, "_MOST_COMPARISONS", 5_000)
    with pytest.raises(MetadataError, match="257 chunks of a tensor are neither a grid nor in C order"):
        covers(shape, chunks)


@pytest.mark.parametrize("tiling", TILINGS, ids=lambda tiling: tiling.__name__)
def test_one_wrong_chunk_among_many_is_noticed(tiling: Callable[[int], tuple[Any, list[Region]]]) -> None:
    """A gap, an overlap of as many elements, and a chunk beyond the tensor are found."""
    shape, chunks = tiling(64)
    random.Random(0).shuffle(chunks)
    assert covers(shape, chunks)
    assert not covers(shape, chunks[1:])
    assert not covers(shape, [*chunks[1:], *chunks[1:2]])
    same = next(i for i, chunk in enumerate(chunks) if i and chunk.size == chunks[0].size)
    assert not covers(shape, [chunks[same], *chunks[1:]])
    beyond = Region((chunks[0].start[0] + shape[0], *chunks[0].start[1:]), chunks[0].size)
    assert not covers(shape, [beyond, *chunks[1:]])


@st.composite
def boxes(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Returns the starts and stops of chunks that may overlap and be empty."""
    dims, count = draw(st.integers(1, 4)), draw(st.integers(0, 12))
    limit = draw(st.sampled_from([3, 8, 20]))
    bounds = st.tuples(st.integers(0, limit), st.integers(0, limit)).map(sorted)
    drawn = [[draw(bounds) for _ in range(dims)] for _ in range(count)]
    array = np.array(drawn, dtype=np.int64).reshape(count, dims, 2)
    return array[:, :, 0], array[:, :, 1]


def overlap(starts: np.ndarray, stops: np.ndarray, one: int, other: int) -> bool:
    """Returns whether two chunks overlap by DCP's rule: no dimension separates them."""
    return bool(((starts[one] < stops[other]) & (starts[other] < stops[one])).all())


@given(boxes())
def test_a_pair_overlaps_if_any_does(made: tuple[np.ndarray, np.ndarray]) -> None:
    """The result is the same as that of comparing all pairs, also with empty chunks."""
    starts, stops = made
    pairs = [(i, j) for i in range(len(starts)) for j in range(i) if overlap(starts, stops, i, j)]
    found = overlapping_pair(starts, stops)
    assert (found is None) == (not pairs)
    assert found is None or (found[0] != found[1] and overlap(starts, stops, *found))


def extruded(shape: tuple[int, ...], chunks: list[Region], depth: int) -> tuple[tuple[int, ...], list[Region]]:
    """Returns chunks in layers of one more dimension, each turned by a quarter."""
    layers = []
    for layer in range(depth):
        for start, size in chunks:
            if layer % 2:
                start, size = start[::-1], size[::-1]
            layers.append(Region((layer, *start), (1, *size)))
    return (depth, *shape), layers


def test_what_cannot_be_cut_apart_in_three_dimensions() -> None:
    """The result for bars in three directions around a centre is that of counting elements."""
    bars = [((0, 0, 1), (1, 2, 2)), ((1, 0, 0), (2, 1, 2)), ((0, 1, 0), (2, 2, 1))]
    corners = [((0, 0, 0), (1, 1, 1)), ((2, 2, 2), (1, 1, 1)), ((1, 1, 1), (1, 1, 1))]
    others = [((0, 2, 1), (2, 1, 2)), ((1, 0, 2), (2, 2, 1)), ((2, 1, 0), (1, 2, 2))]
    chunks = [Region(start, size) for start, size in (*bars, *corners, *others)]
    times = np.zeros((3, 3, 3), dtype=int)
    for start, size in chunks:
        times[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] += 1
    assert covers((3, 3, 3), chunks) == bool((times == 1).all())
    starts = np.array([start for start, _ in chunks])
    stops = starts + np.array([size for _, size in chunks])
    assert (overlapping_pair(starts, stops) is None) == bool((times <= 1).all())
    assert covers(*extruded((3, 3), [Region(*chunk) for chunk in PINWHEEL], 4))


def test_tensors_without_dimensions() -> None:
    """Any two chunks overlap: the tensor has one element."""
    nothing = np.zeros((2, 0), dtype=np.int64)
    assert overlapping_pair(nothing, nothing) == (0, 1)
    assert overlapping_pair(nothing[:1], nothing[:1]) is None
    assert covers((), [Region((), ())])
    assert not covers((), [Region((), ()), Region((), ())])
