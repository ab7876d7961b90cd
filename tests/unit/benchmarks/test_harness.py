"""The command line of a benchmark: what it measures, stores and makes of that."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness, quotes
from benchmarks.harness import run


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
