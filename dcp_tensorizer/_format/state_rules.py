"""DCP's ``state_dict_metadata`` as rules: which of a few layouts, and of a few properties, each tensor has.

Tensors of one shape are mostly sharded in the same way. So rules stay small over however many ranks, where DCP has an
object for each chunk. The index of a checkpoint is made of them, and `SavePlanner` makes and sends them.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from .._memory.tensor_bytes import dtype_name
from ..errors import WriteError
from .chunk_layout import ChunkLayout
from .index_rows import Properties, encode_rows
from .keys import to_key

__all__ = ["StateRules"]


@dataclass(frozen=True, eq=False)
class StateRules:
    """The entries of a state dict.

    Attributes:
        keys: In their order.
        rows: For each key, the numbers of its properties and of its layout; both -1: it is an object.
        properties: DCP's; they are not changed.
        layouts: With the tensors' shapes.
    """

    keys: list[Any]
    rows: NDArray[np.int64]
    properties: list[TensorProperties]
    layouts: list[ChunkLayout]

    @classmethod
    def of(cls, described: Mapping[Any, Any]) -> StateRules:
        """From DCP's entries.

        Raises:
            WriteError: one of them is none of DCP's, or makes no sense; names its key.
        """
        maker = _Maker()
        rows = [maker.row_of(key, entry) for key, entry in described.items()]
        numbers = np.array(rows, dtype=np.int64).reshape(-1, 2)
        return cls(list(described), numbers, maker.properties, maker.layouts)

    def described(self) -> dict[Any, Any]:
        """DCP's entries, new ones: whoever gets them may change them."""
        lists = [layout.chunks() for layout in self.layouts]
        entries: dict[Any, Any] = {}
        for key, (properties, layout) in zip(self.keys, self.rows.tolist(), strict=True):
            if layout < 0:
                entries[key] = BytesStorageMetadata()
                continue
            own, size = copy.copy(self.properties[properties]), torch.Size(self.layouts[layout].shape)
            entries[key] = TensorStorageMetadata(own, size, list(lists[layout]))
        return entries

    @functools.cached_property
    def packed_keys(self) -> list[bytes]:
        """The MessagePack of each key; raises `WriteError` if a key has none."""
        return [_packed(key) for key in self.keys]

    @functools.cached_property
    def property_rows(self) -> list[Properties]:
        """The properties as an index has them."""
        return list(map(_row, self.properties))

    @functools.cached_property
    def digest(self) -> bytes:
        """Of everything that an index says of the entries."""
        state = xxhash.xxh3_128(encode_rows((self.packed_keys, self.property_rows)))
        state.update(self.rows.tobytes())
        for layout in self.layouts:
            state.update(layout.identity)
        return state.digest()


class _Maker:
    """Numbers properties and layouts."""

    def __init__(self) -> None:
        self.properties: list[TensorProperties] = []
        self.layouts: list[ChunkLayout] = []
        self._known_properties: dict[Any, int] = {}
        self._known_chunks: dict[tuple[Any, ...], int] = {}

    def row_of(self, key: Any, entry: Any) -> tuple[int, int]:
        if isinstance(entry, BytesStorageMetadata):
            return -1, -1
        try:
            if not isinstance(entry, TensorStorageMetadata):
                raise TypeError(f"the planner says that it is a {type(entry).__module__}.{type(entry).__qualname__}")
            return self._number_of_properties(entry.properties), self._number_of_layout(entry)
        except (TypeError, ValueError, OverflowError) as error:
            raise _undescribed(key, error) from error

    def _number_of_properties(self, properties: TensorProperties) -> int:
        number = self._known_properties.setdefault(tuple(vars(properties).values()), len(self.properties))
        if number == len(self.properties):
            _row(properties)  # now, while the key is known
            self.properties.append(properties)
        return number

    def _number_of_layout(self, entry: TensorStorageMetadata) -> int:
        # To compare tuples takes a tenth of the time that it takes to make arrays of them.
        chunks = entry.chunks
        same = (tuple(entry.size), *[tuple(c.offsets) for c in chunks], *[tuple(c.sizes) for c in chunks])
        number = self._known_chunks.get(same)
        if number is None:
            layout = ChunkLayout.of(entry.size, ((chunk.offsets, chunk.sizes) for chunk in chunks))
            number = self._known_chunks[same] = len(self.layouts)
            self.layouts.append(layout)
        return number


def _packed(key: Any) -> bytes:
    try:
        return encode_rows(to_key(key))
    except (TypeError, ValueError, OverflowError) as error:
        raise _undescribed(key, error) from error


def _undescribed(key: Any, error: Exception) -> WriteError:
    return WriteError(f"{key!r} cannot be described in a checkpoint's metadata: {error}")


def _row(properties: TensorProperties) -> Properties:
    return Properties(
        dtype_name(properties.dtype),
        _torch_name(getattr(properties, "layout", torch.strided)),
        bool(getattr(properties, "requires_grad", False)),
        _torch_name(getattr(properties, "memory_format", torch.contiguous_format)),
        bool(getattr(properties, "pin_memory", False)),
        getattr(properties, "strides", None),
    )


@functools.cache
def _torch_name(value: torch.layout | torch.memory_format) -> str:
    return str(value).removeprefix("torch.")
