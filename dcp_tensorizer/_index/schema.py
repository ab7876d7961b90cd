"""The rows of an index in MessagePack: types that msgspec encodes and decodes, without classes of torch.

msgspec rejects other types. Each row takes at least one byte per field, and no row can contain itself: so decoding
takes memory in proportion to the size of the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.msgpack import Decoder, Encoder, Ext

from .._tensor_file.names import MAX_DIMENSIONS, MAX_NUMBER, Derivation

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import MetadataIndex

KINDS = ("tensor", "object", "wrapper")
"""The names of the numbers in `Places.kinds`; see `StoredItem.kind`."""

_Count = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
_Positive = Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
_Reference = Annotated[int, Meta(ge=-1, le=MAX_NUMBER)]
_Dims = Annotated[tuple[_Count, ...], Meta(max_length=MAX_DIMENSIONS)]
Run = tuple[_Reference, int, _Count]
"""An arithmetic progression: the first number, the step and the count."""
SectionKind = Literal["entries", "paths", "planner", "inline", "places"]
Text = str | Ext  # see `to_text`
Key = str | Ext  # see `to_key`


class DataFile(Struct, array_like=True, gc=False, frozen=True):
    name: str
    nbytes: _Count


class KeyRecord(Struct, array_like=True, gc=False):
    """The description of the key of an encrypted checkpoint."""

    check: bytes  # see `Cipher.check_value`
    derivation: Derivation | None  # None: the user gave the key itself


class Section(Struct, array_like=True, gc=False):
    kind: SectionKind
    rank: _Count | None  # of a section of locations: the rank that wrote the items; otherwise None
    offset: _Count  # relative to the end of the head
    nbytes: _Count
    digest: bytes  # XXH3-128
    strong: bytes | None  # BLAKE2b-256, only in an encrypted checkpoint
    files: list[DataFile]  # the data files that its locations refer to


class SaveRecord(Struct, array_like=True, gc=False, frozen=True):
    """A `CheckpointManager`'s record of a save."""

    step: _Count
    parent: str | None  # the id of the save that training resumed from
    # the branches up to this save: for each, its name, and the step at which it left the previous branch
    branch: tuple[tuple[str, _Count], ...]
    metrics: dict[str, float]
    job: str = ""  # the id of the run that saved, if it holds states in memory (``survive``)
    lived: float = 0.0  # seconds that the job has run up to this save, in all its runs
    restarts: _Count = 0  # how often the job has resumed after a failed run
    is_end: bool = False  # the job had received a stop request: no work is lost if it ends with this save
    serial: _Count = 0  # higher than the serials of all earlier checkpoints in the folder; 0: not recorded
    # the manager's rules of retention, under the names of its arguments
    keep_latest: _Positive | None = None
    keep_every: _Positive | None = None
    keep_best: tuple[str, Literal["min", "max"]] | None = None


class Head(Struct, gc=False):
    """The head of an index. ``save_id`` to ``metadata_version`` are from DCP's ``StorageMeta`` and ``Metadata``."""

    release: str  # of this package
    torch: str
    saved_at: _Count  # nanoseconds since the epoch
    rank: _Count | None  # the rank that saved by itself; None: all ranks together
    has_storage_meta: bool
    save_id: Text | None
    load_id: Text | None
    checkpoint_id: Text | None
    modules: list[Text]
    metadata_version: Text | None
    encryption: KeyRecord | None
    sections: list[Section]  # in file order; those of locations come last
    record: SaveRecord | None = None  # None without a manager


class Properties(Struct, array_like=True, gc=False, frozen=True):
    """DCP's ``TensorProperties``, with torch's names for dtype, layout and memory format.

    Strides are in elements. Releases of torch before 2.15 do not record them.
    """

    dtype: str
    layout: str
    requires_grad: bool
    memory_format: str
    pin_memory: bool
    strides: _Dims | None = None


class Layout(Struct, array_like=True, gc=False):
    """The chunks of tensors of one shape.

    For each dimension, ``offsets`` and ``sizes`` have the offsets and the sizes of all chunks, as runs. If the only
    chunk is the whole tensor, both are None.
    """

    shape: _Dims
    count: _Count  # of the chunks
    offsets: list[list[Run]] | None
    sizes: list[list[Run]] | None


class TensorEntry(Struct, array_like=True, tag=0, gc=False):
    """A tensor of the state dict. ``properties``, ``layout`` and ``owners`` are row numbers in `Entries`."""

    key: Key
    properties: _Count
    layout: _Count
    owners: _Count
    is_whole: bool  # its chunks hold each element once, and all are stored


class ObjectEntry(Struct, array_like=True, tag=1, gc=False):
    """An object of the state dict. ``owner`` is as in `Entries.owners`."""

    key: Key
    owner: _Reference


class Entries(Struct, array_like=True, gc=False):
    """The state dict, in its order.

    For each chunk of a layout, ``owners`` has the number of its section among the sections of locations, or -1 if the
    chunk is not stored. The numbers are stored as runs.
    """

    properties: list[Properties]
    layouts: list[Layout]
    owners: list[list[Run]]
    entries: list[TensorEntry | ObjectEntry]  # one for each key


class Places(Struct, array_like=True, gc=False):
    """The locations of a rank's items (`StoredItem`) in columns: little-endian numbers, one for each item.

    The fields before ``digests`` are equal in each save of the same items.
    """

    dtypes: list[str]  # names, by their numbers in ``dtype_numbers``
    hashes: bytes  # uint64: of the items' keys (`locations.hash_of`)
    files: bytes  # int32: number in the section's files; -1: no bytes
    offsets: bytes  # int64, in the file
    sizes: bytes  # int64, in bytes
    dtype_numbers: bytes  # uint8
    kinds: bytes  # uint8; see `KINDS`
    digest_sizes: bytes  # uint32: bytes of each item in ``digests``
    seal_sizes: bytes  # uint32: bytes of each item in ``seals``; empty if nothing is encrypted
    names: dict[_Count, str]  # name in the file, by the item's number, if it is not the key
    # key and offset, by the item's number, if the state dict might not have the key
    keys: dict[_Count, tuple[Key, _Dims | None]]
    digests: bytes  # of all items, one after the other
    seals: bytes  # nonces and MACs of all items


class Inline(Struct, array_like=True, gc=False):
    """Small items with their bytes, which are also in a data file. The locations in ``places`` refer to ``content`` as
    the only file.
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
#     2    a key of another type: the MessagePack of nil, a boolean, a number or a binary; for a tuple of these and of
#          strings, that of an array
#     3    only inside an extension of code 2: an integer of more than 64 bits, in two's complement, the lowest byte
#          first

ItemKey = tuple[Any, tuple[int, ...] | None]
"""The key of an item: its key in the state dict, and the offset of its chunk."""

_SURROGATES, _OTHER, _LARGE = 1, 2, 3
_MAX_DEPTH = 32  # of tuples in tuples
_MAX_LARGE = 128  # bytes of an integer


def item_key(index: MetadataIndex) -> ItemKey:
    """Returns the key of the item that a `MetadataIndex` names, in builtin types only."""
    return index.fqn, None if index.offset is None else tuple(index.offset)


def to_text(text: str) -> str | Ext:
    """Returns a string for MessagePack, whose strings must be valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return Ext(_SURROGATES, text.encode("utf-8", "surrogatepass"))
    return str.__str__(text)  # the plain value, for members of a string Enum


def from_text(text: str | Ext) -> str:
    """Returns the string that was passed to `to_text`. Raises `ValueError` for other values."""
    if isinstance(text, str):
        return text
    if text.code != _SURROGATES:
        raise ValueError("a MessagePack extension that is not a string")
    return str(text.data, "utf-8", "surrogatepass")


def to_key(key: Any) -> str | Ext:
    """Returns a key for MessagePack. Raises `TypeError` unless it is a string, bytes, a number, None, or a tuple of
    them.
    """
    if type(key) is str and key.isascii():
        return key
    if isinstance(key, str):
        return to_text(key)
    return Ext(_OTHER, msgspec.msgpack.encode(_plain(key, 0)))


def from_key(key: str | Ext) -> Any:
    """Returns a key that equals the one passed to `to_key`. Raises `ValueError` for other values."""
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
    if isinstance(part, int):  # including members of an IntEnum, which equal their numbers
        number = int(part)
        if -(2**63) <= number < 2**64:
            return number
        if number.bit_length() < 8 * _MAX_LARGE:
            return Ext(_LARGE, number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True))
    raise TypeError(
        f"a key of type {type(part).__name__}: keys must be strings, bytes, numbers, None, or tuples of them, with "
        f"integers of fewer than {8 * _MAX_LARGE:,} bits, and at most {_MAX_DEPTH} tuples inside each other"
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
