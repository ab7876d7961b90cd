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
    "DataFile",
    "Entries",
    "Head",
    "Inline",
    "KeyRecord",
    "Layout",
    "ObjectEntry",
    "Places",
    "Properties",
    "Run",
    "SaveRecord",
    "Section",
    "SectionKind",
    "TensorEntry",
    "decode_entries",
    "decode_head",
    "decode_inline",
    "decode_paths",
    "decode_places",
    "encode_rows",
]

_MAX_DIMENSIONS = 255  # as in a tensorizer file
KINDS = ("tensor", "object", "wrapper")
"""What `Places.kinds` numbers; see `StoredItem.kind`."""

_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Reference = Annotated[int, Meta(ge=-1, le=2**63 - 1)]
_Dims = Annotated[tuple[_Count, ...], Meta(max_length=_MAX_DIMENSIONS)]
Run = tuple[_Reference, int, _Count]
"""Numbers at equal distances: the first, the distance, and how many."""
SectionKind = Literal["entries", "paths", "planner", "inline", "places"]
Text = str | Ext  # see `keys.to_text`
Key = str | Ext  # see `keys.to_key`


class DataFile(Struct, array_like=True, gc=False, frozen=True):
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
        rank: Whose places are in it; None in sections of another kind.
        offset: Of its first byte behind the head.
        digest: XXH3-128.
        strong: In an encrypted checkpoint: BLAKE2b-256.
        files: The data files that its places are in.
    """

    kind: SectionKind
    rank: _Count | None
    offset: _Count
    nbytes: _Count
    digest: bytes
    strong: bytes | None
    files: list[DataFile]


class SaveRecord(Struct, array_like=True, gc=False, frozen=True):
    """What a manager says of a save.

    Attributes:
        step: Of training.
        parent: The id of the save that training went on from; None if there was none.
        branch: The branches that led here: the name of each, and the step at which it left the one before.
        metrics: Of training, by name.
        job: The run of the job that saved, where states are kept in memory (``survive``); otherwise empty.
    """

    step: _Count
    parent: str | None
    branch: tuple[tuple[str, _Count], ...]
    metrics: dict[str, float]
    job: str = ""


class Head(Struct, gc=False):
    """The head.

    Attributes:
        release, torch: The versions that wrote it.
        saved_at: Nanoseconds since the epoch.
        rank: Whose own it is, where each rank saved for itself; None: all ranks'.
        save_id, load_id, checkpoint_id, modules, metadata_version: Of DCP's ``Metadata`` and ``StorageMeta``.
        has_storage_meta: Whether there was a ``StorageMeta``.
        encryption: What is said of the key; None if nothing is encrypted.
        sections: In the order in which they follow; those of places come last.
        record: What a manager says of the save; None if none made it.
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
    encryption: KeyRecord | None
    sections: list[Section]
    record: SaveRecord | None = None


class Properties(Struct, array_like=True, gc=False, frozen=True):
    """DCP's ``TensorProperties``, by torch's names.

    Attributes:
        strides: In elements; None: the torch that saved did not say them, as releases before 2.15.
    """

    dtype: str
    layout: str
    requires_grad: bool
    memory_format: str
    pin_memory: bool
    strides: _Dims | None = None


class Layout(Struct, array_like=True, gc=False):
    """How tensors of one shape are cut into chunks.

    Attributes:
        count: Of the chunks.
        offsets, sizes: Of all chunks: for each dimension the numbers, as runs. None: there is one chunk, the whole.
    """

    shape: _Dims
    count: _Count
    offsets: list[list[Run]] | None
    sizes: list[list[Run]] | None


class TensorEntry(Struct, array_like=True, tag=0, gc=False):
    """A tensor of the state dict.

    Attributes:
        properties, layout, owners: Rows of `Entries`.
        is_whole: Its chunks hold each of its elements once, and all are stored.
    """

    key: Key
    properties: _Count
    layout: _Count
    owners: _Count
    is_whole: bool


class ObjectEntry(Struct, array_like=True, tag=1, gc=False):
    """An object of the state dict; ``owner``: as one of `Entries.owners`."""

    key: Key
    owner: _Reference


class Entries(Struct, array_like=True, gc=False):
    """The state dict, in its order.

    Attributes:
        owners: For each chunk of a layout, the number of the section of places that says where it is, counted among
            those; -1: it is not stored. As runs.
    """

    properties: list[Properties]
    layouts: list[Layout]
    owners: list[list[Run]]
    entries: list[TensorEntry | ObjectEntry]


class Places(Struct, array_like=True, gc=False):
    """Where the items of a rank are (`StoredItem`), in columns: little-endian numbers, one for each item.

    Attributes:
        dtypes: Names, which ``dtype_numbers`` refers to.
        hashes: uint64: of the items' keys (`places.hash_of`).
        files: int32: in the section's files; -1: it has no bytes.
        offsets, sizes: int64: in the file.
        dtype_numbers: uint8.
        kinds: uint8; see `KINDS`.
        digest_sizes: uint32: how many bytes of ``digests`` are of each.
        seal_sizes: uint32: the same of ``seals``; empty if nothing is encrypted.
        names: In the file, by the number of the item, where that is not its key.
        keys: Key and offset, by the number of the item, of what the state dict may not name.
        digests: Of all items, one after the other.
        seals: Nonces and MACs of all items; empty if nothing is encrypted.

    What stands before the digests is the same in each save of the same items.
    """

    dtypes: list[str]
    hashes: bytes
    files: bytes
    offsets: bytes
    sizes: bytes
    dtype_numbers: bytes
    kinds: bytes
    digest_sizes: bytes
    seal_sizes: bytes
    names: dict[_Count, str]
    keys: dict[_Count, tuple[Key, _Dims | None]]
    digests: bytes
    seals: bytes


class Inline(Struct, array_like=True, gc=False):
    """Small items, with their bytes: those are also in a data file.

    Attributes:
        places: As of a rank whose only file is ``content``.
    """

    places: Places
    content: bytes


encode_rows = Encoder().encode
decode_head = Decoder(Head).decode
decode_entries = Decoder(Entries).decode
decode_places = Decoder(Places).decode
decode_inline = Decoder(Inline).decode
decode_paths = Decoder(dict[str, tuple[str | int, ...]]).decode
