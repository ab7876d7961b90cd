"""Bytes on their way to a GPU: pinned slots that are read into and copied from in turn, while other reads go on.

A load that needs as much host memory as the model has could not load a model that fits the GPUs only. So a few slots
of one read's size go round: a thread takes a slot, reads into it, checks it, queues its copies on a stream beside
training's, and gives it back; whoever takes it next waits for those copies.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from .._memory.device import Device, Event
from .._memory.shared_buffer import SharedBuffer, aligned
from ..errors import ReadError, StagingError

__all__ = ["PinnedPool", "Slot"]


class Slot:
    """One slot's memory, and the copies that are queued from it."""

    def __init__(self, memory: torch.Tensor, ring: PinnedPool) -> None:
        self.memory = memory
        self.numbers = ring.numbers
        self._ring = ring
        self._used: set[int] = set()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy from this slot to a device; elements are converted to the target's dtype there."""
        index = self._ring.device.index_of(target)
        assert index is not None
        self._used.add(index)
        self._ring.streams[index].copy([target], [source])

    def marks(self) -> list[Event]:
        return [self._ring.streams[index].mark() for index in self._used]


class PinnedPool:
    """Pinned slots for loads to one or more devices.

    Args:
        device: The kind of device.
        landing: For each request, by number, whose target is on a device: which one. What the devices' current
            streams have queued comes before any copy.
        count: Of slots.
        nbytes: Of each.

    Raises:
        ReadError: there is no memory for the slots.
    """

    def __init__(self, device: Device, landing: Mapping[int, int], count: int, nbytes: int) -> None:
        self.device = device
        self.numbers = frozenset(landing)
        self.streams = {index: device.side_stream(index) for index in sorted(set(landing.values()))}
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

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        """A slot whose copies are done: the one that has been given back for longest."""
        memory, copies = self._slots.get()
        slot = Slot(memory, self)
        try:
            for copy in copies:
                copy.synchronize()
            yield slot
        finally:
            self._slots.put((memory, slot.marks()))

    def close(self) -> None:
        """Returns when everything has arrived, and gives the memory back."""
        try:
            for stream in self.streams.values():
                stream.mark().synchronize()
        finally:
            self._slots = queue.SimpleQueue()
            self._buffer.close()
