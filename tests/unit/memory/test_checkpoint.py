"""A state in memory as a checkpoint, which loads like one on storage."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp_tensorizer import ChecksumMismatch, MetadataError, SavePlanner, unwrap
from dcp_tensorizer._index.schema import SaveRecord
from dcp_tensorizer._memory.checkpoint import StateCheckpoint, StateReader, state_part
from dcp_tensorizer._memory.keeper import _HeldPart
from dcp_tensorizer._memory.protocol import StateHead, StatePart
from dcp_tensorizer._runtime.forks import Descriptor
from dcp_tensorizer._staging.stager import Stager


def kept(state: Mapping[str, Any], rank: int = 0, world_size: int = 1) -> tuple[StatePart, Descriptor]:
    """Returns a state and its buffer, as a keeper sends them."""
    staged = Stager().stage(dict(state))
    buffer = staged.staged_save.buffer
    assert buffer is not None
    head = StateHead("0" * 32, 1, "run", rank, world_size, SaveRecord(1, None, (), {}))
    held = _HeldPart(state_part(head, staged, SavePlanner(enable_plan_caching=False)), os.dup(buffer.fd))
    held.take_digests()
    return replace(held.part, digests=held.digests.result()), Descriptor(held.fd)


def load(state: dict[str, Any], *states: tuple[StatePart, Descriptor], **options: Any) -> None:
    reader = StateReader(StateCheckpoint("memory", states), options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=reader, no_dist=True)


def test_everything_comes_back() -> None:
    """The load restores tensors of any dtype, shape and size, empty tensors, and objects."""
    state = {
        "w": torch.randn(1000, 300),
        "b": {"half": torch.randn(7).bfloat16(), "none": torch.empty(0, 3), "scalar": torch.tensor(3)},
        "step": 12,
        "text": ["a", {"b": 1.5}],
    }
    loaded = {
        "w": torch.zeros(1000, 300),
        "b": {"half": torch.zeros(7).bfloat16(), "none": torch.empty(0, 3), "scalar": torch.tensor(0)},
        "step": 0,
        "text": ["", {"b": 0.0}],
    }
    load(loaded, kept(state))
    assert torch.equal(loaded["w"], state["w"])
    for key, value in state["b"].items():
        assert torch.equal(loaded["b"][key], value)
    assert (loaded["step"], loaded["text"]) == (12, ["a", {"b": 1.5}])


def test_of_what_several_ranks_have_the_last_one_counts() -> None:
    """If several ranks have an item, the last part counts, and each rank passes its own last."""
    loaded = {"a": torch.zeros(3), "rank": -1}
    load(loaded, kept({"a": torch.ones(3), "rank": 0}, 0, 2), kept({"a": torch.full((3,), 2.0), "rank": 1}, 1, 2))
    assert (loaded["a"].tolist(), loaded["rank"]) == ([2.0] * 3, 1)


def test_chunks_of_several_ranks_are_joined() -> None:
    """A tensor of which each rank has a part is loaded whole."""
    parts = []
    for rank in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            local, mesh = torch.full((3, 2), float(rank)), DeviceMesh("cpu", [0, 1])
            parts.append(kept({"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}, rank, 2))
        finally:
            dist.destroy_process_group()
    loaded = {"w": torch.full((6, 2), 7.0)}
    load(loaded, *parts)
    assert loaded["w"].tolist() == [[0.0, 0.0]] * 3 + [[1.0, 1.0]] * 3


def test_a_load_without_a_template() -> None:
    """A load without a template returns the saved structure with the keys of all ranks, as from storage."""
    first = {"model": {"w": torch.ones(3)}, "list": [torch.zeros(1), 5], "a.b": 1}
    second = {"model": {"w": torch.ones(3), "v": torch.full((2,), 2.0)}}
    loaded = dict[str, Any]()
    reader = StateReader(StateCheckpoint("memory", [kept(first, 0, 2), kept(second, 1, 2)]), {})
    _load_state_dict(loaded, reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert loaded["model"]["w"].tolist() == [1.0] * 3
    assert loaded["model"]["v"].tolist() == [2.0] * 2
    assert [loaded["list"][0].tolist(), *loaded["list"][1:], loaded["a.b"]] == [[0.0], 5, 1]
    assert set(loaded) == {"model", "list", "a.b"}


def test_memory_that_has_changed_is_an_error() -> None:
    """The error names the key."""
    content, buffer = kept({"a": torch.ones(300_000)})
    os.pwrite(buffer.number, b"\x01", 1000)
    with pytest.raises(CheckpointException) as caught:
        load({"a": torch.zeros(300_000)}, (content, buffer))
    error = unwrap(caught.value)
    assert isinstance(error, ChecksumMismatch)
    assert "'a'" in str(error)


def test_a_key_that_is_not_there() -> None:
    """The error is the same as for a checkpoint on storage."""
    with pytest.raises(CheckpointException) as caught:
        load({"b": torch.zeros(3)}, kept({"a": torch.ones(3)}))
    assert "b" in str(unwrap(caught.value))
    assert not isinstance(unwrap(caught.value), MetadataError)


def test_memory_that_nobody_reads_any_more_is_released() -> None:
    """The load closes the buffers, even if the reader lives longer."""
    checkpoint = StateCheckpoint("memory", [kept({"a": torch.ones(3)})])
    reader = StateReader(checkpoint, {})
    loaded = {"a": torch.zeros(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert loaded["a"].tolist() == [1.0] * 3
    (name,) = checkpoint._buffers
    with pytest.raises(OSError, match="Bad file descriptor"):
        checkpoint.open(name).read_into([memoryview(bytearray(4))], 0)
