"""Quotes of results in other pages: `python -m benchmarks.quotes` updates them, as does each run of a benchmark.

A page marks what it quotes by ``<!-- measured: SOURCE -->``. Directly behind a figure the mark is for that figure; in a
line of its own it is for the table that follows. A test compares the pages with the stored results, so that no
page shows figures of another run.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

from . import compat, history
from .harness import RESULTS, figure, rates, stored, table
from .savers import BACKGROUND, CHECKPOINTING, OURS, OVERLAPPED, PLANNED, PROCESS, THREAD, UNPREPARED
from .workloads import MAIN

ROOT = Path(__file__).resolve().parents[1]
_TABLE = re.compile(r"^<!-- measured: (.+) -->\n+(?:\|.*\n)*\n*", re.MULTILINE)
_FIGURE = re.compile(r"[\d.,]*\d(<!-- measured: (.+?) -->)")
_THIS = "this package"
_PEERS = {
    THREAD: "torch `FileSystemWriter`, thread",
    PROCESS: "torch `FileSystemWriter`, process",
    CHECKPOINTING: "`torch_checkpointing`",
}
_OVERLAPPING = {
    OVERLAPPED: "this package, `overlap_staging=True`",
    BACKGROUND: "`torch_checkpointing`, in the background",
}
_DURING, _WAITS, _RUNS = "during the copy, training", "waits", "continues"
_UNPREPARED = {OURS: "dcp_tensorizer", OVERLAPPED: UNPREPARED}
_SECONDS = "{:.3f} s".format
_PERCENT = "{:.0%}".format
_ON_GPU = {
    "dcp_tensorizer": ("this package", _WAITS),
    "dcp_tensorizer, cold": ("this package, without `prewarm`", _WAITS),
    "dcp_tensorizer, device": ('this package, `staging="device"`', _WAITS),
    "torch_checkpointing, blocking": ("`torch_checkpointing`, pinned", _WAITS),
    "dcp_tensorizer, overlap": ("this package, `overlap_staging=True`", _RUNS),
    "torch DefaultStager": ("torch's `DefaultStager`, pinned, not blocking", _RUNS),
    "torch_checkpointing, background": ("`torch_checkpointing`, pinned, in the background", _RUNS),
}
_HEADLINES = {
    "save": {
        "stop, later saves / a copy in memory": "time that training waits / time of one plain copy of the same bytes",
        "speed to disk in training / torch, THREAD": "durable throughput / torch `FileSystemWriter` with a thread",
        "speed to disk in training / torch, PROCESS": "durable throughput / torch `FileSystemWriter` with a process",
        "speed to disk in training / torch_checkpointing": "durable throughput / `torch_checkpointing`",
    },
    "load": {
        "warm speed / torch FileSystemReader's": "verified load from the page cache / torch `FileSystemReader`",
    },
    "remote": {
        "direct: speed of a load / torch FsspecReader's": "verified load from a local S3 server / torch `FsspecReader`",
    },
    "scale": {
        "70B on 8,192 ranks, one rank's load: metadata read, MB": "a 70B model saved by 8,192 ranks: MB of metadata "
        "that a rank reads",
    },
}

Column = tuple[str, str, Callable[[float], str]]
"""The columns of a table of saves: title, figure of the summary, and form."""

_FIRST: Column = ("training waits for the first save", "first stall", "{:.2f} s".format)
_LATER: Column = ("training waits for each later save", "steady stall", _SECONDS)
_PAUSE: Column = ("longest extra pause between steps", "gap", lambda seconds: f"{seconds * 1e3:.0f} ms")
_LOOP: Column = ("speed of training during a save", "loop", _PERCENT)
_DURABLE: Column = ("durable throughput", "durable", "{:.2f} GB/s".format)
_CPU: Column = ("CPU time for each GB", "cpu per GB", "{:.2f} s".format)


def _medians(workload: str, ranks: int, savers: Mapping[str, str], columns: list[Column]) -> list[list[str]]:
    """Returns a row per saver, with "-" for what was not measured.

    First saves are those for which nothing was prepared, as for the peers.
    """
    summary = stored("save")["summary"]

    def shown(saver: str, what: str, form: Callable[[float], str]) -> str:
        name = f"{_UNPREPARED.get(saver, saver) if what == 'first stall' else saver} | {workload} | {ranks}"
        values = figure(summary, name, what)
        if what == "durable" and values is not None:
            values = rates(values, summary[name]["bytes"])
        return form(values["median"]) if values is not None else "-"

    return [[title, *(shown(saver, what, form) for _, what, form in columns)] for saver, title in savers.items()]


def _large_saves() -> str:
    columns = [_FIRST, _LATER, _LOOP, _DURABLE, _CPU]
    savers = {_WAITS: {OURS: _THIS} | _PEERS, _RUNS: _OVERLAPPING}
    rows = [[title, how, *cells] for how in savers for title, *cells in _medians(MAIN, 1, savers[how], columns)]
    return table(("", _DURING, *(title for title, *_ in columns)), rows)


def _saves_on_ranks() -> str:
    columns, savers = [_LATER, _LOOP, _DURABLE], {OURS: _THIS} | _PEERS
    rows = [[title, str(n), *cells] for n in (2, 4) for title, *cells in _medians(MAIN, n, savers, columns)]
    return table(("", "ranks", *(title for title, *_ in columns)), rows)


def _small_saves() -> str:
    columns = [_LATER, _PAUSE, _LOOP, _DURABLE, _CPU]
    savers = {PLANNED: "this package, `SavePlanner`", OURS: "this package, torch's planner"} | _PEERS
    return table(("", *(title for title, *_ in columns)), _medians("5,000 small", 1, savers, columns))


def _gpu(step: str, name: str, what: str) -> str:
    """Formats a median with three digits, and at most four decimals."""
    (values,) = (one["values"][what] for one in stored("gpu")["steps"][step] if one["name"] == name)
    return f"{float(f'{statistics.median(values):.3g}'):.4f}".rstrip("0").rstrip(".")


def _gpu_saves() -> str:
    figures = ("stall_s", "durable_s", "first_stall_s")
    rows = [
        [*words, *(_gpu("saving-4", f"{name} | 4 GB", what) for what in figures)] for name, words in _ON_GPU.items()
    ]
    titles = (_DURING, "training waits, s", "durable after, s", "training waits in the first save, s")
    return table(("", *titles), rows)


def _gpu_speeds() -> str:
    read = "in one process", "raw read+hash+send, 8 threads"
    speeds = {
        "one copy from the GPU to pinned memory": ("pinned-copy", "device to host"),
        "staging, 300 tensors": ("staging", "300 large"),
        "staging, 5,000 tensors of 215 kB": ("staging", "5,000 small"),
        "verified load from the page cache": ("loading", "dcp_tensorizer | page cache"),
        "load from the page cache, safetensors": ("loading", "safetensors | page cache"),
        "load from the page cache, fastsafetensors, no GPUDirect Storage": ("loading", "fastsafetensors | page cache"),
        "load from the page cache, InstantTensor": ("loading", "InstantTensor | page cache"),
        "bare reads, hashes and copies by eight threads": read,
    }
    rows = [[title, _gpu(*which, "gb_per_s")] for title, which in speeds.items()]
    return table(("", "GB/s"), [*rows, ["writes to the disk of that machine", _gpu("disk", "", "written_gb_per_s")]])


def _deltas() -> str:
    rates = stored("options")["cases"]["deltas"]["rates"]
    percent = [f"{rate['percent']['median']:.2f}%" for rate in rates]
    return table(
        ("learning rate", *(f"{rate['rate']:g}" for rate in rates)), [("bytes of a delta / of the weights", *percent)]
    )


def _headlines() -> str:
    rows = []
    for name, titles in _HEADLINES.items():
        ratios = {title: value for title, _, value in stored(name)["ratios"]}
        rows += [
            (words, ratios[title], f"[{name}.md](benchmarks/results/{name}.md)") for title, words in titles.items()
        ]
    read = figure(stored("scale")["summary"], "worlds | torch | 8192", "load", "read")
    assert read is not None
    rows.append(
        (
            "a 70B model saved by 8,192 ranks: MB of metadata that a rank reads with torch's reader",
            f"{read['median'] / 1e6:,.2f}",
            rows[-1][-1],
        )
    )
    return table(("figure", "measured", "from"), rows)


def _goals() -> str:
    rows = [
        (f"[{name}](../../benchmarks/results/{name}.md)", title, wanted, value)
        for name in ("save", "load", "remote", "scale", "options")
        for title, wanted, value in stored(name)["ratios"]
        if wanted.startswith((">=", "<="))
    ]
    return table(("page", "figure", "wanted", "measured"), rows)


_TABLES: dict[str, Callable[[], str]] = {
    "saves": _large_saves,
    "saves on several ranks": _saves_on_ranks,
    "saves of small tensors": _small_saves,
    "saves from a GPU": _gpu_saves,
    "speeds on a GPU": _gpu_speeds,
    "sizes of deltas": _deltas,
    "headlines": _headlines,
    "goals": _goals,
    "releases of Python and torch": lambda: compat.matrix(stored("compat")),
}


def _figure(source: str) -> str:
    """Returns a figure: ``soak: PART`` for rounds, ``gpu: STEP: NAME: VALUE``, or ``BENCHMARK: TITLE`` for a ratio."""
    name, _, what = source.partition(": ")
    if name == "gpu":
        return _gpu(*what.split(": "))
    content = stored(name)
    if name == "soak":
        return f"{content['parts'][what]['tally']['rounds']:,}"
    return str(next(value for title, _, value in content["ratios"] if title == what))


def written(text: str) -> str:
    text = _TABLE.sub(lambda mark: f"<!-- measured: {mark[1]} -->\n\n{_TABLES[mark[1]]()}\n\n", text)
    return _FIGURE.sub(lambda mark: f"{_figure(mark[2])}{mark[1]}", text)


def pages() -> dict[Path, str]:
    quoting = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {path: written(path.read_text(encoding="utf-8")) for path in quoting} | {
        RESULTS / "history.md": f"{history.render()}\n"
    }


def write() -> None:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
