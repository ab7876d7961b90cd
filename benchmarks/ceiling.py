"""The engine's throughput without a disk: `python -m benchmarks.ceiling` (about 9 minutes).

Saves go to a storage that drops them, and loads come from the page cache and from tmpfs, so that no disk affects the
figures. Beside each figure are its limits, measured in the same process: a copy, CRC-32, XXH3 and bare reads.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import ceiling_case, dropped
from .harness import QUICK, Content, cell, quotient, rates, run, run_cases, scaled, spread, table, whole
from .pages import Goal, goals, page
from .workloads import CEILING

_OURS = "dcp_tensorizer"
_PLACES = ("page cache", "tmpfs")
_THREADS = (1, 2)
_COUNTED = {"300 x 7 MB": (20, 7 << 20), "20,000 small": (2000, 53_687)}
_WHAT = (
    "asynchronous saves to a storage that drops data files, and verified loads of files that are in memory, beside "
    "what limits them: copies, CRC-32, XXH3 and bare reads by as many threads. torch's data files are dropped, too. "
    "safetensors writes to `/dev/null` while training waits. All take turns in one process."
)


def measure(options: argparse.Namespace, folder: Path) -> Content:
    base = {"scale": 0.1 if options.quick else 1.0, "rounds": options.rounds, "folder": str(folder)}
    cases = [{"workload": workload, "threads": threads, **base} for workload in CEILING for threads in _THREADS]
    results = whole(run_cases(ceiling_case.measure, cases, 1))
    encodes = [{"count": count, "nbytes": size, "threads": 1, **base} for count, size in _COUNTED.values()]
    counted = whole(run_cases(ceiling_case.instructions, encodes, 1))
    passes = whole(run_cases(dropped.encode, encodes, 1))
    return {
        "rounds": options.rounds,
        "summary": {f"{r['case']['workload']} | {r['case']['threads']}": _summary(r["ranks"]) for r in results},
        "work": {
            name: {"count": count, "bytes": count * size, "instructions": one["ranks"], "passes": seen["ranks"]}
            for (name, (count, size)), one, seen in zip(_COUNTED.items(), counted, passes, strict=True)
        },
    }


def _summary(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the spread of every figure of every contender; ``limit`` is the sum of the limits of a save or a load."""
    found = measured["found"]
    seconds = {name: [turn["seconds"] for turn in turns] for name, turns in found.items()}
    summary: dict[str, Any] = {
        name: {figure: spread(turn[figure] for turn in turns) for figure in turns[0]} for name, turns in found.items()
    }
    saves = zip(seconds["copy"], seconds["crc32"], seconds["xxh3"], strict=True)
    summary["limit"] = {"save": spread(map(sum, saves))}
    for place in _PLACES:
        loads = zip(seconds[f"preadv, {place}"], seconds["xxh3"], strict=True)
        summary["limit"][place] = spread(map(sum, loads))
    return {"bytes": measured["bytes"], **summary}


def _goals(content: Content) -> Iterable[Goal]:
    for key, found in content["summary"].items():
        name, ours = _title(key), found[f"save: {_OURS}"]
        yield f"{name}: copy + CRC-32 + XXH3 / files written", ">= 0.9", quotient(found["limit"]["save"], ours["files"])
        yield f"{name}: stop / copy", "<= 1.1", quotient(ours["stage"], found["copy"]["seconds"])
        for place in _PLACES:
            load = found[f"load: {_OURS}, {place}"]["seconds"]
            yield f"{name}: preadv + XXH3 / load, {place}", ">= 0.9", quotient(found["limit"][place], load)
    for name, work in content["work"].items():
        yield f"{name}: bytes touched after staging, per byte of the files", "<= 3", sum(work["passes"])


def _title(key: str) -> str:
    workload, threads = key.split(" | ")
    return f"{workload}, {threads} thread{'s' if threads != '1' else ''}"


def _rows(found: Mapping[str, Any]) -> Iterable[tuple[str, ...]]:
    size = found["bytes"] / 1e9
    for name, figures in found.items():
        if name in ("bytes", "limit"):
            continue
        stop = cell(figures.get("stage"), _milliseconds)
        took, speed = (
            cell(figures["seconds"], _milliseconds),
            cell(rates(figures["seconds"], found["bytes"]), "{:.2f}".format),
        )
        yield name, stop, took, speed, cell(scaled(figures["cpu"], 1 / size), "{:.3f}".format)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def _work_rows(work: Mapping[str, Any]) -> Iterable[tuple[str, ...]]:
    for name, found in work.items():
        count = found["instructions"]
        counted = ("-", "-") if count is None else (f"{count / found['bytes']:.2f}", f"{count / found['count']:,.0f}")
        yield name, *(f"{passes:.2f}" for passes in found["passes"]), *counted


def render(content: Content) -> str:
    header = ("", "stop", "until it is over", "GB/s", "CPU s/GB")
    sections = [f"## {_title(key)}\n\n{table(header, _rows(found))}" for key, found in content["summary"].items()]
    touched = table(
        ("request", "read", "copied", "sent", "instructions per byte", "per tensor"), _work_rows(content["work"])
    )
    return page(
        content,
        "The engine without a disk",
        _WHAT,
        f"one process for each number of threads and each state, on as many cores; {content['rounds']} turns.",
        "ceiling",
        goals(_goals(content)),
        "## The writer process's work\n\nHow often a byte is touched between staging and the device: read from the "
        "staging buffer, copied into a part, sent from there. Instructions are counted by callgrind, with one thread: "
        f"noise does not move them.\n\n{touched}",
        *sections,
    )


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "quick": QUICK,
    "rounds": {"type": int, "default": 3, "help": "how many turns"},
}

if __name__ == "__main__":
    run("ceiling", measure, render, about=__doc__, options=OPTIONS)
