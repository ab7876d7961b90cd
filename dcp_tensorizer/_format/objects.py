"""Objects as ``torch.save`` stores them: loaded without running code, or which of their types are refused."""

from __future__ import annotations

import io
from typing import Any

import torch

from .torch_archive import check_saved

__all__ = ["load_trusted", "unsafe_globals"]


def load_trusted(data: bytes) -> Any:
    """A saved object, by the weights-only rules of ``torch.load``, after a look that it does no harm there.

    Raises:
        Exception: those rules, or `check_saved`, refuse it.
    """
    check_saved(data)
    return torch.load(io.BytesIO(data), weights_only=True)


def unsafe_globals(data: bytes) -> tuple[str, ...]:
    """The ``module.name`` of everything in a saved object that ``torch.load(weights_only=True)`` refuses."""
    try:
        return tuple(sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)))))
    except Exception:
        return ("an object that the weights-only loader cannot parse",)
