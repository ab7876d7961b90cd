"""A state dict as rows: those that torch's planner makes, also where they are not worked out anew."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.device_mesh import DeviceMesh

from dcp_tensorizer import SavePlanner
from dcp_tensorizer._planning.columns import row_of, rows_of

from .sharded_states import dtensor, state_of


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
