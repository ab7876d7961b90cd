"""Runs many cases, and counts what became of them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from ..lab.processes import quietly
from .cases import cases
from .describe import Failed
from .explained import ALWAYS, Verdict, judge
from .run import Case, Storages, run_case, surroundings_kept
from .worlds import Run, threads_as_ranks

__all__ = ["Tally", "check", "check_one"]


@dataclass
class Tally:
    """What became of cases.

    Attributes:
        cases: How many there were.
        equal: In how many torch's storage and ours gave the same, but for what differs in every checkpoint.
        explained: In how many there was each deliberate difference.
        unexplained: The others: each with what differs.
        saves: Saves, each on all of its ranks, that both storages made.
        refused: Saves that neither made.
        loads: Loads that both made.
        failed: Loads that neither made.
    """

    cases: int = 0
    equal: int = 0
    explained: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)
    saves: int = 0
    refused: int = 0
    loads: int = 0
    failed: int = 0

    def __add__(self, other: Tally) -> Tally:
        fields = (f.name for f in dataclasses.fields(self))
        return Tally(**{name: getattr(self, name) + getattr(other, name) for name in fields})

    def count(self, case: Case, theirs: Any, ours: Any, verdict: Verdict) -> None:
        """Counts a case."""
        self.cases += 1
        self.equal += not (verdict.unexplained or verdict.explained - set(ALWAYS))
        self.explained.update(verdict.explained)
        if verdict.unexplained:
            self.unexplained.append("\n  ".join([repr(case), *map(str, verdict.unexplained[:8])]))
        for number in range(len(case.saves)):
            made, refused = _both([side["saves"] for side in (theirs, ours)], number)
            self.saves += made
            self.refused += refused
        for number in range(len(case.loads)):
            made, failed = _both([side["loads"][number] for side in (theirs, ours)], None)
            self.loads += made
            self.failed += failed


def _both(sides: list[Any], number: int | None) -> tuple[bool, bool]:
    """Whether something went well on all ranks with both storages, and whether it failed on some with both."""
    well = []
    for ranks in sides:
        ends = [end if isinstance(end, Failed) or number is None else end[number] for end in ranks.values()]
        well.append(not any(isinstance(end, Failed) for end in ends))
    return all(well), not any(well)


def check(count: int, number: int, folder: Path, on_case: Callable[[Tally], object] = lambda tally: None) -> Tally:
    """Makes ``count`` cases of a seed, and runs them with both storages, below a folder."""
    tally, storages = Tally(), Storages()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threads_as_ranks() as run, surroundings_kept():

            @seed(number)
            @settings(
                max_examples=count,
                database=None,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(cases())
            def each(case: Case) -> None:
                tally.count(case, *check_one(case, storages, run, folder))
                on_case(tally)

            each()
    finally:
        torch.set_num_threads(threads)
        with quietly():
            storages.close()
    return tally


def check_one(case: Case, storages: Storages, run: Run, folder: Path) -> tuple[Any, Any, Verdict]:
    """What torch's storage makes of a case, what ours does, and what is to be said of it."""
    theirs = run_case(case, False, storages, run, folder)
    ours = run_case(case, True, storages, run, folder)
    return theirs, ours, judge(case, theirs, ours, lambda: run_case(case, False, storages, run, folder, "save"))
