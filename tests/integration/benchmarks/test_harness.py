"""The harness: cases in turns, each in a process of its own."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import run_case, run_cases, whole


def number(case: dict[str, Any], folder: Path) -> Any:
    """What a case measures here: its number, in an empty folder; or it fails, or does not end."""
    sys.stdout.write("what a library says\n")
    assert list(folder.iterdir()) == []
    if case["number"] < 0:
        raise ValueError("a negative number")
    if case["number"] > 9:
        time.sleep(600)
    return [{"number": case["number"], "process": os.getpid(), "where": str(folder.parent)}]


def test_cases_take_turns_in_fresh_processes(tmp_path: Path) -> None:
    """Each round begins elsewhere; what fails is a result, too, and where it happened is not told."""
    cases = [{"number": n, "folder": str(tmp_path)} for n in (1, -1)]
    results = run_cases(number, cases, 2)
    assert [(r["round"], r["case"]) for r in results] == [
        (0, {"number": 1}),
        (0, {"number": -1}),
        (1, {"number": -1}),
        (1, {"number": 1}),
    ]
    assert [r["error"] for r in results if "error" in r] == ["ValueError: a negative number"] * 2
    found = [r["ranks"][0] for r in results if "ranks" in r]
    assert [(one["number"], one["where"]) for one in found] == [(1, str(tmp_path))] * 2
    assert len({one["process"] for one in found} | {os.getpid()}) == 3
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit, match="a negative number"):
        whole(results)


def test_a_case_that_takes_too_long_is_ended() -> None:
    """Its result says so."""
    assert run_case(f"{__name__}:number", {"number": 10}, 0.01) == {"error": "no time was left for it"}
