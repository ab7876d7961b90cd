"""GPUs: side streams, events on them, pinned host memory. Only this module calls ``torch.cuda``; see also `driver`.

Each call that may create a CUDA context states its device explicitly. The current device of a new thread is device 0,
so a call in that thread that names no device would create a context on device 0, which may be another rank's GPU. This
module never initialises CUDA: it makes streams and events only for tensors that are already on a GPU.
"""

from __future__ import annotations

import abc
import functools
import logging
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch

from .._runtime.forks import free_in_child
from .._runtime.torch_compat import allocator_settings, copy_all
from ..errors import StagingError
from .driver import Batch, batch_of, copier, new_stream, pieces_of

logger = logging.getLogger("dcp_tensorizer")

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of this process

PIN_BYTES = 1 << 30
"""Maximum bytes of one registration. Current drivers fail on hundreds of GiB in one call, and Linux 6.11 to 6.13 refuse
2 GiB or more. During a call the driver also holds locks, which block calls from other processes."""

PIECE_BYTES = 32 << 20
"""Maximum bytes of one copy over the bus. Training's own transfers, such as those of ``.item()``, wait for one piece,
not for a whole tensor. Copying a piece takes a millisecond, about a hundred times as long as queueing it."""

LANES = 4
"""The number of streams on which large copies are queued round-robin if the driver takes no batches. Queueing
blocks when about 1,000 operations are pending on a stream."""


class Event:
    def __init__(self, event: torch.cuda.Event, index: int) -> None:
        self._event = event
        self._index = index

    def synchronize(self) -> None:
        with torch.cuda.device(self._index):
            self._event.synchronize()

    def wait(self) -> None:
        """Makes the calling thread's current stream wait for the event; does not block the thread."""
        self._event.wait(torch.cuda.current_stream(self._index))


class SideStream(abc.ABC):
    """A stream for copies on one device, beside the streams of training.

    Attributes:
        has_batches: Whether `copy_batch` takes batches.
    """

    has_batches = False

    def __init__(self) -> None:
        self._idle: deque[torch.Tensor] = deque(maxlen=1)

    @abc.abstractmethod
    def follow(self) -> None:
        """Orders later copies after the work that is queued so far on the calling thread's current stream."""

    @abc.abstractmethod
    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Queues copies to, from or on the device.

        Host memory should be pinned. Until the copies are complete, the caller must not change it, and must not read
        targets in it. For copies over the bus, source and target must be contiguous and of one dtype: otherwise torch
        would allocate device memory for each copy.
        """

    def spread(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Queues copies that may run in any order, also relative to those of `copy`."""
        self.copy(targets, sources)

    @abc.abstractmethod
    def batch(self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> Batch:
        """Prepares copies of bytes from addresses on the device to addresses of host memory, which should be pinned."""

    @abc.abstractmethod
    def copy_batch(self, batch: Batch) -> bool:
        """Queues the copies of a batch, which may run in any order. Returns whether the driver accepts them all.

        If the driver refuses a copy, clears `has_batches`.
        """

    @contextmanager
    def buffer(self, most: int, least: int) -> Iterator[torch.Tensor]:
        """Yields exclusive device memory, for copies queued in order on this stream.

        The memory is retained for later calls, so that no later save fails because training has allocated all other
        memory. A concurrent staging on another thread gets other memory. If ``most`` bytes cannot be allocated, tries
        half as many, and so on down to ``least``. Raises `torch.OutOfMemoryError` if ``least`` bytes cannot be
        allocated.
        """
        buffer: torch.Tensor | None = None
        with suppress(IndexError):
            buffer = self._idle.pop()  # a single call is atomic: no two callers get the same buffer
        while buffer is None:
            try:
                buffer = self.allocate(most)
            except torch.OutOfMemoryError:
                if most <= least:
                    raise
                most = max(most // 2, least)
        try:
            yield buffer
        finally:
            self._idle.append(buffer)  # the next caller's copies come later in the stream

    @abc.abstractmethod
    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocates uninitialised bytes on the device, for copies of this stream only."""

    @abc.abstractmethod
    def mark(self) -> Event:
        """Records an event after everything queued so far."""

    @abc.abstractmethod
    def current(self) -> AbstractContextManager[None]:
        """Returns a context manager under which this is the calling thread's current stream on the stream's device."""


class SideStreams(dict[int, SideStream]):
    """One stream per device, made on first use and never freed.

    torch gives memory that was allocated for a stream only to that stream again, even after the stream was freed.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __missing__(self, index: int) -> SideStream:
        return self.setdefault(index, self.device.new_stream(index))

    def follow(self, tensors: Iterable[torch.Tensor]) -> list[SideStream]:
        """Orders new copies from these tensors after everything on the calling thread's current streams.

        Returns the side streams of the tensors' devices.
        """
        indices = {self.device.index_of(tensor) for tensor in tensors}
        streams = [self[index] for index in indices if index is not None]
        for stream in streams:
            stream.follow()
        return streams

    def synchronize(self, tensors: Iterable[torch.Tensor]) -> None:
        """Waits for everything on the calling thread's current streams of these tensors' devices.

        Call it before other threads read the tensors: their current streams do not wait for the calling thread's.
        """
        for stream in self.follow(tensors):
            stream.mark().synchronize()


def pin_if_possible(device: Device, address: int, nbytes: int, index: int) -> Callable[[], None]:
    """Registers host memory as `Device.pin` does.

    If the system refuses, issues a `RuntimeWarning`: copies are then slower, but correct.
    """
    try:
        return device.pin(address, nbytes, index)
    except StagingError as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=3)
        return lambda: None


class _CudaStream(SideStream):
    """CUDA streams over which `spread` distributes copies; a single stream if the driver takes batches. All other
    copies are queued on the first stream.

    The streams come from torch's pool of 32 only if the driver cannot make others: NCCL, graph captures and FSDP use
    streams of that pool, and would wait for gigabytes of copies. ``borders`` returns the addresses at which
    registrations of host memory begin.
    """

    def __init__(self, index: int, borders: Callable[[], Sequence[int]]) -> None:
        super().__init__()
        self._index = index
        self._borders = borders
        self._copier = copier()
        self.has_batches = self._copier is not None
        self._followed = torch.cuda.current_stream(index)
        with torch.cuda.device(index):
            torch.cuda.Event().record(self._followed)  # makes the device's context current, for `new_stream`
            handles = [new_stream() for _ in range(1 if self.has_batches else LANES)]
        self._lanes = [
            torch.cuda.Stream(device=index) if handle is None else torch.cuda.ExternalStream(handle, device=index)
            for handle in handles
        ]
        self._is_spread = False  # whether copies have been queued on lanes other than the first

    def follow(self) -> None:
        with torch.cuda.device(self._index):
            self._followed = torch.cuda.current_stream(self._index)
            self._wait_for(self._followed)

    def _wait_for(self, stream: torch.cuda.Stream) -> None:
        queued = torch.cuda.Event()
        queued.record(stream)
        for lane in self._lanes:
            lane.wait_event(queued)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        if not (targets[0].is_cuda and sources[0].is_cuda):
            targets, sources = zip(*self._cut(targets, sources), strict=True)
        with self.current():
            _queue(targets, sources)

    def spread(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        pairs = self._cut(targets, sources)
        self._is_spread = True
        for number, lane in enumerate(self._lanes[: len(pairs)]):
            with torch.cuda.device(self._index), torch.cuda.stream(lane):
                _queue(*zip(*pairs[number::LANES], strict=True))

    def _cut(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Cuts pairs, in each of which one tensor is in host memory, into pieces for one copy each."""
        return [piece for pair in zip(targets, sources, strict=True) for piece in self._pieces(*pair)]

    def _pieces(self, target: torch.Tensor, source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        host = source if target.is_cuda else target
        cuts = pieces_of(host.data_ptr(), host.nbytes, self._borders(), PIECE_BYTES)
        if len(cuts) == 1:
            return [(target, source)]
        into, out = _bytes(target), _bytes(source)
        return [(into[start:stop], out[start:stop]) for start, stop in cuts]

    def batch(self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> Batch:
        return batch_of(targets, sources, sizes, self._borders(), PIECE_BYTES)

    def copy_batch(self, batch: Batch) -> bool:
        if not self.has_batches or self._copier is None:
            return False
        with torch.cuda.device(self._index):
            torch.cuda.Event().record(self._lanes[0])  # makes the device's context current in this thread
            status = self._copier(batch, self._lanes[0].cuda_stream)
        if status:
            self.has_batches = False
            logger.warning(
                "GPU %d: the driver refuses batches of copies (error %d). Copies are slower now.", self._index, status
            )
        return not status

    def allocate(self, nbytes: int) -> torch.Tensor:
        device, followed = torch.device("cuda", self._index), self._followed
        with self.current():
            try:
                return torch.empty(nbytes, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError:
                # Memory that training has freed is reused only on training's stream. There may be no other free memory.
                with torch.cuda.stream(followed):
                    memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
                self._wait_for(followed)  # kernels queued on that stream may still use the memory
                memory.record_stream(self._lanes[0])
                return memory

    def mark(self) -> Event:
        # Blocking: a thread that waits for the event must not spin on a core that training needs.
        event = torch.cuda.Event(blocking=True)
        first, *others = self._lanes
        with torch.cuda.device(self._index):
            for lane in others if self._is_spread else ():  # a load does not use `spread`
                done = torch.cuda.Event()
                done.record(lane)
                first.wait_event(done)
            event.record(first)
        return Event(event, self._index)

    @contextmanager
    def current(self) -> Iterator[None]:
        # The device context must be the outer one: the stream's context restores the device that was current before.
        with torch.cuda.device(self._index), torch.cuda.stream(self._lanes[0]):
            yield


def _queue(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        if len(targets) == 1:  # unlike `copy_all`, `copy_` takes every dtype, and makes no temporary copy of lazy views
            targets[0].copy_(sources[0], non_blocking=True)
        else:
            copy_all(targets, sources, non_blocking=True)


def _bytes(plain: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor's bytes. `view` alone fails on the arbitrary stride of a dimension of size 1."""
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


class Device:
    """GPUs, as torch exposes them: NVIDIA's, or in its ROCm builds AMD's.

    Tests on machines without a GPU use a simulated device, which runs its queues on demand.

    Attributes:
        side_streams: The side streams of this process, shared by all saves and loads.
    """

    def __init__(self) -> None:
        self.side_streams = SideStreams(self)
        self._borders: tuple[int, ...] = ()  # replaced as a whole, because copies read it without a lock
        self._registering = free_in_child(threading.Lock())

    def index_of(self, tensor: torch.Tensor) -> int | None:
        return tensor.device.index if tensor.is_cuda else None

    @property
    def is_capturing(self) -> bool:
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def new_stream(self, index: int) -> SideStream:
        return _CudaStream(index, lambda: self._borders)

    def pin(self, address: int, nbytes: int, index: int) -> Callable[[], None]:
        """Registers host memory for copies at full speed. Returns the function to call before the memory is unmapped.

        Raises `StagingError`, with possible reasons, if the system refuses.
        """
        cudart: Any = torch.cuda.cudart()
        registered: list[int] = []

        def undo() -> None:
            # After a fault on the GPU every call fails. The program gets that error from its own calls.
            with suppress(RuntimeError), torch.cuda.device(index):
                while registered:
                    start = registered.pop()
                    self._record(gone=start)
                    if int(cudart.cudaHostUnregister(start)) != 0:
                        _clear_error(index)

        with torch.cuda.device(index):
            for start in range(address, address + nbytes, PIN_BYTES):
                status = cudart.cudaHostRegister(start, min(PIN_BYTES, address + nbytes - start), _PORTABLE)
                if int(status) != 0:
                    _clear_error(index)
                    undo()
                    raise StagingError(
                        f"{nbytes:,} bytes of host memory could not be pinned for GPU {index}: cudaHostRegister "
                        f"returned {int(status)} ({_name_of(cudart, status)}) at byte {start - address:,}. Copies from "
                        f"and to the GPU will be several times slower. Possible reasons: the machine or the container "
                        f"is short of memory that can be pinned, the virtual machine or the sandbox has its own limit, "
                        f"or the driver does not register memory that is mapped from a file."
                    )
                registered.append(start)
                self._record(new=start)
        return undo

    def _record(self, *, new: int | None = None, gone: int | None = None) -> None:
        with self._registering:
            known = {*self._borders, *(() if new is None else (new,))} - {gone}
            self._borders = tuple(sorted(number for number in known if number is not None))


def _name_of(cudart: Any, status: Any) -> str:
    try:
        return str(cudart.cudaGetErrorString(status))
    except (AttributeError, TypeError, RuntimeError):
        return "no name"


def _clear_error(index: int) -> None:
    """Clears the error of a call: otherwise CUDA would report it again at the thread's next kernel launch."""
    with suppress(RuntimeError):
        torch.zeros(1, device=torch.device("cuda", index))


CUDA = Device()


def expandable_segments() -> str | None:
    """Returns the setting that enables torch's expandable segments, in the environment or at run time; None if no
    setting does.
    """

    def turn_on(value: str) -> bool:
        return any(part.replace(" ", "").lower() == "expandable_segments:true" for part in value.split(","))

    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        if turn_on(value := os.environ.get(name, "")):
            return f"{name}={value}"
    # Checked last: torch caches the variables' values at the first query.
    return f"{value}, set at run time" if turn_on(value := allocator_settings()) else None


def synchronize_other_devices(tensors: Iterable[torch.Tensor]) -> None:
    """Waits for the calling thread's current stream on each of these tensors' devices that has no side stream.

    Such devices are XPU and MPS, for example. Tensors on them are copied like host tensors, possibly by threads that
    have other current streams.
    """
    if not _has_other_accelerator():
        return
    for device in {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "cuda", "meta")}:
        _log_plain_copies(device.type)
        module = torch.get_device_module(device)
        if hasattr(module, "current_stream"):
            module.current_stream(device).synchronize()
        else:
            module.synchronize()


@functools.cache
def _has_other_accelerator() -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type != "cuda"


@functools.cache
def _log_plain_copies(kind: str) -> None:
    logger.info("tensors on %s are staged by blocking copies: side streams need CUDA or ROCm", kind)
