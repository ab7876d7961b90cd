"""The page of the scale benchmark."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..harness import cell, figure, table
from ..pages import Comparison, ahead, glossary, goals, page, round_count
from .model import Model, fitting, smaller
from .summary import EXCHANGED, OURS, PLANNED, TORCH, Summary, curve, exponent, ratios, sizes
from .watch import MOST_BYTES, MOST_SECONDS

Form = Callable[[float], str]
_TWO: Form = "{:.2f}".format
_MILLISECONDS: Form = lambda seconds: f"{seconds * 1e3:.1f}"  # noqa: E731
_MEGABYTES: Form = lambda nbytes: f"{nbytes / 1e6:,.2f}"  # noqa: E731
_COUNT: Form = "{:.0f}".format
_STALL: Form = "{:.3f}".format
Figure = tuple[str, tuple[str, ...], Form]
ITEMS: tuple[Figure, ...] = (
    ("stop (s)", ("stall",), _STALL),
    ("durable (s)", ("durable",), _TWO),
    ("durable, first save (s)", ("first save",), _TWO),
    ("longest pause (ms)", ("gap",), _MILLISECONDS),
    ("full collections", ("collections",), _COUNT),
    ("load (s)", ("load",), _TWO),
)
LOADS: tuple[Figure, ...] = (
    ("to the first byte (s)", ("load", "seconds"), _TWO),
    ("metadata read (MB)", ("load", "read"), _MEGABYTES),
    ("peak memory (MB)", ("load", "memory"), _MEGABYTES),
    ("files opened", ("load", "opened"), _COUNT),
)
SAVES: tuple[Figure, ...] = (
    ("coordinator, first save (s)", ("first", "coordinator"), _TWO),
    ("coordinator, repeated save (s)", ("repeat", "coordinator"), _TWO),
    ("each rank (ms)", ("first", "rank"), _MILLISECONDS),
    ("sent by each rank (MB)", ("first", "sent"), _MEGABYTES),
    ("broadcast by DCP (MB)", ("first", "broadcast"), _MEGABYTES),
)
RANKS: tuple[Figure, ...] = (("first save (s)", ("save",), _TWO), ("load (s)", ("load",), _TWO))
REPLICAS: tuple[Figure, ...] = (("load (s)", ("load",), _TWO), ("read / stored", ("read",), _TWO))
_CASES = {
    "items": "{:,} small tensors",
    "worlds": "{:,} simulated ranks",
    "ranks": "{:,} real ranks",
    "replicas": "{:,} ranks that load the same",
}
_FIGURES = {"items": ITEMS, "worlds": (*LOADS, *SAVES), "ranks": RANKS, "replicas": REPLICAS}


def render(content: dict[str, Any]) -> str:
    summary = content["summary"]
    return page(
        content,
        "Scale",
        _WHAT,
        _how_often(content),
        "scale --large",
        "![Scale](scale.png)" if content["plotted"] else "",
        goals(ratios(summary)),
        ahead(comparisons(summary)),
        glossary("Who was measured", _WHO),
        glossary("What the columns mean", _COLUMNS),
        "## Many small tensors on one rank",
        _table(summary, "items", "tensors", ITEMS),
        "## Simulated ranks",
        _scaling(summary),
        "### One rank's load",
        _table(summary, "worlds", "ranks", LOADS),
        "### Coordinating a save",
        _table(summary, "worlds", "ranks", SAVES),
        "### Exponents in ranks",
        _exponents(summary),
        "## Real ranks",
        _table(summary, "ranks", "ranks", RANKS),
        "## Ranks that load the same",
        _table(summary, "replicas", "ranks", REPLICAS),
        _failures(content["results"]),
    )


_WHAT = (
    "what many items and many ranks cost, beside moving bytes. Small tensors have 10 kB each. Real ranks have 128 MB "
    "in all. Simulated ranks have no data: one process goes through DCP's hooks, for one rank or for the coordinator. "
    f"A step that takes more than {MOST_SECONDS} s or {MOST_BYTES / 1e9:g} GB of memory is stopped."
)
_WHO = {
    OURS: "this package.",
    PLANNED: "this package with `SavePlanner` and `LoadPlanner`. The coordinator's time is with planning, which the "
    "others' is without.",
    EXCHANGED: "this package with `exchange=` of its reader.",
    TORCH: "torch's own `FileSystemWriter` and `FileSystemReader`.",
}
_COLUMNS = {
    "stop": "how long `async_save` stops training, in each save but the first.",
    "durable": "time from the call of `async_save` until the save is durable. The trainer computes nothing meanwhile.",
    "longest pause": "longest time that the trainer's main thread waits for Python's interpreter during the save. It "
    "asks for it each millisecond.",
    "full collections": "runs of Python's garbage collector over all objects, during the save.",
    "to the first byte": "time on one rank from `read_metadata` until the first data file is opened. Tensors are "
    "sharded as they were saved. Collectives are not in it.",
    "metadata read, peak memory": "bytes that the process reads in that time, and memory beyond what it had before.",
    "files opened": "in that time, without the data file.",
    "coordinator": "time to decode the results of all ranks, and to commit the save.",
    "each rank": "time to make its results, and to encode them.",
    "broadcast by DCP": "size of the metadata that DCP sends to all ranks after the commit.",
    "read / stored": "bytes that a local S3 server sends to all ranks, over those of the state, which is 128 MB.",
    "first save (real ranks)": "time of the slowest rank from making the writer until the save is durable.",
}


def _how_often(content: dict[str, Any]) -> str:
    rounds = {kind: round_count(r for r in content["results"] if r["case"]["kind"] == kind) for kind in _CASES}
    shown = "; ".join(f"{kind} {rounds[kind]} (of {when})" for kind, when in sorted(content["measured"].items()))
    return f"rounds: {shown}. Each is in fresh processes. Coordinating a save is measured once for each world."


def _scaling(summary: Summary) -> str:
    full = Model()
    text = (
        f"A state like that of Llama 3 70B with Adam: {len(full.tensors()):,} tensors of float32, sharded by rows over "
        f"all ranks, and {len(full.scalars())} scalars and {len(full.objects())} objects that all ranks have. One "
        "process cannot hold all chunks of more ranks. So there two models of fewer layers are measured. Times and "
        "bytes of 80 layers are on the line through those of the two."
    )
    rows = []
    for ranks in sizes(summary, "worlds"):
        model = fitting(ranks)
        tensors = len(model.tensors())
        few = smaller(model)
        rows.append(
            (
                f"{ranks:,}",
                str(model.layers),
                f"{tensors:,}",
                f"{tensors * ranks:,}",
                "-" if few is None else str(few.layers),
            )
        )
    return f"{text}\n\n{table(('ranks', 'layers', 'tensors', 'chunks', 'layers of the other model'), rows)}"


def _table(summary: Summary, kind: str, size: str, figures: tuple[Figure, ...]) -> str:
    rows = []
    for number in sizes(summary, kind):
        for contender in (OURS, PLANNED, EXCHANGED, TORCH):
            entry = summary.get(f"{kind} | {contender} | {number}")
            if entry is not None:
                cells = (_cell(entry, path, form) for _, path, form in figures)
                rows.append((f"{number:,}", contender, *cells))
    return table((size, "storage", *(title for title, _, _ in figures)), rows) if rows else "Not measured."


def _cell(entry: dict[str, Any], path: tuple[str, ...], form: Form) -> str:
    found = figure(entry, *path)
    stopped = entry.get("stopped")
    reason = stopped.get(path[0]) if isinstance(stopped, dict) else stopped
    return f"stopped: {reason}" if found is None and reason else cell(found, form)


def _exponents(summary: Summary) -> str:
    text = "The slope of each figure on log axes, by least squares over all worlds: 0 is constant, 1 is proportional."
    rows = []
    for title, path, _ in (*LOADS, *SAVES):
        slopes = (exponent(curve(summary, "worlds", contender, *path)) for contender in (OURS, PLANNED, TORCH))
        rows.append((title, *("-" if math.isnan(slope) else f"{slope:.2f}" for slope in slopes)))
    return f"{text}\n\n{table(('figure', OURS, PLANNED, TORCH), rows)}"


def comparisons(summary: Summary) -> list[Comparison]:
    found = []
    for kind, figures in _FIGURES.items():
        for size in sizes(summary, kind):
            ours, theirs = (summary.get(f"{kind} | {contender} | {size}") for contender in (OURS, TORCH))
            for title, path, form in figures:
                values = figure(theirs or {}, *path), figure(ours or {}, *path)
                case = _CASES[kind].format(size)
                found.append(Comparison(case, title, TORCH, values[0], OURS, values[1], form, more_is_better=False))
    return found


def _failures(results: list[dict[str, Any]]) -> str:
    failed = [(r["case"], r["error"]) for r in results if "error" in r]
    rows = [(case["kind"], case["contender"], f"{case['size']:,}", error) for case, error in failed]
    return f"## Failed\n\n{table(('case', 'storage', 'size', 'error'), rows)}" if rows else ""
