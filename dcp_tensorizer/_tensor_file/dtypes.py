"""Converts tensors to bytes: checks that they can be saved, returns their bytes, and names dtypes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch

from .._runtime.torch_compat import describes_part, without_torch_function
from ..errors import StagingError

# Integers of less than a byte. DCP's planner fails on them without naming the key.
_SUB_BYTE = {
    dtype
    for bits in range(1, 8)
    for name in (f"int{bits}", f"uint{bits}")
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}

_QUANTISED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # nearly all tensors: classes whose instances have their own storage

_STRIDED = torch.strided
_ORDINARY = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)} - _SUB_BYTE - _QUANTISED
UNCOPYABLE = {torch.float4_e2m1fn_x2}
"""Dtypes that pack two numbers into a byte. torch cannot copy transposed tensors of these, so `copyable` views them as
uint8."""


def check_supported(key: str, tensor: torch.Tensor) -> None:
    """Raises `StagingError`, naming the key and the kind of tensor, unless the elements can be saved as plain bytes."""
    if (fault := _fault(tensor)) is not None:
        raise StagingError(f"{key!r} is a tensor {fault}, or leave the tensor out of the state dict.")


def check_plannable(key: str, tensor: torch.Tensor) -> None:
    """Raises `StagingError`, naming the key, for a tensor on which DCP's planner fails without naming the key."""
    with without_torch_function():
        may_fail = tensor.is_nested or tensor.dtype in _SUB_BYTE
    if may_fail:
        check_supported(key, tensor)


def _fault(tensor: torch.Tensor) -> str | None:
    """Returns why a tensor cannot be saved, and advice, as words that follow "is a tensor"; None if it can be saved."""
    if tensor.is_nested:
        return f"that is nested (layout {tensor.layout}), which cannot be saved. Save the result of its unbind()"
    if tensor.layout is not torch.strided:
        return f"of layout {tensor.layout}, which cannot be saved. Save the result of its to_dense()"
    if tensor.is_meta:
        return "on the meta device, which has no data to save. Give its module memory (to_empty) and values"
    if tensor.is_quantized:
        return (
            f"of the quantised dtype {tensor.dtype}, which cannot be saved. Save its int_repr(), its scale and "
            f"its zero point"
        )
    if tensor.dtype in _SUB_BYTE:
        return f"of dtype {tensor.dtype}, which DCP cannot plan. Save the result of its view(torch.uint8)"
    if type(tensor) not in _PLAIN and tensor.numel() and not has_memory(tensor):
        return (
            f"of type {type(tensor).__qualname__}, which cannot be saved: it has neither a storage nor "
            f"__tensor_flatten__. Give its class __tensor_flatten__ and __tensor_unflatten__"
        )
    return None


def has_memory(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has its own memory. Wrappers of other tensors have none."""
    try:
        return tensor.untyped_storage().nbytes() > 0 and tensor.data_ptr() != 0
    except Exception:  # a subclass may raise anything here
        return False


def is_plain_class(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN


def is_ordinary(value: Any) -> TypeGuard[torch.Tensor]:
    """Returns whether a value is a tensor of torch's own classes that `check_supported` accepts.

    Returns False if the tensor describes a part (`describes_part`), which only DCP can plan. Nearly all values of large
    state dicts are ordinary. For these, this function takes half the time of `check_supported`.
    """
    return (
        type(value) in _PLAIN
        and value.layout is _STRIDED
        and value.dtype in _ORDINARY
        and not value.is_meta
        and not value.is_nested
        and not (value.__dict__ and describes_part(value))  # testing the dict takes half the time of the call
    )


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without autograd history. Avoids `Tensor.detach`, which releases the GIL, if possible."""
    return tensor if type(tensor) is torch.Tensor and not tensor.requires_grad else tensor.detach()


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is of a subclass with ``__tensor_flatten__``, whose instances wrap other tensors."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "__tensor_flatten__")


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in UNCOPYABLE else tensor


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor in C order, in host memory. Copies unless the tensor's own memory holds them."""
    plain = copyable(tensor.detach())
    if not plain.is_cpu or plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg().cpu()
    plain = plain.contiguous()
    # A dimension of one element may have any stride: the tensor is contiguous, but torch refuses to view it as bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous host tensor, five times as fast as `host_bytes`.

    The view does not always hold a reference to the tensor, so the caller must hold one.
    """
    if type(tensor) is not torch.Tensor or not tensor.nbytes:
        return host_bytes(tensor)
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def memories_of(tensors: Sequence[torch.Tensor]) -> list[memoryview]:
    """Returns `memory_of` each tensor. Slices of a view over all tensors are five times as fast as separate views."""
    if not tensors or not all(type(tensor) is torch.Tensor and tensor.nbytes for tensor in tensors):
        return list(map(memory_of, tensors))
    spans = [(start := tensor.data_ptr(), start + tensor.nbytes) for tensor in tensors]
    first, last = min(spans)[0], max(stop for _, stop in spans)
    view = memoryview((ctypes.c_ubyte * (last - first)).from_address(first)).cast("B")
    return [view[start - first : stop - first] for start, stop in spans]


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype's name without ``torch.``, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def named_dtype(name: str) -> torch.dtype:
    """Returns the dtype whose `dtype_name` is ``name``. Raises `TypeError` if torch has none."""
    dtype = vars(torch).get(name)  # not getattr: torch imports modules for some names
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch has no dtype {name!r}")
    return dtype
