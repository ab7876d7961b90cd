"""Makes a rank's read items: the same as torch's planner, but by torch only once per layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from .._runtime.torch_compat import is_whole, layout_of

_Layout = tuple[Any, ...]
_T = TypeVar("_T")


def has_older_keys(metadata: Metadata, state_dict: Mapping[str, Any], nested: Mapping[str, Any]) -> bool:
    """Returns whether a checkpoint has a dict or a list as one object, whose members the flattened state dict has.

    torch before 2.4 saved those without tensors so, and its planner looks for them.
    """
    more = metadata.state_dict_metadata.keys() - state_dict.keys()
    return bool(more) and any(key in more for key in _containers(nested, ""))


def _containers(container: Any, path: str) -> Iterator[str]:
    """Returns the keys that the dicts and lists in a container would have."""
    members = container.items() if isinstance(container, Mapping) else enumerate(container)
    for name, member in members:
        if isinstance(member, (Mapping, list)):
            yield f"{path}{name}"
            yield from _containers(member, f"{path}{name}.")


def read_items_of(state_dict: Mapping[str, Any], metadata: Metadata, *, strict: bool) -> list[ReadItem]:
    """Returns the items that torch's planner makes of a flattened state dict, in its order.

    It intersects chunks for each value, which takes most of the time of loading many small tensors. The result is the
    same, except for the key, for all values of one layout that are stored whole. ``strict``: a key that the checkpoint
    lacks is an error. Raises `RuntimeError` or `ValueError`, as torch does.
    """
    known: dict[_Layout | None, list[ReadItem]] = {}
    items: list[ReadItem] = []
    for key, value in state_dict.items():
        stored = metadata.state_dict_metadata.get(key)
        # Many plain tensors share one entry of the metadata, which is faster to look up than the layout.
        name = (id(stored), value.shape) if is_whole(value) else None
        made = known.get(name)
        if made is None:
            layout = _layout(value, stored)
            made = known.get(layout)
            if made is None:
                planned = create_default_local_load_plan({key: value}, metadata, strict)
                made = [_with_one_index(item) for item in planned.items]
            known.update(dict.fromkeys({name, layout} - {None}, made))
        for item in made:
            items.append(_renamed(item, key))
    return items


def _layout(value: Any, stored: Any) -> _Layout | None:
    """Returns the properties on which the items of a value depend, unless it also depends on others."""
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


def _with_one_index(item: ReadItem) -> ReadItem:
    """The same item; its two indices are one object if they are equal."""
    dest, storage = item.dest_index, item.storage_index
    return replace(item, storage_index=dest) if dest == storage and dest.index == storage.index else item


def _renamed(item: ReadItem, key: str) -> ReadItem:
    """The same item for another key. Its constructors would take twice as long."""
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
