"""A save plan whose items are made on demand, and whose pickle is small.

A rank sends its plan as columns, or only their digest if the coordinator knows them. If the rank still has its columns,
the coordinator's response only marks the items that the rank writes.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import uuid
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from .._runtime.recent import Recent
from .._runtime.torch_compat import group_of_save
from .._tensor_file.regions import Integers
from ..errors import WriteError
from .columns import (
    Columns,
    EncodedColumns,
    Row,
    Table,
    Unsupported,
    columns_of,
    encode,
    item_of,
    pack,
    pack_integers,
    unpack,
    unpack_integers,
)


class Reference(NamedTuple):
    """A reference to columns that a coordinator knows: the coordinator's id, and the columns' digest."""

    coordinator: str
    digest: bytes


class WrittenItems(NamedTuple):
    """The items of a plan that its rank writes.

    If the rank still has its columns, this object replaces the items in the coordinator's response to the rank's plan.
    """

    items: int  # their number
    mask: bytes  # a bit for each item of the plan
    hints: bytes  # packed
    reference: Reference | None = None  # in a response: to the columns that the rank has sent


def choose(is_written: np.ndarray, hints: Integers) -> WrittenItems:
    """Returns the choice of the items for which ``is_written`` is true. ``hints`` are those of the chosen items.

    A hint of -1 stands for none.
    """
    return WrittenItems(len(hints), np.packbits(is_written).tobytes(), pack(pack_integers(hints)))


class Items(MutableSequence[WriteItem]):
    """The items of a plan, made anew on each access unless they were changed.

    Args:
        source: The columns.
        choice: The chosen items; None: all, without hints.
        history: The history of the planner that made this local plan, if the coordinator's response may refer to the
            plan's columns.
        coordinator: The id of the coordinator's history, if this is a response that may refer to the rank's columns.
        tables: The decoded tables of other ranks' plans.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        source: Columns | EncodedColumns,
        choice: WrittenItems | None = None,
        *,
        history: History | None = None,
        coordinator: str | None = None,
        tables: dict[bytes, Table] | None = None,
    ) -> None:
        self.source = source
        self.choice = choice
        self.history = history
        self.coordinator = coordinator
        self.tables: dict[bytes, Table] = {} if tables is None else tables
        self._changed: list[WriteItem] | None = None

    @property
    def is_changed(self) -> bool:
        return self._changed is not None

    @property
    def table(self) -> Table:
        return self.source.table if isinstance(self.source, Columns) else self.source.decode_table(self.tables)

    @functools.cached_property
    def columns(self) -> Columns:
        """The columns of all items, including those that are not chosen."""
        return self.source if isinstance(self.source, Columns) else self.source.decode(self.tables)

    @functools.cached_property
    def chosen(self) -> tuple[Columns, Integers]:
        if self.choice is None:
            return self.columns, np.full(len(self.columns), -1)
        is_written = np.unpackbits(np.frombuffer(self.choice.mask, np.uint8), count=len(self.columns))
        return self.columns.select(np.flatnonzero(is_written)), unpack_integers(unpack(self.choice.hints))

    def not_chosen(self) -> frozenset[str]:
        """Returns the keys of tensors without a chosen item; empty if unknown."""
        if self.choice is None or self.is_changed:
            return frozenset()
        table = self.columns.table
        is_written = np.unpackbits(np.frombuffer(self.choice.mask, np.uint8), count=len(self.columns)).astype(bool)
        # Not `np.setdiff1d`, which imports modules: a child forked during the import could never import them.
        tensors = set(table.key_numbers[table.spec_numbers >= 0].tolist())
        return frozenset(table.keys[number] for number in tensors.difference(table.key_numbers[is_written].tolist()))

    def rows(self) -> Iterator[Row] | None:
        if self.is_changed:
            return None
        columns, hints = self.chosen
        return columns.rows(hints)

    def __iter__(self) -> Iterator[WriteItem]:
        rows = self.rows()
        return iter(self._changed or ()) if rows is None else map(item_of, rows)

    def __len__(self) -> int:
        if self._changed is not None:
            return len(self._changed)
        return len(self.columns) if self.choice is None else self.choice.items

    def __getitem__(self, at: Any) -> Any:
        if self._changed is not None or isinstance(at, slice):
            return list(self)[at]
        columns, hints = self.chosen
        row = np.array([range(len(hints))[at]])
        return item_of(next(columns.select(row).rows(hints[row])))

    def __setitem__(self, at: Any, item: Any) -> None:
        self._change()[at] = item

    def __delitem__(self, at: Any) -> None:
        del self._change()[at]

    def insert(self, at: int, item: WriteItem) -> None:
        self._change().insert(at, item)

    def sort(self, **arguments: Any) -> None:
        self._change().sort(**arguments)

    def copy(self) -> list[WriteItem]:
        return list(self)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, (list, Items)) else NotImplemented

    def __add__(self, other: Iterable[WriteItem]) -> list[WriteItem]:
        return [*self, *other]

    def __radd__(self, other: Iterable[WriteItem]) -> list[WriteItem]:
        return [*other, *self]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the items as a list. `CompactPlan` sends less."""
        return list, (list(self),)

    def _change(self) -> list[WriteItem]:
        if self._changed is None:
            self._changed = list(self)
        return self._changed


class CompactPlan(SavePlan):
    """torch's ``SavePlan`` with `Items`, sent as columns or as a reference to columns.

    The pickle is valid only between the ranks of one save.
    """

    __hash__ = None  # type: ignore[assignment]

    @functools.cached_property
    def planner_data(self) -> Any:
        return self.items.table.planner_data if isinstance(self.items, Items) else None

    @classmethod
    def of(cls, items: Any, storage_data: Any) -> CompactPlan:
        """Returns a plan with the ``planner_data`` of its items."""
        plan = cls.__new__(cls)
        plan.__dict__.update(items=items, storage_data=storage_data, usable=True)
        return plan

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SavePlan):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _FIELDS)

    def __copy__(self) -> CompactPlan:
        plan = type(self).__new__(type(self))
        plan.__dict__.update(self.__dict__)
        return plan

    def __deepcopy__(self, memo: dict[int, Any]) -> CompactPlan:
        return type(self)(*[copy.deepcopy(getattr(self, name), memo) for name in _FIELDS])

    def __reduce__(self) -> tuple[Any, ...]:
        items = self.items
        if isinstance(items, (Reference, WrittenItems)):
            return CompactPlan.of, (items, self.storage_data)
        try:
            if not self.usable:
                raise Unsupported
            if not isinstance(items, Items) or items.is_changed:
                return self._whole(*columns_of(items, self.planner_data))
            if items.choice is not None:
                return self._answer(items, items.choice)
            return self._report(items)
        except Unsupported:
            return SavePlan, (list(items), self.storage_data, self.planner_data, self.usable)

    def _report(self, items: Items) -> tuple[Any, ...]:
        columns = items.columns.with_data(self.planner_data)
        encoded = encode(columns, may_refer=items.history is not None)
        reference = None if items.history is None else items.history.sending(columns, encoded.digest)
        if reference is not None:
            return CompactPlan.of, (reference, self.storage_data)
        return _received, (encoded, None, self.storage_data)

    def _answer(self, items: Items, choice: WrittenItems) -> tuple[Any, ...]:
        """Returns the pickle of the coordinator's response to a rank. Most ranks need only the choice of items."""
        source = items.source
        is_theirs = "planner_data" not in self.__dict__ or self.planner_data is items.table.planner_data
        if items.coordinator is not None and isinstance(source, EncodedColumns) and source.may_refer and is_theirs:
            reference = Reference(items.coordinator, source.digest)
            return CompactPlan.of, (choice._replace(reference=reference), self.storage_data)
        return self._whole(*items.chosen)

    def _whole(self, columns: Columns, hints: Integers) -> tuple[Any, ...]:
        encoded = encode(columns.with_data(self.planner_data))
        choice = choose(np.ones(len(columns), bool), hints) if len(hints) and hints.max() >= 0 else None
        return _received, (encoded, choice, self.storage_data)


def _received(encoded: EncodedColumns, choice: WrittenItems | None, storage_data: Any) -> CompactPlan:
    return CompactPlan.of(Items(encoded, choice), storage_data)


_FIELDS = [field.name for field in dataclasses.fields(SavePlan)]


# --- the plans that a planner has cached ------------------------------------------------------------------------------

# A rank may refer to any of its last four plans: a job that saves the model and the optimizer in turn, with other
# states between them, cycles through four. The coordinator retains more plans of a rank, because saves may fail after
# the coordinator planned them.
_SAVES = 4
_SAVES_OF_COORDINATOR = 4 * _SAVES


class History:
    """The plans that a planner has sent as a rank, and received and made as the coordinator of a group.

    Plans are identified by their contents, so that different state dicts may be saved in any order. ``id`` identifies
    the planner as a coordinator.
    """

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self._sent: tuple[Columns, bytes] | None = None
        self._is_answered = True
        self._known: Recent[Reference] = Recent(_SAVES)
        # One cache per rank: plans that a rank retains must be here, however many plans other ranks send.
        self._received: defaultdict[int, Recent[EncodedColumns]] = defaultdict(lambda: Recent(_SAVES_OF_COORDINATOR))
        self._planned: Recent[Any] = Recent(_SAVES_OF_COORDINATOR)

    def begin(self) -> None:
        """Begins a save. If the last save got no response from the coordinator, this rank sends whole plans again."""
        if not self._is_answered:
            self._known = Recent(_SAVES)
        self._is_answered = True

    # --- as a rank ----------------------------------------------------------------------------------------------

    def sending(self, columns: Columns, digest: bytes) -> Reference | None:
        """Returns the reference to send instead of the columns; None if the columns must be sent."""
        self._sent, self._is_answered = (columns, digest), False
        return self._known.find(digest)

    def answered(self, reference: Reference | None) -> Columns:
        """Returns the columns that a response refers to, and records that the coordinator knows them."""
        assert self._sent is not None and reference is not None and self._sent[1] == reference.digest
        self._known.add(reference.digest, reference)
        return self._sent[0]

    def end(self) -> None:
        self._is_answered = True

    # --- as the coordinator -------------------------------------------------------------------------------------

    def received(self, rank: int, reference: Reference) -> EncodedColumns:
        """Returns the columns that a rank refers to. Raises `WriteError` if they are unknown."""
        plan = self._received[rank].find(reference.digest) if reference.coordinator == self.id else None
        if plan is not None:
            return plan
        raise WriteError(
            f"rank {rank} refers to a plan that this coordinator does not know: another rank, or another planner, "
            f"coordinated the last saves of rank {rank}. The next save sends the whole plan. Use one planner per rank "
            f"for all saves."
        )

    def find(self, key: object) -> Any:
        return self._planned.find(key)

    def planned(self, key: object, plans: Sequence[EncodedColumns], result: Any) -> None:
        for rank, plan in enumerate(plans):
            if plan.may_refer:
                self._received[rank].add(plan.digest, plan)
        self._planned.add(key, result)


class Histories:
    """A planner's histories, one per process group: each group has its own coordinator. A copy starts empty."""

    def __init__(self) -> None:
        self._of_groups: weakref.WeakKeyDictionary[Any, History] = weakref.WeakKeyDictionary()

    def __copy__(self) -> Histories:
        return Histories()

    def __reduce__(self) -> tuple[Any, ...]:
        return Histories, ()

    def of_save(self) -> History:
        group = group_of_save() or (dist.group.WORLD if dist.is_available() else None) or Histories  # without a group
        history = self._of_groups.get(group)
        return self._of_groups.setdefault(group, History()) if history is None else history
