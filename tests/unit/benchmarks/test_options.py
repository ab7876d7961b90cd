"""The benchmark of options: its cases are measured one by one, and shown together; no measurements."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import harness, options


def _case(title: str, value: float) -> options.Option:
    return options.Option(
        title,
        "a number.",
        lambda c: f"{c['times']} times.",
        {"times": 3},
        {"times": 1},
        lambda folder, size: {**size, "value": value, "left": [path.name for path in folder.parent.iterdir()]},
        lambda c: [f"It is {c['value']:g}."],
        lambda c: [("value", ">= 2", c["value"])],
    )


def test_a_case_that_is_measured_alone_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keeps the commit of its own run; the page has all, in the order of the table."""
    for module in (harness, options):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(options, "CASES", {"a": _case("First", 1), "b": _case("Second", 2)})
    work = tmp_path / "work"
    work.mkdir()
    for commit, only in (("old", None), ("new", ["a"])):
        monkeypatch.setattr(harness, "_commit", lambda commit=commit: commit)
        content = options.measure(Namespace(quick=False, draft=False, only=only), work)
        (tmp_path / "options.json").write_text(json.dumps(content))
    cases = content["cases"]
    assert {name: (case["machine"]["commit"], case["times"], case["left"]) for name, case in cases.items()} == {
        "a": ("new", 3, ["a"]),
        "b": ("old", 3, ["b"]),
    }
    assert content["ratios"] == [("value", ">= 2", "1.000"), ("value", ">= 2", "2.000")]
    page = options.render(content)
    assert [line for line in page.splitlines() if line.startswith("## ")] == ["## First", "## Second"]
    assert "| value | at least 2 | 1.00 | no |" in page and "| value | at least 2 | 2.00 | yes |" in page
    quick = options.measure(Namespace(quick=True, draft=False, only=["b"]), work)
    assert {name: case["times"] for name, case in quick["cases"].items()} == {"b": 1}
