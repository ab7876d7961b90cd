"""The paths of keys in nested state dicts, which plans and metadata carry in ``planner_data``."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

__all__ = ["PackedPaths", "Pickled", "merge_paths", "pack_paths", "unpack_paths", "with_keys"]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[str | int, ...]).decode


class PackedPaths(NamedTuple):
    """Paths as flattening makes them, each encoded: so many tuples would keep the garbage collector busy.

    Attributes:
        keys: Their keys; None: those of the plan's items.
        paths: Of each key.
    """

    keys: list[str] | None
    paths: list[bytes]


class Pickled(NamedTuple):
    """What a planner of the user's has in the place of paths."""

    data: bytes


def pack_paths(planner_data: Any, keys: list[str]) -> PackedPaths | Pickled:
    """Paths as they are sent; ``keys`` are those of the plan.

    Equal paths make equal bytes. Of pickles that is not so: they tell whether two strings are one object.
    """
    if type(planner_data) is dict and all(map(_is_path, planner_data.items())):
        try:
            paths = [_encode(path) for path in planner_data.values()]
        except UnicodeEncodeError:  # a lone surrogate
            pass
        else:
            own = list(planner_data)
            return PackedPaths(None if own == keys else own, paths)
    return Pickled(pickle.dumps(planner_data, pickle.HIGHEST_PROTOCOL))


def with_keys(packed: PackedPaths | Pickled, keys: list[str]) -> PackedPaths | Pickled:
    """Received paths, with their keys."""
    return packed._replace(keys=keys) if isinstance(packed, PackedPaths) and packed.keys is None else packed


def unpack_paths(packed: PackedPaths | Pickled) -> Any:
    """What was packed."""
    if isinstance(packed, Pickled):
        return pickle.loads(packed.data)
    assert packed.keys is not None
    return {key: _decode(path) for key, path in zip(packed.keys, packed.paths, strict=True)}


def merge_paths(packed: Iterable[PackedPaths | Pickled]) -> dict[str, Any]:
    """The paths of all ranks in the order that torch gives them: of a key that several have, the first rank's."""
    merged: dict[str, Any] = {}
    last = None
    for paths in reversed(list(packed)):
        if paths is last:  # most ranks share it
            continue
        last = paths
        if isinstance(paths, Pickled):
            merged.update({key: (value,) for key, value in unpack_paths(paths).items()})
        else:
            assert paths.keys is not None
            merged.update(zip(paths.keys, paths.paths, strict=True))
    return {key: _decode(value) if type(value) is bytes else value[0] for key, value in merged.items()}


def _is_path(entry: tuple[Any, Any]) -> bool:
    key, path = entry
    return (
        type(key) is str
        and type(path) is tuple
        and all(type(part) is str or (type(part) is int and -(2**63) <= part < 2**63) for part in path)
    )
