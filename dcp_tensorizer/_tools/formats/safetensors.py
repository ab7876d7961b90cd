"""safetensors files, read and written by ranges: no tensor need be in memory as a whole.

The safetensors library reads local files only, and writes what is in memory.

    8 bytes   length of the header
    header    JSON: for each tensor its dtype, shape, and first and last byte behind the header
    data      the tensors' elements, without gaps
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta, Raw, Struct
from msgspec.json import Decoder

from ..._memory.tensor_bytes import host_bytes
from ..._storage.base import Storage
from ...errors import ConversionError
from ..atomic_output import new_directory, new_file, written_file
from ..checkpoint_view import BLOCK, CheckpointView, StoredTensor, blocks_of, plain_tensor
from .common import Options, by_key, check_no_objects, open_file, read_range

__all__ = ["check", "is_directory", "read", "read_directory", "write"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 100_000_000  # the library's own limit
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PAIRS = torch.float4_e2m1fn_x2
"""Two elements in a byte: torch counts them as one in its shapes, and the format as two, in the last dimension."""


class _Entry(Struct):
    """What a header says of a tensor."""

    dtype: str
    shape: Annotated[tuple[_Count, ...], Meta(max_length=255)]
    data_offsets: tuple[_Count, _Count]


class _Index(Struct):
    """What ``model.safetensors.index.json`` says: the file of each tensor."""

    weight_map: dict[str, str]


_decode_header = Decoder(dict[str, Raw]).decode
_decode_entry = Decoder(_Entry).decode
_decode_index = Decoder(_Index).decode


# --- reading -------------------------------------------------------------------------------------------------------


def is_directory(storage: Storage) -> bool:
    """Whether a directory is laid out as Hugging Face does it."""
    return any(storage.head(name) is not None for name in (_INDEX, _SINGLE))


def read_directory(storage: Storage) -> CheckpointView:
    """The tensors of all files in a directory, each of the file that the index names.

    Raises:
        ConversionError: a file is of another kind, or damaged; or it lacks a tensor that the index says to be there.
        ReadError: one cannot be read.
    """
    file_of: dict[str, str] = {}
    if (index := storage.read(_INDEX)) is not None:
        with _damage_translated(f"{storage.path}/{_INDEX}"):
            file_of = _decode_index(index).weight_map
            if any("/" in name or name.startswith(".") for name in file_of.values()):
                raise ValueError("it names files that are not beside it")
    names = [_SINGLE] if index is None else sorted(set(file_of.values()))
    tensors: dict[tuple[str, str], StoredTensor] = {}
    for name in names:
        tensors |= {(key, name): tensor for key, tensor in read(storage, name).tensors.items()}
    for key, name in file_of.items():
        if (key, name) not in tensors:
            raise ConversionError(
                f"{storage.path}/{name} lacks {key!r}, which {_INDEX} says to be there: files were exchanged, or are "
                f"not all of one model"
            )
    chosen = {key: tensor for (key, name), tensor in tensors.items() if file_of.get(key, name) == name}
    return CheckpointView(storage.path, "safetensors", chosen)


def read(storage: Storage, name: str) -> CheckpointView:
    """The tensors of a file.

    Raises:
        ConversionError: it is of another kind, or damaged.
        ReadError: it cannot be read.
    """
    path = f"{storage.path}/{name}"
    with open_file(storage, name) as reader, _damage_translated(path):
        nbytes = storage.head(name) or 0
        (length,) = _LENGTH.unpack(read_range(reader, 0, _LENGTH.size))
        base = _LENGTH.size + length
        if length > _MAX_HEADER or base > nbytes:
            raise ValueError(f"its header claims to have {length:,} bytes, and the file has {nbytes:,}")
        raw = _decode_header(read_range(reader, _LENGTH.size, length))
        raw.pop("__metadata__", None)
        described = {key: _decode_entry(value) for key, value in raw.items()}
        _check_offsets(described, nbytes - base)
        return CheckpointView(
            path, "safetensors", by_key(_tensor(storage, name, key, entry, base) for key, entry in described.items())
        )


def _check_offsets(described: Mapping[str, _Entry], nbytes: int) -> None:
    """Tensors must fill the bytes behind the header, one after the other, as the library demands it."""
    end = 0
    for (start, stop), key in sorted((entry.data_offsets, key) for key, entry in described.items()):
        if start != end or stop < start:
            raise ValueError(f"{key!r} is at bytes {start:,} to {stop:,}, and the tensor before it ends at {end:,}")
        end = stop
    if end != nbytes:
        raise ValueError(f"its tensors have {end:,} bytes, and {nbytes:,} follow its header")


def _tensor(storage: Storage, name: str, key: str, entry: _Entry, base: int) -> StoredTensor:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise ValueError(f"{key!r} is of dtype {entry.dtype}, which torch does not have")
    shape = entry.shape
    if dtype == _PAIRS:
        if not shape or shape[-1] % 2:
            raise ValueError(f"{key!r} of shape {shape} has a last dimension that is not of pairs")
        shape = (*shape[:-1], shape[-1] // 2)
    start, stop = entry.data_offsets
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{key!r} of shape {entry.shape} has {stop - start:,} bytes stored")
    return plain_tensor(storage, (key,), dtype, shape, (name, base + start))


@contextmanager
def _damage_translated(path: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, msgspec.MsgspecError) as error:
        raise ConversionError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


# --- writing -------------------------------------------------------------------------------------------------------


def check(view: CheckpointView, options: Options) -> None:
    """Fails for objects, and for dtypes and keys that the format does not have."""
    check_no_objects(view, "safetensors")
    for tensor in view.tensors.values():
        if tensor.dtype not in _NAMES:
            raise ConversionError(
                f"{tensor.key!r} is of {tensor.dtype}, which safetensors has not: leave it out, or convert it"
            )
        if tensor.dtype == _PAIRS and not tensor.shape:
            raise ConversionError(
                f"{tensor.key!r} is a pair of elements without a dimension, which safetensors has not: leave it out"
            )
        _check_key(tensor.key)
        if tensor.key == "__metadata__":
            raise ConversionError("'__metadata__' cannot be a key in safetensors: leave it out")


def _check_key(key: str) -> None:
    try:
        key.encode()
    except UnicodeEncodeError:
        raise ConversionError(
            f"{key!r} cannot be a key in safetensors: it is not valid Unicode. Leave it out"
        ) from None


def write(
    view: CheckpointView,
    path: str,
    storage_options: Mapping[str, Any],
    options: Options,
    block_bytes: int = BLOCK,
) -> None:
    """Writes a file if the path ends in ``.safetensors``, else a directory as Hugging Face lays it out."""
    tensors = list(view.tensors.values())
    if path.endswith(".safetensors"):
        (shard,) = _shards(tensors, view.nbytes)
        with new_file(path, storage_options) as (storage, name):
            _write_file(storage, name, shard, block_bytes)
        return
    shards = _shards(tensors, options.shard_bytes)
    total = len(shards)
    names = [_SINGLE] if total == 1 else [f"model-{n:05}-of-{total:05}.safetensors" for n in range(1, total + 1)]
    with new_directory(path, storage_options, "model*.safetensors") as storage:
        for name, shard in zip(names, shards, strict=True):
            _write_file(storage, name, shard, block_bytes)
        if total > 1:
            places = {tensor.key: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            index = {"metadata": {"total_size": view.nbytes}, "weight_map": places}
            storage.put(_INDEX, json.dumps(index, indent=2).encode() + b"\n", sync=True)


def _shards(tensors: Sequence[StoredTensor], max_bytes: int) -> list[list[StoredTensor]]:
    """Distributes tensors over files of no more than ``max_bytes``; a tensor that is larger gets a file of its own."""
    shards: list[list[StoredTensor]] = [[]]
    room = max_bytes
    for tensor in tensors:
        if tensor.nbytes > room and shards[-1]:
            shards.append([])
            room = max_bytes
        shards[-1].append(tensor)
        room -= tensor.nbytes
    # The largest elements first: then each tensor begins at a multiple of its element.
    return [sorted(shard, key=lambda tensor: -tensor.dtype.itemsize) for shard in shards]


def _write_file(storage: Storage, name: str, tensors: Sequence[StoredTensor], block_bytes: int) -> None:
    header = _header(tensors)
    with written_file(storage, name, len(header) + sum(tensor.nbytes for tensor in tensors)) as write_piece:
        write_piece(memoryview(header))
        for tensor in tensors:
            for region in blocks_of(tensor, block_bytes):
                write_piece(host_bytes(tensor.read(region)))


def _header(tensors: Sequence[StoredTensor]) -> bytes:
    """The beginning of a file, up to the first tensor's elements."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        offsets = [position, position + tensor.nbytes]
        shape = [*tensor.shape[:-1], 2 * tensor.shape[-1]] if tensor.dtype == _PAIRS else list(tensor.shape)
        described[tensor.key] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": shape,
            "data_offsets": offsets,
        }
        position = offsets[1]
    text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return _LENGTH.pack(len(text)) + text
