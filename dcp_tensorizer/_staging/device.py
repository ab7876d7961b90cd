"""GPUs: streams beside training's, events on them, pinned host memory. Only this module calls ``torch.cuda``.

Every call names its device: a new thread begins on device 0, and whatever runs there by mistake makes a context on
another rank's GPU. Nothing here starts CUDA in a process that does not use it: only tensors on a GPU lead here.
"""

from __future__ import annotations

import abc
import functools
import logging
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import torch

from .._runtime.forks import free_in_child
from .._runtime.torch_compat import copy_all, is_plain
from ..errors import StagingError

logger = logging.getLogger("dcp_tensorizer")

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of this process

PIN_BYTES = 1 << 30
"""Of one registration. One call for hundreds of GiB fails on current drivers, Linux 6.11 to 6.13 refuse 2 GiB and more,
and the driver keeps its locks, which other processes' calls wait for, as long as a call lasts."""

PIECE_BYTES = 32 << 20
"""Of one copy over the bus. What training sends over it meanwhile, as for ``.item()``, waits for one piece, and not for
a whole tensor. A piece takes a millisecond, some hundred times as long as it takes to queue it."""

LANES = 4
"""Streams that large copies are queued on in turn. Whoever queues waits where some 1,000 operations are pending on one
stream."""


class Event(Protocol):
    """A moment in a stream."""

    def synchronize(self) -> None:
        """Returns when the stream has reached it."""

    def wait(self) -> None:
        """Makes the calling thread's current stream wait for it; returns at once."""


class SideStream(abc.ABC):
    """A queue of copies on one device, beside training's."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    @abc.abstractmethod
    def follow(self) -> None:
        """Makes what is queued here from now on wait for everything in the calling thread's current stream."""

    @abc.abstractmethod
    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Queues copies to the device, from it, or on it. Host memory should be pinned, and must not change then."""

    def spread(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Queues copies that need not come one after the other, nor before or after those of `copy`."""
        self.copy(targets, sources)

    def buffer(self, most: int, least: int) -> torch.Tensor:
        """Memory on the device for copies of this stream only.

        It is kept from the first call on: a save must not fail later because training has taken the rest.

        Args:
            most: Bytes that are of use.
            least: Bytes that are needed. Where the device has no more, it is half of ``most``, and so on down to this.

        Raises:
            torch.OutOfMemoryError: the device has less.
        """
        while self._buffer is None:
            try:
                self._buffer = self.allocate(most)
            except torch.OutOfMemoryError:
                if most <= least:
                    raise
                most = max(most // 2, least)
        return self._buffer

    @abc.abstractmethod
    def allocate(self, nbytes: int) -> torch.Tensor:
        """Uninitialised bytes on the device, for copies of this stream only."""

    @abc.abstractmethod
    def mark(self) -> Event:
        """The moment when everything that is queued here by now is done."""

    @abc.abstractmethod
    def current(self) -> AbstractContextManager[None]:
        """Inside, this is the calling thread's current stream on its device."""


class Device(Protocol):
    """A kind of accelerator. Tests without one have a simulated one, which runs its queues when it is told to."""

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """The number of the device that a tensor is on; None for host memory."""

    side_streams: SideStreams
    """Of this process, for all its savers and loads."""

    def new_stream(self, index: int) -> SideStream:
        """A new stream on a device."""

    def pin(self, address: int, nbytes: int, index: int) -> Callable[[], None]:
        """Registers host memory for copies at full speed.

        Returns:
            What undoes it, to be called while the memory is still mapped.

        Raises:
            StagingError: it is refused; says why that may be.
        """


class SideStreams(dict[int, SideStream]):
    """One stream on each device, made when it is first asked for, and then kept.

    torch gives memory that one stream has used to the same stream only, and hands out 32 streams in turn: with a new
    stream for each save or writer, 32 of them would keep memory.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __missing__(self, index: int) -> SideStream:
        return self.setdefault(index, self.device.new_stream(index))

    def follow(self, tensors: Iterable[torch.Tensor]) -> list[SideStream]:
        """Makes copies from these, queued from now on, wait for all that the calling thread has queued by now.

        Returns:
            The streams of their devices.
        """
        indices = {self.device.index_of(tensor) for tensor in tensors}
        streams = [self[index] for index in indices if index is not None]
        for stream in streams:
            stream.follow()
        return streams

    def settle(self, tensors: Iterable[torch.Tensor]) -> None:
        """Returns when all is done that the calling thread has queued on the devices of these by now.

        Other threads may read them then. Each thread has a current stream of its own, which does not wait for this
        one's.
        """
        for stream in self.follow(tensors):
            stream.mark().synchronize()


def pieces_of(address: int, nbytes: int, borders: Sequence[int], most: int = PIECE_BYTES) -> list[tuple[int, int]]:
    """Cuts host memory into pieces that one copy each can take.

    Args:
        address: Of its first byte.
        nbytes: Of all of it.
        borders: The addresses at which registrations begin, in order: no copy may reach over one.
        most: Bytes of a piece.

    Returns:
        The first byte of each piece, and the one after its last, counted from the address.
    """
    inside = borders[bisect_right(borders, address) : bisect_left(borders, address + nbytes)]
    ends = [*(border - address for border in inside), nbytes]
    return [
        (first, min(first + most, end))
        for start, end in zip([0, *ends], ends, strict=False)
        for first in range(start, end, most)
    ]


class _CudaStream(SideStream):
    """Streams of CUDA: those that large copies are spread over, of which the first is the queue of all others.

    Args:
        index: Of the GPU.
        borders: Gives the addresses at which registrations of host memory begin.
    """

    def __init__(self, index: int, borders: Callable[[], Sequence[int]]) -> None:
        super().__init__()
        self._index = index
        self._borders = borders
        self._lanes = [torch.cuda.Stream(device=index) for _ in range(LANES)]

    def follow(self) -> None:
        queued = torch.cuda.Event()
        with torch.cuda.device(self._index):
            queued.record(torch.cuda.current_stream(self._index))
        for lane in self._lanes:
            lane.wait_event(queued)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        pairs = [piece for pair in zip(targets, sources, strict=True) for piece in self._pieces(*pair)]
        with self.current():
            _queue(pairs)

    def spread(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        pairs = [piece for pair in zip(targets, sources, strict=True) for piece in self._pieces(*pair)]
        for number, lane in enumerate(self._lanes[: len(pairs)]):
            with torch.cuda.device(self._index), torch.cuda.stream(lane):
                _queue(pairs[number::LANES])

    def _pieces(self, target: torch.Tensor, source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if target.is_cuda == source.is_cuda:
            return [(target, source)]
        host = source if target.is_cuda else target
        cuts = pieces_of(host.data_ptr(), _span(host), self._borders())
        if len(cuts) == 1:
            return [(target, source)]
        if target.dtype == source.dtype and is_plain(target) and is_plain(source):
            into, out = _bytes(target), _bytes(source)
            return [(into[start:stop], out[start:stop]) for start, stop in cuts]
        if host is source:  # elements are converted or moved on the device: they come in one copy, of ordinary memory
            return [(target, source.clone())]
        raise AssertionError("what is staged is contiguous, and copied as it is")

    def allocate(self, nbytes: int) -> torch.Tensor:
        with self.current():
            return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", self._index))

    def mark(self) -> _CudaEvent:
        # A thread that waits for it must not spin on a core that training needs.
        event = torch.cuda.Event(blocking=True)
        first, *others = self._lanes
        with torch.cuda.device(self._index):
            for lane in others:
                done = torch.cuda.Event()
                done.record(lane)
                first.wait_event(done)
            event.record(first)
        return _CudaEvent(event, self._index)

    @contextmanager
    def current(self) -> Iterator[None]:
        # The device comes first: a stream's context, when it is left, sets the device that was current before it.
        with torch.cuda.device(self._index), torch.cuda.stream(self._lanes[0]):
            yield


def _queue(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Queues copies on the current stream."""
    with torch.no_grad():
        if len(pairs) == 1:  # unlike the other, it takes every dtype, and lazy views without a temporary copy
            pairs[0][0].copy_(pairs[0][1], non_blocking=True)
        elif pairs:
            copy_all(*map(list, zip(*pairs, strict=True)), non_blocking=True)


def _span(tensor: torch.Tensor) -> int:
    """The bytes from a tensor's first element to its last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _bytes(plain: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes. Where it has one element, that may have any stride, which no view takes."""
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event, index: int) -> None:
        self._event = event
        self._index = index

    def synchronize(self) -> None:
        with torch.cuda.device(self._index):
            self._event.synchronize()

    def wait(self) -> None:
        self._event.wait(torch.cuda.current_stream(self._index))


class Cuda:
    """GPUs, as torch gives them: NVIDIA's, or in its ROCm builds AMD's."""

    def __init__(self) -> None:
        self.side_streams = SideStreams(self)
        self._borders: tuple[int, ...] = ()  # replaced as a whole: copies read it without a lock
        self._registering = free_in_child(threading.Lock())

    def index_of(self, tensor: torch.Tensor) -> int | None:
        return tensor.device.index if tensor.is_cuda else None

    def new_stream(self, index: int) -> SideStream:
        return _CudaStream(index, lambda: self._borders)

    def pin(self, address: int, nbytes: int, index: int) -> Callable[[], None]:
        cudart: Any = torch.cuda.cudart()
        registered: list[int] = []

        def undo() -> None:
            # After a fault on the GPU every call fails. What has failed says so, and there is nothing left to undo.
            with suppress(RuntimeError), torch.cuda.device(index):
                while registered:
                    start = registered.pop()
                    self._know(gone=start)
                    if int(cudart.cudaHostUnregister(start)) != 0:
                        _forget_error(index)

        with torch.cuda.device(index):
            for start in range(address, address + nbytes, PIN_BYTES):
                status = cudart.cudaHostRegister(start, min(PIN_BYTES, address + nbytes - start), _PORTABLE)
                if int(status) != 0:
                    _forget_error(index)
                    undo()
                    raise StagingError(
                        f"the {nbytes:,} bytes of the staging buffer could not be pinned for GPU {index}: "
                        f"cudaHostRegister says {int(status)} ({_name_of(cudart, status)}) at byte "
                        f"{start - address:,}. Copies from the GPU will be several times slower. Reasons are: the "
                        f"machine or the container is short of memory that can be pinned, the virtual machine or the "
                        f"sandbox has a limit of its own, or the driver does not register memory of files."
                    )
                registered.append(start)
                self._know(new=start)
        return undo

    def _know(self, *, new: int | None = None, gone: int | None = None) -> None:
        """Notes where a registration begins, or that it is gone."""
        with self._registering:
            known = {*self._borders, *(() if new is None else (new,))} - {gone}
            self._borders = tuple(sorted(number for number in known if number is not None))


def _name_of(cudart: Any, status: Any) -> str:
    try:
        return str(cudart.cudaGetErrorString(status))
    except (AttributeError, TypeError, RuntimeError):
        return "no name"


def _forget_error(index: int) -> None:
    """CUDA reports a call's error again at the thread's next kernel, which torch would blame: so we run one here."""
    with suppress(RuntimeError):
        torch.zeros(1, device=torch.device("cuda", index))


CUDA = Cuda()


def expandable_segments() -> str | None:
    """The environment's setting that turns torch's expandable segments on, as it is there; None if there is none."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        value = os.environ.get(name, "")
        if any(part.replace(" ", "").lower() == "expandable_segments:true" for part in value.split(",")):
            return f"{name}={value}"
    return None


def settle_other_devices(tensors: Iterable[torch.Tensor]) -> None:
    """Waits for what the calling thread has queued on devices that have no side streams here: XPU, MPS and the like.

    Their tensors are copied as host tensors are, by torch itself, by threads with streams of their own.
    """
    if not _has_other_accelerator():
        return
    for device in {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "cuda", "meta")}:
        _say_plain_copies(device.type)
        module = torch.get_device_module(device)
        if hasattr(module, "current_stream"):
            module.current_stream(device).synchronize()
        else:
            module.synchronize()


@functools.cache
def _has_other_accelerator() -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type != "cuda"


@functools.cache  # once for each kind of device
def _say_plain_copies(kind: str) -> None:
    logger.info("tensors on %s are staged by plain copies: streams beside training's are for CUDA and ROCm", kind)
