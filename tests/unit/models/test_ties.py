"""Tests of ties: which names of a state dict are one tensor, and which of these names a model has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dcp_tensorizer._models.layout import ModelOptions, plan_model, rank_layout
from dcp_tensorizer._models.ties import ties_of
from dcp_tensorizer._storage.base import SharedFile
from dcp_tensorizer._writer_process.shared_job import SharedFilePart

from ...lab.hooks import Shards

SQUARE = torch.arange(16.0).view(4, 4)
COMPLEX = torch.arange(4.0) + 1j


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("first", "second", "tied"),
    [
        (SQUARE, SQUARE, True),
        (SQUARE, torch.nn.Parameter(SQUARE), True),
        (SQUARE, SQUARE.view(2, 8).view(4, 4), True),
        (SQUARE.T, SQUARE.T, True),
        (COMPLEX.conj(), COMPLEX.conj(), True),
        (SQUARE, SQUARE.clone(), False),
        (SQUARE, SQUARE.T, False),
        (SQUARE, SQUARE[:3], False),
        (SQUARE[:2], SQUARE[1:3], False),
        (SQUARE, SQUARE.view(torch.int32), False),
        (COMPLEX, COMPLEX.conj(), False),
        (COMPLEX.imag, COMPLEX.conj().imag, False),
        (SQUARE[:0], SQUARE[:0], False),
        (freed(), freed(), False),
    ],
)
def test_tied_tensors_are_the_same_elements_read_in_the_same_way(
    first: torch.Tensor, second: torch.Tensor, tied: bool
) -> None:
    """Tensors are tied if they view the same memory in the same way, with the same dtype and lazy conjugate."""
    assert ties_of({"a": first, "nested": {"b": second}}) == ({"nested.b": "a"} if tied else {})


def test_ranks_may_have_tied_names_in_another_order() -> None:
    """One of the tied names is written, and each rank finds out which of its names are not."""
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size([4]))
    items = [WriteItem(MetadataIndex(key), WriteItemType.TENSOR, tensor_data=data) for key in "abcd"]
    ties = [{"b": "a"}, {"a": "b"}, {"c": "b"}, {"a": "c", "b": "c"}]
    plan = plan_model([SavePlan(items)], ModelOptions(), path="p", order={}, ties=ties)
    assert plan.dropped == {"b", "c"}
    shared = [SharedFilePart(SharedFile(f"f{n}", "", of.nbytes, ""), 1) for n, of in enumerate(plan.files)]
    layout = rank_layout(plan, shared, "id")
    assert layout.dropped(["d", "c", "a", "unknown", "b"]) == ["c", "b"]


def part(memory: torch.Tensor, start: int) -> torch.Tensor:
    """Returns a view that describes itself as rows of a larger tensor."""
    view: Any = memory.view_as(memory)
    view.__create_write_items__ = Shards((8, 2), [((start, 0), (4, 2))]).__create_write_items__
    return view  # type: ignore[no-any-return]


def test_what_tensors_describe_as_their_part_counts() -> None:
    """Tensors that describe the same memory as different parts are not tied."""
    memory = torch.ones(4, 2)
    state = {"a": part(memory, 0), "b": part(memory, 4), "c": part(memory, 0), "d": memory, "e": memory.view_as(memory)}
    assert ties_of(state) == {"c": "a", "e": "d"}
