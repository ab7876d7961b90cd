"""Regions of tensors: how they overlap, whether they fill a tensor, and how a run of elements is cut into them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["Region", "regions_of_range", "covers"]


class Region(NamedTuple):
    """A rectangular part of a tensor: ``start`` and ``size`` have an entry for each dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    def intersect(self, other: Region) -> Region | None:
        start = tuple(map(max, self.start, other.start))
        stop = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.start, self.size, other.start, other.size, strict=True)
        )
        size = tuple(e - s for s, e in zip(start, stop, strict=True))
        return Region(start, size) if all(n > 0 for n in size) else None


def covers(shape: Sequence[int], chunks: Sequence[Region]) -> bool:
    """Whether chunks of a tensor lie within it and fill it, each element once."""
    if len(chunks) == 1:
        return chunks[0].size == tuple(shape) and not any(chunks[0].start)
    if sum(math.prod(chunk.size) for chunk in chunks) != math.prod(shape):
        return False
    filled = [chunk for chunk in chunks if math.prod(chunk.size)]
    if any(a < 0 or a + n > e for c in filled for a, n, e in zip(c.start, c.size, shape, strict=True)):
        return False
    # As many elements as the tensor has: then they fill it if no two chunks overlap. Those of a grid, as sharding
    # makes them, each reach from one of the grid's lines to the next, and no two begin at the same point.
    lines = [[*sorted({chunk.start[dim] for chunk in filled}), extent] for dim, extent in enumerate(shape)]
    step = [dict(itertools.pairwise(line)) for line in lines]
    is_grid = all(c.size[dim] == step[dim][c.start[dim]] for c in filled for dim in range(len(shape)))
    if is_grid:
        return len({chunk.start for chunk in filled}) == len(filled)
    return not any(a.intersect(b) for number, a in enumerate(filled) for b in filled[:number])


def regions_of_range(start: int, stop: int, shape: Sequence[int]) -> Iterator[Region]:
    """Cuts the elements ``start`` to ``stop`` of a C-ordered array into regions: two a dimension at most, less one."""
    if start >= stop:
        return
    if not shape:
        yield Region((), ())
        return
    inner = math.prod(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:
        yield from _at(first, regions_of_range(head, tail, shape[1:]))
        return
    if head:
        yield from _at(first, regions_of_range(head, inner, shape[1:]))
        first += 1
    if first < last:
        yield Region((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if tail:
        yield from _at(last, regions_of_range(0, tail, shape[1:]))


def _at(row: int, regions: Iterable[Region]) -> Iterator[Region]:
    return (Region((row, *region.start), (1, *region.size)) for region in regions)
