"""What is read for a target: whether it fits, whether it is one run of bytes, and whether it is read in place."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_tensorizer import MetadataError, ReadError
from dcp_tensorizer._format.chunks import Region
from dcp_tensorizer._loading.read_target import ReadTarget, can_read_in_place, read_apart, target_of

from ...support import stored_item


def test_only_plain_host_memory_is_read_in_place() -> None:
    """Same dtype, C order, on the CPU, neither conjugated nor negated; anything else goes through scratch memory."""
    assert can_read_in_place(torch.empty(3, 4), torch.float32)
    assert can_read_in_place(torch.empty(6, 4)[2:], torch.float32)
    assert not can_read_in_place(torch.empty(3, 4), torch.float64)
    assert not can_read_in_place(torch.empty(3, 4).t(), torch.float32)
    assert not can_read_in_place(torch.empty(1, 4).expand(3, 4), torch.float32)
    assert not can_read_in_place(torch.empty(3, device="meta"), torch.float32)
    assert not can_read_in_place(torch.zeros(4, 5, dtype=torch.complex64).conj(), torch.complex64)
    assert not can_read_in_place(torch._neg_view(torch.zeros(3)), torch.float32)


def test_a_region_is_one_run_of_bytes_or_not() -> None:
    """Of every region of a small tensor, compared with the positions of its elements."""
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


def test_which_targets_share_memory() -> None:
    """Those that overlap, contiguous or not, are not read in place; those that lie side by side are."""
    memory = torch.zeros(100)
    tensors = [
        memory[:16].view(4, 4),
        memory[16:32].view(4, 4),
        memory[31:47].view(4, 4),
        memory[60:].as_strided((4, 4), (8, 1)),
        memory[80:96].view(4, 4),
        torch.zeros(4, 4),
    ]
    item, region = stored_item(64, dtype="float32"), Region((0, 0), (4, 4))
    targets = read_apart([ReadTarget.of("t", item, (4, 4), region, tensor) for tensor in tensors])
    assert [target.in_place for target in targets] == [True, False, False, False, False, True]
    assert all(target.tensor is tensor for target, tensor in zip(targets, tensors, strict=True))


# --- from a planner's item -------------------------------------------------------------------------------------------

CHUNK = ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([2, 5]))
METADATA = Metadata({"x": TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4, 5]), [CHUNK])})


def target_in(
    tensor: torch.Tensor,
    *,
    first: tuple[int, ...] = (0, 0),
    chunk: tuple[int, ...] = (2, 0),
    number: int | None = 0,
    nbytes: int = 40,
    dtype: str = "float32",
    world_size: int = 1,
) -> ReadTarget | None:
    """What to read for a region of a stored chunk of 2 x 5 elements that has a tensor's shape."""
    index = MetadataIndex("x", torch.Size(chunk), number)
    zeros = torch.Size([0] * tensor.ndim)
    read_item = ReadItem(LoadItemType.TENSOR, MetadataIndex("y"), zeros, index, torch.Size(first), tensor.shape)
    return target_of("/ckpt", METADATA, read_item, stored_item(nbytes, dtype=dtype), tensor, world_size)


@pytest.mark.parametrize("number", [0, 7, None])
def test_what_is_read_for_an_item_of_a_plan(number: int | None) -> None:
    """The region within its chunk, which is found by its offset whatever its number is said to be."""
    tensor = torch.zeros(1, 3)
    target = target_in(tensor, first=(1, 2), number=number)
    assert target is not None
    assert (target.key, target.shape, target.region) == ("y", (2, 5), Region((1, 2), (1, 3)))
    assert target.tensor is tensor
    assert (target.in_place, target.shared, target.run) == (True, False, (28, 40))


def test_an_item_without_elements_is_not_read() -> None:
    """There is nothing to fetch for it."""
    assert target_in(torch.zeros(0, 5)) is None


def test_other_ranks_read_columns_too_but_not_rows() -> None:
    """Of rows that are cut by column, several ranks read the same bytes; alone, a rank shares with nobody."""
    columns, rows = torch.zeros(2, 3), torch.zeros(1, 5)
    targets = [target_in(tensor, world_size=size) for tensor, size in ((columns, 2), (columns, 1), (rows, 2))]
    assert [target is not None and target.shared for target in targets] == [True, False, False]


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(5).expand(2, 5), "share memory"),
        (torch.zeros(2, 5, dtype=torch.int32), "does not convert to the torch.int32"),
    ],
    ids=["expanded", "dtype"],
)
def test_a_target_that_does_not_fit_is_an_error(tensor: torch.Tensor, words: str) -> None:
    """It names the key."""
    with pytest.raises(ReadError, match=f"'y'.*{words}"):
        target_in(tensor)


def test_a_target_of_another_shape_is_an_error() -> None:
    """It names the key and both shapes."""
    index = MetadataIndex("x", torch.Size([2, 0]), 0)
    zeros = torch.Size([0, 0])
    read_item = ReadItem(LoadItemType.TENSOR, MetadataIndex("y"), zeros, index, zeros, torch.Size([2, 5]))
    with pytest.raises(ReadError, match=r"'y': stored \(2, 5\) do not fit a target of \(3, 5\)"):
        target_of("/ckpt", METADATA, read_item, stored_item(40, dtype="float32"), torch.zeros(3, 5), 1)


def test_metadata_that_contradicts_itself_is_an_error() -> None:
    """A chunk that is not there, or one that has other bytes than its shape says."""
    with pytest.raises(MetadataError, match=r"/ckpt has no chunk of 'x' at offset torch.Size\(\[1, 0\]\)"):
        target_in(torch.zeros(2, 5), chunk=(1, 0))
    with pytest.raises(MetadataError, match=r"/ckpt: 'y' of shape \(2, 5\) has 36 bytes stored"):
        target_in(torch.zeros(2, 5), nbytes=36)
