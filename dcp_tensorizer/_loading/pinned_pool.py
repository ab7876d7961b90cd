"""Pinned memory for what is read on its way to a GPU: a few slots, used in turn while other reads go on.

With as much host memory as the model has, a model that only the GPUs can hold could not be loaded. So there are a few
slots, each of one read's size. A thread takes a slot, reads into it, checks it, queues its copies on a stream beside
training's, and returns the slot. Its next user waits for those copies.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from .._runtime.forks import free_in_child
from .._staging.device import Device, Event
from .._staging.shared_memory import SharedBuffer, aligned
from ..errors import ReadError, StagingError
from .read_planner import ReadOperation
from .targets import ReadTarget


class PinnedPools:
    """The slots of a load, which may consist of many reads: a planner may want one tensor after the other.

    To register memory takes longer than to read as much. So what a read has used is kept for the next ones.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kept: PinnedPool | None = None
        self._lock = free_in_child(threading.Lock())  # an exchange reads beside the load

    def __enter__(self) -> PinnedPools:
        return self

    def __exit__(self, *error: object) -> None:
        self._keep(None)

    def takes(self, targets: Iterable[ReadTarget]) -> bool:
        """Returns whether any target is on a device."""
        return any(self._device.index_of(target.tensor) is not None for target in targets)

    @contextmanager
    def pool_for(self, operations: Sequence[ReadOperation], threads: int) -> Iterator[PinnedPool | None]:
        """The slots for a read: one and a half for each thread; None if nothing goes to a device.

        All copies have arrived when the block ends.
        """
        indices: set[int] = set()
        nbytes = 0
        for operation in operations:
            of_operation = {self._device.index_of(target.tensor) for target in operation.targets} - {None}
            if of_operation:
                indices |= of_operation  # type: ignore[arg-type]
                nbytes = max(nbytes, sum(aligned(segment.scratch_bytes) for segment in operation.segments))
        if not indices:
            yield None
            return
        readers = min(threads, len(operations))
        pool = self._take(indices, readers + -(-readers // 2), nbytes)
        try:
            yield pool
            pool.settle()
        except BaseException:
            pool.close()
            raise
        self._keep(pool)

    def _take(self, indices: Collection[int], count: int, nbytes: int) -> PinnedPool:
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None:
            if kept.is_enough(indices, count, nbytes):
                kept.follow()
                return kept
            kept.close()
            # Enough for all that was asked for so far. What grows a little with each tensor grows by much: so seldom.
            indices, count = {*indices, *kept.streams}, max(count, kept.count)
            nbytes = kept.nbytes if nbytes <= kept.nbytes else max(nbytes, 2 * kept.nbytes)
        return PinnedPool(self._device, indices, count, nbytes)

    def _keep(self, pool: PinnedPool | None) -> None:
        with self._lock:
            before, self._kept = self._kept, pool
        if before is not None:
            before.close()


class Slot:
    """One slot's memory, and the copies that are queued from it."""

    def __init__(self, memory: torch.Tensor, pool: PinnedPool) -> None:
        self.memory = memory
        self.pool = pool
        self._copied_to: set[int] = set()

    def send(self, data: memoryview | torch.Tensor, target: ReadTarget) -> torch.Tensor:
        """Queues a copy of bytes of this slot to the device of a target; they are there for this slot's copies."""
        index = self.pool.device.index_of(target.tensor)
        assert index is not None
        self._copied_to.add(index)
        content = data if isinstance(data, torch.Tensor) else torch.frombuffer(data, dtype=torch.uint8)
        stream = self.pool.streams[index]
        sent = stream.allocate(content.numel())
        stream.copy([sent], [content])
        return sent

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy from this slot to a device; elements are converted to the target's dtype there."""
        index = self.pool.device.index_of(target)
        assert index is not None
        self._copied_to.add(index)
        self.pool.streams[index].copy([target], [source])

    def copies(self) -> list[Event]:
        """Events that are over when the slot's memory is free again."""
        return [self.pool.streams[index].mark() for index in self._copied_to]


class PinnedPool:
    """Pinned slots for loads to one or more devices.

    Raises:
        ReadError: there is no memory for the slots.
    """

    def __init__(self, device: Device, indices: Collection[int], count: int, nbytes: int) -> None:
        self.device, self.count, self.nbytes = device, count, nbytes
        self.streams = {index: device.side_streams[index] for index in sorted(indices)}
        self.follow()
        try:
            self._buffer = SharedBuffer(count * aligned(nbytes))
        except StagingError as error:
            raise ReadError(f"no memory for reads on their way to a GPU: {error}") from error
        self._buffer.pin(device, next(iter(self.streams)))
        self._slots: queue.SimpleQueue[tuple[torch.Tensor, list[Event]]] = queue.SimpleQueue()
        for _ in range(count):
            self._slots.put((self._buffer.allocate(torch.uint8, (aligned(nbytes),)), []))

    def is_enough(self, indices: Collection[int], count: int, nbytes: int) -> bool:
        """Returns whether a read can use it that would have so many slots of its own."""
        return self.streams.keys() >= set(indices) and self.count >= count and self.nbytes >= nbytes

    def follow(self) -> None:
        """Copies come after what the devices' current streams have queued by now."""
        for stream in self.streams.values():
            stream.follow()

    def is_for(self, target: ReadTarget) -> bool:
        """Returns whether a target is on a device."""
        return self.device.index_of(target.tensor) is not None

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        """The slot that was returned first; its copies have arrived."""
        memory, copies = self._slots.get()
        slot = Slot(memory, self)
        try:
            for copy in copies:
                copy.synchronize()
            yield slot
        finally:
            self._slots.put((memory, slot.copies()))

    def settle(self) -> None:
        """Returns when everything has arrived."""
        for stream in self.streams.values():
            stream.mark().synchronize()

    def close(self) -> None:
        """Returns when everything has arrived, and gives the memory back."""
        try:
            self.settle()
        finally:
            self._slots = queue.SimpleQueue()
            self._buffer.close()
