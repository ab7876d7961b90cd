"""Many cases with torch's own storage and with ours: `python -m tests.soak.differential` (about half an hour).

The cases, and what is compared, are those of the tests: see ``tests/differential``. Every case runs with both storages.
Each of its values, keys, types, errors and fields of metadata must be the same, or a difference that the documentation
lists.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.harness import Content, run, table
from benchmarks.pages import page

from ..differential.check import Tally, check
from ..differential.explained import ALWAYS, DIFFERENCES

_JOBS = 2
_SHOWN = 500  # cases between two lines of progress


def _share(count: int, seed: int, folder: str) -> Tally:
    """Runs some of the cases, in a process of its own."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        return check(count, seed, Path(name), _Progress())


class _Progress:
    """Shows what is unexplained when it is found, and now and then how many cases there were."""

    def __init__(self) -> None:
        self._shown = 0

    def __call__(self, tally: Tally) -> None:
        for case in tally.unexplained[self._shown :]:
            print(case, flush=True)
        self._shown = len(tally.unexplained)
        if tally.cases % _SHOWN == 0:
            print(f"{tally.cases} cases, {self._shown} unexplained", flush=True)


def render(content: dict[str, Any]) -> str:
    """The page of results."""
    tally = content["tally"]
    counts = [
        ("cases", tally["cases"]),
        ("equal, but for what differs in every checkpoint", tally["equal"]),
        ("with a deliberate difference", tally["cases"] - tally["equal"] - len(tally["unexplained"])),
        ("unexplained", len(tally["unexplained"])),
        ("saves that both made", tally["saves"]),
        ("saves that both refused", tally["refused"]),
        ("loads that both made", tally["loads"]),
        ("loads that both refused", tally["failed"]),
    ]
    explained = [
        (name, str(tally["explained"].get(name, 0)), "yes" if name in ALWAYS else "no") for name in DIFFERENCES
    ]
    how_often = f"{tally['cases']} cases, in {_JOBS} processes. The run took {content['seconds']:.0f} s."
    again = f"tests.soak.differential --cases {content['cases']} --seed {content['seed']}"
    return page(
        content,
        "Against torch's own storage",
        _WHAT,
        how_often,
        again,
        "## Cases",
        table(("", "count"), [(title, f"{count:,}") for title, count in counts]),
        "## Deliberate differences",
        "[Compatibility](../../docs/compatibility.md#where-we-differ-from-torchs-own-storage) lists each of "
        "them, with the reason. A case may have several.",
        table(("difference", "cases", "in every checkpoint"), explained),
        spreads=False,
    )


_WHAT = (
    "whether this package does what torch's `FileSystemWriter` and `FileSystemReader` do. hypothesis makes cases: "
    "states, planners, meshes, ways to save, targets to load into. Each case runs with both storages. In some cases, "
    "while this package saves, a child is forked, or umask, working directory and environment change. Values, keys, "
    "types, strides, errors and metadata are compared."
)


def measure(options: argparse.Namespace, folder: Path) -> Content:
    started = time.monotonic()
    shares = [options.cases // _JOBS + (job < options.cases % _JOBS) for job in range(_JOBS)]
    context = multiprocessing.get_context("spawn")
    arguments = [(share, options.seed * _JOBS + job, str(folder)) for job, share in enumerate(shares)]
    with context.Pool(_JOBS) as pool:
        tally = sum(pool.starmap(_share, arguments, chunksize=1), Tally())
    fields = {field.name: getattr(tally, field.name) for field in dataclasses.fields(tally)}
    counted = {name: dict(value) if isinstance(value, Counter) else value for name, value in fields.items()}
    seconds = time.monotonic() - started
    return {"cases": options.cases, "seed": options.seed, "tally": counted, "seconds": seconds}


def _unexplained(content: Content) -> str:
    count = len(content["tally"]["unexplained"])
    return f"{count} cases are unexplained" if count else ""


OPTIONS = {
    "cases": {"type": int, "default": 10_000},
    "seed": {"type": int, "default": 0},
}

if __name__ == "__main__":
    run("differential", measure, render, about=__doc__, options=OPTIONS, where="/dev/shm", bad=_unexplained)
