"""The stored chunks of a plan's items: found once, also for items that a planner has put in their place."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_tensorizer import MetadataError
from dcp_tensorizer._index.layouts import Region
from dcp_tensorizer._index.read import Index
from dcp_tensorizer._loading.targets import Located

from ..index.test_read import chunk_item, file_of, index_of, opened


@pytest.fixture
def index() -> Index:
    """Of three ranks, each of which has two rows."""
    return opened(index_of(3))


def rows(first: int, count: int, key: str = "w0") -> ReadItem:
    """A read of so many rows of a tensor."""
    zeros, offset = torch.Size([0, 0]), torch.Size([first, 0])
    stored = MetadataIndex(key, zeros)
    return ReadItem(LoadItemType.TENSOR, MetadataIndex("y"), zeros, stored, offset, torch.Size([count, 4]))


def test_each_item_has_its_chunks(index: Index) -> None:
    """Of two ranks for the second item; no other file is named."""
    items = [rows(0, 1), rows(1, 2)]
    located = Located(index, items)
    one, two = located.pieces(items)
    assert [piece.item for piece in one] == [chunk_item(0, "w0", 2)]
    assert [piece.part for piece in two] == [Region((0, 0), (1, 4)), Region((1, 0), (1, 4))]
    assert located.files == {file_of(0), file_of(1)}


def test_items_of_another_plan_are_found_too(index: Index) -> None:
    """Also where a planner changes the list in place, and where other items equal those of the first plan."""
    first, other = rows(0, 1), rows(4, 2)
    items = [first]
    located = Located(index, items)
    (found,) = located.pieces([dataclasses.replace(first)])
    assert [piece.item.file for piece in found] == [file_of(0)]
    items.insert(0, other)
    assert [[piece.item.file for piece in pieces] for pieces in located.pieces(items)] == [[file_of(2)], [file_of(0)]]
    assert located.pieces([]) == []


def test_what_is_stored_nowhere_is_named(index: Index) -> None:
    """Before anything is read."""
    with pytest.raises(MetadataError, match=r"m has no data for 'x'"):
        Located(index, [rows(0, 1), rows(0, 1, key="x")])
