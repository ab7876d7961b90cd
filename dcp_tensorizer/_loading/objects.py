"""Objects: values that are no plain tensors, as ``torch.save`` stored them. They are read, checked, and delivered."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from .._format.chunks import Region
from .._format.layout import StoredItem
from .._format.objects import advice, unsafe_globals
from ..errors import CheckpointError, ReadError, UntrustedObject, describe
from .read_target import ReadTarget

__all__ = ["check_trust", "copy_to_target", "deliver_object", "read_objects"]


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
    """Checks that no object needs a type that could run code, before any of them is loaded.

    Raises:
        UntrustedObject: some do; names their keys, all their types, and what to do.
    """
    checked: dict[bytes, tuple[str, ...]] = {}
    keys: list[str] = []
    for read_item, content in objects:
        key = read_item.dest_index.fqn
        try:
            if content not in checked:
                checked[content] = unsafe_globals(content)
        except UntrustedObject as error:
            raise UntrustedObject(
                f"{key!r} in {path} could run code when it is loaded: {error}. If you trust the checkpoint as you "
                f"trust a program, pass allow_pickle=True to the reader."
            ) from None
        if checked[content]:
            keys.append(key)
    if keys:
        names = sorted({name for refused in checked.values() for name in refused})
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        raise UntrustedObject(
            f"{keys[0]!r}{more} in {path} could run code when loaded: what was saved needs {', '.join(names)}. "
            f"{advice(names)}"
        )


def deliver_object(path: str, planner: LoadPlanner, read_item: ReadItem, content: bytes) -> None:
    """Gives an object that is trusted to the planner. A tensor that was stored as one is copied to its target.

    Raises:
        ReadError: it cannot be loaded, as where Python or NumPy lacks a type; names its key.
    """
    try:
        _deliver(planner, read_item, content)
    except CheckpointError:
        raise
    except Exception as error:
        raise ReadError(f"{read_item.dest_index.fqn!r} in {path} cannot be loaded: {describe(error)}") from error


def _deliver(planner: LoadPlanner, read_item: ReadItem, content: bytes) -> None:
    if read_item.type == LoadItemType.BYTE_IO:
        planner.load_bytes(read_item, io.BytesIO(content))
        return
    copy_to_target(planner, read_item, torch.load(io.BytesIO(content), map_location="cpu", weights_only=False))


def copy_to_target(planner: LoadPlanner, read_item: ReadItem, tensor: torch.Tensor) -> None:
    """Copies the part of a stored tensor that an item is to the planner's target."""
    for dim, (start, length) in enumerate(zip(read_item.storage_offsets, read_item.lengths, strict=True)):
        if length < tensor.size(dim):  # not every class can be narrowed
            tensor = tensor.narrow(dim, start, length)
    target = planner.resolve_tensor(read_item).detach()
    if target.shape != tensor.shape:  # which `copy_` might spread over it
        raise ValueError(f"it is of shape {tuple(tensor.shape)}, and its target of {tuple(target.shape)}")
    target.copy_(tensor)
    planner.commit_tensor(read_item, target)
