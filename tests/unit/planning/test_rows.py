"""The rows of a state dict equal the items of torch's planner, also if they are copied from another key."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.device_mesh import DeviceMesh

from dcp_tensorizer import SavePlanner, StagingError
from dcp_tensorizer._index.schema import item_key
from dcp_tensorizer._planning.columns import (
    PackedPaths,
    Pickled,
    Unsupported,
    columns_of_rows,
    item_of,
    pack_paths,
    row_of,
    rows_of,
    unpack_paths,
    with_keys,
)
from dcp_tensorizer._planning.plan import CompactPlan, Items

from .sharded_states import Shardless, dtensor, state_of


def test_rows_are_torchs(mesh: DeviceMesh) -> None:
    """Rows of each layout, dtype and flag, at their first and at later keys, are in torch's order."""
    state = state_of(mesh)
    for is_coordinator in (False, True):
        theirs = [row_of(item) for item in create_default_local_save_plan(state, is_coordinator).items]
        assert list(rows_of(state, is_coordinator=is_coordinator)) == theirs
    assert len(theirs) == 3 * 10


def test_tensors_that_are_not_quite_alike_have_rows_of_their_own() -> None:
    """A tensor that differs in shape, dtype, flag, class or kind from an earlier one has different rows."""
    like = torch.rand(2, 3)
    values = [like, like.clone(), like.half(), like.clone().requires_grad_(), torch.nn.Parameter(like), like.T, like[0]]
    values += [torch.rand(3, 2), torch.rand(2, 0), torch.tensor(1.0), torch.tensor(1.0), "object", 1, like.view(6)]
    values += [like.to_sparse(), torch.rand(2, 3, device="meta"), like.conj(), like[:, :2]]
    state = dict(zip("abcdefghijklmnopqrstuvwxyz", values, strict=False))
    theirs = create_default_local_save_plan(state, True).items
    assert list(rows_of(state, is_coordinator=True)) == list(map(row_of, theirs))
    columns, hints = columns_of_rows(rows_of(state, is_coordinator=True), None)
    assert list(map(item_of, columns.rows(hints))) == theirs


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            r"that is nested \(layout torch\.strided\)",
        ),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            r"that is nested \(layout torch\.jagged\)",
        ),
        (lambda: torch.ones(2, dtype=torch.uint8).view(torch.uint4), "of dtype torch.uint4, which DCP cannot plan"),
    ],
    ids=["strided", "jagged", "uint4"],
)
def test_tensors_that_torch_cannot_plan(make: Callable[[], torch.Tensor], words: str) -> None:
    """The error of `SavePlanner` names the key, which torch's does not."""
    planner = SavePlanner()
    planner.set_up_planner({"model": {"plain": torch.ones(2), "odd": make()}}, is_coordinator=True)
    with pytest.raises(StagingError, match=f"^'model.odd' is a tensor {words}"):
        planner.create_local_plan()


def test_a_key_that_is_no_string_is_left_to_torch() -> None:
    """A key that is not a string is refused, also for a tensor like an earlier one."""
    with pytest.raises(Unsupported):
        list(rows_of({"a": torch.ones(2), 1: torch.ones(2)}, is_coordinator=True))  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("path", "is_path"),
    [
        (("a", "b"), True),
        (("a", 0, "b"), True),
        ((), True),
        (("a", 2**63 - 1, -(2**63)), True),
        (("a", 2**63), False),
        (("a", True), False),
        (("a", 1.0), False),
        (("a", ["b"]), False),
        (["a"], False),
        (("\ud800",), False),
    ],
)
def test_paths_come_back_as_they_were(path: Any, is_path: bool) -> None:
    """Paths that MessagePack would change are pickled, so all paths survive."""
    data = {"x": ("x",), "y": path}
    for keys in (["x", "y"], ["y"]):
        packed = with_keys(pack_paths(data, keys), keys)
        assert isinstance(packed, PackedPaths) is is_path
        assert repr(unpack_paths(packed)) == repr(data)
    assert isinstance(pack_paths({1: path}, []), Pickled)


def test_a_sum_that_is_not_made_yet_is_refused_each_time(mesh: DeviceMesh) -> None:
    """A partial DTensor, whose values no rank has, is refused each time, as by torch."""
    partial = dtensor(mesh, [Partial(), Shard(0)], torch.rand(3, 5), (6, 5))
    known = dtensor(mesh, [Replicate(), Shard(0)], torch.rand(3, 5), (6, 5))
    for state in ({"a": partial}, {"a": known, "b": partial}, {"a": known, "b": known, "c": partial}):
        with pytest.raises(ValueError, match="partial placements"):
            list(rows_of(state, is_coordinator=True))


def test_what_is_written_of_an_item_is_torchs(mesh: DeviceMesh) -> None:
    """`lookup_object` returns the same memory and flags as torch's, and raises torch's error for a missing key."""
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


def test_the_values_of_a_plan_are_those_of_its_items(mesh: DeviceMesh) -> None:
    """`resolve_plan` yields ordinary tensors without items, and all other values, and changed plans, as items."""
    planner = SavePlanner()
    like = torch.rand(2, 3)
    more = {"half": like.half(), "tied": like, "same": like, "scalar": torch.tensor(1), "none": torch.rand(0, 3)}
    others = {"parameter": torch.nn.Parameter(like), "sparse": like.to_sparse(), "meta": like.to("meta"), "text": "x"}
    planner.set_up_planner(state_of(mesh) | more | others, is_coordinator=True)
    plan = planner.create_local_plan()
    values, items = list(planner.resolve_plan(plan)), list(plan.items)
    left = set()
    for value, item in zip(values, items, strict=True):
        if not isinstance(value, tuple):
            assert value == item
            left.add(item.index.fqn)
            continue
        key, tensor, is_whole = value
        data, expected = item.tensor_data, planner.resolve_data(item)
        assert key == item_key(item.index)
        assert is_whole is (data.chunk.sizes == data.size)
        assert (tensor.shape, tensor.dtype, tensor.requires_grad) == (data.chunk.sizes, expected.dtype, False)
        assert (tensor.data_ptr(), tensor.stride()) == (expected.data_ptr(), expected.stride())
    assert left == {f"{layer}.{name}" for layer in range(3) for name in ("object", "gradient")} | others.keys()
    del plan.items[0]
    assert list(planner.resolve_plan(plan)) == items[1:]
    assert list(planner.resolve_plan(SavePlan(items))) == items


def test_a_value_that_is_not_as_planned_comes_as_its_item() -> None:
    """A value that differs from the plan is yielded as an item, which the writer resolves and checks."""
    planner = SavePlanner()
    planner.set_up_planner({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}, is_coordinator=True)
    plan = planner.create_local_plan()
    planner.set_up_planner({"a": torch.ones(3), "c": torch.ones(2)}, is_coordinator=True)
    first, second, third = planner.resolve_plan(plan)
    assert [first, second] == plan.items[:2]
    assert third[0] == ("c", (0,))
    columns, _ = plan.items.chosen
    moved = CompactPlan.of(Items(dataclasses.replace(columns, starts=columns.starts + 1)), None)
    assert list(planner.resolve_plan(moved)) == list(moved.items)


@pytest.mark.parametrize("takes_apart", [True, False])
@pytest.mark.parametrize("flattens", [True, False])
def test_a_state_is_taken_apart_as_torch_does(flattens: bool, takes_apart: bool) -> None:
    """A state is flattened as by torch: with nested lists, a ShardedTensor without shards, and keys of other types."""
    inner = [torch.ones(1), [1, 2], {"x": torch.ones(3)}]
    plain = {"m": {"a": torch.ones(2), "l": inner, "e": {}, 7: [1]}, "s": 3, "none": []}
    for state in (plain, {**plain, "t": Shardless()}, {"m": {"t": [Shardless()]}}):
        options = {"flatten_state_dict": flattens, "flatten_sharded_tensors": takes_apart}
        ours, theirs = SavePlanner(**options), DefaultSavePlanner(**options)
        for planner in (ours, theirs):
            planner.set_up_planner(state, None, True)
        assert shown(ours.state_dict) == shown(theirs.state_dict)
        assert ours.mappings == theirs.mappings
        assert ours.flatten_sharded_tensors is takes_apart


def shown(value: Any) -> Any:
    """Returns a nested state dict in a form whose order can be compared, and where tensors are equal if identical."""
    if isinstance(value, dict):
        return [(key, shown(inner)) for key, inner in value.items()]
    if isinstance(value, list):
        return list(map(shown, value))
    return (type(value), id(value)) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("takes_apart", [True, False])
@pytest.mark.parametrize("cls", [SavePlanner, DefaultSavePlanner])
def test_two_keys_of_one_path_are_refused(cls: type[DefaultSavePlanner], takes_apart: bool) -> None:
    """Two keys with one path are refused as by torch's planner, which then retains the state of the previous save."""
    planner = cls(flatten_sharded_tensors=takes_apart)
    planner.set_up_planner({"a": 1}, None, True)
    with pytest.raises(ValueError, match=r"duplicated flatten key m\.1"):
        planner.set_up_planner({"m": {"1": torch.ones(1), 1: torch.ones(2)}}, None, True)
    assert (planner.state_dict, planner.mappings, planner.flatten_sharded_tensors) == (
        {"a": 1},
        {"a": ("a",)},
        takes_apart,
    )
