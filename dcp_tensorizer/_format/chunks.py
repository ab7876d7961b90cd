"""Regions of tensors: how they overlap, whether they fill a tensor, and how a run of elements is cut into them."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Region", "covers", "overlapping_pair", "regions_of_range"]

Integers: TypeAlias = NDArray[np.int64]

_MAX_ROUNDS = 8  # of cuts along all dimensions: sharding needs one or two, and what is left is swept


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
        """The region of the same size that starts further on."""
        return Region(tuple(map(sum, zip(self.start, offset, strict=True))), self.size)

    def within(self, outer: Region) -> Region:
        """The same elements, counted from where ``outer`` starts."""
        return Region(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.size)


def covers(shape: Sequence[int], chunks: Sequence[Region]) -> bool:
    """Whether chunks of a tensor lie within it and hold each of its elements exactly once."""
    if len(chunks) == 1:
        return chunks[0].size == tuple(shape) and not any(chunks[0].start)
    if sum(math.prod(chunk.size) for chunk in chunks) != math.prod(shape):
        return False
    filled = [chunk for chunk in chunks if math.prod(chunk.size)]
    # They have as many elements as the tensor. So they hold each of them once if no two chunks overlap.
    return _lie_within(shape, filled) and _are_disjoint(shape, filled)


def _lie_within(shape: Sequence[int], chunks: Sequence[Region]) -> bool:
    return all(
        first >= 0 and first + size <= extent
        for chunk in chunks
        for first, size, extent in zip(chunk.start, chunk.size, shape, strict=True)
    )


def _are_disjoint(shape: Sequence[int], chunks: Sequence[Region]) -> bool:
    if _is_grid(shape, chunks):  # as sharding makes it: two cells overlap only if they are the same cell
        return len({chunk.start for chunk in chunks}) == len(chunks)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    stops = starts + np.array([chunk.size for chunk in chunks], dtype=np.int64)  # they lie within: no overflow
    return overlapping_pair(starts, stops) is None


def _is_grid(shape: Sequence[int], chunks: Sequence[Region]) -> bool:
    """Whether, in every dimension, each chunk ends where the next one begins or the tensor ends."""
    for dim, extent in enumerate(shape):
        lines = [*sorted({chunk.start[dim] for chunk in chunks}), extent]
        cell_size = {line: after - line for line, after in itertools.pairwise(lines)}
        if any(chunk.size[dim] != cell_size[chunk.start[dim]] for chunk in chunks):
            return False
    return True


def overlapping_pair(starts: Integers, stops: Integers) -> tuple[int, int] | None:
    """The numbers of two chunks that overlap; None if there are none.

    Chunks that sharding makes can be cut apart: a cut along a dimension goes through no chunk and has some on either
    side. That takes O(n log n), and so does what cannot be cut apart in two dimensions. As DCP sees it, a chunk
    without elements overlaps another one if it lies strictly inside.

    Args:
        starts, stops: A row for each chunk, and a column for each dimension.
    """
    if len(starts) < 2:
        return None
    if not starts.shape[1]:
        return 0, 1
    low, high = _numbered(starts, stops)
    for group in _cut_apart(low, high):
        pair = _sweep(group, low, high)
        if pair is not None:
            return pair
    return None


def _numbered(starts: Integers, stops: Integers) -> tuple[Integers, Integers]:
    """Replaces coordinates by their numbers in order, dimension by dimension: they are less than twice the chunks."""
    both = np.concatenate([starts, stops])
    columns = [np.unique(column, return_inverse=True)[1].reshape(-1) for column in both.T]
    numbers = np.stack(columns, axis=1)
    return numbers[: len(starts)], numbers[len(starts) :]


def _cut_apart(low: Integers, high: Integers) -> list[list[int]]:
    """The groups of two chunks or more that no cut divides further. All groups are cut at once."""
    dims = low.shape[1]
    width = 2 * len(low)  # more than any coordinate: behind it begins the next group
    rows, groups, count, vain = np.arange(len(low)), np.zeros(len(low), dtype=np.int64), 1, 0
    for dim in itertools.islice(itertools.cycle(range(dims)), _MAX_ROUNDS * dims):
        order = np.lexsort((high[rows, dim], low[rows, dim], groups))
        rows, groups = rows[order], groups[order]
        reach = np.maximum.accumulate(high[rows, dim] + groups * width)
        cuts = low[rows[1:], dim] + groups[1:] * width >= reach[:-1]
        groups = np.concatenate([[0], np.cumsum(cuts)])
        vain = vain + 1 if groups[-1] + 1 == count else 0
        several = (np.bincount(groups) > 1)[groups]
        rows, groups = rows[several], np.unique(groups[several], return_inverse=True)[1].reshape(-1)
        if not len(rows) or vain == dims:
            break
        count = int(groups[-1]) + 1
    if not len(rows):
        return []
    return [part.tolist() for part in np.split(rows, np.flatnonzero(np.diff(groups)) + 1)]


def _sweep(group: list[int], low: Integers, high: Integers) -> tuple[int, int] | None:
    """Two chunks of a group that overlap. A dimension in which all have a point in common tells nothing."""
    some_low, some_high = low[group], high[group]
    dims = np.flatnonzero(some_low.max(axis=0) >= some_high.min(axis=0)).tolist()
    if not dims:
        return group[0], group[1]
    if len(dims) > 2:
        return _sweep_many(group, some_low[:, dims], some_high[:, dims])
    boxes = np.stack([some_low[:, dims[0]], some_high[:, dims[0]], some_low[:, dims[-1]], some_high[:, dims[-1]]])
    return _sweep_two(sorted(zip(*boxes.tolist(), group, strict=True)))


def _sweep_two(boxes: list[tuple[int, int, int, int, int]]) -> tuple[int, int] | None:
    """Sweeps boxes (start and stop in one dimension, and in the other, and their number), sorted.

    The active ones lie side by side in the other dimension, so that only neighbours need to be compared.
    """
    active: list[tuple[int, int, int]] = []
    ends: list[tuple[int, tuple[int, int, int]]] = []
    for start, stop, low, high, number in boxes:
        while ends and ends[0][0] <= start:
            del active[bisect_left(active, heapq.heappop(ends)[1])]
        box = (low, high, number)
        at = bisect_left(active, box)
        if at and active[at - 1][1] > low:
            return active[at - 1][2], number
        if at < len(active) and active[at][0] < high:
            return active[at][2], number
        active.insert(at, box)
        heapq.heappush(ends, (stop, box))
    return None


def _sweep_many(group: list[int], low: Integers, high: Integers) -> tuple[int, int] | None:
    """Sweeps along the first dimension, and compares each chunk with all active ones: sharding makes no such groups."""
    active = np.zeros(0, dtype=np.int64)
    for row in np.lexsort((high[:, 0], low[:, 0])):
        active = active[high[active, 0] > low[row, 0]]
        overlaps = ((low[active] < high[row]) & (high[active] > low[row])).all(axis=1)
        if overlaps.any():
            return group[active[overlaps.argmax()]], group[row]
        active = np.append(active, row)
    return None


def regions_of_range(start: int, stop: int, shape: Sequence[int]) -> Iterator[Region]:
    """Cuts the elements ``start`` to ``stop`` of a C-ordered array into regions.

    There are at most two for each dimension, less one.
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
