"""What a rank need not stage, because other ranks hold the same and write it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from .._staging.fingerprint import fingerprint
from ..planner import SavePlanner
from .agreement import Agreement

__all__ = ["Replicas"]


class Replicas:
    """Knows of a rank's last save what other ranks wrote of it.

    The planner decides by keys, shapes and shardings on all ranks alone. So as long as these are the same on each rank
    as in the last save, each writes what it wrote then.

    Args:
        planner: Of all saves.
        agreement: Of all ranks.
    """

    def __init__(self, planner: SavePlanner, agreement: Agreement) -> None:
        self._planner = planner
        self._agreement = agreement
        self._last: int | None = None

    def omitted(self, state: Mapping[str, Any] | None, *, follows: bool) -> frozenset[str]:
        """The keys of the tensors that need not be staged. Every rank must ask before each save, after the last one.

        Args:
            state: What is saved; None if it could not be collected.
            follows: The last save was committed.

        Raises:
            WriteError: a rank is gone.
        """
        if self._agreement.is_alone:
            return frozenset()
        current = None
        if state is not None:
            with suppress(Exception):  # of a tensor without a shape, say: staging will say so, and all ranks hear of it
                current = fingerprint(state)
        is_same = follows and current is not None and current == self._last
        self._last = current
        (differs,) = self._agreement.largest(int(not is_same))
        return frozenset() if differs else self._planner.written_elsewhere
