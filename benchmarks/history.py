"""The two headline ratios of every run whose results were committed: ``python -m benchmarks.history``.

One run says what one hour was like. Disk and fresh memory of a virtual machine are others an hour later.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from .harness import RESULTS, Content, cell, run, spread, table
from .pages import page

_SAVE = ("save", "speed to disk in training / torch, THREAD")
_LOAD = ("load", "warm speed / torch FileSystemReader's")
_TITLES = {
    _SAVE: "durable throughput while training runs / torch `FileSystemWriter`, thread",
    _LOAD: "verified load from the page cache / torch `FileSystemReader`",
}
_WHAT = (
    "how far the two headline ratios vary from one run to another. The workload and the machine's size are the same. "
    "The hour, the code and the state of disk and memory are not. Nothing is measured here: the figures are those of "
    "the results that were committed, the newest first."
)


def measure(options: argparse.Namespace, folder: Path) -> Content:
    """Reads the results of earlier runs from the history of this repository, the newest first."""
    return {"runs": {name: _runs(name, title) for name, title in _TITLES}}


def _runs(name: str, title: str) -> list[dict[str, Any]]:
    file = RESULTS / f"{name}.json"
    contents = [json.loads(file.read_text())]
    for commit in _git("log", "--format=%h", "--", file.name).split():
        contents.append(json.loads(_git("show", f"{commit}:./{file.name}") or "{}"))  # empty where it was removed
    found: dict[str, dict[str, Any]] = {}
    for content in contents:
        machine, ratios = content.get("machine", {}), content.get("ratios", [])
        value = next((float(row[2]) for row in ratios if row[0] == title and row[2]), None)
        if value is not None and machine.get("commit"):  # the oldest results do not say what they measured
            known = {key: machine[key] for key in ("commit", "date", "cores")}
            found.setdefault(machine["commit"], known | {"value": value})
    return list(found.values())


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=RESULTS, check=True).stdout


def render(content: Content) -> str:
    """The page of results."""
    sections = []
    for (name, title), words in _TITLES.items():
        runs = content["runs"][name]
        rows = [(ran["commit"], ran["date"], str(ran["cores"]), f"{ran['value']:.2f}") for ran in runs]
        total = ("all", "", "", cell(spread(ran["value"] for ran in runs), "{:.2f}".format))
        sections += [f"## {words}", table(("commit", "date", "cores", title), [*rows, total])]
    how_often = ", ".join(f"{len(runs)} runs of {name}" for name, runs in content["runs"].items())
    return page(content, "The same figures on other days", _WHAT, f"{how_often}.", "history", *sections)


if __name__ == "__main__":
    run("history", measure, render, about=__doc__)
