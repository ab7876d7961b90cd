"""A load plan goes to the coordinator and back: its items only where somebody looks at them, and never wrong ones."""

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
    """What arrives in another process."""
    return pickle.loads(pickle.dumps(value))


def test_a_plan_that_nobody_looks_at_comes_back_without_its_items() -> None:
    """They are those that were kept; what the coordinator sends is small."""
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
    """Changed in their list, replaced by others, or in a plan of its own."""
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
    """Whether somebody has looked at them or not."""
    plans = [RetainedPlan.keep(LoadPlan([item(f"{rank}")]), rank, "save") for rank in range(2)]
    swapped = [sent(plan) for plan in plans][::-1]
    for rank, plan in enumerate(swapped):
        plan.send_to(rank)
    del plans
    assert [sent(plan).items for plan in swapped] == [[item("1")], [item("0")]]


def test_what_was_not_kept_is_missed() -> None:
    """A plan cannot come back to nobody."""
    there = sent(RetainedPlan.keep(LoadPlan(list(ITEMS)), 0, "save"))
    with pytest.raises(KeyError):
        sent(there)


def test_a_plan_is_one_of_dcps() -> None:
    """With its fields; equal to one with the same."""
    plan = RetainedPlan.keep(LoadPlan(list(ITEMS)), 0, "save")
    assert isinstance(plan, LoadPlan)
    assert [field.name for field in dataclasses.fields(plan)] == ["items", "storage_data", "planner_data"]
    assert plan == RetainedPlan(list(ITEMS), "save")
    assert "storage_data='save'" in repr(plan)
