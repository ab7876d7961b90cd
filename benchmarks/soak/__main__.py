"""Runs the parts of the soak, one after the other (two and a half hours), and stores the page of what they counted."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..harness import machine, rewrite, store, stored
from . import (
    crashes,
    disks,
    exchanges,
    faults,
    forks,
    interleavings,
    managers,
    power_cuts,
    preemption,
    surroundings,
    survival,
    tiers,
)
from .report import render
from .tally import Part, Unavailable

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
    # Another part is a module with a `PART`, and a line here.
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--only", choices=PARTS, help="one part; the page keeps what it has of the others")
    parser.add_argument("--rounds", type=int, help="of each part that runs; a number of its own otherwise")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where to save; the temporary directory otherwise")
    parser.add_argument("--redraw", action="store_true", help="the page from the stored results, without a run")
    options = parser.parse_args()
    if options.redraw:
        rewrite("soak", render(stored("soak"), PARTS))
        return
    used, done = machine(options.folder or tempfile.gettempdir()), {}
    for name in [options.only] if options.only else PARTS:
        try:
            ran = _run(PARTS[name], options)
        except Unavailable as reason:
            print(f"{name}: not run: {reason}", file=sys.stderr)
            continue
        done[name] = ran | {"commit": used["commit"]}
    content = {"machine": used, "parts": (stored("soak").get("parts", {}) if options.only else {}) | done}
    store("soak", content, render(content, PARTS))
    if any(ran["tally"]["found"] for ran in done.values()):
        raise SystemExit("something was lost, wrong, hung or left over")


def _run(part: Part, options: argparse.Namespace) -> dict[str, Any]:
    print(f"{part.title} ...", file=sys.stderr, flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        tally = part.run(options.rounds or part.rounds, options.seed, Path(folder))
    return {"seed": options.seed, "seconds": time.monotonic() - started, "tally": tally.as_dict()}


if __name__ == "__main__":
    main()
