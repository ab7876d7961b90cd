"""Tied tensors: several names in a state dict for one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._runtime.torch_compat import DTensor, flatten_state_dict, part_described, plain_local


def ties_of(state_dict: Mapping[str, Any]) -> dict[str, str]:
    """Returns, for the name of each tied tensor, the name of the earlier tensor that it is tied to.

    Tied tensors view the same memory with the same dtype, shape and strides, and have the same sharding. Names are
    those of the flattened state dict.
    """
    first: dict[object, str] = {}
    ties: dict[str, str] = {}
    flat, _ = flatten_state_dict(dict(state_dict))
    for fqn, value in flat.items():
        identity = identity_of(value)
        if identity is not None and first.setdefault(identity, fqn) != fqn:
            ties[fqn] = first[identity]
    return ties


def identity_of(value: object) -> object:
    """Returns a key that is equal for tied tensors, or None if the value cannot be tied.

    Only plain strided tensors with memory on this rank, and DTensors of such tensors, can be tied.
    """
    if not isinstance(value, torch.Tensor):
        return None
    sharding: object = None
    tensor = value
    if isinstance(value, DTensor):
        sharding = value.shape, value.device_mesh, tuple(value.placements)
        local = plain_local(value)
        tensor = value.to_local() if local is None else local
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.numel() or tensor.is_meta:
        return None
    if tensor.layout is not torch.strided or not (address := tensor.data_ptr()):  # FSDP may have freed the memory
        return None
    read_as = tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return tensor.device, address, read_as, sharding, part_described(value)
