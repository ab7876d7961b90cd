"""Copies a state dict's tensors to their staged tensors, in few calls, on side streams and several cores.

Contiguous tensors on a GPU are copied directly: in batches if the driver takes them (`driver`), otherwise one by one.
Two kinds of tensors go through a buffer on the GPU: tensors that are too small for a copy of their own, and tensors
that would need a temporary copy on the GPU (not contiguous, lazily conjugated, or cast). One copy moves many small
tensors from the buffer to their staged tensors, which are adjacent: see `allocation_order`.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch

from .._runtime.interpreter import collector_paused
from .._runtime.threads import in_background
from .._runtime.torch_compat import copy_all, is_plain
from .._tensor_file.dtypes import UNCOPYABLE, copyable
from .device import Event, SideStream, SideStreams
from .driver import Batch
from .shared_memory import SharedBuffer, aligned


@dataclass(frozen=True, slots=True)
class GatherLimits:
    """Limits of gathering on a device before the copy over the bus.

    Attributes:
        buffer_bytes: Upper limit of the memory that a staging takes on each GPU. One such buffer is retained.
        small_bytes: Tensors of up to this size are gathered. Apart from its bytes, a copy over the bus costs the
            thread about 10 microseconds and the bus 5, in which the bus would move 128 KiB. To gather a tensor costs
            the thread less than that, and the device almost nothing.
        batch_bytes: If the driver takes batches, contiguous tensors of at least this size are not gathered.
    """

    buffer_bytes: int = 32 << 20
    small_bytes: int = 256 << 10
    batch_bytes: int = 16 << 10

    def is_small(self, source: torch.Tensor) -> bool:
        return source.nbytes <= self.small_bytes


DEFAULT_LIMITS = GatherLimits()
_BATCH = 1024  # maximum number of tensors that are gathered in one call
# Small tensors are gathered as integers, which have a fused kernel, unless the tensors of a batch all have the same one
# of these dtypes. The kernel for half precision converts through float32, which changes the bits of a NaN.
_FUSED = {torch.float32, torch.float64, torch.uint8, torch.int16, torch.int32, torch.int64}
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


Pair = tuple[torch.Tensor, torch.Tensor]
"""A staged tensor and its source."""

_Share = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]  # staged tensors and their sources

Batches = tuple[tuple[list[Any], ...], dict[int, tuple[Batch, Set[int]]]]
"""The batches of a state by device, with the numbers of their sources, for later states in the same staging buffer. The
first item is the key: everything that determines the source and target addresses. Holds no reference to a tensor."""


class Copies:
    """Copies of tensors to their staged tensors. One thread begins them, and any thread may wait for them.

    If torch itself has only one thread, ``threads`` threads copy host memory of 8 MiB or more, about the same number of
    bytes each. One of them is the thread that calls `copy_from_host`, and makes its copies there. The others start in
    `add`. Copies from devices are queued on ``streams``. Call `SideStreams.follow` first.

    Attributes:
        sources: The tensors to copy.
        indices: The device of each source; None for host memory.
        devices: The distinct devices of the sources.
        dtypes: The dtypes of the staged tensors, by default those of the sources. Only copies from a device can cast.
    """

    def __init__(
        self,
        streams: SideStreams,
        sources: Sequence[torch.Tensor],
        *,
        threads: int = 1,
        limits: GatherLimits = DEFAULT_LIMITS,
    ) -> None:
        self.sources = sources
        self.indices = list(map(streams.device.index_of, sources))
        self.devices = [index for index in dict.fromkeys(self.indices) if index is not None]
        self.dtypes: list[torch.dtype] = list(map(attrgetter("dtype"), sources))
        self._streams = streams
        self._threads = threads
        self._limits = limits
        self._on_device: dict[int, list[tuple[int, Pair]]] = defaultdict(list)  # with the number of each
        self._share: _Share = [], []  # pairs in host memory, for the thread that calls `copy_from_host`
        self._begun: list[concurrent.futures.Future[None]] = []  # the copies of other threads
        self._layout: tuple[list[Any], ...] | None = None
        self._batches: dict[int, tuple[Batch, Set[int]]] = {}
        self._queued: set[int] = set()
        self._marks: list[Event] = []

    @property
    def nbytes(self) -> int:
        """The bytes that the staged tensors take in a buffer."""
        if not self.devices:  # nothing is cast
            return sum(map(aligned, map(attrgetter("nbytes"), self.sources)))
        pairs = zip(self.sources, self.dtypes, strict=True)
        return sum(aligned(source.numel() * dtype.itemsize) for source, dtype in pairs)

    def repeat(self, buffer: SharedBuffer) -> None:
        """If the last state in the buffer had the same layout, queues its batches again, before any staged tensor is
        made.
        """
        if not any(self._streams[index].has_batches for index in self.devices):
            return
        placed = list(zip(self.sources, self.indices, strict=True))
        self._layout = (
            self.indices,
            self.dtypes,
            list(map(attrgetter("shape"), self.sources)),
            list(map(attrgetter("dtype"), self.sources)),
            [0 if index is None else source.data_ptr() for source, index in placed],
            [index is not None and is_plain(source) for source, index in placed],
        )
        last, buffer.batches = buffer.batches, None
        if last is not None and last[0] == self._layout:
            for index, of_device in last[1].items():
                self._copy_batch(index, *of_device)

    @property
    def batches(self) -> Batches | None:
        """The batches that have been queued, for a later `repeat`."""
        return None if self._layout is None else (self._layout, self._batches)

    def _copy_batch(self, index: int, batch: Batch, numbers: Set[int]) -> bool:
        stream = self._streams[index]
        try:
            if not stream.copy_batch(batch):
                return False
            self._queued |= numbers
            self._batches[index] = batch, numbers
            return True
        finally:
            self._marks.append(stream.mark())

    @collector_paused()
    def begin(self, buffer: SharedBuffer) -> Sequence[torch.Tensor]:
        shapes = list(map(attrgetter("shape"), self.sources))
        if not self.devices:
            staged = buffer.allocate_all(self.dtypes, shapes)
        else:
            order = allocation_order(self.sources, self.dtypes, self.indices, self._limits)
            made = buffer.allocate_all([self.dtypes[n] for n in order], [shapes[n] for n in order])
            of_number = dict(zip(order, made, strict=True))
            staged = [of_number[n] for n in range(len(order))]
        self.add(staged)
        return staged

    def add(self, staged: Sequence[torch.Tensor]) -> None:
        """Prepares the copies to existing staged tensors, and starts the other threads that copy host memory, if any.

        May be called only once.
        """
        sources = self.sources
        if not UNCOPYABLE.isdisjoint(map(attrgetter("dtype"), sources)):
            staged, sources = list(map(copyable, staged)), list(map(copyable, sources))
        if self.devices:
            for number, (target, source, index) in enumerate(zip(staged, sources, self.indices, strict=True)):
                if index is not None and number not in self._queued and source.numel():
                    self._on_device[index].append((number, (target, source)))
            on_host = [number for number, index in enumerate(self.indices) if index is None]
            staged, sources = [staged[number] for number in on_host], [sources[number] for number in on_host]
        self._share = staged, sources
        if self._threads > 1 and torch.get_num_threads() == 1:
            sizes = list(map(attrgetter("nbytes"), sources))
            if sum(sizes) >= _SHARED_COPY:
                *others, self._share = _shares(staged, sources, sizes, self._threads)
                try:
                    for share in others:
                        self._begun.append(in_background(functools.partial(_copy, *share)))
                except BaseException:  # such as a KeyboardInterrupt
                    concurrent.futures.wait(self._begun)
                    raise

    @property
    def streams(self) -> dict[int, SideStream]:
        return {index: self._streams[index] for index in self._on_device}

    @property
    def on_device(self) -> list[Pair]:
        return [pair for pairs in self._on_device.values() for _, pair in pairs]

    def start(self) -> None:
        self.queue_from_devices()
        self.copy_from_host()

    def queue_from_devices(self) -> None:
        for index, stream in self.streams.items():
            pairs = self._on_device[index]
            if stream.has_batches:
                pairs = self._queue_batch(index, stream, pairs)
            try:
                queue_on_device([pair for _, pair in pairs], stream, self._limits)
            finally:
                self._marks.append(stream.mark())

    def _queue_batch(self, index: int, stream: SideStream, pairs: list[tuple[int, Pair]]) -> list[tuple[int, Pair]]:
        """Queues the pairs that a batch can copy. Returns those that are not queued: all if the driver refuses."""
        least = self._limits.batch_bytes
        numbers = {
            number
            for number, (target, source) in pairs
            if source.nbytes >= least and target.dtype is source.dtype and is_plain(source)
        }
        if not numbers:
            return pairs
        rows = [(t.data_ptr(), s.data_ptr(), s.nbytes) for number, (t, s) in pairs if number in numbers]
        if not self._copy_batch(index, stream.batch(*zip(*rows, strict=True)), numbers):
            return pairs
        return [pair for pair in pairs if pair[0] not in numbers]

    def copy_from_host(self) -> None:
        """Makes this thread's copies from host memory, and waits for those of other threads. Gradients must be off."""
        share, self._share = self._share, ([], [])
        try:
            if share[0]:
                copy_all(*share)
        finally:
            concurrent.futures.wait(self._begun)
        for copied in self._begun:
            copied.result()

    def wait(self) -> None:
        concurrent.futures.wait(self._begun)
        for mark in self._marks:
            mark.synchronize()

    def hold(self) -> None:
        """Makes the calling thread's current streams wait for the copies; does not block the thread."""
        for mark in self._marks:
            mark.wait()


def allocation_order(
    sources: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype],
    indices: Sequence[int | None],
    limits: GatherLimits = DEFAULT_LIMITS,
) -> list[int]:
    """Returns the order in which to allocate the staged tensors: first those that are gathered together.

    Small tensors are gathered together if they are on the same device (see ``indices``), have the same element size,
    and are not copied in batches.
    """
    gathered: dict[int, tuple[int, bool, int]] = {}
    for number, (source, index) in enumerate(zip(sources, indices, strict=True)):
        if index is not None and limits.is_small(source):
            gathered[number] = index, source.nbytes >= limits.batch_bytes, dtypes[number].itemsize
    return [*sorted(gathered, key=gathered.__getitem__), *(n for n in range(len(sources)) if n not in gathered)]


def queue_on_device(pairs: Sequence[Pair], stream: SideStream, limits: GatherLimits = DEFAULT_LIMITS) -> None:
    """Queues the copies of one device's tensors, in few calls.

    Staged tensors are C-contiguous and on the host. One copy over the bus fills the staged tensors of several small
    tensors, if these staged tensors are adjacent and have the same element size. The device casts tensors whose staged
    tensors have another dtype.
    """
    small: list[_Small] = []
    plain: list[Pair] = []
    strided: list[Pair] = []
    for staged, source in pairs:
        is_same = staged.dtype is source.dtype and is_plain(source)
        if limits.is_small(source):
            small.append(_Small(staged.data_ptr(), staged.nbytes, is_same, staged, source))
        else:
            (plain if is_same else strided).append((staged, source))
    if plain:
        stream.spread(*zip(*plain, strict=True))
    if small or strided:
        with stream.buffer(limits.buffer_bytes, limits.small_bytes) as buffer:
            for batch in _batches(sorted(small, key=itemgetter(0)), buffer.nbytes):
                _gather(batch, buffer, stream)
            for staged, source in strided:
                for part, piece in _pieces_within(staged, source, buffer.nbytes):
                    gathered = buffer[: part.nbytes].view(part.dtype).view(part.shape)
                    stream.copy([gathered], [piece])
                    stream.copy([part], [gathered])


class _Small(NamedTuple):
    address: int  # of the staged tensor
    nbytes: int
    is_same: bool  # whether the source has the staged tensor's dtype, and its memory is in C order
    staged: torch.Tensor
    source: torch.Tensor


def _batches(small: Iterable[_Small], most: int) -> Iterator[list[_Small]]:
    """Yields runs of adjacent staged tensors of one element size, of at most ``most`` bytes."""
    batch: list[_Small] = []
    start = end = itemsize = 0
    for one in small:
        address, nbytes, _, staged, _ = one
        after = address + aligned(nbytes)
        follows = address == end and staged.itemsize == itemsize
        if not follows or len(batch) == _BATCH or after - start > most:
            if batch:
                yield batch
            batch, start, itemsize = [], address, staged.itemsize
        batch.append(one)
        end = after
    if batch:
        yield batch


def _gather(batch: Sequence[_Small], buffer: torch.Tensor, stream: SideStream) -> None:
    """Packs small tensors into a buffer on the device, and copies the buffer to their staged tensors in one copy."""
    units = {unit_of(one.staged.dtype) for one in batch}
    unit = units.pop() if len(units) == 1 else _INTEGER.get(batch[0].staged.itemsize, torch.int64)
    size = unit.itemsize
    extents = [n // size for one in batch for n in (one.nbytes, aligned(one.nbytes) - one.nbytes)]
    total = sum(extents) * size
    slots = buffer[:total].view(unit).split_with_sizes(extents)[::2]
    into, out = [], []
    for slot, (_, _, is_same, _, source) in zip(slots, batch, strict=True):
        if is_same:
            flat = source if source.dim() == 1 else _flat(source)
            into.append(slot)
            out.append(flat if flat.dtype is unit else _flat(flat).view(unit))
    if into:
        stream.copy(into, out)
    for slot, (_, _, is_same, staged, source) in zip(slots, batch, strict=True):
        if not is_same:
            stream.copy([slot.view(staged.dtype).view(staged.shape)], [source])
    # The memory of all staged tensors of the batch, which are adjacent and outlive the copy.
    memory = (ctypes.c_char * total).from_address(batch[0].staged.data_ptr())
    stream.copy([torch.frombuffer(memory, dtype=torch.uint8)], [buffer[:total]])


def unit_of(dtype: torch.dtype) -> torch.dtype:
    """Returns a dtype with which a fused kernel copies elements of ``dtype`` bit for bit."""
    return dtype if dtype in _FUSED else _INTEGER.get(dtype.itemsize, torch.int64)


def _flat(plain: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor's elements in one dimension.

    `view` alone, as another dtype, fails on the arbitrary stride of a dimension of size 1.
    """
    return plain.as_strided((plain.numel(),), (1,))


def _pieces_within(staged: torch.Tensor, source: torch.Tensor, nbytes: int) -> Iterator[Pair]:
    """Cuts a pair into pieces of at most ``nbytes`` bytes, each C-contiguous in the staged tensor."""
    if staged.nbytes <= nbytes:
        yield staged, source
        return
    row = staged.nbytes // len(staged)
    if row > nbytes:
        for part, piece in zip(staged, source, strict=True):
            yield from _pieces_within(part, piece, nbytes)
        return
    for start in range(0, len(staged), nbytes // row):
        rows = slice(start, start + nbytes // row)
        yield staged[rows], source[rows]


# --- copying tensors of host memory on several cores ---------------------------------------------------------------

_PIECE = 32 << 20
_SHARED_COPY = 8 << 20  # with fewer bytes to copy, starting a thread costs more than it saves


def _copy(staged: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if staged:
        with torch.no_grad():  # each thread has its own grad mode
            copy_all(staged, sources)


def _shares(
    staged: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], sizes: Sequence[int], threads: int
) -> list[_Share]:
    if max(sizes) > _PIECE:
        pairs = [piece for pair in zip(staged, sources, strict=True) for piece in _pieces(*pair)]
        staged, sources = zip(*pairs, strict=True)
        sizes = [source.nbytes for source in sources]
    ends = list(itertools.accumulate(sizes))
    cuts = [bisect_left(ends, ends[-1] * number / threads) + 1 for number in range(1, threads)]
    bounds = itertools.pairwise([0, *cuts, len(ends)])
    return [(staged[first:last], sources[first:last]) for first, last in bounds]


def _pieces(staged: torch.Tensor, source: torch.Tensor) -> list[Pair]:
    count = -(-staged.nbytes // _PIECE)
    if count < 2 or not source.is_contiguous():
        return [(staged, source)]
    return list(zip(staged.view(-1).tensor_split(count), source.view(-1).tensor_split(count), strict=True))
