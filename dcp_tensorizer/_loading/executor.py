"""Carries out a read plan: parallel range reads into the targets' own memory, checked against their digests.

What cannot be read in place (other dtypes, strides, parts of blocks) goes through scratch memory: one buffer for each
thread, of an operation's size at most. What goes to a GPU goes through the slots of a `PinnedPool` instead. Encrypted
blocks are decrypted where they have been read to.
"""

from __future__ import annotations

import errno
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from types import MappingProxyType

import torch

from .._forks import free_in_child
from .._format.checksums import DigestCheck, check_digests
from .._format.encryption import Cipher
from .._memory.device import CUDA
from .._memory.memory_limit import available_memory
from .._memory.shared_buffer import aligned
from .._memory.tensor_bytes import memory_of
from .._storage.base import RangeReader, Storage
from .._storage.memory_read import MemoryReader
from .._storage.tuning import UNLIMITED
from .._threads import cores, ranks_of_node
from ..errors import CheckpointError, ChecksumMismatch, ReadError
from .pinned_pool import PinnedPool, PinnedPools, Slot
from .read_planner import MAX_SCRATCH_BYTES, ReadLimits, ReadOperation, Segment, plan_reads
from .read_target import ReadTarget, in_turns
from .scatter import scatter
from .thread_pool import run_all

__all__ = ["fetch", "limits_of", "with_gaps"]


_MAX_DEVICE_THREADS = 16  # each reads, hashes and hands on a few GB/s, and the bus takes some 50


def limits_of(storage: Storage) -> ReadLimits:
    """How reads of a storage are joined and cut."""
    return ReadLimits(storage.reads.max_gap_bytes, storage.reads.max_coalesced_bytes or MAX_SCRATCH_BYTES)


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
    pools: PinnedPools | None = None,
) -> int:
    """Reads everything that the targets want; those on a GPU are ready when it returns.

    Args:
        storage: The checkpoint's directory.
        targets: What to read, and where it goes.
        threads: Parallel reads, at most; None for a number that suits the storage.
        verify: Compare what is read with its digests.
        progress: Called with the bytes that are done and the bytes in all, by one reading thread at a time.
        cipher: For items that are encrypted.
        limits: How reads are joined and cut; None for what suits the storage.
        page_cache: Leave what is read from a local disk in the page cache; None: if there is room for it.
        in_memory: Files that need not be read, by name.
        pools: Memory on the way to GPUs, for several reads one after the other; None for this one's own.

    Returns:
        Bytes read.

    Raises:
        ReadError: a file is missing, too short or unreadable; names file, key and offset.
        ChecksumMismatch: stored bytes are not the ones that were saved; names file, key and offset.
    """
    if not targets:
        return 0
    turns = [plan_reads(turn, limits or limits_of(storage), verify=verify) for turn in in_turns(targets)]
    operations = [operation for turn in turns for operation in turn]
    total = sum(operation.nbytes for operation in operations)
    if page_cache is None:
        page_cache = _has_room_to_cache(total)
    counting = free_in_child(threading.Lock())
    is_inference = torch.is_inference_mode_enabled()  # of this thread: others would not write to its tensors
    done = 0

    def run(operation: ReadOperation) -> int:
        nonlocal done
        with torch.inference_mode(is_inference):
            executor.run(operation)
        nbytes = operation.nbytes
        with counting:
            done += nbytes
            progress(done, total)
        return nbytes

    with ExitStack() as stack:
        pools = pools or stack.enter_context(PinnedPools(CUDA))
        min_threads, max_threads = threads or storage.reads.min_threads, threads or storage.reads.max_threads
        if threads is None and pools.takes(targets):  # a bus takes more than as many readers bring as suit a disk
            max_threads = max(max_threads, min(_MAX_DEVICE_THREADS, cores()))
        pool = stack.enter_context(pools.pool_for(operations, max_threads))
        files = stack.enter_context(closing(_OpenFiles(storage, operations, in_memory)))
        executor = _Executor(storage, files, verify, cipher, pool, page_cache=page_cache)
        for turn in turns:
            run_all(turn, run, min_threads=min_threads, max_threads=max_threads)
    return total


def _has_room_to_cache(nbytes: int) -> bool:
    """Whether the page cache can hold what this rank reads, and as much for each other rank of this machine, twice.

    Where it cannot, a load through it would drive out what others need, and find nothing of itself the next time.
    """
    available = available_memory()
    return available is None or available >= 2 * (ranks_of_node() or 1) * nbytes


class _OpenFiles:
    """The files of a load, each open from its first operation to its last one.

    Operations are in the order of files, so only a few files are open at once.
    """

    def __init__(self, storage: Storage, operations: Iterable[ReadOperation], in_memory: Mapping[str, bytes]) -> None:
        self._storage = storage
        self._in_memory = in_memory
        self._operations_left = Counter(operation.file for operation in operations)
        self._files: dict[str, RangeReader] = {}
        self._lock = free_in_child(threading.Lock())

    def open(self, name: str) -> RangeReader:
        with self._lock:
            if name in self._in_memory and name not in self._files:
                self._files[name] = MemoryReader(self._in_memory[name])
            if name not in self._files:
                try:
                    self._files[name] = self._storage.open(name)
                except OSError as error:
                    message = f"cannot open {self._storage.path}/{name}: {error}{_advice(error)}"
                    raise ReadError(self._storage.scrub(message)) from self._storage.cause(error)
            return self._files[name]

    def finish_operation(self, name: str) -> None:
        """Closes a file whose last operation this was."""
        with self._lock:
            self._operations_left[name] -= 1
            if not self._operations_left[name]:
                self._files.pop(name).close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class _Executor:
    """Runs operations, several at once, each in its thread."""

    def __init__(
        self,
        storage: Storage,
        files: _OpenFiles,
        verify: bool,
        cipher: Cipher | None,
        pool: PinnedPool | None,
        *,
        page_cache: bool,
    ) -> None:
        self._storage = storage
        self._page_cache = page_cache
        self._verify = verify
        # What is not hashed may leave the cache. In few calls it is read 5% faster.
        self._slice_bytes = storage.reads.slice_bytes if verify else UNLIMITED
        self._cipher = cipher
        self._pool = pool
        self._files = files
        self._scratch = threading.local()

    def run(self, operation: ReadOperation) -> None:
        """Reads, checks and copies out one operation's segments."""
        if self._pool is None or not any(map(self._pool.is_for, operation.targets)):
            self._run(operation, None)
        else:
            with self._pool.slot() as slot:
                self._run(operation, slot)

    def _run(self, operation: ReadOperation, slot: Slot | None) -> None:
        places = self._places(operation, slot)
        self._read(operation, places)
        for segment, place in zip(operation.segments, places, strict=True):
            if segment.item.nonce_and_macs:
                self._decrypt(segment, place)
            if segment.target_offset is None:
                scatter(segment, place, slot)

    # --- where segments are read to -----------------------------------------------------------------------------

    def _places(self, operation: ReadOperation, slot: Slot | None) -> list[memoryview]:
        """Where each segment is read to: its target, or a part of the slot, or of this thread's scratch buffer."""
        sizes = [segment.nbytes for segment in operation.segments if segment.target_offset is None]
        scratch = iter(self._scratch_views(sizes, slot) if sizes else ())
        return [
            next(scratch)
            if segment.target_offset is None
            else memory_of(segment.targets[0].tensor)[segment.target_offset : segment.target_offset + segment.nbytes]
            for segment in operation.segments
        ]

    def _scratch_views(self, sizes: Sequence[int], slot: Slot | None) -> list[memoryview]:
        starts = list(itertools.accumulate((aligned(size) for size in sizes), initial=0))
        buffer = getattr(self._scratch, "buffer", None) if slot is None else slot.memory
        if buffer is None or buffer.numel() < starts[-1]:
            assert slot is None, "slots are of the size of the largest operation"
            self._scratch.buffer = buffer = torch.empty(starts[-1], dtype=torch.uint8, device="cpu")
        view = buffer.numpy().data
        return [view[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    # --- reading and checking -----------------------------------------------------------------------------------

    def _read(self, operation: ReadOperation, places: Sequence[memoryview]) -> None:
        """Reads segments to their places, and compares each with its digests when it has been read."""
        try:
            file = self._files.open(operation.file)
            if not self._page_cache and not any(target.shared for target in operation.targets):
                file = file.once(operation.offset, operation.nbytes)
            for batch in operation.batches(self._slice_bytes):
                self._read_batch(file, operation.segments[batch], places[batch])
            self._files.finish_operation(operation.file)
        except CheckpointError:
            raise
        except Exception as error:
            key = operation.segments[0].targets[0].key
            raise ReadError(
                self._storage.scrub(
                    f"cannot read {operation.nbytes:,} bytes at {operation.offset:,} of {self._storage.path}/"
                    f"{operation.file} (for {key!r}): {type(error).__name__}: {error}{_advice(error)}"
                )
            ) from self._storage.cause(error)

    def _read_batch(self, file: RangeReader, segments: Sequence[Segment], places: Sequence[memoryview]) -> None:
        """Reads one segment in slices, or several at once."""
        if len(segments) == 1:
            self._read_slices(file, segments[0], places[0])
            return
        file.read_into(with_gaps(segments, places), segments[0].offset)
        if self._verify:
            for segment, place in zip(segments, places, strict=True):
                self._compare(segment, place)

    def _read_slices(self, file: RangeReader, segment: Segment, place: memoryview) -> None:
        check = DigestCheck(segment.item, segment.start, place.nbytes) if self._verify else None
        step = self._slice_bytes
        for start in range(0, place.nbytes, step):
            data = place[start : start + step]
            file.read_into([data], segment.offset + start)
            if check is not None:
                check.update(data)
        if check is not None and not check.matches():
            self._compare(segment, place)

    def _compare(self, segment: Segment, data: memoryview) -> None:
        try:
            check_digests(segment.item, segment.start, data)
        except ChecksumMismatch as mismatch:
            advice = "" if segment.item.nonce_and_macs else ", or pass verify=False to read it as it is"
            raise self._mismatch(segment, f"{mismatch}", advice) from None

    def _decrypt(self, segment: Segment, data: memoryview) -> None:
        """Decrypts whole blocks. A block's MAC finds what its digest finds, and changes that were made on purpose."""
        assert self._cipher is not None, "the reader looks for a key first"
        step = segment.item.block
        for number, start in enumerate(range(0, data.nbytes, step), segment.start // step):
            if not self._cipher.decrypt(data[start : start + step], segment.item.nonce_and_macs, number):
                raise self._mismatch(segment, f"bytes {number * step:,} to {number * step + step:,}")

    def _mismatch(self, segment: Segment, damaged_bytes: str, advice: str = "") -> ChecksumMismatch:
        keys = ", ".join(repr(target.key) for target in segment.targets)
        return ChecksumMismatch(
            f"{keys} in {self._storage.path}/{segment.item.file}: {damaged_bytes} of the tensor at byte "
            f"{segment.item.offset:,} are not what was saved. The file is damaged: load another checkpoint{advice}."
        )


def _advice(error: Exception) -> str:
    """What to do about an error. A load has looked before that the files are there, and a tool has not."""
    if isinstance(error, FileNotFoundError) or getattr(error, "errno", None) == errno.ESTALE:
        return (
            ". The checkpoint is damaged, or was overwritten or removed while it was read: load it again, or another "
            "one."
        )
    return ""


def with_gaps(segments: Sequence[Segment], places: Sequence[memoryview]) -> list[memoryview]:
    """Where to read consecutive bytes to: the segments' places, and room for what lies between the segments."""
    gaps = [after.offset - before.file_stop for before, after in itertools.pairwise(segments)]
    room = memoryview(bytearray(max(gaps, default=0)))
    buffers = [places[0]]
    for gap, place in zip(gaps, places[1:], strict=True):
        if gap:
            buffers.append(room[:gap])
        buffers.append(place)
    return buffers
