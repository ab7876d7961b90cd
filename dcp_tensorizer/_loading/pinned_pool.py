"""Pinned memory for what is read on its way to a GPU: a few slots, used in turn while other reads go on.

With as much host memory as the model has, a model that only the GPUs can hold could not be loaded. So there are a few
slots, each of one read's size. A thread takes a slot, reads into it, checks it, queues its copies on a stream beside
training's, and gives the slot back. Whoever takes it next waits for those copies.
"""

from __future__ import annotations

import queue
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from .._memory.device import Device, Event
from .._memory.shared_buffer import SharedBuffer, aligned
from ..errors import ReadError, StagingError
from .read_planner import ReadOperation
from .read_target import ReadTarget

__all__ = ["PinnedPool", "Slot", "pool_for"]


def pool_for(operations: Sequence[ReadOperation], threads: int, device: Device) -> PinnedPool | None:
    """The slots for a load: one and a half for each thread that reads; None if nothing goes to a device."""
    indices: set[int] = set()
    nbytes = 0
    for operation in operations:
        of_operation = {device.index_of(target.tensor) for target in operation.targets} - {None}
        if of_operation:
            indices |= of_operation  # type: ignore[arg-type]
            nbytes = max(nbytes, sum(aligned(segment.scratch_bytes) for segment in operation.segments))
    if not indices:
        return None
    readers = min(threads, len(operations))
    return PinnedPool(device, indices, readers + -(-readers // 2), nbytes)


class Slot:
    """One slot's memory, and the copies that are queued from it."""

    def __init__(self, memory: torch.Tensor, pool: PinnedPool) -> None:
        self.memory = memory
        self.pool = pool
        self._copied_to: set[int] = set()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy from this slot to a device; elements are converted to the target's dtype there."""
        index = self.pool.device.index_of(target)
        assert index is not None
        self._copied_to.add(index)
        self.pool.streams[index].copy([target], [source])

    def copies(self) -> list[Event]:
        """When they have arrived, the slot's memory is free again."""
        return [self.pool.streams[index].mark() for index in self._copied_to]


class PinnedPool:
    """Pinned slots for loads to one or more devices.

    Args:
        device: The kind of device.
        indices: Which devices. Copies to them come after what their current streams have queued by now.
        count: How many slots.
        nbytes: Bytes of each slot.

    Raises:
        ReadError: there is no memory for the slots.
    """

    def __init__(self, device: Device, indices: Collection[int], count: int, nbytes: int) -> None:
        self.device = device
        self.streams = {index: device.side_streams[index] for index in sorted(indices)}
        for stream in self.streams.values():
            stream.follow()
        try:
            self._buffer = SharedBuffer(count * aligned(nbytes))
        except StagingError as error:
            raise ReadError(f"no memory for reads on their way to a GPU: {error}") from error
        self._buffer.pin(device, next(iter(self.streams)))
        self._slots: queue.SimpleQueue[tuple[torch.Tensor, list[Event]]] = queue.SimpleQueue()
        for _ in range(count):
            self._slots.put((self._buffer.allocate(torch.uint8, (aligned(nbytes),)), []))

    def is_for(self, target: ReadTarget) -> bool:
        """Whether a target is on a device."""
        return self.device.index_of(target.tensor) is not None

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        """The slot that was given back first; its copies have arrived."""
        memory, copies = self._slots.get()
        slot = Slot(memory, self)
        try:
            for copy in copies:
                copy.synchronize()
            yield slot
        finally:
            self._slots.put((memory, slot.copies()))

    def close(self) -> None:
        """Returns when everything has arrived, and gives the memory back."""
        try:
            for stream in self.streams.values():
                stream.mark().synchronize()
        finally:
            self._slots = queue.SimpleQueue()
            self._buffer.close()
