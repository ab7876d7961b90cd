"""Layouts of tensors of one shape in chunks, and the chunks that a region touches.

If tensors were sharded evenly, a layout is a few numbers for any number of ranks. Tensors of the same shape mostly
share a layout.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from .._tensor_file.regions import Integers
from ..errors import MetadataError
from .schema import Layout, Run, encode_rows

_MOST = 1 << 26
"""The most numbers in all runs of an index: half a gibibyte, so that a tiny file cannot make a reader allocate more."""


def runs_of(numbers: np.ndarray) -> list[Run]:
    """Encodes numbers as runs of equal distances."""
    steps = np.diff(numbers)
    turns = [*(np.flatnonzero(steps[1:] != steps[:-1]) + 1).tolist(), len(steps)]
    runs: list[Run] = []
    start = 0
    for turn in turns:  # all steps from `start` to it are equal
        if turn > start:
            runs.append((int(numbers[start]), int(steps[start]), turn - start + 1))
            start = turn + 1
    if start < len(numbers):
        runs.append((int(numbers[start]), 0, 1))
    return runs


def check_numbers(layouts: Iterable[Layout], owners: Iterable[Sequence[Run]]) -> None:
    """Raises `ValueError` if an index has more numbers than any job needs, before its runs are expanded."""
    sides = [side for row in layouts for side in (row.offsets, row.sizes) if side is not None]
    lists = itertools.chain(owners, *sides)
    if (count := sum(run[2] for runs in lists for run in runs)) > _MOST:
        raise ValueError(f"the index expands to {count:,} numbers; the limit is {_MOST:,}")


def expand(runs: Sequence[Run]) -> np.ndarray:
    """The numbers of some runs; raises `ValueError` if they are too many, or too large."""
    count = sum(run[2] for run in runs)
    if count > _MOST or any(abs(step) * times >= 2**62 or first >= 2**62 for first, step, times in runs):
        raise ValueError(f"a run of {count:,} numbers is too long, or exceeds 62 bits")
    return np.concatenate([first + step * np.arange(times, dtype="i8") for first, step, times in runs] or [_NONE])


_NONE = np.zeros(0, dtype="i8")


class ChunkLayout:
    """The chunks of tensors of one shape.

    ``starts`` and ``sizes`` have a row for each chunk and a column for each dimension. None: one chunk, the whole
    tensor.
    """

    def __init__(self, shape: tuple[int, ...], starts: np.ndarray | None, sizes: np.ndarray | None) -> None:
        self.shape = shape
        self.is_one = starts is None or sizes is None
        self.starts = np.zeros((1, len(shape)), dtype="i8") if starts is None else starts
        self.sizes = _rows([shape], len(shape)) if sizes is None else sizes
        self._found: dict[Region, list[int]] = {}

    @classmethod
    def of(cls, shape: Sequence[int], chunks: Iterable[tuple[Sequence[int], Sequence[int]]]) -> ChunkLayout:
        """Makes a layout from the offset and size of each chunk; raises `ValueError` if a chunk does not fit the
        shape.
        """
        dims = tuple(shape)
        pairs = list(chunks)
        for offsets, extents in pairs:
            if not len(offsets) == len(extents) == len(dims):
                raise ValueError(
                    f"a chunk of shape {tuple(extents)} at {tuple(offsets)} is not inside a tensor of shape {dims}"
                )
        starts, sizes = (_rows([pair[side] for pair in pairs], len(dims)) for side in (0, 1))
        if starts.size and min(starts.min(), sizes.min()) < 0:
            raise ValueError(f"chunk offsets and sizes must not be negative, in a tensor of shape {dims}")
        return cls.of_rows(dims, starts, sizes)

    @classmethod
    def of_rows(cls, shape: tuple[int, ...], starts: np.ndarray, sizes: np.ndarray) -> ChunkLayout:
        """Makes a layout from a row for each chunk."""
        is_one = len(starts) == 1 and tuple(sizes[0].tolist()) == shape and not starts.any()
        return cls(shape, None, None) if is_one else cls(shape, starts, sizes)

    @classmethod
    def from_row(cls, row: Layout) -> ChunkLayout:
        """Makes a layout from its row in an index; raises `ValueError` if it is invalid."""
        dims = len(row.shape)
        if row.offsets is None or row.sizes is None:
            return cls(row.shape, None, None)
        columns = [[expand(runs) for runs in side] for side in (row.offsets, row.sizes)]
        if any(len(column) != row.count for side in columns for column in side):
            raise ValueError("there are more or fewer offsets and sizes than chunks")
        if any(len(side) != dims for side in columns):
            raise ValueError("the chunks of a tensor have other dimensions than the tensor")
        starts, sizes = (np.stack(side, axis=1) if dims else np.zeros((row.count, 0), dtype="i8") for side in columns)
        if starts.size and (starts.min() < 0 or sizes.min() < 0):
            raise ValueError("a chunk of a tensor is outside of it")
        return cls(row.shape, starts, sizes)

    def to_row(self) -> Layout:
        """The row for an index."""
        if self.is_one:
            return Layout(self.shape, 1, None, None)
        dims = range(len(self.shape))
        offsets, sizes = ([runs_of(side[:, dim]) for dim in dims] for side in (self.starts, self.sizes))
        return Layout(self.shape, len(self), offsets, sizes)

    def __len__(self) -> int:
        return len(self.starts)

    @functools.cached_property
    def regions(self) -> list[Region]:
        """All chunks."""
        pairs = zip(self.starts.tolist(), self.sizes.tolist(), strict=True)
        return [Region(tuple(start), tuple(size)) for start, size in pairs]

    @functools.cached_property
    def identity(self) -> bytes:
        """Bytes that are equal for equal layouts."""
        numbers = None if self.is_one else self.starts.tobytes() + self.sizes.tobytes()
        return encode_rows((self.shape, numbers))

    def chunks(self) -> list[ChunkStorageMetadata]:
        """All chunks as DCP has them."""
        pairs = zip(self.starts.tolist(), self.sizes.tolist(), strict=True)
        return [ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in pairs]

    @functools.cached_property
    def packed_offsets(self) -> list[bytes]:
        """The MessagePack of each chunk's offset."""
        return [encode_rows(region.start) for region in self.regions]

    @functools.cached_property
    def is_covered(self) -> bool:
        """Returns whether the chunks hold each element exactly once."""
        return self.is_one or covers(self.shape, self.regions)

    def touched_by(self, region: Region) -> list[int]:
        """The numbers of the chunks that have elements of a region, found by bisection."""
        if region not in self._found:  # tensors that share a layout are read by the same regions
            self._found[region] = self._touched_by(region)
        return self._found[region]

    def _touched_by(self, region: Region) -> list[int]:
        if self.is_one or not self.shape:
            return list(range(len(self)))
        dim, order, starts, stops = self._sorted
        first = int(np.searchsorted(stops, region.start[dim], side="right"))
        last = int(np.searchsorted(starts, region.start[dim] + region.size[dim], side="left"))
        near = order[first:last]
        start, size = np.array(region.start), np.array(region.size)
        within = (self.starts[near] < start + size) & (self.starts[near] + self.sizes[near] > start)
        return sorted(near[within.all(axis=1)].tolist())

    @functools.cached_property
    def _sorted(self) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """The dimension in which most chunks differ, and the chunks sorted by it: their numbers, their starts, and the
        furthest stop up to each of them.
        """
        dim = max(range(len(self.shape)), key=lambda d: len(set(self.starts[:, d].tolist())))
        order = np.argsort(self.starts[:, dim], kind="stable")
        starts = self.starts[order, dim]
        return dim, order, starts, np.maximum.accumulate(starts + self.sizes[order, dim])


def _rows(numbers: Sequence[Sequence[int]], dims: int) -> np.ndarray:
    flat = np.fromiter(itertools.chain.from_iterable(numbers), "i8", len(numbers) * dims)
    return flat.reshape(len(numbers), dims)


# --- regions of tensors -----------------------------------------------------------------------------------------------

_MOST_SIDE_BY_SIDE = 10_000  # chunks that are compared with one: a tiny index may describe millions


class Region(NamedTuple):
    """A rectangular part of a tensor: ``start`` and ``size`` have an entry for each dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    def intersect(self, other: Region) -> Region | None:
        """The elements that both regions hold; None if there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.start, self.size, other.start, other.size, strict=True)
        )
        size = tuple(last - first for first, last in zip(start, stop, strict=True))
        return Region(start, size) if all(extent > 0 for extent in size) else None

    def moved(self, offset: Sequence[int]) -> Region:
        """The region of the same size, ``offset`` further on."""
        return Region(tuple(map(sum, zip(self.start, offset, strict=True))), self.size)

    def within(self, outer: Region) -> Region:
        """The same elements, with coordinates relative to the start of ``outer``."""
        return Region(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.size)

    def span(self, shape: Sequence[int]) -> tuple[int, int]:
        """The number of the first element in a C-ordered array of ``shape``, and the one after the last."""
        first = last = 0
        for start, size, extent in zip(self.start, self.size, shape, strict=True):
            first = first * extent + start
            last = last * extent + start + size - 1
        return first, last + 1


def covers(shape: Sequence[int], chunks: Sequence[Region]) -> bool:
    """Returns whether chunks of a tensor lie within it and hold each of its elements exactly once."""
    if len(chunks) == 1:
        return chunks[0].size == tuple(shape) and not any(chunks[0].start)
    if sum(math.prod(chunk.size) for chunk in chunks) != math.prod(shape):
        return False
    filled = [chunk for chunk in chunks if math.prod(chunk.size)]
    # The chunks have as many elements as the tensor, so they hold each one once if no two chunks overlap.
    if any(a < 0 or a + n > m for chunk in filled for a, n, m in zip(chunk.start, chunk.size, shape, strict=True)):
        return False
    starts = np.array([chunk.start for chunk in filled], dtype=np.int64)
    stops = starts + np.array([chunk.size for chunk in filled], dtype=np.int64)  # they lie within: no overflow
    return overlapping_pair(starts, stops) is None


def overlapping_pair(starts: Integers, stops: Integers) -> tuple[int, int] | None:
    """Finds two chunks that overlap.

    Sharding makes grids, or cuts a tensor's elements in C order; both take O(n log n). Other chunks are sorted along
    one dimension, and each is compared with those that reach it. As in DCP, a chunk without elements overlaps another
    one if it lies strictly inside.

    Args:
        starts: A row per chunk, a column per dimension.
        stops: The same of the elements after the last.

    Returns:
        The chunks' numbers; None if no two overlap.

    Raises:
        MetadataError: the chunks are neither, and more than `_MOST_SIDE_BY_SIDE` of them would have to be compared with
            each of the others.
    """
    if len(starts) < 2 or _is_grid(starts, stops) or _are_in_order(starts, stops):
        return None
    if not starts.shape[1]:
        return 0, 1
    dim = max(range(starts.shape[1]), key=lambda dim: len(np.unique(starts[:, dim])))
    active = np.zeros(0, dtype=np.int64)
    for row in np.lexsort((stops[:, dim], starts[:, dim])).tolist():
        active = active[stops[active, dim] > starts[row, dim]]
        overlaps = ((starts[active] < stops[row]) & (stops[active] > starts[row])).all(axis=1)
        if overlaps.any():
            return int(active[overlaps.argmax()]), row
        active = np.append(active, row)
        if len(active) > _MOST_SIDE_BY_SIDE:
            raise MetadataError(f"the {len(starts):,} chunks of a tensor are of no sharding. Save it in other chunks")
    return None


def _is_grid(starts: Integers, stops: Integers) -> bool:
    """Returns whether each chunk is a cell of its own: it ends where the next one begins, in every dimension."""
    for begins, ends in zip(starts.T, stops.T, strict=True):
        lines = np.unique(begins)
        if (ends != np.append(lines[1:], ends.max())[np.searchsorted(lines, begins)]).any():
            return False
    cells = starts[(starts < stops).all(axis=1)]  # chunks without elements may share a corner
    return len(set(map(tuple, cells.tolist()))) == len(cells)


def _are_in_order(starts: Integers, stops: Integers) -> bool:
    """Returns whether each chunk ends before the next one begins, in C order."""
    chunks = sorted(zip(starts.tolist(), (stops - 1).tolist(), strict=True))
    return all(last < first for (_, last), (first, _) in itertools.pairwise(chunks))


def regions_of_range(start: int, stop: int, shape: Sequence[int]) -> Iterator[Region]:
    """Cuts the elements ``start`` to ``stop`` of a C-ordered array into regions: at most two per dimension, less
    one.
    """
    if start >= stop:
        return
    if not shape:
        yield Region((), ())
        return
    row_elements = math.prod(shape[1:])
    first, head = divmod(start, row_elements)
    last, tail = divmod(stop, row_elements)
    if first == last:
        yield from _in_row(first, regions_of_range(head, tail, shape[1:]))
        return
    if head:
        yield from _in_row(first, regions_of_range(head, row_elements, shape[1:]))
        first += 1
    if first < last:
        yield Region((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if tail:
        yield from _in_row(last, regions_of_range(0, tail, shape[1:]))


def _in_row(row: int, regions: Iterable[Region]) -> Iterator[Region]:
    return (Region((row, *region.start), (1, *region.size)) for region in regions)
