"""Tensors as bytes: which can be saved so, their bytes, and what it takes to load objects that torch.save made."""

from __future__ import annotations

import torch

from ..errors import StagingError

__all__ = [
    "check_supported",
    "host_bytes",
    "is_wrapper",
]


# Integers of less than a byte each: DCP's planner fails on them, and does not say for which key.
_SUB_BYTE = {
    dtype
    for bits in range(1, 8)
    for name in (f"int{bits}", f"uint{bits}")
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}


def check_supported(key: str, tensor: torch.Tensor) -> None:
    """Fails for tensors whose elements are not plain bytes.

    Raises:
        StagingError: naming the key and the kind.
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
    except Exception:  # whatever a subclass makes of the question
        return False


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a subclass that has no storage of its own but is made of other tensors."""
    return type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__")


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in C order, in host memory; a copy only where they are not so already."""
    plain = tensor.detach()
    if not plain.is_cpu or plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg().cpu()
    plain = plain.contiguous()
    # A dimension of one element may have any stride, with which it is contiguous, but is not viewed as bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data
