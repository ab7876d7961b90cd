"""Plans which bytes a load reads, and in which order, without any I/O.

Each target names a region of a stored tensor. Its bytes become segments. A segment is a run of bytes of one tensor that
is read once: either straight into the target's memory, if the bytes are the same there, or into a scratch buffer from
which regions are copied out. Segments that lie close together in a file are read in one operation.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .._index.layouts import Region
from .._runtime.gc_pause import collector_paused
from .._tensor_file.names import StoredItem
from .targets import ReadTarget

MAX_SCRATCH_BYTES = 8 << 20
"""The size of one operation: enough for a disk's full speed, and small enough to keep several threads busy."""

MAX_SEGMENTS = 512
"""Segments of one operation: half of the buffers that one ``preadv`` takes, because each gap takes a buffer, too."""

_Interval = tuple[int, int]


class ReadLimits(NamedTuple):
    """The limits by which reads are joined and cut."""

    max_gap_bytes: int  # reading this many unneeded bytes is faster than another request
    max_coalesced_bytes: int = MAX_SCRATCH_BYTES  # of one operation that reads straight into targets
    max_scratch_bytes: int = MAX_SCRATCH_BYTES  # of one operation that reads into scratch memory
    max_segments: int = MAX_SEGMENTS  # of one operation


class Segment(NamedTuple):
    """A run of bytes of one stored tensor. Start and stop are relative to the tensor's first byte.

    It is read into the memory of its only target, ``target_offset`` bytes from the beginning; None: into scratch
    memory.
    """

    item: StoredItem
    start: int
    stop: int
    targets: tuple[ReadTarget, ...]  # that want some of the bytes
    target_offset: int | None

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def offset(self) -> int:
        """The position of its first byte in the file."""
        return self.item.offset + self.start

    @property
    def scratch_bytes(self) -> int:
        return self.nbytes if self.target_offset is None else 0


@dataclass(slots=True)
class ReadOperation:
    """One read of consecutive bytes of a file: segments in order, with small gaps between them."""

    file: str
    offset: int
    stop: int = 0
    segments: list[Segment] = field(default_factory=list)
    scratch_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.stop - self.offset

    @property
    def targets(self) -> Iterator[ReadTarget]:
        """The targets of its segments. A target may appear several times."""
        return (target for segment in self.segments for target in segment.targets)

    def take(self, segment: Segment, limits: ReadLimits) -> bool:
        """Adds a segment that follows in the file; returns False if it must be read in another operation."""
        item, start, stop = segment[:3]
        stop += item.offset
        if self.segments and (
            item.offset + start - self.stop > limits.max_gap_bytes
            or stop - self.offset > limits.max_coalesced_bytes
            or self.scratch_bytes + segment.scratch_bytes > limits.max_scratch_bytes
            or len(self.segments) == limits.max_segments
        ):
            return False
        self.segments.append(segment)
        self.stop = stop
        self.scratch_bytes += segment.scratch_bytes
        return True

    def batches(self, max_bytes: int) -> Iterator[slice]:
        """Cuts the operation into reads that fit into a processor's cache, so that the data is hashed there.

        Yields slices of the segments: as many as fit into ``max_bytes``, or a larger one by itself.
        """
        first, start = 0, self.offset
        for number, (item, begin, stop, _, _) in enumerate(self.segments):
            if item.offset + stop - start > max_bytes and number > first:
                yield slice(first, number)
                first, start = number, item.offset + begin
        yield slice(first, len(self.segments))


@collector_paused()
def plan_reads(targets: Sequence[ReadTarget], limits: ReadLimits, *, verify: bool) -> list[ReadOperation]:
    """Plans the bytes to read, in the order of files and offsets, none of them twice.

    ``verify`` reads whole blocks, so that their digests can be checked. Encrypted items are always read by whole
    blocks.
    """
    operations: list[ReadOperation] = []
    current: ReadOperation | None = None
    for file, of_tensor in by_tensor(targets):
        for segment in _segments(of_tensor, limits, verify):
            if current is None or current.file != file or not current.take(segment, limits):
                current = ReadOperation(file, segment.offset)
                current.take(segment, limits)
                operations.append(current)
    return operations


def by_tensor(targets: Iterable[ReadTarget]) -> Iterator[tuple[str, list[ReadTarget]]]:
    """The targets of each stored tensor, with its file, in the order of files and offsets."""
    found: dict[tuple[str, int], list[ReadTarget]] = defaultdict(list)
    for target in targets:
        found[target.item.file, target.item.offset].append(target)
    for place in sorted(found):
        yield place[0], found[place]


def wanted_bytes(targets: Sequence[ReadTarget], limits: ReadLimits, *, verify: bool) -> list[_Interval]:
    """The bytes of one stored tensor that its targets need, widened and joined as by `plan_reads`.

    They depend on the regions, not on the targets' memory.
    """
    item = targets[0].item
    step = item.block if verify or item.nonce_and_macs else 1
    runs = (run for t in targets for run in _runs(t.shape, t.region, t.itemsize, limits.max_gap_bytes))
    return _merge(_widen(run, step, item.length) for run in runs)


def _segments(targets: Sequence[ReadTarget], limits: ReadLimits, verify: bool) -> list[Segment]:
    """The runs of one stored tensor that its targets need, in order."""
    first = targets[0]
    item = first.item
    is_alone = len(targets) == 1 and first.in_place
    if is_alone and first.region.size == first.shape and item.length <= limits.max_coalesced_bytes:  # most tensors
        return [Segment(item, 0, item.length, (first,), 0)]
    step = item.block if verify or item.nonce_and_macs else 1
    if is_alone and (run := first.run) is not None:
        return _in_place_segments(first, run, step, _whole_steps(limits.max_coalesced_bytes, step))
    runs = [(target, _runs(target.shape, target.region, target.itemsize, limits.max_gap_bytes)) for target in targets]
    to_read = _merge(_widen(run, step, item.length) for _, of_target in runs for run in of_target)
    segments = []
    for start, stop in _cut(to_read, _whole_steps(limits.max_scratch_bytes, step)):
        users = tuple(target for target, of_target in runs if _touches(of_target, start, stop))
        segments.append(Segment(item, start, stop, users, None))
    return segments


def _in_place_segments(target: ReadTarget, run: _Interval, step: int, max_bytes: int) -> list[Segment]:
    """A run that is read straight into its target, except for blocks at its ends of which the target has only a
    part.
    """
    first, last = run
    start, stop = _widen(run, step, target.item.length)
    inner_start = start if start == first else min(start + step, stop)
    inner_stop = stop if stop == last else max(last // step * step, inner_start)
    parts: list[tuple[int, int, int | None]] = [(start, inner_start, None)] if start < inner_start else []
    parts += [(a, b, a - first) for a, b in _cut([(inner_start, inner_stop)], max_bytes)]
    parts += [(inner_stop, stop, None)] if inner_stop < stop else []
    return [Segment(target.item, a, b, (target,), target_offset) for a, b, target_offset in parts]


def _whole_steps(max_bytes: int, step: int) -> int:
    """The largest size up to ``max_bytes`` that is a multiple of ``step``, or one step."""
    return max(step, max_bytes // step * step)


def _cut(intervals: Iterable[_Interval], max_bytes: int) -> Iterator[_Interval]:
    for start, stop in intervals:
        for begin in range(start, stop, max_bytes):
            yield begin, min(begin + max_bytes, stop)


def _runs(shape: Sequence[int], region: Region, itemsize: int, max_gap: int) -> list[_Interval]:
    """The runs of bytes to read for a region of an array. Gaps of up to ``max_gap`` between its rows are read, too."""
    if not shape:
        return [(0, itemsize)]
    row_runs = _runs(shape[1:], Region(region.start[1:], region.size[1:]), itemsize, max_gap)
    pitch = math.prod(shape[1:]) * itemsize
    rows = range(region.start[0], region.start[0] + region.size[0])
    gap = pitch - row_runs[-1][1] + row_runs[0][0]
    if gap <= max_gap and len(row_runs) == 1:
        return [(rows[0] * pitch + row_runs[0][0], rows[-1] * pitch + row_runs[0][1])]
    runs = [(row * pitch + start, row * pitch + stop) for row in rows for start, stop in row_runs]
    return runs if gap > max_gap else _merge(runs, max_gap)


def _widen(interval: _Interval, step: int, length: int) -> _Interval:
    """The range of whole steps that an interval touches, in ``length`` bytes."""
    return interval[0] // step * step, min(-(-interval[1] // step) * step, length)


def _touches(runs: Sequence[_Interval], start: int, stop: int) -> bool:
    """Returns whether one of several sorted, disjoint runs has bytes in a range."""
    first = bisect_right(runs, start, key=lambda run: run[1])
    return first < len(runs) and runs[first][0] < stop


def _merge(intervals: Iterable[_Interval], gap: int = 0) -> list[_Interval]:
    """Joins intervals that overlap, touch, or are at most ``gap`` apart."""
    merged: list[_Interval] = []
    for start, stop in sorted(intervals):
        if merged and start - merged[-1][1] <= gap:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged
