"""Tensors that describe which part of a tensor they are: staged with their descriptions, or refused by key."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp_tensorizer import StagingError
from dcp_tensorizer._runtime.torch_compat import DTensor, describes_part, local_parts, written_shards
from dcp_tensorizer._staging.stager import Stager

from ...differential.run import scribble
from ...differential.values import HOW_DESCRIBED, Described, Maker, Meshes
from .staging import staged

RANK, RANKS = 1, 2
FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


@pytest.fixture
def maker() -> Iterator[Maker]:
    """Makes the values of one of two ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    yield Maker(RANK, Meshes(RANKS))
    dist.destroy_process_group()


def wrapped_shards(maker: Maker) -> torch.Tensor:
    """A tensor of torchrec's kind, which is nothing but its shards."""
    return LocalShardsWrapper([torch.ones(3, 2), torch.full((3, 2), 2.0)], [(0, 4), (0, 8)])


def described(maker: Maker, how: str, pieces: int) -> torch.Tensor:
    if how == "wrapped shards":
        return wrapped_shards(maker)
    value: torch.Tensor = maker.make(Described("float32", (9, 2), how, pieces, shift=1, seed=3))
    return value


def answers(key: str, tensor: torch.Tensor) -> dict[str, Any]:
    """Everything that DCP learns of a tensor."""
    written = written_shards(key, tensor)
    return {
        "items": [item for item, _ in written],
        "written": [shard.tolist() for _, shard in written],
        "parts": [(tuple(offsets), part.tolist()) for offsets, part in local_parts(tensor)],
        "fields": [None if callable(value := getattr(tensor, name, None)) else value for name in FIELDS],
    }


@pytest.mark.parametrize("pieces", [1, 2], ids=["one block", "two blocks"])
@pytest.mark.parametrize("how", [*HOW_DESCRIBED, "wrapped shards"])
def test_a_staged_tensor_describes_the_same_part(stager: Stager, maker: Maker, how: str, pieces: int) -> None:
    """It returns the items, chunks, shards and fields of staging, under any key, whatever training changes since."""
    live = described(maker, how, pieces)
    assert describes_part(live)
    before, renamed = answers("w", live), answers("v", live)
    copied = staged(stager, {"a": [live]})["a"][0]
    scribble([live] if how != "wrapped shards" else list(live.local_shards()))  # type: ignore[attr-defined]
    for name in vars(live):
        setattr(live, name, None)
    assert answers("w", copied) == before
    assert answers("v", copied) == renamed
    assert isinstance(copied, DTensor) == isinstance(live, DTensor)
    assert copied.shape == live.shape


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_kept_as_it_was(stager: Stager, name: str) -> None:
    """A field is staged without the other fields, also if torch does not know it: a planner may read it."""
    live, offsets = torch.ones(2), [[0]]
    setattr(live, name, offsets)
    copied = staged(stager, {"w": live})["w"]
    offsets[0][0] = 1
    assert getattr(copied, name) == [[0]]
    assert copied.tolist() == [1.0, 1.0]


def test_values_that_dcp_does_not_write_are_not_staged(stager: Stager, maker: Maker) -> None:
    """Of a tensor in blocks only the blocks are copied. The tensor around them has no values."""
    copied = staged(stager, {"w": described(maker, "methods", 2), "x": described(maker, "methods", 1)})
    assert copied["w"].is_meta
    assert not copied["x"].is_meta
    assert [shard.data_ptr() for _, shard in written_shards("x", copied["x"])] == [copied["x"].data_ptr()]


def test_shards_of_other_layouts_and_other_memory(stager: Stager) -> None:
    """Shards may be columns, or a tensor that only a method returns."""
    for make in (lambda rows: rows[:, 1:], lambda rows: rows * 10):
        value = torch.arange(6.0).view(2, 3)
        expected = make(value).tolist()
        value.__get_tensor_shard__ = lambda index, make=make, rows=value: make(rows)  # type: ignore[attr-defined]
        copied = staged(stager, {"w": value})["w"]
        value.zero_()
        ((_, shard),) = written_shards("w", copied)
        assert shard.tolist() == expected
        assert shard.is_contiguous()


def test_the_live_tensor_is_not_kept_alive(stager: Stager, maker: Maker) -> None:
    """The staged tensor holds no reference to the live one, whose methods are often closures over it."""
    live = described(maker, "methods", 2)
    alive = weakref.ref(live)
    copied = staged(stager, {"w": live})
    del live
    gc.collect()
    assert alive() is None
    assert len(written_shards("w", copied["w"])) == 2


def test_tensors_that_other_ranks_write_have_no_values(stager: Stager, maker: Maker) -> None:
    """They describe their parts, so that they can be planned."""
    live = described(maker, "methods of a local tensor", 2)
    copied = stager.stage({"w": live}, omitted=frozenset({"w"}))["w"]
    assert answers_of_plan(copied) == answers_of_plan(live)
    assert all(shard.is_meta for _, shard in written_shards("w", copied))


def answers_of_plan(tensor: torch.Tensor) -> list[Any]:
    return [item for item, _ in written_shards("w", tensor)]


def moved(item: Any) -> Any:
    return replace(item, index=replace(item.index, offset=torch.Size([2])))


def broken(*args: object) -> Any:
    raise NotImplementedError("later")


def test_a_tensor_that_cannot_be_planned_is_refused_by_key(stager: Stager) -> None:
    """Its method raises, or DCP does not find a shard."""
    for name in ("__create_write_items__", "__get_tensor_shard__"):
        value = torch.ones(2)
        setattr(value, name, broken)
        with pytest.raises(StagingError, match=r"'a\.0' has attributes .*NotImplementedError: later"):
            staged(stager, {"a": [value]})
    value = torch.ones(2)
    value.__create_write_items__ = lambda key, this: [moved(item) for item in answers_of_plan(torch.ones(2))]  # type: ignore[attr-defined]
    with pytest.raises(StagingError, match=r"'w' has attributes .*can't find by offset"):
        staged(stager, {"w": value})


def test_a_described_tensor_cannot_be_pickled(stager: Stager, maker: Maker) -> None:
    """Inside an object and in PROCESS mode the error names the key, because a pickle would have no values."""
    staging = stager.stage({"a": {"w": described(maker, "methods", 2)}})
    with pytest.raises(StagingError, match=r"'a\.w' describes which part .*flatten_state_dict=True"):
        pickle.dumps(staging["a"]["w"])
    failed = pickle.loads(pickle.dumps(staging))
    with pytest.raises(StagingError, match=r"'a\.w' describes which part .*THREAD"):
        failed["staging"].__create_write_items__("staging", failed["staging"])
