"""The values of a checkpoint of this package: of all ranks, or put together from what each rank saved for itself.

With ``use_collectives=False`` no rank knows what the others save. Chunks of one tensor at several places are that
tensor, and equal values are one value. If ranks have saved different ones by the same key, all are there: each by a key
that begins with its rank, as in ``rank1.generator``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from .._format.chunks import Region
from .._format.encryption import Cipher
from .._loading.validate import check_chunks, check_length, stored_item
from .._memory.tensor_bytes import host_bytes, named_dtype
from .._storage.base import Storage
from ..errors import ConversionError
from .checkpoint_view import (
    CheckpointView,
    StoredObject,
    StoredTensor,
    StoredValue,
    named_paths,
    recorded_path,
    saved_at,
)
from .chunk_reader import Chunk, read_region

__all__ = ["view_checkpoint"]

_OF_SUBCLASS = "is a tensor of a subclass, which only its own class can take apart"


def view_checkpoint(
    storage: Storage,
    parts: Mapping[int | None, Metadata],
    ciphers: Mapping[int | None, Cipher | None] | None = None,
) -> CheckpointView:
    """What a checkpoint holds.

    Args:
        storage: The checkpoint's directory.
        parts: See `read_parts`.
        ciphers: See `unlock_parts`; without them, reading what is encrypted is a `DecryptionError`.

    Raises:
        MetadataError: the stored chunks of a tensor do not make it up; names the key.
    """
    stored = _values_of_ranks(storage, parts, ciphers or {})
    values: dict[str, StoredValue] = {}
    for stored_key, (key, path) in named_paths({key: value.planner_data for key, value in stored.items()}).items():
        value = stored[stored_key]
        chunks = tuple(value.chunks.values())
        if value.is_tensor:
            check_chunks(storage.path, key, value.entry.size, [chunk.region for chunk in chunks])
            dtypes = [chunk.item.dtype for chunk in chunks if chunk.item.length]
            dtype = named_dtype(dtypes[0]) if dtypes else value.entry.properties.dtype
            read = functools.partial(read_region, storage, key, dtype, chunks, verify=True)
            if value.conflict:
                read, chunks = functools.partial(_refuse, f"{storage.path}: {value.conflict}"), ()
            values[key] = StoredTensor(key, path, dtype, tuple(value.entry.size), read, chunks)
        else:
            nbytes = sum(chunk.item.length for chunk in chunks)
            read_object = functools.partial(_read_bytes, storage, key, chunks)
            item = chunks[0].item if chunks else None
            fault = _OF_SUBCLASS if item is not None and item.kind == "wrapper" else ""
            values[key] = StoredObject(key, path, nbytes, read_object, item, fault)
    return CheckpointView(storage.path, "dcp_tensorizer", values, saved_at(parts))


@dataclass(frozen=True, slots=True)
class _Value:
    """What one rank has stored of a value, or all have.

    Attributes:
        planner_data: DCP's, with the key's path.
        entry: Of DCP's metadata.
        chunks: By their place in it.
        conflict: Why it cannot be read.
    """

    planner_data: Any
    entry: Any
    chunks: dict[torch.Size | None, Chunk]
    conflict: str = ""

    @property
    def is_tensor(self) -> bool:
        kinds = {chunk.item.kind for chunk in self.chunks.values()}
        return self._size is not None and kinds <= {"tensor"}

    @property
    def is_whole(self) -> bool:
        held = sum(math.prod(chunk.region.size) for chunk in self.chunks.values())
        return self._size is None or held == math.prod(self._size)

    def may_be_one_with(self, other: _Value) -> bool:
        """Whether both are objects, or chunks of tensors of one shape."""
        return self._size == other._size

    @property
    def _size(self) -> torch.Size | None:
        return self.entry.size if isinstance(self.entry, TensorStorageMetadata) else None


def _values_of_ranks(
    storage: Storage, parts: Mapping[int | None, Metadata], ciphers: Mapping[int | None, Cipher | None]
) -> dict[Any, _Value]:
    of_ranks: dict[Any, dict[int | None, _Value]] = {}
    for rank, metadata in parts.items():
        for key, entry in metadata.state_dict_metadata.items():
            chunks = _chunks(storage, metadata, key, entry, ciphers.get(rank))
            of_ranks.setdefault(key, {})[rank] = _Value(metadata.planner_data, entry, chunks)
    values: dict[Any, _Value] = {}
    apart: dict[Any, dict[int | None, _Value]] = {}
    for key, own in of_ranks.items():
        if _are_one(storage, str(key), list(own.values())):
            values[key] = _put_together(list(own.values()))
        elif all(value.is_whole for value in own.values()):
            apart[key] = own
        else:
            ranks = ", ".join(map(str, own))
            conflict = f"of {key!r}, ranks {ranks} saved for themselves (use_collectives=False) parts that differ"
            values[key] = replace(_put_together(list(own.values())), conflict=conflict)
    for key, own in apart.items():
        for rank, value in own.items():
            name = f"rank{rank}.{key}"
            while name in of_ranks or name in values:
                name += "_"
            path = recorded_path(value.planner_data, key) if isinstance(key, str) else (key,)
            values[name] = replace(value, planner_data={name: (f"rank{rank}", *path)})
    return values


def _are_one(storage: Storage, key: str, values: Sequence[_Value]) -> bool:
    """Whether ranks have stored parts or copies of one value."""
    one = _put_together(values)
    return all(
        values[0].may_be_one_with(value)
        and all(_are_same(storage, key, one.chunks[place], chunk) for place, chunk in value.chunks.items())
        for value in values
    )


def _put_together(values: Sequence[_Value]) -> _Value:
    """The value that ranks have stored parts of; of parts that several have, the first one's."""
    chunks: dict[torch.Size | None, Chunk] = {}
    for value in values:
        if values[0].may_be_one_with(value):
            chunks = value.chunks | chunks
    return replace(values[0], chunks=chunks)


def _are_same(storage: Storage, key: str, a: Chunk, b: Chunk) -> bool:
    """Whether two chunks hold the same bytes."""
    if a is b:
        return True
    if a.region != b.region or (a.item.length, a.item.dtype, a.item.kind) != (b.item.length, b.item.dtype, b.item.kind):
        return False
    if not a.item.nonce_and_macs and not b.item.nonce_and_macs:
        return a.item.digests == b.item.digests
    if a.cipher is None or b.cipher is None:  # digests are of what is encrypted, and nobody can tell without the key
        return True
    return _read_bytes(storage, key, [a]) == _read_bytes(storage, key, [b])


def _refuse(error: str, region: Region) -> torch.Tensor:
    raise ConversionError(error)


def _chunks(
    storage: Storage, metadata: Metadata, key: Any, entry: Any, cipher: Cipher | None
) -> dict[torch.Size | None, Chunk]:
    """The stored parts of a value, by their place in it."""
    sizes: dict[torch.Size | None, tuple[int, ...]] = {None: ()}
    if isinstance(entry, TensorStorageMetadata):
        sizes = {chunk.offsets: tuple(chunk.sizes) for chunk in entry.chunks}
    chunks: dict[torch.Size | None, Chunk] = {}
    for offset, size in sizes.items():
        item = stored_item(storage.path, metadata, MetadataIndex(key, offset))
        if item.kind == "tensor":
            check_length(storage.path, key, item, size)
        chunks[offset] = Chunk(Region(tuple(offset or ()), size), item, cipher=cipher)
    return chunks


def _read_bytes(storage: Storage, key: str, chunks: Sequence[Chunk]) -> bytes:
    """The stored bytes of some chunks, joined."""
    content = bytearray()
    for chunk in chunks:
        dtype = named_dtype(chunk.item.dtype)
        line = replace(chunk, region=Region((0,), (chunk.item.length // dtype.itemsize,)))
        content += host_bytes(read_region(storage, key, dtype, [line], line.region, verify=True))
    return bytes(content)
