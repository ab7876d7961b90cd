"""Tests of the catalog of this package's checkpoints: what a load is shown, what it finds, and how much is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_tensorizer import MetadataError
from dcp_tensorizer._formats.catalog import Piece
from dcp_tensorizer._formats.own import Index
from dcp_tensorizer._index.container import FIRST_BYTES, IndexFile, open_index, read_head
from dcp_tensorizer._index.locations import InlineItem, RankLocations, hash_of
from dcp_tensorizer._index.write import encode
from dcp_tensorizer._tensor_file.names import StoredItem, data_file_name
from dcp_tensorizer._tensor_file.regions import Region

COLUMNS = 4


def file_of(rank: int) -> str:
    return data_file_name(rank, 0, "a" * 32)


def chunk_item(rank: int, key: str, rows: int, kind: str = "tensor") -> StoredItem:
    dtype = "uint8" if kind == "wrapper" else "float32"
    return StoredItem(file_of(rank), key, 300_000, rows * COLUMNS * 4, dtype, kind, b"12345678")


def tensor_of(world: int, rows: int) -> TensorStorageMetadata:
    """Describes a tensor with ``rows`` rows on each rank."""
    size = torch.Size([rows, COLUMNS])
    chunks = [ChunkStorageMetadata(torch.Size([rank * rows, 0]), size) for rank in range(world)]
    return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([world * rows, COLUMNS]), chunks)


def index_of(world: int, *, keys: int = 1, rank: int | None = None, kind: str = "tensor", without: int = -1) -> bytes:
    """Returns an index of tensors ``w0``, ``w1``, ... with two rows per rank, and an object ``o`` of rank 0."""
    described: dict[str, Any] = {f"w{n}": tensor_of(world, 2) for n in range(keys)}
    described["o"] = BytesStorageMetadata()
    blob = StoredItem(file_of(0), "o", 0, 4, "uint8", "object", b"12345678")
    parts = []
    for owner in range(world):
        items: dict[Any, StoredItem] = {
            (f"w{n}", (2 * owner, 0)): chunk_item(owner, f"w{n}", 2, kind) for n in range(keys)
        }
        inline = []
        if owner == 0:
            items["o", None] = blob
            inline = [InlineItem(hash_of("o", None), blob._replace(file="", name="", offset=0), b"blob")]
        if owner != without:
            parts.append(RankLocations.of(owner, items, {file_of(owner): 1 << 30}, inline=inline))
    return encode(Metadata(described), parts, rank=rank)


def opened(data: bytes) -> Index:
    return Index(IndexFile("m", read_head(data, "m"), data))


def shown(index: Index, key: str = "w0") -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns the chunks of each tensor in a load's metadata."""
    entry = index.metadata().state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]


def read_of(key: str, offset: tuple[int, ...] | None, region: Region | None) -> ReadItem:
    """Returns an item of a load plan: a region of the chunk at an offset, or an object."""
    kind = LoadItemType.BYTE_IO if region is None else LoadItemType.TENSOR
    stored = MetadataIndex(key, None if offset is None else torch.Size(offset))
    start, size = region or ((), (0,))
    return ReadItem(kind, MetadataIndex("y"), torch.Size([]), stored, torch.Size(start), torch.Size(size))


def pieces_of(index: Index, key: str, offset: tuple[int, ...] | None, region: Region | None) -> list[Piece]:
    """Returns the stored chunks of one item."""
    return index.locate([read_of(key, offset, region)])[0]


def test_a_tensor_is_shown_whole_and_stored_in_chunks() -> None:
    """Planners get whole tensors from `metadata`, and tools get the chunks from `stored_metadata`."""
    index = opened(index_of(3))
    assert shown(index) == [((0, 0), (6, 4))]
    stored = index.stored_metadata().state_dict_metadata["w0"]
    assert stored == tensor_of(3, 2)
    assert index.incomplete_layouts() == {}


@pytest.mark.parametrize(
    "data",
    [index_of(3, without=1), index_of(3, kind="wrapper")],
    ids=["one is not stored", "no plain elements"],
)
def test_chunks_that_do_not_make_up_a_tensor_are_shown(data: bytes) -> None:
    """Incomplete tensors, and wrappers, are shown in chunks, each of which is found by its offset."""
    index = opened(data)
    assert shown(index) == [((0, 0), (2, 4)), ((2, 0), (2, 4)), ((4, 0), (2, 4))]
    assert {key: len(layout) for key, layout in index.incomplete_layouts().items()} == {"w0": 3}
    (piece,) = pieces_of(index, "w0", (4, 0), Region((1, 0), (1, 4)))
    assert (piece.item.file, piece.region, piece.part) == (file_of(2), Region((1, 0), (1, 4)), Region((0, 0), (1, 4)))


def test_the_pieces_of_a_region() -> None:
    """Rows 1 to 4 and two columns are in the chunks of three ranks."""
    index = opened(index_of(4))
    assert pieces_of(index, "w0", (0, 0), Region((1, 2), (4, 2))) == [
        Piece(chunk_item(0, "w0", 2), (2, 4), Region((1, 2), (1, 2)), Region((0, 0), (1, 2))),
        Piece(chunk_item(1, "w0", 2), (2, 4), Region((0, 2), (2, 2)), Region((1, 0), (2, 2))),
        Piece(chunk_item(2, "w0", 2), (2, 4), Region((0, 2), (1, 2)), Region((3, 0), (1, 2))),
    ]
    assert pieces_of(index, "w0", (0, 0), Region((0, 0), (0, 4))) == []


def test_a_small_value_is_in_the_index_itself() -> None:
    """A load opens no data file for a small value; tools find the value in its file."""
    index = opened(index_of(2))
    (piece,) = pieces_of(index, "o", None, None)
    ((name, content),) = index.in_memory.items()
    assert (piece.item.file, name) == (".metadata", ".metadata")
    assert content[piece.item.offset : piece.item.offset + piece.item.length] == b"blob"
    assert index.stored_metadata().storage_data["items"]["o", None].file == file_of(0)


def test_what_is_not_there_is_named() -> None:
    """The error names the key and the offset of the missing chunk."""
    index = opened(index_of(3, without=1))
    with pytest.raises(MetadataError, match=r"m has no data for 'w0' at offset \(2, 0\)"):
        pieces_of(index, "w0", (2, 0), Region((0, 0), (2, 4)))
    with pytest.raises(MetadataError, match=r"m has no data for 'x'$"):
        pieces_of(index, "x", None, None)
    with pytest.raises(MetadataError, match=r"m has no data for 'w0' at offset \(0, 0\)"):
        pieces_of(opened(index_of(1, without=0)), "w0", (0, 0), Region((0, 0), (2, 4)))
    with pytest.raises(MetadataError, match=r"m: 4 of 8 elements of 'w0' are stored in the region"):
        pieces_of(opened(index_of(3)), "w0", (0, 0), Region((5, 0), (2, 4)))


class Counted:
    """A file that records the ranges that are read, and counts their bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.nbytes = 0

    def __call__(self, offset: int, nbytes: int) -> bytes:
        self.nbytes += nbytes
        return self.data[offset : offset + nbytes]


def test_a_rank_reads_the_places_of_those_whose_data_it_needs() -> None:
    """One of 512 ranks with 100 tensors each reads one section to load its own tensors."""
    file = Counted(index_of(512, keys=100))
    assert len(file.data) > 2 * FIRST_BYTES
    index = Index(open_index("m", file.data[:FIRST_BYTES], file))
    first = file.nbytes
    wanted = [read_of(f"w{n}", (0, 0), Region((2 * 300, 0), (2, 4))) for n in range(100)]
    index.locate([*wanted, read_of("o", None, None)])
    assert 0 < file.nbytes - first < 6000
    before = file.nbytes
    assert {piece.item.file for pieces in index.locate(wanted) for piece in pieces} == {file_of(300)}
    assert file.nbytes == before


def test_of_a_chunk_that_several_ranks_have_written_the_last_ones_is_read() -> None:
    """The last rank's copy of a chunk counts, as in torch's storage, whose index is a dict."""
    described: Any = {"w": tensor_of(1, 2)}
    parts = [RankLocations.of(r, {("w", (0, 0)): chunk_item(r, "w", 2)}, {file_of(r): 1 << 30}) for r in range(3)]
    index = opened(encode(Metadata(described), parts))
    (piece,) = pieces_of(index, "w", (0, 0), Region((0, 0), (2, 4)))
    assert piece.item.file == file_of(2)


def test_small_values_beyond_the_room_for_them_are_read_from_their_files() -> None:
    """The index holds one mebibyte of small values, and the others are read from data files."""
    blob = StoredItem(file_of(0), "x", 0, 4000, "uint8", "object", b"12345678")
    keys = [f"o{n}" for n in range(600)]
    inline = [InlineItem(hash_of(k, None), blob._replace(file="", name=""), bytes(4000)) for k in keys]
    part = RankLocations.of(0, {(k, None): blob._replace(name=k) for k in keys}, {file_of(0): 1 << 30}, inline=inline)
    index = opened(encode(Metadata(dict.fromkeys(keys, BytesStorageMetadata())), [part]))
    files = [pieces_of(index, key, None, None)[0].item.file for key in keys]
    assert files.count(".metadata") == (1 << 20) // 4000
    assert files[-1] == file_of(0)
