"""Users' planners, for which the reader and the writer keep the promises of torch's storage."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlan

from dcp_tensorizer import MetadataError, SavePlanner, TensorizerStorageReader, TensorizerStorageWriter

KEYS = [f"layer{number}" for number in range(4)]


class ScratchLoadPlanner(DefaultLoadPlanner):
    """A planner that reads all tensors into one buffer, and copies each in `commit_tensor`."""

    def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        super().set_up_planner(state_dict, *args, **kwargs)
        self.scratch = torch.zeros(1)
        self.events: list[str] = []

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self.events.append("resolve")
        return self.scratch

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.events.append("commit")
        self.lookup_tensor(read_item.dest_index).copy_(self.scratch)


class ScratchSavePlanner(DefaultSavePlanner):
    """A planner that makes all saved tensors and objects in one buffer."""

    scratch = torch.zeros(1)
    text = io.BytesIO()

    def resolve_data(self, write_item: Any) -> Any:
        value = super().resolve_data(write_item)
        if isinstance(value, torch.Tensor):
            return self.scratch.copy_(value * 2)
        self.text.seek(0)
        self.text.write(value.getvalue())
        self.text.seek(0)
        return self.text


def state(start: float) -> dict[str, Any]:
    return {key: torch.tensor([start + number]) for number, key in enumerate(KEYS)}


def values(loaded: dict[str, Any]) -> list[float]:
    return [loaded[key].item() for key in KEYS]


@pytest.mark.parametrize("ours", [True, False], ids=["dcp_tensorizer", "torch"])
def test_a_planner_with_one_buffer_loads_every_tensor(tmp_path: Path, ours: bool) -> None:
    """Each tensor is committed before the next one is resolved, as by torch's reader."""
    done: list[tuple[int, int]] = []
    if ours:
        with TensorizerStorageWriter(tmp_path) as writer:
            dcp.save(state(1.0), storage_writer=writer)
    else:
        dcp.save(state(1.0), storage_writer=FileSystemWriter(tmp_path))
    planner, loaded = ScratchLoadPlanner(), {key: torch.zeros(1) for key in KEYS}
    reader = (
        TensorizerStorageReader(tmp_path, on_progress=lambda *both: done.append(both))
        if ours
        else FileSystemReader(tmp_path)
    )
    dcp.load(loaded, storage_reader=reader, planner=planner)
    assert values(loaded) == [1.0, 2.0, 3.0, 4.0]
    assert planner.events == ["resolve", "commit"] * 4
    assert [count for count, _ in done] == ([0, 4, 8, 12, 16] if ours else [])


@pytest.mark.parametrize("staged", [True, False], ids=["async_save", "save"])
def test_a_planner_with_one_buffer_saves_every_item(tmp_path: Path, staged: bool) -> None:
    """The result of each `resolve_data` is copied before the next call."""
    saved = {**state(1.0), "a": "one", "b": "two"}
    with TensorizerStorageWriter(tmp_path) as writer:
        if staged:
            dcp.async_save(saved, storage_writer=writer, planner=ScratchSavePlanner()).result()
        else:
            dcp.save(saved, storage_writer=writer, planner=ScratchSavePlanner())
    loaded = {**{key: torch.zeros(1) for key in KEYS}, "a": "", "b": ""}
    dcp.load(loaded, storage_reader=TensorizerStorageReader(tmp_path))
    assert values(loaded) == [2.0, 4.0, 6.0, 8.0]
    assert (loaded["a"], loaded["b"]) == ("one", "two")


class Doubles(SavePlanner):
    """A planner that saves doubled tensors and other objects."""

    def lookup_object(self, index: Any) -> Any:
        value = super().lookup_object(index)
        return "two" if value == "one" else value

    def transform_object(self, write_item: Any, value: Any) -> Any:
        value = super().transform_object(write_item, value)
        return value * 2 if isinstance(value, torch.Tensor) else value

    def resolve_data(self, write_item: Any) -> Any:
        value = super().resolve_data(write_item)
        return value + 1 if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("ours", [True, False], ids=["dcp_tensorizer", "torch"])
def test_a_subclass_of_our_planner_saves_what_it_makes(tmp_path: Path, ours: bool) -> None:
    """Overridden methods that make values are called, at the first save and at a repeat."""
    planner = Doubles()
    with TensorizerStorageWriter() as writer:
        for number in range(2):
            storage = writer if ours else FileSystemWriter(tmp_path / str(number))
            path, saved = tmp_path / str(number), {**state(number), "a": "one"}
            dcp.save(saved, checkpoint_id=path, storage_writer=storage, planner=planner)
            loaded = {**{key: torch.zeros(1) for key in KEYS}, "a": ""}
            dcp.load(loaded, storage_reader=TensorizerStorageReader(path) if ours else FileSystemReader(path))
            assert values(loaded) == [2 * (number + key) + 1 for key in range(len(KEYS))]
            assert loaded["a"] == "two"


def plan_of(reader: TensorizerStorageReader) -> LoadPlan:
    """Returns a rank's plan, as DCP gathers it."""
    reader.reset()
    metadata = reader.read_metadata()
    planner = DefaultLoadPlanner()
    planner.set_up_planner({key: torch.zeros(1) for key in KEYS}, metadata)
    reader.set_up_storage_reader(metadata, True)
    return reader.prepare_local_plan(planner.create_local_plan())


@pytest.mark.promise("index-overwritten")
def test_ranks_that_read_two_saves_are_refused(tmp_path: Path) -> None:
    """If another job overwrites the path between the reads of two ranks, the load fails without changing a target."""
    ranks = [TensorizerStorageReader(tmp_path) for _ in range(3)]
    plans = []
    for number, reader in enumerate(ranks):
        if number != 1:
            with TensorizerStorageWriter(tmp_path) as writer:
                dcp.save(state(float(number)), storage_writer=writer)
        plans.append(plan_of(reader))
    assert ranks[0].prepare_global_plan(plans[:2]) == plans[:2]
    with pytest.raises(MetadataError, match="rank 2 and rank 0 found different saves"):
        ranks[0].prepare_global_plan(plans)


def test_plans_that_lost_their_save_are_refused(tmp_path: Path) -> None:
    """Plans without ``storage_data`` are refused for several ranks; a single rank needs no agreement."""
    with TensorizerStorageWriter(tmp_path) as writer:
        dcp.save(state(1.0), storage_writer=writer)
    reader = TensorizerStorageReader(tmp_path)
    plan = plan_of(reader)
    dropped = dataclasses.replace(plan, storage_data=None)
    assert reader.prepare_global_plan([dropped]) == [dropped]
    with pytest.raises(MetadataError, match="dropped the storage_data of the plan of rank 1"):
        reader.prepare_global_plan([plan, dropped])
