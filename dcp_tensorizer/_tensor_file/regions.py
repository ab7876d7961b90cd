"""Regions of tensors: intersections, checks that chunks cover a tensor, and the runs of bytes of a region."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import MetadataError

if TYPE_CHECKING:
    import torch

Integers: TypeAlias = NDArray[np.int64]
Interval: TypeAlias = tuple[int, int]


# The maximum number of pairs of a tensor's chunks that `overlapping_pair` compares, because a tiny index may describe
# many chunks.
_MOST_COMPARISONS = 100_000_000


class Region(NamedTuple):
    """A rectangular part of a tensor. ``start`` and ``size`` have an entry for each dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    def intersect(self, other: Region) -> Region | None:
        start = tuple(map(max, self.start, other.start))
        stop = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.start, self.size, other.start, other.size, strict=True)
        )
        size = tuple(last - first for first, last in zip(start, stop, strict=True))
        return Region(start, size) if all(extent > 0 for extent in size) else None

    def moved(self, offset: Sequence[int]) -> Region:
        return Region(tuple(map(sum, zip(self.start, offset, strict=True))), self.size)

    def within(self, outer: Region) -> Region:
        """Returns the region with coordinates relative to the start of ``outer``."""
        return Region(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.size)

    def span(self, shape: Sequence[int]) -> tuple[int, int]:
        """Returns the flat index of the first element in a C-ordered array of ``shape``, and that after the last."""
        first = last = 0
        for start, size, extent in zip(self.start, self.size, shape, strict=True):
            first = first * extent + start
            last = last * extent + start + size - 1
        return first, last + 1


def covers(shape: Sequence[int], chunks: Sequence[Region]) -> bool:
    """Returns whether chunks lie within a tensor and contain each of its elements exactly once."""
    if len(chunks) == 1:
        return chunks[0].size == tuple(shape) and not any(chunks[0].start)
    if sum(math.prod(chunk.size) for chunk in chunks) != math.prod(shape):
        return False
    filled = [chunk for chunk in chunks if math.prod(chunk.size)]
    # The chunks have as many elements as the tensor, so they contain each element once if no two chunks overlap.
    if any(a < 0 or a + n > m for chunk in filled for a, n, m in zip(chunk.start, chunk.size, shape, strict=True)):
        return False
    starts = np.array([chunk.start for chunk in filled], dtype=np.int64)
    stops = starts + np.array([chunk.size for chunk in filled], dtype=np.int64)  # within the tensor: no overflow
    return overlapping_pair(starts, stops) is None


def overlapping_pair(starts: Integers, stops: Integers) -> tuple[int, int] | None:
    """Finds two chunks that overlap.

    Sharding makes grids, or cuts a tensor's elements in C order. Both are checked in O(n log n). Other chunks are
    sorted along one dimension, and each chunk is compared with the earlier chunks that reach it. As in DCP, an empty
    chunk overlaps another one if it lies strictly inside that one.

    Args:
        starts: The first element of each chunk: a row per chunk, a column per dimension.
        stops: The element after the last one of each chunk.

    Returns:
        The indices of the two chunks, or None if no two overlap.

    Raises:
        MetadataError: the chunks are neither a grid nor in C order, and take more than `_MOST_COMPARISONS`.
    """
    if len(starts) < 2 or _is_grid(starts, stops):
        return None
    in_order = sorted(zip(starts.tolist(), (stops - 1).tolist(), strict=True))
    if all(last < first for (_, last), (first, _) in itertools.pairwise(in_order)):
        return None
    if not starts.shape[1]:
        return 0, 1
    dim = max(range(starts.shape[1]), key=lambda dim: len(np.unique(starts[:, dim])))
    sides = [np.ascontiguousarray(side.T) for side in (starts, stops)]  # a dimension at a time is faster
    active = np.zeros(0, dtype=np.int64)
    compared = 0
    for row in np.lexsort((stops[:, dim], starts[:, dim])).tolist():
        active = active[sides[1][dim][active] > starts[row, dim]]
        near = active
        for begins, ends, start, stop in zip(*sides, starts[row], stops[row], strict=True):
            near = near[(begins[near] < stop) & (ends[near] > start)]
        if len(near):
            return int(near[0]), row
        compared += len(active)
        active = np.append(active, row)
        if compared > _MOST_COMPARISONS:
            raise MetadataError(
                f"the {len(starts):,} chunks of a tensor are neither a grid nor in C order, and too many to be checked "
                f"for overlaps. Save a grid of chunks."
            )
    return None


def _is_grid(starts: Integers, stops: Integers) -> bool:
    """Returns whether the chunks are distinct cells of a grid: in every dimension, each ends where the next starts."""
    for begins, ends in zip(starts.T, stops.T, strict=True):
        lines = np.unique(begins)
        if (ends != np.append(lines[1:], ends.max())[np.searchsorted(lines, begins)]).any():
            return False
    cells = starts[(starts < stops).all(axis=1)]  # empty chunks may share a corner
    return len(set(map(tuple, cells.tolist()))) == len(cells)


def regions_of_range(start: int, stop: int, shape: Sequence[int]) -> Iterator[Region]:
    """Yields regions that together contain the elements ``start`` to ``stop - 1`` in C order.

    Yields at most ``2 * len(shape) - 1`` regions; one if ``shape`` is empty.
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


def carried(region: Region, frm: Region, to: Region) -> Region | None:
    """Maps the intersection of ``region`` and ``frm`` to ``to``, which has the elements of ``frm`` in the same order.

    Either ``frm`` or ``to`` may have an additional first dimension of size 1. Returns None for an empty intersection.
    """
    common = frm.intersect(region)
    if common is None:
        return None
    moved = common.within(frm)
    extra = len(to.size) - len(moved.size)
    if extra > 0:
        moved = Region((0, *moved.start), (1, *moved.size))
    elif extra < 0:
        moved = Region(moved.start[1:], moved.size[1:])
    return moved.moved(to.start)


def part_of(tensor: torch.Tensor, region: Region, whole: Region) -> torch.Tensor:
    """Returns the view of ``region`` in a tensor that holds the region ``whole``."""
    for dim, (start, size, origin) in enumerate(zip(region.start, region.size, whole.start, strict=True)):
        tensor = tensor.narrow(dim, start - origin, size)
    return tensor


# --- runs of bytes ----------------------------------------------------------------------------------------------------


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides, in elements, of a C-ordered array."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def runs_of_region(
    shape: Sequence[int], start: Sequence[int], size: Sequence[int], itemsize: int
) -> tuple[Integers, int]:
    """Returns the offset in its tensor of each contiguous run of a region, in bytes, and the size of a run.

    The runs in order are the region's bytes in C order. ``itemsize`` is the size of an element.
    """
    if not math.prod(size):
        return np.zeros(0, dtype=np.int64), 0
    inner = len(shape)  # dimensions from here on are whole
    while inner and size[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(0, inner - 1)  # dimensions before this one are iterated over
    strides = [step * itemsize for step in strides_of(shape)]
    firsts = np.zeros(1, dtype=np.int64)
    for dim in range(outer):
        firsts = (firsts[:, None] + (start[dim] + np.arange(size[dim], dtype=np.int64)) * strides[dim]).reshape(-1)
    nbytes = math.prod(size[outer:]) * itemsize
    return firsts + sum(start[dim] * strides[dim] for dim in range(outer, len(shape))), nbytes


def runs_with_gaps(shape: Sequence[int], region: Region, itemsize: int, max_gap: int) -> list[Interval]:
    """Returns the runs of bytes to read for a region of an array, joined across gaps of up to ``max_gap`` bytes.

    If the gaps between rows are small enough, joins the rows without listing them: a column of an array becomes a
    single run in constant time. In contrast, `runs_of_region` returns an offset for each row.
    """
    if not shape:
        return [(0, itemsize)]
    row_runs = runs_with_gaps(shape[1:], Region(region.start[1:], region.size[1:]), itemsize, max_gap)
    pitch = math.prod(shape[1:]) * itemsize
    rows = range(region.start[0], region.start[0] + region.size[0])
    gap = pitch - row_runs[-1][1] + row_runs[0][0]
    if gap <= max_gap and len(row_runs) == 1:
        return [(rows[0] * pitch + row_runs[0][0], rows[-1] * pitch + row_runs[0][1])]
    runs = [(row * pitch + start, row * pitch + stop) for row in rows for start, stop in row_runs]
    return runs if gap > max_gap else merged(runs, max_gap)


def widened(interval: Interval, step: int, length: int) -> Interval:
    """Returns the interval extended outwards to multiples of ``step``, but not beyond ``length``."""
    return interval[0] // step * step, min(-(-interval[1] // step) * step, length)


def merged(intervals: Iterable[Interval], gap: int = 0) -> list[Interval]:
    """Joins intervals that overlap, touch, or are at most ``gap`` apart."""
    joined: list[Interval] = []
    for start, stop in sorted(intervals):
        if joined and start - joined[-1][1] <= gap:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined
