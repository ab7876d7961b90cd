"""Pinned memory for data on its way to a GPU: a few slots, reused while other reads are in progress.

A thread takes a slot, reads into it, checks the data, queues copies on a side stream, and returns the slot. The slot's
next user waits for those copies.

Each call that releases the GIL may have to wait to reacquire it: about 25 calls for each 8 MiB, with blocks hashed one
by one, limited loads to 6 to 8 GB/s where 26 were possible. So on machines with many cores a read has up to
`DEVICE_BYTES` bytes, only one digest is compared for each item up to that size, and several small tensors are copied in
one transfer.
"""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from .._runtime.direct_memory import direct_memory
from .._runtime.forks import Finalizer, free_in_child, in_child, keep_from_children
from .._runtime.memory_limit import check_free_memory
from .._runtime.threads import cores
from .._staging.device import CUDA, Device, Event, SideStream, pin_if_possible
from .._staging.shared_memory import aligned
from ..errors import ReadError, StagingError
from .plan import ReadLimits, ReadOperation, ReadTarget

DEVICE_BYTES = 32 << 20
"""The maximum size of one read for a GPU, if the process has more than `_FEW_CORES` cores."""

_FEW_CORES = 4
_POOL_BYTES = 256 << 20  # of all concurrent reads for GPUs: with more than 8 threads, reads are smaller


class PinnedPools:
    """The slots of a process's loads.

    Registering memory takes longer than reading as many bytes. So slots are retained for later loads, and for later
    calls to `fetch` in the same load: a planner may request tensors one by one.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kept: PinnedPool | None = None
        self._lock = free_in_child(threading.Lock())  # concurrent loads share these slots
        in_child(self, PinnedPools._forget)

    def _forget(self) -> None:
        self._kept = None  # the memory belongs to the parent process

    def close(self) -> None:
        """Frees the idle slots."""
        self._keep(None)

    def limits(self, targets: Sequence[ReadTarget], limits: ReadLimits, threads: int) -> ReadLimits:
        elsewhere = (target.tensor for target in targets if not target.in_place)
        if cores() <= _FEW_CORES or all(self._device.index_of(tensor) is None for tensor in elsewhere):
            return limits
        nbytes = min(DEVICE_BYTES, _POOL_BYTES // threads)
        return limits._replace(
            max_scratch_bytes=max(limits.max_scratch_bytes, nbytes),
            max_coalesced_bytes=max(limits.max_coalesced_bytes, nbytes),
        )

    @contextmanager
    def pool_for(self, operations: Sequence[ReadOperation], threads: int) -> Iterator[PinnedPool | None]:
        """Yields the slots for one call of `fetch`: one per thread, and two whose copies may be in progress.

        If no target is on a GPU, yields None. All copies are done when the ``with`` block ends.
        """
        indices: set[int] = set()
        nbytes = 0
        for operation in operations:
            elsewhere = (target.tensor for target in operation.targets if not target.in_place)
            of_operation = {self._device.index_of(tensor) for tensor in elsewhere} - {None}
            if of_operation:
                indices |= of_operation  # type: ignore[arg-type]
                nbytes = max(nbytes, sum(aligned(segment.scratch_bytes) for segment in operation.segments))
        if not indices:
            yield None
            return
        pool = self._take(indices, min(threads, len(operations)) + 2, nbytes)
        try:
            yield pool
            pool.wait()
        except BaseException:
            pool.close()
            raise
        self._keep(pool)

    def _take(self, indices: Collection[int], count: int, nbytes: int) -> PinnedPool:
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None:
            if kept.streams.keys() >= set(indices) and kept.count >= count and kept.nbytes >= nbytes:
                kept.wait_for_current_streams()
                return kept
            kept.close()
            # Large enough for all requests so far, with a margin, so that growing requests seldom allocate.
            indices, count = {*indices, *kept.streams}, max(count, kept.count)
            nbytes = kept.nbytes if nbytes <= kept.nbytes else max(nbytes, 2 * kept.nbytes)
        return PinnedPool(self._device, indices, count, nbytes)

    def _keep(self, pool: PinnedPool | None) -> None:
        with self._lock:
            before, self._kept = self._kept, pool
        if before is not None:
            before.close()


class PinnedPool:
    """Pinned slots for loads to one or more devices. The constructor raises `ReadError` if it cannot allocate them.

    The slots are private memory, which gets huge pages. Shared memory gets small ones, which take several times as long
    to allocate and to register.
    """

    def __init__(self, device: Device, indices: Collection[int], count: int, nbytes: int) -> None:
        self.device, self.count, self.nbytes = device, count, nbytes
        self.streams = {index: device.side_streams[index] for index in sorted(indices)}
        self.wait_for_current_streams()
        step = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            check_free_memory(count * step)
            memory = direct_memory(count * step)
        except (StagingError, OSError, MemoryError) as error:
            raise ReadError(f"cannot allocate pinned memory for reads to a GPU: {error}") from error
        keep_from_children(memory.obj)  # type: ignore[arg-type]
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        unpin = pin_if_possible(device, whole.data_ptr(), count * step, next(iter(self.streams)))
        self._unpin = Finalizer(self, unpin)  # in case an interrupt prevents `close`
        self._slots: queue.SimpleQueue[tuple[torch.Tensor, list[Event]]] = queue.SimpleQueue()
        for slot in whole.split(step):
            self._slots.put((slot, []))

    def wait_for_current_streams(self) -> None:
        """Orders later copies after the work queued on the devices' current streams."""
        for stream in self.streams.values():
            stream.follow()

    def is_for(self, target: ReadTarget) -> bool:
        return self.device.index_of(target.tensor) is not None

    @contextmanager
    def slot(self) -> Iterator[torch.Tensor]:
        """Waits for the copies from the slot that was returned first, and yields the slot."""
        slot, copies = self._slots.get()
        try:
            for copy in copies:
                copy.synchronize()
            yield slot
        finally:
            self._slots.put((slot, [stream.mark() for stream in self.streams.values()]))

    def send(self, content: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Queues a copy of bytes of a slot to a target's device. Returns the copy, for further copies.

        Raises `torch.OutOfMemoryError`.
        """
        stream = self._stream_for(target)
        sent = stream.allocate(content.numel())
        stream.copy([sent], [content])
        return sent

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Queues copies to one device, from a slot or from results of `send`."""
        self._stream_for(targets[0]).copy(targets, sources)

    def _stream_for(self, target: torch.Tensor) -> SideStream:
        index = self.device.index_of(target)
        assert index is not None
        return self.streams[index]

    def wait(self) -> None:
        for stream in self.streams.values():
            stream.mark().synchronize()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._unpin()
            self._slots = queue.SimpleQueue()


POOLS = PinnedPools(CUDA)
