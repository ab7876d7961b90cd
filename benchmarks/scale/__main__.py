"""The scale benchmark: `python -m benchmarks.scale` (about 10 minutes; `--large` goes to 8,192 ranks, in 90 minutes).

`--only items`, `worlds`, `ranks` or `replicas` measures one part, and `--sizes` some of its sizes. The results of the
others stay.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from ..harness import QUICK, RESULTS, Content, machine, run, run_cases, stored
from ..pages import machine_line, medians
from . import items_case, ranks_case, replicas_case, world_case
from .model import fitting, smaller
from .plot import plot
from .report import render
from .summary import EXCHANGED, OURS, PLANNED, TORCH, ratios, summarise

_SIZES = {"items": (1_000, 5_000, 20_000), "worlds": (8, 64, 512), "ranks": (2, 8), "replicas": (2, 4)}
_LARGE = {
    "items": (1_000, 5_000, 20_000, 100_000),
    "worlds": (8, 64, 512, 2_048, 8_192),
    "ranks": (2, 8, 32),
    "replicas": (2, 4, 8),
}
_QUICK = {"items": (1_000, 5_000), "worlds": (8, 64), "ranks": (2,), "replicas": (2,)}
_NOTE = (
    "Lower is better. Both axes are logarithmic. Ranks are simulated, with a state like that of Llama 3 70B with Adam. "
    "Where one process cannot hold it, it is extrapolated from two smaller ones. Points are medians. "
    "All figures: scale.md."
)


_KINDS: dict[str, tuple[Any, tuple[str, ...], dict[str, int]]] = {
    "items": (items_case.measure, (OURS, PLANNED, TORCH), {"saves": 2, "loads": 2}),
    "ranks": (ranks_case.measure, (OURS, TORCH), {}),
    "replicas": (replicas_case.measure, (OURS, EXCHANGED, TORCH), {}),
}
"""The function, the contenders and the setup of each kind of case, except worlds."""


def _measure(kind: str, sizes: tuple[int, ...], rounds: int, folder: str) -> list[dict[str, Any]]:
    if kind == "worlds":
        return _worlds(sizes, rounds, folder)
    work, contenders, setup = _KINDS[kind]
    base = {"kind": kind, **setup, "folder": folder}
    return run_cases(work, [{"contender": name, "size": size, **base} for size in sizes for name in contenders], rounds)


def _worlds(sizes: tuple[int, ...], rounds: int, folder: str) -> list[dict[str, Any]]:
    results = []
    worlds = [(ranks, model) for ranks in sizes for model in (fitting(ranks), smaller(fitting(ranks))) if model]
    for ranks, model in worlds:
        cases = []
        for name in (OURS, PLANNED, TORCH):
            where = f"{folder}/{name}-{ranks}-{model.layers}"
            base = {"kind": "worlds", "contender": name, "size": ranks}
            cases.append(base | {"layers": model.layers, "folder": folder, "place": where})
        results += run_cases(world_case.measure, [case | {"step": "save"} for case in cases], 1)
        loads = [case | {"step": "load"} for case in cases if case["contender"] != PLANNED]
        results += run_cases(world_case.measure, loads, rounds)
        for case in cases:
            shutil.rmtree(case["place"], ignore_errors=True)
    return results


def measure(options: argparse.Namespace, folder: Path) -> Content:
    """Measures the requested parts; returns the results of all, the others as stored."""
    if options.sizes and not options.only:
        raise SystemExit("--sizes goes with --only")
    sizes: dict[str, Any] = dict(_QUICK if options.quick else _LARGE if options.large else _SIZES)
    if options.only:
        sizes = {options.only: tuple(options.sizes or sizes[options.only])}
    rounds = options.rounds or (3 if options.large else 1)
    here, name = machine(folder), "scale-quick" if options.quick else "scale"
    known = stored(name) if options.only and (RESULTS / f"{name}.json").exists() else {"results": []}
    results = [result for part in sizes for result in _measure(part, sizes[part], rounds, str(folder))]
    for result in results:
        result["of"] = f"{here['date']}, commit {here['commit']}"
    measured = {(part, size) for part in sizes for size in sizes[part]}
    results += [old for old in known["results"] if (old["case"]["kind"], old["case"]["size"]) not in measured]
    summary = summarise(results)
    return {
        "measured": _moments(results),
        "plotted": any(result["case"]["kind"] == "worlds" for result in results) and not options.quick,
        "ratios": medians(ratios(summary)),
        "summary": summary,
        "results": results,
    }


def _plot(content: Content) -> None:
    if content["plotted"]:
        plot(content["summary"], [_NOTE, f"Machine: {machine_line(content['machine'])}"])


def _moments(results: list[dict[str, Any]]) -> dict[str, str]:
    """Returns when each part was measured; for each size, if these times differ."""
    parts: dict[str, dict[str, set[int]]] = {}
    for result in results:
        parts.setdefault(result["case"]["kind"], {}).setdefault(result["of"], set()).add(result["case"]["size"])
    return {part: _shown(moments) for part, moments in parts.items()}


def _shown(moments: dict[str, set[int]]) -> str:
    if len(moments) == 1:
        return next(iter(moments))
    sizes = {when: ", ".join(f"{size:,}" for size in sorted(of)) for when, of in moments.items()}
    return "; ".join(f"{when}: {sizes[when]}" for when in sorted(sizes))


OPTIONS = {
    "quick": QUICK,
    "large": {"action": "store_true", "help": "up to 8,192 simulated ranks, in 3 rounds: about 90 minutes"},
    "only": {"choices": _SIZES, "help": "one part; what is stored of the others stays"},
    "sizes": {"type": int, "nargs": "+", "help": "instead of that part's own"},
    "rounds": {"type": int},
}

if __name__ == "__main__":
    run("scale", measure, render, about=__doc__, options=OPTIONS, plot=_plot)
