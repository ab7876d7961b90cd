"""How a storage is read at its full speed."""

from __future__ import annotations

import sys
from dataclasses import dataclass

__all__ = ["UNLIMITED", "ReadTuning"]

UNLIMITED = sys.maxsize
"""No bound, where a number of bytes or threads is asked for."""


@dataclass(frozen=True)
class ReadTuning:
    """How a storage is read at its full speed."""

    max_threads: int = 16
    """How many reads at once reach the full speed."""
    min_threads: int = UNLIMITED
    """How many threads start a load. Others join while these wait for the storage."""
    slice_bytes: int = UNLIMITED
    """The most to read before hashing it, so that it is still in the processor's cache."""
    max_coalesced_bytes: int | None = None
    """The most to read at once straight into targets. None: the size of the scratch memory."""
    max_gap_bytes: int = 64 << 10
    """To read this many unneeded bytes costs less than another request."""
