"""Time that a job loses to saves and failures, by its interval: `python -m benchmarks.interval` (a minute).

A simulation: failures come at random, at a constant rate. The schedule and the clock are those of the manager.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dcp_tensorizer._index.schema import SaveRecord
from dcp_tensorizer._managing.goodput import GoodputClock
from dcp_tensorizer._managing.policy import SaveInterval, SavePolicy

from . import charts
from .harness import RESULTS, Content, run, table
from .pages import page

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86_400.0
_FAILURES_EACH = (10 * _MINUTE, 30 * _MINUTE, 2 * _HOUR, 8 * _HOUR, _DAY, 3 * _DAY, 10 * _DAY)
_COSTS = {"a quick disk": (0.2, 5.0), "a slow disk": (1.0, 30.0), "a blocking disk": (20.0, 20.0)}
_TO_LEARN, _COUNTED = 10, 40  # failures
_GRID = 1.06  # from one constant interval that is tried to the next


@dataclass
class _Time:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class _Job:
    """A job that fails now and then.

    Args:
        interval: As for `CheckpointManager`.
        stall: Seconds that training waits for a save.
        durable: Seconds from its begin to its commit.
        failures: The seconds between two of them.
    """

    def __init__(self, interval: SaveInterval, stall: float, durable: float, failures: Iterator[float]) -> None:
        self._interval = interval
        self._stall = stall
        self._durable = durable
        self._failures = failures
        self._record = SaveRecord(0, None, (), {}, is_end=True)

    def lose(self, failures: int) -> tuple[float, float]:
        """The seconds that are lost until so many failures have come, and all seconds until then."""
        runs = [self._run(next(self._failures)) for _ in range(failures)]
        return sum(lost for lost, _ in runs), sum(seconds for _, seconds in runs)

    def _run(self, seconds: float) -> tuple[float, float]:
        """A run that fails after so many seconds; what it loses, and its seconds."""
        time = _Time()
        clock = GoodputClock(time)
        clock.resume(self._record)
        policy = SavePolicy(None, self._interval, clock=clock)
        stalled = kept = 0.0
        while (begins := time.now + policy.interval) + self._durable <= seconds:
            time.now = begins
            policy.begin(0, is_due=True)
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


def _constant(interval: float, cost: tuple[float, float], mean: float) -> float:
    """The share of time that is lost on average with a constant interval, while saves do not overlap."""
    stall, durable = cost
    rate = 1 / mean
    # Of a run of exponential length: saves that come to their commit, each `interval` apart.
    committed = math.exp(-rate * durable) / math.expm1(rate * interval)
    return (committed * stall + mean - committed * interval) / mean


def _least(cost: tuple[float, float], mean: float) -> tuple[float, float]:
    """The share that the best constant interval loses, and that interval."""
    tried = [cost[1]]
    while tried[-1] < 20 * math.sqrt(2 * cost[0] * mean) + cost[1]:
        tried.append(tried[-1] * _GRID)
    return min((_constant(interval, cost, mean), interval) for interval in tried)


def measure(options: argparse.Namespace, folder: Path) -> Content:
    """For each cost and time between failures: the share of time that each way to choose the interval loses."""
    rows = []
    for name, cost in _COSTS.items():
        for mean in _FAILURES_EACH:
            least, interval = _least(cost, mean)
            fitting, half_an_hour = (_constant(max(given, cost[1]), cost, mean) for given in (0.0, 1800.0))
            row = {"cost": name, "mean": mean, "least": least, "interval": interval}
            row |= {"fitting": fitting, "half an hour": half_an_hour}
            rows.append(row | _auto(functools.partial(_job, cost, mean), options.jobs))
    return {"rows": rows, "jobs": options.jobs}


def _job(cost: tuple[float, float], mean: float, seed: int) -> _Job:
    return _Job("auto", *cost, _failures(mean, seed))


def _auto(make: Callable[[int], _Job], jobs: int) -> dict[str, float]:
    """The share that ``"auto"`` loses up to the tenth failure, and after that: of all jobs together."""
    made = [make(seed) for seed in range(jobs)]
    shares = {}
    for when, failures in (("first", _TO_LEARN), ("then", _COUNTED)):
        lost = [job.lose(failures) for job in made]
        shares[when] = sum(part for part, _ in lost) / sum(whole for _, whole in lost)
    return shares


def render(content: Content) -> str:
    """The page of results."""
    header = (
        *("a failure each", "best constant interval", "it loses", "auto, first ten failures", "auto, after that"),
        *("every save that fits", "every 30 minutes"),
    )
    ways = ("first", "then", "fitting", "half an hour")
    sections = []
    for name, (stall, durable) in _COSTS.items():
        rows = [row for row in content["rows"] if row["cost"] == name]
        lines = [
            (
                *(_span(row["mean"]), f"{row['interval']:,.0f} s", f"{row['least']:.2%}"),
                *(f"{row[way] / row['least']:.2f}" for way in ways),
            )
            for row in rows
        ]
        title = f"## Saves on {name}: training waits {stall:g} s, the save is durable after {durable:g} s"
        sections += [title, table(header, lines)]
    return page(
        content,
        "An interval that sets itself",
        _WHAT,
        f"{content['jobs']} jobs of {_TO_LEARN} and then {_COUNTED} failures for each row; constant intervals are "
        f"computed.",
        f"interval --jobs {content['jobs']}",
        *sections,
        "The share that the best constant interval loses is in percent of the job's time. The four columns on the "
        "right are multiples of it. To choose that interval one would have to know the time between failures. All rows "
        "use the same random numbers: a value slightly below 1 is chance, and the same in all of them.",
        "![Time lost](interval.png)",
        spreads=False,
    )


_WHAT = (
    'how much time a job loses with `CheckpointManager(save_interval="auto")`: waiting for saves, and steps done again '
    "after a failure. A simulation with random failures at a constant rate, and the manager's own policy."
)


def _span(seconds: float) -> str:
    for unit, name in ((_DAY, "days"), (_HOUR, "hours"), (_MINUTE, "minutes")):
        if seconds >= unit:
            return f"{seconds / unit:g} {name}"
    return f"{seconds:g} s"


def plot(content: Content) -> None:
    """Writes ``results/interval.png``: what is lost, beside the least that a constant interval can lose."""
    plt = charts.plt
    figure, grid = plt.subplots(1, len(_COSTS), figsize=(11, 3.6), sharey=True, layout="constrained")
    lines = {
        "then": ("auto, after ten failures", "#0072b2"),
        "first": ("auto, the first ten failures", "#56b4e9"),
        "fitting": ("every save that fits", "#e69f00"),
        "half an hour": ("every 30 minutes", "#9aa1a8"),
    }
    for axes, (name, (stall, durable)) in zip(grid, _COSTS.items(), strict=True):
        rows = [row for row in content["rows"] if row["cost"] == name]
        for way, (label, colour) in lines.items():
            means, losses = [row["mean"] for row in rows], [row[way] / row["least"] for row in rows]
            axes.plot(means, losses, "o-", color=colour, label=label, markersize=3)
        axes.set(xscale="log", yscale="log", xlabel="mean time between failures", ylim=(0.9, 30))
        axes.set_title(f"{name}: stall {stall:g} s, durable {durable:g} s", fontsize=8.5, loc="left")
        axes.set_xticks(_FAILURES_EACH[::2], [_span(mean) for mean in _FAILURES_EACH[::2]], fontsize=7)
        axes.set_xticks([], minor=True)
        axes.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
        axes.axhline(1, color="#1a1a1a", linewidth=0.8)
    grid[0].set_ylabel("time lost / the least possible")
    grid[0].legend(fontsize=7.5, frameon=False)
    figure.savefig(RESULTS / "interval.png", dpi=160)
    plt.close(figure)


if __name__ == "__main__":
    run("interval", measure, render, about=__doc__, options={"jobs": {"type": int, "default": 20}}, plot=plot)
