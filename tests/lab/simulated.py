"""A simulated accelerator, for tests of the order of queues and events, and of the lifetime of registered memory.

Its tensors are host tensors that a test declares to be on it. Streams are queues. Their work runs only when the test
runs the device, or, if the device is `free_running`, when a thread waits for one of its events. It has no speed, no
memory and no CUDA: tests/gpu tests those.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from dcp_tensorizer._staging.device import PIECE_BYTES, SideStream, SideStreams
from dcp_tensorizer._staging.driver import Batch, batch_of, pieces_of

WAIT = 300.0


class SimulatedEvent:
    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.done = threading.Event()

    def synchronize(self) -> None:
        if self.device.free_running:
            self.device.run()
        assert self.done.wait(WAIT), "the test did not run the device"

    def wait(self) -> None:
        """Makes training wait: work that it queues from now on runs after this event."""
        self.device.training.append((self, lambda: None))


Work = tuple[SimulatedEvent | None, Callable[[], object]]
"""The event that must happen first, and the work that follows it."""


class SimulatedStream(SideStream):
    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self.device = device
        self.queue: list[Work] = []

    def follow(self) -> None:
        event = SimulatedEvent(self.device)
        self.device.training.append((None, event.done.set))
        self.queue.append((event, lambda: None))

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        targets, sources = list(targets), list(sources)
        assert len(targets) == len(sources)
        places = [(self.device.index_of(t), self.device.index_of(s)) for t, s in zip(targets, sources, strict=True)]
        if any(target != source for target, source in places):
            self.device.crossings.append(len(targets))
        for (target, source), t, s in zip(places, targets, sources, strict=True):
            if target != source:  # else torch would make a temporary tensor on the device
                assert t.is_contiguous() and s.is_contiguous() and not s.is_conj() and not s.is_neg()
                assert t.dtype == s.dtype
        self.queue.append((None, lambda: [self._copy(t, s) for t, s in zip(targets, sources, strict=True)]))
        self.device.on_copy()

    @property
    def has_batches(self) -> bool:  # type: ignore[override]
        return self.device.has_batches

    def batch(self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> Batch:
        return batch_of(targets, sources, sizes, self.device.borders, PIECE_BYTES)

    def copy_batch(self, batch: Batch) -> bool:
        """Copies memory at the addresses of a batch, one call after the other, each from its last copy to its first."""
        for start, stop in itertools.pairwise(batch.bounds):
            if not self.device.has_batches or len(self.device.batched) == self.device.most_batches:
                self.device.has_batches = False
                return False
            rows = list(zip(*(array[start:stop].tolist() for array in batch[:3]), strict=True))
            assert all(len(pieces_of(target, size, self.device.borders, PIECE_BYTES)) == 1 for target, _, size in rows)
            self.device.batched.append([size for _, _, size in rows])
            self.queue.append((None, lambda rows=rows: [ctypes.memmove(*row) for row in reversed(rows)]))
        self.device.on_copy()
        return True

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.inference_mode(target.is_inference()), torch.no_grad():  # a device gets a copy in its caller's mode
            target.copy_(source)

    def allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.device.memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.device.buffers.append(nbytes)
        return self.device.declare(torch.empty(nbytes, dtype=torch.uint8))

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    def mark(self) -> SimulatedEvent:
        event = SimulatedEvent(self.device)
        self.queue.append((None, event.done.set))
        return event


class SimulatedDevice:
    """One device, number 0.

    Attributes:
        training: The work that training has queued on its own stream.
        crossings: For each call that copied between host and device, the number of tensors.
        buffers: The sizes of the buffers that were allocated on the device.
        memory: The maximum size of a buffer.
        pinned: The registered host memory: address and length.
        most_pinned: The maximum number of bytes that were registered at the same time.
        has_batches: The driver takes batches of copies.
        batched: For each call with a batch, the sizes of its copies.
        most_batches: After so many batches the driver refuses further ones.
        borders: The addresses at which registrations begin, for batches.
        is_capturing: Training captures a graph.
        on_copy: Called when a copy has been queued on a side stream.
    """

    def __init__(self, *, free_running: bool = True, has_batches: bool = False) -> None:
        self.free_running = free_running
        self.has_batches = has_batches
        self.batched: list[list[int]] = []
        self.most_batches = sys.maxsize
        self.borders: list[int] = []
        self.is_capturing = False
        self.training: list[Work] = []
        self.streams: list[SimulatedStream] = []
        self.crossings: list[int] = []
        self.buffers: list[int] = []
        self.memory = 1 << 40
        self.pinned: list[tuple[int, int]] = []
        self.most_pinned = 0
        self.on_copy: Callable[[], object] = lambda: None
        self.side_streams = SideStreams(self)
        self._memory: dict[int, torch.Tensor] = {}  # by the address of its storage
        self._running = threading.Lock()

    def declare(self, tensor: torch.Tensor) -> torch.Tensor:
        """Declares a tensor, and all views of its storage, to be on this device."""
        self._memory[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def queue(self, work: Callable[[], object]) -> None:
        """Training queues a kernel."""
        self.training.append((None, work))

    def run(self, *, training_first: bool = True) -> None:
        """Runs all queued work, as far as events allow: each stream in turn as far as possible."""
        with self._running:
            progress = True
            while progress:
                progress = False
                queues = [self.training, *(stream.queue for stream in self.streams)]
                for queue in queues if training_first else reversed(queues):
                    while queue and (queue[0][0] is None or queue[0][0].done.is_set()):
                        queue[0][1]()
                        queue.pop(0)
                        progress = True

    def index_of(self, tensor: torch.Tensor) -> int | None:
        return 0 if tensor.untyped_storage().data_ptr() in self._memory else None

    def new_stream(self, index: int) -> SimulatedStream:
        assert index == 0
        self.streams.append(SimulatedStream(self))
        return self.streams[-1]

    def pin(self, address: int, nbytes: int, index: int) -> Callable[[], None]:
        assert index == 0
        self.pinned.append((address, nbytes))
        self.most_pinned = max(self.most_pinned, sum(length for _, length in self.pinned))
        return lambda: self.pinned.remove((address, nbytes))
