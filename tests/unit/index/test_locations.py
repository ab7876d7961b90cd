"""Tests of the table of a rank's locations, and of small values with their bytes."""

from __future__ import annotations

import pytest

from dcp_tensorizer import WriteError
from dcp_tensorizer._index import locations
from dcp_tensorizer._index.locations import InlineItem, LocationTable, RankLocations, hash_of, inline_rows
from dcp_tensorizer._index.schema import decode_places
from dcp_tensorizer._tensor_file.names import MAC_BYTES, NONCE_BYTES, StoredItem, data_file_name

FILES = {data_file_name(4, n, "a" * 32): 1 << 40 for n in range(2)}
FIRST, SECOND = FILES
ITEMS = {
    ("a", (0, 0)): StoredItem(FIRST, "a", 5, 8, "float32", "tensor", b"12345678"),
    ("a", (2, 0)): StoredItem(SECOND, "__item_1__", 1 << 33, 1 << 38, "bfloat16", "tensor", bytes(8 * 33)),
    (5, None): StoredItem(FIRST, "__item_2__", 13, 1, "uint8", "object", b"abcdefgh"),
    ("empty", (0,)): StoredItem.empty("float8_e4m3fn"),
}


def table_of(part: RankLocations, *, is_encrypted: bool = False) -> LocationTable:
    return LocationTable(decode_places(part.section), part.files, is_encrypted=is_encrypted)


def test_what_is_put_in_comes_out() -> None:
    """Items are found by key and offset, and missing items are None."""
    table = table_of(RankLocations.of(4, ITEMS, FILES))
    assert len(table.hashes) == 4
    wanted = [("a", None), *ITEMS, ("a", (1, 0))]
    found = table.find([key for key, _ in wanted], [hash_of(*key) for key in wanted])
    assert list(found) == [None, *ITEMS.values(), None]
    assert table.named() == {}


def test_keys_stand_in_it_where_they_are_asked_for() -> None:
    """The table stores the keys of items that the state dict may not name."""
    table = table_of(RankLocations.of(4, ITEMS, FILES, named=[("a", (2, 0)), (5, None)]))
    assert table.named() == {key: ITEMS[key] for key in [("a", (2, 0)), (5, None)]}


def test_a_table_takes_few_bytes() -> None:
    """An item of one block takes about forty bytes, which limits what a rank with 10,000 items reads."""
    one = StoredItem(FIRST, "x", 5, 8, "float32", "tensor", b"12345678")
    items = {(f"layers.{n}.weight", (n, 0)): one._replace(name=f"layers.{n}.weight") for n in range(2000)}
    assert len(RankLocations.of(0, items, FILES).section) < 48 * 2000


def test_of_an_encrypted_item_its_seal_is_there() -> None:
    """The table stores a nonce, and a MAC for each block."""
    items = {(k, (0,)): ITEMS["a", (0, 0)]._replace(name=k, nonce_and_macs=k.encode() * 40) for k in "xy"}
    table = table_of(RankLocations.of(4, items, FILES), is_encrypted=True)
    assert NONCE_BYTES + MAC_BYTES == 40
    assert list(table.find("xy", table.hashes.tolist())) == list(items.values())


def test_two_keys_of_one_hash_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load would find one item in place of the other."""
    monkeypatch.setattr(locations, "hash_of", lambda key, offset: 7)
    with pytest.raises(WriteError, match=r"have the same hash.*rename one"):
        RankLocations.of(4, ITEMS, FILES)


def test_a_key_that_cannot_be_stored_is_named() -> None:
    """The error also names the types that a key may have."""
    with pytest.raises(WriteError, match=r"frozenset\(\{1\}\) cannot be described.*keys must be strings"):
        RankLocations.of(4, {(frozenset([1]), None): ITEMS[5, None]}, FILES)


def test_small_values_lie_one_after_the_other() -> None:
    """Of two values with one key the last one is stored, as in the data files."""
    small = [
        InlineItem(hash_of(key, None), StoredItem("", "", 0, len(content), "uint8", "object", bytes(8)), content)
        for key, content in (("a", b"old"), ("b", b"bbbb"), ("a", b"new!!"))
    ]
    rows = inline_rows(small)
    table = LocationTable(rows.places, [("f", len(rows.content))], is_encrypted=False)
    contents = {}
    for key in "ab":
        (item,) = table.find([key], [hash_of(key, None)])
        assert item is not None
        contents[key] = rows.content[item.offset : item.offset + item.length]
        assert (item.file, item.name, item.kind) == ("f", key, "object")
    assert contents == {"a": b"new!!", "b": b"bbbb"}
