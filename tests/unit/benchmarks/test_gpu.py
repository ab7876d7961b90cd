"""The plan of a quarter of an hour on a GPU: it fits its limits, names what exists, and its files become a page."""

from __future__ import annotations

import json
import tempfile
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import cases, run
from benchmarks.gpu.plan import CALLS, SECONDS
from benchmarks.gpu.report import collect, render

from ...lab.processes import PACKAGE


def test_each_call_fits_its_limits() -> None:
    """The seconds of its steps, and the files that it leaves: one for each file of tests, and one of the call."""
    assert 120 + sum(SECONDS) + 30 * len(SECONDS) <= 15 * 60  # starts the machine, and sends files
    assert all(sum(step.seconds for step in call) <= most for call, most in zip(CALLS, SECONDS, strict=True))
    assert max(1 + sum(len(step.names) for step in call if step.what == "tests") for call in CALLS) <= 8
    names = [step.name for call in CALLS for step in call]
    assert sorted(set(names)) == sorted(names)


def test_each_step_is_of_a_kind_that_exists() -> None:
    """Its cases can be run, its loaders are known, its tests are there; no kind is left out of the plan."""
    steps = [step for call in CALLS for step in call]
    assert {step.what for step in steps} == {*cases._CASES, "tests"} - {"latencies"}  # what another case starts
    loaders = {name.partition(" | ")[0].split(",")[0] for step in steps if step.what == "load" for name in step.names}
    assert loaders == set(cases._LOADERS)
    planned = {name for step in steps if step.what == "tests" for name in step.names}
    assert [name for name in planned if not (PACKAGE.parent / name).is_file()] == []


def test_the_wheels_of_a_parcel_are_unpacked_once_for_the_same_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parcel whose code has changed never meets the code of the one before on a warm machine."""
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "wheels").mkdir()
    found = []
    for text in ("one", "one", "two"):
        with zipfile.ZipFile(tmp_path / "wheels" / "a.whl", "w") as wheel:
            wheel.writestr(zipfile.ZipInfo("module.py"), text)
        found.append(run._unpacked())
    assert [(folder / "module.py").read_text() for folder in found] == ["one", "one", "two"]
    assert found[0] == found[1] != found[2]


def test_what_came_back_becomes_a_page(tmp_path: Path) -> None:
    """Figures with their spread, failures with their reason, tests with their counts, and what was left out."""
    (tmp_path / "1").mkdir()
    results = [
        {"what": "staging", "name": "300 large", "files": "/tmp", "values": {"gb_per_s": [40.0, 50.0, 45.0]}},
        {"what": "staging", "name": "5,000 small", "files": "/tmp", "error": "Traceback\nRuntimeError: no"},
    ]
    tests = {"c": "<failure/>", "d": "", "e": "<skipped/>"}
    suite = '<properties><property name="mib" value="7"/></properties>'
    suite += "".join(f'<testcase classname="a.b" name="{name}">{said}</testcase>' for name, said in tests.items())
    (tmp_path / "test_staging.xml").write_text(f"<testsuites><testsuite>{suite}</testsuite></testsuites>")
    machine = {"gpu": "a GPU", "torch": "2.11", "cuda": "13", "cores": 16, "rehearsal": False}
    ended = {"staging": "failed: ['5,000 small']", "tests": "done"}
    (tmp_path / "1" / "call-1.json").write_text(
        json.dumps({"ended": ended, "machine": machine, "steps": {"staging": results}})
    )
    page = render(collect(tmp_path))
    assert page.startswith("a GPU, torch 2.11, CUDA 13, 16 cores.")
    other = {"machine": machine | {"gpu": "another", "commit": "abc"}, "ended": {}, "steps": {}}
    (tmp_path / "1" / "call-2.json").write_text(json.dumps(other))
    title = "call-1: a GPU, torch 2.11, CUDA 13, 16 cores. call-2: another, torch 2.11, CUDA 13, 16 cores, commit abc."
    assert render(collect(tmp_path)).startswith(title)
    assert "| 300 large | 45 (40-50) |" in page
    assert "| 5,000 small | failed: RuntimeError: no |" in page
    assert "| test_staging | 2 | b::c | mib: 7 |" in page
    assert "| staging | failed: ['5,000 small'] |" in page
