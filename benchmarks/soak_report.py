"""The page of the soak, and the names of its faults."""

from __future__ import annotations

from typing import Any

from .harness import table
from .pages import opening

WORLD = 4
SURVIVED = ("none", "writer killed once")
FAILED = ("writer killed again and again", "data refused", ".metadata refused")
FATAL = ("one rank killed", "all ranks killed", "all ranks and writers killed")
HANG = 30.0


def render(content: dict[str, Any]) -> str:
    """The page of results."""
    tally, count = content["tally"], sum(content["tally"]["saves"].values())
    rows = [
        (_FAULTS[fault], str(tally["saves"].get(fault, 0)), str(tally["committed"].get(fault, 0)), expected)
        for faults, expected in (
            (SURVIVED, "the save is committed"),
            (FAILED, "the save fails on every rank; the checkpoint before it still loads"),
            (FATAL, "a new job loads the checkpoint before it, or the new one"),
        )
        for fault in faults
    ]
    counts = [(title, str(tally[name])) for name, title in _COUNTS.items()]
    growth = ", ".join(f"{name} {value:+d}" for name, value in sorted(tally["growth"].items()))
    seconds = f" The run took {content['seconds']:.0f} s." if "seconds" in content else ""
    how_often = f"{count} saves, one after the other. The longest took {tally['longest']:.1f} s.{seconds}"
    again = f"soak --saves {content['saves']} --seed {content['seed']}"
    return "\n\n".join(
        (
            opening("Saves with faults", content["machine"], _WHAT, how_often, again, spreads=False),
            "## Faults, and what became of the saves",
            table(("what happened during the save", "saves", "committed", "what must hold"), rows),
            "Faults come at random moments. A writer process that is killed again and again can be done with its save "
            "before. Then the save is committed on every rank.",
            "## What was checked",
            table(("", "count"), counts),
            f"Growth within a job, from its 5th save on: {growth or 'not recorded in this run'}.",
        )
    )


_WHAT = (
    f"whether a checkpoint is ever lost or wrong. Jobs of {WORLD} ranks save over one path again and again. Meanwhile "
    "processes are killed and files are refused, at random moments. After each save, and after each job that was "
    "killed, the checkpoint is loaded and compared bit for bit."
)
_FAULTS = {
    "none": "nothing",
    "writer killed once": "a writer process is killed once",
    "writer killed again and again": "a writer process is killed again and again",
    "data refused": "a data file is refused",
    ".metadata refused": "the `.metadata` file is refused",
    "one rank killed": "one rank is killed",
    "all ranks killed": "all ranks are killed",
    "all ranks and writers killed": "all ranks and writer processes are killed",
}
_COUNTS = {
    "loads": "loads",
    "wrong": "loads that were wrong",
    "lost": "committed checkpoints that were lost",
    "hangs": f"hangs of more than {HANG:g} s",
    "leaks": "processes or files left over",
}
