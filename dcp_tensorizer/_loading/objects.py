"""Objects: values that are no plain tensors, as ``torch.save`` stored them. They are read, checked, and delivered."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from .._format.chunks import Region
from .._format.layout import StoredItem
from .._format.objects import load_trusted, unsafe_globals
from ..errors import UntrustedObject
from .read_target import ReadTarget

__all__ = ["check_trust", "deliver_object", "read_objects"]


def read_objects(
    items: Sequence[tuple[ReadItem, StoredItem]], fetch: Callable[[Sequence[ReadTarget]], int]
) -> tuple[list[tuple[ReadItem, bytes]], int]:
    """Reads the bytes of objects, and unpickles none of them.

    Args:
        items: What to read.
        fetch: Reads targets, and returns how many bytes it has read.

    Returns:
        Each item with its object's bytes; and how many bytes were read.
    """
    objects = [(read_item, _target(read_item, item)) for read_item, item in items]
    nbytes = fetch([target for _, target in objects if target.item.length])
    return [(read_item, bytes(target.tensor.numpy().data)) for read_item, target in objects], nbytes


def _target(read_item: ReadItem, item: StoredItem) -> ReadTarget:
    tensor = torch.empty(item.length, dtype=torch.uint8, device="cpu")
    shape = (item.length,)
    return ReadTarget.of(read_item.dest_index.fqn, item._replace(dtype="uint8"), shape, Region((0,), shape), tensor)


def check_trust(path: str, objects: Sequence[tuple[ReadItem, bytes]]) -> None:
    """Checks that the weights-only rules of ``torch.load`` accept every object.

    Raises:
        UntrustedObject: they refuse one; names its key and its types.
    """
    accepted: set[bytes] = set()
    for read_item, content in objects:
        if content not in accepted:
            _check_one(path, read_item.dest_index.fqn, content)
            accepted.add(content)


def _check_one(path: str, key: str, content: bytes) -> None:
    try:
        load_trusted(content)
    except Exception as error:
        refused = ", ".join(unsafe_globals(content)) or f"{type(error).__name__}: {error}"
        raise UntrustedObject(
            f"{key!r} in {path} is an object that could run code when it is loaded ({refused}). If you trust it, pass "
            f"those types to torch.serialization.add_safe_globals, or allow_pickle=True to TensorizerStorageReader."
        ) from None


def deliver_object(planner: LoadPlanner, read_item: ReadItem, content: bytes, *, allow_pickle: bool) -> None:
    """Gives an object to the planner. A tensor that was stored as an object is copied to its target."""
    if read_item.type == LoadItemType.BYTE_IO:
        planner.load_bytes(read_item, io.BytesIO(content))
        return
    tensor = torch.load(io.BytesIO(content), weights_only=not allow_pickle)
    for dim, (start, length) in enumerate(zip(read_item.storage_offsets, read_item.lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    target = planner.resolve_tensor(read_item).detach()
    target.copy_(tensor)
    planner.commit_tensor(read_item, target)
