"""Planners for ``torch.distributed.checkpoint`` that do not repeat work for equal plans or tensors of one layout."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem

from ._index.schema import ItemKey
from ._planning.columns import EncodedColumns, Table, Unsupported, columns_of_rows, item_of, rows_of
from ._planning.global_plan import GlobalPlan, encoded, make_global_plan
from ._planning.plan import CompactPlan, Histories, History, Items, Reference, WrittenItems
from ._planning.read_items import has_older_keys, read_items_of
from ._runtime.interpreter import collector_paused
from ._runtime.torch_compat import ShardedTensor, plain_local, plain_tensor_at
from ._tensor_file.dtypes import is_ordinary

__all__ = ["LoadPlanner", "SavePlanner"]


class SavePlanner(DefaultSavePlanner):
    """A faster ``DefaultSavePlanner`` for many tensors on many ranks.

    Pass the same instance as ``planner`` to every ``dcp.async_save`` or ``dcp.save`` of a job, with any storage
    writer::

        planner = SavePlanner()
        for step in ...:
            dcp.async_save(state_dict, storage_writer=writer, planner=planner)

    The checkpoints and their ``Metadata`` are the same as with torch's planner. This planner sends a plan in column
    form, as a few arrays; or only the plan's digest, if the plan equals one of the rank's last plans.

    Planning raises `WriteError`, naming the keys, if chunks overlap, lie outside their tensor or, with several ranks,
    are missing; if ranks have tensors of different shapes under one key; or if they have one chunk in different dtypes.

    Subclasses may override the methods that subclasses of ``DefaultSavePlanner`` may. If the column form cannot hold a
    plan, torch's planner makes the plan.

    Args:
        flatten_state_dict: Save the members of nested dicts and lists one by one.
        flatten_sharded_tensors: Flatten a ``ShardedTensor`` inside a ``ShardedTensor``.
        dedup_replicated_tensors: Has no effect, as in torch.
        dedup_save_to_lowest_rank: Whether the lowest rank writes values that several ranks have. Otherwise these values
            are divided among the ranks so that the sizes of the plans are balanced.
        enable_plan_caching: Cache the last plans by their contents, so that equal ones are not sent or made again. Has
            no effect in PROCESS mode, where DCP sends a copy of the planner with each save.
    """

    plans_as_torch: ClassVar[type[DefaultSavePlanner]]
    _histories: Histories | None = None
    written_elsewhere: frozenset[str] = frozenset()
    """Keys of this rank's tensors that other ranks write, according to the plan of the last save."""

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = True,
    ) -> None:
        # torch's own cache is off, because all planners of a process share it.
        super().__init__(
            flatten_state_dict, flatten_sharded_tensors, dedup_replicated_tensors, dedup_save_to_lowest_rank
        )
        self._histories = Histories() if enable_plan_caching else None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a copy, with empty histories, because the copy has sent nothing yet."""
        state = {name: value for name, value in self.__dict__.items() if name not in _OF_A_SAVE}
        return {**state, "_histories": copy.copy(self._histories)}

    @collector_paused()
    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Sets the state to save. DCP calls this method."""
        _set_up(self, lambda: super(SavePlanner, self).set_up_planner(state_dict, storage_meta, is_coordinator))

    @collector_paused()
    def create_local_plan(self) -> SavePlan:
        """Plans all items that this rank can write.

        Raises:
            StagingError: a tensor is nested, or has integers of less than a byte. The message names the key.
        """
        history = self._history
        if history is not None:
            history.begin()
        try:
            rows = rows_of(self.state_dict, is_coordinator=self.is_coordinator)
            columns, _ = columns_of_rows(rows, self.mappings if self.flatten_state_dict else None)
        except Unsupported:
            return super().create_local_plan()
        cls = type(self)
        if (
            cls.create_global_plan is not SavePlanner.create_global_plan
            or cls.finish_plan is not SavePlanner.finish_plan
        ):
            history = None  # a subclass gets whole plans, never a digest instead
        self.plan = CompactPlan.of(Items(columns, history=history), None)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Decides, on the coordinator, which rank writes which item.

        Raises:
            WriteError: chunks overlap, lie outside their tensor or, with several ranks, are missing; or ranks disagree
                on a tensor. The message names the keys.
        """
        tables: dict[bytes, Table] = {}
        history = self._history
        plans = [self._resolved(rank, plan, tables, history) for rank, plan in enumerate(all_plans)]
        try:
            sources = [encoded(plan) for plan in plans]
            for name in ("_dedup_save_plans", "_create_global_plan"):  # torch's `create_global_plan` calls them
                if getattr(type(self), name, None) is not getattr(DefaultSavePlanner, name, None):
                    raise Unsupported  # a subclass overrides the method
        except Unsupported:
            return super().create_global_plan(plans)
        result = self._planned(sources, tables, history)
        coordinator = None if history is None else history.id
        shared: dict[bytes, Table] = {}  # only the tables in use, not all decoded ones
        self.global_plan = [
            CompactPlan.of(Items(source, choice, coordinator=coordinator, tables=shared), plan.storage_data)
            for source, choice, plan in zip(sources, result.choices, plans, strict=True)
        ]
        self.metadata = result.metadata()
        return self.global_plan, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Returns the plan of the items that this rank writes."""
        history = self._history
        if history is not None:
            if isinstance(choice := new_plan.items, WrittenItems):
                columns = history.answered(choice.reference)
                new_plan = CompactPlan.of(Items(columns, choice), new_plan.storage_data)
            history.end()
        self.written_elsewhere = new_plan.items.not_chosen() if isinstance(new_plan.items, Items) else frozenset()
        return super().finish_plan(new_plan)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Returns the state dict's value for an item."""
        tensor = plain_tensor_at(index, self.state_dict)
        return super().lookup_object(index) if tensor is None else tensor

    def resolve_plan(self, plan: SavePlan) -> Iterator[tuple[ItemKey, torch.Tensor, bool] | WriteItem]:
        """Yields the items of a plan, for a storage writer that would otherwise call `resolve_data` for each item.

        Instead of the item of an ordinary tensor, yields its `ItemKey`, the result of `resolve_data`, and whether that
        result is the whole tensor. This avoids the seven objects of DCP's item.
        """
        rows = plan.items.rows() if isinstance(plan.items, Items) else None
        if rows is None:
            yield from plan.items
            return
        for row in rows:
            _, spec, start, size = row.chunk
            value = self.state_dict.get(row.key)
            tensor = plain_local(value) if type(value) is not torch.Tensor or any(start) else value
            if spec is not None and is_ordinary(tensor) and tensor.shape == size:
                yield (row.key, start), tensor, size == spec.shape
            else:
                yield item_of(row)

    @property
    def _history(self) -> History | None:
        return None if self._histories is None else self._histories.of_save()

    def _resolved(self, rank: int, plan: SavePlan, tables: dict[bytes, Table], history: History | None) -> SavePlan:
        """Returns a rank's plan with its items, even if the rank sent only a digest."""
        items = plan.items
        if isinstance(items, Reference):
            history = history or History()  # an empty history raises for an unknown digest
            return CompactPlan.of(Items(history.received(rank, items), tables=tables), plan.storage_data)
        if isinstance(items, Items) and isinstance(items.source, EncodedColumns):
            items.tables = tables
        return plan

    def _planned(
        self, sources: list[EncodedColumns], tables: dict[bytes, Table], history: History | None
    ) -> GlobalPlan:
        options = {"to_lowest_rank": self.dedup_save_to_lowest_rank, "merges_paths": self.flatten_state_dict}
        if history is None:
            return make_global_plan([source.decode(tables) for source in sources], **options)
        key = (tuple(source.digest for source in sources), *options.values())
        result: GlobalPlan | None = history.find(key)
        if result is None:
            result = make_global_plan([source.decode(tables) for source in sources], **options)
        history.planned(key, sources, result)
        return result


SavePlanner.plans_as_torch = SavePlanner
"""The class whose methods plan as torch's do. Subclasses may plan differently, so `_saving.write_plan` compares a
planner's methods with those of this class."""

_OF_A_SAVE = {"state_dict", "plan", "global_plan", "metadata"}


class LoadPlanner(DefaultLoadPlanner):
    """A faster ``DefaultLoadPlanner`` for many tensors.

    Pass a new instance as ``planner`` to each ``dcp.load``, with any storage reader::

        dcp.load(state_dict, storage_reader=reader, planner=LoadPlanner())

    This planner loads the same values as torch's, except in dicts whose keys are not strings: see `load_bytes`.

    torch's planner intersects the stored chunks with the target of each tensor. For tensors that have one shape and
    sharding, and are each one chunk in the metadata, this planner does so only once: see
    `TensorizerStorageReader.read_metadata`.

    Subclasses may override the methods that subclasses of ``DefaultLoadPlanner`` may. The arguments are those of that
    class, under the same names:

    - ``flatten_state_dict``: the members of nested dicts and lists were saved one by one; True by default.
    - ``flatten_sharded_tensors``: flatten a ``ShardedTensor`` inside a ``ShardedTensor``; True by default.
    - ``allow_partial_load``: do not change values whose key the checkpoint lacks; by default such a key is an error.
    """

    @collector_paused()
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Sets the state to load into. DCP calls this method."""
        _set_up(self, lambda: super(LoadPlanner, self).set_up_planner(state_dict, metadata, is_coordinator))

    @collector_paused()
    def create_local_plan(self) -> LoadPlan:
        """Plans what this rank reads."""
        assert self.metadata is not None
        nested = self.original_state_dict
        if self.flatten_state_dict and has_older_keys(self.metadata, self.state_dict, nested):
            return super().create_local_plan()
        return LoadPlan(read_items_of(self.state_dict, self.metadata, strict=not self.allow_partial_load))

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Sets a value that is not a tensor, even in a dict whose keys are not strings.

        The planner's ``mappings`` have such keys as strings: torch's planner would add ``"1"`` to a dict that has the
        key ``1``.
        """
        key = read_item.dest_index.fqn
        if not self.flatten_state_dict or key not in self.mappings:
            super().load_bytes(read_item, value)
            return
        *outer, last = self.mappings[key]
        container: Any = self.original_state_dict
        for part in outer:
            container = container[_own_key(container, part)]
        container[_own_key(container, last)] = torch.load(value, weights_only=False)


def _set_up(planner: DefaultSavePlanner | DefaultLoadPlanner, set_up: Callable[[], None]) -> None:
    """Sets up a planner by calling ``set_up``, torch's own method.

    If the flattened state dict has no ``ShardedTensor``, skips torch's flattening of ``ShardedTensor``: flattening
    rebuilds the state dict, which takes longer than the check.
    """
    takes_apart, planner.flatten_sharded_tensors = planner.flatten_sharded_tensors, False
    try:
        set_up()
    except ValueError:  # two keys have the same path: for a load, flattening ShardedTensors retains the second value
        if not takes_apart:
            raise
        is_flat = False
    else:
        kinds = set(map(type, planner.state_dict.values()))
        is_flat = planner.flatten_state_dict and not any(issubclass(kind, ShardedTensor) for kind in kinds)
    finally:
        planner.flatten_sharded_tensors = takes_apart
    if takes_apart and not is_flat:
        set_up()


def _own_key(container: Any, part: Any) -> Any:
    """Returns the key of a container that ``part`` of a path stands for."""
    if not isinstance(container, Mapping) or part in container:
        return part
    if isinstance(part, str) and part.isdigit() and int(part) in container:
        return int(part)
    return next((key for key in container if str(key) == part), part)
