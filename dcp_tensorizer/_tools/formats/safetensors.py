"""safetensors files, read and written by ranges: one tensor need not be in memory as a whole, let alone all of them.

The safetensors library reads local files only, and writes what is in memory.

    8 bytes   length of the header
    header    JSON: for each tensor its dtype, shape, and first and last byte behind the header
    data      the tensors' elements, without gaps
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..._storage.base import Storage
from ..checkpoint_view import StoredTensor, plain_tensor

__all__ = ["INDEX", "SINGLE", "dtype_name", "header", "index", "read_file", "read_index", "shard_names", "shards"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

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
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str | None:
    """The format's name for a dtype, None if it has none."""
    return _NAMES.get(dtype)


def read_file(storage: Storage, name: str, read: Callable[[int, int], bytes]) -> list[StoredTensor]:
    """The tensors of a file.

    Args:
        storage, name: The file.
        read: Gives so many bytes of it from an offset on.

    Raises:
        ValueError: it is of another kind, or damaged.
    """
    (length,) = _LENGTH.unpack(read(0, _LENGTH.size))
    if length > _MAX_HEADER:
        raise ValueError(f"its header claims to have {length:,} bytes")
    try:
        described = json.loads(read(_LENGTH.size, length))
        return [
            _tensor(storage, name, key, value, _LENGTH.size + length)
            for key, value in described.items()
            if key != "__metadata__"
        ]
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"its header is damaged: {type(error).__name__}: {error}") from error


def read_index(content: bytes) -> list[str]:
    """The files that an index names; raises `ValueError`."""
    try:
        names = sorted(set(json.loads(content)["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is damaged: {type(error).__name__}: {error}") from error
    if any(not isinstance(name, str) or "/" in name or name.startswith(".") for name in names):
        raise ValueError("it names files that are not beside it")
    return names


def shards(tensors: Sequence[StoredTensor], max_bytes: int) -> list[list[StoredTensor]]:
    """Distributes tensors over files of no more than ``max_bytes``, but for tensors that are larger by themselves."""
    found: list[list[StoredTensor]] = [[]]
    room = max_bytes
    for tensor in tensors:
        if tensor.nbytes > room and found[-1]:
            found.append([])
            room = max_bytes
        found[-1].append(tensor)
        room -= tensor.nbytes
    # The largest elements first: then each tensor begins at a multiple of its element.
    return [sorted(shard, key=lambda tensor: -tensor.dtype.itemsize) for shard in found]


def shard_names(number: int) -> list[str]:
    """The names that Hugging Face gives so many files."""
    return [SINGLE] if number == 1 else [f"model-{n:05}-of-{number:05}.safetensors" for n in range(1, number + 1)]


def header(tensors: Sequence[StoredTensor]) -> bytes:
    """The beginning of a file, up to the first tensor's elements."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        end = position + tensor.nbytes
        described[tensor.key] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return _LENGTH.pack(len(text)) + text


def index(named: Sequence[tuple[str, Sequence[StoredTensor]]]) -> bytes:
    """Which tensor is in which file, as Hugging Face's libraries look it up."""
    total = sum(tensor.nbytes for _, tensors in named for tensor in tensors)
    places = {tensor.key: name for name, tensors in named for tensor in tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2).encode() + b"\n"


def _tensor(storage: Storage, name: str, key: str, value: dict[str, Any], base: int) -> StoredTensor:
    dtype = _DTYPES.get(value["dtype"])
    if dtype is None:
        raise ValueError(f"{key!r} is of dtype {value['dtype']}, which torch has no like of")
    shape = tuple(map(int, value["shape"]))
    start, stop = value["data_offsets"]
    if stop - start != math.prod(shape) * dtype.itemsize or start < 0 or min(shape, default=0) < 0:
        raise ValueError(f"{key!r} of shape {shape} has {stop - start:,} bytes stored")
    return plain_tensor(storage, (key,), dtype, shape, (name, base + start))
