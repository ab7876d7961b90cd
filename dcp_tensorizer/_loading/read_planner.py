"""From DCP's plans to bytes, without any I/O: which tensors go into which file, which bytes a load reads and when.

Reading: each request names a region of a stored tensor. Its bytes become segments, each a run of bytes of one tensor
that is read once, either straight into the target (when target and run have the same shape in memory) or into a
scratch buffer from which regions are copied out. Segments that lie close together in a file are read in one operation.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .._format.chunks import Region
from .._format.layout import StoredItem
from .._memory.garbage import collector_paused

__all__ = [
    "ReadOperation",
    "ReadRequest",
    "Segment",
    "plan_reads",
]

_MAX_OPERATION = 8 << 20  # enough to reach the disk's speed, small enough to keep several threads busy
_MAX_SEGMENTS = 512  # half of what one preadv takes, because gaps take a buffer each
_Interval = tuple[int, int]


class ReadRequest(NamedTuple):
    """A region of a stored tensor that is wanted.

    Attributes:
        item: Where the tensor is.
        shape: Its shape.
        itemsize: Bytes of an element.
        region: What is wanted of it; not empty.
        in_place: The target holds the region in C order and in the stored dtype, so that a run of the stored bytes
            which is also a run of the region can be read into it as it is.
    """

    item: StoredItem
    shape: tuple[int, ...]
    itemsize: int
    region: Region
    in_place: bool

    @property
    def run(self) -> tuple[int, int] | None:
        """The bytes of the region, from the first to before the last, if they are one run of the tensor's."""
        if self.region.size == self.shape:
            return 0, self.item.length
        first, last = _enclosing(self)
        return (first, last) if last - first == math.prod(self.region.size) * self.itemsize else None


class Segment(NamedTuple):
    """A run of bytes of one stored tensor.

    Attributes:
        item: The tensor.
        start, stop: Bytes, relative to the tensor's data.
        requests: Numbers of the requests that want some of it.
        target_offset: Read into the target of the only request, so many bytes from its beginning; None: into scratch.
    """

    item: StoredItem
    start: int
    stop: int
    requests: tuple[int, ...]
    target_offset: int | None

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def offset(self) -> int:
        """First byte in the file."""
        return self.item.offset + self.start

    @property
    def scratch(self) -> int:
        """Bytes of scratch memory that it takes."""
        return self.nbytes if self.target_offset is None else 0


@dataclass(slots=True)
class ReadOperation:
    """One read of consecutive bytes of a file: segments in order, with small gaps between them."""

    file: str
    segments: list[Segment] = field(default_factory=list)
    scratch: int = 0  # bytes of those that are not read into their targets

    @property
    def offset(self) -> int:
        return self.segments[0].offset

    @property
    def stop(self) -> int:
        last = self.segments[-1]
        return last.item.offset + last.stop

    @property
    def nbytes(self) -> int:
        return self.stop - self.offset

    def add(self, segment: Segment) -> None:
        self.segments.append(segment)
        self.scratch += segment.scratch


@collector_paused()
def plan_reads(
    requests: Sequence[ReadRequest], *, verify: bool, gap: int, most: int | None = None
) -> list[ReadOperation]:
    """Which bytes to read, in the order of files and offsets, no byte twice.

    Args:
        requests: What is wanted.
        verify: Read whole blocks, so that their digests can be checked; of encrypted items they are read in any case.
        gap: Reading so many bytes for nothing costs less than another request.
        most: Bytes to read at once, of what is read into its targets; the rest keeps to the size of scratch memory.
    """
    most = most or _MAX_OPERATION
    by_tensor: dict[tuple[str, int], list[int]] = defaultdict(list)
    for number, request in enumerate(requests):
        by_tensor[request.item.file, request.item.offset].append(number)
    operations: list[ReadOperation] = []
    for (file, _), numbers in sorted(by_tensor.items()):
        for segment in _segments(requests, numbers, verify, gap, most):
            current = operations[-1] if operations else None
            if current is None or current.file != file or not _joins(current, segment, gap, most):
                current = ReadOperation(file)
                operations.append(current)
            current.add(segment)
    return operations


def _joins(operation: ReadOperation, segment: Segment, widest: int, most: int) -> bool:
    return (
        segment.offset - operation.stop <= widest
        and segment.item.offset + segment.stop - operation.offset <= most
        and operation.scratch + segment.scratch <= _MAX_OPERATION
        and len(operation.segments) < _MAX_SEGMENTS
    )


def _segments(
    requests: Sequence[ReadRequest], numbers: Sequence[int], verify: bool, gap: int, most: int
) -> list[Segment]:
    """The runs of one stored tensor that the given requests need, in order."""
    first = requests[numbers[0]]
    item = first.item
    step = item.block if verify or item.nonce_and_macs else 1
    if len(numbers) == 1 and first.in_place and (alone := first.run) is not None:
        return _direct_segments(item, alone, numbers[0], step, max(step, most // step * step))
    intervals = {n: _runs(requests[n].shape, requests[n].region, requests[n].itemsize, gap) for n in numbers}
    wanted = _merge(_widen(run, step, item.length) for runs in intervals.values() for run in runs)
    whole = max(step, _MAX_OPERATION // step * step)
    segments = []
    for start, stop in ((a, min(a + whole, e)) for s, e in wanted for a in range(s, e, whole)):
        users = tuple(n for n in numbers if _touches(intervals[n], start, stop))
        segments.append(Segment(item, start, stop, users, None))
    return segments


def _direct_segments(item: StoredItem, wanted: _Interval, number: int, step: int, whole: int) -> list[Segment]:
    """A run that goes straight to its target, but for the blocks at its ends of which it needs only a part."""
    first, last = wanted
    start, stop = _widen(wanted, step, item.length)
    inner_start = start if start == first else min(start + step, stop)
    inner_stop = stop if stop == last else max(last // step * step, inner_start)
    runs: list[tuple[int, int, int | None]] = [(start, inner_start, None)] if start < inner_start else []
    runs += [(a, min(a + whole, inner_stop), a - first) for a in range(inner_start, inner_stop, whole)]
    runs += [(inner_stop, stop, None)] if inner_stop < stop else []
    return [Segment(item, a, e, (number,), direct) for a, e, direct in runs]


def _enclosing(request: ReadRequest) -> _Interval:
    """The bytes from a region's first element to its last."""
    first = last = 0
    for start, size, extent in zip(request.region.start, request.region.size, request.shape, strict=True):
        first = first * extent + start
        last = last * extent + start + size - 1
    return first * request.itemsize, (last + 1) * request.itemsize


def _runs(shape: Sequence[int], region: Region, itemsize: int, most: int) -> list[_Interval]:
    """The runs of bytes to read for a region of an array, with the gaps between its rows that are ``most`` at most."""
    if not shape:
        return [(0, itemsize)]
    inner = _runs(shape[1:], Region(region.start[1:], region.size[1:]), itemsize, most)
    pitch = math.prod(shape[1:]) * itemsize
    rows = range(region.start[0], region.start[0] + region.size[0])
    gap = pitch - inner[-1][1] + inner[0][0]
    if gap > most:
        return [(row * pitch + start, row * pitch + stop) for row in rows for start, stop in inner]
    if len(inner) == 1:
        return [(rows[0] * pitch + inner[0][0], rows[-1] * pitch + inner[0][1])]
    joined = [(row * pitch + start, row * pitch + stop) for row in rows for start, stop in inner]
    return _merge(joined, most)


def _widen(interval: _Interval, step: int, length: int) -> _Interval:
    return interval[0] // step * step, min(-(-interval[1] // step) * step, length)


def _touches(runs: Sequence[_Interval], start: int, stop: int) -> bool:
    """Whether one of some sorted, disjoint runs has bytes in a range."""
    first = bisect_right(runs, start, key=lambda run: run[1])
    return first < len(runs) and runs[first][0] < stop


def _merge(intervals: Iterable[_Interval], gap: int = 0) -> list[_Interval]:
    """Joins intervals that overlap or touch, or lie no more than ``gap`` apart."""
    merged: list[_Interval] = []
    for start, stop in sorted(intervals):
        if merged and start - merged[-1][1] <= gap:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged
