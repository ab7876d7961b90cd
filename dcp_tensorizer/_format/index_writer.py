"""From DCP's ``Metadata`` to the index that ``.metadata`` holds of it."""

from __future__ import annotations

import functools
import io
import itertools
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from msgspec.msgpack import Ext
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from .._memory.garbage import collector_paused
from .._memory.tensor_bytes import dtype_name
from ..errors import WriteError, describe
from .chunk_layout import ChunkLayout, runs_of
from .encryption import Cipher
from .index import Part, pack
from .index_rows import (
    DataFile,
    Entries,
    Head,
    KeyRecord,
    ObjectEntry,
    Properties,
    Run,
    SaveRecord,
    TensorEntry,
    decode_places,
    encode_rows,
)
from .keys import to_key, to_text
from .layout import MAX_INLINE_BYTES
from .objects import load_object
from .places import InlineItem, RankPlaces, hash_of, hashes_of, inline_rows

__all__ = ["encode"]


@collector_paused()
def encode(
    metadata: Metadata,
    parts: Sequence[RankPlaces],
    *,
    rank: int | None = None,
    cipher: Cipher | None = None,
    record: SaveRecord | None = None,
) -> bytes:
    """The contents of ``.metadata``.

    Args:
        metadata: DCP's.
        parts: What each rank has written. Of a chunk that several have written, the last one's is used.
        rank: Whose own it is, where each rank saves for itself.
        cipher: The key of an encrypted checkpoint.
        record: What a manager says of the save.

    Raises:
        WriteError: no reader could read it; names the key.
    """
    writer = _EntryWriter(parts)
    entries = writer.entries(metadata.state_dict_metadata)
    sections = [Part("entries", None, encode_rows(entries)), *_planner_part(metadata.planner_data)]
    if inline := _inline(parts):
        sections.append(Part("inline", None, encode_rows(inline_rows(inline))))
    sections += [
        Part("places", part.rank, part.places, tuple(DataFile(*file) for file in part.files)) for part in parts
    ]
    meta = metadata.storage_meta or StorageMeta()
    head = Head(
        release=_release(),
        torch=str(torch.__version__),
        saved_at=time.time_ns(),
        rank=rank,
        has_storage_meta=metadata.storage_meta is not None,
        save_id=_optional_text(meta.save_id),
        load_id=_optional_text(meta.load_id),
        checkpoint_id=_optional_text(meta.checkpoint_id),
        modules=[to_text(str(module)) for module in meta.modules],
        metadata_version=_optional_text(metadata.version),
        encryption=None if cipher is None else KeyRecord(**cipher.record()),
        sections=[],
        record=record,
    )
    return pack(head, sections, None if cipher is None else cipher.sign)


def _inline(parts: Sequence[RankPlaces]) -> list[InlineItem]:
    """The small items of all ranks, as many as the index has room for."""
    items = [item for part in parts for item in part.inline]
    ends = itertools.accumulate(len(item.content) for item in items)
    return [item for item, end in zip(items, ends, strict=True) if end <= MAX_INLINE_BYTES]


@functools.cache
def _release() -> str:
    return version("dcp_tensorizer")


def _optional_text(value: Any) -> str | Ext | None:
    return None if value is None else to_text(str(value))


class _EntryWriter:
    """Makes rows of the state dict, and finds out who has which chunk."""

    def __init__(self, parts: Sequence[RankPlaces]) -> None:
        rows = [decode_places(part.places) for part in parts]
        hashes = [np.frombuffer(row.hashes, dtype="<u8") for row in rows]
        owners = np.repeat(np.arange(len(rows)), [len(of) for of in hashes])
        hashed = np.concatenate([*hashes, np.zeros(0, dtype="<u8")])
        order = np.argsort(hashed, kind="stable")  # of equal ones, the last rank's stays the last
        self._hashes, self._owners = hashed[order], owners[order]
        self._is_tensor = (
            np.concatenate([*(np.frombuffer(row.kinds, dtype="u1") for row in rows), _NO_KINDS])[order] == 0
        )
        self._properties: dict[Properties, int] = {}
        self._layouts: dict[tuple[Any, ...], tuple[int, ChunkLayout]] = {}
        self._runs: dict[bytes, tuple[int, list[Run]]] = {}

    def entries(self, described: Mapping[Any, Any]) -> Entries:
        """The state dict, as DCP describes it."""
        made: list[tuple[Any, int, int, ChunkLayout | None]] = []  # key, rows of its properties and layout, the layout
        wanted: list[int] = []
        for key, entry in described.items():
            try:
                made.append(self._described(key, entry))
                layout = made[-1][-1]
                wanted += [hash_of(key, None)] if layout is None else hashes_of(key, layout.packed_offsets)
            except (TypeError, ValueError, OverflowError) as error:
                raise WriteError(f"{key!r} cannot be described in a checkpoint's metadata: {error}") from error
        owners, are_tensors = self._find(np.array(wanted, dtype="<u8"))
        entries: list[TensorEntry | ObjectEntry] = []
        first = 0
        for key, properties, number, layout in made:
            if layout is None:
                entries.append(ObjectEntry(to_key(key), int(owners[first])))
                first += 1
                continue
            chunks = slice(first, first + len(layout))
            is_whole = bool(are_tensors[chunks].all()) and layout.is_covered
            entries.append(TensorEntry(to_key(key), properties, number, self._run(owners[chunks]), is_whole))
            first = chunks.stop
        layouts = [layout.to_row() for _, layout in self._layouts.values()]
        return Entries(list(self._properties), layouts, [runs for _, runs in self._runs.values()], entries)

    def _described(self, key: Any, entry: Any) -> tuple[Any, int, int, ChunkLayout | None]:
        if isinstance(entry, BytesStorageMetadata):
            return key, -1, -1, None
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError(f"the planner says that it is a {type(entry).__module__}.{type(entry).__qualname__}")
        properties = self._properties.setdefault(_properties(entry.properties), len(self._properties))
        layout = ChunkLayout.of(entry.size, ((chunk.offsets, chunk.sizes) for chunk in entry.chunks))
        return key, properties, *self._layouts.setdefault(_identity(layout), (len(self._layouts), layout))

    def _find(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Who has each item (-1: nobody), and whether that is stored as a tensor's elements."""
        if not len(self._hashes):
            return np.full(len(wanted), -1), np.zeros(len(wanted), dtype=bool)
        rows = np.maximum(np.searchsorted(self._hashes, wanted, side="right") - 1, 0)
        is_there = self._hashes[rows] == wanted
        return np.where(is_there, self._owners[rows], -1), is_there & self._is_tensor[rows]

    def _run(self, owners: np.ndarray) -> int:
        """The row of some owners, made if there is none."""
        name = owners.tobytes()
        if name not in self._runs:
            self._runs[name] = len(self._runs), runs_of(owners)
        return self._runs[name][0]


_NO_KINDS = np.zeros(0, dtype="u1")


def _identity(layout: ChunkLayout) -> tuple[Any, ...]:
    return layout.shape, layout.is_one, layout.starts.tobytes(), layout.sizes.tobytes()


def _properties(properties: TensorProperties) -> Properties:
    return Properties(
        dtype_name(properties.dtype),
        _torch_name(getattr(properties, "layout", torch.strided)),
        bool(getattr(properties, "requires_grad", False)),
        _torch_name(getattr(properties, "memory_format", torch.contiguous_format)),
        bool(getattr(properties, "pin_memory", False)),
    )


@functools.cache
def _torch_name(value: torch.layout | torch.memory_format) -> str:
    return str(value).removeprefix("torch.")


def _planner_part(data: Any) -> list[Part]:
    """What a planner put into the metadata: of torch's own, the path of each key; else what ``torch.save`` makes of it.

    Raises:
        WriteError: no reader would load it.
    """
    if data is None:
        return []
    if _are_paths(data):
        try:
            return [Part("paths", None, encode_rows(data))]
        except (UnicodeEncodeError, OverflowError):
            pass  # strings and numbers that MessagePack does not have
    stream = io.BytesIO()
    try:
        torch.save(data, stream)
    except Exception as error:
        raise WriteError(f"what the planner put into it cannot be stored: {type(error).__name__}: {error}") from error
    try:
        load_object(stream.getvalue())
    except Exception as error:
        raise WriteError(f"the planner put something into it that no reader would load: {describe(error)}") from error
    return [Part("planner", None, stream.getvalue())]


def _are_paths(data: Any) -> bool:
    """Whether something is what torch's own planners put into the metadata: paths of strings and numbers, by key."""
    return type(data) is dict and all(
        type(key) is str and type(path) is tuple and all(type(part) in (str, int) for part in path)
        for key, path in data.items()
    )
