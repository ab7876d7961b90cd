"""A load plan is sent to the coordinator and back with its items only if a planner accesses them."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from dcp_tensorizer._planning.read_items import RetainedPlan

EMPTY = torch.Size([])


def item(key: str) -> ReadItem:
    return ReadItem(LoadItemType.BYTE_IO, MetadataIndex(key), EMPTY, MetadataIndex(key), EMPTY, torch.Size([0]))


ITEMS = [item(f"layers.{number}.weight") for number in range(1000)]


def sent(value: Any) -> Any:
    """Returns a plan as another process receives it."""
    return pickle.loads(pickle.dumps(value))


def test_a_plan_that_nobody_looks_at_comes_back_without_its_items() -> None:
    """If no planner accesses the items, the coordinator's pickle is small, and the rank uses its own items."""
    home = RetainedPlan.keep(LoadPlan(list(ITEMS), planner_data="planner"), 3, "save")
    there = sent(home)
    there.send_to(3)
    assert (there.storage_data, there.planner_data) == ("save", "planner")
    assert len(pickle.dumps(home)) < len(pickle.dumps(LoadPlan(list(ITEMS)))) / 4
    assert len(pickle.dumps(there)) < 500
    back = sent(there)
    assert back.items is home.items
    assert (back.storage_data, back.planner_data) == ("save", "planner")


def test_items_that_a_planner_looks_at_come_back_as_it_left_them() -> None:
    """Items that a planner changes in place, replaces, or puts into a new plan arrive as changed."""
    home = RetainedPlan.keep(LoadPlan(list(ITEMS)), 0, "save")
    changed, replaced, new = sent(home), sent(home), sent(home)
    assert changed.items == ITEMS
    changed.items.pop()
    replaced.items = [item("other")]
    new = dataclasses.replace(new, items=new.items[:5])
    for plan in (changed, replaced, new):
        plan.send_to(0)
    assert sent(changed).items == ITEMS[:-1]
    assert sent(replaced).items == [item("other")]
    assert (sent(new).items, sent(new).storage_data) == (ITEMS[:5], "save")
    assert home.items == ITEMS


def test_a_plan_that_goes_to_another_rank_takes_its_items_along() -> None:
    """A plan for another rank contains its items, whether a planner has accessed them or not."""
    plans = [RetainedPlan.keep(LoadPlan([item(f"{rank}")]), rank, "save") for rank in range(2)]
    swapped = [sent(plan) for plan in plans][::-1]
    for rank, plan in enumerate(swapped):
        plan.send_to(rank)
    del plans
    assert [sent(plan).items for plan in swapped] == [[item("1")], [item("0")]]


def test_what_was_not_kept_is_missed() -> None:
    """If the rank no longer holds its plan, the returned plan raises KeyError."""
    there = sent(RetainedPlan.keep(LoadPlan(list(ITEMS)), 0, "save"))
    with pytest.raises(KeyError):
        sent(there)


def test_a_plan_is_one_of_dcps() -> None:
    """A `RetainedPlan` has the fields of DCP's plan, and equals a plan with equal fields."""
    plan = RetainedPlan.keep(LoadPlan(list(ITEMS)), 0, "save")
    assert isinstance(plan, LoadPlan)
    assert [field.name for field in dataclasses.fields(plan)] == ["items", "storage_data", "planner_data"]
    assert plan == RetainedPlan(list(ITEMS), "save")
    assert "storage_data='save'" in repr(plan)
