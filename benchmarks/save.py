"""The save benchmark: `python -m benchmarks.save` (about 25 minutes; `--quick` for a smaller one, not to be quoted)."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .harness import RESULTS, cell, machine, run_cases, spread, store, table
from .save_case import BESIDE
from .savers import SAVERS
from .workloads import WORKLOADS, nbytes

OURS = "dcp_tensorizer, prewarmed"
_MAIN = "300 x 7 MB"


def plan(folder: str, quick: bool) -> list[tuple[list[dict[str, Any]], int]]:
    """Groups of cases, and how many rounds of each."""
    scale = 0.1 if quick else 1.0
    base = {"ranks": 1, "scale": scale, "saves": 3, "quiet": 2, "folder": folder}
    limits = [{"saver": "limits", "workload": workload, **base} for workload in WORKLOADS]
    main = [{"saver": saver, "workload": _MAIN, **base} for saver in SAVERS]
    few = (OURS, "torch FileSystemWriter, THREAD", "torch FileSystemWriter, PROCESS", "torch_checkpointing")
    others = [{"saver": s, "workload": w, **base} for w in WORKLOADS if w != _MAIN for s in few]
    many = [{"saver": s, "workload": _MAIN, **base, "ranks": n, "saves": 2} for n in (2, 4) for s in few]
    memory = [{"saver": OURS, "workload": _MAIN, **base, "quiet": 20, "memory": True}]
    rounds = 1 if quick else 3
    return [(limits[:1] + main, rounds), (memory, 1), (limits[1:] + others, min(2, rounds)), (many, 1)]


def summarise(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per contender, workload and number of ranks: each figure's median and spread over rounds and saves."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        case = result["case"]
        if "error" not in result:
            kind = "memory" if case.get("memory") else case["saver"]
            groups.setdefault(f"{kind} | {case['workload']} | {case['ranks']}", []).append(result)
    return {name: _summary(runs) for name, runs in groups.items()}


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    case = runs[0]["case"]
    size = nbytes(WORKLOADS[case["workload"]](0.01)) * 100 * case["scale"] if case["workload"] != "one 2 GB" else 0
    size = size or 2048 * 2**20 * case["scale"]
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
        "loop": spread(save["rate"] / rank["idle"]["rate"] for rank, save in loops),
        "gap": spread(max(0.0, save["gap"] - rank["idle"]["gap"]) for rank, save in loops),
        "cpu per GB": spread(save["cpu"] / size * 1e9 * len(ranks) / len(runs) for r in ranks for save in r["quiet"]),
        "trainer bytes": spread(rank["trainer_bytes"] for rank in ranks),
        "child bytes": spread(save["child_bytes"] for rank in ranks for save in rank["saves"]),
    }


def render(summary: dict[str, dict[str, Any]]) -> str:
    parts = []
    for workload in WORKLOADS:
        for ranks in (1, 2, 4):
            rows = [_row(n, s) for n, s in summary.items() if n.endswith(f"| {workload} | {ranks}") and "loop" in s]
            if rows:
                parts.append(f"## {workload}, {ranks} rank(s)\n\n{table(_HEADER, rows)}")
                limits = summary.get(f"limits | {workload} | {ranks}")
                if limits is not None:
                    parts.append(_limits(limits))
    return "\n\n".join(["# Saving", *parts])


_HEADER = (
    "contender",
    "first stall s",
    "steady stall s",
    "durable GB/s, loop running",
    "durable GB/s, quiet",
    "loop speed",
    "longest gap ms over idle",
    "CPU s/GB",
    "memory: trainer / child MB",
)


def _row(name: str, s: dict[str, Any]) -> tuple[str, ...]:
    def rate(seconds: float) -> str:
        return f"{s['bytes'] / 1e9 / seconds:.2f}"

    def mb(value: float) -> str:
        return f"{value / 1e6:,.0f}"

    return (
        name.split(" | ")[0],
        cell(s["first stall"], "{:.2f}".format),
        cell(s["steady stall"], "{:.3f}".format),
        cell(s["durable"], rate),
        cell(s["durable, quiet"], rate),
        cell(s["loop"], "{:.0%}".format),
        cell(s["gap"], lambda v: f"{v * 1e3:.0f}"),
        cell(s["cpu per GB"], "{:.2f}".format),
        f"{mb(s['trainer bytes']['max'])} / {mb(s['child bytes']['max'])}",
    )


def _limits(limits: dict[str, Any]) -> str:
    size = limits["bytes"]
    rows = [
        (key, cell(limits[key], lambda v: f"{size / 1e9 / v:.2f}")) for key in limits if key not in ("bytes", BESIDE)
    ]
    return table(("limit in the same run", "GB/s"), [*rows, (BESIDE, cell(limits[BESIDE], "{:.0%}".format))])


def ratios(summary: dict[str, dict[str, Any]]) -> list[tuple[str, str, str]]:
    """The figures that this package promises, from medians of one run."""

    def median(name: str, figure: str, workload: str = _MAIN) -> float:
        entry = summary.get(f"{name} | {workload} | 1", {}).get(figure)
        return entry["median"] if entry else float("nan")

    ours = median(OURS, "durable")
    rows = [
        ("durable with the loop / hashes alone on one core", ">= 0.80", median("limits", "hashes, 1 core") / ours),
        ("the same / torch THREAD", ">= 3", median("torch FileSystemWriter, THREAD", "durable") / ours),
        ("the same / torch PROCESS", ">= 3", median("torch FileSystemWriter, PROCESS", "durable") / ours),
        ("the same / torch_checkpointing", ">= 2", median("torch_checkpointing", "durable") / ours),
        (
            "durable, quiet / hashes alone",
            ">= 0.85",
            median("limits", "hashes, 2 cores") / median(OURS, "durable, quiet"),
        ),
        (
            "durable, quiet / the slower of hashes and O_DIRECT writes",
            "",
            max(median("limits", "hashes, 2 cores"), median("limits", "O_DIRECT write"))
            / median(OURS, "durable, quiet"),
        ),
        ("steady stall / plain copy", "<= 1.15", median(OURS, "steady stall") / median("limits", "copy")),
        ("first stall after prewarm / plain copy", "<= 1.5", median(OURS, "first stall") / median("limits", "copy")),
        ("loop's speed during a save / idle", ">= 0.97", median(OURS, "loop")),
        ("the same / its speed beside any busy core", "", median(OURS, "loop") / median("limits", BESIDE)),
        ("longest gap over the idle loop's, ms", "<= 10", median(OURS, "gap") * 1e3),
        (
            "5,000 small: steady stall / plain copy",
            "<= 2",
            median(OURS, "steady stall", "5,000 small") / median("limits", "copy", "5,000 small"),
        ),
        (
            "5,000 small: durable / torch THREAD",
            ">= 3",
            median("torch FileSystemWriter, THREAD", "durable", "5,000 small") / median(OURS, "durable", "5,000 small"),
        ),
    ]
    memory = summary.get(f"memory | {_MAIN} | 1", {})
    for name, limit in (("trainer", 64), ("child", 128)):
        entry = memory.get(name, {"peak": float("nan"), "growth": float("nan")})
        rows.append(
            (f"{name}: peak memory beyond its own and the staging buffer, MB", f"<= {limit}", entry["peak"] / 1e6)
        )
        rows.append((f"{name}: growth from the 5th to the 20th save, MB", "flat", entry["growth"] / 1e6))
    return [(name, target, f"{value:.2f}") for name, target, value in rows]


def plot(summary: dict[str, dict[str, Any]]) -> None:
    """Steady stall, durable throughput and loop speed, side by side, for the main workload."""
    names = [n for n in SAVERS if f"{n} | {_MAIN} | 1" in summary]
    entries = [summary[f"{n} | {_MAIN} | 1"] for n in names]
    panels = (
        ("training stalls for (s)", "steady stall", lambda e, v: v),
        ("durable (GB/s), training loop running", "durable", lambda e, v: e["bytes"] / 1e9 / v),
        ("training loop's speed during the save (%)", "loop", lambda e, v: 100 * v),
    )
    figure, axes = plt.subplots(1, 3, figsize=(14, 0.45 * len(names) + 1.4), sharey=True)
    for axis, (title, key, convert) in zip(axes, panels, strict=True):
        values = [convert(e, e[key]["median"]) if e[key] else 0 for e in entries]
        colors = ["#c2410c" if n.startswith("dcp_tensorizer") else "#94a3b8" for n in names]
        bars = axis.barh(names, values, color=colors)
        axis.bar_label(bars, fmt="%.2f" if max(values) < 20 else "%.0f", padding=3)
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(RESULTS / "save.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--main", action="store_true", help="only the main workload, on one rank")
    parser.add_argument("--rounds", type=int, help="instead of each group's own number")
    parser.add_argument("--folder", help="where to save: on the file system to be measured", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd()) as folder:
        groups = plan(folder, options.quick)[: 2 if options.main else None]
        results = [
            result
            for cases, rounds in groups
            for result in run_cases("benchmarks.save_case", cases, options.rounds or rounds)
        ]
    summary = summarise(results)
    text = f"{render(summary)}\n\n## Ratios of medians\n\n{table(('figure', 'wanted', 'measured'), ratios(summary))}"
    name = "save-quick" if options.quick else "save"
    store(name, {"machine": machine(), "ratios": ratios(summary), "summary": summary, "results": results}, text)
    if not options.quick:
        plot(summary)


if __name__ == "__main__":
    main()
