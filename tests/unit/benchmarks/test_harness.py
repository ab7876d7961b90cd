"""The harness: cases in turns, each in a process of its own, and the command line of a benchmark."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness, quotes
from benchmarks.harness import run, run_case, run_cases, whole


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


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Results are stored with the machine, and all else is made of them, also again without measuring."""
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(harness, "_commit", lambda: "abc")
    made: list[str] = []
    monkeypatch.setattr(quotes, "write", lambda: made.append("quotes"))
    measured: list[tuple[int, Path]] = []

    def measure(options: Any, folder: Path) -> dict[str, Any]:
        measured.append((options.rounds, folder.parent))
        return {"value": 7, "ratios": [("speed", ">= 1", "1.5")]}

    def command(*arguments: str, word: str = "page") -> None:
        monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
        options = {"rounds": {"type": int, "default": 1}, "quick": harness.QUICK}
        run(
            "name",
            measure,
            lambda content: f"{word} of {content['value']}",
            about="About.",
            options=options,
            plot=lambda content: made.append(f"picture of {content['value']}"),
            bad=lambda content: "bad" if word == "bad page" else "",
        )

    command("--rounds", "3", "--folder", str(tmp_path))
    assert measured == [(3, tmp_path)]
    stored = json.loads((tmp_path / "results" / "name.json").read_text())
    assert (stored["value"], stored["machine"]["cores"]) == (7, len(os.sched_getaffinity(0)))
    assert (tmp_path / "results" / "name.md").read_text() == "page of 7\n" == capsys.readouterr().out
    command("--redraw", word="another page")
    assert (tmp_path / "results" / "name.md").read_text() == "another page of 7\n"
    assert (len(measured), made) == (1, ["picture of 7", "quotes"] * 2)
    with pytest.raises(SystemExit, match="bad"):
        command("--quick", "--folder", str(tmp_path), word="bad page")
    assert (tmp_path / "results" / "name-quick.md").read_text() == "bad page of 7\n"
    (line,) = (tmp_path / "results" / "history.jsonl").read_text().splitlines()
    assert json.loads(line) | {"date": ""} == {
        "benchmark": "name",
        "commit": "abc",
        "date": "",
        "cores": stored["machine"]["cores"],
        "ratios": {"speed": "1.5"},
    }
    monkeypatch.setattr(harness, "_commit", lambda: "abc-dirty")
    with pytest.raises(SystemExit):
        command("--folder", str(tmp_path))
    assert "Commit them, or pass --draft" in capsys.readouterr().err
    command("--draft", "--folder", str(tmp_path), word="draft")
    assert (tmp_path / "results" / "name-draft.md").read_text() == "draft of 7\n"
    assert json.loads((tmp_path / "results" / "name.json").read_text()) == stored
    assert len(made) == 4
