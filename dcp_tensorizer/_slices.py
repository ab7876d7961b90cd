"""Cuts a read into several that fit a processor's cache, in which what has been read can be hashed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ._plan import ReadOperation

__all__ = ["Slice", "slices"]


class Slice(NamedTuple):
    """A read of consecutive bytes.

    Attributes:
        offset: First byte in the file.
        buffers: Where they go, gaps included.
        pieces: The buffers that hold a segment, or a part of one, and its number.
    """

    offset: int
    buffers: list[memoryview]
    pieces: list[tuple[int, memoryview]]


def slices(operation: ReadOperation, places: Sequence[memoryview], most: int) -> Iterator[Slice]:
    """Slices of about ``most`` bytes, that end between segments where those are smaller; ``places`` are theirs."""
    gap = _gap(operation)
    current = Slice(operation.offset, [], [])
    position, room = operation.offset, most
    for number, (segment, place) in enumerate(zip(operation.segments, places, strict=True)):
        begin, nbytes = segment.offset, place.nbytes
        if current.buffers and nbytes > room:
            yield current
            current, room = Slice(position, [], []), most
        if position < begin:
            current.buffers.append(gap[: begin - position])
        for start in range(0, nbytes, most):
            data = place[start : start + most]
            if start:
                yield current
                current, room = Slice(begin + start, [data], [(number, data)]), most - data.nbytes
            else:
                current.buffers.append(data)
                current.pieces.append((number, data))
                room -= data.nbytes
        position = begin + nbytes
    yield current


def _gap(operation: ReadOperation) -> memoryview:
    """Room for bytes that nobody asked for; all gaps of an operation share it."""
    pairs = itertools.pairwise(operation.segments)
    return memoryview(bytearray(max((b.offset - a.offset - a.nbytes for a, b in pairs), default=0)))
