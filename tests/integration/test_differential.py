"""Every case has the same outcome with torch's own storage and with ours, or differs in a way that the docs list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed as dist

from ..differential import worlds
from ..differential.cases import Case
from ..differential.check import check
from ..differential.describe import Failed
from ..differential.explained import ALWAYS, DIFFERENCES, judge
from ..differential.planners import EACH_ITS_OWN
from ..differential.run import Load, Save, Storages, run_case
from ..differential.values import Box, Object, Sharded, Tensor
from ..differential.worlds import threads_as_ranks
from ..lab.processes import ROOT

CASES = 80


@pytest.mark.timeout(600)
def test_generated_cases_are_equal_or_explained(tmp_path: Path) -> None:
    """The same cases in every run; most of their saves and loads succeed, and most are equal."""
    tally = check(CASES, 0, tmp_path)
    assert tally.unexplained == []
    assert tally.cases == CASES
    assert tally.equal > 0.7 * CASES
    assert tally.saves > CASES
    assert tally.loads > 0.8 * CASES
    assert tally.refused > 0
    assert tally.failed > 0


def test_the_differences_are_those_of_the_documentation() -> None:
    """Whoever adds one to the tests explains it to the users."""
    text = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    section = text.partition("## Where we differ from torch's own storage")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \|(?:[^|\n]+\|){3}$", section, re.MULTILINE)
    assert sorted(rows) == sorted(["difference", *DIFFERENCES])


def test_the_messages_of_the_differences_are_those_of_the_package() -> None:
    """A message that was changed would make an explained difference unexplained, in cases that few runs generate."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "dcp_tensorizer").rglob("*.py"))
    explained = (ROOT / "tests" / "differential" / "explained.py").read_text(encoding="utf-8")
    calls = re.findall(r'_ours_fails\(difference, (".*")\)|words = \((".*")\)', explained)
    words = [word for call in calls for word in re.findall(r'"(.*?)"', "".join(call))]
    assert len(words) >= 11
    assert [word for word in words if word not in source and not word.startswith("KeyError")] == []


def test_ranks_that_wait_for_one_that_has_failed_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's save lets them wait forever, and the other cases are still to run."""
    monkeypatch.setattr(worlds, "_WAIT", 1.0)

    def save(rank: int) -> str:
        if rank:
            dist.barrier()
        return "failed"

    with threads_as_ranks() as run:
        first, *others = run(3, save)
        assert first == "failed"
        assert [type(other) for other in others] == [Failed, Failed]
        assert run(2, lambda rank: rank) == [0, 1]


@pytest.mark.parametrize("planner", ["none", EACH_ITS_OWN])
@pytest.mark.parametrize("mode", ["save", "async_save"])
def test_ranks_that_disagree_are_told_apart(tmp_path: Path, mode: str, planner: str) -> None:
    """torch's storage keeps the tensor of one rank; ours refuses, whichever planner has made the plan."""
    state = Box("dict", (("a", Tensor("float32", (2,), grows=True)), ("b", Sharded("bool", (5, 3), "0", 1))))
    case, storages = Case(2, mode, True, (Save(state, planner),), ()), Storages()
    try:
        with threads_as_ranks() as run:
            theirs, ours = (run_case(case, side, storages, run, tmp_path) for side in (False, True))
    finally:
        storages.close()
    assert not any(isinstance(saves[0], Failed) for saves in theirs["saves"].values())
    expected = "'a' cannot be saved: the ranks do not agree on its shape: (2,) on rank 0, (3,) on rank 1"
    assert all(expected in saves[0].what for saves in ours["saves"].values())
    assert judge(case, theirs, ours, lambda: theirs).explained >= {"ranks that disagree"}


def case_of(first: str, seed: int, item: str) -> Case:
    """Two ranks save three values, and three ranks load them."""
    state, blank = (
        Box("dict", (("a", Tensor(first, (4, 2), seed=n)), ("b", Sharded("bool", (5, 3), placed, n)), ("c", Object(o))))
        for n, placed, o in ((seed, "0", item), (99, "1", "none"))
    )
    return Case(2, "async_save", True, (Save(state),), (Load(0, 3, blank),))


@pytest.mark.parametrize(
    ("other", "places"),
    [
        (case_of("float32", 1, "int"), set()),
        (case_of("float32", 2, "int"), {"'a'", "'b'"}),
        (case_of("float32", 1, "true"), {"'c'"}),
        (case_of("int32", 1, "int"), {"'a'"}),
    ],
    ids=["nothing", "values", "an object", "a dtype"],
)
def test_what_is_not_the_same_is_found(tmp_path: Path, other: Case, places: set[str]) -> None:
    """If what ours gave were what it gives for another state, that would be unexplained, where it is."""
    case, storages = case_of("float32", 1, "int"), Storages()
    try:
        with threads_as_ranks() as run:
            theirs, ours = (run_case(c, side, storages, run, tmp_path) for c, side in ((case, False), (other, True)))
            verdict = judge(case, theirs, ours, lambda: theirs)
    finally:
        storages.close()
    assert {d.path[5] for d in verdict.unexplained if d.path[:3] == ("loads", 0, 2)} == places
    assert bool(verdict.unexplained) == bool(places)
    assert set(ALWAYS) <= verdict.explained
