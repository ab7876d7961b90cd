"""Carries out a read plan: parallel range reads into the targets' own memory, checked against their digests.

What cannot be read in place (other dtypes, strides, parts of blocks) goes through a scratch buffer, one a thread, of an
operation's size at most; what goes to a GPU, through the slots of a `Ring`. Encrypted blocks are decrypted where they
have been read to.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ._arena import aligned
from ._crypt import Cipher
from ._device import CUDA
from ._plan import Box, ReadOperation, ReadRequest, Segment, boxes_of_range, plan_reads
from ._ring import Ring, Slot
from ._storage import RangeReader, Storage
from ._tensorfile import DigestCheck, check_digests
from ._tensors import host_bytes
from .errors import CheckpointError, ChecksumMismatch, ReadError

__all__ = ["Wanted", "copy_elements", "fetch", "is_direct", "part_of"]

_WAITING = 3  # times as long as a thread was busy: it waits for the storage, and for others that share its core


@dataclass(frozen=True, slots=True)
class Wanted:
    """A read request and where its box goes.

    Attributes:
        key: FQN, for messages.
        request: What to read.
        target: A tensor of the box's shape; of any dtype, device and strides unless the request is direct.
    """

    key: str
    request: ReadRequest
    target: torch.Tensor


@dataclass(slots=True)
class _Slice:
    """A read of consecutive bytes.

    Attributes:
        offset: First byte in the file.
        buffers: Where they go, gaps included.
        pieces: The buffers that hold a segment, or a part of one, and its number.
    """

    offset: int
    buffers: list[memoryview] = field(default_factory=list)
    pieces: list[tuple[int, memoryview]] = field(default_factory=list)


def is_direct(target: torch.Tensor, dtype: torch.dtype) -> bool:
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
    wanted: Sequence[Wanted],
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
    operations = plan_reads([w.request for w in wanted], verify=verify, gap=storage.gap_bytes, most=storage.read_bytes)
    total = sum(operation.nbytes for operation in operations)
    uses = Counter(operation.file for operation in operations)
    first = threads or min(storage.first_threads, storage.read_threads)
    threads = threads or storage.read_threads
    job = _Job(storage, wanted, verify, uses, cipher, _ring(wanted, operations, threads))
    remaining = list(reversed(operations))
    taking, counting = threading.Lock(), threading.Lock()
    workers: list[Future[None]] = []
    done_bytes = 0

    def work() -> None:
        """Does one operation after the other: a future for each would cost more than a small read."""
        nonlocal done_bytes
        try:
            while True:
                with taking:
                    if not remaining:
                        return
                    operation = remaining.pop()
                with _Stopwatch() as watch:
                    job.run(operation)
                with taking:
                    if watch.waited and remaining and len(workers) < threads:
                        workers.append(pool.submit(work))
                with counting:
                    done_bytes += operation.nbytes
                    progress(done_bytes, total)
        except BaseException:
            remaining.clear()  # nobody begins another one
            raise

    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="dcp-read") as pool:
            with taking:
                workers += [pool.submit(work) for _ in range(min(first, len(operations)))]
            for worker in workers:  # and those that join meanwhile
                worker.result()
    finally:
        job.close()
    return total


class _Stopwatch:
    """Tells whether a thread has waited for something most of the time."""

    def __enter__(self) -> _Stopwatch:
        self._started = time.perf_counter(), time.thread_time()
        return self

    def __exit__(self, *error: object) -> None:
        wall, busy = time.perf_counter() - self._started[0], time.thread_time() - self._started[1]
        self.waited = wall > _WAITING * busy


class _Job:
    def __init__(
        self,
        storage: Storage,
        wanted: Sequence[Wanted],
        verify: bool,
        uses: Counter[str],
        cipher: Cipher | None,
        ring: Ring | None,
    ) -> None:
        self._storage = storage
        self._wanted = wanted
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

    @contextmanager
    def _opened(self, name: str) -> Iterator[RangeReader]:
        """A file, open from its first use to its last; operations are in the order of files, so few are at once."""
        with self._opening:
            if name not in self._files:
                try:
                    self._files[name] = self._storage.open(name)
                except OSError as error:
                    message = f"cannot open {self._storage.path}/{name}: {error}"
                    raise ReadError(self._storage.scrub(message)) from self._storage.cause(error)
            file = self._files[name]
        yield file
        with self._opening:
            self._uses[name] -= 1
            if not self._uses[name]:
                self._files.pop(name).close()

    def run(self, operation: ReadOperation) -> None:
        """Reads, checks and copies out one operation's segments."""
        numbers = (number for segment in operation.segments for number in segment.requests)
        if self._ring is not None and not self._ring.numbers.isdisjoint(numbers):
            with self._ring.slot() as slot:
                self._run(operation, slot)
        else:
            self._run(operation, None)

    def _run(self, operation: ReadOperation, slot: Slot | None) -> None:
        places = self._places(operation, slot)
        self._fill(operation, places)
        for segment, place in zip(operation.segments, places, strict=True):
            if segment.item.seal:
                self._decrypt(segment, place)
            if segment.direct is None:
                self._copy_out(segment, place, slot)

    def _fill(self, operation: ReadOperation, places: Sequence[memoryview]) -> None:
        """Reads segments to their places, and checks them on the way."""
        begun: dict[int, DigestCheck] = {}
        try:
            with self._opened(operation.file) as file:
                for part in _slices(operation, places, self._storage.slice_bytes):
                    file.read_into(part.buffers, part.offset)
                    if self._verify:
                        self._check(operation, places, part, begun)
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
        for number, check in begun.items():
            if not check.matches():
                self._compare(operation.segments[number], places[number])

    def _places(self, operation: ReadOperation, slot: Slot | None) -> list[memoryview]:
        """Where each segment is read to: its target, or a part of a slot, or of this thread's scratch buffer."""
        indirect = [segment.nbytes for segment in operation.segments if segment.direct is None]
        scratch = iter(self._scratch_views(indirect, slot) if indirect else ())
        return [
            next(scratch)
            if segment.direct is None
            else host_bytes(self._wanted[segment.requests[0]].target)[segment.direct : segment.direct + segment.nbytes]
            for segment in operation.segments
        ]

    def _scratch_views(self, sizes: Sequence[int], slot: Slot | None) -> list[memoryview]:
        starts = list(itertools.accumulate((aligned(size) for size in sizes), initial=0))
        buffer = getattr(self._scratch, "buffer", None) if slot is None else slot.memory
        if buffer is None or buffer.numel() < starts[-1]:
            assert slot is None, "slots are of the size of the largest operation"
            self._scratch.buffer = buffer = torch.empty(starts[-1], dtype=torch.uint8)
        view = buffer.numpy().data
        return [view[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    def _check(
        self, operation: ReadOperation, places: Sequence[memoryview], part: _Slice, begun: dict[int, DigestCheck]
    ) -> None:
        """Hashes what has just been read; of what comes in several slices, ``begun`` has the hashes so far."""
        for number, data in part.pieces:
            segment, place = operation.segments[number], places[number]
            if data.nbytes == place.nbytes:
                self._compare(segment, place)
                continue
            if number not in begun:
                begun[number] = DigestCheck(segment.item, segment.start, place.nbytes)
            begun[number].update(data)

    def _compare(self, segment: Segment, data: memoryview) -> None:
        try:
            check_digests(segment.item, segment.start, data)
        except ChecksumMismatch as mismatch:
            trust = "" if segment.item.seal else ", or pass verify=False to read it as it is"
            raise self._mismatch(segment, f"{mismatch}", trust) from None

    def _decrypt(self, segment: Segment, data: memoryview) -> None:
        """Decrypts whole blocks; a block's MAC finds what its digest would, and changes that were made on purpose."""
        assert self._cipher is not None, "the reader looks for a key first"
        step = segment.item.block
        for number, start in enumerate(range(0, data.nbytes, step), segment.start // step):
            if not self._cipher.decrypt(data[start : start + step], segment.item.seal, number):
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
            dtype = getattr(torch, request.item.dtype)
            elements = torch.frombuffer(data, dtype=torch.uint8).view(dtype)
            first = segment.start // request.itemsize
            strides = _strides(request.shape)
            for piece in boxes_of_range(first, first + elements.numel(), request.shape):
                box = piece.intersect(request.box)
                if box is None:
                    continue
                offset = sum(a * b for a, b in zip(box.start, strides, strict=True)) - first
                source = elements.as_strided(box.size, strides, elements.storage_offset() + offset)
                pair = _copyable(part_of(target, box, request.box), source)
                if slot is not None and number in slot.numbers:
                    slot.copy(*pair)
                else:
                    pair[0].copy_(pair[1])


def _slices(operation: ReadOperation, places: Sequence[memoryview], most: int) -> Iterator[_Slice]:
    """Cuts a read into several of about ``most`` bytes, and between segments where those are smaller."""
    gap = _gap(operation)
    current = _Slice(operation.offset)
    position, room = operation.offset, most
    for number, (segment, place) in enumerate(zip(operation.segments, places, strict=True)):
        if current.buffers and place.nbytes > room:
            yield current
            current, room = _Slice(position), most
        if position < segment.offset:
            current.buffers.append(gap[: segment.offset - position])
        for start in range(0, place.nbytes, most):
            if start:
                yield current
                current, room = _Slice(segment.offset + start), most
            data = place[start : start + most]
            current.buffers.append(data)
            current.pieces.append((number, data))
            room -= data.nbytes
        position = segment.offset + segment.nbytes
    yield current


def _gap(operation: ReadOperation) -> memoryview:
    """Room for bytes that nobody asked for; all gaps of an operation share it."""
    pairs = itertools.pairwise(operation.segments)
    return memoryview(bytearray(max((b.offset - a.offset - a.nbytes for a, b in pairs), default=0)))


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)``, for every dtype."""
    target, source = _copyable(target, source)
    target.copy_(source)


def _copyable(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if target.dtype == source.dtype and source.itemsize == 1:  # some one-byte dtypes have no copy kernel
        return target.view(torch.uint8), source.view(torch.uint8)
    return target, source


def _ring(wanted: Sequence[Wanted], operations: Sequence[ReadOperation], threads: int) -> Ring | None:
    """Slots for what goes to a GPU, one and a half for each thread that reads; None if nothing does."""
    indices = {number: CUDA.index_of(w.target) for number, w in enumerate(wanted)}
    landing = {number: index for number, index in indices.items() if index is not None}
    if not landing:
        return None
    sizes = (
        sum(aligned(segment.nbytes) for segment in operation.segments if segment.direct is None)
        for operation in operations
        if any(number in landing for segment in operation.segments for number in segment.requests)
    )
    nbytes = max(sizes, default=0)
    readers = min(threads, len(operations))
    return Ring(CUDA, landing, readers + -(-readers // 2), nbytes)


def part_of(target: torch.Tensor, box: Box, whole: Box) -> torch.Tensor:
    """The view of a box in a target that holds the box ``whole``."""
    for dim, (start, size, origin) in enumerate(zip(box.start, box.size, whole.start, strict=True)):
        target = target.narrow(dim, start - origin, size)
    return target


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))
