"""Tests of `Load`: it locates the stored chunks of a plan's items."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_tensorizer import MetadataError
from dcp_tensorizer._formats.own import Index
from dcp_tensorizer._loading.deliver import Load, LoadOptions, keys_below_empty_dicts
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._tensor_file.regions import Region

from ..formats.test_own import chunk_item, file_of, index_of, opened


@pytest.fixture
def index() -> Index:
    """Returns the index of three ranks with two rows each."""
    return opened(index_of(3))


def rows(first: int, count: int, key: str = "w0") -> ReadItem:
    """Returns an item that reads some rows of a tensor."""
    zeros, offset = torch.Size([0, 0]), torch.Size([first, 0])
    stored = MetadataIndex(key, zeros)
    return ReadItem(LoadItemType.TENSOR, MetadataIndex("y"), zeros, stored, offset, torch.Size([count, 4]))


def load_of(index: Index, items: list[ReadItem], path: Path) -> Load:
    options = LoadOptions(verify=True, allow_pickle=False, threads=None, page_cache=None)
    return Load(open_storage(path), index, options, index.metadata(), items, None, False, lambda span: None)


def test_each_item_has_its_chunks(index: Index, tmp_path: Path) -> None:
    """The second item has chunks of two ranks; `files` has only the files of these chunks."""
    load = load_of(index, [rows(0, 1), rows(1, 2)], tmp_path)
    one, two = load.pieces
    assert [piece.item for piece in one] == [chunk_item(0, "w0", 2)]
    assert [piece.part for piece in two] == [Region((0, 0), (1, 4)), Region((1, 0), (1, 4))]
    assert load.files == {file_of(0), file_of(1)}


def test_a_plan_that_changes_does_not_change_them(index: Index, tmp_path: Path) -> None:
    """If a planner inserts items into its list, the load keeps the items of the local plan."""
    items = [rows(0, 1)]
    load = load_of(index, items, tmp_path)
    items.insert(0, rows(4, 2))
    assert load.items == [rows(0, 1)]
    assert [[piece.item.file for piece in pieces] for pieces in load.pieces] == [[file_of(0)]]


def test_what_is_stored_nowhere_is_named(index: Index, tmp_path: Path) -> None:
    """An item that is not stored is an error when the load is made."""
    with pytest.raises(MetadataError, match=r"m has no data for 'x'"):
        load_of(index, [rows(0, 1), rows(0, 1, key="x")], tmp_path)


@pytest.mark.parametrize(
    ("paths", "lost"),
    [({"a.b.w": ("a.b", "w"), "c.0.w": ("c", 0, "w")}, ["a.b.w", "c.0.w"]), ({}, ["c.0.w"]), (None, ["c.0.w"])],
)
def test_keys_of_an_empty_dict(paths: dict[str, tuple[str | int, ...]] | None, lost: list[str]) -> None:
    """The recorded paths show which dict a key is below; without them, the dots in the key do."""
    metadata = Metadata({}, planner_data=paths)
    state = {"a.b": {}, "c": [{}], "d": {"w": 1}}
    assert keys_below_empty_dicts(state, ["a.b.w", "c.0.w", "d.w"], metadata) == lost
    assert keys_below_empty_dicts({"d": {"w": 1}}, ["a.b.w", "d.w"], metadata) == []
