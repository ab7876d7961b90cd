"""What the directories of checkpoints are: steps of a job, or the parts of one checkpoint.

Ranks and models have numbers as steps have, often with the same keys. So no number is taken for a step by itself: the
name must say so more strongly than the directory around it does. What says it no more strongly may be a part of it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .listing import Folder, Listed

__all__ = ["Group", "Unit", "arrange"]

_NUMBER = re.compile(r"\d+")
_STEP = re.compile(r"(?:step|iter|iteration|epoch|checkpoint|ckpt)[-_=. ]*\d", re.IGNORECASE)
_PART = re.compile(
    r"(?:^|[^a-z])(?:rank|shard|part|worker|node|host|gpu|device|process|replica|stage|expert|layer)[-_=. ]*\d",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Unit:
    """A directory that is one checkpoint: it holds one, or the parts of one."""

    folder: Folder

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def parts(self) -> list[Listed]:
        return self.folder.checkpoints

    @property
    def committed(self) -> bool:
        return all(part.state == "committed" for part in self.parts)

    @property
    def contents(self) -> int | None:
        return hash(frozenset(part.contents for part in self.parts)) if self.committed else None

    @property
    def saved(self) -> float:
        return max(part.saved or 0.0 for part in self.parts)

    @property
    def ranks(self) -> int:
        """How many ranks have committed, where each saves for itself."""
        return min(part.parts for part in self.parts)

    @property
    def has_number(self) -> bool:
        return bool(_numbers(self.name))

    @property
    def step(self) -> int:
        return int(_numbers(self.name)[-1])


@dataclass(frozen=True, slots=True)
class Group:
    """The checkpoints in one directory; ``objection``: why none of them may be removed as an old step."""

    units: list[Unit]
    objection: str


def arrange(top: Folder) -> list[Group]:
    """The checkpoints below a directory that somebody has named, directory by directory."""
    return _arrange(top, None)[1]


def _arrange(folder: Folder, outer: int | None) -> tuple[Unit | None, list[Group]]:
    """What a directory is: one checkpoint; or checkpoints by directory.

    Args:
        folder: The directory.
        outer: How strongly those around it say that they are steps; None for the one that was named.
    """
    if folder.listed is not None:
        return Unit(folder), []
    own = _claim(folder.name)
    around = max(0, own - 1) if outer is None else max(own, outer)  # who names it says that it holds steps
    units: list[Unit] = []
    groups: list[Group] = []
    for child in folder.folders:
        unit, below = _arrange(child, around)
        units += [] if unit is None else [unit]
        groups += below
    arrangement = _arrangement(units, around)
    if arrangement == "parts" and outer is not None and not groups:
        return Unit(folder), []
    objection = "" if arrangement == "steps" else f"{folder.storage.path} may hold the parts of one checkpoint"
    return None, [*groups, Group(units, objection)] if units else groups


def _arrangement(units: Sequence[Unit], around: int) -> Literal["steps", "parts", "unknown"]:
    """Whether the checkpoints in a directory are ``steps`` of one job, or ``parts`` of one checkpoint; or ``unknown``.

    Accelerate saves ``pytorch_model_fsdp_0`` and ``optimizer_0``: the same numbers under each name, each of other
    contents. The names of steps differ by a number alone, and their contents are the same, but for a step or so.
    """
    by_name = defaultdict(list)
    for unit in units:
        by_name[_NUMBER.sub("#", unit.name)].append(unit)
    if len(by_name) > 1 and len({frozenset(_numbers(unit.name) for unit in group) for group in by_name.values()}) == 1:
        return "unknown" if _some_are_alike(units) else "parts"
    numbered = [group for name, group in by_name.items() if "#" in name]
    is_one_kind = len(numbered) == 1 and (len(units) == 1 or _some_are_alike(numbered[0]))
    return "steps" if is_one_kind and _say_steps(numbered[0], around) else "unknown"


def _some_are_alike(units: Sequence[Unit]) -> bool:
    known = [unit.contents for unit in units if unit.committed]
    return len(set(known)) < len(known)


def _say_steps(units: Sequence[Unit], around: int) -> bool:
    """Whether checkpoints of one name are steps, by that name."""
    claim = _claim(units[0].name)
    # Runs are made of several checkpoints, too: ``run-1`` with a model and an optimizer in it.
    return claim > around and (claim > 1 or all(unit.folder.listed is not None for unit in units))


def _claim(name: str) -> int:
    """How strongly a name says that it is of a step: ``step-10`` 3, ``10`` 2, ``model-10`` 1, ``rank-10`` 0."""
    if _PART.search(name) or not _NUMBER.search(name):
        return 0
    if _STEP.search(name):
        return 3
    return 2 if name.isdecimal() else 1


def _numbers(name: str) -> tuple[str, ...]:
    return tuple(_NUMBER.findall(name))
