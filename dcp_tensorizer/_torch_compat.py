"""torch's private names, each with the reason why there is no public one. Only this module imports or touches them.

What only conversion needs is imported when it is asked for: it takes half a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

# FSDP1 still makes ShardedTensors, and there is no public way to them.
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.remote_device import _remote_device
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "FsspecWriter",
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "StorageInfo",
    "checkpoint_offset",
    "copy_all",
    "cpu_placement",
    "flatten_state_dict",
    "local_elements",
    "negated_view",
    "rebuild_sharded_tensor",
    "release_ipc_counter",
    "tensor_makers",
]

# What only conversion needs: fake tensors (see ``torch.serialization.skip_data``), what ``dcp.save`` does with a nested
# state dict, the places in the ``.metadata`` of torch's FileSystemWriter, and torch's writer for URLs.
_ON_USE = {
    "FakeTensor": ("torch._subclasses.fake_tensor", "FakeTensor"),
    "FakeTensorMode": ("torch._subclasses.fake_tensor", "FakeTensorMode"),
    "FsspecWriter": ("torch.distributed.checkpoint._fsspec_filesystem", "FsspecWriter"),
    "StorageInfo": ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    "flatten_state_dict": ("torch.distributed.checkpoint._nested_dict", "flatten_state_dict"),
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Imports what only conversion needs when it is first asked for."""
        if name not in _ON_USE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, attribute = _ON_USE[name]
        return getattr(import_module(module), attribute)


tensor_makers = frozenset({"torch", "torch._utils", "torch._tensor"})
"""The modules whose functions and classes a pickle calls to make tensors and shapes."""


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, non_blocking: bool = False) -> None:
    """Copies many tensors in one call, which costs a tenth of as many calls of ``copy_``."""
    torch._foreach_copy_(list(targets), list(sources), non_blocking=non_blocking)


def negated_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view whose elements are lazily negated, as ``.conj().imag`` is."""
    return torch._neg_view(tensor)


def cpu_placement(metadata: ShardMetadata) -> _remote_device:
    """The place of a shard of the same rank in host memory."""
    assert metadata.placement is not None
    return _remote_device(f"rank:{metadata.placement.rank()}/cpu")


def rebuild_sharded_tensor(like: ShardedTensor, shards: list[Shard], metadata: ShardedTensorMetadata) -> ShardedTensor:
    """A ShardedTensor of other local shards, made without a collective."""
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=like._process_group, init_rrefs=False
    )


def local_elements(target: Any) -> int:
    """How many elements of a tensor this rank has."""
    if isinstance(target, ShardedTensor):
        return sum(shard.tensor.numel() for shard in target.local_shards())
    if isinstance(target, DTensor):  # `to_local` would record an operation for autograd
        return target._local_tensor.numel() if target.device_mesh.get_coordinate() is not None else 0
    return target.numel() if isinstance(target, torch.Tensor) else 0


def release_ipc_counter(arguments: tuple[Any, ...]) -> None:
    """Gives a handle to GPU memory back, of which ``reduce_tensor`` made these arguments."""
    _, _, _, _, storage_class, _, device, _, _, _, _, counter, offset, _, _ = arguments
    storage_class._release_ipc_counter(counter, offset, device=device)


def checkpoint_offset(tensor: torch.Tensor) -> int:
    """Where ``torch.load`` found the bytes of a fake tensor in its file (see ``torch.serialization.skip_data``)."""
    return getattr(tensor.untyped_storage(), "_checkpoint_offset", None) or 0
