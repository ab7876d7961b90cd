"""The load benchmark: `python -m benchmarks.load` (about 10 minutes; `--quick` for a smaller one, not to be quoted)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import load_case
from .charts import Bar, Panel, draw
from .harness import QUICK, Content, Spread, cell, figure, quotient, rates, run, run_cases, spread, table
from .loaders import FORMATS
from .pages import Comparison, Goal, ahead, glossary, goals, machine_line, medians, page, round_count
from .workloads import TITLES, WORKLOADS

Summary = dict[str, dict[str, Any]]
_LOADERS = [name for _, loaders in FORMATS.values() for name in loaders]
_MAIN = "300 x 7 MB"
_ONE = "one 2 GB"
_OURS = "dcp_tensorizer"
_ENCRYPTED = f"{_OURS}, encrypted"
_PLANNED = f"{_OURS}, LoadPlanner"
_UNVERIFIED = f"{_OURS}, verify=False"
_PAST = f"{_OURS}, page_cache=False"
_TORCH = "torch FileSystemReader"
_RESHARDS = {
    "rows, 4 -> 2": ([4, 0], [2, 0]),
    "rows, 2 -> 4": ([2, 0], [4, 0]),
    "rows -> columns, 2 -> 2": ([2, 0], [2, 1]),
}


def plan(folder: Path, quick: bool) -> list[tuple[list[dict[str, Any]], int]]:
    base = {"scale": 0.1 if quick else 1.0, "warm": 5, "cold": 2, "folder": str(folder)}
    whole = [
        {"format": f, "workload": w, "limits": f == _OURS, **base}
        for w in WORKLOADS
        for f in FORMATS
        if w == _MAIN or f != _ENCRYPTED
    ]
    reshard = [
        {"loaders": loaders, "workload": _MAIN, "reshard": name, "saved": saved, "loaded": loaded, **base}
        for name, (saved, loaded) in _RESHARDS.items()
        for loaders in ([_OURS, _UNVERIFIED], [_TORCH])
    ]
    return [(whole, 1), (reshard, 1)]


def summarise(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in (result for result in results if "error" not in result):
        case = result["case"]
        if "reshard" in case:
            for loader in case["loaders"]:
                ranks = [rank[loader] for rank in result["ranks"]]
                groups.setdefault(f"{loader} | {case['workload']} | {case['reshard']}", []).append(
                    {**result, "ranks": ranks}
                )
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
        "through cache": spread(seconds for run in runs for seconds in run["limits"]["cold, cached"]),
        "intact": all(run["intact"] for run in runs),
        "warm": spread(seconds for run in runs for seconds in run["warm"]),
        "cold": spread(seconds for run in runs for seconds in run["cold"]),
        "cpu": spread(seconds for run in runs for seconds in run["cpu"]),
        "peak": max(value for run in runs for value in run["peak_bytes"]),
    }


def render(content: dict[str, Any]) -> str:
    summary, rounds = content["summary"], round_count(content["results"])
    return page(
        content,
        "Loading",
        _WHAT,
        _how_often(content["results"]),
        f"load --rounds {rounds}",
        "![Loading](load.png)",
        ahead(comparisons(summary), _AHEAD_NOTE),
        glossary("Who was measured", _WHO),
        glossary("What the columns mean", _COLUMNS),
        *_whole_cases(summary, _failures(content["results"])),
        *_resharded_cases(summary),
        goals(ratios(summary), _GOALS_NOTE),
    )


_WHAT = (
    "loads of a checkpoint from a local disk into tensors that exist already. Warm: the files are in the page cache. "
    "Cold: they are not, and the disk is read."
)
_AHEAD_NOTE = (
    "`safetensors` and `verify=False` do not check checksums. `dcp_tensorizer` checks all checksums. "
    "Memory is compared for the default only."
)
_WHO = {
    "dcp_tensorizer": "this package, with `dcp.load`. It checks all checksums.",
    "dcp_tensorizer, LoadPlanner": "the same, with this package's planner.",
    "dcp_tensorizer, verify=False": "the same as the first, without checking.",
    "dcp_tensorizer, page_cache=False": "the same as the first. What the page cache does not hold is read past it.",
    "dcp_tensorizer, encrypted": "the same, from an encrypted checkpoint.",
    "torch FileSystemReader": "`dcp.load` with torch's own reader.",
    "torch_checkpointing": "Meta's package, and a copy into the tensors where it makes new ones.",
    "TensorDeserializer": "tensorizer's own loader. It makes new tensors.",
    "TensorDeserializer, verified": "the same. It checks all checksums.",
    "safetensors load_file": "`load_file` and a copy into the tensors. It maps the file and checks nothing.",
}
_COLUMNS = {
    "warm, cold": "bytes of the tensors divided by the time of the load. More is better.",
    "peak memory": "the most memory that a load takes, beyond the tensors that it fills.",
    "raw reads, warm": "`preadv` of this package's files into the same memory, by 4 threads.",
    "raw reads, cold": "O_DIRECT reads of this package's files, by 4 threads. They are a yardstick and no ceiling: "
    "their speed varies within the run, and a loader that asks for more at once can be faster. This package does so.",
    "raw reads, through the page cache": "`preadv` of the same files, by 4 threads, when the cache holds nothing "
    "of them. It takes the kernel's time to fill the cache, as every load does that leaves the files there.",
    "bytes read": "bytes that all ranks read, divided by the bytes that they need. 1 is the least.",
}


def _how_often(results: list[dict[str, Any]]) -> str:
    rounds = round_count(results)
    case = results[0]["case"]
    return (
        f"{rounds} round{'s' * (rounds > 1)}. In it each loader has {case['warm']} warm and {case['cold']} cold loads, "
        "after one that is not measured. The loaders of one format take turns. The formats follow each other. So a "
        "change in the disk's speed from one format to the next can look like a difference between them."
    )


def _failures(results: list[dict[str, Any]]) -> dict[tuple[str, str], str]:
    cases = ((result["case"], result["error"]) for result in results if "error" in result)
    return {(case["format"], case["workload"]): error for case, error in cases if "format" in case}


def _whole_cases(summary: Summary, failures: dict[tuple[str, str], str]) -> list[str]:
    parts = []
    for workload in WORKLOADS:
        if not _is_measured(summary, workload):
            continue
        limits = summary.get(f"{_OURS} | {workload} | whole")
        preadv, direct, cached = (
            cell(rates(limits[kind], limits["bytes"]) if limits and kind in limits else None, _TWO)
            for kind in ("preadv", "direct", "through cache")
        )
        rows: list[tuple[str, ...]] = [
            ("*raw reads*", preadv, direct, "-"),
            ("*raw reads, through the page cache*", "-", cached, "-"),
        ]
        for format_name, (_, loaders) in FORMATS.items():
            error = failures.get((format_name, workload))
            rows += [_whole_row(name, summary.get(f"{name} | {workload} | whole"), error) for name in loaders]
        header = ("loader", "warm (GB/s)", "cold (GB/s)", "peak memory (MB)")
        parts += [f"## {TITLES[workload]}", table(header, rows)]
    return parts


def _is_measured(summary: Summary, workload: str) -> bool:
    return any(f"{name} | {workload} | whole" in summary for name in _LOADERS)


def _whole_row(name: str, entry: dict[str, Any] | None, error: str | None) -> tuple[str, ...]:
    if entry is None:
        return (name, f"failed: {error}" if error else "not measured", "-", "-")
    shown = name if entry["intact"] else f"{name} (WRONG VALUES)"
    warm, cold = (cell(rates(entry[kind], entry["bytes"]), _TWO) for kind in ("warm", "cold"))
    return (shown, warm, cold, f"{entry['peak'] / 1e6:,.0f}")


def _resharded_cases(summary: Summary) -> list[str]:
    rows = []
    for name in _RESHARDS:
        for loader in (_OURS, _UNVERIFIED, _TORCH):
            entry = summary.get(f"{loader} | {_MAIN} | {name}")
            if entry is not None:
                moved = f"{entry['moved / needed']:.3f}" if entry["moved / needed"] else "not counted"
                rows.append((_SPELLED[name], loader, cell(rates(entry["warm"], entry["bytes"]), _TWO), moved))
    header = ("saved and loaded as", "loader", "warm (GB/s, all ranks)", "bytes read")
    return [f"## Loaded onto other ranks than saved from: {TITLES[_MAIN]}", table(header, rows)] if rows else []


_TWO = "{:.2f}".format
_SPELLED = {
    "rows, 4 -> 2": "rows on 4 ranks, then rows on 2",
    "rows, 2 -> 4": "rows on 2 ranks, then rows on 4",
    "rows -> columns, 2 -> 2": "rows on 2 ranks, then columns on 2",
}


def comparisons(summary: Summary) -> list[Comparison]:
    """Compares each figure of each peer with this package's, verified and not."""
    peers = [name for name in _LOADERS if not name.startswith(_OURS)]
    found = []
    for workload in WORKLOADS:
        for peer in peers:
            theirs = summary.get(f"{peer} | {workload} | whole")
            for name in (_OURS, _PLANNED, _UNVERIFIED):
                ours = summary.get(f"{name} | {workload} | whole")
                if ours is not None and theirs is not None:
                    found += _compared(TITLES[workload].rsplit(",", 1)[0], peer, theirs, name, ours)
    for reshard, spelled in _SPELLED.items():
        ours, theirs = (summary.get(f"{name} | {_MAIN} | {reshard}") for name in (_OURS, _TORCH))
        if ours is not None and theirs is not None:
            values = (rates(entry["warm"], entry["bytes"]) for entry in (theirs, ours))
            found.append(Comparison(spelled, "warm (GB/s)", _TORCH, next(values), _OURS, next(values), _TWO))
    return found


def _compared(case: str, peer: str, theirs: dict[str, Any], name: str, ours: dict[str, Any]) -> list[Comparison]:
    def speed(entry: dict[str, Any], kind: str) -> dict[str, float] | None:
        return rates(entry[kind], entry["bytes"])

    found = [
        Comparison(case, f"{kind} (GB/s)", peer, speed(theirs, kind), name, speed(ours, kind), _TWO)
        for kind in ("warm", "cold")
    ]
    if name == _OURS:
        peaks = [spread([entry["peak"]]) for entry in (theirs, ours)]
        form = lambda nbytes: f"{nbytes / 1e6:,.0f}"  # noqa: E731
        found.append(Comparison(case, "peak memory (MB)", peer, peaks[0], name, peaks[1], form, more_is_better=False))
    return found


def ratios(summary: Summary) -> list[Goal]:
    def of(loader: str, what: str, workload: str = _MAIN) -> Spread | None:
        return figure(summary, f"{loader} | {workload} | whole", what)

    def over(loader: str, what: str, name: str, own: str, workload: str = _MAIN) -> Spread | None:
        return quotient(of(loader, what, workload), of(name, own, workload))

    small = "5,000 small"
    rows: list[Goal] = [
        ("warm speed / torch FileSystemReader's", ">= 3", over(_TORCH, "warm", _OURS, "warm")),
        ("warm speed / TensorDeserializer's", ">= 10", over("TensorDeserializer", "warm", _OURS, "warm")),
        ("warm speed / raw reads", ">= 0.85", over(_OURS, "preadv", _OURS, "warm")),
        ("warm speed, not verified / raw reads", "", over(_UNVERIFIED, "preadv", _UNVERIFIED, "warm")),
        ("one 2 GB: warm speed / raw reads", ">= 0.9", over(_OURS, "preadv", _OURS, "warm", _ONE)),
        ("time of a warm load, verified / not verified", "<= 1.10", over(_OURS, "warm", _UNVERIFIED, "warm")),
        (
            "one 2 GB: time of a warm load, verified / not verified",
            "",
            over(_OURS, "warm", _UNVERIFIED, "warm", _ONE),
        ),
        ("cold speed / raw reads", ">= 0.90", over(_OURS, "direct", _OURS, "cold")),
        ("cold speed / raw reads through the page cache", "", over(_OURS, "through cache", _OURS, "cold")),
        ("cold speed, not verified / raw reads", "", over(_UNVERIFIED, "direct", _UNVERIFIED, "cold")),
        ("cold speed, past the page cache / raw reads", ">= 0.90", over(_PAST, "direct", _PAST, "cold")),
        ("time of a cold load, through the page cache / past it", "<= 1", over(_OURS, "cold", _PAST, "cold")),
        ("CPU of a cold load, through the page cache / past it", "<= 1.5", over(_OURS, "cpu", _PAST, "cpu")),
        ("5,000 small: warm speed / torch FileSystemReader's", ">= 5", over(_TORCH, "warm", _OURS, "warm", small)),
        (
            "5,000 small: warm speed with `LoadPlanner` / torch FileSystemReader's",
            ">= 5",
            over(_TORCH, "warm", _PLANNED, "warm", small),
        ),
    ]
    for name in _RESHARDS:
        columns = "<= 2" if "columns" in name else None
        for loader, wanted in ((_OURS, columns or "<= 1.1"), (_UNVERIFIED, columns or "<= 1.02")):
            entry = summary.get(f"{loader} | {_MAIN} | {name}")
            if entry:
                rows.append((f"{_SPELLED[name]}; {loader}: bytes read / needed", wanted, entry["moved / needed"]))
    peaks = [entry["peak"] / 2**20 for name, entry in summary.items() if name.startswith(_OURS) and "peak" in entry]
    return [*rows, ("peak memory beyond the tensors, MiB", "<= 300", max(peaks, default=None))]


_GOALS_NOTE = (
    "The first two goals do not apply where a warm load has 85% of the speed of raw reads. Columns of a tensor that is "
    "stored in rows are read together with what lies between them. So half the columns cost twice their bytes."
)
_DRAWN = {
    "dcp_tensorizer, verify=False": "dcp_tensorizer, not verified",
    _PAST: "dcp_tensorizer, past the cache",
    "safetensors load_file": "safetensors",
}


def plot(content: dict[str, Any]) -> None:
    summary = content["summary"]
    failures = _failures(content["results"])
    titles = {w: TITLES[w].rsplit(",", 1)[0] for w in WORKLOADS if _is_measured(summary, w)}

    def panel(title: str, kind: str, limit: str, workload: str) -> Panel:
        entries = {n: summary.get(f"{n} | {workload} | whole") for n in _LOADERS}
        bars = []
        for n, entry in entries.items():
            error = next((failures.get((f, workload)) for f, (_, loaders) in FORMATS.items() if n in loaders), None)
            missing = f" failed: {error.rpartition(': ')[2]}" if error else " not measured"
            values = entry and rates(entry[kind], entry["bytes"])
            bars.append(Bar(_DRAWN.get(n, n), values, "ours" if n.startswith(_OURS) else "peer", missing))
        ours = entries[_OURS]
        return Panel(title, {"": bars}, _OURS, _TWO, band=ours and rates(ours[limit], ours["bytes"]))

    panels = [
        panel(f"{name.capitalize()}: {title}", name, limit, workload)
        for name, limit in (("warm", "preadv"), ("cold", "direct"))
        for workload, title in titles.items()
    ]
    cold = [panel.band for panel in panels[len(titles) :] if panel.band is not None]
    rounds, case = round_count(content["results"]), content["results"][0]["case"]
    low, high = (f"{edge:.2f}" for edge in _edges(cold))
    notes = [
        "Longer is better. Warm: the files are in the page cache. Cold: the disk is read. Peers are compared with "
        "dcp_tensorizer, which checks all checksums; safetensors checks none.",
        f"The raw reads are no ceiling. Their speed varies within the run: cold, it was {low} to {high} GB/s "
        "over the three workloads. They also ask the disk for 4 blocks at once, and dcp_tensorizer asks for more. So a "
        "load can be faster than they are.",
        f"Rounds: {rounds}, of {case['warm']} warm and {case['cold']} cold loads, one format after the other. These "
        "are few values: a gap between two ranges is a strong hint, not a proof. All figures, and loads onto other "
        "ranks: load.md.",
        f"Machine: {machine_line(content['machine'])}",
    ]
    draw("load", "Loading from a local disk, by one process (GB/s)", notes, panels, columns=len(titles), size=(11, 6.6))


def _edges(spreads: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    nothing = float("nan")
    lowest = min((values["min"] for values in spreads), default=nothing)
    return lowest, max((values["max"] for values in spreads), default=nothing)


def measure(options: argparse.Namespace, folder: Path) -> Content:
    groups = plan(folder, options.quick)
    if options.main:
        groups = [([case for case in groups[0][0] if case["workload"] == _MAIN], groups[0][1])]
    results = [r for cases, rounds in groups for r in run_cases(load_case.measure, cases, options.rounds or rounds)]
    summary = summarise(results)
    return {"ratios": medians(ratios(summary)), "summary": summary, "results": results}


OPTIONS = {
    "quick": QUICK,
    "main": {"action": "store_true", "help": "only the main workload, on one rank"},
    "rounds": {"type": int, "help": "instead of each group's own number"},
}

if __name__ == "__main__":
    run("load", measure, render, about=__doc__, options=OPTIONS, plot=plot)
