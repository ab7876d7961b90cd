"""Tests of layouts of chunks: their encoding in a few numbers, and the chunks of a region."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_tensorizer._index.layouts import ChunkLayout, expand, runs_of
from dcp_tensorizer._index.schema import Layout
from dcp_tensorizer._tensor_file.regions import Region


@given(st.lists(st.integers(0, 9) | st.integers(0, 2**61)))
def test_numbers_come_back_from_runs(numbers: list[int]) -> None:
    """Any numbers are equal after encoding and decoding."""
    assert expand(runs_of(np.array(numbers, dtype="i8"))).tolist() == numbers


def test_regular_numbers_are_few_runs() -> None:
    """Equal steps, also of zero, make one run, and each change of the step makes one more."""
    assert runs_of(np.arange(0, 80_000, 8)) == [(0, 8, 10_000)]
    assert runs_of(np.full(10_000, 7)) == [(7, 0, 10_000)]
    assert runs_of(np.array([5, 5, 5, 3])) == [(5, 0, 3), (3, 0, 1)]
    assert runs_of(np.array([0, 1, 2, 0, 1, 2])) == [(0, 1, 3), (0, 1, 3)]
    assert runs_of(np.array([], dtype="i8")) == []


def test_a_few_bytes_stand_for_no_more_numbers_than_a_job_has() -> None:
    """The limit counts all runs of a list, and is checked before any run is expanded."""
    with pytest.raises(ValueError, match="the runs expand to 83,886,080 numbers"):
        expand([(0, 1, 1 << 24)] * 5)


def sharded(shape: tuple[int, ...], parts: Sequence[int]) -> list[Region]:
    """Returns the chunks of a tensor whose dimensions are cut into ``parts``; the last ones are smaller or empty."""
    ranges = []
    for extent, count in zip(shape, parts, strict=True):
        size = -(-extent // count)
        ranges.append([(min(n * size, extent), max(0, min(size, extent - n * size))) for n in range(count)])
    return [Region(tuple(a for a, _ in cell), tuple(n for _, n in cell)) for cell in itertools.product(*ranges)]


@pytest.mark.parametrize(
    ("shape", "parts", "numbers"),
    [((8192, 64), (8192, 1), 4), ((8000, 64), (512, 1), 6), ((64, 128), (64, 128), 260), ((7,), (3,), 3)],
)
def test_a_sharded_tensor_is_a_few_numbers(shape: tuple[int, ...], parts: tuple[int, ...], numbers: int) -> None:
    """The size of a layout does not depend on the number of ranks, and the layout is equal after decoding."""
    regions = sharded(shape, parts)
    row = ChunkLayout.of(shape, regions).to_row()
    assert row.offsets is not None and row.sizes is not None
    assert sum(map(len, row.offsets + row.sizes)) <= numbers
    layout = ChunkLayout.from_row(msgspec.msgpack.Decoder(Layout).decode(msgspec.msgpack.encode(row)))
    assert (layout.shape, layout.regions, layout.is_covered) == (shape, regions, True)


@pytest.mark.parametrize(
    ("shape", "chunks"),
    [((), [((), ())]), ((), [((), ())] * 2), ((2, 0), [((0, 0), (2, 0))]), ((3,), []), ((3,), [((0,), (3,))] * 2)],
    ids=["scalar", "scalar twice", "empty", "nowhere", "twice"],
)
def test_odd_layouts_come_back(shape: tuple[int, ...], chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Layouts that no sharding makes are equal after decoding; only one whole chunk is stored without numbers."""
    layout = ChunkLayout.from_row(ChunkLayout.of(shape, chunks).to_row())
    assert [tuple(region) for region in layout.regions] == chunks
    assert layout.is_one == (len(chunks) == 1)


def test_a_chunk_of_other_dimensions_is_refused() -> None:
    """A chunk has as many dimensions as its tensor."""
    with pytest.raises(
        ValueError, match=r"a chunk of shape \(4, 1\) at \(0, 0\) does not have as many dimensions as its tensor"
    ):
        ChunkLayout.of((4,), [((0, 0), (4, 1))])


@given(st.data())
def test_the_chunks_of_a_region_are_those_that_overlap_it(data: st.DataObject) -> None:
    """Bisection finds the same chunks as comparing all, in grids of up to three dimensions."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    regions = data.draw(st.permutations(sharded(shape, [data.draw(st.integers(1, 7)) for _ in shape])))
    start = tuple(data.draw(st.integers(0, extent - 1)) for extent in shape)
    size = tuple(data.draw(st.integers(1, extent - first)) for extent, first in zip(shape, start, strict=True))
    wanted = Region(start, size)
    layout = ChunkLayout.of(shape, regions)
    found = layout.touched_by(wanted)
    assert found == [n for n, region in enumerate(regions) if wanted.intersect(region) is not None]
    overlaps = [wanted.intersect(layout.regions[n]) for n in found]
    assert sum(math.prod(overlap.size) for overlap in overlaps if overlap) == math.prod(size)
