"""The items of a plan as tensors and bytes, and the results that a rank reports."""

from __future__ import annotations

import dataclasses
import io
import logging
import re
import struct
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.testing._internal.two_tensor import TwoTensor

from dcp_tensorizer import SavePlanner, StagingError, WriteError
from dcp_tensorizer._index.locations import LocationTable, RankLocations, hash_of
from dcp_tensorizer._index.schema import decode_places, item_key
from dcp_tensorizer._saving import write_plan
from dcp_tensorizer._saving.write_plan import Item, in_files, resolve, warn_about_untrusted, write_results
from dcp_tensorizer._tensor_file.names import MAX_INLINE_BYTES, StoredItem
from dcp_tensorizer._writer_process.protocol import FileResult, TensorSource, WriteDone
from dcp_tensorizer.integrations.install import installed

from ...lab.states import same


def planned(
    state: dict[str, Any], cls: type[DefaultSavePlanner] = DefaultSavePlanner, **options: Any
) -> tuple[SavePlan, DefaultSavePlanner]:
    """Returns the plan of a state dict in a single process, and its planner (DCP's own by default)."""
    planner = cls(**options)
    planner.set_up_planner(state, is_coordinator=True)
    plan, _ = planner.create_global_plan([planner.create_local_plan()])
    return planner.finish_plan(plan[0]), planner


def unpacked(tensor: torch.Tensor) -> Any:
    return torch.load(io.BytesIO(tensor.numpy().tobytes()), weights_only=False)


def test_tensors_are_taken_as_they_are_and_objects_as_what_torch_saves() -> None:
    """Items are in the plan's order, with kind, name, dtype and contents."""
    parameter = torch.nn.Parameter(torch.arange(6, dtype=torch.bfloat16).view(2, 3))
    state = {"w": parameter, "step": 7, "nested": {"t": torch.tensor(1.5)}, "text": "x"}
    plan, planner = planned(state)
    items = {item.fqn: item for item in resolve(plan, planner)}
    assert {key: (item.kind, item.name, item.dtype) for key, item in items.items()} == {
        "w": ("tensor", "w", "bfloat16"),
        "step": ("object", "step", "uint8"),
        "nested.t": ("tensor", "nested.t", "float32"),
        "text": ("object", "text", "uint8"),
    }
    assert [item.key for item in resolve(plan, planner)] == [item_key(item.index) for item in plan.items]
    assert items["w"].tensor.data_ptr() == parameter.data_ptr()
    assert not items["w"].tensor.requires_grad
    assert (unpacked(items["step"].tensor), unpacked(items["text"].tensor)) == (7, "x")


def test_a_tensor_without_history_is_taken_itself() -> None:
    """A tensor without history is no copy or view: making a view releases the GIL, once for each item."""
    plain, trained = torch.arange(6.0), torch.nn.Parameter(torch.arange(6.0))
    plan, planner = planned({"plain": plain, "trained": trained})
    items = {item.fqn: item.tensor for item in resolve(plan, planner)}
    assert items["plain"] is plain
    assert (type(items["trained"]), items["trained"].data_ptr()) == (torch.Tensor, trained.data_ptr())


def test_an_item_is_the_same_with_either_planner() -> None:
    """SavePlanner makes no DCP items for ordinary tensors, and kind, name, contents and wholeness stay the same."""
    like, empty = torch.arange(6.0).view(2, 3), torch.ones(0, 2)
    state = {"a": like, "tied": like, "": like.T, "k" * 2000: like.half(), "empty": empty, "step": 7, "l": [like, 3]}
    state |= {
        "weight": torch.nn.Parameter(like),
        "two": TwoTensor(like, like),
        "b": like[0].conj(),
        "d": torch.tensor(1),
    }
    found = []
    for cls in (SavePlanner, DefaultSavePlanner):
        items = resolve(*planned(state, cls))
        found.append([(item.key, item.name, item.kind, item.dtype, item.is_whole) for item in items])
        tensors = {item.fqn: item.tensor for item in items}
        assert all(tensors[key] is state[key] for key in ("a", "tied", "", "k" * 2000, "empty", "b", "d"))
        assert (tensors["l.0"] is like, tensors["weight"].data_ptr(), len(tensors)) == (True, like.data_ptr(), 12)
        assert (unpacked(tensors["step"]), unpacked(tensors["l.1"])) == (7, 3)
    assert found[0] == found[1]


class _Asked(SavePlanner):
    """A user's planner that records the items it resolves."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.way = way

    def note(self, way: str, fqn: str, value: Any) -> Any:
        self.asked += [fqn] * (way == self.way)
        return value


class _Resolves(_Asked):
    def resolve_data(self, write_item: Any) -> Any:
        return self.note("resolve", write_item.index.fqn, super().resolve_data(write_item))


class _LooksUp(_Asked):
    def lookup_object(self, index: Any) -> Any:
        return self.note("look up", index.fqn, super().lookup_object(index))


class _Transforms(_Asked):
    def transform_object(self, write_item: Any, value: Any) -> Any:
        return self.note("transform", write_item.index.fqn, super().transform_object(write_item, value))


@pytest.mark.parametrize(("cls", "way"), [(_Resolves, "resolve"), (_LooksUp, "look up"), (_Transforms, "transform")])
def test_a_planner_with_a_way_of_its_own_is_asked_for_each_item(cls: type[_Asked], way: str) -> None:
    """A custom planner resolves each item, and the results are copied, because it may reuse their memory."""
    state = {"a": torch.ones(2), "b": torch.zeros(2), "c": "text"}
    plan, planner = planned(state, cls, way=way)
    items = resolve(plan, planner)
    assert planner.asked == ["a", "b", "c"]
    for item in items[:2]:
        assert same(item.tensor, state[item.fqn])
        assert item.tensor.data_ptr() != state[item.fqn].data_ptr()


def test_a_planner_whose_object_has_a_method_of_its_own_is_asked_for_each_item() -> None:
    """A method on the planner object counts like a method of its class."""
    plan, planner = planned({"a": torch.ones(2), "b": torch.zeros(2)}, SavePlanner)
    planner.lookup_object = lambda index: torch.full((2,), 7.0)
    assert [item.tensor.tolist() for item in resolve(plan, planner)] == [[7.0, 7.0]] * 2


class _Named(DefaultSavePlanner):
    """A planner with a method that has the name of one of SavePlanner's."""

    def resolve_plan(self, plan: SavePlan) -> None:
        raise AssertionError("asked")


def test_a_method_of_a_users_planner_is_never_taken_for_one_of_ours() -> None:
    """A user's method with the name of one of SavePlanner's is not called."""
    (item,) = resolve(*planned({"a": torch.ones(2)}, _Named))
    assert same(item.tensor, torch.ones(2))


class Flattening(DefaultSavePlanner):
    """A planner that flattens its tensors."""

    def resolve_data(self, write_item: Any) -> Any:
        return super().resolve_data(write_item).reshape(-1)


def test_a_planner_that_gives_another_shape_than_it_planned_is_an_error() -> None:
    """A resolved tensor of another shape is an error, because loads rely on the planned shape in the metadata."""
    planner = Flattening()
    plan, _ = planned({"w": torch.ones(2, 3)})
    planner.set_up_planner({"w": torch.ones(2, 3)})
    with pytest.raises(WriteError, match=r"'w'.* of shape \(2, 3\).*resolve_data returned one of shape \(6,\)"):
        resolve(plan, planner)


@pytest.mark.parametrize("data", [None, b"xx"])
@pytest.mark.parametrize(("value", "kind"), [(torch.ones(2), "Tensor"), (7, "BytesIO")])
def test_a_planner_that_resolves_to_no_data_is_an_error(data: object, value: object, kind: str) -> None:
    """The error names the key, the required type and what `resolve_data` returned."""

    class Odd(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            return data

    plan, planner = planned({"w": value}, Odd)
    words = f"'w' cannot be saved: the planner's resolve_data must return an instance of {kind}, and returned {data!r}"
    with pytest.raises(WriteError, match=f"^{re.escape(words)}$"):
        resolve(plan, planner)


@pytest.mark.parametrize("cls", [SavePlanner, DefaultSavePlanner])
def test_a_state_that_is_not_the_planned_one_is_an_error(cls: type[DefaultSavePlanner]) -> None:
    """A value that is missing or has another shape is an error that names the key."""
    for state, problem in (
        ({"w": torch.ones(3)}, r"'w'.* of shape \(2,\).*returned one of shape \(3,\)"),
        ({}, "'w' cannot be saved: .*FQN"),
    ):
        plan, planner = planned({"w": torch.ones(2)}, cls)
        planner.set_up_planner(state)
        with pytest.raises(WriteError, match=problem):
            resolve(plan, planner)


@pytest.mark.parametrize("cls", [SavePlanner, DefaultSavePlanner])
def test_what_was_not_staged_is_never_written(cls: type[DefaultSavePlanner]) -> None:
    """A planned item that was not staged, because another rank was to write it, is an error that names the key."""
    plan, planner = planned({"mine": torch.ones(2), "theirs": torch.ones(3)}, cls)
    with pytest.raises(WriteError, match="'theirs' is to be written by this rank, which has not staged it"):
        resolve(plan, planner, omitted={"theirs"})
    assert len(resolve(plan, planner, omitted={"others"})) == 2


def test_a_tensor_of_tensors_is_what_torch_saves_of_it() -> None:
    """A wrapper subclass is stored as ``torch.save`` pickles it, and loads as an equal tensor."""
    value = TwoTensor(torch.ones(2), torch.zeros(2))
    plan, planner = planned({"two": value})
    (item,) = resolve(plan, planner)
    assert (item.kind, item.dtype) == ("wrapper", "uint8")
    loaded = unpacked(item.tensor)
    assert type(loaded) is TwoTensor
    assert same(loaded.a, value.a)
    assert same(loaded.b, value.b)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (lambda: None, WriteError),
        (threading.Lock(), WriteError),
        (torch.empty(2, device="meta"), StagingError),
        (torch.eye(2).to_sparse(), StagingError),
    ],
    ids=["lambda", "lock", "meta", "sparse"],
)
@pytest.mark.parametrize("cls", [SavePlanner, DefaultSavePlanner])
def test_what_cannot_be_saved_is_an_error_that_names_it(
    cls: type[DefaultSavePlanner], value: Any, error: type[Exception]
) -> None:
    """A value that cannot be saved is an error that names the key, also without staging."""
    plan, planner = planned({"model": {"bad": value}, "good": torch.ones(2)}, cls)
    with pytest.raises(error, match=r"'model\.bad'"):
        resolve(plan, planner)


def test_names_that_tensorizer_cannot_hold_are_replaced() -> None:
    """The key of the item stays; only its name in the file is replaced."""
    keys = ["", "k" * 2000, "plain"]
    plan, planner = planned({key: torch.ones(1) for key in keys}, flatten_state_dict=False)
    items = resolve(plan, planner)
    assert {item.fqn: item.name for item in items} == {
        "": f"__item_{[i.fqn for i in items].index('')}__",
        "k" * 2000: f"__item_{[i.fqn for i in items].index('k' * 2000)}__",
        "plain": "plain",
    }


def test_items_without_elements_are_reported_whether_or_not_they_are_in_a_file() -> None:
    """They are in plain files if tensorizer can read them there. The results have their dtypes in any case."""
    state = {"empty": torch.empty(0, 3, dtype=torch.float8_e4m3fn), "full": torch.ones(2, 2), "none": torch.empty(0, 3)}
    plan, planner = planned(state)
    items = resolve(plan, planner)
    assert [item.source(5, 64) for item in in_files(items, is_encrypted=False)] == [
        TensorSource("full", "float32", (2, 2), 16, "tensor", memory=5, offset=64),
        TensorSource("none", "float32", (0, 3), 0, "tensor", memory=5, offset=64),
    ]
    assert [item.name for item in in_files(items, is_encrypted=True)] == ["full"]
    assert in_files([item for item in items if item.name == "none"], is_encrypted=False) == []
    stored = StoredItem("file", "full", 262_200, 16, "float32", "tensor", b"12345678")
    none = StoredItem("file", "none", 262_400, 0, "float32", "tensor", b"12345678")
    done = WriteDone((FileResult("file", 300_000, (stored, none)),), 0.0, 0.0, 0.0)
    (result,) = write_results(items, done, 3)
    part = result.storage_data
    assert (part.rank, part.files, part.check) == (3, (("file", 300_000),), b"")
    assert result.size_in_bytes == 300_000
    found = items_in(part, [("empty", (0, 0)), ("full", (0, 0)), ("none", (0, 0))])
    assert found == [StoredItem.empty("float8_e4m3fn"), stored, StoredItem.empty("float32")]


def items_in(part: RankLocations, keys: list[Any]) -> list[StoredItem | None]:
    """Returns the locations of items, as a rank reports them to the coordinator."""
    table = LocationTable(decode_places(part.section), part.files, is_encrypted=bool(part.check))
    return list(table.find([key for key, _ in keys], [hash_of(*key) for key in keys]))


def test_results_of_several_files_find_their_items() -> None:
    """Each item gets its location in its file, for any order of files and items."""
    plan, planner = planned({name: torch.full((3,), number) for number, name in enumerate("abcd")})
    items = resolve(plan, planner)
    stored = {
        item.name: StoredItem(f"f{n // 3}", item.name, n, 12, "float32", "tensor", bytes([n] * 8))
        for n, item in enumerate(items)
    }
    names = [item.name for item in items]
    files = (
        FileResult("f1", 2000, (stored[names[3]],)),
        FileResult("f0", 1000, tuple(stored[name] for name in reversed(names[:3]))),
    )
    (result,) = write_results(items, WriteDone(files, 0.0, 0.0, 0.0), 0)
    found = items_in(result.storage_data, [item.key for item in items])
    assert [(item.file, item.offset) for item in found if item] == [("f0", 0), ("f0", 1), ("f0", 2), ("f1", 3)]
    assert dict(result.storage_data.files) == {"f0": 1000, "f1": 2000}


def test_the_coordinator_is_told_of_small_values_with_their_bytes() -> None:
    """The results contain the bytes of scalars and objects, by key, but not those of parts of sharded tensors."""
    state = {"step": torch.tensor(5.0), "object": 3, "large": torch.ones(2000)}
    plan, planner = planned(state)
    items = resolve(plan, planner)
    chunk = dataclasses.replace(items[0], key=("chunk", (2,)), is_whole=False)
    (result,) = write_results([*items, chunk], WriteDone((), 0.0, 0.0, 0.0), 0)
    small = {inline.hash: inline for inline in result.storage_data.inline}
    assert set(small) == {hash_of("step", ()), hash_of("object", None)}
    step = small[hash_of("step", ())]
    assert (step.item.dtype, step.item.kind, step.item.name) == ("float32", "tensor", "")
    assert step.content == struct.pack("<f", 5.0)
    assert torch.load(io.BytesIO(small[hash_of("object", None)].content)) == 3


def test_small_values_have_no_more_than_their_share_of_the_index() -> None:
    """A rank inlines as many small values as fit into its share of the index; the others are in data files."""
    plan, planner = planned({f"t{n}": torch.ones(1000) for n in range(300)})
    (result,) = write_results(resolve(plan, planner), WriteDone((), 0.0, 0.0, 0.0), 0)
    assert len(result.storage_data.inline) == MAX_INLINE_BYTES // 4000


def test_an_object_that_would_not_load_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """The warning names the key and its types once, at the first save. Tensors and plain data cause no warning."""
    known: set[str] = set()
    state = {
        "plain": {"lr": 0.1},
        "odd": re.compile("x"),
        "t": torch.ones(2),
        "w": TwoTensor(torch.ones(1), torch.ones(1)),
    }
    with caplog.at_level(logging.WARNING, "dcp_tensorizer"):
        warn_about_untrusted(resolve(*planned(state)), known)
        warn_about_untrusted(resolve(*planned(state)), known)
        warn_about_untrusted(resolve(*planned(state | {"new": threading.Event})), known)
    assert [record.args for record in caplog.records] == [("odd", "re._compile"), ("new", "threading.Event")]
    assert "allow_pickle=True" in caplog.records[0].message


def test_an_object_whose_types_the_user_allowed_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Types that ``torch.serialization.add_safe_globals`` allows cause no warning."""
    with torch.serialization.safe_globals([threading.Event]):
        warn_about_untrusted(resolve(*planned({"event": threading.Event})), set())
    assert caplog.records == []


@pytest.mark.parametrize("who", ["torch", "few", "ours", "a subclass", "installed"])
def test_torchs_planner_for_many_items_is_logged_once(who: str, caplog: pytest.LogCaptureFixture) -> None:
    """The hint is logged once for torch's planner, and never for this package's planner or a user's."""
    write_plan._recommend_planner.cache_clear()
    state = {f"t{n}": torch.zeros(1) for n in range(1999 if who == "few" else 2000)}
    cls = {"ours": SavePlanner, "a subclass": type("Own", (DefaultSavePlanner,), {})}.get(who, DefaultSavePlanner)
    with caplog.at_level(logging.INFO, "dcp_tensorizer"), installed() if who == "installed" else nullcontext():
        for _ in range(2):
            resolve(*planned(state, cls))
    said = [text for record in caplog.records if "planner" in (text := record.getMessage())]
    assert len(said) == (who == "torch")
    assert all("55 to 88 us per item" in text and "pass it as planner= to all saves" in text for text in said)


class PlansItself(SavePlanner):
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan


@pytest.mark.parametrize(
    ("planner", "named"),
    [(DefaultSavePlanner(), False), (SavePlanner(), False), (PlansItself(), True)],
    ids=["torch's", "ours", "another"],
)
def test_keys_are_told_where_the_state_dict_may_not_name_them(planner: DefaultSavePlanner, named: bool) -> None:
    """Keys are sent for planners that may plan items without describing them in the metadata."""
    plan, _ = planned({"w": torch.ones(2)})
    items = [Item(item_key(item.index), "w", "tensor", torch.ones(2)) for item in plan.items]
    (result,) = write_results(items, WriteDone((), 0.0, 0.0, 0.0), 0, planner)
    rows = decode_places(result.storage_data.section)
    assert [key for key, _ in rows.keys.values()] == (["w"] if named else [])
