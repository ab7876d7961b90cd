"""A state dict as rows: those that torch's planner makes, also where they are not worked out anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp_tensorizer import SavePlanner
from dcp_tensorizer._planning.columns import row_of
from dcp_tensorizer._planning.rows import rows_of

RANK, RANKS = 2, 4


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two by two ranks, of which this is the third."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    yield DeviceMesh("cpu", torch.arange(RANKS).view(2, 2))
    dist.destroy_process_group()


def dtensor(mesh: DeviceMesh, placements: list[Placement], local: torch.Tensor, shape: tuple[int, ...]) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def state_of(mesh: DeviceMesh) -> dict[str, Any]:
    """Layouts that come again and again, and values of every other kind between them."""
    state: dict[str, Any] = {}
    alone = DeviceMesh("cpu", [RANK])
    for layer in range(3):
        state |= {
            f"{layer}.rows": dtensor(mesh, [Replicate(), Shard(0)], torch.rand(3, 5), (6, 5)),
            f"{layer}.uneven": dtensor(mesh, [Shard(0), Replicate()], torch.rand(3, 5), (7, 5)),
            f"{layer}.both": dtensor(mesh, [Shard(0), Shard(1)], torch.rand(3, 3), (6, 5)),
            f"{layer}.twice": dtensor(mesh, [Shard(0), Shard(0)], torch.rand(2, 5), (8, 5)),
            f"{layer}.replicated": dtensor(mesh, [Replicate(), Replicate()], torch.rand(6, 5), (6, 5)),
            f"{layer}.alone": dtensor(alone, [Shard(0)], torch.rand(6, 5), (6, 5)),
            f"{layer}.half": dtensor(mesh, [Replicate(), Shard(0)], torch.rand(3, 5).half(), (6, 5)),
            f"{layer}.gradient": dtensor(mesh, [Replicate(), Shard(0)], torch.rand(3, 5).requires_grad_(), (6, 5)),
            f"{layer}.plain": torch.rand(2, 2),
            f"{layer}.object": {"step", layer},
            f"{layer}.elsewhere": dtensor(DeviceMesh("cpu", [0]), [Shard(0)], torch.rand(0), (6, 5)),
        }
    return state


def test_rows_are_torchs(mesh: DeviceMesh) -> None:
    """Of every layout, dtype and flag, when it comes first and when it comes again; in torch's order."""
    state = state_of(mesh)
    for is_coordinator in (False, True):
        theirs = [row_of(item) for item in create_default_local_save_plan(state, is_coordinator).items]
        assert list(rows_of(state, is_coordinator=is_coordinator)) == theirs
    assert len(theirs) == 3 * 10


def test_a_sum_that_is_not_made_yet_is_refused_each_time(mesh: DeviceMesh) -> None:
    """As by torch: no rank has the values of a partial DTensor."""
    partial = dtensor(mesh, [Partial(), Shard(0)], torch.rand(3, 5), (6, 5))
    known = dtensor(mesh, [Replicate(), Shard(0)], torch.rand(3, 5), (6, 5))
    for state in ({"a": partial}, {"a": known, "b": partial}, {"a": known, "b": known, "c": partial}):
        with pytest.raises(ValueError, match="partial placements"):
            list(rows_of(state, is_coordinator=True))


def test_what_is_written_of_an_item_is_torchs(mesh: DeviceMesh) -> None:
    """The same memory, the same flag; and torch's error for a key that is not there."""
    ours, theirs = SavePlanner(), DefaultSavePlanner()
    state = state_of(mesh)
    for planner in (ours, theirs):
        planner.set_up_planner(state, is_coordinator=True)
    for item in create_default_local_save_plan(state, True).items:
        found, expected = ours.lookup_object(item.index), theirs.lookup_object(item.index)
        assert type(found) is type(expected)
        if isinstance(found, torch.Tensor):
            assert (found.data_ptr(), found.requires_grad) == (expected.data_ptr(), expected.requires_grad)
        else:
            assert found is expected
    with pytest.raises(ValueError, match="FQN"):
        ours.lookup_object(MetadataIndex("not there"))
