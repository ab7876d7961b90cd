"""DCP's ``Metadata`` and the index that ``.metadata`` holds of it: one is made of the other."""

from __future__ import annotations

import dataclasses
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
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from .._memory.garbage import collector_paused
from .._memory.tensor_bytes import dtype_name, named_dtype
from ..errors import CheckpointError, MetadataError, WriteError
from .encryption import Cipher
from .index import Part, decoded, nonsense, pack, read_head, read_seal, section_of
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
    decode_entries,
    decode_paths,
    decode_places,
    encode_rows,
)
from .keys import from_key, from_text, to_key, to_text
from .layout import MAC_BYTES, NONCE_BYTES, StoredItem, data_file_rank
from .objects import load_trusted, unsafe_globals

__all__ = ["ItemKey", "decode", "encode", "item_key"]

ItemKey = tuple[Any, tuple[int, ...] | None]

_KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
# A release of torch may have more of these fields, or fewer: only the dtype is not deprecated.
_FIELDS = {field.name for field in dataclasses.fields(TensorProperties)}
_NOWHERE = (-1, 0)  # section of places and row there, of what has none


def item_key(index: MetadataIndex) -> ItemKey:
    """The key of an item in ``storage_data["items"]``: builtin types only."""
    return index.fqn, None if index.offset is None else tuple(index.offset)


# --- writing -------------------------------------------------------------------------------------------------------


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


# --- reading -------------------------------------------------------------------------------------------------------


@collector_paused()
def decode(data: bytes, path: str) -> Metadata:
    """Checks and reads what `encode` made; ``path`` is for messages.

    Returns:
        DCP's metadata. Its ``storage_data`` is a dict: ``files`` and ``items`` as in `encode`; ``rank``; ``encryption``,
        where there is any: what `encryption.unlock` takes; and ``release``, ``torch`` and ``saved_at`` (nanoseconds).

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
        """Checks that an item of an encrypted checkpoint is encrypted; else what somebody put there would be believed."""
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
