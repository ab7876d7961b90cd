"""Cuts a read into several that fit a processor's cache, in which what has been read can be hashed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from .read_planner import ReadOperation, Segment

__all__ = ["batches", "with_gaps"]


def batches(operation: ReadOperation, most: int) -> Iterator[slice]:
    """Which of an operation's segments to read together: as many as make ``most`` bytes, or a larger one by itself."""
    first, start = 0, operation.offset
    for number, segment in enumerate(operation.segments):
        if number > first and segment.offset + segment.nbytes - start > most:
            yield slice(first, number)
            first, start = number, segment.offset
    yield slice(first, len(operation.segments))


def with_gaps(segments: Sequence[Segment], places: Sequence[memoryview]) -> list[memoryview]:
    """Where to read consecutive bytes to: the segments' places, and room for what nobody asked for between them."""
    gaps = [after.offset - before.offset - before.nbytes for before, after in itertools.pairwise(segments)]
    room = memoryview(bytearray(max(gaps, default=0)))
    buffers = [places[0]]
    for gap, place in zip(gaps, places[1:], strict=True):
        if gap:
            buffers.append(room[:gap])
        buffers.append(place)
    return buffers
