"""From the index that ``.metadata`` holds to DCP's ``Metadata``."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from msgspec.msgpack import Ext
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from .._memory.garbage import collector_paused
from .._memory.tensor_bytes import named_dtype
from ..errors import CheckpointError, MetadataError
from .index import decoded, nonsense, read_head, read_seal, section_of
from .index_rows import (
    KINDS,
    Chunk,
    Entries,
    Head,
    ObjectEntry,
    Place,
    Properties,
    StrayEntry,
    TensorEntry,
    decode_entries,
    decode_paths,
    decode_places,
)
from .keys import ItemKey, from_key, from_text
from .layout import MAC_BYTES, NONCE_BYTES, StoredItem
from .objects import load_trusted

__all__ = ["decode"]

# A release of torch may have more of these fields, or fewer: only the dtype is not deprecated.
_FIELDS = {field.name for field in dataclasses.fields(TensorProperties)}


@collector_paused()
def decode(data: bytes, path: str) -> Metadata:
    """Checks and reads what `encode` made; ``path`` is for messages.

    Returns:
        DCP's metadata. Its ``storage_data`` is a dict: ``files`` and ``items`` as in `encode`; ``rank``;
        ``encryption``, where there is any: what `encryption.unlock` takes; and ``release``, ``torch`` and
        ``saved_at`` (nanoseconds).

    Raises:
        MetadataError: it is damaged, of another version or format, or makes no sense.
    """
    head = read_head(data, path)
    try:
        return _IndexReader(data, head, path).metadata()
    except CheckpointError:
        raise
    except (ValueError, LookupError, TypeError) as error:
        raise nonsense(path, f"{type(error).__name__}: {error}") from error


class _IndexReader:
    """Makes DCP's metadata of an index whose head has been read."""

    def __init__(self, data: bytes, head: Head, path: str) -> None:
        self._data = data
        self._head = head
        self._path = path
        self._dtypes = [_known_dtype(name, path) for name in head.dtypes]
        self._files = {file.name: file.nbytes for file in head.files}
        if len(self._files) < len(head.files):
            raise nonsense(path, "it names a data file twice")
        self._parts = [self._decoded(decode_places, section) for section in head.sections if section.kind == "places"]
        self._items: dict[ItemKey, StoredItem] = {}
        self._places = [*self._files.items(), ("", 0)]  # the last one for rows of file -1
        self._names = head.dtypes
        self._is_encrypted = head.encryption is not None

    def metadata(self) -> Metadata:
        head = self._head
        described = self._described()
        content: dict[str, Any] = {"files": self._files, "items": self._items, "rank": head.rank}
        content |= {"release": head.release, "torch": head.torch, "saved_at": head.saved_at}
        if head.encryption is not None:
            record = head.encryption
            content["encryption"] = {"derivation": record.derivation, "check": record.check}
            content["encryption"]["seal"] = read_seal(self._data)
        meta = StorageMeta(
            checkpoint_id=_maybe(head.checkpoint_id),
            save_id=_maybe(head.save_id),
            load_id=_maybe(head.load_id),
            modules=[from_text(module) for module in head.modules],
        )
        return Metadata(
            described,
            planner_data=self._planner_data(),
            storage_data=content,
            storage_meta=meta if head.has_storage_meta else None,
            version=_maybe(head.metadata_version),
        )

    def _decoded(self, decode_content: Any, section: Any) -> Any:
        return decoded(decode_content, section_of(self._data, section, self._path), self._path)

    def _planner_data(self) -> Any:
        for section in self._head.sections:
            if section.kind == "paths":
                return self._decoded(decode_paths, section)
            if section.kind == "planner":
                try:
                    return load_trusted(bytes(section_of(self._data, section, self._path)))
                except CheckpointError:
                    raise
                except Exception as error:
                    raise nonsense(self._path, f"its planner's data: {type(error).__name__}: {error}") from error
        return None

    def _described(self) -> dict[Any, TensorStorageMetadata | BytesStorageMetadata]:
        (section,) = (section for section in self._head.sections if section.kind == "entries")
        rows: Entries = self._decoded(decode_entries, section)
        properties = [self._properties(row) for row in rows.properties]
        described: dict[Any, TensorStorageMetadata | BytesStorageMetadata] = {}
        strays = 0
        for entry in rows.entries:
            key = entry.key if type(entry.key) is str else from_key(entry.key)
            if type(entry) is TensorEntry:
                size = torch.Size(entry.shape)
                chunks = [self._chunk(key, chunk, size) for chunk in entry.chunks]
                described[key] = TensorStorageMetadata(TensorProperties(**properties[entry.properties]), size, chunks)
            elif type(entry) is ObjectEntry:
                described[key] = BytesStorageMetadata()
                self._place(key, None, entry.part, entry.row)
            elif type(entry) is StrayEntry:
                strays += 1
                self._place(key, entry.offsets, entry.part, entry.row)
        if len(described) + strays < len(rows.entries):
            raise ValueError("it describes a key twice")
        return described

    def _chunk(self, key: Any, chunk: Chunk, size: torch.Size) -> ChunkStorageMetadata:
        offsets, sizes = chunk.offsets, chunk.sizes
        if offsets is None or sizes is None:
            offsets, start = _origin(len(size))
            extent = size
        elif len(offsets) == len(sizes) == len(size):
            start, extent = torch.Size(offsets), torch.Size(sizes)
        else:
            raise ValueError(f"a chunk of {key!r} has other dimensions than its tensor")
        self._place(key, offsets, chunk.part, chunk.row)
        return ChunkStorageMetadata(start, extent)

    def _properties(self, row: Properties) -> dict[str, Any]:
        values = {
            "dtype": self._dtypes[row.dtype],
            "layout": _named(row.layout, torch.layout),
            "requires_grad": row.requires_grad,
            "memory_format": _named(row.memory_format, torch.memory_format),
            "pin_memory": row.pin_memory,
        }
        return {name: value for name, value in values.items() if name in _FIELDS}

    def _place(self, key: Any, offsets: tuple[int, ...] | None, part: int, number: int) -> None:
        """Takes an item's place, unless it has none."""
        if part < 0:
            return
        row: Place = self._parts[part][number]
        file, file_nbytes = self._places[row.file]
        name = key if row.name is None else row.name
        item = StoredItem(
            file,
            name,
            row.offset,
            row.nbytes,
            self._names[row.dtype],
            KINDS[row.kind],
            row.digests,
            row.nonce_and_macs,
        )
        if item.offset + item.length > file_nbytes or type(name) is not str:
            raise ValueError(f"the data of {key!r} is in no file")
        if row.kind and item.dtype != "uint8":
            raise ValueError(f"{key!r} is an object of {item.dtype}")
        if self._is_encrypted or row.nonce_and_macs:
            self._check_encrypted(key, item)
        self._items[key, offsets] = item

    def _check_encrypted(self, key: Any, item: StoredItem) -> None:
        """Checks that an item of an encrypted checkpoint is encrypted: what somebody put there is not believed."""
        sealed = NONCE_BYTES + -(-item.length // item.block) * MAC_BYTES if item.length else 0
        if not self._is_encrypted or len(item.nonce_and_macs) != sealed:
            raise ValueError(f"the data of {key!r} is not encrypted as the checkpoint is")


@functools.cache
def _origin(dimensions: int) -> tuple[tuple[int, ...], torch.Size]:
    """Where a tensor begins."""
    start = (0,) * dimensions
    return start, torch.Size(start)


def _maybe(text: str | Ext | None) -> str | None:
    return None if text is None else from_text(text)


def _known_dtype(name: str, path: str) -> torch.dtype:
    try:
        return named_dtype(name)
    except TypeError:
        raise MetadataError(
            f"{path} has tensors of dtype {name!r}, which torch {torch.__version__} has not: install a newer one"
        ) from None


def _named(name: str, kind: type) -> Any:
    value = vars(torch).get(name)
    if not isinstance(value, kind):
        raise ValueError(f"torch has no {kind.__name__} {name!r}")
    return value
