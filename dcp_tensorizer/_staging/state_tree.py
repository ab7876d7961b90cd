"""Twins: copies of state dicts, made in two steps around the copying of their tensors.

`freeze` copies containers and plain objects, while training waits, and finds the plain tensors; `fill` puts twins in
their places, in the same order, and builds wrapper subclasses and sharded tensors around them. Then nothing is shared
with the live state dict.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .._memory.tensor_bytes import check_supported, is_wrapper
from .._torch_compat import Shard, ShardedTensor, ShardMetadata, cpu_placement, rebuild_sharded_tensor
from ..errors import StagingError

__all__ = ["OTHER_TENSORS", "fill", "freeze"]

OTHER_TENSORS = (
    "the state dict has other tensors in it than a moment ago: do not change it before its staging is complete (a "
    "container or tensor subclass that gives other tensors each time it is asked cannot be saved)"
)
_ATOMIC = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def freeze(value: Any, key: str, found: list[torch.Tensor]) -> Any:
    """A copy of a value that holds the same tensors; the plain ones inside those are added to ``found``.

    Raises:
        StagingError: something cannot be copied; names its key.
    """
    if isinstance(value, torch.Tensor):
        found.extend(_inner_tensors(value, key))
        return value
    if isinstance(value, _ATOMIC):
        return value
    if isinstance(value, Mapping):
        items = [(name, freeze(item, f"{key}.{name}", found)) for name, item in value.items()]
        if type(value) in (dict, collections.OrderedDict):
            return type(value)(items)  # type: ignore[call-arg]
        # A shallow copy of a mapping that is not a dict may share its contents: to refill it would change the live one.
        return _refill(copy.copy(value), items) if isinstance(value, dict) else dict(items)
    if isinstance(value, list | tuple):
        return _like(value, [freeze(item, f"{key}.{number}", found) for number, item in enumerate(value)])
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise StagingError(
            f"{key!r}: an object of type {type(value).__module__}.{type(value).__qualname__} cannot be copied "
            f"({type(error).__name__}: {error}). Leave it out of the state dict, or give it a __deepcopy__."
        ) from error


def _inner_tensors(tensor: torch.Tensor, key: str) -> Iterator[torch.Tensor]:
    if isinstance(tensor, ShardedTensor):
        for shard in tensor.local_shards():
            yield from _inner_tensors(shard.tensor, key)
    elif is_wrapper(tensor) and not tensor.is_nested:
        if hasattr(tensor, "trigger_wait"):  # a collective's result that may still be on its way
            tensor.trigger_wait()
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):
                yield from _inner_tensors(inner, key)
    else:
        check_supported(key, tensor)
        yield tensor.detach()


def fill(frozen: Any, twins: Iterator[torch.Tensor]) -> Any:
    """Puts twins in the places of the tensors in what `freeze` gave, where it can, and returns it."""
    if isinstance(frozen, torch.Tensor):
        return _rebuild_tensor(frozen, twins)
    if isinstance(frozen, dict):
        return _refill(frozen, [(name, fill(item, twins)) for name, item in frozen.items()])
    if isinstance(frozen, list | tuple) and not isinstance(frozen, _ATOMIC):
        return _like(frozen, [fill(item, twins) for item in frozen])
    return frozen


def _like(value: Any, members: list[Any]) -> Any:
    return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)


def _refill(mapping: Any, items: list[tuple[Any, Any]]) -> Any:
    for name, item in items:
        mapping[name] = item
    return mapping


def _rebuild_tensor(tensor: torch.Tensor, twins: Iterator[torch.Tensor]) -> torch.Tensor:
    if isinstance(tensor, ShardedTensor):
        return _rebuild_sharded(tensor, twins)
    if not is_wrapper(tensor):
        twin = next(twins, None)
        if twin is None or (twin.shape, twin.dtype) != (tensor.shape, tensor.dtype):
            raise StagingError(OTHER_TENSORS)
        return twin
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: getattr(tensor, name) for name in names}
    staged = {k: _rebuild_tensor(v, twins) if isinstance(v, torch.Tensor) else v for k, v in inner.items()}
    rebuild = type(tensor).__tensor_unflatten__  # type: ignore[attr-defined]
    return rebuild(staged, context, tensor.size(), tensor.stride())  # type: ignore[no-any-return]


def _rebuild_sharded(tensor: ShardedTensor, twins: Iterator[torch.Tensor]) -> ShardedTensor:
    metadata = copy.deepcopy(tensor.metadata())
    for shard_metadata in metadata.shards_metadata:
        shard_metadata.placement = cpu_placement(shard_metadata)
    shards = []
    for shard in tensor.local_shards():
        where = ShardMetadata(shard.metadata.shard_offsets, shard.metadata.shard_sizes, cpu_placement(shard.metadata))
        shards.append(Shard(_rebuild_tensor(shard.tensor, twins), where))
    metadata.tensor_properties.requires_grad = False
    metadata.tensor_properties.pin_memory = bool(shards) and shards[0].tensor.is_pinned()
    return rebuild_sharded_tensor(tensor, shards, metadata)
