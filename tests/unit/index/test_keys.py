"""Tests of the keys that an unflattened state dict may have."""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from dcp_tensorizer._index.schema import from_key, from_text, to_key, to_text

_ATOMS = (
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats(allow_nan=False) | st.binary() | st.text()
)
KEYS = st.recursive(_ATOMS, lambda inner: st.lists(inner, max_size=4).map(tuple), max_leaves=8)


class Number(enum.IntEnum):
    ONE = 1


class Name(str, enum.Enum):
    A = "a"


def through(key: Any) -> Any:
    return from_key(msgspec.msgpack.decode(msgspec.msgpack.encode(to_key(key)), type=str | Ext))


@given(KEYS | st.characters(categories=["Cs"]) | st.tuples(st.characters(categories=["Cs"])))
def test_keys_come_back(key: Any) -> None:
    """Keys are equal after decoding, with the same type and hash: strings, numbers of any size, tuples."""
    read = through(key)
    assert read == key
    assert (type(read), hash(read)) == (type(key), hash(key))


@pytest.mark.parametrize("key", [Number.ONE, Name.A, torch.Size([1, 2]), (Number.ONE, "b")], ids=repr)
def test_keys_that_equal_builtin_ones(key: Any) -> None:
    """A key of a subclass is found by the builtin value that it equals."""
    assert {through(key): 1}[key] == 1


@pytest.mark.parametrize("key", [frozenset([1]), torch.float32, object(), 1j, (1, [2])], ids=lambda key: str(type(key)))
def test_keys_of_other_types_are_refused(key: Any) -> None:
    """The error names the type."""
    with pytest.raises(TypeError, match="keys must be strings"):
        to_key(key)


@pytest.mark.parametrize(
    "hostile",
    [
        Ext(2, b"\x91" * 100_000 + b"\x01"),
        Ext(2, msgspec.msgpack.encode({"a": 1})),
        Ext(2, b"\xdd\xff\xff\xff\xff"),
        Ext(2, b""),
        Ext(2, msgspec.msgpack.encode(Ext(3, bytes(1000)))),
        Ext(9, b""),
        Ext(1, b"\xff"),
    ],
    ids=["too deep", "a mapping", "more than there is", "nothing", "one in another", "another kind", "no text"],
)
def test_what_is_no_key_is_refused(hostile: Ext) -> None:
    """Keys nested too deeply, of unknown types, or of wrong lengths raise `ValueError`."""
    with pytest.raises(ValueError, match=r".+"):
        from_key(hostile)


def test_texts() -> None:
    """Only strings with lone surrogates need an extension."""
    assert to_text("grün") == "grün"
    assert to_text("\ud800").code == 1  # type: ignore[union-attr]
    assert from_text(to_text("a\ud800")) == "a\ud800"
    with pytest.raises(ValueError, match="not a string"):
        from_text(Ext(2, b""))
