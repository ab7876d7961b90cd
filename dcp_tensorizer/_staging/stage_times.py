"""When a state dict was staged, and what training waited for."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["StageTimes"]


class StageTimes(NamedTuple):
    """The times of one staging."""

    started_at: float = 0.0
    """``time.time()`` when it began."""
    wait_seconds: float = 0.0
    """What training waited before that, for the save before to end."""
    stage_seconds: float = 0.0
    """How long it took."""
