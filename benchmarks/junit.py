"""Runs tests, and returns the outcome of each."""

from __future__ import annotations

import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Outcome(NamedTuple):
    """A test and its outcome: ``passed``, ``skipped``, ``failure`` or ``error``.

    ``where`` is the module and the class of the test, joined by dots.
    """

    where: str
    name: str
    outcome: str

    @property
    def is_bad(self) -> bool:
        return self.outcome in ("failure", "error")


def run_tests(python: str, folder: Path, *arguments: str) -> list[Outcome] | None:
    """Runs pytest in the root of the repository; returns the outcome of each test. Without a report, returns None."""
    report = folder / "report.xml"
    command = [python, "-m", "pytest", *arguments, "--quiet", "--show-capture=no", f"--junitxml={report}"]
    subprocess.run(command, cwd=ROOT, check=False)
    return outcomes(report) if report.exists() else None


def outcomes(report: Path) -> list[Outcome]:
    """Returns all tests of a report. A test that failed and could not be cleaned up has failed."""
    found = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        words = (word for word in ("failure", "error", "skipped") if case.find(word) is not None)
        found.append(Outcome(case.get("classname") or "", case.get("name") or "", next(words, "passed")))
    return found
