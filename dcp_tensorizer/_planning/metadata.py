"""torch's ``Metadata``, sent from rank to rank as rules.

DCP broadcasts the coordinator's at the end of each save, and most ranks never look at it. Tensors of one shape are
sharded in the same way: so few lists of chunks are sent, and decoded when somebody looks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from .._memory.garbage import collector_paused
from .columns import Integers, Spec, Unsupported, spec_of
from .paths import pack_paths, unpack_paths, with_keys
from .wire import pack, pack_integers, unpack, unpack_integers

__all__ = ["RuleMetadata", "chunk_list", "describe"]

_FIELDS = [field.name for field in dataclasses.fields(Metadata)]
_UNDERSTOOD = _FIELDS == ["state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"]


class RuleMetadata(Metadata):
    """torch's ``Metadata``, whose pickle is small. A storage writer that fills ``storage_data`` gets torch's pickle."""

    __hash__ = None  # type: ignore[assignment]

    @functools.cached_property
    def _packed(self) -> Any:
        return unpack(self.__dict__["_content"])

    @functools.cached_property
    def state_dict_metadata(self) -> dict[str, Any]:  # type: ignore[override]
        """As torch's; where it was received it is decoded when it is asked for."""
        return _decoded(*self._packed[0])

    @functools.cached_property
    def planner_data(self) -> Any:
        """As torch's; where it was received it is decoded when it is asked for."""
        described, paths = self._packed
        return unpack_paths(with_keys(paths, described[0]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Metadata):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _FIELDS)

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            if self.storage_data is not None or not _UNDERSTOOD:
                raise Unsupported
            return self._received, (self._data(), self.storage_meta, self.version)
        except Unsupported:  # also what lies in a checkpoint of torch's: it is read without this package
            return Metadata, tuple(getattr(self, name) for name in _FIELDS)

    @classmethod
    def _received(cls, data: bytes, storage_meta: StorageMeta | None, version: str | None) -> RuleMetadata:
        metadata = cls.__new__(cls)
        metadata.__dict__.update(_content=data, storage_data=None, storage_meta=storage_meta, version=version)
        return metadata

    def _data(self) -> bytes:
        untouched = not {"state_dict_metadata", "planner_data"} & self.__dict__.keys()
        if untouched:
            data: bytes = self.__dict__["_content"]
            return data
        described = _encoded(self.state_dict_metadata)
        return pack((described, pack_paths(self.planner_data, described[0])))


def describe(spec: Spec, chunks: list[ChunkStorageMetadata]) -> TensorStorageMetadata:
    """The entry of a tensor, with a list and properties of its own."""
    return TensorStorageMetadata(TensorProperties(*spec.properties), torch.Size(spec.shape), list(chunks))


def chunk_list(dims: Integers, starts: Integers, sizes: Integers) -> list[ChunkStorageMetadata]:
    """Chunks as DCP has them."""
    rows = zip(dims.tolist(), starts.tolist(), sizes.tolist(), strict=True)
    return [ChunkStorageMetadata(torch.Size(start[:n]), torch.Size(size[:n])) for n, start, size in rows]


def _encoded(described: Mapping[Any, Any]) -> Any:
    """Keys, the specs and lists of chunks, and the numbers of those of each key (-1: it is an object)."""
    specs: dict[Spec, int] = {}
    patterns: dict[tuple[int, ...], int] = {}
    lists: list[Any] = []
    rows: list[tuple[int, int]] = []
    for key, entry in described.items():
        if type(key) is not str:
            raise Unsupported
        if type(entry) is BytesStorageMetadata:
            rows.append((-1, -1))
            continue
        if type(entry) is not TensorStorageMetadata or type(entry.chunks) is not list:
            raise Unsupported
        same = tuple(map(id, entry.chunks))  # tensors that are sharded in the same way share their chunks
        if same not in patterns:
            patterns[same] = len(lists)
            lists.append(_pack_chunks(entry.chunks))
        rows.append((specs.setdefault(spec_of(entry.size, entry.properties), len(specs)), patterns[same]))
    packed = [(spec.shape, TensorProperties(*spec.properties)) for spec in specs]
    return list(described), pack_integers(np.array(rows, dtype=np.int64)), packed, lists


def _pack_chunks(chunks: list[ChunkStorageMetadata]) -> Any:
    if any(type(chunk) is not ChunkStorageMetadata or len(chunk.offsets) != len(chunk.sizes) for chunk in chunks):
        raise Unsupported
    dims = [len(chunk.sizes) for chunk in chunks]
    width = max(dims, default=0)
    places = [
        ((*chunk.offsets, *(0,) * (width - n)), (*chunk.sizes, *(0,) * (width - n)))
        for n, chunk in zip(dims, chunks, strict=True)
    ]
    return width, pack_integers(np.array(dims, dtype=np.int64)), pack_integers(np.array(places, dtype=np.int64))


def _unpack_chunks(width: int, dims: Any, places: Any) -> list[ChunkStorageMetadata]:
    numbers = unpack_integers(dims)
    array = unpack_integers(places).reshape(len(numbers), 2, width)
    return chunk_list(numbers, array[:, 0], array[:, 1])


@collector_paused()
def _decoded(keys: list[str], rows: Any, specs: list[Any], lists: list[Any]) -> dict[str, Any]:
    chunks = [_unpack_chunks(*packed) for packed in lists]
    entries = [spec_of(shape, properties) for shape, properties in specs]
    numbers = unpack_integers(rows).reshape(-1, 2).tolist()
    return {
        key: BytesStorageMetadata() if spec < 0 else describe(entries[spec], chunks[pattern])
        for key, (spec, pattern) in zip(keys, numbers, strict=True)
    }
