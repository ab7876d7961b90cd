"""Preemption: a torchrun job is told to stop at random steps, and goes on each time, on other numbers of ranks."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

from ..lab.preempted_job import Preempted, losses
from .tally import Part, Tally

__all__ = ["PART", "judge", "run"]

_STEPS = 60  # for each round; the job does at most 40 until it is told to stop, and a few until it has stopped
_RANKS = (2, 3, 4)


def run(rounds: int, seed: int, folder: Path) -> Tally:
    """Stops one job so many times, and lets it end; each stop is a round."""
    chance = random.Random(seed)
    tally = Tally()
    job, steps = Preempted(folder, rounds * _STEPS), rounds * _STEPS
    for number in range(rounds + 1):
        done = len(job.logged)
        stop_at = done + chance.randint(1, _STEPS - 20) if number < rounds else None
        ranks, one_rank = chance.choice(_RANKS), chance.random() < 0.5
        try:
            job.run(ranks, stop_at=stop_at, one_rank=one_rank)
        except subprocess.TimeoutExpired:
            tally.blame("hung", f"round {number}, on {ranks} ranks")
            break
        except AssertionError as error:
            tally.blame("wrong", f"round {number}, on {ranks} ranks: {error}")
            break
        tally.rounds += number < rounds
        tally.count(f"runs on {ranks} ranks")
        tally.count("stops: SIGTERM to one rank" if one_rank else "stops: SIGTERM to torchrun", stop_at is not None)
    judge(job, steps, tally)
    return tally


def judge(job: Preempted, steps: int, tally: Tally) -> None:
    """Compares what a job has logged with an undisturbed run."""
    logged, expected = job.logged, dict(losses(steps))
    numbers = [step for step, _ in logged]
    tally.count("steps of training", len(set(numbers)))
    tally.count("steps done twice", len(numbers) - len(set(numbers)))
    for step in range(1, steps + 1):
        if numbers.count(step) != 1:
            tally.blame("lost", f"step {step} was done {numbers.count(step)} times")
    for step, loss in logged:
        if loss != expected[step]:
            tally.blame("wrong", f"the loss of step {step} is {loss} and not {expected[step]}")


PART = Part(
    title="Preemption",
    unit="stops",
    what="A torchrun job with a manager gets SIGTERM at a random step, by torchrun or on one of its ranks. It saves, "
    "ends, and is started again on 2 to 4 ranks, until it has done all its steps. Each step must be done once, and its "
    "loss must be that of an undisturbed run, to the last bit.",
    rounds=20,
    run=run,
)
