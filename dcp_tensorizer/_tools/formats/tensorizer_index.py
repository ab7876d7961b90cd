"""Reads the files of any release of tensorizer: what is in them by their index, and the data against its CRC-32."""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from isal.isal_zlib import crc32

from ..._format.chunks import Region
from ..._format.tensorizer_file import CRC32, ENCRYPTED, ENCRYPTED_FLAG, HEAD, LONG, MAGIC, START, VERSIONED_INDEX
from ..._memory.tensor_bytes import host_bytes
from ..._storage.base import Storage
from ...errors import ChecksumMismatch, ReadError
from ..checkpoint_view import StoredTensor, blocks_of, plain_tensor

__all__ = ["Indexed", "read_file", "read_index"]

_MAX_HEADER = 1 << 20  # of one tensor: its name has 64 KiB at most


class Indexed(NamedTuple):
    """A tensor in a tensorizer file, as the file's index has it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    length: int
    header_offset: int
    hashes_offset: int
    """Of the hashes in its header."""


def read_index(read: Callable[[int, int], bytes], nbytes: int) -> list[Indexed]:
    """The tensors in a file that any release of tensorizer wrote.

    Args:
        read: Gives so many bytes from an offset on.
        nbytes: In the file.

    Raises:
        ValueError: the file is of another kind, encrypted, or damaged.
    """
    head = read(0, len(MAGIC) + HEAD.size)
    if not head.startswith(MAGIC):
        raise ValueError("not a tensorizer file")
    version, flags, _, count, length = HEAD.unpack_from(head, len(MAGIC))
    features = int.from_bytes(flags, "little")
    if version > LONG:
        raise ValueError(f"of a newer version ({version}) than this release reads")
    if version == ENCRYPTED or (version > ENCRYPTED and features & ENCRYPTED_FLAG):
        raise ValueError("encrypted")
    if length > nbytes:
        raise ValueError(f"damaged: its index would have {length:,} bytes, and the file has {nbytes:,}")
    index = read(len(head), length)
    found = []
    position = 0
    try:
        for _ in range(count):
            entry, position = _read_entry(index, position, versioned=bool(features & VERSIONED_INDEX))
            if not 0 <= entry.offset - entry.header_offset <= _MAX_HEADER:
                raise ValueError(f"damaged in its index: {entry.name!r} has no header")
            if entry.length != math.prod(entry.shape) * entry.dtype.itemsize:
                raise ValueError(f"without data for {entry.name!r}, or damaged in its index")
            found.append(entry)
    except (struct.error, IndexError, UnicodeDecodeError, TypeError, AttributeError) as error:
        raise ValueError(f"damaged in its index: {error}") from error
    return found


def _read_entry(index: bytes, position: int, *, versioned: bool) -> tuple[Indexed, int]:
    is_long = False
    if versioned:
        is_long = struct.unpack_from("<I", index, position)[0] >= LONG
        position += 4
    (length,) = struct.unpack_from("<H", index, position)
    position += 2
    name, sizes = index[position : position + length].decode(), length
    position += length + 1  # and the kind of tensor
    length = index[position]
    sizes += length
    dtype = index[position + 1 : position + 1 + length].decode()
    position += 1 + length
    shape = struct.Struct(f"<{index[position]}{'Q' if is_long else 'I'}")
    extents = shape.unpack_from(index, position + 1)
    position += 1 + shape.size
    header, offset, nbytes = struct.unpack_from("<QQQ", index, position)
    hashes = START.size + sizes + 2 + shape.size
    return Indexed(name, _dtype(dtype), extents, offset, nbytes, header, hashes), position + 24


def _dtype(name: str) -> torch.dtype:
    _, opaque, torch_name = name.partition("\0")
    if not opaque:
        return torch.from_numpy(np.empty(0, np.dtype(name))).dtype
    dtype = getattr(torch, torch_name.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{torch_name!r} is no dtype")
    return dtype


def read_file(storage: Storage, name: str, read: Callable[[int, int], bytes]) -> list[StoredTensor]:
    """The tensors of a file, each compared with the CRC-32 in its header when it is read.

    Args:
        storage, name: The file.
        read: Gives so many bytes of it from an offset on.

    Raises:
        ValueError: it is of another kind, encrypted, or damaged.
    """
    found = []
    for entry in read_index(read, storage.head(name) or 0):
        tensor = plain_tensor(storage, (entry.name,), entry.dtype, entry.shape, (name, entry.offset))
        found.append(replace(tensor, read=_Checked(storage, name, entry, tensor).read) if entry.length else tensor)
    return found


class _Checked:
    """A tensor that is compared with its CRC-32: while it is read from front to back, or before anything else is."""

    def __init__(self, storage: Storage, file: str, entry: Indexed, tensor: StoredTensor) -> None:
        self._storage = storage
        self._file = file
        self._entry = entry
        self._tensor = tensor
        self._lock = threading.Lock()
        self._expected: int | None = None
        self._crc32 = 0
        self._position = -1  # in elements; before the header is read
        self._is_right = False

    def read(self, region: Region) -> torch.Tensor:
        """As `StoredTensor.read`; raises `ChecksumMismatch`, by the last element."""
        value = self._tensor.read(region)
        with self._lock:
            if not self._is_right and self._position < 0:
                self._begin()
            if not self._is_right:
                if _first_of_run(region, self._tensor.shape) == self._position:
                    self._add(value)
                else:
                    self._begin()
                    for block in blocks_of(self._tensor):
                        self._add(self._tensor.read(block))
        return value

    def _begin(self) -> None:
        header = bytearray(self._entry.offset - self._entry.header_offset)
        path = f"{self._storage.path}/{self._file}"
        try:
            reader = self._storage.open(self._file)
            try:
                reader.read_into([memoryview(header)], self._entry.header_offset)
            finally:
                reader.close()
            self._expected = _take_crc32(header, self._entry.hashes_offset)
        except (OSError, EOFError) as error:
            raise ReadError(self._storage.scrub(f"cannot read {path}: {type(error).__name__}: {error}")) from error
        except (struct.error, IndexError) as error:
            raise ChecksumMismatch(f"{path}: the header of {self._entry.name!r} is damaged") from error
        self._crc32 = crc32(header)
        self._position = 0
        self._is_right = self._expected is None  # some releases could leave it out

    def _add(self, value: torch.Tensor) -> None:
        self._crc32 = crc32(host_bytes(value), self._crc32)
        self._position += value.numel()
        if self._position < math.prod(self._tensor.shape) or self._is_right:
            return
        if self._crc32 != self._expected:
            self._position = -1
            raise ChecksumMismatch(
                f"{self._storage.path}/{self._file}: {self._entry.name!r} is damaged: its CRC-32 is not the one that "
                f"was stored with it"
            )
        self._is_right = True


def _take_crc32(header: bytearray, position: int) -> int | None:
    """The CRC-32 in a tensor's header, in which zeros take the place of all hashes, as when they were made."""
    _, count = struct.unpack_from("<HB", header, position)
    position += 3
    found = None
    for _ in range(count):
        kind, length = header[position], header[position + 1]
        value = slice(position + 2, position + 2 + length)
        if kind == CRC32:
            found = int.from_bytes(header[value], "little")
        header[value] = bytes(len(header[value]))
        position = value.stop
    return found


def _first_of_run(region: Region, shape: Sequence[int]) -> int | None:
    """The number of a region's first element, if the region is one run of elements in C order."""
    first = last = 0
    for start, size, extent in zip(region.start, region.size, shape, strict=True):
        first = first * extent + start
        last = last * extent + start + size - 1
    return first if last - first + 1 == math.prod(region.size) else None
