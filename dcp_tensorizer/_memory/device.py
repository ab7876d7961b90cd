"""GPUs: streams beside training's, events on them, pinned host memory. Only this module calls ``torch.cuda``.

Every call names its device: a new thread begins on device 0, and whatever runs there by mistake makes a context on
another rank's GPU. Nothing here starts CUDA in a process that does not use it: only tensors on a GPU lead here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import torch

from .._torch_compat import copy_all
from ..errors import StagingError

__all__ = ["CUDA", "Device", "Event", "SideStream", "SideStreams"]

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of this process


class Event(Protocol):
    """A moment in a stream."""

    def synchronize(self) -> None:
        """Returns when the stream has reached it."""

    def wait(self) -> None:
        """Has the calling thread's current stream wait for it; returns at once."""


class SideStream(Protocol):
    """A queue of copies on one device, beside training's."""

    def follow(self) -> None:
        """Has what is queued here from now on wait for everything in the calling thread's current stream."""

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Queues copies to the device, from it, or on it. Host memory should be pinned, and must not change then."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Uninitialised bytes on the device, for copies of this stream only."""

    def mark(self) -> Event:
        """The moment when everything that is queued here by now is done."""

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
            StagingError: it is refused; says which limit to raise.
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
        """Has copies from these, queued from now on, wait for all that the calling thread has queued by now.

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


class _CudaStream:
    def __init__(self, index: int) -> None:
        self._index = index
        self._stream = torch.cuda.Stream(device=index)

    def follow(self) -> None:
        queued = torch.cuda.Event()
        with torch.cuda.device(self._index):
            queued.record(torch.cuda.current_stream(self._index))
        self._stream.wait_event(queued)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        with self.current(), torch.no_grad():
            if len(targets) == 1:  # unlike the other, it takes every dtype, and lazy views without a temporary copy
                targets[0].copy_(sources[0], non_blocking=True)
            else:
                copy_all(targets, sources, non_blocking=True)

    def buffer(self, nbytes: int) -> torch.Tensor:
        with self.current():
            return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", self._index))

    def mark(self) -> _CudaEvent:
        event = torch.cuda.Event(
            blocking=True
        )  # a thread that waits for it must not spin on a core that training needs
        with torch.cuda.device(self._index):
            event.record(self._stream)
        return _CudaEvent(event, self._index)

    @contextmanager
    def current(self) -> Iterator[None]:
        # The device comes first: a stream's context, when it is left, sets the device that was current before it.
        with torch.cuda.device(self._index), torch.cuda.stream(self._stream):
            yield


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

    def index_of(self, tensor: torch.Tensor) -> int | None:
        return tensor.device.index if tensor.is_cuda else None

    def new_stream(self, index: int) -> SideStream:
        return _CudaStream(index)

    def pin(self, address: int, nbytes: int, index: int) -> Callable[[], None]:
        cudart: Any = torch.cuda.cudart()
        with torch.cuda.device(index):
            status = cudart.cudaHostRegister(address, nbytes, _PORTABLE)
            if int(status) != 0:
                _forget_error(index)
                raise StagingError(
                    f"{nbytes:,} bytes of the staging buffer could not be pinned for GPU {index} (cudaHostRegister: "
                    f"error {int(status)}); copies from the GPU will be several times slower. Raise the limit of "
                    f"locked memory (ulimit -l, LimitMEMLOCK= of a service, --ulimit memlock=-1 of a container), or "
                    f"free memory."
                )

        def undo() -> None:
            # After a fault on the GPU every call fails. What has failed says so, and here is nothing left to undo.
            with suppress(RuntimeError), torch.cuda.device(index):
                if int(cudart.cudaHostUnregister(address)) != 0:
                    _forget_error(index)

        return undo


def _forget_error(index: int) -> None:
    """CUDA reports a call's error again at the thread's next kernel, which torch would blame: so we run one here."""
    with suppress(RuntimeError):
        torch.zeros(1, device=torch.device("cuda", index))


CUDA = Cuda()
