"""Tests that digests detect all damage, in whole items and in parts, and name the block."""

from __future__ import annotations

import struct

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dcp_tensorizer import ChecksumMismatch
from dcp_tensorizer._tensor_file import digests as checksums
from dcp_tensorizer._tensor_file.digests import DigestCheck, Digester, all_match, check_digests
from dcp_tensorizer._tensor_file.names import StoredItem, block_size

from ...lab.seams import stored_item
from ...lab.states import filled


def digests_of(content: bytes | bytearray, block: int | None = None) -> bytes:
    digester = Digester(block or block_size(len(content)))
    digester.update(memoryview(content))
    return digester.digests()


def item_of(content: bytes | bytearray) -> StoredItem:
    return stored_item(len(content), digests=digests_of(content))


def test_digests_are_those_of_the_blocks() -> None:
    """Each block has an XXH3-64 in 8 bytes, big-endian; several blocks have another one of the whole."""
    data = bytes(range(256)) * 1000
    step = block_size(len(data))
    expected = [xxhash.xxh3_64_intdigest(data[start : start + step]) for start in range(0, len(data), step)]
    expected.append(xxhash.xxh3_64_intdigest(data))
    assert [n for (n,) in struct.iter_unpack(">Q", digests_of(data))] == expected
    assert digests_of(b"") == b""
    assert digests_of(b"one block") == xxhash.xxh3_64_digest(b"one block")


@pytest.mark.parametrize("nbytes", [1, 65_536, 65_537, 200_000])
def test_digests_of_data_that_comes_at_once_are_those_of_pieces(nbytes: int) -> None:
    """One block, several blocks with a shorter last one, bytes and views have equal digests."""
    content = filled(torch.uint8, (nbytes,)).numpy().tobytes()
    assert checksums.digests_of(content) == checksums.digests_of(memoryview(content)) == digests_of(content)


class SmallBlocks(StoredItem):
    """An item with blocks of 16 bytes, so that few bytes make several."""

    block = 16  # type: ignore[assignment]


def some_blocks(content: bytes, data: st.DataObject) -> tuple[StoredItem, int]:
    """Returns an item, and the start of one of its blocks."""
    item = SmallBlocks(*stored_item(len(content), digests=digests_of(content, SmallBlocks.block)))
    return item, item.block * data.draw(st.integers(0, (len(content) - 1) // item.block))


@given(st.binary(min_size=1, max_size=300), st.lists(st.integers(1, 100), max_size=10))
def test_digests_do_not_depend_on_the_pieces(content: bytes, sizes: list[int]) -> None:
    """Pieces of any size give the same blocks."""
    digester = Digester(16)
    rest = memoryview(content)
    for size in [*sizes, len(content)]:
        digester.update(rest[:size])
        rest = rest[size:]
    assert digester.digests() == digests_of(content, 16)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_every_flipped_bit_is_found_in_its_block(content: bytes, data: st.DataObject) -> None:
    """The error names the bytes of the first damaged block, also if only some blocks are checked."""
    item, first = some_blocks(content, data)
    check_digests(item, first, memoryview(content)[first:])
    bit = data.draw(st.integers(8 * first, 8 * len(content) - 1))
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    start = bit // 8 // item.block * item.block
    with pytest.raises(ChecksumMismatch, match=rf"^bytes {start:,} to {min(start + item.block, item.length):,}$"):
        check_digests(item, first, memoryview(damaged)[first:])


@given(st.binary(min_size=1, max_size=200), st.data())
def test_pieces_are_checked_like_the_whole(content: bytes, data: st.DataObject) -> None:
    """Any number of blocks at once matches, unless a bit is flipped."""
    item, first = some_blocks(content, data)
    arriving = bytearray(content[first:])
    bit = data.draw(st.none() | st.integers(0, 8 * len(arriving) - 1))
    if bit is not None:
        arriving[bit // 8] ^= 1 << bit % 8
    check = DigestCheck(item, first, len(arriving))
    rest = memoryview(arriving)
    while rest.nbytes:
        size = item.block * data.draw(st.integers(1, -(-rest.nbytes // item.block)))
        check.update(rest[:size])
        rest = rest[size:]
    assert check.matches() == (bit is None)


def test_every_bit_of_a_small_tensor_counts() -> None:
    """All 8 * 300 single-bit errors are found."""
    content = bytearray(filled(torch.uint8, (300,)).numpy().tobytes())
    item = item_of(content)
    for bit in range(8 * len(content)):
        content[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ChecksumMismatch):
            check_digests(item, 0, memoryview(content))
        content[bit // 8] ^= 1 << bit % 8


def test_missing_digests_are_a_mismatch() -> None:
    """Metadata with fewer digests than blocks verifies nothing."""
    with pytest.raises(ChecksumMismatch):
        check_digests(stored_item(3), 0, memoryview(b"abc"))


def test_a_whole_item_is_checked_by_one_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests of the blocks are compared only to name the damaged block."""
    content = bytearray(filled(torch.uint8, (1_000_000,)).numpy().tobytes())
    item = item_of(content)
    step = block_size(len(content))
    calls: list[int] = []

    def digest(data: memoryview) -> bytes:
        calls.append(data.nbytes)
        return xxhash.xxh3_64_digest(data)

    monkeypatch.setattr(checksums, "_digest", digest)
    check_digests(item, 0, memoryview(content))
    assert calls == [len(content)]
    content[5 * step] ^= 1
    with pytest.raises(ChecksumMismatch, match=rf"^bytes {5 * step:,} to {6 * step:,}$"):
        check_digests(item, 0, memoryview(content))
    assert calls == [len(content)] * 2 + [step] * 6
    with pytest.raises(ChecksumMismatch):
        check_digests(item._replace(digests=b""), 0, memoryview(content))


def test_several_items_are_checked_by_one_comparison() -> None:
    """A changed byte of any item is found; parts and missing digests never match."""
    contents = [bytearray(b"some"), bytearray(b"other"), bytearray(100), bytearray(70_000)]
    items = [item_of(content) for content in contents]
    views = list(map(memoryview, contents))
    assert all_match(items, views)
    assert not all_match(items, [views[0][:3], *views[1:]])
    assert not all_match([*items[:2], items[2]._replace(digests=b""), items[3]], views)
    assert not all_match([*items[:3], items[3]._replace(digests=items[3].digests[:-8])], views)  # as encrypted ones
    for content in contents:
        content[-1] ^= 1
        assert not all_match(items, views)
        content[-1] ^= 1
