"""Tests of targets: whether an item fits its target, is one run of bytes, and is read in place."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_tensorizer import MetadataError, ReadError
from dcp_tensorizer._formats.catalog import Piece
from dcp_tensorizer._loading.plan import Casts, ReadTarget, can_read_in_place, non_overlapping_groups, targets_of
from dcp_tensorizer._tensor_file.regions import Region

from ...lab.seams import stored_item


def test_only_plain_host_memory_is_read_in_place() -> None:
    """A target in host memory is read in place if it has the stored dtype and C order, and is not lazily conjugated."""
    assert can_read_in_place(torch.empty(3, 4), torch.float32)
    assert can_read_in_place(torch.empty(6, 4)[2:], torch.float32)
    assert not can_read_in_place(torch.empty(3, 4), torch.float64)
    assert not can_read_in_place(torch.empty(3, 4).t(), torch.float32)
    assert not can_read_in_place(torch.empty(1, 4).expand(3, 4), torch.float32)
    assert not can_read_in_place(torch.empty(3, device="meta"), torch.float32)
    assert not can_read_in_place(torch.zeros(4, 5, dtype=torch.complex64).conj(), torch.complex64)
    assert not can_read_in_place(torch._neg_view(torch.zeros(3)), torch.float32)


def test_a_region_is_one_run_of_bytes_or_not() -> None:
    """The run of every region of a small tensor matches the positions of the region's elements."""
    shape = (3, 2, 4)
    positions = torch.arange(math.prod(shape)).view(shape)
    item = stored_item(24 * 2, dtype="int16")
    ranges = [[(start, stop) for start in range(n) for stop in range(start + 1, n + 1)] for n in shape]
    for bounds in itertools.product(*ranges):
        region = Region(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))
        elements = positions[tuple(slice(a, b) for a, b in bounds)].flatten().tolist()
        is_run = elements == list(range(elements[0], elements[-1] + 1))
        expected = (elements[0] * 2, elements[-1] * 2 + 2) if is_run else None
        assert ReadTarget.of("t", item, shape, region, torch.empty(region.size, dtype=torch.int16)).run == expected


def test_targets_that_share_memory_are_read_one_by_one() -> None:
    """Overlapping targets, contiguous or not, are read in the order of the plan, and all others at the same time."""
    memory = torch.zeros(100)
    tensors = {
        "a": memory[:16].view(4, 4),
        "b": memory[16:32].view(4, 4),
        "c": memory[31:47].view(4, 4),
        "d": memory[60:].as_strided((4, 4), (8, 1)),
        "e": memory[80:96].view(4, 4),
        "f": torch.zeros(4, 4),
    }
    item, region = stored_item(64, dtype="float32"), Region((0, 0), (4, 4))
    for order in ("abcdef", "edcbaf"):
        targets = [ReadTarget.of(key, item, (4, 4), region, tensors[key]) for key in order]
        turns = ["".join(target.key for target in turn) for turn in non_overlapping_groups(targets)]
        assert turns == [order[0] + order[-1] if order[0] == "a" else "af", *(k for k in order if k in "bcde")]
    tied = [ReadTarget.of(key, item, (4, 4), region, tensors["a"]) for key in "xy"]
    assert [[target.key for target in turn] for turn in non_overlapping_groups(tied)] == [["x"], ["y"]]


# --- from a planner's item -------------------------------------------------------------------------------------------

SIZE = torch.Size([4, 5])
METADATA = Metadata(
    {
        "x": TensorStorageMetadata(
            TensorProperties(torch.float32), SIZE, [ChunkStorageMetadata(torch.Size([0, 0]), SIZE)]
        )
    }
)
ROWS = Region((0, 0), (2, 5))  # of each of the two chunks


def targets_in(
    tensor: torch.Tensor,
    pieces: list[Piece] | None = None,
    *,
    lengths: tuple[int, ...] | None = None,
    dtype: str = "float32",
    world_size: int = 1,
    casts: Casts | None = None,
) -> list[ReadTarget]:
    """Returns the targets of an item of a tensor's shape in a stored chunk of 2 x 5 elements."""
    size = tuple(tensor.shape) if lengths is None else lengths
    region = Region((0, 0), size)
    pieces = [Piece(stored_item(40, dtype=dtype), (2, 5), region, region)] if pieces is None else pieces
    zeros, index = torch.Size([0, 0]), MetadataIndex("x", torch.Size([0, 0]))
    read_item = ReadItem(LoadItemType.TENSOR, MetadataIndex("y"), zeros, index, zeros, torch.Size(size))
    return targets_of("/ckpt", METADATA, world_size, {} if casts is None else casts, read_item, pieces, tensor)


def test_a_fake_tensor_has_no_targets() -> None:
    """A fake tensor takes no elements, whether it fits the item or not."""
    with FakeTensorMode():
        assert targets_in(torch.empty(2, 5)) == targets_in(torch.empty(3)) == []
    (target,) = targets_in(torch.empty(2, 5))
    assert (target.region, target.in_place) == (ROWS, True)


def test_an_item_of_a_plan_has_one_target() -> None:
    """The region of the stored chunk goes to the whole tensor, and has the key of the target."""
    tensor = torch.zeros(1, 3)
    (target,) = targets_in(
        tensor, [Piece(stored_item(40, dtype="float32"), (2, 5), Region((1, 2), (1, 3)), Region((0, 0), (1, 3)))]
    )
    assert (target.key, target.shape, target.region) == ("y", (2, 5), Region((1, 2), (1, 3)))
    assert target.tensor is tensor
    assert (target.in_place, target.shared, target.run) == (True, False, (28, 40))


def test_each_stored_chunk_goes_to_its_part_of_the_tensor() -> None:
    """Two chunks of rows go to the two halves of one tensor."""
    tensor = torch.zeros(4, 5)
    item = stored_item(40, dtype="float32")
    targets = targets_in(tensor, [Piece(item, (2, 5), ROWS, ROWS), Piece(item, (2, 5), ROWS, Region((2, 0), (2, 5)))])
    assert [target.region for target in targets] == [ROWS, ROWS]
    assert [target.tensor.data_ptr() - tensor.data_ptr() for target in targets] == [0, 40]
    assert all(target.in_place for target in targets)


def test_an_item_without_elements_is_not_read() -> None:
    """An item without elements has no targets, but must fit its tensor."""
    assert targets_in(torch.zeros(0, 5), []) == []
    with pytest.raises(ReadError, match="'y' needs a target of shape"):
        targets_in(torch.zeros(0, 5), [], lengths=(0, 4))


def test_other_ranks_read_columns_too_but_not_rows() -> None:
    """If a tensor is cut by column, several ranks read the same bytes; if it is cut by row, or on one rank, none do."""
    columns, rows = torch.zeros(2, 3), torch.zeros(1, 5)
    targets = [targets_in(tensor, world_size=size) for tensor, size in ((columns, 2), (columns, 1), (rows, 2))]
    assert [target.shared for of_item in targets for target in of_item] == [True, False, False]


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(5).expand(2, 5), "share memory"),
        (torch.zeros(2, 5, dtype=torch.int32), "cannot be converted to the torch.int32"),
    ],
    ids=["expanded", "dtype"],
)
def test_a_target_that_does_not_fit_is_an_error(tensor: torch.Tensor, words: str) -> None:
    """The error names the key."""
    with pytest.raises(ReadError, match=f"'y'.*{words}"):
        targets_in(tensor)


def test_a_target_of_another_shape_is_an_error() -> None:
    """The error names the key and both shapes."""
    with pytest.raises(ReadError, match=r"'y' needs a target of shape \(2, 5\), got \(3, 5\)"):
        targets_in(torch.zeros(3, 5), lengths=(2, 5))


def test_metadata_that_contradicts_itself_is_an_error() -> None:
    """A stored chunk whose size differs from its shape is an error."""
    with pytest.raises(MetadataError, match=r"/ckpt: 'y' of shape \(2, 5\) has 36 bytes stored"):
        targets_in(torch.zeros(2, 5), [Piece(stored_item(36, dtype="float32"), (2, 5), ROWS, ROWS)])
