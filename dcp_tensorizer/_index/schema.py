"""The rows of an index, as they stand in MessagePack: types that msgspec encodes and decodes, and no class of torch.

msgspec refuses what is not of these types. Each row takes at least a byte for each of its fields, so that a file cannot
ask for much more memory than it has bytes, and none of them can hold itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.msgpack import Decoder, Encoder, Ext

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import MetadataIndex

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
    """The description of the key of an encrypted checkpoint (`Cipher.record`)."""

    check: bytes
    derivation: tuple[_Count, _Count, int, bytes] | None


class Section(Struct, array_like=True, gc=False):
    """The location of a section.

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
    """A manager's record of a save.

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
        encryption: The record of the key; None if nothing is encrypted.
        sections: In the order in which they follow; those of places come last.
        record: A manager's record of the save; None without a manager.
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
    """The layout of tensors of one shape in chunks.

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
    """The locations of a rank's items (`StoredItem`), in columns: little-endian numbers, one for each item.

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


# --- keys in MessagePack ----------------------------------------------------------------------------------------------
#
# A string is a string. Any other key is an extension of MessagePack:
#
#     1    a string with lone surrogates, in UTF-8 that allows them
#     2    a key of another type: the MessagePack of nil, a boolean, a number, a binary, or an array for a tuple of them
#     3    an integer of more than 64 bits, inside of 2: its bytes in two's complement, the lowest first

ItemKey = tuple[Any, tuple[int, ...] | None]
"""The key of an item: its own, and the offset of its chunk."""

_SURROGATES, _OTHER, _LARGE = 1, 2, 3
_MAX_DEPTH = 32  # of tuples in tuples
_MAX_LARGE = 128  # bytes


def item_key(index: MetadataIndex) -> ItemKey:
    """The key of an item in ``storage_data["items"]``: builtin types only."""
    return index.fqn, None if index.offset is None else tuple(index.offset)


def to_text(text: str) -> str | Ext:
    """A string for MessagePack, which has only such as are valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return Ext(_SURROGATES, text.encode("utf-8", "surrogatepass"))
    return str.__str__(text)  # of a member of an Enum of strings, its value


def from_text(text: str | Ext) -> str:
    """The string that `to_text` was given; raises `ValueError` for anything else."""
    if isinstance(text, str):
        return text
    if text.code != _SURROGATES:
        raise ValueError("an extension that is no string")
    return str(text.data, "utf-8", "surrogatepass")


def to_key(key: Any) -> str | Ext:
    """A key for MessagePack.

    Raises:
        TypeError: it is none of strings, bytes, numbers, None, and tuples of them.
    """
    if type(key) is str and key.isascii():
        return key
    if isinstance(key, str):
        return to_text(key)
    return Ext(_OTHER, msgspec.msgpack.encode(_plain(key, 0)))


def from_key(key: str | Ext) -> Any:
    """A key that equals the one that `to_key` was given; raises `ValueError` for anything else."""
    if isinstance(key, str):
        return key
    if key.code != _OTHER:
        return from_text(key)
    try:
        return _restored(msgspec.msgpack.decode(key.data), 0)
    except (msgspec.MsgspecError, RecursionError, TypeError) as error:
        raise ValueError(f"a key that cannot be read: {error}") from None


def _plain(part: Any, depth: int) -> Any:
    if isinstance(part, tuple) and depth < _MAX_DEPTH:
        return [_plain(inner, depth + 1) for inner in part]
    if isinstance(part, str):
        return to_text(part)
    if part is None or isinstance(part, bool | bytes):
        return part
    if isinstance(part, float):
        return float(part)
    if isinstance(part, int):  # also the members of an IntEnum, which equal their numbers
        number = int(part)
        if -(2**63) <= number < 2**64:
            return number
        if number.bit_length() < 8 * _MAX_LARGE:
            return Ext(_LARGE, number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True))
    raise TypeError(
        f"a key of type {type(part).__name__}: keys must be strings, bytes, numbers, None, or tuples of them"
    )


def _restored(part: Any, depth: int) -> Any:
    if isinstance(part, list) and depth < _MAX_DEPTH:
        return tuple(_restored(inner, depth + 1) for inner in part)
    if isinstance(part, Ext):
        if part.code != _LARGE:
            return from_text(part)
        if len(bytes(part.data)) <= _MAX_LARGE:
            return int.from_bytes(part.data, "little", signed=True)
    if part is None or isinstance(part, bool | int | float | bytes | str):
        return part
    raise ValueError("a key of an unknown type")
