"""The keys of a state dict in MessagePack: strings, and what else a key may be where nothing is flattened.

A string is a string there. Anything else is an extension of MessagePack:

    1    a string with lone surrogates, in UTF-8 that allows them
    2    a key of another type: the MessagePack of nil, a boolean, a number, a binary, or an array for a tuple of them
    3    an integer of more than 64 bits, inside of 2: its bytes in two's complement, the first one the lowest
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.msgpack import Ext
from torch.distributed.checkpoint.metadata import MetadataIndex

__all__ = ["ItemKey", "from_key", "from_text", "item_key", "to_key", "to_text"]

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
    raise ValueError("a key of a type that no key has")
