"""What the pages of results have in common: how they begin, what was wanted, and where a peer was ahead."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .harness import cell, compare, table

_MEANINGS = {">=": "at least", "<=": "at most"}
_UNRECORDED = {"date": "the date", "commit": "the commit", "file_system": "the kind of disk"}


@dataclass(frozen=True)
class Comparison:
    """One figure of this package beside that of a peer, each as median, lowest and highest."""

    case: str
    figure: str
    peer: str
    theirs: dict[str, float] | None
    name: str
    ours: dict[str, float] | None
    form: Callable[[float], str]
    more_is_better: bool = True


def round_count(results: Iterable[dict[str, Any]]) -> int:
    """How many rounds there were."""
    return len({result["round"] for result in results})


def machine_line(machine: dict[str, Any]) -> str:
    """The machine in one line, and what is not known about it."""
    parts = [f"{machine['cores']} CPU cores", f"{machine['memory_gib']} GiB of memory"]
    if machine.get("file_system"):
        parts.append(f"file system {machine['file_system']}")
    parts.append(f"Linux {machine['kernel'].split('-')[0]}")
    parts += [f"{field} {machine[field]}" for field in ("commit", "date") if machine.get(field)]
    return f"{', '.join(parts)}. {_unrecorded(machine)}".strip()


def _unrecorded(machine: dict[str, Any]) -> str:
    missing = [words for field, words in _UNRECORDED.items() if not machine.get(field)]
    if not missing:
        return ""
    words = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
    return f"{words[0].upper()}{words[1:]} {'were' if len(missing) > 1 else 'was'} not recorded."


def opening(title: str, machine: dict[str, Any], what: str, how_often: str, again: str, spreads: bool = True) -> str:
    """What was measured, on what, with which code, how often, and how to do it again.

    ``again`` is the name of the benchmark's module, and what is to be said on its command line;
    ``spreads`` whether the page has any, to be explained.
    """
    name, packages = again.split()[0], machine["packages"].items()
    versions = ", ".join(f"{package} {version}" for package, version in packages if version != "not installed")
    facts = (
        ("What", what),
        ("Machine and code", machine_line(machine)),
        ("Software", f"Python {machine['python']}, {versions}."),
        ("How often", how_often),
        ("Again", f"`python -m benchmarks.{again}` measures it again."),
        ("Without measuring", f"`python -m benchmarks.{name} --redraw` makes this page again from `{name}.json`."),
    )
    legend = (
        "A cell like `0.92 (0.85-1.05)` is a median, with the lowest and the highest value in brackets. "
        "Where two ranges overlap, this run does not show which of the two is faster. "
        "The ranges rest on few values. A gap between two of them is a strong hint, not a proof."
    )
    lines = "\n".join(f"- **{fact}:** {text}" for fact, text in facts)
    return "\n\n".join([f"# {title}", lines, *([legend] if spreads else [])])


def glossary(title: str, entries: dict[str, str]) -> str:
    return "\n".join([f"## {title}", "", *(f"- **{name}**: {text}" for name, text in entries.items())])


def ahead(comparisons: Iterable[Comparison], note: str = "") -> str:
    """A table of what a peer's median is better in."""
    rows = []
    for c in comparisons:
        if c.ours is None or c.theirs is None or c.form(c.ours["median"]) == c.form(c.theirs["median"]):
            continue
        if (c.theirs["median"] > c.ours["median"]) == c.more_is_better:
            clear = "no" if compare(c.ours, c.theirs, c.more_is_better) == "ahead" else "yes"
            rows.append((c.case, c.figure, c.peer, cell(c.theirs, c.form), c.name, cell(c.ours, c.form), clear))
    rows.sort(key=lambda row: row[-1])
    header = ("case", "figure", "peer", "the peer", "this package", "its figure", "do the ranges overlap?")
    text = "The peer's median is better in each of these. The clear cases come first."
    shown = [text, table(header, rows)] if rows else ["No peer's median is better."]
    return "\n\n".join(filter(None, ["## Where a peer was ahead", *shown, note]))


def goals(rows: Iterable[Sequence[str]], note: str = "") -> str:
    """What the project wants of its medians, and what came out."""
    shown = [(name, _in_words(wanted), measured, _reached(wanted, measured)) for name, wanted, measured in rows]
    text = "Each figure is one median divided by another, unless a unit is named."
    content = table(("figure", "wanted", "measured", "reached"), shown)
    return "\n\n".join(filter(None, ["## What the project wants, and what it got", text, content, note]))


def _in_words(wanted: str) -> str:
    for sign, words in _MEANINGS.items():
        wanted = wanted.replace(sign, words)
    return wanted or "-"


def _reached(wanted: str, measured: str) -> str:
    goal = re.fullmatch(r"(>=|<=) ([0-9.]+)", wanted)
    if goal is None or measured == "nan":
        return "-"
    sign, number = goal[1], float(goal[2])
    return "yes" if (float(measured) >= number if sign == ">=" else float(measured) <= number) else "no"
