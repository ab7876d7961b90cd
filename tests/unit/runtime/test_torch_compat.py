"""Functions that must agree with torch's own behaviour."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch.distributed._checkpointable import _Checkpointable
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp_tensorizer._runtime.torch_compat import (
    PART_NAMES,
    describes_part,
    is_plain,
    local_elements,
    local_parts,
    negated_view,
    plain_local,
    plain_tensor_at,
    whole_size,
)

from ...differential.values import HOW_DESCRIBED, Described, Maker, Meshes, Sharded

COMPLEX = torch.arange(6).to(torch.complex64).view(2, 3)
REAL = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    "tensor",
    [
        REAL,
        torch.nn.Parameter(REAL),
        REAL.T,
        REAL[:, 1:],
        REAL[1:],
        negated_view(REAL),
        COMPLEX,
        COMPLEX.conj(),
        COMPLEX.conj().imag,
        COMPLEX.real,
        torch.empty(0),
        torch.empty(2, 3, device="meta"),
    ],
)
def test_plain_is_what_torch_says_of_a_tensors_memory(tensor: torch.Tensor) -> None:
    """`is_plain` agrees with torch: contiguous, and neither conjugated nor negated."""
    assert is_plain(tensor) == (tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())


def test_all_attributes_by_which_dcp_asks_for_a_part_are_known() -> None:
    """`PART_NAMES` has all attributes of torch's protocols. A release of torch may add one."""
    asked = {name for name in vars(_Checkpointable) if name.startswith(("__create_", "__get_"))}
    assert asked == {"__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__"}
    if find_spec("torch.distributed.checkpoint.protocol") is not None:
        asked |= set(import_module("torch.distributed.checkpoint.protocol").CheckpointableTensor.__annotations__)
    assert asked <= PART_NAMES
    for name in PART_NAMES:
        for tensor in (torch.ones(2), torch.nn.Parameter(torch.ones(2))):
            assert not describes_part(tensor)
            setattr(tensor, name, None)
            assert describes_part(tensor)


@pytest.fixture
def maker() -> Iterator[Maker]:
    """Makes the values of the second of two ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield Maker(1, Meshes(2))
    dist.destroy_process_group()


@pytest.mark.parametrize("how", HOW_DESCRIBED)
def test_the_parts_of_a_tensor_that_describes_them(maker: Maker, how: str) -> None:
    """DCP is asked for the offsets and elements of its parts: here blocks of three of nine rows."""
    value = maker.make(Described("float32", (9, 2), how, 2, shift=1))
    index = MetadataIndex("w", torch.Size((0, 0)))
    assert plain_local(value) is None
    assert plain_tensor_at(index, {"w": value}) is None
    pieces = [(0, 3), (6, 3)] if not how.startswith("two") else [(0, 5)]
    parts = [(offsets[0], len(part)) for offsets, part in local_parts(value)]
    assert parts == pieces
    assert local_elements(value, torch.Size((9, 2))) == sum(2 * rows for _, rows in pieces)
    assert whole_size(value) == ((9, 2) if how == "fields" or "local" in how else value.shape)


def test_padding_is_no_element() -> None:
    """A tensor may have more elements than the part that it describes."""
    padded = torch.ones(4, 2)
    padded.__create_chunk_list__ = lambda: [ChunkStorageMetadata(torch.Size((6, 0)), torch.Size((3, 2)))]  # type: ignore[attr-defined]
    assert local_elements(padded, torch.Size((9, 2))) == 6


def test_other_tensors_are_what_they_hold(maker: Maker) -> None:
    """The part of a plain tensor is the tensor, and the part of a DTensor is its local tensor."""
    sharded, plain = maker.make(Sharded("float32", (9, 2), "0")), torch.ones(2, 2)
    index = MetadataIndex("w", torch.Size((0, 0)))
    assert plain_local(sharded) is sharded._local_tensor
    assert plain_tensor_at(index, {"w": plain}) is plain
    assert [(tuple(offsets), len(part)) for offsets, part in local_parts(sharded)] == [((5, 0), 4)]
    assert (local_elements(sharded, sharded.size()), whole_size(sharded)) == (8, (9, 2))
