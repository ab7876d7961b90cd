"""The load benchmark: `python -m benchmarks.load` (about 50 minutes; `--quick` for a smaller one, not to be quoted)."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .harness import RESULTS, cell, machine, run_cases, spread, store, table
from .loaders import FORMATS
from .workloads import WORKLOADS

_LOADERS = [name for _, loaders in FORMATS.values() for name in loaders]
_MAIN = "300 x 7 MB"
_ONE = "one 2 GB"
_OURS = "dcp_tensorizer"
_UNVERIFIED = f"{_OURS}, verify=False"
_TORCH = "torch FileSystemReader"
_RESHARDS = {
    "rows, 4 -> 2": ([4, 0], [2, 0]),
    "rows, 2 -> 4": ([2, 0], [4, 0]),
    "rows -> columns, 2 -> 2": ([2, 0], [2, 1]),
}


def plan(folder: str, quick: bool) -> list[tuple[list[dict[str, Any]], int]]:
    base = {"scale": 0.1 if quick else 1.0, "warm": 6, "cold": 3, "folder": folder}
    whole = [{"format": f, "workload": w, "limits": f == _OURS, **base} for w in WORKLOADS for f in FORMATS]
    reshard = [
        {"loader": c, "workload": _MAIN, "reshard": name, "saved": saved, "loaded": loaded, **base}
        for name, (saved, loaded) in _RESHARDS.items()
        for c in (_OURS, _UNVERIFIED, _TORCH)
    ]
    return [(whole, 1 if quick else 3), (reshard, 1)]


def summarise(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in (result for result in results if "error" not in result):
        case = result["case"]
        if "reshard" in case:
            groups.setdefault(f"{case['loader']} | {case['workload']} | {case['reshard']}", []).append(result)
            continue
        (measured,) = result["ranks"]
        for name, load in measured["loads"].items():
            one = {"case": case, "bytes": measured["bytes"], "limits": measured["limits"], **load}
            groups.setdefault(f"{name} | {case['workload']} | whole", []).append(one)
    return {name: (_resharded if "reshard" in runs[0]["case"] else _whole)(runs) for name, runs in groups.items()}


def _resharded(runs: list[dict[str, Any]]) -> dict[str, Any]:
    ranks = [rank for run in runs for rank in run["ranks"]]
    return {
        "warm": spread(max(times) for run in runs for times in zip(*(r["warm"] for r in run["ranks"]), strict=True)),
        "moved / needed": sum(rank["moved"] for rank in ranks) / sum(rank["needed"] for rank in ranks),
        "bytes": sum(rank["needed"] for rank in ranks) / len(runs),
    }


def _whole(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "bytes": runs[0]["bytes"],
        "preadv": spread(seconds for run in runs for seconds in run["limits"]["warm"]),
        "direct": spread(seconds for run in runs for seconds in run["limits"]["cold"]),
        "intact": all(run["intact"] for run in runs),
        "warm": spread(seconds for run in runs for seconds in run["warm"]),
        "cold": spread(seconds for run in runs for seconds in run["cold"]),
        "peak": max(value for run in runs for value in run["peak_bytes"]),
    }


def render(summary: dict[str, dict[str, Any]]) -> str:
    parts = ["# Loading"]
    for workload in WORKLOADS:
        limits = summary.get(f"{_OURS} | {workload} | whole")
        if limits is None:
            continue

        def rate(seconds: float, size: float = limits["bytes"]) -> str:
            return f"{size / 1e9 / seconds:.2f}"

        rows = [
            ("*limit: parallel preadv*", cell(limits["preadv"], rate), "-", "-"),
            ("*limit: parallel O_DIRECT read*", "-", cell(limits["direct"], rate), "-"),
        ]
        for loader in _LOADERS:
            entry = summary.get(f"{loader} | {workload} | whole")
            if entry is not None:
                name = loader if entry["intact"] else f"{loader} (WRONG VALUES)"
                rows.append((name, cell(entry["warm"], rate), cell(entry["cold"], rate), f"{entry['peak'] / 1e6:,.0f}"))
        parts.append(
            f"## {workload}\n\n{table(('contender', 'warm GB/s', 'cold GB/s', 'peak MB beyond targets'), rows)}"
        )
    rows = []
    for name in _RESHARDS:
        for loader in (_OURS, _UNVERIFIED, _TORCH):
            entry = summary.get(f"{loader} | {_MAIN} | {name}")
            if entry is not None:
                moved = f"{entry['moved / needed']:.3f}" if entry["moved / needed"] else "not counted"
                speed = cell(entry["warm"], lambda v, size=entry["bytes"]: f"{size / 1e9 / v:.2f}")
                rows.append((name, loader, speed, moved))
    header = ("layout", "contender", "warm GB/s, all ranks", "moved / needed")
    parts.append(f"## Resharded, {_MAIN}\n\n{table(header, rows)}")
    return "\n\n".join(parts)


def ratios(summary: dict[str, dict[str, Any]]) -> list[tuple[str, str, str]]:
    def median(loader: str, figure: str, workload: str = _MAIN) -> float:
        entry = summary.get(f"{loader} | {workload} | whole", {}).get(figure)
        return entry["median"] if entry else float("nan")

    ours = median(_OURS, "warm")
    rows = [
        ("warm / torch FileSystemReader", ">= 3, or 80% of preadv", median(_TORCH, "warm") / ours),
        ("warm / TensorDeserializer", ">= 10, or 80% of preadv", median("TensorDeserializer", "warm") / ours),
        ("warm, verified / parallel preadv", ">= 0.80", median(_OURS, "preadv") / ours),
        ("warm, not verified / parallel preadv", "", median(_UNVERIFIED, "preadv") / median(_UNVERIFIED, "warm")),
        ("one 2 GB: warm, verified / parallel preadv", "", median(_OURS, "preadv", _ONE) / median(_OURS, "warm", _ONE)),
        ("warm: verified / not verified, seconds", "<= 1.10", ours / median(_UNVERIFIED, "warm")),
        (
            "one 2 GB, warm: verified / not verified, seconds",
            "",
            median(_OURS, "warm", _ONE) / median(_UNVERIFIED, "warm", _ONE),
        ),
        ("cold / raw O_DIRECT reads", ">= 0.90", median(_OURS, "direct") / median(_OURS, "cold")),
        ("cold, not verified / raw O_DIRECT reads", "", median(_UNVERIFIED, "direct") / median(_UNVERIFIED, "cold")),
        (
            "5,000 small, warm / torch FileSystemReader",
            ">= 3",
            median(_TORCH, "warm", "5,000 small") / median(_OURS, "warm", "5,000 small"),
        ),
    ]
    for name in _RESHARDS:
        columns = "<= 2, the enclosing range" if "columns" in name else None
        for loader, wanted in ((_OURS, columns or "<= 1.1"), (_UNVERIFIED, columns or "<= 1.02")):
            entry = summary.get(f"{loader} | {_MAIN} | {name}")
            if entry:
                rows.append((f"{name}, {loader}: moved / needed", wanted, entry["moved / needed"]))
    peak = max((s["peak"] for n, s in summary.items() if n.startswith(_OURS) and "peak" in s), default=float("nan"))
    rows.append(("peak memory beyond the targets, MiB", "<= 300", peak / 2**20))
    return [(name, wanted, f"{value:.3f}") for name, wanted, value in rows]


def plot(summary: dict[str, dict[str, Any]]) -> None:
    names = [n for n in _LOADERS if f"{n} | {_MAIN} | whole" in summary]
    size = summary[f"{_OURS} | {_MAIN} | whole"]["bytes"]
    limits = {"warm": "preadv", "cold": "direct"}
    figure, axes = plt.subplots(1, 2, figsize=(11, 0.45 * len(names) + 1.4), sharey=True)
    for axis, kind in zip(axes, ("warm", "cold"), strict=True):
        values = [size / 1e9 / summary[f"{n} | {_MAIN} | whole"][kind]["median"] for n in names]
        limit = size / 1e9 / summary[f"{_OURS} | {_MAIN} | whole"][limits[kind]]["median"]
        colors = ["#c2410c" if n.startswith(_OURS) else "#94a3b8" for n in names]
        axis.bar_label(axis.barh(names, values, color=colors), fmt="%.2f", padding=3)
        axis.axvline(limit, color="#0f172a", linestyle=":", linewidth=1)
        axis.set_title(f"{kind} load (GB/s); dotted: raw reads", fontsize=10)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(RESULTS / "load.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--main", action="store_true", help="only the main workload, on one rank")
    parser.add_argument("--rounds", type=int, help="instead of each group's own number")
    parser.add_argument("--folder", help="where to put checkpoints: on the file system to be measured", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd()) as folder:
        groups = plan(folder, options.quick)
        if options.main:
            groups = [([case for case in groups[0][0] if case["workload"] == _MAIN], groups[0][1])]
        results = [
            result
            for cases, rounds in groups
            for result in run_cases("benchmarks.load_case", cases, options.rounds or rounds)
        ]
    summary = summarise(results)
    text = f"{render(summary)}\n\n## Ratios of medians\n\n{table(('figure', 'wanted', 'measured'), ratios(summary))}"
    name = "load-quick" if options.quick else "load"
    store(name, {"machine": machine(), "ratios": ratios(summary), "summary": summary, "results": results}, text)
    if not options.quick:
        plot(summary)


if __name__ == "__main__":
    main()
