"""Carries out a read plan: parallel range reads into the targets' own memory, checked against their digests.

What cannot be read in place (other dtypes, strides, parts of blocks) goes through a scratch buffer, one a thread, of an
operation's size at most; what goes to a GPU, through the slots of a `PinnedPool`. Encrypted blocks are decrypted where
they have been read to.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .._format.checksums import DigestCheck, check_digests
from .._format.chunks import Region, regions_of_range
from .._format.encryption import Cipher
from .._memory.device import CUDA
from .._memory.shared_buffer import aligned
from .._memory.tensor_bytes import host_bytes, named_dtype
from .._storage.base import RangeReader, Storage
from ..errors import CheckpointError, ChecksumMismatch, ReadError
from .batches import batches, with_gaps
from .pinned_pool import PinnedPool, Slot
from .read_planner import ReadOperation, ReadRequest, Segment, plan_reads
from .thread_pool import work_through

__all__ = ["ReadTarget", "copy_elements", "fetch", "can_read_in_place", "part_of"]

_LARGE = 1 << 20


class ReadTarget(NamedTuple):
    """A read request and where its region goes.

    Attributes:
        key: FQN, for messages.
        request: What to read.
        target: A tensor of the region's shape; of any dtype, device and strides unless the request is ``in_place``.
        shared: Other ranks, as far as one can tell, read the same bytes.
    """

    key: str
    request: ReadRequest
    target: torch.Tensor
    shared: bool = False


def can_read_in_place(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether stored elements of ``dtype`` can be read into a target's memory as they are."""
    return (
        target.device.type == "cpu"
        and target.dtype == dtype
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    )


def fetch(
    storage: Storage,
    wanted: Sequence[ReadTarget],
    *,
    threads: int | None = None,
    verify: bool,
    progress: Callable[[int, int], object] = lambda done, total: None,
    cipher: Cipher | None = None,
) -> int:
    """Reads everything that is wanted into its targets; those on a GPU are ready when it returns.

    Args:
        storage: The checkpoint's directory.
        wanted: What to read.
        threads: Parallel reads, at most; None for a number that suits the storage.
        verify: Compare what is read with its digests.
        progress: Called with the bytes that are done and the bytes in all, by one reading thread at a time.
        cipher: For items that are encrypted.

    Returns:
        Bytes read.

    Raises:
        ReadError: a file is missing, too short or unreadable; names file, key and offset.
        ChecksumMismatch: stored bytes are not the ones that were saved; names file, key and offset.
    """
    if not wanted:
        return 0
    wanted = _apart(wanted)
    reads = storage.reads
    operations = plan_reads(
        [w.request for w in wanted], verify=verify, gap=reads.max_gap_bytes, most=reads.max_coalesced_bytes
    )
    total = sum(operation.nbytes for operation in operations)
    uses = Counter(operation.file for operation in operations)
    job = _Job(storage, wanted, verify, uses, cipher, _ring(wanted, operations, threads or reads.max_threads))
    counting = threading.Lock()
    done = 0

    def run(operation: ReadOperation) -> int:
        nonlocal done
        job.run(operation)
        nbytes = operation.nbytes
        with counting:
            done += nbytes
            progress(done, total)
        return nbytes

    try:
        first, most = threads or reads.min_threads, threads or reads.max_threads
        work_through(operations, run, first=first, most=most)
    finally:
        job.close()
    return total


def _apart(wanted: Sequence[ReadTarget]) -> Sequence[ReadTarget]:
    """Nothing is read straight into memory that several targets share, as those of tied weights do.

    What one of them gets, perhaps encrypted and with a key of its own, would be taken for the other's.
    """
    shared: set[int] = set()
    stop = last = -1
    for first, after, number in sorted((*_memory(w.target), n) for n, w in enumerate(wanted) if _has_memory(w)):
        if first < stop:
            shared |= {last, number}
        if after > stop:
            stop, last = after, number
    if not shared:
        return wanted
    return [
        w._replace(request=w.request._replace(in_place=w.request.in_place and number not in shared))
        for number, w in enumerate(wanted)
    ]


def _has_memory(wanted: ReadTarget) -> bool:
    return wanted.request.in_place or (type(wanted.target) is torch.Tensor and wanted.target.is_cpu)


def _memory(target: torch.Tensor) -> tuple[int, int]:
    """The addresses of a target's first element and of what follows its last one."""
    first = target.data_ptr()
    if target.is_contiguous():
        return first, first + target.nbytes
    span = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True)) + 1
    return first, first + span * target.itemsize


class _Job:
    def __init__(
        self,
        storage: Storage,
        wanted: Sequence[ReadTarget],
        verify: bool,
        uses: Counter[str],
        cipher: Cipher | None,
        ring: PinnedPool | None,
    ) -> None:
        self._storage = storage
        self._wanted = wanted
        # Made here, all at once: between their reads, which fill the processor's caches, it takes five times as long.
        # Small ones are read many at once, and so many objects would bring the garbage collector in.
        large = (n for n, w in enumerate(wanted) if w.request.in_place and w.target.nbytes >= _LARGE)
        self._large = {number: host_bytes(wanted[number].target) for number in large}
        self._shared = {number for number, w in enumerate(wanted) if w.shared}
        self._verify = verify
        self._uses = uses
        self._cipher = cipher
        self._ring = ring
        self._files: dict[str, RangeReader] = {}
        self._opening = threading.Lock()
        self._scratch = threading.local()

    def close(self) -> None:
        try:
            if self._ring is not None:
                self._ring.close()
        finally:
            for file in self._files.values():
                file.close()

    def _open(self, name: str) -> RangeReader:
        """A file, open from its first use to its last; operations are in the order of files, so few are at once."""
        with self._opening:
            if name not in self._files:
                try:
                    self._files[name] = self._storage.open(name)
                except OSError as error:
                    message = f"cannot open {self._storage.path}/{name}: {error}"
                    raise ReadError(self._storage.scrub(message)) from self._storage.cause(error)
            return self._files[name]

    def _used(self, name: str) -> None:
        with self._opening:
            self._uses[name] -= 1
            if not self._uses[name]:
                self._files.pop(name).close()

    def run(self, operation: ReadOperation) -> None:
        """Reads, checks and copies out one operation's segments."""
        if self._ring is None or self._ring.numbers.isdisjoint(n for s in operation.segments for n in s.requests):
            self._run(operation, None)
        else:
            with self._ring.slot() as slot:
                self._run(operation, slot)

    def _run(self, operation: ReadOperation, slot: Slot | None) -> None:
        places = self._places(operation, slot)
        self._fill(operation, places)
        for segment, place in zip(operation.segments, places, strict=True):
            if segment.item.nonce_and_macs:
                self._decrypt(segment, place)
            if segment.target_offset is None:
                self._copy_out(segment, place, slot)

    def _fill(self, operation: ReadOperation, places: Sequence[memoryview]) -> None:
        """Reads segments to their places, and checks them on the way."""
        try:
            file = self._open(operation.file)
            if not self._shared or self._shared.isdisjoint(n for s in operation.segments for n in s.requests):
                file = file.once(operation.offset, operation.nbytes)
            for batch in batches(operation, self._storage.reads.slice_bytes):
                self._read(file, operation.segments[batch], places[batch])
            self._used(operation.file)
        except CheckpointError:
            raise
        except Exception as error:
            key = self._wanted[operation.segments[0].requests[0]].key
            raise ReadError(
                self._storage.scrub(
                    f"cannot read {operation.nbytes:,} bytes at {operation.offset:,} of {self._storage.path}/"
                    f"{operation.file} (for {key!r}): {type(error).__name__}: {error}"
                )
            ) from self._storage.cause(error)

    def _read(self, file: RangeReader, segments: Sequence[Segment], places: Sequence[memoryview]) -> None:
        """Reads and checks a batch: one segment in slices, or several at once."""
        if len(segments) == 1:
            self._read_slices(file, segments[0], places[0])
            return
        file.read_into(with_gaps(segments, places), segments[0].offset)
        if self._verify:
            for segment, place in zip(segments, places, strict=True):
                self._compare(segment, place)

    def _read_slices(self, file: RangeReader, segment: Segment, place: memoryview) -> None:
        check = DigestCheck(segment.item, segment.start, place.nbytes) if self._verify else None
        offset, step = segment.offset, self._storage.reads.slice_bytes
        for start in range(0, place.nbytes, step):
            data = place[start : start + step]
            file.read_into([data], offset + start)
            if check is not None:
                check.update(data)
        if check is not None and not check.matches():
            self._compare(segment, place)

    def _places(self, operation: ReadOperation, slot: Slot | None) -> list[memoryview]:
        """Where each segment is read to: its target, or a part of a slot, or of this thread's scratch buffer."""
        indirect = [segment.nbytes for segment in operation.segments if segment.target_offset is None]
        scratch = iter(self._scratch_views(indirect, slot) if indirect else ())
        return [
            next(scratch)
            if segment.target_offset is None
            else self._target(segment.requests[0])[segment.target_offset : segment.target_offset + segment.nbytes]
            for segment in operation.segments
        ]

    def _target(self, number: int) -> memoryview:
        """The memory of a direct request's target."""
        large = self._large.get(number)
        return host_bytes(self._wanted[number].target) if large is None else large

    def _scratch_views(self, sizes: Sequence[int], slot: Slot | None) -> list[memoryview]:
        starts = list(itertools.accumulate((aligned(size) for size in sizes), initial=0))
        buffer = getattr(self._scratch, "buffer", None) if slot is None else slot.memory
        if buffer is None or buffer.numel() < starts[-1]:
            assert slot is None, "slots are of the size of the largest operation"
            self._scratch.buffer = buffer = torch.empty(starts[-1], dtype=torch.uint8)
        view = buffer.numpy().data
        return [view[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    def _compare(self, segment: Segment, data: memoryview) -> None:
        try:
            check_digests(segment.item, segment.start, data)
        except ChecksumMismatch as mismatch:
            trust = "" if segment.item.nonce_and_macs else ", or pass verify=False to read it as it is"
            raise self._mismatch(segment, f"{mismatch}", trust) from None

    def _decrypt(self, segment: Segment, data: memoryview) -> None:
        """Decrypts whole blocks; a block's MAC finds what its digest would, and changes that were made on purpose."""
        assert self._cipher is not None, "the reader looks for a key first"
        step = segment.item.block
        for number, start in enumerate(range(0, data.nbytes, step), segment.start // step):
            if not self._cipher.decrypt(data[start : start + step], segment.item.nonce_and_macs, number):
                raise self._mismatch(segment, f"bytes {number * step:,} to {number * step + step:,}")

    def _mismatch(self, segment: Segment, found: str, otherwise: str = "") -> ChecksumMismatch:
        keys = ", ".join(repr(self._wanted[number].key) for number in segment.requests)
        return ChecksumMismatch(
            f"{keys} in {self._storage.path}/{segment.item.file}: {found} of the tensor at byte "
            f"{segment.item.offset:,} are not what was saved. The file is damaged: load another checkpoint{otherwise}."
        )

    def _copy_out(self, segment: Segment, data: memoryview, slot: Slot | None) -> None:
        """Copies to the targets whatever they want of a segment."""
        for number in segment.requests:
            request, target = self._wanted[number].request, self._wanted[number].target
            dtype = named_dtype(request.item.dtype)
            elements = torch.frombuffer(data, dtype=torch.uint8).view(dtype)
            first = segment.start // request.itemsize
            strides = _strides(request.shape)
            for piece in regions_of_range(first, first + elements.numel(), request.shape):
                region = piece.intersect(request.region)
                if region is None:
                    continue
                offset = sum(a * b for a, b in zip(region.start, strides, strict=True)) - first
                source = elements.as_strided(region.size, strides, elements.storage_offset() + offset)
                pair = _copyable(part_of(target, region, request.region), source)
                if slot is not None and number in slot.numbers:
                    slot.copy(*pair)
                else:
                    pair[0].copy_(pair[1])


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)``, for every dtype."""
    target, source = _copyable(target, source)
    target.copy_(source)


def _copyable(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if target.dtype == source.dtype and source.itemsize == 1:  # some one-byte dtypes have no copy kernel
        return target.view(torch.uint8), source.view(torch.uint8)
    return target, source


def _ring(wanted: Sequence[ReadTarget], operations: Sequence[ReadOperation], threads: int) -> PinnedPool | None:
    """Slots for what goes to a GPU, one and a half for each thread that reads; None if nothing does."""
    indices = {number: CUDA.index_of(w.target) for number, w in enumerate(wanted)}
    landing = {number: index for number, index in indices.items() if index is not None}
    if not landing:
        return None
    sizes = (
        sum(aligned(segment.nbytes) for segment in operation.segments if segment.target_offset is None)
        for operation in operations
        if any(number in landing for segment in operation.segments for number in segment.requests)
    )
    nbytes = max(sizes, default=0)
    readers = min(threads, len(operations))
    return PinnedPool(CUDA, landing, readers + -(-readers // 2), nbytes)


def part_of(target: torch.Tensor, region: Region, whole: Region) -> torch.Tensor:
    """The view of a region in a target that holds the region ``whole``."""
    for dim, (start, size, origin) in enumerate(zip(region.start, region.size, whole.start, strict=True)):
        target = target.narrow(dim, start - origin, size)
    return target


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))
