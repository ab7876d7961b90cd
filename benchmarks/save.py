"""The save benchmark: `python -m benchmarks.save` (about 16 minutes; `--quick` for a smaller one, not to be quoted)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import save_case
from .harness import QUICK, Content, run, run_cases, spread
from .pages import medians
from .save_report import plot, ratios, render
from .savers import BACKGROUND, CHECKPOINTING, ENCRYPTED, OURS, OVERLAPPED, PLANNED, PROCESS, SAVERS, THREAD
from .workloads import MAIN, SETTINGS, WORKLOADS, nbytes


def plan(folder: Path, quick: bool) -> list[tuple[list[dict[str, Any]], int]]:
    scale = 0.1 if quick else 1.0
    base = {"ranks": 1, "scale": scale, "saves": 3, "quiet": 2, "folder": str(folder)}
    limits = [{"saver": "limits", "workload": workload, **base} for workload in WORKLOADS]
    main = {s: {"saver": s, "workload": MAIN, **base, "yardsticks": s == OURS} for s in SAVERS if s != PLANNED}
    few, fewer = (OURS, THREAD, PROCESS, CHECKPOINTING), (OURS, THREAD)
    # The savers that the wanted figures compare, which the page mentions.
    compared = [main.pop(saver) for saver in (*few, OVERLAPPED, BACKGROUND, ENCRYPTED)]
    others = [{"saver": s, "workload": "5,000 small", **base, "yardsticks": s == OURS} for s in (*few, PLANNED)]
    others += [{"saver": s, "workload": "one 2 GB", **base, "yardsticks": s == OURS} for s in fewer]
    others += [{"saver": s, "workload": "tmpfs", **base, "folder": "/dev/shm"} for s in fewer]
    # Beside that loop a save of torch's takes half a minute.
    others += [{"saver": saver, "workload": "python", **base, "saves": 2, "quiet": 1} for saver in fewer]
    many = [{"saver": s, "workload": MAIN, **base, "ranks": n, "saves": 2, "quiet": 1} for n in (2, 4) for s in few]
    memory = [{"saver": OURS, "workload": MAIN, **base, "quiet": 20, "memory": True}]
    rest = [*limits[1:], *main.values(), *others]
    return [(limits[:1] + compared, 1 if quick else 2), (memory, 1), (rest, 1), (many, 1)]


def summarise(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns each figure's median and spread over rounds and saves, per contender, workload and number of ranks."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        case = result["case"]
        if "error" not in result:
            kind = "memory" if case.get("memory") else case["saver"]
            groups.setdefault(f"{kind} | {case['workload']} | {case['ranks']}", []).append(result)
    summary = {name: _summary(runs) for name, runs in groups.items()}
    for name, runs in groups.items():
        taken = [yardsticks for run in runs for rank in run["ranks"] for yardsticks in rank.get("yardsticks", ())]
        if taken:  # between this contender's saves: they count for its workload
            limits = summary.setdefault(name.replace(OURS, "limits"), {"bytes": summary[name]["bytes"]})
            limits |= {key: spread(of[key] for of in taken) for key in taken[0]}
    return summary


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    case = runs[0]["case"]
    size = nbytes(SETTINGS[case["workload"]].make(0.01)) * 100 * case["scale"]
    ranks = [rank for run in runs for rank in run["ranks"]]
    if case.get("memory"):
        peaks = {name: [rank[name] for rank in ranks] for name in ranks[0]}
        return {n: {"peak": max(map(max, of)), "growth": max(o[-1] - o[4] for o in of)} for n, of in peaks.items()}
    if case["saver"] == "limits":
        return {"bytes": size} | {key: spread(rank[key] for rank in ranks) for key in ranks[0]}
    loops = [(rank, save) for rank in ranks for save in rank["saves"] if "rate" in save]
    return {
        "bytes": size,
        "first stall": spread(rank["saves"][0]["stall"] for rank in ranks),
        "steady stall": spread(save["stall"] for rank in ranks for save in rank["saves"][1:]),
        "durable": spread(save["durable"] for rank in ranks for save in rank["saves"][1:]),
        "durable, quiet": spread(save["durable"] for rank in ranks for save in rank["quiet"]),
        "loop": spread(save["rate"] / save["alone"] for _, save in loops),
        "cost": spread(_cost(save) for rank in ranks for save in rank["saves"][1:]),
        "gap": spread(max(0.0, save["gap"] - rank["idle"]["gap"]) for rank, save in loops),
        "cpu per GB": spread(save["cpu"] / size * 1e9 * len(ranks) / len(runs) for r in ranks for save in r["quiet"]),
        "trainer bytes": spread(rank["trainer_bytes"] for rank in ranks),
        "child bytes": spread(save["child_bytes"] for rank in ranks for save in rank["saves"]),
    }


def _cost(save: dict[str, float]) -> float:
    """Returns the seconds that training loses by a save: the stall, and the delay by slower steps after it."""
    slowed = 1 - save["rate"] / save["alone"] if "rate" in save else 0.0
    return save["stall"] + (save["durable"] - save["stall"]) * slowed


def measure(options: argparse.Namespace, folder: Path) -> Content:
    groups = plan(folder, options.quick)[: 2 if options.main else None]
    results = [r for cases, rounds in groups for r in run_cases(save_case.measure, cases, options.rounds or rounds)]
    summary = summarise(results)
    return {"ratios": medians(ratios(summary)), "summary": summary, "results": results}


OPTIONS = {
    "quick": QUICK,
    "main": {"action": "store_true", "help": "only the main workload, on one rank; not to be quoted"},
    "rounds": {"type": int, "help": "instead of each group's own number"},
}

if __name__ == "__main__":
    run("save", measure, render, about=__doc__, options=OPTIONS, plot=plot)
