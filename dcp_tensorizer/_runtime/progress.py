"""Calls the callbacks of users, and reports the progress of loads and saves to them and to the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from torch.distributed.checkpoint.api import CheckpointException

logger = logging.getLogger("dcp_tensorizer")


def call(callback: Callable[..., object] | None, *arguments: object, otherwise: str) -> bool:
    """Calls a callback of a user, if there is one. An error in it is only logged, with the message ``otherwise``.

    Returns whether there was no error.
    """
    try:
        if callback is not None:
            callback(*arguments)
    except (Exception, CheckpointException):  # DCP's CheckpointException does not derive from Exception
        logger.exception("%s", otherwise)
        return False
    return True


class TransferProgress:
    """A reporter of the progress of a load or a save to a callback, and every ``log_seconds`` to the log.

    ``doing`` names the work on ``path`` in the log. If the callback raises an exception, the exception is logged, and
    the callback is not called again.
    """

    def __init__(
        self, doing: str, path: str, callback: Callable[[int, int], object] | None, log_seconds: float = 10.0
    ) -> None:
        self._doing = f"{doing} {path}"
        self._callback = callback
        self._log_seconds = log_seconds
        self._began = self._logged_at = time.perf_counter()

    def __call__(self, done: int, total: int) -> None:
        """Reports the bytes done and the bytes in total. Not thread-safe."""
        otherwise = f"on_progress raised an exception while {self._doing}. It is not called again for this operation."
        if not call(self._callback, done, total, otherwise=otherwise):
            self._callback = None
        now = time.perf_counter()
        if now - self._logged_at >= self._log_seconds:
            self._logged_at = now
            rate = done / 1e9 / max(now - self._began, 1e-9)
            logger.info("%s: %.1f of %.1f GB, %.2f GB/s", self._doing, done / 1e9, total / 1e9, rate)
