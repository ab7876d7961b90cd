"""Executes a read plan: reads byte ranges in parallel into the targets' memory, and compares the data with its digests.

Data that cannot be read in place (other dtypes or strides, parts of blocks) goes through scratch memory: one buffer per
thread, of at most an operation's size. Data for a GPU goes through the slots of a `PinnedPool`. Encrypted blocks are
decrypted where they have been read.
"""

from __future__ import annotations

import errno
import itertools
import resource
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from types import MappingProxyType
from typing import TypeVar

import torch

from .._runtime.forks import free_in_child
from .._runtime.memory_limit import available_memory
from .._runtime.spans import Span
from .._runtime.threads import Workers, in_threads, ranks_of_node
from .._staging.shared_memory import aligned
from .._staging.tensor_copy import unit_of
from .._storage.base import UNLIMITED, MemoryReader, RangeReader, Storage
from .._tensor_file.digests import DigestCheck, all_match, check_digests
from .._tensor_file.dtypes import memories_of, named_dtype
from .._tensor_file.encryption import Cipher
from .._tensor_file.regions import part_of, regions_of_range, strides_of
from ..errors import CheckpointError, ChecksumMismatch, ReadError, describe
from .gpu import POOLS, PinnedPool, PinnedPools
from .plan import (
    MAX_SCRATCH_BYTES,
    ReadLimits,
    ReadOperation,
    ReadTarget,
    Segment,
    non_overlapping_groups,
    plan_reads,
)


def limits_of(storage: Storage) -> ReadLimits:
    return ReadLimits(storage.reads.max_gap_bytes, storage.reads.max_coalesced_bytes or MAX_SCRATCH_BYTES)


def check_files(storage: Storage, sizes: Mapping[str, int], names: Iterable[str]) -> None:
    """Raises `ReadError`, naming the file, unless the data files exist with the expected sizes."""
    ordered = sorted(names)
    for name, nbytes in zip(ordered, in_threads(storage.head, ordered), strict=True):
        expected = sizes[name]
        if nbytes != expected:
            state = "is missing" if nbytes is None else f"has {nbytes:,} bytes instead of {expected:,}"
            raise ReadError(
                f"{storage.path}/{name} {state}. The checkpoint is damaged, or is being overwritten: load another one."
            )


def fetch(
    storage: Storage,
    targets: Sequence[ReadTarget],
    *,
    threads: int | None = None,
    verify: bool,
    progress: Callable[[int, int], object] = lambda done, total: None,
    cipher: Cipher | None = None,
    limits: ReadLimits | None = None,
    page_cache: bool | None = None,
    in_memory: Mapping[str, bytes] = MappingProxyType({}),
    pools: PinnedPools = POOLS,
    note: Callable[[Span], object] = lambda span: None,
) -> int:
    """Reads everything that the targets need. Returns the number of bytes. Targets on a GPU are ready on return.

    Args:
        threads: The maximum number of parallel reads; None: the storage's default.
        verify: Compare the data with its digests.
        progress: Called with the number of bytes done and the total number, by one reading thread at a time.
        limits: The limits for coalescing and splitting reads; None: the storage's.
        page_cache: Leave data of local disks in the page cache; None: only if memory is sufficient.
        in_memory: The contents of files that need not be read, by name.
        pools: Memory for data on its way to GPUs.
        note: Called with the time span of each operation, by several threads.

    Raises:
        ReadError: a file, which the error names, is missing, too short or unreadable; or there is no memory for reads
            to a GPU.
        ChecksumMismatch: stored bytes are not the ones that were saved; names file, key and offset.
    """
    if not targets:
        return 0
    min_threads, max_threads = threads or storage.reads.min_threads, threads or storage.reads.max_threads
    if limits is None:
        limits = limits_of(storage)
        if storage.reads.min_threads < UNLIMITED:  # the page cache may serve the reads, so few threads may suffice
            limits = pools.limits(targets, limits, max_threads)
    turns = [plan_reads(turn, limits, verify=verify) for turn in non_overlapping_groups(targets)]
    operations = [operation for turn in turns for operation in turn]
    total = sum(operation.nbytes for operation in operations)
    if page_cache is None:
        # For each rank of this machine, free memory must hold twice what this rank reads. Otherwise the load would
        # evict other data from the page cache, and the next load would not find its data there. Measuring the free
        # memory takes longer than a small read.
        available = available_memory() if total > _SMALL_BYTES else None
        page_cache = available is None or available >= 2 * (ranks_of_node() or 1) * total
    with pools.pool_for(operations, max_threads) as pool:
        reads = _Reads(
            storage, operations, pool, progress, note, in_memory, verify=verify, cipher=cipher, page_cache=page_cache
        )
        with closing(reads):
            for turn in turns:
                if len(turn) == 1:  # starting a thread takes longer than a small read
                    reads.run(turn[0])
                    continue
                run_all(turn, reads.run, min_threads=min_threads, max_threads=max_threads)
    return total


class _Reads:
    """The operations of one `fetch`, and the files that they read. Several threads run the operations.

    Each file is open from its first operation to its last. Operations are sorted by file, so only a few files are open
    at the same time.
    """

    def __init__(
        self,
        storage: Storage,
        operations: Sequence[ReadOperation],
        pool: PinnedPool | None,
        progress: Callable[[int, int], object],
        note: Callable[[Span], object],
        in_memory: Mapping[str, bytes],
        *,
        verify: bool,
        cipher: Cipher | None,
        page_cache: bool,
    ) -> None:
        self._storage, self._pool, self._cipher = storage, pool, cipher
        self._progress, self._note, self._in_memory = progress, note, in_memory
        self._verify, self._page_cache = verify, page_cache
        # Data that is not hashed need not fit into the CPU cache. Reading it in few calls is 5% faster.
        self._slice_bytes = storage.reads.slice_bytes if verify else UNLIMITED
        self._operations_left = Counter(operation.file for operation in operations)
        self._files: dict[str, RangeReader] = {}
        self._opening = free_in_child(threading.Lock())
        self._done, self._total = 0, sum(operation.nbytes for operation in operations)
        self._counting = free_in_child(threading.Lock())
        self._scratch = threading.local()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def run(self, operation: ReadOperation) -> int:
        began, segments = time.perf_counter(), operation.segments
        pool = self._pool
        if pool is not None and not any(map(pool.is_for, operation.targets)):
            pool = None
        slots: AbstractContextManager[torch.Tensor | None] = nullcontext() if pool is None else pool.slot()
        # Only in inference mode may a thread write to tensors that were made in that mode. The mode also allows writes
        # to all other tensors.
        with torch.inference_mode(), slots as slot:
            starts = list(itertools.accumulate((aligned(segment.scratch_bytes) for segment in segments), initial=0))
            memories = self._memories(segments, starts, slot)
            verifying = self._read(operation, memories)
            for segment, memory in zip(segments, memories, strict=True):
                if segment.item.nonce_and_macs:
                    verifying += _timed(self._decrypt, segment, memory)
            in_scratch = [of for of in zip(segments, memories, starts, strict=False) if of[0].target_offset is None]
            if slot is not None and pool is not None:
                _scatter_slot(in_scratch, slot, pool)
            else:
                for segment, memory, _ in in_scratch:
                    scatter(segment, memory)
        self._note(Span("read file", began, time.perf_counter(), operation.file, operation.nbytes, verifying))
        with self._counting:
            self._done += operation.nbytes
            self._progress(self._done, self._total)
        return operation.nbytes

    def _memories(
        self, segments: Sequence[Segment], starts: Sequence[int], slot: torch.Tensor | None
    ) -> list[memoryview]:
        """Returns the memory to read each segment into. ``starts`` are their offsets in scratch memory."""
        scratch = memoryview(b"")
        if starts[-1]:
            buffer = getattr(self._scratch, "buffer", None) if slot is None else slot
            if buffer is None or buffer.numel() < starts[-1]:
                assert slot is None, "slots are of the size of the largest operation"
                self._scratch.buffer = buffer = torch.empty(starts[-1], dtype=torch.uint8, device="cpu")
            scratch = buffer.numpy().data
        in_place = iter(memories_of([s.targets[0].tensor for s in segments if s.target_offset is not None]))
        return [
            scratch[at : at + stop - start] if offset is None else next(in_place)[offset : offset + stop - start]
            for (_, start, stop, _, offset), at in zip(segments, starts, strict=False)
        ]

    # --- reading and checking -----------------------------------------------------------------------------------

    def _read(self, operation: ReadOperation, memories: Sequence[memoryview]) -> float:
        """Reads segments into their memory, and compares their digests. Returns the seconds spent on the comparison."""
        verifying = 0.0
        try:
            file = self._open(operation.file)
            if not self._page_cache and not any(target.shared for target in operation.targets):
                file = file.once(operation.offset, operation.nbytes)
            for batch in operation.batches(self._slice_bytes):
                segments, into = operation.segments[batch], memories[batch]
                if len(segments) == 1:
                    verifying += self._read_slices(file, segments[0], into[0])
                    continue
                file.read_into(with_gaps(segments, into), segments[0].offset)
                if self._verify:
                    verifying += _timed(self._compare, segments, into)
            with self._opening:
                self._operations_left[operation.file] -= 1
                if not self._operations_left[operation.file]:
                    self._files.pop(operation.file).close()
        except CheckpointError:
            raise
        except Exception as error:
            key = operation.segments[0].targets[0].key
            raise ReadError(
                self._storage.scrub(
                    f"cannot read {operation.nbytes:,} bytes at {operation.offset:,} of "
                    f"{self._storage.opened_path(operation.file)} (for {key!r}): {describe(error)}"
                    f"{_advice(error)}"
                )
            ) from self._storage.cause(error)
        return verifying

    def _open(self, name: str) -> RangeReader:
        with self._opening:
            if name not in self._files and name in self._in_memory:
                self._files[name] = MemoryReader(self._in_memory[name])
            if name not in self._files:
                try:
                    self._files[name] = self._storage.open(name)
                except OSError as error:
                    message = f"cannot open {self._storage.path}/{name}: {error}{_advice(error)}"
                    raise ReadError(self._storage.scrub(message)) from self._storage.cause(error)
            return self._files[name]

    def _read_slices(self, file: RangeReader, segment: Segment, memory: memoryview) -> float:
        check = DigestCheck(segment.item, segment.start, memory.nbytes) if self._verify else None
        verifying, step = 0.0, self._slice_bytes
        if check is not None and step < memory.nbytes:
            step = max(1, step // segment.item.block) * segment.item.block
        for start in range(0, memory.nbytes, step):
            data = memory[start : start + step]
            file.read_into([data], segment.offset + start)
            if check is not None:
                verifying += _timed(check.update, data)
        if check is not None and not check.matches():
            self._compare([segment], [memory])
        return verifying

    def _compare(self, segments: Sequence[Segment], memories: Sequence[memoryview]) -> None:
        if all_match([segment.item for segment in segments], memories):
            return
        for segment, memory in zip(segments, memories, strict=True):
            try:
                check_digests(segment.item, segment.start, memory)
            except ChecksumMismatch as mismatch:
                advice = "" if segment.item.nonce_and_macs else ", or pass verify=False to read it as it is"
                raise self._mismatch(segment, f"{mismatch}", advice) from None

    def _decrypt(self, segment: Segment, data: memoryview) -> None:
        """Decrypts whole blocks in place. A block's MAC reveals damage, as a digest would, and also tampering."""
        assert self._cipher is not None, "the reader checks for a key first"
        step = segment.item.block
        for number, start in enumerate(range(0, data.nbytes, step), segment.start // step):
            if not self._cipher.decrypt(data[start : start + step], segment.item.nonce_and_macs, number):
                end = min(number * step + step, segment.item.length)
                raise self._mismatch(segment, f"bytes {number * step:,} to {end:,}")

    def _mismatch(self, segment: Segment, damaged_bytes: str, advice: str = "") -> ChecksumMismatch:
        keys = ", ".join(repr(target.key) for target in segment.targets)
        return ChecksumMismatch(
            f"{keys} in {self._storage.opened_path(segment.item.file)}: {damaged_bytes} of the tensor at byte "
            f"{segment.item.offset:,} are not what was saved. The file is damaged: load another checkpoint{advice}."
        )


def _timed(function: Callable[..., object], *arguments: object) -> float:
    began = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - began


def _advice(error: Exception) -> str:
    if isinstance(error, FileNotFoundError) or getattr(error, "errno", None) == errno.ESTALE:
        return (
            ". The checkpoint is damaged, or was overwritten or removed while it was read: load it again, or another "
            "one."
        )
    return ""


def with_gaps(segments: Sequence[Segment], memories: Sequence[memoryview]) -> list[memoryview]:
    """Returns buffers for consecutive bytes: the segments' memory, and memory for the gaps between them."""
    starts = [item.offset + start for item, start, _, _, _ in segments]
    gaps = [after - start - memory.nbytes for start, after, memory in zip(starts, starts[1:], memories, strict=False)]
    unused = memoryview(bytearray(max(gaps, default=0)))
    buffers = [memories[0]]
    for gap, memory in zip(gaps, memories[1:], strict=True):
        if gap:
            buffers.append(unused[:gap])
        buffers.append(memory)
    return buffers


# --- from scratch memory to the targets -------------------------------------------------------------------------------

_Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor, and the source of its elements."""


def scatter(segment: Segment, data: memoryview | torch.Tensor, pool: PinnedPool | None = None) -> None:
    """Copies parts of a segment to its targets.

    ``data`` holds the segment's bytes: a uint8 tensor on any device, or host memory. If ``pool`` is given, it is the
    pool of the slot that holds the bytes, and copies to targets on a GPU are queued.
    """
    for target in segment.targets:
        queue = pool if pool is not None and pool.is_for(target) else None
        if target.has_stored_layout:
            pairs = _run(target, segment, data)
        elif queue is not None:
            # Only contiguous runs cross the bus. The device selects rows, converts them, and writes to any strides.
            content = data if isinstance(data, torch.Tensor) else torch.frombuffer(data, dtype=torch.uint8)
            pairs = _parts(target, segment, queue.send(content, target.tensor))
        else:
            pairs = _parts(target, segment, data)
        for into, out in pairs:
            if queue is not None:
                queue.copy([into], [out])
            else:
                into.copy_(out)


# Segments of up to this size share a transfer to a GPU: sending a tensor takes 60 to 100 microseconds under the GIL,
# and the bus moves this many bytes in 20 microseconds.
_SMALL_BYTES = 1 << 20

_InSlot = tuple[Segment, memoryview, int]
"""A segment in a slot, its bytes, and their offset in the slot."""


def _scatter_slot(parts: Iterable[_InSlot], slot: torch.Tensor, pool: PinnedPool) -> None:
    """Scatters the segments of a slot. Adjacent small segments for one device are copied in one transfer."""

    def device_of_small(part: _InSlot) -> int | None:
        segment = part[0]
        indices = {pool.device.index_of(target.tensor) for target in segment.targets}
        return indices.pop() if segment.nbytes <= _SMALL_BYTES and len(indices) == 1 else None

    for index, group in itertools.groupby(parts, key=device_of_small):
        of_device = list(group)
        if index is None or len(of_device) == 1 or not _scatter_together(of_device, slot, pool):
            for segment, memory, _ in of_device:
                scatter(segment, memory, pool)


def _scatter_together(parts: Sequence[_InSlot], slot: torch.Tensor, pool: PinnedPool) -> bool:
    """Scatters adjacent segments of a slot to targets on one device.

    One copy moves the segments over the bus. On the device, one call for each element size copies them to the targets
    with the stored layout. If the device has no memory for the segments, returns False.
    """
    (first, _, begin), *_, (_, memory, last) = parts
    try:
        sent = pool.send(slot[begin : last + memory.nbytes], first.targets[0].tensor)
    except torch.OutOfMemoryError:
        return False
    as_units: dict[torch.dtype, torch.Tensor] = {}
    fused: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
    for segment, memory, start in parts:
        for target in segment.targets:
            if not target.has_stored_layout:
                for into, out in _parts(target, segment, sent[start - begin : start - begin + memory.nbytes]):
                    pool.copy([into], [out])
            elif (found := _shared_run(target, segment)) is not None:
                into, offset, nbytes = found
                unit = unit_of(into.dtype)  # integers: the fused kernel for half precision changes NaNs
                if unit not in as_units:
                    whole = sent[: sent.numel() // unit.itemsize * unit.itemsize]
                    as_units[unit] = whole.view(unit)
                at = (start - begin + offset) // unit.itemsize
                targets, sources = fused[unit]
                targets.append(into if into.dtype is unit else into.view(unit))
                sources.append(as_units[unit].as_strided((nbytes // unit.itemsize,), (1,), at))
    for targets, sources in fused.values():
        pool.copy(targets, sources)
    return True


def _run(target: ReadTarget, segment: Segment, data: memoryview | torch.Tensor) -> Iterator[_Pair]:
    """Yields the same as `_parts`, for a target with the stored layout: at most one pair, with few torch calls.

    Each torch call releases the GIL, and other threads then acquire it.
    """
    if (found := _shared_run(target, segment)) is None:
        return
    into, offset, nbytes = found
    if isinstance(data, torch.Tensor):
        source = data[offset : offset + nbytes].view(into.dtype)
    else:
        source = torch.frombuffer(data, dtype=into.dtype, count=into.numel(), offset=offset)
    yield _with_copy_kernel(into, source)


def _shared_run(target: ReadTarget, segment: Segment) -> tuple[torch.Tensor, int, int] | None:
    """Returns a flat view of the elements of a target that a segment contains, and their byte range in the segment.

    The range is an offset and a size. The target has the stored layout. If the segment contains none of its
    elements, returns None.
    """
    run = target.run
    assert run is not None
    begin, end = run
    first, stop = max(segment.start, begin), min(segment.stop, end)
    if first >= stop:
        return None
    size = target.itemsize
    offset = target.tensor.storage_offset() + (first - begin) // size
    return target.tensor.as_strided(((stop - first) // size,), (1,), offset), first - segment.start, stop - first


def _parts(target: ReadTarget, segment: Segment, data: memoryview | torch.Tensor) -> Iterator[_Pair]:
    """Yields views of parts of a target, with the segment's elements for them."""
    content = data if isinstance(data, torch.Tensor) else torch.frombuffer(data, dtype=torch.uint8)
    elements = content.view(named_dtype(target.item.dtype))
    first = segment.start // target.itemsize
    strides = strides_of(target.shape)
    for run in regions_of_range(first, first + elements.numel(), target.shape):
        region = run.intersect(target.region)
        if region is None:
            continue
        offset = sum(start * stride for start, stride in zip(region.start, strides, strict=True)) - first
        source = elements.as_strided(region.size, strides, elements.storage_offset() + offset)
        yield _with_copy_kernel(part_of(target.tensor, region, target.region), source)


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """Does ``target.copy_(source)`` for every dtype."""
    target, source = _with_copy_kernel(target, source)
    target.copy_(source)


def _with_copy_kernel(target: torch.Tensor, source: torch.Tensor) -> _Pair:
    """Returns one-byte tensors as uint8: torch has no copy kernel for some one-byte dtypes."""
    if target.dtype == source.dtype and source.itemsize == 1:
        return target.view(torch.uint8), source.view(torch.uint8)
    return target, source


# --- the threads of a load --------------------------------------------------------------------------------------------
#
# Reads from the page cache keep cores busy, and more threads than cores slow each other down. Disks and servers make
# threads wait, and need many concurrent reads for their full speed. A load does not know in advance from which of them
# it reads. So it begins with few threads, and starts more when these wait. On 2 cores, a load from the page cache took
# 252 ms with 8 threads and 217 ms with few; a load from the disk of the same machine reached 1.15 GB/s with 8 threads
# and 0.88 GB/s with few.

_T = TypeVar("_T")

# A thread counts as waiting for the storage if it spent less than a quarter of its time on a core. With a higher
# share, it may have waited for a core or for the GIL: twice as many threads as cores read the page cache 10% slower.
_WAITING_FACTOR = 4
# A thread also counts as waiting if more than half of its bytes came from a disk: it may spend half of the time
# decrypting or copying them.
_FROM_DISK = 0.5
_RUSAGE_THREAD = getattr(resource, "RUSAGE_THREAD", None)

Usage = tuple[float, float, int]
"""Seconds of wall-clock time, a thread's seconds on a core, and the bytes that the kernel read from disks for it."""


def thread_usage() -> Usage:
    """Returns the usage of the calling thread, counted from arbitrary moments.

    Some network file systems do not count bytes.
    """
    blocks = 0 if _RUSAGE_THREAD is None else resource.getrusage(_RUSAGE_THREAD).ru_inblock
    return time.perf_counter(), time.thread_time(), blocks * 512


def run_all(
    operations: Iterable[_T],
    run: Callable[[_T], int],
    *,
    min_threads: int,
    max_threads: int,
    usage: Callable[[], Usage] = thread_usage,
) -> None:
    """Calls ``run`` with each operation, in order, in several threads. After an error, starts no further operation.

    ``run`` returns the number of bytes that it has read. Starts ``min_threads`` threads, and more, up to
    ``max_threads``, while ``usage`` shows that threads wait for the storage.
    """
    remaining = deque(operations)
    workers: list[Future[None]] = []
    started = 0

    def work() -> None:
        """Runs operations one by one. A future for each would take longer than a small read."""
        began = usage()
        nbytes = finished = 0
        try:
            while remaining:
                try:
                    operation = remaining.popleft()
                except IndexError:  # another thread has taken the last one
                    return
                nbytes += run(operation)
                finished += 1
                # Measuring takes time, so a thread measures after its 1st, 2nd, 4th, 8th operation, and so on. Each
                # measurement covers the thread's total time: preemption may prolong a single operation.
                if remaining and started < max_threads and not finished & (finished - 1):
                    wall, busy, from_disk = (now - before for now, before in zip(usage(), began, strict=True))
                    if wall > _WAITING_FACTOR * busy or from_disk > _FROM_DISK * nbytes:
                        start()  # noqa: F821  (deleted when no thread runs any more)
        except BaseException:
            remaining.clear()
            raise

    def start() -> None:
        nonlocal started
        started += 1  # before `submit`, which calls `work` if no more threads can be started
        with suppress(RuntimeError):  # an interruption has shut the pool down
            workers.append(pool.submit(work))  # noqa: F821  (as above)

    try:
        with Workers(max_threads, "dcp-read") as pool:  # waits for threads that write to targets
            try:
                for _ in range(min(min_threads, max_threads, len(remaining))):
                    start()
                for worker in workers:  # including those that start meanwhile
                    worker.result()
            except BaseException:  # also a KeyboardInterrupt, which no worker sees
                remaining.clear()
                raise
    finally:
        del work, start  # a reference cycle, which would hold the targets until the next garbage collection
