"""Regions of tensors: how they overlap, whether they fill a tensor, and how a run of elements is cut into them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["Region", "covers", "regions_of_range"]


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
    return not any(chunk.intersect(other) for number, chunk in enumerate(chunks) for other in chunks[:number])


def _is_grid(shape: Sequence[int], chunks: Sequence[Region]) -> bool:
    """Whether, in every dimension, each chunk ends where the next one begins or the tensor ends."""
    for dim, extent in enumerate(shape):
        lines = [*sorted({chunk.start[dim] for chunk in chunks}), extent]
        cell_size = {line: after - line for line, after in itertools.pairwise(lines)}
        if any(chunk.size[dim] != cell_size[chunk.start[dim]] for chunk in chunks):
            return False
    return True


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
