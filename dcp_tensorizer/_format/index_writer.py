"""From DCP's ``Metadata`` to the index that ``.metadata`` holds of it."""

from __future__ import annotations

import functools
import io
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

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
from ..errors import WriteError
from .encryption import Cipher
from .index import Part, pack
from .index_rows import (
    KINDS,
    Chunk,
    DataFile,
    Entries,
    Head,
    KeyRecord,
    ObjectEntry,
    Place,
    Properties,
    StrayEntry,
    TensorEntry,
    encode_rows,
)
from .keys import ItemKey, to_key, to_text
from .layout import StoredItem, data_file_rank
from .objects import load_trusted, unsafe_globals

__all__ = ["encode"]

_KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
_NOWHERE = (-1, 0)  # section of places and row there, of what has none


@collector_paused()
def encode(metadata: Metadata, *, rank: int | None = None, cipher: Cipher | None = None) -> bytes:
    """The contents of ``.metadata``.

    Args:
        metadata: DCP's. Its ``storage_data`` has ``files``, the bytes in each data file by name, and ``items``, a
            `StoredItem` for each `item_key`.
        rank: Whose own it is, where each rank saves for itself.
        cipher: The key of an encrypted checkpoint.

    Raises:
        WriteError: no reader could read it; names the key.
    """
    writer = _IndexWriter(metadata.storage_data["files"], metadata.storage_data["items"])
    entries = writer.entries(metadata.state_dict_metadata)
    parts = [Part("entries", None, encode_rows(entries)), *_planner_part(metadata.planner_data), *writer.places()]
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
        files=[DataFile(name, nbytes) for name, nbytes in writer.files.items()],
        dtypes=list(writer.dtypes),
        encryption=None if cipher is None else KeyRecord(**cipher.record()),
        sections=[],
    )
    return pack(head, parts, None if cipher is None else cipher.sign)


@functools.cache
def _release() -> str:
    return version("dcp_tensorizer")


def _optional_text(value: Any) -> str | Ext | None:
    return None if value is None else to_text(str(value))


class _IndexWriter:
    """Makes rows of what was saved, and of where it is.

    Attributes:
        files: Bytes of each data file.
        dtypes: The numbers of dtypes' names.
    """

    def __init__(self, files: Mapping[str, int], items: Mapping[ItemKey, StoredItem]) -> None:
        self.files = files
        self.dtypes: dict[str, int] = {}
        self._parts: dict[int | None, list[Place]] = {}
        self._numbers: dict[int | None, int] = {}
        self._placed = self._place_items(items)

    def _place_items(self, items: Mapping[ItemKey, StoredItem]) -> dict[ItemKey, tuple[int, int]]:
        """Makes a row of each item; gives the section and the row of each."""
        file_numbers = {name: number for number, name in enumerate(self.files)}
        ranks: dict[str, int | None] = {name: data_file_rank(name) for name in self.files}
        ranks[""] = None
        placed: dict[ItemKey, tuple[int, int]] = {}
        for key, item in items.items():
            rank = ranks[item.file]
            rows = self._parts.setdefault(rank, [])
            placed[key] = (self._numbers.setdefault(rank, len(self._numbers)), len(rows))
            rows.append(
                Place(
                    file_numbers.get(item.file, -1),
                    item.offset,
                    item.length,
                    self._dtype(item.dtype),
                    _KIND_NUMBERS[item.kind],
                    None if item.name == key[0] else item.name,
                    item.digests,
                    item.nonce_and_macs,
                )
            )
        return placed

    def _dtype(self, name: str) -> int:
        return self.dtypes.setdefault(name, len(self.dtypes))

    def places(self) -> list[Part]:
        """A section for each rank."""
        return [Part("places", rank, encode_rows(rows)) for rank, rows in self._parts.items()]

    def entries(self, described: Mapping[Any, Any]) -> Entries:
        """The state dict, as DCP describes it, and what is stored beside that."""
        properties: dict[tuple[Any, ...], int] = {}
        entries: list[TensorEntry | ObjectEntry | StrayEntry] = []
        used: set[ItemKey] = set()
        for key, entry in described.items():
            try:
                entries.append(self._entry(key, entry, properties, used))
            except (TypeError, ValueError, OverflowError) as error:
                raise WriteError(f"{key!r} cannot be described in a checkpoint's metadata: {error}") from error
        strays = {item: place for item, place in self._placed.items() if item not in used}
        entries += [StrayEntry(to_key(key), offset, *place) for (key, offset), place in strays.items()]
        return Entries([Properties(*row) for row in properties], entries)

    def _entry(
        self, key: Any, entry: Any, properties: dict[tuple[Any, ...], int], used: set[ItemKey]
    ) -> TensorEntry | ObjectEntry:
        if isinstance(entry, BytesStorageMetadata):
            used.add((key, None))
            return ObjectEntry(to_key(key), *self._placed.get((key, None), _NOWHERE))
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError(f"the planner says that it is a {type(entry).__module__}.{type(entry).__qualname__}")
        shape = tuple(entry.size)
        number = properties.setdefault(self._properties(entry.properties), len(properties))
        chunks = []
        for chunk in entry.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            if not len(offsets) == len(sizes) == len(shape):
                raise ValueError(f"a chunk of shape {sizes} at {offsets} is none of a tensor of shape {shape}")
            used.add((key, offsets))
            is_whole = sizes == shape and not any(offsets)
            place = self._placed.get((key, offsets), _NOWHERE)
            chunks.append(Chunk(*place, None, None) if is_whole else Chunk(*place, offsets, sizes))
        return TensorEntry(to_key(key), number, shape, chunks)

    def _properties(self, properties: TensorProperties) -> tuple[Any, ...]:
        return (
            self._dtype(dtype_name(properties.dtype)),
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
        load_trusted(stream.getvalue())
    except Exception as error:
        refused = ", ".join(unsafe_globals(stream.getvalue())) or f"{type(error).__name__}: {error}"
        raise WriteError(
            f"the planner put something into it that no reader would load ({refused}): planner data must pass the "
            f"weights-only rules of torch.load"
        ) from error
    return [Part("planner", None, stream.getvalue())]


def _are_paths(data: Any) -> bool:
    """Whether something is what torch's own planners put into the metadata: paths of strings and numbers, by key."""
    return type(data) is dict and all(
        type(key) is str and type(path) is tuple and all(type(part) in (str, int) for part in path)
        for key, path in data.items()
    )
