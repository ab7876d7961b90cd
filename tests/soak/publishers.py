"""Publishers: two to four of them publish to one directory at once, some are killed, and the next one cleans up."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

from ..integration.publish.overlapping import run_round
from ..lab.processes import quietly
from .tally import Part, Tally

__all__ = ["PART", "run"]


def run(rounds: int, seed: int, folder: Path) -> Tally:
    """Does so many rounds, each in a directory of its own."""
    chance, tally, counts = random.Random(seed), Tally(), Counter[str]()
    for number in range(rounds):
        root = folder / "round"
        root.mkdir()
        with quietly():
            found = run_round(chance, root, counts)
        for what in found:
            tally.blame("left" if what.startswith("left over") else "wrong", f"round {number}: {what}")
        tally.rounds += 1
        shutil.rmtree(root)
    for what, count in sorted(counts.items()):
        tally.count(what, count)
    return tally


PART = Part(
    title="Publishers at once",
    unit="rounds",
    what="In a round 2 to 4 publishers publish models to one directory at once. Each waits for random moments before "
    "its changes to the disk, and half of them are to be killed before one. Then every version must be whole. "
    "One more model is published: it must be the next version, nothing may be left over or missing, and a new copy, "
    "an older one and tensors in memory must become that model.",
    rounds=1000,
    run=run,
)
