"""The pieces of a model's files that a rank writes, and those that it sends to the rank that writes their block."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from .._runtime.forks import free_in_child
from .._runtime.torch_compat import group_devices
from .._saving.write_plan import Item
from .._storage.base import Storage
from .._tensor_file.dtypes import dtype_name, host_bytes
from .._tensor_file.regions import Integers, Region, runs_of_region
from .._writer_process.options import SaveOptions
from .._writer_process.protocol import SharedWriteRequest, TensorSource, WriteDone
from .._writer_process.shared_job import Fill, Pieces, SharedFilePart, SharedWriteJob
from ..errors import WriteError
from .layout import RankLayout, granule_owners

_WINDOW = 64 << 20  # bytes of the files per rank in one exchange
_FIELDS = 3  # sent with each piece: file, offset, bytes
_CONVERTED = 4  # converted or copied tensors to cache: threads read tensors in the order of the files

_T = TypeVar("_T")


def pieces_of(layout: RankLayout, row: int, shape: tuple[int, ...], chunk: Region, source: int) -> Pieces:
    """Returns the pieces of a file's tensor that a source contains: no pieces if the two have no common elements.

    ``shape`` is the shape of a tensor of the state dict, and ``row`` one of its rows in the layout. The source is this
    rank's ``chunk`` of that tensor, and ``source`` its index.
    """
    itemsize = layout.dtypes[int(layout.dtype[row])].itemsize
    if (number := int(layout.box[row])) < 0:
        offsets, nbytes = runs_of_region(shape, *chunk, itemsize)
        starts = np.arange(len(offsets), dtype=np.int64) * nbytes
    else:
        shape, box = layout.boxes[number]
        here, there = box.carry(chunk), chunk.intersect(box.there)
        if here is None or there is None:
            return Pieces.joined([])
        offsets, in_file = runs_of_region(shape, *here, itemsize)
        starts, in_source = runs_of_region(chunk.size, *there.within(chunk), itemsize)
        # Both run lengths are products of the last sizes of one region, so the smaller one divides the larger one.
        nbytes = min(in_file, in_source)
        offsets, starts = _cut(offsets, in_file, nbytes), _cut(starts, in_source, nbytes)
    count = len(offsets)
    file, offsets = np.full(count, layout.file[row]), offsets + layout.start[row]
    return Pieces(file, offsets, np.full(count, nbytes), np.full(count, source), starts)


def _cut(firsts: Integers, nbytes: int, size: int) -> Integers:
    """Cuts runs into runs of ``size`` bytes; returns their offsets."""
    if size == nbytes:
        return firsts
    return (firsts[:, None] + np.arange(0, nbytes, size, dtype=np.int64)).reshape(-1)


def split(pieces: Pieces, layout: RankLayout) -> tuple[Pieces, Pieces]:
    """Divides a rank's pieces into those that fill whole blocks of a file, and those that fill a block in part.

    Each piece of the second kind lies within one block, whose other bytes are of other ranks or pieces.
    """
    pieces = pieces.select(pieces.nbytes > 0).sorted()
    if not layout.has_granules or not len(pieces):
        return pieces, pieces.select(slice(0, 0))
    sizes = np.array([part.granule for part in layout.files], dtype=np.int64)
    ends = np.array([part.file.nbytes for part in layout.files], dtype=np.int64)
    begins_run = np.ones(len(pieces), dtype=bool)
    begins_run[1:] = (np.diff(pieces.file) != 0) | (pieces.offset[1:] != (pieces.offset + pieces.nbytes)[:-1])
    run = np.cumsum(begins_run) - 1
    first = pieces.offset[begins_run]
    last = np.append(np.flatnonzero(begins_run)[1:], len(pieces)) - 1
    stop = (pieces.offset + pieces.nbytes)[last]
    file = pieces.file[begins_run]
    size = sizes[file]
    whole_from = -(-first // size) * size
    whole_to = np.where(stop == ends[file], stop, stop // size * size)
    begin, end = pieces.offset, pieces.offset + pieces.nbytes
    low, high = whole_from[run], np.maximum(whole_from, whole_to)[run]
    own = _clipped(pieces, np.maximum(begin, low), np.minimum(end, high))
    head = _clipped(pieces, begin, np.minimum(end, low))
    tail = _clipped(pieces, np.maximum(begin, high), end)
    shared = Pieces.joined([head, tail]).sorted()
    return own, shared.cut(sizes[shared.file])


def _clipped(pieces: Pieces, begin: Integers, end: Integers) -> Pieces:
    clipped = Pieces(pieces.file, begin, end - begin, pieces.source, pieces.start + begin - pieces.offset)
    return clipped.select(clipped.nbytes > 0)


def round_count(layout: RankLayout) -> int:
    """Returns the number of exchanges. Each exchange covers one window of the files, so it needs limited memory."""
    return -(-layout.nbytes // (_WINDOW * layout.ranks)) if layout.has_granules else 0


def fill_of(tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> Fill:
    """Returns a thread-safe function that fills memory with bytes of numbered tensors, converted to ``dtypes``.

    To save memory, the function caches only the last few tensors that it has converted or copied.
    """
    converted: OrderedDict[int, memoryview] = OrderedDict()
    converting = free_in_child(threading.Lock())

    def bytes_of(number: int) -> memoryview:
        tensor, dtype = tensors[number], dtypes[number]
        if tensor.dtype == dtype and tensor.is_cpu and tensor.is_contiguous():
            return host_bytes(tensor)
        with converting:
            if number not in converted:
                converted[number] = host_bytes(tensor.detach().to(dtype))
                if len(converted) > _CONVERTED:
                    converted.popitem(last=False)
            converted.move_to_end(number)
            return converted[number]

    def fill(number: int, start: int, memory: np.ndarray) -> None:
        memory[:] = np.frombuffer(bytes_of(number)[start : start + memory.nbytes], dtype=np.uint8)

    return fill


class SharedFiles(NamedTuple):
    """Pieces of the files that all ranks write, in the form that `WriterClient.write` takes.

    ``pieces`` refers to sources by their indices in the items. No item is empty. ``dtypes`` are the dtypes in
    which the items are written.
    """

    storage: Storage
    rank: int
    options: SaveOptions
    files: tuple[SharedFilePart, ...]
    pieces: Pieces
    dtypes: Sequence[torch.dtype]

    def request(self, sources: Sequence[TensorSource], digest: object) -> SharedWriteRequest:
        names = tuple(map(dtype_name, self.dtypes))
        return SharedWriteRequest(self.storage.location, self.options, self.files, self.pieces, tuple(sources), names)

    def job(self, items: Sequence[Item], contents: object, digest: object) -> SharedWriteJob:
        fill = fill_of([item.tensor for item in items], self.dtypes)
        return SharedWriteJob(self.storage, self.files, self.pieces, fill, self.options)

    def finish(self, done: WriteDone, digest: object) -> WriteDone:
        return done

    def remove(self) -> None:
        """Does nothing: the coordinator removes the files."""


class RankGroup:
    """The ranks of one save; ``group`` is None for a rank that saves alone.

    If a rank has died, methods raise `WriteError`.
    """

    def __init__(self, group: dist.ProcessGroup | None, path: str) -> None:
        self._group, self._path = group, path
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._device = torch.device("cpu")
        if group is not None and "cpu" not in (devices := group_devices(group)):
            self._device = torch.device(min(devices), torch.accelerator.current_device_index())

    def gather(self, numbers: Sequence[int]) -> Integers:
        own = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        if self._group is None:
            return np.array([numbers], dtype=np.int64)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        self._call(lambda: dist.all_gather(rows, own, group=self._group))
        return torch.stack(rows).cpu().numpy()

    def swap(self, content: np.ndarray, sent: Sequence[int], received: Sequence[int]) -> np.ndarray:
        """Sends bytes to each rank; returns the bytes received from all ranks, concatenated by rank.

        ``content`` is in the order of the receiving ranks; ``sent`` and ``received`` are the sizes by rank.
        """
        incoming = torch.empty(sum(received), dtype=torch.uint8, device=self._device)
        outgoing = torch.from_numpy(content).to(self._device)
        self._call(lambda: dist.all_to_all_single(incoming, outgoing, list(received), list(sent), group=self._group))
        return incoming.cpu().numpy()

    def _call(self, collective: Callable[[], _T]) -> _T:
        try:
            return collective()
        except RuntimeError as error:
            raise WriteError(
                f"{self._path}: rank {self.rank} of {self.size} could not exchange data. Another rank may have "
                f"ended, or may be saving a different state: {error}"
            ) from error


class PieceExchange:
    """An exchange of the pieces of shared blocks with the ranks that write these blocks, window by window.

    ``shared`` are this rank's pieces (see `split`); ``fill`` reads the bytes of the sources.
    """

    def __init__(self, shared: Pieces, layout: RankLayout, group: RankGroup, fill: Fill) -> None:
        self._group = group
        self._fill = fill
        sizes = np.array([part.granule for part in layout.files], dtype=np.int64)
        bases = np.cumsum([0, *(part.file.nbytes for part in layout.files)])[:-1]
        granule = shared.offset // sizes[shared.file]
        pairs = zip(shared.file.tolist(), granule.tolist(), strict=True)
        self._owner = granule_owners(layout, pairs)
        # A piece belongs to the window in which its block starts, so that all of a block is in one window.
        begins = bases[shared.file] + granule * sizes[shared.file]
        self._window = begins // (_WINDOW * layout.ranks)
        self._shared = shared

    def counts(self, number: int) -> list[int]:
        """Returns the numbers of pieces that this rank sends to each rank in a window, then the numbers of bytes."""
        chosen = self._of_window(number)
        owner, nbytes = self._owner[chosen], self._shared.nbytes[chosen]
        is_sent = owner != self._group.rank
        pieces = np.bincount(owner[is_sent], minlength=self._group.size)
        sums = np.bincount(owner[is_sent], weights=nbytes[is_sent], minlength=self._group.size)
        return [*pieces.tolist(), *sums.astype(np.int64).tolist()]

    def swap(self, number: int, counts: Integers) -> tuple[Pieces, Pieces, np.ndarray]:
        """Sends the pieces for other ranks, and receives those for this rank.

        ``counts`` has a row for each rank: the result of `counts` on that rank. Returns the pieces that this rank
        writes from its sources, the received pieces, and the bytes of the received pieces.
        """
        chosen = self._of_window(number)
        pieces, owner = self._shared.select(chosen), self._owner[chosen]
        own = pieces.select(owner == self._group.rank)
        order = np.flatnonzero(owner != self._group.rank)
        order = order[np.argsort(owner[order], kind="stable")]
        sent = pieces.select(order)
        size, rank = self._group.size, self._group.rank
        fields = np.stack([sent.file, sent.offset, sent.nbytes], axis=1).astype(np.int64)
        row_bytes = _FIELDS * 8
        described = self._group.swap(
            np.ascontiguousarray(fields).view(np.uint8).reshape(-1),
            (counts[rank, :size] * row_bytes).tolist(),
            (counts[:, rank] * row_bytes).tolist(),
        )
        content = np.empty(int(sent.nbytes.sum()), dtype=np.uint8)
        at = 0
        for source, start, nbytes in zip(sent.source.tolist(), sent.start.tolist(), sent.nbytes.tolist(), strict=True):
            self._fill(source, start, content[at : at + nbytes])
            at += nbytes
        incoming = self._group.swap(content, counts[rank, size:].tolist(), counts[:, size + rank].tolist())
        rows = described.view(np.int64).reshape(-1, _FIELDS)
        starts = np.cumsum(rows[:, 2]) - rows[:, 2]
        others = Pieces(rows[:, 0], rows[:, 1], rows[:, 2], np.zeros(len(rows), dtype=np.int64), starts)
        return own, others, incoming

    def _of_window(self, number: int) -> Integers:
        return np.flatnonzero(self._window == number)
