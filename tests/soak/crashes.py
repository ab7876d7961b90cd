"""Crashes: every state in which a crash may leave what an operation does to a directory, loaded."""

from __future__ import annotations

import random
from pathlib import Path

from ..lab.crash_scenarios import SCENARIOS, enumerate_crashes
from ..lab.processes import quietly
from .tally import Part, Tally

__all__ = ["PART", "run"]

_TENSORS = 2


def run(rounds: int, seed: int, folder: Path) -> Tally:
    """Enumerates the crashes of ``rounds`` scenarios: of all, if that is enough; each state is a round of the tally."""
    names = list(SCENARIOS)
    if rounds < len(names):
        names = random.Random(seed).sample(names, rounds)
    tally = Tally(table=[["what is done", "states after a crash", "what is found in them", "bad"]])
    for name in names:
        scenario = folder / "scenario"
        scenario.mkdir()
        bad, counts = 0, {}
        try:
            with quietly():
                counts = enumerate_crashes(SCENARIOS[name], scenario, _TENSORS)
        except Exception as error:
            bad += 1
            tally.blame("wrong", f"{name}: {error!r}")
        tally.rounds += sum(counts.values())
        found = "; ".join(f"{what} ({number:,})" for what, number in sorted(counts.items()))
        tally.table.append([name, f"{sum(counts.values()):,}", found, str(bad)])
        scenario.rename(folder / f"done-{name.replace(' ', '-')}")
    return tally


PART = Part(
    title="Crashes, enumerated",
    unit="states after a crash",
    what="What an operation does to the file system is recorded, call by call. From that follows every state in which "
    "a crash may leave the directory: each change that no fsync made durable is there or not, in any combination, and "
    f"each file's bytes are there, cut or missing. Each state is loaded. The checkpoints hold {_TENSORS} tensors, each "
    "in a separate file. What is found is the step of each checkpoint, or nothing; before the operation it is 1.",
    rounds=len(SCENARIOS),
    run=run,
)
