"""`SavePlanner` makes the plans, metadata and errors of torch's ``DefaultSavePlanner``."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import logging
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from dcp_tensorizer import SavePlanner, WriteError
from dcp_tensorizer._planning import plan as plans
from dcp_tensorizer._planning.global_plan import checked_messages, wholes_of

from ..lab.hooks import Place, Planned, Shards, plan_save, shard

RANKS = 4
METADATA_FIELDS = [field.name for field in dataclasses.fields(Metadata)]


def compared(ours: Planned, theirs: Planned) -> None:
    """Asserts that plans and metadata are equal, including hints and order."""
    for mine, torchs in zip(ours.plans, theirs.plans, strict=True):
        assert list(mine.items) == torchs.items
        assert [item.index.index for item in mine.items] == [item.index.index for item in torchs.items]
        assert (mine.planner_data, mine.storage_data, mine.usable) == (torchs.planner_data, None, True)
    assert [getattr(ours.metadata, name) for name in METADATA_FIELDS] == [
        getattr(theirs.metadata, name) for name in METADATA_FIELDS
    ]
    assert list(ours.metadata.state_dict_metadata) == list(theirs.metadata.state_dict_metadata)
    assert list(ours.metadata.planner_data or ()) == list(theirs.metadata.planner_data or ())


def both(states: list[dict[str, Any]], **options: Any) -> Planned:
    """Plans a save with both planners, compares the results, and returns those of `SavePlanner`."""
    ours = plan_save([SavePlanner(**options) for _ in states], states)
    compared(ours, plan_save([DefaultSavePlanner(**options) for _ in states], states))
    return ours


def sharded_state(rank: int, ranks: int = RANKS, layers: int = 3) -> dict[str, Any]:
    """Returns the nested states of a training job: sharded and replicated tensors, scalars and objects."""
    names = [f"layers.{number}.weight" for number in range(layers)]
    return {
        "model": {**{name: shard((10, 6), rank, ranks) for name in names}, "norm": torch.ones(6)},
        "optim": {
            "state": {name: {"step": torch.tensor(3.0), "exp_avg": shard((10, 6), rank, ranks)} for name in names},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}],
        },
        f"rng_{rank}": {"seed": rank, "state": torch.zeros(4, dtype=torch.uint8)},
    }


def states_of(ranks: int = RANKS, **arguments: Any) -> list[dict[str, Any]]:
    return [sharded_state(rank, ranks, **arguments) for rank in range(ranks)]


def cut(shape: tuple[int, ...], draw: st.DrawFn) -> list[Place]:
    """Draws a tensor in two to four parts along successive dimensions; some parts are empty."""
    places: list[Place] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 3))):
        start, size = places.pop(draw(st.integers(0, len(places) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[dim]))
        rest = tuple(n + at * (d == dim) for d, n in enumerate(start))
        places.append((start, tuple(at if d == dim else n for d, n in enumerate(size))))
        places.append((rest, tuple(n - at if d == dim else n for d, n in enumerate(size))))
    return places


@st.composite
def worlds(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draws the state dicts of several ranks, with repeated, lost and wrong shards, and other values."""
    ranks = draw(st.integers(1, 10))
    states: list[dict[str, Any]] = [{} for _ in range(ranks)]
    for key in draw(st.lists(st.sampled_from(["a", "b.c", "d", "e", "\udc80"]), unique=True, max_size=4)):
        kind = draw(st.sampled_from(["shards", "shards", "shards", "tensor", "object", "nested"]))
        holders = draw(st.lists(st.integers(0, ranks - 1), unique=True, min_size=1))
        shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
        held: dict[int, list[Place]] = {rank: [] for rank in holders}
        for place in cut(shape, draw):
            for rank in draw(
                st.lists(st.sampled_from(holders), unique=True, min_size=draw(st.sampled_from([0, 1, 1])))
            ):
                held[rank].append(place)
        if draw(st.integers(0, 9)) == 0:
            wrong = draw(st.lists(st.integers(-1, 4), min_size=len(shape), max_size=len(shape)))
            held[holders[0]].append((tuple(wrong), (2,) * len(shape)))
        for rank in holders:
            values = {
                "shards": Shards(shape, held[rank]),
                "tensor": torch.zeros(draw(st.sampled_from([(), (2,), (2, 3)])) if rank == 0 else (2,)),
                "object": {"x": rank} if draw(st.booleans()) else "text",
                "nested": {"deep": [torch.zeros(1), "object"], "flat": torch.zeros((), dtype=torch.bfloat16)},
            }
            states[rank][key] = values[kind]
    return states


@given(worlds(), st.booleans(), st.booleans())
def test_plans_and_metadata_are_torchs(states: list[dict[str, Any]], lowest: bool, flatten: bool) -> None:
    """For any states, the plans equal torch's in all fields and in order, or both planners refuse; also repeated."""
    options = {"dedup_save_to_lowest_rank": lowest, "flatten_state_dict": flatten}
    try:
        theirs = plan_save([DefaultSavePlanner(**options) for _ in states], states)
    except (ValueError, AssertionError, AttributeError, IndexError):
        with pytest.raises(WriteError, match="cannot be saved: "):
            plan_save([SavePlanner(**options) for _ in states], states)
        return
    planners = [SavePlanner(**options) for _ in states]
    for _ in range(2):
        compared(plan_save(planners, states), theirs)


@pytest.mark.parametrize("lowest", [False, True])
@pytest.mark.parametrize("flatten", [False, True])
def test_a_training_state_is_planned_as_by_torch(lowest: bool, flatten: bool) -> None:
    """Sharded and replicated tensors, scalars and objects are planned as by torch, with more ranks than rows."""
    for ranks in (1, 2, 7, 13):
        both(states_of(ranks), dedup_save_to_lowest_rank=lowest, flatten_state_dict=flatten)


def test_a_rank_without_items() -> None:
    """A rank without items gets a plan without items."""
    planned = both([*states_of(2), {}])
    assert (len(planned.plans[2].items), planned.plans[2].items) == (0, [])
    both([{}, {}])


def test_many_dtypes_and_properties() -> None:
    """Dtypes and properties are distinguished for each key."""
    state = {
        "half": torch.zeros(2, dtype=torch.float16),
        "grad": torch.nn.Parameter(torch.zeros(2)),
        "sparse": torch.zeros(2, 2).to_sparse(),
        "complex": torch.zeros(2, 2, dtype=torch.complex64),
    }
    entries = both([state, state]).metadata.state_dict_metadata
    assert entries["grad"].properties.requires_grad
    assert entries["sparse"].properties.layout == torch.sparse_coo


# --- what is sent --------------------------------------------------------------------------------------------------


def test_a_repeat_sends_digests() -> None:
    """The second save sends 100 to 200 bytes per rank, and gets the plan of the first."""
    planners = [SavePlanner() for _ in range(RANKS)]
    first, second = (plan_save(planners, states_of(layers=40)) for _ in range(2))
    compared(second, plan_save([DefaultSavePlanner() for _ in range(RANKS)], states_of(layers=40)))
    assert min(first.sent) > 1500
    assert max(second.sent) < 250
    assert first.answered == second.answered


def test_what_ranks_get_is_small() -> None:
    """An answer has a bit for each item, and the metadata describes the sharding of each shape once."""
    states = states_of(16, layers=200)
    ours, theirs = (plan_save([cls() for _ in states], states) for cls in (SavePlanner, DefaultSavePlanner))
    compared(ours, theirs)
    assert max(ours.answered) < 600 < max(theirs.answered) / 50
    assert ours.broadcast < theirs.broadcast / 30


def test_what_is_sent_does_not_grow_with_the_ranks() -> None:
    """With eight times as many ranks, each sends hardly more bytes, at the first save and at a repeat."""
    costs = []
    for ranks in (8, 64):
        planners = [SavePlanner() for _ in range(ranks)]
        planned = [plan_save(planners, states_of(ranks, layers=40)) for _ in range(2)]
        costs.append([max(cost) for p in planned for cost in (p.sent, p.answered, [p.broadcast])])
    assert [few * 1.5 > many for few, many in zip(*costs, strict=True)] == [True] * 6


def test_in_another_process_group_all_is_sent() -> None:
    """In a new process group everything is sent, because its rank 0 may be another process."""
    planners = [SavePlanner() for _ in range(RANKS)]
    small = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            small += [max(plan_save(planners, states_of()).sent) < 250 for _ in range(2)]
        finally:
            dist.destroy_process_group()
    assert small == [False, True, False, True]


def test_without_caching_nothing_is_remembered() -> None:
    """Without caching, each save sends the whole plan."""
    planners = [SavePlanner(enable_plan_caching=False) for _ in range(RANKS)]
    first, second = (plan_save(planners, states_of()) for _ in range(2))
    assert first.sent == second.sent
    compared(second, plan_save([DefaultSavePlanner() for _ in range(RANKS)], states_of()))


def test_alternating_state_dicts_are_all_remembered() -> None:
    """If one planner saves model and optimizer in turn, the repeats of both are sent as digests."""
    planners = [SavePlanner() for _ in range(RANKS)]
    worlds = [[{name: state[name]} for state in states_of()] for name in ("model", "optim")]
    for number in range(3):
        for states in worlds:
            planned = plan_save(planners, states)
            compared(planned, plan_save([DefaultSavePlanner() for _ in range(RANKS)], states))
            assert (max(planned.sent) < 250) == (number > 0)


def test_what_is_saved_rarely_is_remembered() -> None:
    """The coordinator retains every plan that a rank retains, however often other plans are repeated in between."""
    planners = [SavePlanner() for _ in range(RANKS)]
    plan_save(planners, states_of())
    for number in range(20):
        plan_save(planners, [{"x": torch.zeros(3), "n": torch.zeros(number)}, *[{"x": torch.zeros(3)}] * (RANKS - 1)])
    planned = plan_save(planners, states_of())
    compared(planned, plan_save([DefaultSavePlanner() for _ in range(RANKS)], states_of()))
    assert [nbytes < 250 for nbytes in planned.sent] == [False, True, True, True]


def test_each_process_group_has_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many saves of one group, whose coordinator is in both groups, leave the digests of the other group valid."""
    planners, others = ([SavePlanner() for _ in range(RANKS)] for _ in range(2))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        some, all_ranks = dist.new_group([0]), dist.group.WORLD
        monkeypatch.setattr(plans, "group_of_save", lambda: all_ranks)
        plan_save(planners, states_of())
        monkeypatch.setattr(plans, "group_of_save", lambda: some)
        costs = [plan_save([planners[0], *others[1:]], [{"x": torch.zeros(3)}] * RANKS).sent for _ in range(20)]
        monkeypatch.setattr(plans, "group_of_save", lambda: all_ranks)
        assert max(plan_save(planners, states_of()).sent) < 250
        assert min(costs[0]) > 250 > max(max(costs[1:]))
    finally:
        dist.destroy_process_group()


def test_one_rank_that_changes_sends_its_plan() -> None:
    """If one rank's plan changes, the others still send digests, and all ranks get torch's plans."""
    planners = [SavePlanner() for _ in range(RANKS)]
    states = states_of()
    plan_save(planners, states)
    states[2]["new"] = torch.zeros(3)
    planned = plan_save(planners, states)
    compared(planned, plan_save([DefaultSavePlanner() for _ in range(RANKS)], states))
    assert [nbytes < 250 for nbytes in planned.sent] == [True, True, False, True]
    assert max(plan_save(planners, states).sent) < 250


def test_two_planners_share_nothing() -> None:
    """Two planners share no cache, while torch's caches belong to the class."""
    states = states_of()
    model, optim = ([SavePlanner() for _ in range(RANKS)] for _ in range(2))
    plan_save(model, states)
    assert min(plan_save(optim, [{"x": torch.zeros(rank)} for rank in range(RANKS)][:1] * RANKS).sent) > 0
    compared(plan_save(model, states), plan_save([DefaultSavePlanner() for _ in range(RANKS)], states))
    assert DefaultSavePlanner._cached_save_plan == {}


def test_after_a_save_that_failed_all_is_sent() -> None:
    """After a failed save the whole plan is sent once, because the coordinator may not have received it."""
    planners = [SavePlanner() for _ in range(RANKS)]
    plan_save(planners, states_of())
    for planner, state in zip(planners, states_of(), strict=True):
        planner.set_up_planner(state, None, False)
        pickle.dumps(planner.create_local_plan())  # and another rank has an error
    assert min(plan_save(planners, states_of()).sent) > 250
    assert max(plan_save(planners, states_of()).sent) < 250


def test_a_reference_that_nobody_knows_is_an_error_once() -> None:
    """A reference to another coordinator's plan is an error that names the cause, and the next save succeeds."""
    planners = [SavePlanner() for _ in range(RANKS)]
    plan_save(planners, states_of())
    others = [SavePlanner(), *planners[1:]]
    with pytest.raises(
        WriteError,
        match=r"^rank 1 refers to a plan that this coordinator does not know: .* Use one planner per rank",
    ):
        plan_save(others, states_of())
    compared(plan_save(others, states_of()), plan_save([DefaultSavePlanner() for _ in range(RANKS)], states_of()))


def test_a_copy_of_a_planner_has_sent_nothing() -> None:
    """A copy of a planner, as DCP sends one with each save in PROCESS mode, has an empty history."""
    planners = [SavePlanner() for _ in range(RANKS)]
    plan_save(planners, states_of())
    assert "state_dict" not in vars(copy.deepcopy(planners[0]))
    for copies in ([pickle.loads(pickle.dumps(SavePlanner())) for _ in planners], [*map(copy.deepcopy, planners)]):
        assert min(plan_save(copies, states_of()).sent) > 250


def test_saves_of_one_rank_alone_are_not_remembered_as_sent() -> None:
    """Saves with ``no_dist`` or without collectives send no plans, so none count as sent."""
    planners = [SavePlanner() for _ in range(RANKS)]
    for planner, state in zip(planners, states_of(), strict=True):
        planner.set_up_planner({"x": state["model"]["norm"]}, None, True)
        [plan], metadata = planner.create_global_plan([planner.create_local_plan()])
        assert [item.index.fqn for item in planner.finish_plan(plan).items] == ["x"] == [*metadata.state_dict_metadata]
    assert min(plan_save(planners, [{"x": torch.ones(6)}] * RANKS).sent) > 250


def test_saves_of_one_rank_alone_push_nothing_out() -> None:
    """The coordinator retains the plans of other ranks, however often it saves alone in between."""
    planners = [SavePlanner() for _ in range(RANKS)]
    plan_save(planners, states_of())
    for number in range(40):
        planners[0].set_up_planner({"x": torch.ones(number)}, None, True)
        [plan], _ = planners[0].create_global_plan([planners[0].create_local_plan()])
        planners[0].finish_plan(plan)
    assert max(plan_save(planners, states_of()).sent) < 250


# --- what is refused -----------------------------------------------------------------------------------------------

WRONG = [
    (
        [((0, 0), (4, 4)), ((2, 0), (4, 4))],
        "two parts overlap: (4, 4) at (0, 0), and (4, 4) at (2, 0) (planned by ranks 0 and 1)",
    ),
    (
        [((0, 0), (4, 4)), ((4, 0), (4, 4))],
        "a part lies outside the tensor's shape (6, 4): (4, 4) at (4, 0) (planned by rank 1)",
    ),
    ([((0, 0), (2, 4)), ((4, 0), (2, 4))], "its parts hold 16 of its 24 elements: a rank's part is missing"),
    ([((0, 0), (3, 4)), ((3,), (3,))], "a part is 1-dimensional, and the tensor is 2-dimensional (planned by rank 1)"),
    (
        [((0, 0), (6, 4)), ((3, 1), (0, 2))],
        "two parts overlap: (6, 4) at (0, 0), and (0, 2) at (3, 1) (planned by ranks 0 and 1)",
    ),
]


@pytest.mark.parametrize(("places", "problem"), WRONG, ids=["overlap", "beyond", "gap", "dimensions", "empty inside"])
def test_what_torch_refuses_is_refused_by_name(places: list[Place], problem: str) -> None:
    """The error names the key, the fault, the ranks, and the number of other faulty keys."""
    states = [{"layer0": Shards((6, 4), [place])} for place in places]
    with pytest.raises((ValueError, IndexError)):
        plan_save([DefaultSavePlanner(), DefaultSavePlanner()], states)
    with pytest.raises(WriteError, match="^" + re.escape(f"'layer0' cannot be saved: {problem}") + "$"):
        plan_save([SavePlanner(), SavePlanner()], states)
    many = [{f"layer{n}": Shards((6, 4), [place]) for n in range(9)} for place in places]
    with pytest.raises(WriteError, match=r"'layer1' .*'layer2' .*; and 6 other keys have such faults$"):
        plan_save([SavePlanner(), SavePlanner()], many)


def test_a_key_that_is_two_things_is_refused() -> None:
    """A key with a tensor on one rank and an object on another is an error that names the key."""
    states = [{"x": torch.zeros(2)}, {"x": "text"}]
    with pytest.raises(AssertionError):
        plan_save([DefaultSavePlanner(), DefaultSavePlanner()], states)
    with pytest.raises(WriteError, match=r"^'x' cannot be saved: the ranks plan several parts of it"):
        plan_save([SavePlanner(), SavePlanner()], states)


DISAGREE = {
    "shapes": (
        [torch.zeros(2, 3), torch.zeros(4, 3), None, torch.zeros(2, 3)],
        "shape: (2, 3) on ranks 0, 3, (4, 3) on rank 1",
    ),
    "dimensions": (
        [None, torch.zeros(2), torch.zeros(()), torch.zeros(2)],
        "shape: (2,) on ranks 1, 3, () on rank 2",
    ),
    "dtypes": (
        [torch.zeros(2), *(torch.zeros(2, dtype=torch.bfloat16) for _ in range(5))],
        "dtype: torch.float32 on rank 0, torch.bfloat16 on ranks 1, 2, 3 and 2 others",
    ),
    "sizes of a sharded one": (
        [Shards((6, 4), [((0, 0), (3, 4))]), Shards((5, 4), [((3, 0), (3, 4))])],
        "shape: (6, 4) on rank 0, (5, 4) on rank 1",
    ),
}
"""For each case, the ranks' values of one key (None: no such key), and the text of the error."""


@pytest.mark.parametrize("case", DISAGREE)
def test_ranks_that_have_other_tensors_under_one_key_are_refused(case: str) -> None:
    """If ranks have different tensors under one key, the error names the key, and each rank's tensor."""
    values, problem = DISAGREE[case]
    states = [{"a": torch.ones(3)} | ({} if value is None else {"x": value}) for value in values]
    message = re.escape(
        f"'x' cannot be saved: the ranks do not agree on its {problem}. Give each rank's tensor a separate key"
    )
    with pytest.raises(WriteError, match=f"^{message}"):
        plan_save([SavePlanner() for _ in states], states)


@pytest.mark.parametrize("case", ["shapes", "dtypes"])
def test_torchs_plans_are_refused_too(case: str) -> None:
    """With torch's planner the writer finds such tensors, too, because each rank sends its whole tensors."""
    values, problem = DISAGREE[case]
    messages: list[Any] = []
    for rank, value in enumerate(values):
        planner = DefaultSavePlanner()
        planner.set_up_planner({"a": torch.ones(3)} | ({} if value is None else {"x": value}), None, rank == 0)
        messages.append(pickle.loads(pickle.dumps(wholes_of(planner.create_local_plan(), f"message {rank}"))))
    assert checked_messages([messages[0], "of another kind", messages[0]]) == [
        "message 0",
        "of another kind",
        "message 0",
    ]
    with pytest.raises(WriteError, match=re.escape(f"'x' cannot be saved: the ranks do not agree on its {problem}.")):
        checked_messages(messages)


def test_what_ranks_may_have_of_their_own() -> None:
    """Ranks may differ in keys, parts, objects, and properties that do not affect values."""
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    states = [{"x": torch.nn.Parameter(torch.ones(3)), "rank_0": torch.ones(1)}, {"x": frozen, "rank_1": torch.ones(2)}]
    both(states)
    planners = [DefaultSavePlanner(), DefaultSavePlanner()]
    for planner, state in zip(planners, states, strict=True):
        planner.set_up_planner(state, None, planner is planners[0])
    sent = [wholes_of(planner.create_local_plan(), None) for planner in planners]
    assert checked_messages(sent) == [None, None]
    assert wholes_of(planners[0].create_local_plan(), None).columns.digest == sent[0].columns.digest


def test_tensors_that_describe_their_part_are_planned_by_torch() -> None:
    """Tensors that describe their parts are planned one by one, in any order, even with equal shape and dtype."""

    def state(rank: int) -> dict[str, Any]:
        values = {key: torch.full((3, 4), float(rank)) for key in ("a", "b", "c", "d")}
        for key, start in (("b", 3 * rank), ("c", 3 - 3 * rank)):
            values[key].__create_write_items__ = Shards((6, 4), [((start, 0), (3, 4))]).__create_write_items__  # type: ignore[attr-defined]
        return values

    planned = both([state(0), state(1)])
    sizes = {key: entry.size for key, entry in planned.metadata.state_dict_metadata.items()}  # type: ignore[union-attr]
    assert sizes == {"a": (3, 4), "b": (6, 4), "c": (6, 4), "d": (3, 4)}


def test_a_gap_on_one_rank_alone_is_not_refused() -> None:
    """A single rank may have an incomplete tensor, because without collectives it saves only its part."""
    both([{"x": Shards((6, 4), [((0, 0), (2, 4))])}])


# --- subclasses ----------------------------------------------------------------------------------------------------


def subclasses(base: type[DefaultSavePlanner]) -> dict[str, type[DefaultSavePlanner]]:
    """Returns subclasses of a planner, as users define them."""

    class Renames(base):  # type: ignore[misc, valid-type]
        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            items = [
                dataclasses.replace(i, index=MetadataIndex("my." + i.index.fqn, i.index.offset)) for i in plan.items
            ]
            self.plan = dataclasses.replace(plan, items=items, planner_data={**plan.planner_data, "more": (1,)})
            return self.plan

    class AddsInPlace(base):  # type: ignore[misc, valid-type]
        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            plan.items.append(WriteItem(MetadataIndex("extra"), WriteItemType.BYTE_IO))
            del plan.items[0]
            plan.planner_data["extra"] = ("extra",)
            return plan

    class OnlyPlannerData(base):  # type: ignore[misc, valid-type]
        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            plan.planner_data["extra"] = {"any": ["thing"]}
            return plan

    class MakesItsOwn(base):  # type: ignore[misc, valid-type]
        def create_local_plan(self) -> SavePlan:
            items = DefaultSavePlanner.create_local_plan(self).items
            return SavePlan(items[::-1], planner_data=self.mappings)

    class LooksAtAll(base):  # type: ignore[misc, valid-type]
        def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            self.seen = [item.index.fqn for plan in all_plans for item in plan.items]
            plans, metadata = super().create_global_plan(all_plans)
            plans = [dataclasses.replace(plan, items=plan.items[:-1]) for plan in plans]
            metadata.state_dict_metadata["last"] = metadata.state_dict_metadata["model.norm"]
            metadata.planner_data["last"] = ("last",)
            return plans, dataclasses.replace(metadata, planner_data={**metadata.planner_data, "two": (2,)})

    class Finishes(base):  # type: ignore[misc, valid-type]
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            self.seen = [item.index.fqn for item in new_plan.items]
            return super().finish_plan(dataclasses.replace(new_plan, items=sorted(new_plan.items, key=str)))

    class KeepsAll(base):  # type: ignore[misc, valid-type]
        def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
            return [
                dataclasses.replace(all_plans[0], items=[*all_plans[0].items][:5]),
                *([SavePlan([], planner_data={})] * 3),
            ]

    return {name: cls for name, cls in locals().items() if inspect.isclass(cls) and cls is not base}


@pytest.mark.parametrize("name", subclasses(DefaultSavePlanner))
def test_subclasses_do_what_they_do_over_torchs(name: str) -> None:
    """A user's subclass makes equal plans over both planners, also at a repeat."""
    states = [{**state, "model": {"norm": state["model"]["norm"]}, "optim": 1} for state in states_of()]
    ours, theirs = ([subclasses(base)[name]() for _ in states] for base in (SavePlanner, DefaultSavePlanner))
    for _ in range(3):
        compared(plan_save(ours, states), plan_save(theirs, states))
        assert [getattr(planner, "seen", None) for planner in ours] == [getattr(p, "seen", None) for p in theirs]


def test_items_that_columns_cannot_hold_are_planned_by_torch() -> None:
    """A write item of a user's class is planned by torch, and stays unchanged."""

    def states() -> list[dict[str, Any]]:
        made = states_of()
        for state in made:
            state["model"]["odd"] = OddShards((10, 6), [((0, 0), (10, 6))])
        return made

    planned = both(states())
    assert [type(i) for plan in planned.plans for i in plan.items if i.index.fqn == "model.odd"] == [OddItem]


def test_keys_that_are_no_strings_are_planned_by_torch() -> None:
    """Keys that are not strings are planned by torch, and stay unchanged without flattening."""
    states: list[dict[Any, Any]] = [{1: torch.ones(2), "x": shard((4,), rank, 2)} for rank in range(2)]
    planned = both(states, flatten_state_dict=False, flatten_sharded_tensors=False)
    assert list(planned.metadata.state_dict_metadata) == [1, "x"]


class OddItem(WriteItem):
    """A user's class of write items."""


class OddShards(Shards):
    """A value with write items of a user's class."""

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        return [
            OddItem(i.index, i.type, i.bytes_io_data, i.tensor_data) for i in super().__create_write_items__(fqn, value)
        ]


# --- plans and metadata as objects ---------------------------------------------------------------------------------


def local_plans() -> tuple[SavePlan, SavePlan]:
    """Returns the plans of one rank, by `SavePlanner` and by torch's planner."""
    made = []
    for cls in (SavePlanner, DefaultSavePlanner):
        planner = cls()
        planner.set_up_planner(sharded_state(1), None, False)
        made.append(planner.create_local_plan())
    return made[0], made[1]


def test_items_are_as_a_list() -> None:
    """`Items` behave as a list for planners and storage writers."""
    ours, theirs = local_plans()
    assert (ours == theirs, theirs == ours, ours.items == theirs.items, theirs.items == ours.items) == (True,) * 4
    assert (ours.items[1], ours.items[-1], ours.items[1:3]) == (theirs.items[1], theirs.items[-1], theirs.items[1:3])
    assert (ours.items + theirs.items, theirs.items + ours.items) == (theirs.items * 2, theirs.items * 2)
    assert (len(ours.items), repr(ours.items), bool(ours.items)) == (len(theirs.items), repr(theirs.items), True)
    assert (ours.items.copy(), [ours.items[n] for n in range(len(ours.items))]) == (theirs.items, theirs.items)
    with pytest.raises(IndexError):
        ours.items[len(theirs.items)]
    for plan in (ours, theirs):
        plan.items[0] = plan.items[1]
        plan.items.pop()
        plan.items.sort(key=str)
    assert ours.items == theirs.items
    assert ours != SavePlan([])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_plans_can_be_copied(copied: Callable[[SavePlan], SavePlan]) -> None:
    """A copy of a plan has its items, also if the planner sent an equal plan before."""
    ours, theirs = local_plans()
    assert copied(ours) == theirs
    unusable = copied(dataclasses.replace(ours, usable=False))
    assert (unusable.usable, unusable.items) == (False, theirs.items)
    assert copied(dataclasses.replace(ours, items=list(ours.items)[:2])) == dataclasses.replace(
        theirs, items=theirs.items[:2]
    )


def test_metadata_is_the_coordinators_own() -> None:
    """Changes of the metadata, by a storage writer or the user, do not affect the next save."""
    planner = SavePlanner()
    for _ in range(3):
        planner.set_up_planner(sharded_state(0, 1), None, True)
        _, metadata = planner.create_global_plan([planner.create_local_plan()])
        assert "new" not in metadata.state_dict_metadata
        assert metadata.storage_data is None
        entry = metadata.state_dict_metadata["model.layers.0.weight"]
        assert isinstance(entry, TensorStorageMetadata)
        assert len(entry.chunks) == 1
        entry.chunks.append(entry.chunks[0])
        entry.properties.requires_grad = True
        metadata.state_dict_metadata["new"] = entry
        metadata.planner_data.clear()
        metadata.storage_data = {"x": 1}


def test_metadata_with_storage_data_is_pickled_as_torchs() -> None:
    """Metadata with ``storage_data``, which torch's writer pickles to a file, loads without this package."""
    metadata = both(states_of()).metadata
    filled = dataclasses.replace(metadata, storage_data={"x": 1})
    assert b"dcp_tensorizer" in pickle.dumps(metadata)
    assert b"dcp_tensorizer" not in pickle.dumps(filled)
    assert type(pickle.loads(pickle.dumps(filled))) is Metadata
    assert pickle.loads(pickle.dumps(filled)) == filled
    again = pickle.loads(pickle.dumps(metadata))
    assert (again == metadata, copy.deepcopy(again) == metadata, again != filled) == (True, True, True)
    again.state_dict_metadata["more"] = again.state_dict_metadata["model.norm"]
    assert "more" in pickle.loads(pickle.dumps(again)).state_dict_metadata


# --- arguments and costs -------------------------------------------------------------------------------------------


def test_the_arguments_are_torchs(caplog: pytest.LogCaptureFixture) -> None:
    """The arguments are torch's, in the same order; only the default of ``enable_plan_caching`` differs."""
    ours, theirs = (inspect.signature(cls.__init__).parameters for cls in (SavePlanner, DefaultSavePlanner))
    assert [*ours] == [*theirs]
    assert [name for name in ours if ours[name].default != theirs[name].default] == ["enable_plan_caching"]
    with caplog.at_level(logging.WARNING):
        SavePlanner(dedup_replicated_tensors=True)
    assert "no longer has any effect" in caplog.text


def test_twenty_thousand_items_cause_no_full_collection() -> None:
    """Planning 20,000 items causes no full collection, which would stop training and visit all of its objects."""
    state = {f"layer{number}": torch.zeros(1) for number in range(20_000)}
    planner = SavePlanner()
    gc.collect()  # one is allowed now and then
    before = gc.get_stats()[-1]["collections"]
    planner.set_up_planner(state, None, True)
    plans, metadata = planner.create_global_plan([pickle.loads(pickle.dumps(planner.create_local_plan()))])
    plan = planner.finish_plan(pickle.loads(pickle.dumps(plans[0])))
    received = pickle.loads(pickle.dumps(metadata))
    assert (sum(1 for _ in plan.items), len(received.state_dict_metadata)) == (20_000, 20_000)
    assert gc.get_stats()[-1]["collections"] == before
