"""Plans a load, without I/O: the targets of its items, and the order in which bytes are read for them.

A target is a region of a stored tensor, and the tensor that receives it. Its bytes are split into segments. A segment
is a run of bytes of one tensor that is read once: directly into the target's memory if the bytes are the same there,
otherwise into a scratch buffer from which regions are copied out. Segments that are close together in a file are read
in one operation.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from .._formats.catalog import Piece, check_length
from .._runtime.interpreter import collector_paused
from .._runtime.torch_compat import is_fake, is_plain
from .._tensor_file.dtypes import named_dtype
from .._tensor_file.names import StoredItem
from .._tensor_file.regions import Interval, Region, merged, part_of, runs_with_gaps, widened
from ..errors import ReadError, listed

logger = logging.getLogger("dcp_tensorizer")

Casts = dict[tuple[torch.dtype, torch.dtype], list[str]]
"""The keys of tensors that are converted while they are loaded, by the stored dtype and the target's."""


@dataclass(slots=True, eq=False)  # identity comparison: two targets may have the same region
class ReadTarget:
    key: str  # for messages
    item: StoredItem
    shape: tuple[int, ...]  # of the stored tensor
    region: Region  # not empty
    tensor: torch.Tensor  # of the region's shape; of any dtype, device and strides, unless `in_place`
    in_place: bool  # the stored bytes can be read into its memory unchanged
    shared: bool = False  # other ranks probably read the same bytes

    @classmethod
    def of(cls, key: str, item: StoredItem, shape: tuple[int, ...], region: Region, tensor: torch.Tensor) -> ReadTarget:
        return cls(key, item, shape, region, tensor, can_read_in_place(tensor, named_dtype(item.dtype)))

    @classmethod
    def of_bytes(cls, key: str, item: StoredItem, start: int, tensor: torch.Tensor) -> ReadTarget:
        """Returns a target for raw stored bytes from byte ``start`` on. ``tensor`` is a uint8 tensor in host memory."""
        region = Region((start,), (tensor.numel(),))
        return cls(key, item._replace(dtype="uint8"), (item.length,), region, tensor, in_place=True)

    @property
    def itemsize(self) -> int:
        """The size of a stored element in bytes."""
        return named_dtype(self.item.dtype).itemsize

    @property
    def has_stored_layout(self) -> bool:
        is_same = self.tensor.dtype == named_dtype(self.item.dtype) and is_plain(self.tensor)
        return is_same and self.run is not None

    @property
    def run(self) -> tuple[int, int] | None:
        """The start and stop of the region's bytes in the stored tensor; None if the bytes are several runs."""
        if self.region.size == self.shape:
            return 0, self.item.length
        first, stop = self.region.span(self.shape)
        is_run = stop - first == math.prod(self.region.size)
        return (first * self.itemsize, stop * self.itemsize) if is_run else None


def can_read_in_place(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_cpu and tensor.dtype == dtype and is_plain(tensor)


def targets_of(
    path: str,
    metadata: Metadata,
    world_size: int,
    casts: Casts,
    read_item: ReadItem,
    pieces: Sequence[Piece],
    tensor: torch.Tensor,
) -> list[ReadTarget]:
    """Checks that an item of a load plan fits its tensor, and returns its targets. A fake tensor has none.

    ``pieces`` are the item's stored chunks, and ``tensor`` receives the item. ``casts`` gets the key if the
    tensor's dtype differs from the stored one. Raises `ReadError` if the item does not fit the tensor, and
    `MetadataError` if the metadata is inconsistent; both name the key.
    """
    key = read_item.dest_index.fqn
    if world_size == 1 and len(pieces) == 1 and type(tensor) is torch.Tensor:
        item, shape, region, _ = pieces[0]  # most items are one whole tensor, with a target of its dtype and shape
        is_same = region.size == shape == tensor.shape and tensor.nbytes == item.length
        if is_same and can_read_in_place(tensor, named_dtype(item.dtype)):
            return [ReadTarget(key, item, shape, region, tensor, True)]
    if is_fake(tensor):
        return []
    size = tuple(read_item.lengths)
    entry = metadata.state_dict_metadata.get(read_item.storage_index.fqn) if not pieces or world_size > 1 else None
    whole_size = entry.size if isinstance(entry, TensorStorageMetadata) else None
    if not pieces and isinstance(entry, TensorStorageMetadata):
        _check_fit(key, size, entry.properties.dtype, tensor, casts)
    targets = []
    for piece in pieces:
        _check_fit(key, size, named_dtype(piece.item.dtype), tensor, casts)
        check_length(path, key, piece.item, piece.shape)
        part = tensor if piece.part.size == size else part_of(tensor, piece.part, Region((0,) * len(size), size))
        target = ReadTarget.of(key, piece.item, piece.shape, piece.region, part)
        # Other ranks may read the same bytes: of a replicated tensor, or for other columns of a tensor.
        target.shared = world_size > 1 and (size == whole_size or target.run is None)
        targets.append(target)
    return targets


def _check_fit(key: str, size: tuple[int, ...], stored_dtype: torch.dtype, tensor: torch.Tensor, casts: Casts) -> None:
    if tensor.shape != size:
        raise ReadError(
            f"{key!r} needs a target of shape {size}, got {tuple(tensor.shape)}. Load it into a tensor of the needed "
            f"shape."
        )
    if not tensor.is_contiguous() and any(
        extent > 1 and stride == 0 for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise ReadError(f"{key!r} has an expanded target, whose elements share memory. Load it into a clone.")
    if tensor.dtype == stored_dtype:
        return
    if not torch.can_cast(stored_dtype, tensor.dtype):
        raise ReadError(
            f"{key!r} is stored as {stored_dtype}, which cannot be converted to the {tensor.dtype} of its target. "
            f"Load it into a tensor of {stored_dtype}."
        )
    keys = casts.setdefault((stored_dtype, tensor.dtype), [])
    if key not in keys[-1:]:  # called for each chunk of a tensor
        keys.append(key)


def warn_of_casts(path: str, casts: Casts) -> None:
    for (stored_dtype, dtype), keys in casts.items():
        logger.warning(
            "%s: %s stored as %s and converted to the %s of the target: %s",
            path,
            "1 tensor is" if len(keys) == 1 else f"{len(keys):,} tensors are",
            stored_dtype,
            dtype,
            listed(keys),
        )


def non_overlapping_groups(targets: Sequence[ReadTarget]) -> Iterator[Sequence[ReadTarget]]:
    """Yields the groups of targets that may be read concurrently, in order.

    Targets that share memory, such as tied weights, are read one by one, in the order of the plan, because concurrent
    reads would mix their data. So in the end, shared memory holds all data of its last target, as with torch's reader.
    """
    shared = overlapping(targets)
    alone = [target for target in targets if target not in shared] if shared else targets
    if alone:
        yield alone
    yield from ([target] for target in targets if target in shared)


def overlapping(targets: Sequence[ReadTarget]) -> set[ReadTarget]:
    if all(target.in_place for target in targets):  # most loads: vectorised
        starts = np.array([target.tensor.data_ptr() for target in targets], dtype=np.int64)
        stops = starts + np.array([target.tensor.nbytes for target in targets], dtype=np.int64)
        order = np.argsort(starts)
        if (stops[order[:-1]] <= starts[order[1:]]).all():
            return set()
    by_memory = sorted((*_memory(t), n) for n, t in enumerate(targets) if t.in_place or type(t.tensor) is torch.Tensor)
    overlapping: set[ReadTarget] = set()
    furthest = reached_device = reached = -1
    for device, start, stop, number in by_memory:
        if device != reached_device or start >= reached:
            furthest, reached_device, reached = number, device, stop
            continue
        overlapping |= {targets[furthest], targets[number]}
        if stop > reached:
            furthest, reached = number, stop
    return overlapping


def _memory(target: ReadTarget) -> tuple[int, int, int]:
    """Returns the index of a target's GPU, or -1, and the start and stop address of its elements."""
    tensor = target.tensor
    first = tensor.data_ptr()
    if target.in_place:
        return -1, first, first + tensor.nbytes
    if tensor.is_contiguous():
        return tensor.get_device(), first, first + tensor.nbytes
    elements = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.get_device(), first, first + elements * tensor.itemsize


# --- from targets to reads --------------------------------------------------------------------------------------------

MAX_SCRATCH_BYTES = 8 << 20
"""The default limit of an operation: enough for a disk's full speed, small enough to keep several threads busy."""

MAX_SEGMENTS = 512
"""The maximum number of segments in one operation: half of the buffers that one ``preadv`` takes, because each gap
also takes a buffer."""


class ReadLimits(NamedTuple):
    max_gap_bytes: int  # reading this many unneeded bytes is faster than a second request
    max_coalesced_bytes: int = MAX_SCRATCH_BYTES  # of one operation, unless it is a single segment in scratch memory
    max_scratch_bytes: int = MAX_SCRATCH_BYTES  # of one operation's segments in scratch memory
    max_segments: int = MAX_SEGMENTS  # of one operation


class Segment(NamedTuple):
    """A run of bytes of one stored tensor. ``start`` and ``stop`` are relative to the tensor's first byte.

    If ``target_offset`` is not None, the run is read into the memory of its only target, at that offset in bytes.
    Otherwise it is read into scratch memory.
    """

    item: StoredItem
    start: int
    stop: int
    targets: tuple[ReadTarget, ...]  # that need some of the bytes
    target_offset: int | None

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def offset(self) -> int:
        return self.item.offset + self.start

    @property
    def scratch_bytes(self) -> int:
        return self.nbytes if self.target_offset is None else 0


@dataclass(slots=True)
class ReadOperation:
    """One read of consecutive bytes of a file: segments in order, with at most small gaps between them."""

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
        """Yields the targets of the segments. A target may appear several times."""
        return (target for segment in self.segments for target in segment.targets)

    def take(self, segment: Segment, limits: ReadLimits) -> bool:
        """Adds a segment that follows in the file. If the limits require another operation for it, returns False."""
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
        """Yields slices of the segments: as many as fit into ``max_bytes``, or a single larger one.

        The data of a slice is hashed while it is in the CPU cache.
        """
        first, start = 0, self.offset
        for number, (item, begin, stop, _, _) in enumerate(self.segments):
            if item.offset + stop - start > max_bytes and number > first:
                yield slice(first, number)
                first, start = number, item.offset + begin
        yield slice(first, len(self.segments))


@collector_paused()
def plan_reads(targets: Sequence[ReadTarget], limits: ReadLimits, *, verify: bool) -> list[ReadOperation]:
    """Plans the operations that read all needed bytes once, in the order of files and offsets.

    With ``verify``, reads whole blocks, so that their digests can be checked. Encrypted items are always read in whole
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
    """Yields the file and the targets of each stored tensor, in the order of files and offsets."""
    found: dict[tuple[str, int], list[ReadTarget]] = defaultdict(list)
    for target in targets:
        found[target.item.file, target.item.offset].append(target)
    for location in sorted(found):
        yield location[0], found[location]


def wanted_bytes(targets: Sequence[ReadTarget], limits: ReadLimits, *, verify: bool) -> list[Interval]:
    """Returns the intervals of one stored tensor that its targets need, widened and joined as in `plan_reads`.

    The intervals depend on the regions, not on the targets' memory.
    """
    item = targets[0].item
    step = item.block if verify or item.nonce_and_macs else 1
    runs = (run for t in targets for run in runs_with_gaps(t.shape, t.region, t.itemsize, limits.max_gap_bytes))
    return merged(widened(run, step, item.length) for run in runs)


def _segments(targets: Sequence[ReadTarget], limits: ReadLimits, verify: bool) -> list[Segment]:
    """Returns the segments of one stored tensor that its targets need, in order."""
    first = targets[0]
    item = first.item
    is_alone = len(targets) == 1 and first.in_place
    if is_alone and first.region.size == first.shape and item.length <= limits.max_coalesced_bytes:  # most tensors
        return [Segment(item, 0, item.length, (first,), 0)]
    step = item.block if verify or item.nonce_and_macs else 1
    if is_alone and (run := first.run) is not None:
        return _in_place_segments(first, run, step, _whole_steps(limits.max_coalesced_bytes, step))
    runs = [
        (target, runs_with_gaps(target.shape, target.region, target.itemsize, limits.max_gap_bytes))
        for target in targets
    ]
    to_read = merged(widened(run, step, item.length) for _, of_target in runs for run in of_target)
    segments = []
    for start, stop in _cut(to_read, _whole_steps(limits.max_scratch_bytes, step)):
        users = []
        for target, of_target in runs:  # sorted and disjoint
            first_after = bisect_right(of_target, start, key=lambda run: run[1])
            if first_after < len(of_target) and of_target[first_after][0] < stop:
                users.append(target)
        segments.append(Segment(item, start, stop, tuple(users), None))
    return segments


def _in_place_segments(target: ReadTarget, run: Interval, step: int, max_bytes: int) -> list[Segment]:
    """Cuts a run into segments that are read into the target.

    If the target needs only a part of the block at an end of the run, that block is a separate segment, without a
    target offset.
    """
    first, last = run
    start, stop = widened(run, step, target.item.length)
    inner_start = start if start == first else min(start + step, stop)
    inner_stop = stop if stop == last else max(last // step * step, inner_start)
    parts: list[tuple[int, int, int | None]] = [(start, inner_start, None)] if start < inner_start else []
    parts += [(a, b, a - first) for a, b in _cut([(inner_start, inner_stop)], max_bytes)]
    parts += [(inner_stop, stop, None)] if inner_stop < stop else []
    return [Segment(target.item, a, b, (target,), target_offset) for a, b, target_offset in parts]


def _whole_steps(max_bytes: int, step: int) -> int:
    return max(step, max_bytes // step * step)


def _cut(intervals: Iterable[Interval], max_bytes: int) -> Iterator[Interval]:
    for start, stop in intervals:
        for begin in range(start, stop, max_bytes):
            yield begin, min(begin + max_bytes, stop)
