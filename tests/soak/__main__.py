"""Runs the parts of the soak, one after the other (4 hours), and stores the page of what they counted."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Content, machine, run, stored

from . import (
    crashes,
    disks,
    exchanges,
    faults,
    forks,
    hosts,
    interleavings,
    managers,
    nfs,
    power_cuts,
    preemption,
    publishers,
    report,
    surroundings,
    survival,
    tiers,
    trainings,
)
from .tally import Part, Unavailable, added

PARTS: dict[str, Part] = {
    "faults": faults.PART,
    "interleavings": interleavings.PART,
    "power-cuts": power_cuts.PART,
    "crashes": crashes.PART,
    "managers": managers.PART,
    "preemption": preemption.PART,
    "exchanges": exchanges.PART,
    "tiers": tiers.PART,
    "survival": survival.PART,
    "forks": forks.PART,
    "disks": disks.PART,
    "surroundings": surroundings.PART,
    "hosts": hosts.PART,
    **trainings.PARTS,
    "nfs": nfs.PART,
    "publishers": publishers.PART,
    # Another part is a module with a `PART`, and a line here.
}


def render(content: Content) -> str:
    """The page of results."""
    return report.render(content, PARTS)


def measure(options: argparse.Namespace, folder: Path) -> Content:
    commit, done = machine()["commit"], {}
    before = stored("soak").get("parts", {}) if options.only else {}
    for name in [options.only] if options.only else PARTS:
        try:
            ran = _run(PARTS[name], options) | {"commit": commit}
        except Unavailable as reason:
            print(f"{name}: not run: {reason}", file=sys.stderr)
        else:
            done[name] = added(before[name], ran) if options.add and name in before else ran
    return {"parts": before | done}


def _run(part: Part, options: argparse.Namespace) -> dict[str, Any]:
    print(f"{part.title} ...", file=sys.stderr, flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        tally = part.run(options.rounds or part.rounds, options.seed, Path(folder))
    return {"seed": options.seed, "seconds": time.monotonic() - started, "tally": tally.as_dict()}


def _bad(content: Content) -> str:
    is_bad = any(ran["tally"]["found"] for ran in content["parts"].values())
    return "something was lost, wrong, hung or left over" if is_bad else ""


OPTIONS = {
    "only": {"choices": PARTS, "help": "one part; the page keeps what it has of the others"},
    "add": {"action": "store_true", "help": "adds to what the page has of that part: give another seed"},
    "rounds": {"type": int, "help": "of each part that runs; a number of its own otherwise"},
    "seed": {"type": int, "default": 0},
}

if __name__ == "__main__":
    run(
        "soak",
        measure,
        render,
        about=__doc__,
        options=OPTIONS,
        where=tempfile.gettempdir(),
        bad=_bad,
    )
