"""This package's own checkpoints, read through the index in ``.metadata``."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

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
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from .._index import container
from .._index.container import IndexFile, committed, decoded, invalid_index
from .._index.entries import TensorValue, Value, values_of
from .._index.layouts import ChunkLayout
from .._index.locations import LocationTable, hash_of, known_dtype
from .._index.schema import (
    ItemKey,
    Places,
    Properties,
    Section,
    SectionKind,
    decode_entries,
    decode_inline,
    decode_paths,
    decode_places,
    from_text,
)
from .._runtime.interpreter import collector_paused
from .._runtime.threads import in_threads
from .._tensor_file.names import StoredItem, metadata_file_name
from .._tensor_file.regions import Region
from .._trust.objects import load_object
from ..errors import CheckpointError, MetadataError, UntrustedObject
from .catalog import Catalog, Piece, no_data
from .recognise import nothing_committed

if TYPE_CHECKING:
    from .._storage.base import Storage

# The fields depend on the release of torch: all but the dtype are deprecated.
_FIELDS = {field.name for field in dataclasses.fields(TensorProperties)}


def decode(data: bytes, path: str) -> Metadata:
    """Decodes a whole index. Raises `MetadataError`, naming ``path``, if it is damaged or of another version."""
    return Index(IndexFile(path, container.read_head(data, path), data)).stored_metadata()


def read_index(storage: Storage, rank: int | None = None) -> Index | None:
    """Reads and checks a checkpoint's index, of all ranks or of one. If there is no index, returns None.

    The locations of a large index are read on demand. Raises `MetadataError` if the index is damaged, has another
    format or version, or is the index of other ranks, and `ReadError` if the index cannot be read.
    """
    name = metadata_file_name(rank)
    file = committed(storage, name)
    if file is None:
        return None
    index = Index(file)
    own = file.head.rank
    if own != rank:
        whose = "all ranks" if own is None else f"rank {own}"
        raise MetadataError(
            f"{file.path} is the metadata of {whose}: files were swapped or renamed. Load another checkpoint."
        )
    return index


def read_metadata(storage: Storage, rank: int | None = None) -> Metadata | None:
    """Returns the `Index.stored_metadata` of a checkpoint. If there is no index, returns None.

    Raises what `read_index` raises.
    """
    index = read_index(storage, rank)
    return None if index is None else index.stored_metadata()


def check_world_size(storage: Storage, has_own: bool, world_size: int) -> None:
    """Checks that as many ranks load a checkpoint as saved it, if each rank saved by itself.

    All ranks check for the metadata of the same ranks, so that all notice a difference. ``has_own`` is whether this
    rank's own metadata exists. Raises `NotCommitted` if rank 0 has no metadata, and `MetadataError` if another number
    of ranks saved the checkpoint, or if this rank's own metadata is missing.
    """
    if storage.head(metadata_file_name(0)) is None:
        raise nothing_committed(storage)
    has_last = storage.head(metadata_file_name(world_size - 1)) is not None
    if not has_own or not has_last or storage.head(metadata_file_name(world_size)) is not None:
        raise MetadataError(
            f"{storage.path} was saved with use_collectives=False, each rank by itself, by a number of ranks that "
            f"differs from the {world_size} that load it, or the metadata of a rank is missing. Load it with as many "
            f"ranks as saved it, or load another checkpoint."
        )


class Index(Catalog):
    """A checkpoint's index, whose locations are read on demand. Raises `MetadataError` if it is damaged."""

    has_digests = True

    def __init__(self, file: IndexFile) -> None:
        self.path = file.path
        self.files = file.files
        self._file = file
        self._known_properties: dict[Properties, dict[str, Any]] = {}  # tensors share few distinct ones
        with _valid(self.path), collector_paused():
            self._sections = [section for section in file.head.sections if section.kind == "places"]
            self._tables: dict[int, LocationTable] = {}  # by section number
            self._inline: LocationTable | None = None
            # The index has copies of small values. Their locations refer to a file in memory, named like the index.
            inline, content = metadata_file_name(file.head.rank), b""
            if (section := self._section("inline")) is not None:
                rows = decoded(decode_inline, file.section(section), file.path)
                content = rows.content
                self._inline = self._table(rows.places, [(inline, len(content))])
            self.in_memory = {inline: content}
            section = self._section("entries")
            assert section is not None
            self._values = values_of(decoded(decode_entries, file.section(section), file.path), self._sections)
        if (key := file.head.encryption) is not None:
            self.encryption = {"derivation": key.derivation, "check": key.check, "seal": file.seal}

    def metadata(self, *, whole: bool = True) -> Metadata:
        """Returns DCP's metadata for a load.

        With ``whole``, describes a tensor as one chunk if its stored chunks cover it. Tensors with equal descriptions
        then share one object. Without ``whole``, describes all chunks as they are stored.
        """
        head = self._file.head
        with _valid(self.path), collector_paused():
            if whole:
                shared = {value: self._described(value, whole=True) for value in set(self._values.values())}
                described = {key: shared[value] for key, value in self._values.items()}
            else:
                described = {key: self._described(value, whole=False) for key, value in self._values.items()}
            meta = StorageMeta(
                checkpoint_id=_maybe(head.checkpoint_id),
                save_id=_maybe(head.save_id),
                load_id=_maybe(head.load_id),
                modules=[from_text(module) for module in head.modules],
            )
            return Metadata(
                described,
                planner_data=self._planner_data(),
                storage_data={
                    "rank": head.rank,
                    "release": head.release,
                    "torch": head.torch,
                    "saved_at": head.saved_at,
                    "record": head.record,
                },
                storage_meta=meta if head.has_storage_meta else None,
                version=_maybe(head.metadata_version),
            )

    def stored_metadata(self) -> Metadata:
        """Returns DCP's metadata with all chunks as they are stored.

        The ``storage_data`` is a dict: ``files``, the size of each data file by name; ``items``, a `StoredItem` for
        each `item_key`; ``rank``; ``encryption``, for encrypted checkpoints; ``release``, ``torch`` and ``saved_at``;
        and ``record``, a manager's `SaveRecord` or None.
        """
        metadata = self.metadata(whole=False)
        with _valid(self.path), collector_paused():
            metadata.storage_data |= {"files": self.files, "items": self._items()}
        if self.encryption is not None:
            metadata.storage_data["encryption"] = self.encryption
        return metadata

    def incomplete_layouts(self) -> dict[Any, ChunkLayout]:
        """Returns the layouts of tensors that are not recorded as covered: `metadata` describes their stored chunks."""
        values = self._values.items()
        return {key: value.layout for key, value in values if type(value) is TensorValue and not value.is_whole}

    def _owners(self, key: Any, offset: tuple[int, ...] | None, region: Region | None) -> Iterable[int]:
        """Returns the numbers of the sections to search for locations of an object or a region; -1 is no section."""
        value = self._values.get(key)
        if value is None:  # without an entry, any rank may have stored the item
            return range(len(self._sections))
        if isinstance(value, int):
            return (value,)
        if value.only_owner is not None:
            return (value.only_owner,)
        chunks = [] if region is None else value.chunks_in(offset or (), region)
        return [int(value.owners[number]) for number in chunks]

    def locate(self, items: Sequence[ReadItem]) -> list[list[Piece]]:
        """Returns, for each item of a load plan made from `metadata`, the stored chunks that have its elements.

        An object is one chunk of bytes. Reads the locations of all ranks that stored such chunks. Raises
        `MetadataError`, naming the key, if chunks are missing, and `ReadError` if locations cannot be read.
        """
        with _valid(self.path):
            hashes: list[int] = []
            # Most items are whole tensors in one chunk: only their location is needed.
            whole: dict[int, list[tuple[int, Any, Region]]] = defaultdict(list)
            # The others: a key, the offset of a chunk of `metadata`, and a region of that chunk (None: an object).
            others: dict[int, tuple[Any, tuple[int, ...] | None, Region | None]] = {}
            inline, values = self._inline_hashes, self._values
            for number, item in enumerate(items):
                key, chunk = item.storage_index.fqn, item.storage_index.offset
                offset = None if chunk is None else tuple(chunk)
                value, item_hash = values.get(key), hash_of(key, offset)
                hashes.append(item_hash)
                if (
                    type(value) is not TensorValue
                    or value.only_owner is None
                    or item.lengths != value.layout.shape
                    or item_hash in inline
                    or 0 in item.lengths
                ):
                    is_object = item.type == LoadItemType.BYTE_IO
                    region = None if is_object else Region(tuple(item.storage_offsets), tuple(item.lengths))
                    others[number] = key, offset, region
                else:
                    whole[value.only_owner].append((number, key, value.layout.regions[0]))
            needed = (self._owners(*wanted) for number, wanted in others.items() if hashes[number] not in inline)
            self._load_tables({*whole, *itertools.chain.from_iterable(needed)})
            pieces: list[list[Piece]] = [[]] * len(items)
            for owner, of_owner in whole.items():
                numbers, keys, regions = zip(*of_owner, strict=True)
                stored = self._stored(keys, [hashes[number] for number in numbers], owner)
                for number, key, chunk_region, found in zip(numbers, keys, regions, stored, strict=True):
                    if found is None:
                        raise no_data(self.path, key, items[number].storage_index.offset)
                    pieces[number] = [Piece(found, chunk_region.size, chunk_region, chunk_region)]
            for number, wanted in others.items():
                pieces[number] = self._pieces(*wanted, hashes[number])
            return pieces

    def _pieces(self, key: Any, offset: tuple[int, ...] | None, region: Region | None, item_hash: int) -> list[Piece]:
        value = self._values.get(key)
        if region is None or not isinstance(value, TensorValue):
            return [self._object(key, offset, value, item_hash)]
        if 0 in region.size:
            return []
        wanted = region.moved(offset or ())
        pieces = []
        for number in value.chunks_in(offset or (), region):
            chunk = value.layout.regions[number]
            common = wanted.intersect(chunk)
            assert common is not None
            item = self._find(key, hash_of(key, chunk.start), int(value.owners[number]))
            if item is None:
                raise no_data(self.path, key, chunk.start)
            pieces.append(Piece(item, chunk.size, common.within(chunk), common.within(wanted)))
        found, elements = sum(math.prod(piece.part.size) for piece in pieces), math.prod(region.size)
        if not pieces:
            raise no_data(self.path, key, offset)
        if found != elements:
            raise MetadataError(
                f"{self.path}: {found:,} of {elements:,} elements of {key!r} are stored in the region to be loaded: a "
                f"rank's part is missing or stored twice"
            )
        return pieces

    def _object(self, key: Any, offset: tuple[int, ...] | None, value: Value | None, item_hash: int) -> Piece:
        owners: Iterable[int] = [value] if isinstance(value, int) else range(len(self._sections))
        found = (self._find(key, item_hash, owner) for owner in owners)
        item = next((item for item in found if item is not None), None)
        if item is None:
            raise no_data(self.path, key, offset)
        whole = Region((0,), (item.length,))
        return Piece(item, whole.size, whole, whole)

    def _items(self) -> dict[ItemKey, StoredItem]:
        items: dict[ItemKey, StoredItem] = {}
        self._load_tables(range(len(self._sections)))
        for key, value in self._values.items():
            owned: Iterable[tuple[Any, int]] = [(None, value)] if isinstance(value, int) else value.located()
            for offset, owner in owned:
                item = self._stored([key], [hash_of(key, offset)], owner)[0]
                if item is not None:
                    items[key, offset] = item
                elif owner >= 0:
                    raise ValueError(f"the location of {key!r} does not match its key")
        return {key: item for table in self._tables.values() for key, item in table.named().items()} | items

    def _described(self, value: Value, *, whole: bool) -> TensorStorageMetadata | BytesStorageMetadata:
        if isinstance(value, int):
            return BytesStorageMetadata()
        size = torch.Size(value.layout.shape)
        properties = TensorProperties(**self._properties(value.properties))
        if value.layout.is_one or (whole and value.is_whole):
            return TensorStorageMetadata(properties, size, [ChunkStorageMetadata(_origin(len(size)), size)])
        return TensorStorageMetadata(properties, size, value.layout.chunks())

    def _properties(self, row: Properties) -> dict[str, Any]:
        if (known := self._known_properties.get(row)) is not None:
            return known
        values = {
            "dtype": known_dtype(row.dtype, self.path),
            "layout": _named(row.layout, torch.layout),
            "requires_grad": row.requires_grad,
            "memory_format": _named(row.memory_format, torch.memory_format),
            "pin_memory": row.pin_memory,
            "strides": row.strides,
        }
        self._known_properties[row] = {name: value for name, value in values.items() if name in _FIELDS}
        return self._known_properties[row]

    def _planner_data(self) -> Any:
        if (section := self._section("paths")) is not None:
            return decoded(decode_paths, self._file.section(section), self.path)
        if (section := self._section("planner")) is None:
            return None
        try:
            return load_object(bytes(self._file.section(section)))
        except UntrustedObject as error:
            raise UntrustedObject(
                f"the planner's data in {self.path} could run code when loaded: {error}. If you trust it, call "
                f"torch.serialization.add_safe_globals before the load."
            ) from None
        except CheckpointError:
            raise
        except Exception as error:
            raise invalid_index(
                self.path, f"its planner's data cannot be loaded: {type(error).__name__}: {error}"
            ) from error

    def _section(self, kind: SectionKind) -> Section | None:
        return next((section for section in self._file.head.sections if section.kind == kind), None)

    # --- locations: a rank's section is read only when it is needed ---------------------------------------------

    @functools.cached_property
    def _inline_hashes(self) -> Collection[int]:
        return frozenset() if self._inline is None else frozenset(self._inline.hashes.tolist())

    def _load_tables(self, numbers: Iterable[int]) -> None:
        missing = sorted({number for number in numbers if number >= 0} - self._tables.keys())
        sections = [self._sections[number] for number in missing]
        # Threads help only if sections must be read from the storage.
        get_all = map if self._file.read is None else in_threads
        for number, section, content in zip(missing, sections, get_all(self._file.section, sections), strict=True):
            files = [(file.name, file.nbytes) for file in section.files]
            self._tables[number] = self._table(decoded(decode_places, content, self.path), files)

    def _table(self, rows: Places, files: Sequence[tuple[str, int]]) -> LocationTable:
        for name in rows.dtypes:
            known_dtype(name, self.path)
        return LocationTable(rows, files, is_encrypted=self._file.head.encryption is not None)

    def _find(self, key: Any, item_hash: int, owner: int) -> StoredItem | None:
        """Returns the location to read an item from: in the index if that has a copy; None if the item is not stored.

        ``item_hash`` is the `hash_of` of the key and the chunk's offset (None for an object), and ``owner`` the number
        of the section to search, or -1 for none.
        """
        inline = None if self._inline is None else next(self._inline.find([key], [item_hash]))
        return inline or self._stored([key], [item_hash], owner)[0]

    def _stored(self, keys: Sequence[Any], hashes: Sequence[int], owner: int) -> list[StoredItem | None]:
        """Returns the locations of items in the data files of one section, None for missing items."""
        if owner < 0:
            return [None] * len(keys)
        if owner not in self._tables:
            self._load_tables([owner])
        return list(self._tables[owner].find(keys, hashes))


@contextmanager
def _valid(path: str) -> Iterator[None]:
    """Converts errors that an invalid index causes inside the block to a `MetadataError`."""
    try:
        yield
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise invalid_index(path, f"{type(error).__name__}: {error}") from error


@functools.cache
def _origin(dimensions: int) -> torch.Size:
    return torch.Size([0] * dimensions)


def _maybe(text: str | Ext | None) -> str | None:
    return None if text is None else from_text(text)


def _named(name: str, kind: type) -> Any:
    value = vars(torch).get(name)
    if not isinstance(value, kind):
        raise ValueError(f"torch has no {kind.__name__} {name!r}")
    return value
