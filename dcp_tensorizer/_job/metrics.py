"""Measurement of how much of a job's time went into training, and how much into checkpoints."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from .._index.schema import SaveRecord
from .._runtime.forks import free_in_child

# The seconds until a failure that are assumed for a new job. The value is low, so that a new job saves often.
ASSUMED = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputReport:
    """Cost of checkpoints for one rank of a job. All times are wall-clock seconds.

    ``lived_seconds`` and ``restarts`` cover all runs of the job. All other values count from when the manager was made.

    Attributes:
        seconds: Time since the manager was made.
        saves: Number of committed saves.
        failures: Number of saves that failed.
        stall_seconds: Time that training spent in calls to `save`. Calls to `wait` and `close` do not count.
        restore_seconds: Time spent in `restore`.
        durable_seconds: Time from the beginning of a save to its commit, on average over the committed saves.
        saving_seconds: The part of ``stall_seconds`` that was spent in calls that began a save.
        lived_seconds: Time that the job has run, summed over its runs. Each run counts up to the save from which the
            next run resumed.
        restarts: Number of times that the job resumed. A resume from a save that a stop signal caused does not count.
    """

    seconds: float
    saves: int
    failures: int
    stall_seconds: float
    restore_seconds: float
    durable_seconds: float
    saving_seconds: float = 0.0
    lived_seconds: float = 0.0
    restarts: int = 0

    @property
    def goodput(self) -> float:
        """Returns the share of the time in which the job could train, from 0 to 1. Repeated steps count as training."""
        spent = self.stall_seconds + self.restore_seconds
        return max(0.0, 1 - spent / self.seconds) if self.seconds > 0 else 1.0

    @property
    def stall_per_save(self) -> float:
        """Returns the seconds that training waits for one save, on average."""
        tries = self.saves + self.failures
        return self.saving_seconds / tries if tries else 0.0

    @property
    def mean_time_between_failures(self) -> float:
        """Returns the mean seconds between failures, estimated from the job's runs. A new job begins with 600."""
        return (self.lived_seconds + ASSUMED) / (self.restarts + 1)

    def young_interval(self, mean_time_between_failures: float | None = None) -> float:
        """Returns the best interval between saves in seconds, by Young's rule: the square root of 2 x stall x MTBF.

        The result is at least ``durable_seconds``, because a save that begins earlier would wait for the previous one.
        Until a save has been committed or has failed, the result is 0.

        Args:
            mean_time_between_failures: Of the whole job, in seconds; None for the value of this report.
        """
        seconds = self.mean_time_between_failures if mean_time_between_failures is None else mean_time_between_failures
        return max(math.sqrt(2 * self.stall_per_save * seconds), self.durable_seconds)

    def __str__(self) -> str:
        interval = (
            f"; with one failure a day, Young's interval is {self.young_interval(86_400):,.0f} s" if self.saves else ""
        )
        return (
            f"goodput {self.goodput:.2%} of {self.seconds:,.1f} s; saves: {self.saves} committed, {self.failures} "
            f"failed; seconds: stall {self.stall_seconds:.3f} ({self.stall_per_save:.3f} a save), durable after "
            f"{self.durable_seconds:.3f}, restore {self.restore_seconds:.3f}{interval}"
        )


class GoodputClock:
    """Clock for the times of a job. `saved` and `failed` may be called on any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = clock
        self._began = self._resumed = clock()
        self._lived = 0.0
        self.restarts = 0
        self._lock = free_in_child(threading.Lock())
        self._stall = self._saving = self._restore = self._durable = 0.0
        self._saves = self._failures = 0

    def resume(self, record: SaveRecord | None) -> None:
        """Records that the job now resumes. ``record`` is that of the loaded state; None if no manager saved it."""
        self._resumed = self.now()
        self._lived = 0.0 if record is None else record.lived
        self.restarts = 1 if record is None else record.restarts + (not record.is_end)

    @property
    def lived(self) -> float:
        """Returns the seconds that the job has run, in all its runs."""
        return self._lived + self.now() - self._resumed

    def stalled(self, since: float, *, saves: bool = False) -> None:
        """Records that training has waited since ``since``. ``saves``: it waited in a call that began a save."""
        seconds = self.now() - since
        self._stall += seconds
        self._saving += seconds if saves else 0.0

    def restored(self, since: float) -> None:
        self._restore += self.now() - since

    def saved(self, since: float) -> None:
        with self._lock:
            self._saves += 1
            self._durable += self.now() - since

    def failed(self) -> None:
        with self._lock:
            self._failures += 1

    def report(self) -> GoodputReport:
        now = self.now()
        with self._lock:
            return GoodputReport(
                seconds=now - self._began,
                saves=self._saves,
                failures=self._failures,
                stall_seconds=self._stall,
                restore_seconds=self._restore,
                durable_seconds=self._durable / self._saves if self._saves else 0.0,
                saving_seconds=self._saving,
                lived_seconds=self._lived + now - self._resumed,
                restarts=self.restarts,
            )
