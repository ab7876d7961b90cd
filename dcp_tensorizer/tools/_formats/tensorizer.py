"""Reads files of any release of tensorizer, and writes them with the code that writes this package's data files.

tensorizer parses a file's index and the headers of its tensors. This module reads the tensors by ranges, and compares
them with the CRC-32 in their headers: ``TensorDeserializer`` returns only whole tensors from a stream that one thread
reads, but a conversion reads blocks of tensors in several threads. tensorizer has no public name for its index
(``_metadata``) or for a tensor's header (``_TensorHeaderDeserializer``).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from isal.isal_zlib import crc32

from ..._runtime.forks import free_in_child
from ..._runtime.patterns import matches
from ..._saving.write_plan import stored_names
from ..._storage.base import Storage
from ..._tensor_file.dtypes import dtype_name, host_bytes, named_dtype
from ..._tensor_file.encode import encode
from ..._tensor_file.layout import MAGIC, lay_out
from ..._tensor_file.names import INDEX_CAPACITY, index_entry_size
from ..._tensor_file.regions import Region
from ..._writer_process.protocol import TensorSource
from ...errors import ChecksumMismatch, ConversionError, UnsupportedFormat
from .._atomic_output import new_directory, new_file
from .._view import CheckpointView, StoredTensor, blocks_of, plain_tensor
from .common import ConvertOptions, FileRange, check_no_objects, naming, tensors_at_once

_MAX_HEADER = 1 << 20  # bytes of a tensor's header; the name in it has at most 64 KiB


# --- reading ----------------------------------------------------------------------------------------------------------


def read(storage: Storage, name: str) -> CheckpointView:
    """Opens the tensors of a file. Reading a tensor compares it with the CRC-32 in its header."""
    from tensorizer import CryptographyError, TensorDeserializer  # a slow import
    from tensorizer.serialization import TENSORIZER_VERSION

    path = f"{storage.path}/{name}"
    nbytes = storage.head(name) or 0
    with storage.reading(name) as reader, naming(storage, path):
        version = int.from_bytes(reader.read_range(len(MAGIC), 4), "little")
        if version > TENSORIZER_VERSION:
            raise UnsupportedFormat(
                f"{path} has data version {version} of tensorizer, and the installed tensorizer reads versions up to "
                f"{TENSORIZER_VERSION}. Install a newer one."
            )
        try:
            with TensorDeserializer(FileRange(reader, 0, nbytes), device="cpu", lazy_load=True) as deserializer:
                entries = list(deserializer._metadata.values())
        except CryptographyError as error:
            raise ConversionError(f"{path} is encrypted, and cannot be read: {error}") from error
        tensors: dict[str, StoredTensor] = {}
        for tensor in (_tensor(storage, name, nbytes, entry) for entry in entries):
            if tensors.setdefault(tensor.key, tensor) is not tensor:
                raise ConversionError(f"{path}: two tensors have the key {tensor.key!r}, and cannot be converted.")
    return CheckpointView(path, "tensorizer", tensors)


def _tensor(storage: Storage, file: str, nbytes: int, entry: Any) -> StoredTensor:
    """Makes the tensor of an index entry (``tensorizer.serialization.TensorEntry``)."""
    dtype = _dtype(entry.dtype)
    if not 0 <= entry.data_offset - entry.offset <= _MAX_HEADER:
        raise ValueError(f"its index is damaged: {str(entry.name)!r} has no valid header")
    if entry.data_offset + entry.data_length > nbytes:
        raise ValueError(f"its index is damaged: {str(entry.name)!r} ends beyond the end of the file")
    if not entry.data_length and math.prod(entry.shape):
        raise NotImplementedError(f"it has no data for {str(entry.name)!r}, which was a meta tensor")
    if entry.data_length != (expected := math.prod(entry.shape) * dtype.itemsize):
        raise ValueError(
            f"its index is damaged: {str(entry.name)!r} has {entry.data_length:,} bytes, but its shape and dtype need "
            f"{expected:,}"
        )
    tensor = plain_tensor(storage, tuple(entry.name), dtype, tuple(entry.shape), file, entry.data_offset)
    return replace(tensor, read=_VerifiedReads(storage, file, entry, tensor).read) if entry.data_length else tensor


def _dtype(name: str) -> torch.dtype:
    _, opaque, torch_name = name.partition("\0")
    if not opaque:
        return torch.from_numpy(np.empty(0, np.dtype(name))).dtype
    return named_dtype(torch_name.removeprefix("torch."))


class _VerifiedReads:
    """Reads of a tensor that verify its CRC-32: incrementally if it is read in order, otherwise with one whole read."""

    def __init__(self, storage: Storage, file: str, entry: Any, tensor: StoredTensor) -> None:
        self._storage = storage
        self._file = file
        self._entry = entry
        self._tensor = tensor
        self._lock = free_in_child(threading.Lock())
        self._expected: int | None = None
        self._crc32 = 0
        self._next = -1  # the next element for the CRC-32; -1 before the header is read
        self._is_verified = False

    def read(self, region: Region) -> torch.Tensor:
        """Reads a region. Raises `ChecksumMismatch` for a damaged tensor, at the latest with its last element."""
        value = self._tensor.read(region)
        with self._lock:
            if not self._is_verified and self._next < 0:
                self._begin()
            if not self._is_verified:
                first, stop = region.span(self._tensor.shape)
                is_run = stop - first == math.prod(region.size)  # of elements in C order
                if is_run and first == self._next:
                    self._add(value)
                else:
                    self._begin()
                    for block in blocks_of(self._tensor):
                        self._add(self._tensor.read(block))
        return value

    def _begin(self) -> None:
        from tensorizer.serialization import HashType, _TensorHeaderDeserializer

        entry = self._entry
        with self._storage.reading(self._file) as reader:
            content = reader.read_range(entry.offset, entry.data_offset - entry.offset)
        long_shapes = frozenset([entry.name] if entry.is_long_tensor else [])
        try:
            header = _TensorHeaderDeserializer(bytearray(content), long_shape_tensors=long_shapes)
            hashes = {one.type: int.from_bytes(one.hash, "little") for one in header.hashes}
        except Exception as error:  # any error, if the header is damaged
            path = f"{self._storage.path}/{self._file}"
            message = f"{path}: the header of {self._tensor.key!r} is damaged"
            raise ChecksumMismatch(message) from self._storage.cause(error)
        self._expected = hashes.get(HashType.CRC32)
        self._crc32 = header.compute_crc32()
        self._next = 0
        self._is_verified = self._expected is None  # the header may have no CRC-32

    def _add(self, value: torch.Tensor) -> None:
        self._crc32 = crc32(host_bytes(value), self._crc32)
        self._next += value.numel()
        if self._next < math.prod(self._tensor.shape) or self._is_verified:
            return
        if self._crc32 != self._expected:
            self._next = -1
            raise ChecksumMismatch(
                f"{self._storage.path}/{self._file}: {self._tensor.key!r} is damaged: its CRC-32 differs from the "
                f"stored one"
            )
        self._is_verified = True


# --- writing ----------------------------------------------------------------------------------------------------------


def check(view: CheckpointView, options: ConvertOptions) -> None:
    check_no_objects(view, "a tensorizer file")
    keys = list(view.tensors)
    for key, name in zip(keys, stored_names(keys), strict=True):
        if key != name:
            raise ConversionError(f"{key!r} cannot be a name in a tensorizer file. Leave it out, or strip a prefix.")
    for pattern in options.split:
        if not matches(keys, (pattern,)):
            raise ConversionError(f"no key matches {pattern!r}. Change split.")
    for tensor in view.tensors.values():
        if not tensor.nbytes and _numpy_lacks(tensor.dtype):
            raise ConversionError(
                f"{tensor.key!r} has no elements, and tensorizer cannot read a file with an empty tensor of "
                f"{tensor.dtype}. Leave it out."
            )
        dim = _split_dimension(tensor.key, options)
        if dim is None:
            continue
        extent = tensor.shape[dim] if -len(tensor.shape) <= dim < len(tensor.shape) else None
        if extent is None or extent % options.tensor_parallel:
            raise ConversionError(
                f"{tensor.key!r} of shape {tensor.shape} cannot be split into {options.tensor_parallel} equal "
                f"parts along dimension {dim}."
            )


def write(view: CheckpointView, path: str, storage_options: Mapping[str, Any], options: ConvertOptions) -> None:
    tensors = list(view.tensors.values())
    if options.tensor_parallel == 1:
        with new_file(path, storage_options) as (storage, name):
            _write_file(storage, name, tensors, options)
        return
    with new_directory(path, storage_options, "model-rank-*.tensors") as storage:
        for rank in range(options.tensor_parallel):
            shard = [_part_of_rank(tensor, rank, options) for tensor in tensors]
            _write_file(storage, f"model-rank-{rank:03}.tensors", shard, options)


def _write_file(storage: Storage, name: str, tensors: Sequence[StoredTensor], options: ConvertOptions) -> None:
    sources = []
    for tensor in tensors:
        is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        is_named = matches((tensor.key,), options.buffers)
        kind = "parameter" if is_number and not is_named else "buffer"
        sources.append(TensorSource(tensor.key, dtype_name(tensor.dtype), tensor.shape, tensor.nbytes, kind))
    capacity = max(INDEX_CAPACITY, sum(index_entry_size(source.name, len(source.shape)) for source in sources))
    layout = lay_out(sources, capacity=capacity)
    by_name = {tensor.key: tensor for tensor in tensors}
    with storage.writing(f"write {storage.path}/{name}"):
        sink = storage.create(name, layout.nbytes, sync=True)
        encode(layout, lambda source: host_bytes(by_name[source.name].read_all()), sink, tensors_at_once(tensors))


def _split_dimension(key: str, options: ConvertOptions) -> int | None:
    return next((dim for pattern, dim in options.split.items() if matches((key,), (pattern,))), None)


def _part_of_rank(tensor: StoredTensor, rank: int, options: ConvertOptions) -> StoredTensor:
    dim = _split_dimension(tensor.key, options)
    if dim is None:
        return tensor
    dim %= len(tensor.shape)
    extent = tensor.shape[dim] // options.tensor_parallel

    def read_part(region: Region) -> torch.Tensor:
        start = tuple(n + rank * extent * (d == dim) for d, n in enumerate(region.start))
        return tensor.read(Region(start, region.size))

    return replace(tensor, shape=(*tensor.shape[:dim], extent, *tensor.shape[dim + 1 :]), read=read_part, chunks=())


def _numpy_lacks(dtype: torch.dtype) -> bool:
    try:
        torch.empty(0, dtype=dtype, device="cpu").numpy()
    except TypeError:
        return True
    return False
