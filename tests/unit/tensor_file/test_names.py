"""Tests of names, block sizes and index entries of the stored format."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_tensorizer._tensor_file.layout import lay_out
from dcp_tensorizer._tensor_file.names import (
    StoredItem,
    block_size,
    data_file_name,
    index_entry_size,
    is_data_file_name,
    metadata_file_name,
)

from ...lab.seams import sources
from ...lab.states import ALL_DTYPES, dtype_name, filled

SAVE = "0123456789abcdef" * 2
PROLOGUE = 5 + 4 + 32 + 8 + 8 + 8 + 8
"""Bytes before the index in a tensorizer file."""


@given(st.integers(1, 1 << 44))
def test_a_tensor_has_at_most_64_blocks_of_64_kib_to_8_mib(nbytes: int) -> None:
    """Larger tensors have more blocks of 8 MiB, and no element is in two blocks."""
    step = block_size(nbytes)
    assert 64 * 1024 <= step <= 8 << 20
    assert step % 16 == 0
    assert -(-nbytes // step) <= 64 or step == 8 << 20


@pytest.mark.parametrize(
    ("nbytes", "step"),
    [
        (0, 65536),
        (1, 65536),
        (64 * 65536, 65536),
        (64 * 65536 + 1, 65552),
        (64 << 20, 1 << 20),
        (512 << 20, 8 << 20),
        (100 << 30, 8 << 20),
    ],
)
def test_block_sizes_are_part_of_the_format(nbytes: int, step: int) -> None:
    """Existing checkpoints are read with these sizes; a change needs a new format version."""
    assert block_size(nbytes) == step


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.uuids().map(lambda uuid: uuid.hex))
def test_data_file_names_are_recognised(rank: int, number: int, save_id: str) -> None:
    """The names that this package makes are recognised."""
    name = data_file_name(rank, number, save_id)
    assert name == f"__{rank}_{number}_{save_id}.tensors"
    assert is_data_file_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".metadata",
        f"../__0_0_{SAVE}.tensors",
        f"/__0_0_{SAVE}.tensors",
        f"a/__0_0_{SAVE}.tensors",
        f"__0_0_{SAVE}.tensors/../x",
        f"__0_0_{SAVE}.tensors\n",
        f"__0_0_{SAVE.upper()}.tensors",
        f"__0_0_{SAVE[1:]}.tensors",
        f"__-1_0_{SAVE}.tensors",
        "__0_0.distcp",
    ],
)
def test_other_names_are_not(name: str) -> None:
    """Names that lead out of the directory, and other programs' names, are not recognised."""
    assert not is_data_file_name(name)


def test_metadata_names_are_those_of_torch() -> None:
    """DCP's tools look for ``.metadata``, and for a rank's own metadata beside it."""
    assert [metadata_file_name(), metadata_file_name(0), metadata_file_name(17)] == [
        ".metadata",
        "__0.metadata",
        "__17.metadata",
    ]


def test_an_item_without_bytes_is_in_no_file() -> None:
    """The item still has its dtype and kind."""
    assert StoredItem.empty("int8", "object") == ("", "", 0, 0, "int8", "object", b"", b"")
    assert StoredItem.empty("int8").kind == "tensor"


def index_length(name: str, tensor: torch.Tensor) -> int:
    """Returns the size of the index of a tensorizer file of one tensor."""
    layout = lay_out(sources([(name, tensor)]))
    (entry,) = layout.entries
    return layout.head.index(struct.pack("<QQ", entry.offset, entry.length)) + 16 - PROLOGUE


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("name", ["x", "\N{SNOWMAN}" * 50, "n" * 1024], ids=["short", "unicode", "long"])
def test_index_entries_are_never_larger_than_planned(dtype: torch.dtype, name: str) -> None:
    """The bound holds for every dtype, and is close enough to fill files."""
    for shape in ((), (3,), (1,) * 20):
        real, bound = index_length(name, filled(dtype, shape)), index_entry_size(name, len(shape))
        assert bound - 60 - 4 * len(shape) <= real <= bound
