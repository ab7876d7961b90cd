"""Simulation of failures: the time lost with ``save_interval="auto"``, and with the best constant interval.

Failures come at random, at a constant rate. The policy and the clock are those of the manager.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from dcp_tensorizer._index.schema import SaveRecord
from dcp_tensorizer._job.metrics import GoodputClock
from dcp_tensorizer._job.policy import SavePolicy

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
TO_LEARN, COUNTED, JOBS = 10, 40, 10  # failures, and jobs
QUICK, SLOW, BLOCKING = (0.2, 5.0), (1.0, 30.0), (20.0, 20.0)  # seconds that training waits, and until it is durable


@dataclass
class Time:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Job:
    """Simulated job with the manager's own interval and random failures."""

    def __init__(self, cost: tuple[float, float], mean: float, seed: int) -> None:
        self._stall, self._durable = cost
        self._failures = _failures(mean, seed)
        self._record = SaveRecord(0, None, (), {}, is_end=True)

    def lose(self, failures: int) -> tuple[float, float]:
        """Returns the seconds lost up to the last of so many failures, and all seconds up to then."""
        runs = [self._run(next(self._failures)) for _ in range(failures)]
        return sum(lost for lost, _ in runs), sum(seconds for _, seconds in runs)

    def _run(self, seconds: float) -> tuple[float, float]:
        """Simulates a run that fails after so many seconds. Returns the lost seconds, and all seconds of the run."""
        time = Time()
        clock = GoodputClock(time)
        clock.resume(self._record)
        policy = SavePolicy(None, "auto", clock=clock)
        stalled = kept = 0.0
        while (begins := time.now + policy.interval) + self._durable <= seconds:
            time.now = begins
            policy.record_save(0, is_due=True)
            self._record = SaveRecord(0, None, (), {}, lived=clock.lived, restarts=clock.restarts)
            time.now = begins + self._stall
            clock.stalled(begins, saves=True)
            time.now = begins + self._durable
            clock.saved(begins)
            time.now, stalled, kept = begins, stalled + self._stall, begins
        return stalled + seconds - kept, seconds


def _failures(mean: float, seed: int) -> Iterator[float]:
    draw = random.Random(seed)
    while True:
        yield draw.expovariate(1 / mean)


def _least(cost: tuple[float, float], mean: float) -> float:
    """Returns the share of time that the best constant interval loses on average, if saves do not overlap."""
    stall, durable = cost
    tried = [durable]
    while tried[-1] < 20 * math.sqrt(2 * stall * mean) + durable:
        tried.append(tried[-1] * 1.06)
    # Of a run of exponential length: saves that come to their commit, each `interval` apart.
    committed = {interval: math.exp(-durable / mean) / math.expm1(interval / mean) for interval in tried}
    return min((saves * stall + mean - saves * interval) / mean for interval, saves in committed.items())


def _auto(cost: tuple[float, float], mean: float) -> tuple[float, float]:
    """Returns the share that ``"auto"`` loses up to the tenth failure, and after it, over all jobs."""
    jobs = [Job(cost, mean, seed) for seed in range(JOBS)]
    first, then = ([job.lose(failures) for job in jobs] for failures in (TO_LEARN, COUNTED))
    shares = [sum(lost for lost, _ in lives) / sum(seconds for _, seconds in lives) for lives in (first, then)]
    return shares[0], shares[1]


@pytest.mark.parametrize(
    ("cost", "mean", "most"),
    [
        (QUICK, 10 * MINUTE, 1.02),
        (QUICK, 2 * HOUR, 1.02),
        (SLOW, 10 * MINUTE, 1.02),
        (SLOW, DAY, 1.02),
        (BLOCKING, 10 * MINUTE, 1.14),
        (BLOCKING, 30 * MINUTE, 1.14),
        (BLOCKING, 4 * HOUR, 1.14),
        (BLOCKING, 10 * DAY, 1.02),
    ],
)
def test_auto_loses_little_more_than_the_best_interval(cost: tuple[float, float], mean: float, most: float) -> None:
    """The loss is at most 15% larger up to the tenth failure, and then as small as the guide to the manager says."""
    first, then = (share / _least(cost, mean) for share in _auto(cost, mean))
    assert first <= 1.15
    assert then <= most
