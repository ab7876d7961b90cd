"""The page of the soak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness import table
from benchmarks.pages import page

from .tally import HANG, Part

__all__ = ["render"]

_WHAT = (
    "whether a checkpoint is ever lost or wrong, whatever happens while it is saved, collected, converted, copied or "
    "loaded. What happens, and when, follows from the seed as far as the machine's own timing lets it."
)
_BAD = ("lost", "wrong", "hung", "left")


def render(content: dict[str, Any], parts: Mapping[str, Part]) -> str:
    """The page of results: the sums of all parts, and a section for each."""
    done = {name: content["parts"][name] for name in parts if name in content["parts"]}
    sections = [_section(parts[name], ran) for name, ran in done.items()]
    how_often = ", ".join(f"{ran['tally']['rounds']:,} {parts[name].unit}" for name, ran in done.items())
    parts_of_page = ("## All parts", _summary(done, parts), _LEGEND, *sections)
    return page(content, "Saves with faults", _WHAT, f"{how_often}.", "tests.soak", *parts_of_page, spreads=False)


def _summary(done: dict[str, Any], parts: Mapping[str, Part]) -> str:
    rows = [
        [
            *(parts[name].title, f"{ran['tally']['rounds']:,} {parts[name].unit}"),
            *(f"{ran['tally'][bad]:,}" for bad in _BAD),
            *(f"{ran['seconds'] / 60:.1f}", str(ran["seed"]), str(ran["commit"])),
        ]
        for name, ran in done.items()
    ]
    sums = [f"{sum(ran['tally'][bad] for ran in done.values()):,}" for bad in _BAD]
    rows.append(["all", "", *sums, f"{sum(ran['seconds'] for ran in done.values()) / 60:.1f}", "", ""])
    return table(("part", "how often", "lost", "wrong", "hung", "left over", "minutes", "seed", "commit"), rows)


_LEGEND = (
    "Lost: a checkpoint that a save had reported as committed, and that nothing was allowed to remove, was not there. "
    "Wrong: what was loaded was not what was saved, or something failed that has to succeed. "
    f"Hung: it had not ended after {HANG:g} s. Left over: files or processes at the end that belong to nothing."
)


def _section(part: Part, ran: dict[str, Any]) -> str:
    tally = ran["tally"]
    texts = [f"## {part.title}", part.what]
    if tally["table"]:
        texts.append(table(tally["table"][0], tally["table"][1:]))
    if tally["counts"]:
        texts.append(table(("", "count"), [(name, f"{number:,}") for name, number in sorted(tally["counts"].items())]))
    if tally["found"]:
        texts.append("\n".join(f"- {words}" for words in tally["found"]))
    return "\n\n".join(texts)
