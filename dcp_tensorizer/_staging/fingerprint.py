"""What a state dict is like, but for its values: two of the same fingerprint are planned in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._torch_compat import DTensor, ShardedTensor

__all__ = ["fingerprint"]


def fingerprint(value: Any) -> int:
    """A number that differs, in this process, between state dicts of other keys, types, shapes, dtypes or shardings.

    It takes no look at values, and so costs some microseconds for each of them.

    Args:
        value: A state dict, or what is in one.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return hash((kind, value.shape, value.dtype, _sharding(value)))
    if isinstance(value, Mapping):
        return hash((kind, tuple((name, fingerprint(member)) for name, member in value.items())))
    if isinstance(value, list | tuple):
        return hash((kind, tuple(map(fingerprint, value))))
    return hash(kind)


def _sharding(tensor: torch.Tensor) -> object:
    if isinstance(tensor, DTensor):
        return tensor.device_mesh, tuple(tensor.placements)
    if isinstance(tensor, ShardedTensor):
        shards = (shard.metadata for shard in tensor.local_shards())
        return tuple((tuple(shard.shard_offsets), tuple(shard.shard_sizes)) for shard in shards)
    return None
