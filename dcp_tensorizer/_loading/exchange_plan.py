"""What the ranks of a group read for each other: pure planning, the same on each of them.

Wants:    the bytes of stored tensors that every rank needs, in the order of files and offsets
Spans:    a consecutive part of them for each rank to read, about as many bytes for each
Windows:  what a rank reads of its span at once, into one buffer
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import xxhash

from .._format.layout import StoredItem
from .._memory.shared_buffer import aligned
from .read_planner import ReadLimits, by_tensor, wanted_bytes
from .read_target import ReadTarget

__all__ = ["Part", "Want", "Window", "spans_of", "total_bytes", "wants_of"]

_UNITS_PER_RANK = 16  # the fewer, the less even are the spans
_MAX_UNIT = 4 << 20


class Want(NamedTuple):
    """The bytes of one stored tensor that a rank needs.

    Attributes:
        id: The same on all ranks that need the same bytes.
        item: The tensor.
        intervals: The bytes, counted from the tensor's first one; whole blocks if they are verified.
        targets: What they are for.
    """

    id: bytes
    item: StoredItem
    intervals: list[tuple[int, int]]
    targets: tuple[ReadTarget, ...]


def wants_of(targets: Iterable[ReadTarget], limits: ReadLimits, *, verify: bool) -> dict[bytes, Want]:
    """What some targets need, by its id, in the order of files and offsets."""
    wants = {}
    for file, of_tensor in by_tensor(targets):
        item = of_tensor[0].item
        intervals = wanted_bytes(of_tensor, limits, verify=verify)
        said = f"{file}\0{item.offset}\0{item.length}\0{intervals}"
        want = Want(xxhash.xxh3_128_digest(said.encode()), item, intervals, tuple(of_tensor))
        wants[want.id] = want
    return wants


def total_bytes(wants: Iterable[Want]) -> int:
    """The bytes in all intervals."""
    return sum(stop - start for want in wants for start, stop in want.intervals)


class Part(NamedTuple):
    """Consecutive bytes of one stored tensor, in a window.

    Attributes:
        want: The number of the want.
        start, stop: The bytes, counted from the tensor's first one.
        position: Where they begin in the window: a multiple of 64.
    """

    want: int
    start: int
    stop: int
    position: int

    @property
    def end(self) -> int:
        """Where they end in the window."""
        return self.position + self.stop - self.start


class Window(NamedTuple):
    """What a rank reads at once, side by side."""

    parts: list[Part]

    @property
    def nbytes(self) -> int:
        return self.parts[-1].end if self.parts else 0

    def between(self, start: int, stop: int) -> Iterator[Part]:
        """The parts of parts that lie in a range of the window; ``start`` and ``stop`` are multiples of 64."""
        first = bisect.bisect_right(self.parts, start, key=lambda part: part.end)
        for part in self.parts[first:]:
            if part.position >= stop:
                return
            begin, end = max(part.position, start), min(part.end, stop)
            origin = part.start - part.position
            yield Part(part.want, origin + begin, origin + end, begin)


def spans_of(wants: Sequence[Want], ranks: int, window_bytes: int) -> list[list[Window]]:
    """The windows of each rank.

    Args:
        wants: What all ranks need.
        ranks: How many share the reading.
        window_bytes: The most in a window, unless a single block has more.
    """
    total = total_bytes(wants)
    unit = min(_MAX_UNIT, window_bytes, max(1, total // (ranks * _UNITS_PER_RANK)))
    spans: list[list[Window]] = [[] for _ in range(ranks)]
    done = 0
    for number, start, stop in _units(wants, unit):
        middle = done + (stop - start) // 2
        _add(spans[min(ranks - 1, middle * ranks // total)], number, start, stop, window_bytes)
        done += stop - start
    return spans


def _units(wants: Sequence[Want], nbytes: int) -> Iterator[tuple[int, int, int]]:
    """The wants in pieces of whole blocks: about so many bytes, and one block at least."""
    for number, want in enumerate(wants):
        block = want.item.block
        step = max(1, nbytes // block) * block
        for first, last in want.intervals:
            start = first
            while start < last:
                stop = min(last, start // block * block + step)
                yield number, start, stop
                start = stop


def _add(windows: list[Window], number: int, start: int, stop: int, window_bytes: int) -> None:
    """Adds bytes to the last window, or begins another."""
    parts = windows[-1].parts if windows else []
    last = parts[-1] if parts else None
    if last is not None and (last.want, last.stop) == (number, start) and last.end + stop - start <= window_bytes:
        parts[-1] = last._replace(stop=stop)
        return
    position = aligned(last.end) if last is not None else 0
    if last is None or position + stop - start > window_bytes:
        windows.append(Window([Part(number, start, stop, 0)]))
    else:
        parts.append(Part(number, start, stop, position))
