"""Copying a state dict's tensors into their twins, in few calls, with the cores and the streams that are free.

From a GPU, a large tensor is one copy over the bus. Whatever would need a temporary copy on the GPU (tensors that are
not contiguous, or lazily conjugated) and what is too small to be worth a copy of its own goes through one buffer there
of `GATHER_BYTES`, from which many leave in one copy: their twins lie side by side, see `order`.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from .._memory.device import Device, Event, SideStream, SideStreams
from .._memory.shared_buffer import aligned
from .._threads import in_background
from .._torch_compat import copy_all

__all__ = ["GATHER_BYTES", "Copies", "Pair", "copy_on_host", "order", "queue_on_device"]

Pair = tuple[torch.Tensor, torch.Tensor]
"""A twin, and the tensor whose elements it gets."""

GATHER_BYTES = 32 << 20
"""Memory that staging takes on each GPU, at most, while it copies."""

# A copy over the bus costs some 10 microseconds of this thread's time and 5 of the bus's, in which it moves 128 KiB.
# Views for the gathering cost less, and the gathering itself next to nothing.
_SMALL = 256 << 10
_BATCH = 1024  # tensors that are gathered in one call
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_COPY_PIECE = 32 << 20
_SHARED_COPY = 8 << 20  # below it, starting a thread costs more than it saves


class Copies:
    """Copies that are under way: begun by `start`, and waited for by any thread.

    Args:
        pairs: Twins and tensors.
        streams: That the copies from devices are queued on, after `SideStreams.follow`.
        threads: That copy on the host.
        elsewhere: Makes the copies from devices in another way, and returns when they are made; False if it cannot.
    """

    def __init__(
        self,
        pairs: Iterable[Pair],
        streams: SideStreams,
        threads: int,
        elsewhere: Callable[[Copies], bool] | None = None,
    ) -> None:
        self._threads = threads
        self._elsewhere = elsewhere
        self._host: list[Pair] = []
        self._on_device: dict[int, list[Pair]] = defaultdict(list)
        for twin, source in pairs:
            if source.numel():
                index = streams.device.index_of(source)
                (self._host if index is None else self._on_device[index]).append((twin, source))
        self.streams = {index: streams[index] for index in self._on_device}
        self._marks: list[Event] = []

    @property
    def on_device(self) -> list[Pair]:
        """What is on devices."""
        return [pair for pairs in self._on_device.values() for pair in pairs]

    def start(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Queues what is on devices, and copies what is not; ``meanwhile`` is called when copies are under way."""
        elsewhere = self._elsewhere if self._on_device else None
        if elsewhere is None:
            self._queue()
        meanwhile()
        if elsewhere is not None and not elsewhere(self):
            self._queue()
        copy_on_host(self._host, self._threads)

    def _queue(self) -> None:
        for index, stream in self.streams.items():
            try:
                queue_on_device(self._on_device[index], stream)
            finally:
                self._marks.append(stream.mark())

    def wait(self) -> None:
        """Returns when everything is copied."""
        for mark in self._marks:
            mark.synchronize()

    def hold(self) -> None:
        """Has the calling thread's current streams wait for the copies, without waiting itself."""
        for mark in self._marks:
            mark.wait()


def order(sources: Sequence[torch.Tensor], device: Device) -> list[int]:
    """The order in which twins are to be allocated: those that are gathered together come first.

    Which are those of one device and one element size.
    """

    def rank(number: int) -> tuple[int, int, int]:
        source = sources[number]
        index = device.index_of(source) if _is_small(source) else None
        return (1, 0, 0) if index is None else (0, index, source.itemsize)

    return sorted(range(len(sources)), key=rank)


def queue_on_device(pairs: Sequence[Pair], stream: SideStream) -> None:
    """Queues the copies of one device's tensors, in few calls.

    Twins are C-contiguous, on the host; those of small tensors of one element size that follow one another in memory
    are filled by one copy over the bus.
    """
    small = sorted((pair for pair in pairs if _is_small(pair[1])), key=lambda pair: pair[0].data_ptr())
    straight = [pair for pair in pairs if not _is_small(pair[1]) and _is_plain(pair[1])]
    bent = [pair for pair in pairs if not _is_small(pair[1]) and not _is_plain(pair[1])]
    if straight:
        stream.copy(*zip(*straight, strict=True))
    if small or bent:
        buffer = _buffer(stream)
        for batch in _batches(small, buffer.nbytes):
            _gather(batch, buffer, stream)
        for twin, source in bent:
            for part, piece in _pieces_within(twin, source, buffer.nbytes):
                gathered = buffer[: part.nbytes].view(part.dtype).view(part.shape)
                stream.copy([gathered], [piece])
                stream.copy([part], [gathered])


def _buffer(stream: SideStream) -> torch.Tensor:
    """As much of `GATHER_BYTES` as there is memory for."""
    nbytes = GATHER_BYTES
    while nbytes > _SMALL:
        try:
            return stream.buffer(nbytes)
        except torch.OutOfMemoryError:
            nbytes //= 2
    return stream.buffer(nbytes)


def _is_small(source: torch.Tensor) -> bool:
    return source.nbytes <= _SMALL


def _is_plain(source: torch.Tensor) -> bool:
    """Whether a tensor's memory is its values in C order."""
    return source.is_contiguous() and not source.is_conj() and not source.is_neg()


def _batches(pairs: Iterable[Pair], nbytes: int) -> Iterator[list[Pair]]:
    """Runs of twins that follow one another in memory, of one element size and ``nbytes`` bytes together at most."""
    batch: list[Pair] = []
    start = end = 0
    for twin, source in pairs:
        follows = batch and twin.data_ptr() == end and twin.itemsize == batch[0][0].itemsize
        if not follows or len(batch) == _BATCH or end + aligned(twin.nbytes) - start > nbytes:
            if batch:
                yield batch
            batch, start = [], twin.data_ptr()
        batch.append((twin, source))
        end = twin.data_ptr() + aligned(twin.nbytes)
    if batch:
        yield batch


def _gather(batch: Sequence[Pair], buffer: torch.Tensor, stream: SideStream) -> None:
    """Copies small tensors side by side on the device, and from there to their twins all at once.

    As integers: there is a fused kernel for those, and none for some of the rarer dtypes.
    """
    unit = _INTEGER.get(batch[0][0].itemsize, torch.int64)
    total = sum(aligned(twin.nbytes) for twin, _ in batch)
    sizes = [n // unit.itemsize for twin, _ in batch for n in (twin.nbytes, aligned(twin.nbytes) - twin.nbytes)]
    slots = buffer[:total].view(unit).split_with_sizes(sizes)[::2]
    plain = [
        (slot, source.view(-1).view(unit)) for slot, (_, source) in zip(slots, batch, strict=True) if _is_plain(source)
    ]
    if plain:
        stream.copy(*zip(*plain, strict=True))
    for slot, (twin, source) in zip(slots, batch, strict=True):
        if not _is_plain(source):
            stream.copy([slot.view(twin.dtype).view(twin.shape)], [source])
    stream.copy([_memory(batch[0][0], total)], [buffer[:total]])


def _memory(first: torch.Tensor, nbytes: int) -> torch.Tensor:
    """So many bytes of memory from a twin on, over the ones that follow; valid as long as they are."""
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(first.data_ptr()), dtype=torch.uint8)


def _pieces_within(twin: torch.Tensor, source: torch.Tensor, nbytes: int) -> Iterator[Pair]:
    """A tensor and its twin in pieces of so many bytes at most; each is C-contiguous in the twin."""
    if twin.nbytes <= nbytes:
        yield twin, source
        return
    row = twin.nbytes // len(twin)
    if row > nbytes:
        for part, piece in zip(twin, source, strict=True):
            yield from _pieces_within(part, piece, nbytes)
        return
    for start in range(0, len(twin), nbytes // row):
        rows = slice(start, start + nbytes // row)
        yield twin[rows], source[rows]


def copy_on_host(pairs: Sequence[Pair], threads: int) -> None:
    """Copies tensors in host memory: with torch's threads, or where it has only one, with as many of ours."""
    total = sum(twin.nbytes for twin, _ in pairs)
    if threads == 1 or torch.get_num_threads() > 1 or total < _SHARED_COPY:
        _copy_some(pairs)
        return
    first, *others = _shares([piece for pair in pairs for piece in _pieces(pair)], total, threads)
    copies = [in_background(functools.partial(_copy_some, share)) for share in others]
    try:
        _copy_some(first)
    finally:
        concurrent.futures.wait(copies)  # nothing is written to the twins any more
    for copied in copies:
        copied.result()


def _copy_some(pairs: Sequence[Pair]) -> None:
    if pairs:
        with torch.no_grad():  # of its own in each thread
            copy_all([twin for twin, _ in pairs], [source for _, source in pairs])


def _pieces(pair: Pair) -> list[Pair]:
    """A large tensor in pieces that several threads can share."""
    twin, source = pair
    count = -(-twin.nbytes // _COPY_PIECE)
    if count < 2 or not source.is_contiguous():
        return [pair]
    return list(zip(twin.view(-1).tensor_split(count), source.view(-1).tensor_split(count), strict=True))


def _shares(pairs: Sequence[Pair], total: int, count: int) -> list[list[Pair]]:
    """Divides pairs among threads: about as many bytes for each."""
    shares: list[list[Pair]] = [[] for _ in range(count)]
    done = 0
    for pair in pairs:
        shares[min(count - 1, done * count // total)].append(pair)
        done += pair[0].nbytes
    return [share for share in shares if share]
