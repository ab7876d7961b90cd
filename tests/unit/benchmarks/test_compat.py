"""The table of Pythons and torches in the documentation is that of the last runs."""

from __future__ import annotations

from benchmarks.compat import matrix
from benchmarks.harness import stored


def test_nothing_has_failed() -> None:
    """The documentation shows the table of the last runs."""
    assert "failed" not in matrix(stored("compat"))


def test_what_the_table_says() -> None:
    """Of each pair: how many passed or failed, or that it was not run."""
    counts = {"tests": 10, "skipped": 1, "failures": 0, "errors": 0}
    results = [
        {"python": "3.10.1", "torch": "2.11.0+cpu", **counts},
        {"python": "3.12.0", "torch": "2.14.1", **counts, "errors": 2},
        {"python": "3.12.0", "torch": "2.11.0", "error": "no such release"},
    ]
    assert matrix({"results": results}).splitlines()[2:] == [
        "| Python 3.10 | 9 passed | - |",
        "| Python 3.12 | not run | 2 failed |",
    ]
