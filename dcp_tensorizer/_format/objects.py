"""Objects as ``torch.save`` stores them: what it takes to load them."""

from __future__ import annotations

import io

import torch

__all__ = ["unsafe_globals"]


def unsafe_globals(data: bytes) -> tuple[str, ...]:
    """What ``torch.load(weights_only=True)`` would refuse in a saved object: ``module.name`` of each."""
    try:
        return tuple(sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)))))
    except Exception:
        return ("an object that the weights-only loader cannot parse",)
