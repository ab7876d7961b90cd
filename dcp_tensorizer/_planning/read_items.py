"""Load plans: read items planned by torch only once per layout, and a plan whose items do not go back to its rank."""

from __future__ import annotations

import pickle
import uuid
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from .._runtime.torch_compat import is_whole, layout_of

_Layout = tuple[Any, ...]
_T = TypeVar("_T")


def has_older_keys(metadata: Metadata, state_dict: Mapping[str, Any], nested: Mapping[str, Any]) -> bool:
    """Returns whether a checkpoint stores a dict or list of the state dict as one object, not as one item per member.

    torch before 2.4 stored dicts and lists without tensors in this way, and torch's planner still finds them.
    """
    more = metadata.state_dict_metadata.keys() - state_dict.keys()
    return bool(more) and any(key in more for key in _containers(nested, ""))


def _containers(container: Any, path: str) -> Iterator[str]:
    """Yields the key under which a checkpoint would store each nested dict and list of a container as one object."""
    members = container.items() if isinstance(container, Mapping) else enumerate(container)
    for name, member in members:
        if isinstance(member, (Mapping, list)):
            yield f"{path}{name}"
            yield from _containers(member, f"{path}{name}.")


def read_items_of(state_dict: Mapping[str, Any], metadata: Metadata, *, strict: bool) -> list[ReadItem]:
    """Returns the items that torch's planner makes of a flattened state dict, in the planner's order.

    torch's planner intersects chunks for each value, which dominates the time of loading many small tensors. But values
    of one layout that are stored whole have the same items, except for the key. With ``strict``, a key that the
    checkpoint lacks is an error. Raises `RuntimeError` or `ValueError`, as torch does.
    """
    known: dict[_Layout | None, list[ReadItem]] = {}
    items: list[ReadItem] = []
    for key, value in state_dict.items():
        stored = metadata.state_dict_metadata.get(key)
        # Many plain tensors share one metadata entry, whose id is faster to look up than the layout.
        name = (id(stored), value.shape) if is_whole(value) else None
        made = known.get(name)
        if made is None:
            layout = _layout(value, stored)
            made = known.get(layout)
            if made is None:
                planned = create_default_local_load_plan({key: value}, metadata, strict)
                made = []
                for item in planned.items:  # one object for both indices, if they are equal
                    dest, source = item.dest_index, item.storage_index
                    is_same = dest == source and dest.index == source.index
                    made.append(replace(item, storage_index=dest) if is_same else item)
            known.update(dict.fromkeys({name, layout} - {None}, made))
        for item in made:
            items.append(_renamed(item, key))
    return items


def _layout(value: Any, stored: Any) -> _Layout | None:
    """Returns the properties that determine the items of a value. If the items depend on more, returns None."""
    if type(stored) is BytesStorageMetadata:
        return None if isinstance(value, torch.Tensor) else ()
    if type(stored) is not TensorStorageMetadata or len(stored.chunks) != 1:
        return None
    chunk = stored.chunks[0]
    if chunk.sizes != stored.size or any(chunk.offsets):
        return None
    if is_whole(value):
        return stored.size, value.shape
    layout = layout_of(value)
    return None if layout is None else (stored.size, *layout)


def _renamed(item: ReadItem, key: str) -> ReadItem:
    """Returns the item for another key. Calling the constructors would take twice as long."""
    dest, storage = item.dest_index, item.storage_index
    renamed = _copy(item)
    fields = renamed.__dict__
    fields["dest_index"] = index = _copy(dest)
    index.__dict__["fqn"] = key
    if storage is not dest:
        index = _copy(storage)
        index.__dict__["fqn"] = key
    fields["storage_index"] = index
    return renamed


def _copy(record: _T) -> _T:
    made = object.__new__(type(record))
    object.__setattr__(made, "__dict__", record.__dict__.copy())
    return made


# --- a load plan whose items are not sent back ------------------------------------------------------------------------
#
# DCP sends the plans of all ranks to the coordinator and back. A planner may change them there, but hardly any does. So
# the items are sent as one blob, which is decoded and sent back only if a planner accesses the items.

_retained: WeakValueDictionary[str, RetainedPlan] = WeakValueDictionary()
"""The plans that ranks of this process have made and still hold."""


class RetainedPlan(LoadPlan):
    """A load plan whose items the coordinator does not send back.

    Hold the plan that `keep` returns until its copy has come back.
    """

    def __init__(self, items: list[ReadItem], storage_data: Any = None, planner_data: Any = None) -> None:
        self._items: list[ReadItem] | None = items
        self._packed = b""
        self._token = ""
        self._rank = -1
        self.storage_data = storage_data
        self.planner_data = planner_data

    @classmethod
    def keep(cls, plan: LoadPlan, rank: int, storage_data: Any) -> RetainedPlan:
        """Returns the plan of a rank with other ``storage_data``."""
        retained = cls(plan.items, storage_data, plan.planner_data)
        retained._token, retained._rank = uuid.uuid4().hex, rank
        _retained[retained._token] = retained
        return retained

    @property
    def items(self) -> list[ReadItem]:
        if self._items is None:
            self._items = pickle.loads(zlib.decompress(self._packed))
        if _retained.get(self._token) is not self:
            self._token = ""  # the caller may change the items, so they are sent from now on
        return self._items

    @items.setter
    def items(self, items: list[ReadItem]) -> None:
        self._items, self._token = items, ""

    def send_to(self, rank: int) -> None:
        """Makes the pickle include the items if a planner has given the plan to a rank that did not make it."""
        if rank != self._rank:
            self.items = self.items

    def __reduce__(self) -> tuple[Any, ...]:
        data = self.storage_data, self.planner_data
        if not self._token:
            return RetainedPlan, (self.items, *data)
        if self._items is None:
            return _returned, (self._token, *data)
        return _sent, (self._token, self._rank, zlib.compress(pickle.dumps(self._items), 1), *data)


def _sent(token: str, rank: int, packed: bytes, storage_data: Any, planner_data: Any) -> RetainedPlan:
    """Rebuilds the plan on the coordinator, with the items as one blob."""
    plan = RetainedPlan([], storage_data, planner_data)
    plan._items, plan._packed, plan._token, plan._rank = None, packed, token, rank
    return plan


def _returned(token: str, storage_data: Any, planner_data: Any) -> RetainedPlan:
    """Rebuilds the plan on the rank that made it, with the items that the rank has held."""
    return RetainedPlan(_retained[token].items, storage_data, planner_data)
