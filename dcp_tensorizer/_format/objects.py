"""Objects as ``torch.save`` stores them: which of their types the weights-only loader refuses."""

from __future__ import annotations

import io

import torch

__all__ = ["unsafe_globals"]


def unsafe_globals(data: bytes) -> tuple[str, ...]:
    """The ``module.name`` of everything in a saved object that ``torch.load(weights_only=True)`` refuses."""
    try:
        return tuple(sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)))))
    except Exception:
        return ("an object that the weights-only loader cannot parse",)
