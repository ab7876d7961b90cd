"""The layout of safetensors files with torch tensors, and of directories of them in Hugging Face's style.

Files are laid out like those of ``safetensors.torch.save_file``, byte for byte.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Protocol, TypeVar

import torch
from msgspec import Meta, Struct
from msgspec.json import Decoder

from .._tensor_file.names import MAX_NUMBER
from .safetensors_header import LENGTH, MAX_HEADER, decode_json, encode_header

MAX_SHARD_BYTES = 5_000_000_000
"""The default maximum size of a file, as in Hugging Face's libraries."""

# In the order of the safetensors library. A file has its tensors in this order of their dtypes: those with the largest
# elements come first, so that all elements are aligned.
DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F4": torch.float4_e2m1fn_x2,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PAIRS = torch.float4_e2m1fn_x2
"""The dtype with two elements per byte. Such a pair counts as one element in torch's shapes, and as two in the last
dimension of the format's shapes."""

SHARDING = "DCP_SHARDING_INFO"
"""The ``__metadata__`` key under which torch's ``HuggingFaceStorageWriter`` writes the offset of each part in its whole
tensor, even if the part is the whole tensor. Consolidated files do not have the key."""

_ORDER = {dtype: number for number, dtype in enumerate(NAMES)}
_NOTES = {"format": "pt"}


class Described(Protocol):
    @property
    def key(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


T = TypeVar("T", bound=Described)


@dataclass(frozen=True, slots=True)
class SafetensorsLayout(Generic[T]):
    tensors: tuple[T, ...]  # in file order
    starts: tuple[int, ...]
    header: bytes  # the file up to the first tensor
    nbytes: int


def fault_of(key: object, dtype: torch.dtype, shape: Sequence[int]) -> str | None:
    """Returns the reason why the format cannot hold a tensor, as the rest of a sentence that begins with its key.

    If the format can hold it, returns None.
    """
    if dtype not in NAMES:
        return f"is of {dtype}, which safetensors does not have: leave it out, or convert it"
    if dtype == PAIRS and not shape:
        return f"is a 0-dimensional tensor of {PAIRS}, which safetensors cannot store: leave it out"
    if not isinstance(key, str):
        kind = type(key).__name__
        return f"is a key of type {kind}, and keys in safetensors must be strings: leave it out, or rename it"
    if key == "__metadata__":
        return "cannot be a key in safetensors: leave it out"
    try:
        key.encode()
    except UnicodeEncodeError:
        return "cannot be a key in safetensors: it is not valid Unicode. Leave it out"
    return None


def in_torch(name: str, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Returns torch's dtype and shape of a tensor that a file describes.

    Raises `ValueError` if torch has no such tensors. Its message is the rest of a sentence that begins with the key.
    """
    dtype = DTYPES.get(name)
    if dtype is None:
        raise ValueError(f"is of dtype {name}, which torch does not have")
    if dtype != PAIRS:
        return dtype, shape
    if not shape or shape[-1] % 2:
        raise ValueError(f"of shape {shape} and dtype {name} must have an even last dimension")
    return dtype, (*shape[:-1], shape[-1] // 2)


class _SavedOffset(Struct):
    saved_offsets: tuple[Annotated[int, Meta(ge=0, le=MAX_NUMBER)], ...]


_decode_saved = Decoder(dict[str, _SavedOffset]).decode


def saved_offsets(notes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the offset of each part in its whole tensor, from the ``__metadata__`` of a file.

    Without `SHARDING`, the result is empty. Raises `ValueError` if the entry is damaged.
    """
    note = notes.get(SHARDING, "")
    if not isinstance(note, str):
        raise ValueError(f"{SHARDING} is not a string")
    return {key: saved.saved_offsets for key, saved in decode_json(_decode_saved, note.encode() or b"{}").items()}


def nbytes_of(tensor: Described) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def shards(tensors: Iterable[T], max_bytes: int) -> list[list[T]]:
    """Distributes tensors over files of at most ``max_bytes``. A larger tensor gets its own file."""
    files: list[list[T]] = [[]]
    free = max_bytes
    for tensor in tensors:
        nbytes = nbytes_of(tensor)
        if nbytes > free and files[-1]:
            files.append([])
            free = max_bytes
        files[-1].append(tensor)
        free -= nbytes
    return files


def lay_out(tensors: Iterable[T]) -> SafetensorsLayout[T]:
    """Lays out a file; raises `ValueError` if its header would exceed the limit of safetensors."""
    ordered = tuple(sorted(tensors, key=lambda tensor: (_ORDER[tensor.dtype], tensor.key.encode())))
    described: dict[str, Any] = {"__metadata__": _NOTES}
    ends = [0]
    for tensor in ordered:
        shape = list(tensor.shape)
        if tensor.dtype == PAIRS:
            shape[-1] *= 2
        ends.append(ends[-1] + nbytes_of(tensor))
        described[tensor.key] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": ends[-2:]}
    header = encode_header(described)
    if len(header) - LENGTH.size > MAX_HEADER:
        raise ValueError(
            f"the header of a safetensors file with {len(ordered):,} tensors would have {len(header) - LENGTH.size:,} "
            f"bytes, and safetensors allows {MAX_HEADER:,}. Distribute the tensors over more files, or shorten their "
            f"names."
        )
    return SafetensorsLayout(ordered, tuple(len(header) + end for end in ends[:-1]), header, len(header) + ends[-1])


def file_names(count: int, of_save: str = "") -> list[str]:
    """Returns the names of the ``count`` files of a model with an index.

    If ``of_save``, the id of a save, is not empty, the names contain it, so that no other save uses them.
    """
    stem = f"model-{of_save}" if of_save else "model"
    return [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def index_of(files: Mapping[str, Sequence[Described]]) -> bytes:
    tensors = [tensor for of_file in files.values() for tensor in of_file]
    content = {
        "metadata": {
            "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
            "total_size": sum(map(nbytes_of, tensors)),
        },
        "weight_map": {tensor.key: name for name, of_file in files.items() for tensor in of_file},
    }
    return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"
