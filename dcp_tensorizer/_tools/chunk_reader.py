"""Regions of stored tensors: put together from the chunks that they touch, however a tensor was cut or laid out."""

from __future__ import annotations

import math
import mmap
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .._forks import free_in_child
from .._format.chunks import Region
from .._format.encryption import Cipher
from .._format.layout import StoredItem
from .._loading.executor import fetch
from .._loading.read_target import ReadTarget, part_of
from .._loading.scatter import copy_elements
from .._memory.tensor_bytes import named_dtype
from .._storage.base import Storage
from ..errors import DecryptionError

__all__ = ["STRIDED", "Chunk", "read_region", "whole"]

_KEPT_BY_MALLOC = 1 << 20  # bytes
_PIECE = 32 << 20  # bytes of a file in which elements are that lie apart


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor that is stored by itself.

    Attributes:
        region: Which part.
        item: Where its elements are.
        strides: The strides of its elements among the stored ones, and where the first is; None: they are stored in C
            order, from the first on.
        cipher: Decrypts it; None if it is not encrypted, or there is no key.
    """

    region: Region
    item: StoredItem
    strides: tuple[tuple[int, ...], int] | None = None
    cipher: Cipher | None = None


def whole(shape: Sequence[int]) -> Region:
    """All of a tensor."""
    return Region((0,) * len(shape), tuple(shape))


def read_region(
    storage: Storage, key: str, dtype: torch.dtype, chunks: Sequence[Chunk], region: Region, *, verify: bool
) -> torch.Tensor:
    """Puts a region of a tensor together.

    Raises:
        ReadError: its bytes cannot be read; with ``verify`` also if they are not the ones that were saved.
        DecryptionError: it is encrypted, and there is no key.
    """
    target = _empty(region.size, dtype)
    targets: dict[Cipher | None, list[ReadTarget]] = defaultdict(list)
    for chunk in chunks:
        common = region.intersect(chunk.region)
        if common is None:
            continue
        part = part_of(target, common, region)
        if chunk.strides is not None:
            copy_elements(part, part_of(STRIDED.read(storage, key, chunk, common), common, chunk.region))
            continue
        inner = Region(tuple(a - b for a, b in zip(common.start, chunk.region.start, strict=True)), common.size)
        if chunk.item.nonce_and_macs and chunk.cipher is None:
            raise DecryptionError(f"{storage.path}: {key!r} is encrypted: give its key (--key-file)")
        targets[chunk.cipher].append(ReadTarget.of(key, chunk.item, chunk.region.size, inner, part))
    for cipher, parts in targets.items():
        fetch(storage, parts, verify=verify, cipher=cipher)
    return target


def _empty(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory that goes back to the system when it is freed: malloc keeps some for each thread that ever had any."""
    nbytes = math.prod(size) * dtype.itemsize
    if nbytes < _KEPT_BY_MALLOC:
        return torch.empty(size, dtype=dtype, device="cpu")
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).view(dtype).view(size)


class StridedCache:
    """The last chunk that was read whole because its elements are not stored in C order.

    A tensor that is read in blocks needs it for the next block, too.
    """

    def __init__(self) -> None:
        self._lock = free_in_child(threading.Lock())
        self._chunk: Chunk | None = None
        self._elements: torch.Tensor | None = None

    @property
    def is_empty(self) -> bool:
        return self._elements is None

    def read(self, storage: Storage, key: str, chunk: Chunk, region: Region) -> torch.Tensor:
        """All of a chunk of which a region is wanted; after the region at its end, the chunk is dropped."""
        with self._lock:
            elements = self._elements if self._chunk is chunk else None
            self._chunk = self._elements = None  # first, so that there are never two in memory
            if elements is None:
                elements = _read_strided(storage, key, chunk)
            ends = zip(region.start, region.size, chunk.region.start, chunk.region.size, strict=True)
            if any(a + n != b + m for a, n, b, m in ends):
                self._chunk, self._elements = chunk, elements
        return elements


STRIDED = StridedCache()


def _read_strided(storage: Storage, key: str, chunk: Chunk) -> torch.Tensor:
    """All of a chunk whose elements are not stored in C order."""
    assert chunk.strides is not None
    strides, first = chunk.strides
    dtype = named_dtype(chunk.item.dtype)
    line = Chunk(Region((0,), (chunk.item.length // dtype.itemsize,)), chunk.item)

    def read_line(start: int, count: int) -> torch.Tensor:
        return read_region(storage, key, dtype, [line], Region((start,), (count,)), verify=False)

    if line.region.size[0] <= math.prod(chunk.region.size):
        return read_line(0, line.region.size[0]).as_strided(chunk.region.size, strides, first)
    # A few columns of a large matrix, say: only they stay in memory, and not what lies between them.
    elements = _empty(chunk.region.size, dtype)
    _gather(elements, strides, first, read_line)
    return elements


def _gather(
    target: torch.Tensor, strides: tuple[int, ...], first: int, read_line: Callable[[int, int], torch.Tensor]
) -> None:
    """Reads elements that lie apart, in pieces: halves, halves of these, and so on."""
    extents = [(n - 1) * step for n, step in zip(target.shape, strides, strict=True)]
    count = 1 + sum(extents)
    if count * target.itemsize <= _PIECE:
        copy_elements(target, read_line(first, count).as_strided(target.shape, strides, 0))
        return
    dim = max(range(len(extents)), key=extents.__getitem__)
    half = target.shape[dim] // 2
    _gather(target.narrow(dim, 0, half), strides, first, read_line)
    _gather(target.narrow(dim, half, target.shape[dim] - half), strides, first + half * strides[dim], read_line)
