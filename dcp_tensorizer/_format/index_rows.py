"""The rows of an index, as they stand in MessagePack: types that msgspec encodes and decodes, and no class of torch.

msgspec refuses what is not of these types. Each row takes at least a byte for each of its fields, so that a file cannot
ask for much more memory than it has bytes, and none of them can hold itself.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.msgpack import Decoder, Encoder, Ext

__all__ = [
    "KINDS",
    "Chunk",
    "DataFile",
    "Entries",
    "Head",
    "KeyRecord",
    "ObjectEntry",
    "Place",
    "Properties",
    "Section",
    "SectionKind",
    "StrayEntry",
    "TensorEntry",
    "decode_entries",
    "decode_head",
    "decode_paths",
    "decode_places",
    "encode_rows",
]

_MAX_DIMENSIONS = 255  # as in a tensorizer file
KINDS = ("tensor", "object", "wrapper")
"""What `Place.kind` numbers; see `StoredItem.kind`."""

_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Reference = Annotated[int, Meta(ge=-1, le=2**63 - 1)]
_Dims = Annotated[tuple[_Count, ...], Meta(max_length=_MAX_DIMENSIONS)]
SectionKind = Literal["entries", "paths", "planner", "places"]
Text = str | Ext  # see `keys.to_text`
Key = str | Ext  # see `keys.to_key`


class DataFile(Struct, array_like=True, gc=False):
    """A data file, and the bytes in it."""

    name: str
    nbytes: _Count


class KeyRecord(Struct, array_like=True, gc=False):
    """What is said of the key of an encrypted checkpoint (`Cipher.record`)."""

    check: bytes
    derivation: tuple[_Count, _Count, int, bytes] | None


class Section(Struct, array_like=True, gc=False):
    """Where a section is.

    Attributes:
        rank: Whose places are in it; None for items without bytes, and in sections of another kind.
        offset: Of its first byte behind the head.
        digest: XXH3-128.
        strong: In an encrypted checkpoint: BLAKE2b-256.
    """

    kind: SectionKind
    rank: _Count | None
    offset: _Count
    nbytes: _Count
    digest: bytes
    strong: bytes | None


class Head(Struct, gc=False):
    """The head.

    Attributes:
        release, torch: The versions that wrote it.
        saved_at: Nanoseconds since the epoch.
        rank: Whose own it is, where each rank saved for itself; None: all ranks'.
        save_id, load_id, checkpoint_id, modules, metadata_version: Of DCP's ``Metadata`` and ``StorageMeta``.
        has_storage_meta: Whether there was a ``StorageMeta``.
        files: All data files; others refer to them by number.
        dtypes: Names of dtypes; others refer to them by number.
        encryption: What is said of the key; None if nothing is encrypted.
        sections: In the order in which they follow.
    """

    release: str
    torch: str
    saved_at: _Count
    rank: _Count | None
    has_storage_meta: bool
    save_id: Text | None
    load_id: Text | None
    checkpoint_id: Text | None
    modules: list[Text]
    metadata_version: Text | None
    files: list[DataFile]
    dtypes: list[str]
    encryption: KeyRecord | None
    sections: list[Section]


class Properties(Struct, array_like=True, gc=False):
    """DCP's ``TensorProperties``; all but the number of the dtype by torch's names."""

    dtype: _Count
    layout: str
    requires_grad: bool
    memory_format: str
    pin_memory: bool


class Chunk(Struct, array_like=True, gc=False):
    """A stored part of a tensor.

    Attributes:
        part: The number of the section of places that has its place; -1: there is none.
        row: Its row there.
        offsets, sizes: Where it is in the tensor; both None: it is the whole.
    """

    part: _Reference
    row: _Count
    offsets: _Dims | None
    sizes: _Dims | None


class TensorEntry(Struct, array_like=True, tag=0, gc=False):
    """A tensor of the state dict; ``properties`` is a row of `Entries.properties`."""

    key: Key
    properties: _Count
    shape: _Dims
    chunks: list[Chunk]


class ObjectEntry(Struct, array_like=True, tag=1, gc=False):
    """An object of the state dict, and its place as in `Chunk`."""

    key: Key
    part: _Reference
    row: _Count


class StrayEntry(Struct, array_like=True, tag=2, gc=False):
    """Something that was stored, and of which DCP's metadata says nothing: its index and its place."""

    key: Key
    offsets: _Dims | None
    part: _Count
    row: _Count


class Entries(Struct, array_like=True, gc=False):
    """The state dict, in its order."""

    properties: list[Properties]
    entries: list[TensorEntry | ObjectEntry | StrayEntry]


class Place(Struct, array_like=True, gc=False):
    """Where the bytes of an item are (`StoredItem`).

    Attributes:
        file: A row of `Head.files`; -1: it has no bytes.
        dtype: A row of `Head.dtypes`.
        kind: See `KINDS`.
        name: Its name in the file; None: its key.
    """

    file: _Reference
    offset: _Count
    nbytes: _Count
    dtype: _Count
    kind: Annotated[int, Meta(ge=0, lt=len(KINDS))]
    name: str | None
    digests: bytes
    nonce_and_macs: bytes


encode_rows = Encoder().encode
decode_head = Decoder(Head).decode
decode_entries = Decoder(Entries).decode
decode_places = Decoder(list[Place]).decode
decode_paths = Decoder(dict[str, tuple[str | int, ...]]).decode
