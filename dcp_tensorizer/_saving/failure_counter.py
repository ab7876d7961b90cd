"""Counts the saves that were not committed, so that a failure is reported even if its future is dropped."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch.distributed as dist

from ..errors import WriteError

__all__ = ["FailureCounter"]

logger = logging.getLogger("dcp_tensorizer")
_ELSEWHERE = "another rank failed, or a collective did: the save's future has the error, and so has that rank's log"


@dataclass(slots=True)
class _Current:
    path: str
    error: str = _ELSEWHERE


class FailureCounter:
    """Counts failed saves in a row. A save has failed when it is over and `committed` was not called.

    Only the coordinator can know; on other ranks nothing is counted.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._current: _Current | None = None
        self._is_coordinator: bool | None = None
        self._failures = 0
        self._last_error = ""
        self._last_committed = "none"

    def begin(self, path: str) -> None:
        """A save begins, so the one before is over."""
        self.end()
        self._current = _Current(path)

    def set_coordinator(self, is_coordinator: bool) -> None:
        """Says whether this rank is the coordinator, from now on."""
        self._is_coordinator = is_coordinator

    def failed(self, error: BaseException) -> None:
        """The current save fails on this rank."""
        if self._current is not None:
            self._current.error = str(error)
            logger.error("the save to %s failed: %s", self._current.path, str(error))

    def committed(self) -> None:
        """The current save is the checkpoint at its path now."""
        if self._current is not None:
            self._last_committed, self._current = self._current.path, None
        self._failures = 0

    def end(self) -> None:
        """The current save, if there is one, is over: unless it was committed, it counts as failed."""
        current, self._current = self._current, None
        if current is not None and self._coordinates():
            self._failures += 1
            self._last_error = current.error
            logger.error("the save to %s was not committed: %s", current.path, current.error)

    def check(self) -> None:
        """Raises `WriteError` when too many saves in a row have failed."""
        if self._limit is not None and self._failures >= self._limit:
            raise WriteError(
                f"{self._failures} saves in a row were not committed. The last error was: {self._last_error}. The last "
                f"checkpoint that was committed: {self._last_committed}. Mend the cause; "
                f"SaveLimits(max_consecutive_failures=None) trains on without checkpoints."
            )

    def _coordinates(self) -> bool:
        if self._is_coordinator is not None:
            return self._is_coordinator
        # A save that failed before DCP named its coordinator: that is rank 0.
        return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
