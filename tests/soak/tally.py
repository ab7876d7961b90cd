"""What a part of the soak is, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["HANG", "Part", "Tally", "Unavailable", "added"]

HANG = 30.0
"""Seconds after which what has not ended hangs."""


class Unavailable(Exception):
    """A part cannot run on this machine; says why."""


@dataclass
class Tally:
    """What came of a part's rounds.

    Attributes:
        rounds: How many there were.
        lost: Committed checkpoints that were not there when they had to be.
        wrong: What was loaded and was not what was saved, or was neither loaded nor refused for a good reason.
        hung: What did not end.
        left: Files and processes left over at the end.
        counts: More numbers for the page, by what they count.
        table: The header and the rows of a table for the page.
        found: What was lost, wrong, hung or left over, in words.
    """

    rounds: int = 0
    lost: int = 0
    wrong: int = 0
    hung: int = 0
    left: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    table: list[list[str]] = field(default_factory=list)
    found: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.wrong or self.hung or self.left)

    def count(self, what: str, number: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + number

    def blame(self, kind: str, words: str) -> None:
        """Counts something ``lost``, ``wrong``, ``hung`` or ``left``."""
        setattr(self, kind, getattr(self, kind) + 1)
        self.found.append(f"{kind}: {words}"[:500])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two runs of a part, as they are stored, as one. Raises `ValueError` for a part with a table, or the same seed."""
    mine, theirs = one["tally"], other["tally"]
    seeds = [str(one["seed"]), str(other["seed"])]
    if mine["table"] or theirs["table"] or seeds[1] in seeds[0].split(", "):
        raise ValueError("these runs have a table, or the same seed, and do not add up")
    names = mine["counts"] | theirs["counts"]
    tally = {name: mine[name] + theirs[name] for name in ("rounds", "lost", "wrong", "hung", "left", "found")}
    tally["counts"] = {name: mine["counts"].get(name, 0) + theirs["counts"].get(name, 0) for name in names}
    commits = dict.fromkeys([*str(one["commit"]).split(", "), str(other["commit"])])
    return {
        "seed": ", ".join(seeds),
        "seconds": one["seconds"] + other["seconds"],
        "commit": ", ".join(commits),
        "tally": {**theirs, **tally},
    }


class Part(NamedTuple):
    """A part of the soak.

    Attributes:
        title: Its heading.
        unit: What a round is.
        what: A paragraph.
        rounds: How many `make soak` runs.
        run: Runs a number of rounds with a seed, below a folder. Raises `Unavailable`.
    """

    title: str
    unit: str
    what: str
    rounds: int
    run: Callable[[int, int, Path], Tally]
