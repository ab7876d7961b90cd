"""Planners of users: what torch's storage lets them do, they do."""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, LoadPlan, SavePlan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem, SavePlanner, WriteItemType

from dcp_tensorizer import planner as ours

__all__ = ["EACH_ITS_OWN", "LOAD_PLANNERS", "SAVE_PLANNERS", "load_planner", "save_planner"]

EACH_ITS_OWN = "each its own"
"""torch's storage with torch's planner, and ours with ours. By other names both have the same planner."""


def _is_chosen(key: Any) -> bool:
    """About a third of all keys."""
    return sum(str(key).encode("utf-8", "replace")) % 3 == 0


def _stock(planner: Any) -> dict[str, Any]:
    """A planner as it is, with the options that the one for saves and the one for loads share."""
    return {
        "default": planner,
        "nested": lambda: planner(flatten_state_dict=False),
        "sharded tensors as they are": lambda: planner(flatten_sharded_tensors=False),
    }


# --- for saves -------------------------------------------------------------------------------------------------------


class ScratchSave(DefaultSavePlanner):
    """Gives every item in the same memory."""

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        super().set_up_planner(*args, **kwargs)
        self.scratch = torch.empty(4096, dtype=torch.uint8)
        self.stream = io.BytesIO()

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        if isinstance(data, io.BytesIO):
            self.stream.seek(0)
            self.stream.truncate()
            self.stream.write(data.getvalue())
            return self.stream
        if type(data) is not torch.Tensor or data.nbytes > self.scratch.nbytes or data.dtype.itemsize == 0:
            return data
        plain = self.scratch[: data.nbytes].view(data.dtype).view(data.shape)
        return plain.copy_(data.detach())


class RenamingSave(DefaultSavePlanner):
    """Saves under other names."""

    def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        super().set_up_planner({f"renamed {key}": value for key, value in state_dict.items()}, *args, **kwargs)


class DroppingSave(DefaultSavePlanner):
    """Leaves some items out."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[item for item in plan.items if not _is_chosen(item.index.fqn)])


class LateDroppingSave(DefaultSavePlanner):
    """Leaves some items out when the metadata has them already."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        return dataclasses.replace(plan, items=[item for item in plan.items if not _is_chosen(item.index.fqn)])


class AddingSave(DefaultSavePlanner):
    """Saves more than it is given."""

    def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        added = {"added tensor": torch.arange(5), "added": {"object": 5}}
        super().set_up_planner({**state_dict, **added}, *args, **kwargs)


class BackwardSave(DefaultSavePlanner):
    """Writes in another order, and in plans of its own making."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return [SavePlan(plan.items[::-1]) for plan in plans], metadata


class CastingSave(DefaultSavePlanner):
    """Stores other dtypes than the metadata says, as Megatron and others do."""

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data.to(torch.bfloat16) if isinstance(data, torch.Tensor) and data.dtype is torch.float32 else data


class LyingSave(DefaultSavePlanner):
    """Gives tensors of another shape than it planned."""

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        if isinstance(data, torch.Tensor) and _is_chosen(write_item.index.fqn):
            return data.reshape(-1)
        return data.mT if isinstance(data, torch.Tensor) and data.ndim == 2 and data.shape[0] == data.shape[1] else data


class ReadBytesSave(DefaultSavePlanner):
    """Gives streams that stand at their end."""

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        if write_item.type == WriteItemType.BYTE_IO:
            data.read()
        return data


class FailingSave(DefaultSavePlanner):
    """Fails for some items."""

    def resolve_data(self, write_item: Any) -> Any:
        if _is_chosen(write_item.index.fqn):
            raise RuntimeError("not this one")
        return super().resolve_data(write_item)


SAVE_PLANNERS: dict[str, Any] = {
    **_stock(DefaultSavePlanner),
    "to the lowest rank": lambda: DefaultSavePlanner(dedup_save_to_lowest_rank=True),
    "dedup": lambda: DefaultSavePlanner(dedup_replicated_tensors=True),
    "cached plans": lambda: DefaultSavePlanner(enable_plan_caching=True),
    "scratch": ScratchSave,
    "renaming": RenamingSave,
    "dropping": DroppingSave,
    "dropping late": LateDroppingSave,
    "adding": AddingSave,
    "backward": BackwardSave,
    "casting": CastingSave,
    "lying": LyingSave,
    "read bytes": ReadBytesSave,
    "failing": FailingSave,
    EACH_ITS_OWN: DefaultSavePlanner,
}


def save_planner(name: str, rank: int, is_ours: bool) -> SavePlanner | None:
    """A planner by its name; torch's cache of plans is the class's, so that each rank needs a name of its own there."""
    if name == "none":
        return None
    if name == EACH_ITS_OWN and is_ours:
        return ours.SavePlanner()
    planner: SavePlanner = SAVE_PLANNERS[name]()
    planner._cached_plans_key = f"rank {rank}"
    return planner


def forget_cached_plans() -> None:
    """Forgets what planners with ``enable_plan_caching`` have kept."""
    for name in ("_cached_save_plan", "_cached_final_save_plan", "_cached_all_plans", "_cached_global_plan"):
        getattr(SavePlanner, name).clear()
    SavePlanner._cached_metadata.clear()


# --- for loads -------------------------------------------------------------------------------------------------------


class Recorded(DefaultLoadPlanner):
    """Keeps a record of what it is asked."""

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        self._seen: dict[tuple[Any, ...], list[str]] = {}
        super().set_up_planner(*args, **kwargs)

    @property
    def events(self) -> dict[str, dict[str, int]]:
        """Of each key: what one item sees, in its order, and how many elements see that.

        In torch's plans there is an item for each stored chunk, and in ours one for all of them.
        """
        found: dict[str, dict[str, int]] = {}
        for (key, lengths, *_), seen in self._seen.items():
            of_key = found.setdefault(f"{key}", {})
            of_key[", ".join(seen)] = of_key.get(", ".join(seen), 0) + math.prod(lengths)
        return found

    def note(self, what: str, item: ReadItem) -> None:
        if item.type == LoadItemType.BYTE_IO or math.prod(item.lengths):
            target = item.dest_index.offset, item.dest_offsets
            source = item.storage_index.offset, item.storage_offsets
            self._seen.setdefault((item.dest_index.fqn, item.lengths, target, source), []).append(what)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.note(f"bytes at {value.tell()}", read_item)
        super().load_bytes(read_item, value)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self.note("resolve", read_item)
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.note(f"commit {tensor.dtype} {tensor.requires_grad}", read_item)
        super().commit_tensor(read_item, tensor)


class ScratchLoad(Recorded):
    """Has every tensor read into the same memory."""

    memory = 1 << 19  # whole tensors fit: a planner of ours is asked once for all parts

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        super().set_up_planner(*args, **kwargs)
        self.scratch = torch.zeros(self.memory, dtype=torch.uint8)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = super().resolve_tensor(read_item)
        return self.scratch[: target.nbytes].view(target.dtype).view(target.shape)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        target = DefaultLoadPlanner.resolve_tensor(self, read_item).detach()
        target.copy_(tensor)


class ConvertingLoad(Recorded):
    """Reads into float64, and converts that itself."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = super().resolve_tensor(read_item)
        return torch.empty_like(target, dtype=torch.float64) if target.dtype is torch.float32 else target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        DefaultLoadPlanner.resolve_tensor(self, read_item).detach().copy_(tensor)


class DroppingLoad(DefaultLoadPlanner):
    """Leaves some items out."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[item for item in plan.items if not _is_chosen(item.dest_index.fqn)])


class RepeatingLoad(Recorded):
    """Reads everything twice."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=plan.items * 2)


class NewPlansLoad(DefaultLoadPlanner):
    """Makes plans of its own, backward."""

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return [LoadPlan(plan.items[::-1]) for plan in global_plan]


class RowsLoad(Recorded):
    """Reads tensors row by row."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        items = [row for item in plan.items for row in _rows(item)]
        return dataclasses.replace(plan, items=items)


def _rows(item: ReadItem) -> list[ReadItem]:
    if item.type == LoadItemType.BYTE_IO or not item.lengths:
        return [item]
    return [
        dataclasses.replace(
            item,
            dest_offsets=torch.Size((item.dest_offsets[0] + row, *item.dest_offsets[1:])),
            storage_offsets=torch.Size((item.storage_offsets[0] + row, *item.storage_offsets[1:])),
            lengths=torch.Size((1, *item.lengths[1:])),
        )
        for row in range(item.lengths[0])
    ]


class RenamingLoad(DefaultLoadPlanner):
    """Knows its tensors under other names than the checkpoint does."""

    def create_local_plan(self) -> LoadPlan:
        self.state_dict = {key.removeprefix("renamed "): value for key, value in self.state_dict.items()}
        return super().create_local_plan()

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return super().lookup_tensor(index)


class TransposingLoad(DefaultLoadPlanner):
    """Gives views of its tensors that lie otherwise in memory."""

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        part = super().transform_tensor(read_item, tensor)
        return part.mT if part.ndim == 2 and part.shape[0] == part.shape[1] else part


class ShrinkingLoad(DefaultLoadPlanner):
    """Gives tensors of another shape than it asked for."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor = super().resolve_tensor(read_item)
        return tensor[:1] if tensor.ndim and len(tensor) > 1 else tensor


class FailingLoad(Recorded):
    """Fails when it hears of some."""

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        if _is_chosen(read_item.dest_index.fqn):
            raise RuntimeError("not this one")


class MetadataLoad(DefaultLoadPlanner):
    """Makes its own targets, of what the metadata says."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                state_dict[f"{key}"] = torch.empty(entry.size, dtype=entry.properties.dtype)
        super().set_up_planner(state_dict, metadata, is_coordinator)


LOAD_PLANNERS: dict[str, Any] = {
    **_stock(DefaultLoadPlanner),
    "partial": lambda: DefaultLoadPlanner(allow_partial_load=True),
    **{f"ours, {name}": make for name, make in _stock(ours.LoadPlanner).items()},
    "ours, partial": lambda: ours.LoadPlanner(allow_partial_load=True),
    "recorded": Recorded,
    "scratch": ScratchLoad,
    "converting": ConvertingLoad,
    "dropping": DroppingLoad,
    "repeating": RepeatingLoad,
    "new plans": NewPlansLoad,
    "rows": RowsLoad,
    "renaming": RenamingLoad,
    "transposing": TransposingLoad,
    "shrinking": ShrinkingLoad,
    "failing": FailingLoad,
    "from metadata": lambda: MetadataLoad(flatten_state_dict=False),
    EACH_ITS_OWN: DefaultLoadPlanner,
}


def load_planner(name: str, is_ours: bool) -> LoadPlanner | None:
    if name == EACH_ITS_OWN and is_ours:
        return ours.LoadPlanner()
    return None if name == "none" else LOAD_PLANNERS[name]()
