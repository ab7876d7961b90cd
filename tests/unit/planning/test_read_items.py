"""The items that a rank reads equal those of torch's planner, also if they are copied from another key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.device_mesh import DeviceMesh

from dcp_tensorizer import LoadPlanner
from dcp_tensorizer._loading.deliver import resolved
from dcp_tensorizer._planning import read_items
from dcp_tensorizer._planning.read_items import has_older_keys, read_items_of

from .sharded_states import Shardless, dtensor, state_of


def stored(size: tuple[int, ...], rows: int | None = None) -> TensorStorageMetadata:
    """Returns the metadata of a stored tensor, whole or cut after ``rows`` rows."""
    places = [((0,) * len(size), size)]
    if rows is not None:
        places = [((0, *size[1:][:0]), (rows, *size[1:])), ((rows,), (size[0] - rows, *size[1:]))]
    chunks = [
        ChunkStorageMetadata(torch.Size([*start, *[0] * (len(size) - len(start))]), torch.Size(part))
        for start, part in places
    ]
    return TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(size), chunks)


def metadata_of(state: dict[str, Any], rows: int | None = None) -> Metadata:
    """Returns the metadata of a checkpoint of a state; with ``rows``, its tensors are cut after these rows."""
    return Metadata(
        {
            key: stored(tuple(value.shape), rows if value.ndim else None)
            if isinstance(value, torch.Tensor)
            else BytesStorageMetadata()
            for key, value in state.items()
        }
    )


def in_full(items: list[ReadItem]) -> list[tuple[Any, ...]]:
    """Returns items with their hints, which the comparison of indices ignores."""
    return [(item, item.dest_index.index, item.storage_index.index) for item in items]


def outcome(make: Any) -> Any:
    """Returns the items, or the error, of a function."""
    try:
        return in_full(make())
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("rows", [None, 2])
def test_items_are_torchs(mesh: DeviceMesh, rows: int | None) -> None:
    """Items of each layout, at its first and at later keys, stored whole and in parts, are in torch's order."""
    state = {
        **state_of(mesh),
        **{f"{n}.{name}": torch.rand(size) for n in range(3) for name, size in {"scalar": (), "empty": (4, 0)}.items()},
        "parameter": torch.nn.Parameter(torch.rand(2, 2)),
        "4.object": 4,
    }
    metadata = metadata_of(state, rows)
    theirs = create_default_local_load_plan(state, metadata).items
    assert in_full(read_items_of(state, metadata, strict=True)) == in_full(theirs)
    assert len(theirs) > len(state) - 3 - 3 * 2  # nothing of what is empty, or elsewhere


def test_torch_plans_each_layout_once(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch plans once for each layout that is stored whole, and once for each entry that is stored in parts."""
    calls: list[str] = []

    def planned(state_dict: dict[str, Any], *arguments: Any) -> Any:
        calls.extend(state_dict)
        return create_default_local_load_plan(state_dict, *arguments)

    monkeypatch.setattr(read_items, "create_default_local_load_plan", planned)
    local = torch.rand(3, 5)
    state = {
        f"{kind}.{n}": value
        for n in range(50)
        for kind, value in {
            "plain": torch.rand(6, 5),
            "sharded": dtensor(mesh, [Shard(0), Shard(0)], local[:2], (6, 5)),
            "object": n,
        }.items()
    }
    metadata = metadata_of(state)
    in_parts = stored((6, 5), 2)
    metadata.state_dict_metadata |= {"plain.7": stored((6, 5), 2), "plain.8": in_parts, "plain.9": in_parts}
    items = read_items_of(state, metadata, strict=True)
    assert calls == ["plain.0", "sharded.0", "object.0", "plain.7", "plain.8"]
    assert len(items) == 3 * 50 + 3
    assert in_full(items) == in_full(create_default_local_load_plan(state, metadata).items)


@pytest.mark.parametrize(
    ("value", "entry"),
    [
        pytest.param(torch.rand(4, 3), None, id="a missing key"),
        pytest.param(torch.rand(4, 3), stored((3, 4)), id="another shape"),
        pytest.param(torch.rand(3, 4), stored((4, 3)), id="the target has another shape"),
        pytest.param("text", stored((4, 3)), id="a tensor for an object"),
        pytest.param(torch.rand(4, 3), BytesStorageMetadata(), id="an object for a tensor"),
        pytest.param(
            torch.rand(4, 3), TensorStorageMetadata(TensorProperties(), torch.Size((4, 3)), []), id="no chunk"
        ),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_what_does_not_fit_is_as_with_torch(value: Any, entry: Any, strict: bool) -> None:
    """A value that does not fit gets torch's items or torch's error, also after tensors of the same layout."""
    state = {"a": torch.rand(4, 3), "b": 1, "c": value}
    entries = {"a": stored((4, 3)), "b": BytesStorageMetadata(), "c": entry}
    metadata = Metadata({key: found for key, found in entries.items() if found is not None})
    theirs = outcome(lambda: create_default_local_load_plan(state, metadata, strict).items)
    assert outcome(lambda: read_items_of(state, metadata, strict=strict)) == theirs


@pytest.mark.parametrize("before", [False, True])
def test_a_sum_that_is_not_made_yet_is_refused(mesh: DeviceMesh, before: bool) -> None:
    """A partial DTensor, whose values no rank has, is refused as by torch."""
    partial = dtensor(mesh, [Partial(), Shard(0)], torch.rand(3, 5), (6, 5))
    state = {**({"a": torch.rand(6, 5)} if before else {}), "b": partial}
    metadata = metadata_of(state)
    theirs = outcome(lambda: create_default_local_load_plan(state, metadata).items)
    assert theirs[0] is ValueError
    assert outcome(lambda: read_items_of(state, metadata, strict=True)) == theirs


def test_targets_are_torchs(mesh: DeviceMesh) -> None:
    """Targets are the tensors' own memory, without history; a missing key raises torch's error."""
    state = {**state_of(mesh), "scalar": torch.tensor(1.0)}
    metadata = metadata_of(state)
    ours, theirs = LoadPlanner(), DefaultLoadPlanner()
    for planner in (ours, theirs):
        planner.set_up_planner(state, metadata, True)
    plan = ours.create_local_plan()
    assert in_full(plan.items) == in_full(theirs.create_local_plan().items)
    tensors = [item for item in plan.items if item.storage_offsets and "object" not in item.dest_index.fqn]
    assert len(tensors) >= 20
    for planner in (ours, theirs):
        for item, found in zip(tensors, resolved([(item, [], None) for item in tensors], planner), strict=True):
            expected = theirs.resolve_tensor(item)
            assert (found.data_ptr(), found.shape) == (expected.data_ptr(), expected.shape)
            assert not found.requires_grad
    for index in (MetadataIndex("not there"), MetadataIndex("0.plain", (1, 0)), MetadataIndex("0.object", (0,))):
        for planner in (ours, theirs):
            with pytest.raises(ValueError, match="FQN"):
                planner.lookup_tensor(index)


MORE = {
    "nothing": {},
    "another key": {"more": stored((2,))},
    "a list as one object": {"model.b": BytesStorageMetadata()},
    "a dict as one object": {"rng": BytesStorageMetadata()},
    "an empty dict": {"model.c": BytesStorageMetadata()},
}


def test_tensors_that_say_themselves_what_is_here(mesh: DeviceMesh) -> None:
    """Tensors that describe their parts, as torchrec's do, are planned one by one, even with equal shapes."""
    parts = {"a": (0, 8), "b": (8, 8), "c": None}
    state = {}
    for key, part in parts.items():
        shards, offsets = ([], []) if part is None else ([torch.rand(part[1], 4)], [(part[0], 0)])
        local: Any = LocalShardsWrapper(shards, offsets)
        state[key] = dtensor(mesh, [Replicate(), Shard(0)], local, (16, 4))
    metadata = Metadata(dict.fromkeys(state, stored((16, 4))))
    theirs = create_default_local_load_plan(state, metadata).items
    assert in_full(read_items_of(state, metadata, strict=True)) == in_full(theirs)
    assert [item.dest_index.fqn for item in theirs] == ["a", "b"]


def test_plain_tensors_that_say_themselves_what_is_here() -> None:
    """Plain tensors with part attributes are planned one by one, in any order."""

    def part(start: int) -> torch.Tensor:
        tensor = torch.rand(8, 4)
        chunk = ChunkStorageMetadata(torch.Size((start, 0)), torch.Size((4, 4)))
        tensor.__create_chunk_list__ = lambda: [chunk]  # type: ignore[attr-defined]
        return tensor

    state = {"a": torch.rand(8, 4), "b": part(0), "c": part(4), "d": torch.rand(8, 4)}
    metadata = Metadata(dict.fromkeys(state, stored((8, 4))))
    theirs = create_default_local_load_plan(state, metadata).items
    assert in_full(read_items_of(state, metadata, strict=True)) == in_full(theirs)
    assert [item.storage_offsets for item in theirs] == [(0, 0), (0, 0), (4, 0), (0, 0)]


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("options", [{}, {"flatten_state_dict": False}, {"allow_partial_load": True}])
def test_a_checkpoint_that_has_more(options: dict[str, bool], more: str) -> None:
    """A checkpoint with additional keys, also those of torch's older releases, is planned as by torch."""
    state = {"model": {"a": torch.rand(2), "b": [2.5, 4], "c": {}}, "rng": {"seed": 1}, "step": 1}
    if options.get("flatten_state_dict", True):
        keys = {"model.a": stored((2,)), **dict.fromkeys(("model.b", "rng.seed", "step"), BytesStorageMetadata())}
    else:
        keys = dict.fromkeys(state, BytesStorageMetadata())
    if "rng" in MORE[more]:
        keys.pop("rng.seed", None)
    made = []
    for planner in (LoadPlanner(**options), DefaultLoadPlanner(**options)):
        planner.set_up_planner(state, Metadata({**keys, **MORE[more]}), True)
        made.append(outcome(lambda planner=planner: planner.create_local_plan().items))
    assert made[0] == made[1]
    assert isinstance(made[0], list) or more in ("a dict as one object", "an empty dict")  # torch asks for both forms


def test_which_checkpoints_torch_plans() -> None:
    """torch plans checkpoints that store a dict or list as one object, and not those with other additional keys."""
    state = {"model": {"a": 1, "b": [2, [3]]}, "optim": {}}
    flat = {"model.a": 1, "model.b": [2, [3]]}
    found = {
        key: has_older_keys(Metadata({**flat, key: BytesStorageMetadata()}), flat, state)
        for key in ("model", "model.b.1", "optim", "model.a", "model.b.0", "optim.state", "mode", "other")
    }
    assert [key for key, older in found.items() if older] == ["model", "model.b.1", "optim"]


@pytest.mark.parametrize("flattens", [True, False])
def test_a_state_is_taken_apart_as_torch_does(flattens: bool) -> None:
    """A state is flattened as by torch: with nested lists, a ShardedTensor without shards, and two keys of one path."""
    plain = {"m": {"a": torch.ones(2), "l": [torch.ones(1), [1, 2], {"x": torch.ones(3)}], "e": {}}, "s": 3}
    states: list[dict[str, Any]] = [plain, {**plain, "t": Shardless()}, {"m": {"1": torch.ones(1), 1: torch.ones(2)}}]
    for state in states:
        planners = LoadPlanner(flatten_state_dict=flattens), DefaultLoadPlanner(flatten_state_dict=flattens)
        for planner in planners:
            planner.set_up_planner(state, Metadata({}), True)
        ours, theirs = (planner.state_dict for planner in planners)
        assert list(ours) == list(theirs)
        assert planners[0].mappings == planners[1].mappings
        assert planners[0].flatten_sharded_tensors
        if flattens:
            assert all(ours[key] is theirs[key] or ours[key] == theirs[key] for key in theirs)


@pytest.mark.parametrize("cls", [LoadPlanner, DefaultLoadPlanner])
def test_two_keys_of_one_path_are_refused_where_nothing_is_taken_apart(cls: type[DefaultLoadPlanner]) -> None:
    """Two keys with one path are refused as by torch, and the planner does not load into an earlier state."""
    planner = cls(flatten_sharded_tensors=False)
    planner.set_up_planner({"a": torch.ones(1)}, Metadata({}), True)
    with pytest.raises(ValueError, match=r"duplicated flatten key a\.b"):
        planner.set_up_planner({"a.b": torch.ones(2), "a": {"b": torch.ones(3)}}, Metadata({}), True)
