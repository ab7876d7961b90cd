"""Nested state dicts and the keys of their values: what DCP flattens is nested again, and checked for both ways."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from ..._torch_compat import flatten_state_dict
from ...errors import ConversionError
from ..checkpoint_view import CheckpointView, NonStringKey, Path

__all__ = ["check_lists", "check_names", "check_paths", "check_size", "exact_paths", "nested"]


_MAX_VALUES = 10_000_000


def nested(values: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[Any, Any]:
    """A state dict of values at their paths, none of which leads through another's value."""
    root: dict[Any, Any] = {}
    for name, value in values.items():
        node: Any = root
        path = paths[name]
        for part, after in zip(path, (*path[1:], None), strict=True):
            child = value if after is None else [] if type(after) is int else {}
            if isinstance(node, list):
                node.extend([None] * (int(part) + 1 - len(node)))
                if after is None or node[int(part)] is None:
                    node[int(part)] = child
                node = node[int(part)]
            else:
                key = part.value if isinstance(part, NonStringKey) else part
                node = node.setdefault(key, child)
    return root


def exact_paths(state: Mapping[Any, Any], paths: Mapping[str, Path]) -> dict[str, Path]:
    """The paths that DCP makes of a state dict, with the dicts' keys themselves where those are no strings."""
    keys_of: dict[int, dict[str, Any]] = {}
    exact: dict[str, Path] = {}
    for name, path in paths.items():
        node: Any = state
        parts: list[str | int] = []
        for part in path:
            key: Any = part
            if isinstance(node, Mapping):
                if id(node) not in keys_of:
                    keys_of[id(node)] = {str(key): key for key in node}
                key = keys_of[id(node)][str(part)]
                part = key if isinstance(key, str) else NonStringKey(key)
            parts.append(part)
            node = node[key]
        exact[name] = tuple(parts)
    return exact


def check_size(state: Any) -> None:
    """Checks how many values there are in a nested state dict, where a container counts as often as it is held.

    Each is looked at once, so that containers which hold each other many times over take no time here; they would where
    the state dict is flattened.

    Raises:
        ValueError: there are too many, or a container holds itself.
    """
    sizes: dict[int, int] = {}  # of containers; 0: it is being counted
    left = [(state, False)]
    while left:
        node, is_counted = left.pop()
        members = _members(node)
        if is_counted:
            sizes[id(node)] = 1 + sum(sizes.get(id(member), 1) for member in members)
            if sizes[id(node)] > _MAX_VALUES:
                raise ValueError(f"it holds more than {_MAX_VALUES:,} values")
        elif id(node) not in sizes:
            sizes[id(node)] = 0
            left.append((node, True))
            for member in members:
                if sizes.get(id(member)) == 0:
                    raise ValueError("a container in it holds itself")
                if _members(member):
                    left.append((member, False))


def _members(node: Any) -> Collection[Any]:
    if isinstance(node, Mapping):
        return list(node.values())
    return node if isinstance(node, list | tuple | set | frozenset) else ()


def check_paths(view: CheckpointView) -> None:
    """All keys must be one state dict: none below a value, and each container either a dict or a list."""
    is_list: dict[Path, bool] = {(): False}
    for key, path in view.paths.items():
        for depth, part in enumerate(path):
            if is_list.setdefault(path[:depth], type(part) is int) != (type(part) is int):
                raise ConversionError(f"{key!r} would be in a dict that is a list for other keys: leave it out")
    for key, path in view.paths.items():
        if path in is_list:
            raise ConversionError(f"{key!r} cannot be a value, and hold the values of other keys, too: leave it out")


def check_names(view: CheckpointView) -> None:
    """DCP has only names for the keys of dicts."""
    for key, path in view.paths.items():
        for part in path:
            if isinstance(part, NonStringKey):
                raise ConversionError(
                    f"{key!r} is below {part.value!r} in a dict, a key of type {type(part.value).__name__} that would "
                    f"become a string: leave it out, or convert to torch"
                )


def check_lists(view: CheckpointView) -> None:
    """Lists must be whole: of a part of one, flattening the nested state dict would give other keys."""
    paths = view.paths
    for (
        key,
        path,
    ) in paths.items():  # before a list of so many members is made: a whole one has fewer than there are keys
        if any(type(part) is int and part >= len(paths) for part in path):
            raise _partial_list(key)
    values = dict.fromkeys(view.objects) | {key: torch.empty(0, device="meta") for key in view.tensors}
    try:
        flat, _ = flatten_state_dict(nested(values, paths))
    except ValueError as error:
        raise ConversionError(f"two keys of {view.path} would be one: {error}") from error
    if odd := sorted(flat.keys() ^ values.keys()):
        raise _partial_list(odd[0])


def _partial_list(key: str) -> ConversionError:
    return ConversionError(f"{key!r} belongs to a list of which not all is to be converted: take all, or none")
