"""Makes a rank's read items: the same as torch's planner, but by torch only once per layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from .._runtime.torch_compat import layout_of

_Layout = tuple[Any, ...]


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
    for key, value in state_dict.items():
        layout = _layout(value, metadata.state_dict_metadata.get(key))
        if layout in known:
            items += [_renamed(item, key) for item in known[layout]]
            continue
        made = create_default_local_load_plan({key: value}, metadata, strict).items
        items += made
        if layout is not None:
            known[layout] = made
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


def _renamed(item: ReadItem, key: str) -> ReadItem:
    """The same item for another key."""
    dest, storage = item.dest_index, item.storage_index
    renamed = MetadataIndex(key, dest.offset, dest.index)
    is_same = dest == storage and dest.index == storage.index
    return ReadItem(
        item.type,
        renamed,
        item.dest_offsets,
        renamed if is_same else MetadataIndex(key, storage.offset, storage.index),
        item.storage_offsets,
        item.lengths,
    )
