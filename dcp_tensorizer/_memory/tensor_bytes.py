"""Tensors as bytes: which tensors can be saved as their bytes, what those bytes are, and the names of dtypes."""

from __future__ import annotations

import functools

import torch

from ..errors import StagingError

__all__ = ["check_supported", "dtype_name", "host_bytes", "is_wrapper", "named_dtype"]

# Integers of less than a byte each. DCP's planner fails on them without naming the key.
_SUB_BYTE = {
    dtype
    for bits in range(1, 8)
    for name in (f"int{bits}", f"uint{bits}")
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}


def check_supported(key: str, tensor: torch.Tensor) -> None:
    """Checks that the elements of a tensor are plain bytes.

    Raises:
        StagingError: they are not; names the key and the kind of tensor.
    """
    kind = None
    if tensor.layout is not torch.strided:
        kind = f"of layout {tensor.layout}"
    elif tensor.is_meta:
        kind = "on the meta device: it has no data"
    elif tensor.is_quantized:
        kind = f"of a quantised dtype ({tensor.dtype})"
    elif tensor.dtype in _SUB_BYTE:
        kind = f"of dtype {tensor.dtype}, which DCP cannot plan (view it as torch.uint8),"
    elif tensor.is_nested:
        kind = "nested"
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter) and tensor.numel() and not _has_memory(tensor):
        kind = f"of type {type(tensor).__qualname__}, which has no storage and no __tensor_flatten__,"
    if kind is not None:
        raise StagingError(f"{key!r}: a tensor {kind} cannot be saved. Convert it to a dense one, or leave it out.")


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return tensor.untyped_storage().nbytes() > 0 and tensor.data_ptr() != 0
    except Exception:  # a subclass may raise anything here
        return False


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a subclass that has no storage of its own but is made of other tensors."""
    return type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__")


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in C order, in host memory: its own memory if they lie there in that order, else a copy."""
    plain = tensor.detach()
    if not plain.is_cpu or plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg().cpu()
    plain = plain.contiguous()
    # A dimension of one element may have any stride: the tensor is contiguous, but torch does not view it as bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name without ``torch.``: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def named_dtype(name: str) -> torch.dtype:
    """The dtype whose `dtype_name` is ``name``.

    Raises:
        TypeError: torch has no such dtype.
    """
    dtype = vars(torch).get(name)  # not getattr: torch imports modules for some names
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch has no dtype {name!r}")
    return dtype
