"""The common parts of the pages of results: their heads, the goals, and the figures in which a peer was ahead."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .harness import Content, Spread, cell, compare, spread, table

LEGEND = (
    "A cell like `0.92 (0.85-1.05)` is a median, with the lowest and the highest value in brackets. "
    "Where two ranges overlap, this run does not show which of the two is faster. "
    "The ranges rest on few values. A gap between two of them is a strong hint, not a proof."
)
_RATIOS = (
    "Each figure is one median divided by another, unless a unit is named. In brackets is the least and the "
    'greatest ratio that the two ranges allow. "Not shown": {} between them. Without brackets, a figure rests on one '
    "value."
)
EXPLAINED = _RATIOS.format("the goal, or 1 where there is no goal, is")
_MEANINGS = {">=": "at least", "<=": "at most"}
_UNRECORDED = {"date": "the date", "commit": "the commit", "file_system": "the kind of disk"}


@dataclass(frozen=True)
class Comparison:
    case: str
    figure: str
    peer: str
    theirs: Spread | None
    name: str
    ours: Spread | None
    form: Callable[[float], str]
    more_is_better: bool = True


def round_count(results: Iterable[dict[str, Any]]) -> int:
    return len({result["round"] for result in results})


def machine_line(machine: dict[str, Any]) -> str:
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


def page(
    content: Content,
    title: str,
    what: str,
    how_often: str,
    again: str,
    *sections: str,
    spreads: bool = True,
) -> str:
    """Returns a page: its subject, machine, code, rounds and command, and then its sections.

    Args:
        how_often: In how many rounds.
        again: The name of a module of `benchmarks`, or a whole name with dots, and the options of its command line.
        sections: Tables and texts; empty ones are left out.
        spreads: Whether the page explains spreads.
    """
    name, *given = again.split()
    name = name if "." in name else f"benchmarks.{name}"
    head = facts(content["machine"], what, how_often, f"python -m {' '.join((name, *given))}")
    redraw = f"`python -m {name} --redraw` makes this page again from `{name.rpartition('.')[2]}.json`."
    head += f"\n- **Without measuring:** {redraw}"
    return "\n\n".join(filter(None, [f"# {title}", head, LEGEND if spreads else "", *sections]))


def facts(machine: dict[str, Any], what: str, how_often: str, again: str) -> str:
    packages = machine["packages"].items()
    versions = ", ".join(f"{package} {version}" for package, version in packages if version != "not installed")
    lines = (
        ("What", what),
        ("Machine and code", machine_line(machine)),
        ("Software", f"Python {machine['python']}, {versions}."),
        ("How often", how_often),
        ("Again", f"`{again}` measures it again."),
    )
    return "\n".join(f"- **{fact}:** {text}" for fact, text in lines)


def glossary(title: str, entries: dict[str, str]) -> str:
    return "\n".join([f"## {title}", "", *(f"- **{name}**: {text}" for name, text in entries.items())])


def ahead(comparisons: Iterable[Comparison], note: str = "") -> str:
    """Returns a table of the figures in which a peer's median is better."""
    rows = []
    for c in comparisons:
        if c.ours is None or c.theirs is None or c.form(c.ours["median"]) == c.form(c.theirs["median"]):
            continue
        if (c.theirs["median"] > c.ours["median"]) == c.more_is_better:
            clear = "yes" if compare(c.ours, c.theirs, c.more_is_better) == "ahead" else "not shown"
            rows.append((c.case, c.figure, c.peer, cell(c.theirs, c.form), c.name, cell(c.ours, c.form), clear))
    rows.sort(key=lambda row: row[-1] != "yes")
    header = ("case", "figure", "peer", "the peer", "this package", "its figure", "shown")
    text = "The peer's median is better in each of these. Where the two ranges overlap, that is not shown."
    shown = [text, table(header, rows)] if rows else ["No peer's median is better."]
    return "\n\n".join(filter(None, ["## Where a peer was ahead", *shown, note]))


Goal = tuple[str, str, "Spread | float | None"]
"""A figure's name, its goal (``>= 3``, ``<= 1``, or nothing), and the figure: a spread, or one number."""


def goals(rows: Iterable[Goal], note: str = "", form: Callable[[float], str] = "{:.3f}".format) -> str:
    """Returns a section with a table of ratios and other figures, and their goals.

    If the ranges leave open whether a goal is reached, the table has "not shown".
    """
    found = list(rows)
    if any(wanted for _, wanted, _ in found):
        title, text = "What the project wants, and what it got", EXPLAINED
    else:
        title, text = "Ratios", _RATIOS.format("1 is")
    return "\n\n".join(filter(None, [f"## {title}", text, goal_table(found, form), note]))


def goal_table(rows: Iterable[Goal], form: Callable[[float], str]) -> str:
    found = [(name, wanted, _spread_of(value)) for name, wanted, value in rows]
    if any(wanted for _, wanted, _ in found):
        wants = [(name, _in_words(goal), _one(value, form), _reached(goal, value, form)) for name, goal, value in found]
        return table(("figure", "wanted", "measured", "reached"), wants)
    ratios = [(name, _one(value, form), _reached("", value, form, yes="yes")) for name, _, value in found]
    return table(("ratio", "measured", "does it differ from 1?"), ratios)


def _one(value: Spread | None, form: Callable[[float], str]) -> str:
    is_one = value is not None and value["min"] == value["max"]
    return form(value["median"]) if is_one else cell(value, form)


def medians(rows: Iterable[Goal], form: Callable[[float], str] = "{:.3f}".format) -> list[tuple[str, str, str]]:
    values = ((name, wanted, _spread_of(value)) for name, wanted, value in rows)
    return [(name, wanted, form(found["median"]) if found else "nan") for name, wanted, found in values]


def _spread_of(value: Spread | float | None) -> Spread | None:
    return spread([value]) if isinstance(value, int | float) else value


def _in_words(wanted: str) -> str:
    for sign, words in _MEANINGS.items():
        wanted = wanted.replace(sign, words)
    return wanted or "-"


def _reached(wanted: str, value: Spread | None, form: Callable[[float], str], yes: str = "-") -> str:
    """Describes whether the median, and all values that the ranges allow, reach a goal.

    Without a goal: ``yes`` where the ranges show a difference.
    """
    if value is None:
        return "-"
    goal = re.fullmatch(r"(>=|<=) ([0-9.]+)", wanted)
    number = float(goal[2]) if goal else 1.0
    least, median, greatest = (float(form(value[name])) for name in ("min", "median", "max"))
    if least < number < greatest:
        return "not shown"
    if goal is None:
        return yes
    return "yes" if (median >= number if goal[1] == ">=" else median <= number) else "no"
