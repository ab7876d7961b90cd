"""Makes a rank's read items: the same as torch's planner, but by torch only once per layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from .._runtime.torch_compat import layout_of

_Layout = tuple[Any, ...]
_T = TypeVar("_T")


def has_older_keys(metadata: Metadata, state_dict: Mapping[str, Any], nested: Mapping[str, Any]) -> bool:
    """Returns whether a checkpoint has a dict or a list as one object, whose members the flattened state dict has.

    torch before 2.4 saved those without tensors so, and its planner looks for them.
    """
    more = metadata.state_dict_metadata.keys() - state_dict.keys()
    return bool(more) and any(key in more for key in _containers(nested, ""))


def _containers(container: Any, path: str) -> Iterator[str]:
    """The keys that the dicts and lists in a container would have."""
    members = container.items() if isinstance(container, Mapping) else enumerate(container)
    for name, member in members:
        if isinstance(member, (Mapping, list)):
            yield f"{path}{name}"
            yield from _containers(member, f"{path}{name}.")


def read_items_of(state_dict: Mapping[str, Any], metadata: Metadata, *, strict: bool) -> list[ReadItem]:
    """The items that torch's planner makes of a flattened state dict, in its order.

    It intersects chunks for each value, which takes most of the time of loading many small tensors. The result is the
    same, except for the key, for all values of one layout that are stored whole. ``strict``: a key that the checkpoint
    lacks is an error. Raises `RuntimeError` or `ValueError`, as torch does.
    """
    known: dict[_Layout, list[ReadItem]] = {}
    items: list[ReadItem] = []
    checked: dict[tuple[int, torch.Size], _Layout | None] = {}  # many tensors share one entry of the metadata
    for key, value in state_dict.items():
        stored = metadata.state_dict_metadata.get(key)
        if type(value) is torch.Tensor:
            name = id(stored), value.shape
            layout = checked[name] if name in checked else checked.setdefault(name, _layout(value, stored))
        else:
            layout = _layout(value, stored)
        if layout in known:
            items += _renamed(known[layout], key)
            continue
        made = create_default_local_load_plan({key: value}, metadata, strict).items
        items += made
        if layout is not None:
            known[layout] = [_with_one_index(item) for item in made]
    return items


def _layout(value: Any, stored: Any) -> _Layout | None:
    """The properties on which the items of a value depend; None if it also depends on others."""
    if type(stored) is BytesStorageMetadata:
        return None if isinstance(value, torch.Tensor) else ()
    if type(stored) is not TensorStorageMetadata or len(stored.chunks) != 1:
        return None
    chunk = stored.chunks[0]
    if chunk.sizes != stored.size or any(chunk.offsets):
        return None
    if type(value) is torch.Tensor:
        return stored.size, value.shape
    layout = layout_of(value)
    return None if layout is None else (stored.size, *layout)


def _with_one_index(item: ReadItem) -> ReadItem:
    """The same item; its two indices are one object if they are equal."""
    dest, storage = item.dest_index, item.storage_index
    return _changed(item, storage_index=dest) if dest == storage and dest.index == storage.index else item


def _renamed(items: Iterable[ReadItem], key: str) -> Iterator[ReadItem]:
    """The same items for another key. Their constructors would take three times as long."""
    for item in items:
        dest, storage = item.dest_index, item.storage_index
        renamed = _changed(dest, fqn=key)
        other = renamed if dest is storage else _changed(storage, fqn=key)
        yield _changed(item, dest_index=renamed, storage_index=other)


def _changed(record: _T, **fields: Any) -> _T:
    """A copy of a dataclass instance with other values of some fields."""
    made = object.__new__(type(record))
    made.__dict__.update(record.__dict__, **fields)
    return made
