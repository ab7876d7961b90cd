"""The page and the picture of the save benchmark."""

from __future__ import annotations

from typing import Any

from .charts import Bar, Panel, draw
from .harness import Spread, cell, figure, quotient, rates, scaled, table
from .pages import Comparison, Goal, ahead, glossary, goals, machine_line, page, round_count
from .save_case import BESIDE
from .savers import (
    BACKGROUND,
    CHECKPOINTING,
    ENCRYPTED,
    OURS,
    OVERLAPPED,
    PLANNED,
    PROCESS,
    SAVERS,
    THREAD,
    UNPREPARED,
)
from .workloads import MAIN, SETTINGS, TITLES

_PACKAGE = "dcp_tensorizer"
_RANKS = (1, 2, 4)
Summary = dict[str, dict[str, Any]]
_TWO = "{:.2f}".format


def render(content: dict[str, Any]) -> str:
    summary = content["summary"]
    return page(
        content,
        "Saving",
        _WHAT,
        _how_often(content["results"]),
        "save",
        "![Saving](save.png)",
        ahead(comparisons(summary), _AHEAD_NOTE),
        glossary("Who was measured", _WHO),
        glossary("What the columns mean", _COLUMNS),
        *_cases(summary),
        goals(ratios(summary), _GOALS_NOTE, _TWO),
    )


_WHAT = (
    "asynchronous saves of a model's tensors to a local disk. A stand-in for training runs meanwhile: a loop of small "
    "matrix products, or a pure Python loop where the title of a table names it. All ranks share the cores of one "
    "machine. Two peers save synchronously, for comparison."
)
_AHEAD_NOTE = (
    "`torch_checkpointing, background` is compared with `overlap_staging`. Peers were not prewarmed. So their first "
    "save is also compared with this package's without `prewarm()`. The memory of child processes is in the tables "
    "below. Peers without a child process need none."
)
_WHO = {
    "dcp_tensorizer": "this package, with `dcp.async_save`. Nothing is prepared before the first save.",
    OURS: "the same. `prewarm()` has made the staging buffer ready before the first save.",
    PLANNED: "the same, prewarmed, with this package's planner, as the manager has it. DCP's own makes objects of each "
    "tensor, and sends them to all ranks as a pickle.",
    ENCRYPTED: "the same, prewarmed and with a key.",
    OVERLAPPED: "the same, prewarmed. It copies the tensors while training continues.",
    UNPREPARED: "the same, not prewarmed. It also makes the staging buffer while training continues.",
    THREAD: "`dcp.async_save` with torch's own writer, in a thread.",
    PROCESS: "the same in a process, with torch's stager in shared memory.",
    CHECKPOINTING: "Meta's package. Training waits while it copies the tensors.",
    BACKGROUND: "the same. It copies the tensors while training continues.",
    "torch FileSystemWriter, dcp.save": "`dcp.save` with torch's own writer. Training waits for all of it.",
    "tensorizer alone": "tensorizer's own serializer with an fsync. Training waits for all of it.",
}
_COLUMNS = {
    "stop, first save": "how long the first save stops training. Peers make their buffers and processes in it.",
    "stop, later saves": "how long each later save stops training.",
    "speed to disk, training": "bytes divided by the time until a later save is durable. Training runs meanwhile.",
    "speed to disk, quiet": "the same while training does not run.",
    "training speed": "speed of training during a save, in percent of its speed by itself: the higher one of those in "
    "the half seconds before and after the save. More than 100% is noise.",
    "training lost": "seconds of training that a later save costs: its stop, and what training is slower by meanwhile.",
    "longest pause": "longest time between two steps during the save, less the longest one before.",
    "CPU": "CPU seconds for each GB saved, by trainer and child processes of all ranks.",
    "memory": "what the trainer holds after the last save and did not at the start, staged copies included; and the "
    "most that a child process held after a save.",
}
_LIMITS = {
    "copy": "copy in memory (GB/s)",
    "hashes, 1 core": "tensorizer's checksums, one core (GB/s)",
    "hashes, 2 cores": "tensorizer's checksums, two cores (GB/s)",
    "cipher": "encryption alone, all cores (GB/s)",
    "O_DIRECT write": "writing to the disk with O_DIRECT (GB/s)",
}
_GOALS_NOTE = (
    "Where a disk is the limit, no contender can be faster than it: there 0.9 of O_DIRECT writes is as good as the "
    "ratio to a peer. The speed of the disk varies within a run, so figures above 1 are possible."
)


def _later_saves(results: list[dict[str, Any]]) -> str:
    """Returns the number of saves of the main workload after the first one in a round, by the number of ranks."""
    cases = [result["case"] for result in results]
    ours = [case for case in cases if (case["saver"], case["workload"]) == (OURS, MAIN) and not case.get("memory")]
    counts = {case["ranks"]: case["saves"] - 1 for case in ours}
    return "later saves: " + ", ".join(f"{n} on {ranks} rank{'s' * (ranks > 1)}" for ranks, n in sorted(counts.items()))


def _how_often(results: list[dict[str, Any]]) -> str:
    rounds = round_count(results)
    quiet = results[0]["case"]["quiet"]
    return (
        f"{rounds} rounds of those that the wanted figures compare on one rank, and one of all others, in turns. In a "
        f"round each has a first save, later saves while training runs, and {quiet} saves without training "
        f"({_later_saves(results)}). Each rank gives one value."
    )


def _cases(summary: Summary) -> list[str]:
    parts = []
    for workload, setting in SETTINGS.items():
        for ranks in _RANKS:
            rows = [_row(n, s) for n, s in summary.items() if n.endswith(f"| {workload} | {ranks}") and "loop" in s]
            if rows:
                header = ("saver", *(title for title, *_ in _FIGURES), "memory: child (MB)")
                parts += [f"## {setting.title}; {ranks} rank{'s' * (ranks > 1)}", table(header, rows)]
                limits = summary.get(f"limits | {workload} | {ranks}")
                if limits is not None:
                    parts.append(_limits(limits))
    return parts


def _row(name: str, entry: dict[str, Any]) -> tuple[str, ...]:
    figures = (cell(_shown(entry, key), form) for _, key, form, _ in _FIGURES)
    return (name.split(" | ")[0], *figures, cell(entry["child bytes"], _megabytes))


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.0f}"


def _limits(limits: dict[str, Any]) -> str:
    rows = [(title, cell(rates(limits[key], limits["bytes"]), "{:.2f}".format)) for key, title in _LIMITS.items()]
    beside = ("training speed beside a process that keeps one core busy", cell(limits[BESIDE], "{:.0%}".format))
    return table(("what the machine itself did in the same run, in turns with the saves", ""), [*rows, beside])


def comparisons(summary: Summary) -> list[Comparison]:
    """Compares each figure of each peer with this package's, prewarmed and, if that differs, not prewarmed."""
    found = []
    for workload, setting in SETTINGS.items():
        for ranks in _RANKS:
            entries = {n: summary.get(f"{n} | {workload} | {ranks}") for n in SAVERS}
            case = f"{setting.title.rsplit(',', 1)[0]}; {ranks} rank{'s' * (ranks > 1)}"
            for peer, theirs in entries.items():
                if theirs is not None and not peer.startswith(_PACKAGE):
                    alike = OVERLAPPED if peer == BACKGROUND else OURS
                    found += _compared(case, peer, theirs, alike, entries[alike], _FIGURES)
                    unprepared = UNPREPARED if peer == BACKGROUND else _PACKAGE
                    found += _compared(case, peer, theirs, unprepared, entries[unprepared], _FIGURES[:1])
    return found


_FIGURES: tuple[tuple[str, str, Any, bool], ...] = (
    ("stop, first save (s)", "first stall", "{:.2f}".format, False),
    ("stop, later saves (s)", "steady stall", "{:.3f}".format, False),
    ("speed to disk, training (GB/s)", "durable", "{:.2f}".format, True),
    ("speed to disk, quiet (GB/s)", "durable, quiet", "{:.2f}".format, True),
    ("training speed", "loop", "{:.0%}".format, True),
    ("training lost (s)", "cost", "{:.2f}".format, False),
    ("longest pause (ms)", "gap", _milliseconds, False),
    ("CPU (s/GB)", "cpu per GB", "{:.2f}".format, False),
    ("memory: trainer (MB)", "trainer bytes", _megabytes, False),
)


def _compared(
    case: str, peer: str, theirs: dict[str, Any], name: str, ours: dict[str, Any] | None, figures: Any
) -> list[Comparison]:
    if ours is None:
        return []
    return [
        Comparison(case, title, peer, _shown(theirs, key), name, _shown(ours, key), form, more)
        for title, key, form, more in figures
    ]


def _shown(entry: dict[str, Any], key: str) -> dict[str, float] | None:
    """Returns a figure as pages and pictures show it: speeds instead of times until durable."""
    values: dict[str, float] | None = entry[key]
    return rates(values, entry["bytes"]) if key.startswith("durable") else values


def ratios(summary: Summary) -> list[Goal]:
    def of(name: str, what: str, workload: str = MAIN, ranks: int = 1) -> Spread | None:
        return figure(summary, f"{name} | {workload} | {ranks}", what)

    def over(name: str, what: str, other: str, workload: str = MAIN) -> Spread | None:
        return quotient(of(name, what, workload), of(OURS, other, workload))

    copy, stop, quiet = of("limits", "copy"), of(OURS, "steady stall"), of(OURS, "durable, quiet")
    small, encrypted = "5,000 small", of(ENCRYPTED, "durable, quiet")
    rows: list[Goal] = [
        ("speed to disk in training / O_DIRECT writes", ">= 0.85", over("limits", "O_DIRECT write", "durable")),
        *((f"speed to disk in training / {_SHORT[p]}", f">= {n}", over(p, "durable", "durable")) for p, n in _WANTED),
        ("CPU seconds for each GB, trainer and child process", "<= 0.3", of(OURS, "cpu per GB")),
        ("stop, later saves / a copy in memory", "<= 1.15", quotient(stop, copy)),
        ("stop, first save / a copy in memory", "<= 1.5", quotient(of(OURS, "first stall"), copy)),
        (
            "stop, first save, with overlap_staging, not prewarmed / torch_checkpointing, background",
            "<= 1",
            quotient(of(UNPREPARED, "first stall"), of(BACKGROUND, "first stall")),
        ),
        ("training speed in a save / before it", ">= 0.97", of(OURS, "loop")),
        ("training speed in a save / beside any busy core", "", quotient(of(OURS, "loop"), of("limits", BESIDE))),
        ("longest pause in a save beyond the one before it, ms", "<= 10", scaled(of(OURS, "gap"), 1e3)),
        ("encrypted: speed to disk, quiet / not encrypted", ">= 0.8", quotient(quiet, encrypted)),
        (
            "encrypted, where the cipher is the limit: seconds of a copy and the cipher alone / of a save, quiet",
            ">= 0.8",
            quotient(_sum(copy, of("limits", "cipher")), encrypted),
        ),
        (
            "5,000 small: stop, later saves / a copy in memory",
            "<= 1.1",
            quotient(of(OURS, "steady stall", small), of("limits", "copy", small)),
        ),
        ("5,000 small: training speed in a save / before it", "", of(OURS, "loop", small)),
        ("5,000 small, with SavePlanner: training speed in a save / before it", ">= 0.9", of(PLANNED, "loop", small)),
        ("5,000 small: speed to disk in training / torch, THREAD", ">= 3", over(THREAD, "durable", "durable", small)),
        ("tmpfs: speed, quiet / torch, THREAD", ">= 4", over(THREAD, "durable, quiet", "durable, quiet", "tmpfs")),
        (
            "1,000 tensors: durable after, beside a pure Python loop / without it",
            "<= 1.3",
            over(OURS, "durable", "durable, quiet", "python"),
        ),
        (
            "1,000 tensors beside a pure Python loop: speed to disk / torch, THREAD",
            ">= 10",
            over(THREAD, "durable", "durable", "python"),
        ),
    ]
    for ranks in _RANKS[1:]:
        for title, what, wanted in (("durable after", "durable", "<= 1"), ("training speed", "loop", ">= 1")):
            peers = [found for peer in _PEERS if (found := of(peer, what, MAIN, ranks)) is not None]
            best = (min if what == "durable" else max)(peers, key=lambda found: found["median"], default=None)
            rows.append(
                (f"{ranks} ranks: {title} / the best peer", wanted, quotient(of(OURS, what, MAIN, ranks), best))
            )
    memory = summary.get(f"memory | {MAIN} | 1", {})
    for name, limit in (("trainer", 64), ("child", 128)):
        entry = memory.get(name)
        title = f"{name}: peak memory beyond the start and the staging buffer, MB"
        rows.append((title, f"<= {limit}", entry and entry["peak"] / 1e6))
        rows.append((f"{name}: growth from the 5th to the 20th save, MB", "none", entry and entry["growth"] / 1e6))
    return rows


def _sum(one: Spread | None, other: Spread | None) -> Spread | None:
    return one and other and {name: value + other[name] for name, value in one.items()}


_PEERS = (THREAD, PROCESS, CHECKPOINTING)
_SHORT = {THREAD: "torch, THREAD", PROCESS: "torch, PROCESS", CHECKPOINTING: CHECKPOINTING}
_WANTED = ((THREAD, 2.5), (PROCESS, 2.5), (CHECKPOINTING, 2))
_DRAWN = {
    "dcp_tensorizer": "dcp_tensorizer",
    OURS: "dcp_tensorizer, prewarmed",
    PLANNED: PLANNED,
    ENCRYPTED: ENCRYPTED,
    OVERLAPPED: "dcp_tensorizer, overlap",
    UNPREPARED: "dcp_tensorizer, overlap, not prewarmed",
    THREAD: "torch, THREAD",
    PROCESS: "torch, PROCESS",
    CHECKPOINTING: "torch_checkpointing",
    BACKGROUND: "torch_checkpointing, backgr.",
    "torch FileSystemWriter, dcp.save": "torch, dcp.save (waits)",
    "tensorizer alone": "tensorizer (waits)",
}
_ASYNCHRONOUS = (OURS, OVERLAPPED, *(name for name in SAVERS if name.startswith("torch") and "dcp.save" not in name))


def plot(content: dict[str, Any]) -> None:
    summary, cores = content["summary"], content["machine"]["cores"]
    rounds = round_count(content["results"])
    later = _later_saves(content["results"])

    def bars(key: str, ranks: int, names: Any) -> list[Bar]:
        entries = ((n, summary.get(f"{n} | {MAIN} | {ranks}")) for n in names)
        kinds = {True: "ours", False: "peer"}
        return [Bar(_DRAWN[n], _shown(e, key), kinds[n.startswith(_PACKAGE)]) for n, e in entries if e is not None]

    def grouped(key: str) -> dict[str, list[Bar]]:
        groups = {f"{n} rank{'s' * (n > 1)} on {cores} cores": bars(key, n, _ASYNCHRONOUS) for n in _RANKS}
        return {title: found for title, found in groups.items() if found}

    panels = [
        Panel("First save: training stops (s)", {"": bars("first stall", 1, SAVERS)}, OURS, "{:.2f}".format, False),
        Panel(
            "Later saves: training stops (s)",
            {"": bars("steady stall", 1, SAVERS)},
            OURS,
            "{:.3f}".format,
            more_is_better=False,
            cut=1.2,
        ),
        Panel("Speed to disk while training (GB/s)", grouped("durable"), OURS, "{:.2f}".format),
        Panel("Training speed during the save", grouped("loop"), OURS, "{:.0%}".format),
    ]
    size = TITLES[MAIN].rsplit(", ", 1)
    notes = [
        "Peers are compared with dcp_tensorizer, prewarmed. No peer was prewarmed. Above: 1 rank, shorter is better; a "
        "triangle marks a bar that goes on. Below: longer is better. Speed to disk counts until a later save is "
        "durable. Training is a loop of small matrix products; its speed before the save is 100%. "
        f"{rounds} rounds, each with {later}. These are few values: a gap between two ranges is a strong hint, not a "
        "proof. All figures: save.md.",
        f"Machine: {machine_line(content['machine'])}",
    ]
    draw("save", f"Saving {size[1]} ({size[0]}) to a local disk", notes, panels, columns=2, size=(8, 8.8))
