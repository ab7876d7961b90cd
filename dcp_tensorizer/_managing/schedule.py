"""When a save is due."""

from __future__ import annotations

import time
from collections.abc import Callable

from .._arguments import check_count, check_timeout

__all__ = ["Schedule"]


class Schedule:
    """A save is due when a multiple of ``every`` has been reached since the last one, or ``interval`` is over.

    Args:
        every: Steps.
        interval: Seconds. Without either, every step is due.
        clock: Gives seconds.

    Raises:
        TypeError, ValueError: one of them makes no sense.
    """

    def __init__(
        self, every: int | None, interval: float | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        check_count("save_every", every, optional=True)
        if interval is not None:
            check_timeout(interval, name="save_interval")
        self._every = every
        self._interval = interval
        self._clock = clock
        self.mark(0)

    def mark(self, step: int) -> None:
        """A save of this step has begun, or it has been restored: what is due is counted from here."""
        self._step, self._moment = step, self._clock()

    def is_due(self, step: int) -> bool:
        """Whether this step is to be saved."""
        if self._every is None and self._interval is None:
            return True
        by_steps = self._every is not None and step // self._every > self._step // self._every
        return by_steps or (self._interval is not None and self._clock() - self._moment >= self._interval)
