"""The deliberate differences between torch's own storage and ours, each with what tells that it is the one.

``docs/compatibility.md`` has the same list, with the reasons, under "Where we differ from torch's own storage".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .describe import Difference, Failed, differences
from .run import Case, Load

__all__ = ["DIFFERENCES", "Verdict", "judge"]

Holds = Callable[[Case, Difference], bool]


class Verdict:
    """What became of the differences of a case: the names of those that are explained, and the rest."""

    def __init__(self) -> None:
        self.explained: set[str] = set()
        self.unexplained: list[Difference] = []


def judge(case: Case, theirs: Any, ours: Any, saved_synchronously: Callable[[], Any]) -> Verdict:
    """Explains the differences of a case.

    Args:
        theirs: What torch's storage made of it.
        ours: What ours made of it.
        saved_synchronously: What torch's storage makes of it by ``dcp.save``, for cases that save in another way.
    """
    verdict = Verdict()
    left = _explain(case, _causes_first(case, differences(theirs, ours)), verdict)
    if left and case.mode not in ("save", "threads"):
        # torch's staging may have lost something: then what is saved without staging is what counts, at these places.
        again = _causes_first(case, differences(saved_synchronously(), ours))
        still = [d for d in again if any(_is_within(d.path, at.path) or _is_within(at.path, d.path) for at in left)]
        if {d.path for d in still} != {d.path for d in left}:
            verdict.explained.add(STAGING)
            left = _explain(case, still, verdict)
    verdict.unexplained = left
    return verdict


def _explain(case: Case, found: list[Difference], verdict: Verdict) -> list[Difference]:
    left = []
    for difference in found:
        name = next((name for name, holds in DIFFERENCES.items() if holds(case, difference)), None)
        if name is None:
            left.append(difference)
        else:
            verdict.explained.add(name)
    return left


def _causes_first(case: Case, found: list[Difference]) -> list[Difference]:
    """Leaves out what follows from another difference: where one of two saves failed, there is nothing to load."""
    failed = {
        case.path_of(d.path[2] if len(d.path) > 2 else 0)
        for d in found
        if d.path[0] == "saves" and isinstance(d.theirs, Failed) != isinstance(d.ours, Failed)
    }
    return [d for d in found if d.path[0] == "saves" or _path_of(case, d) not in failed]


def _is_within(path: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return path[: len(other)] == other


def _path_of(case: Case, difference: Difference) -> int:
    kind, number = difference.path[:2]
    return case.loads[number].path if kind == "loads" else number


# --- what tells them apart -------------------------------------------------------------------------------------------


def _load(case: Case, difference: Difference) -> Load | None:
    return case.loads[difference.path[1]] if difference.path[0] == "loads" else None


def _ours_fails(difference: Difference, *words: str) -> bool:
    ours = difference.ours
    return isinstance(ours, Failed) and not isinstance(difference.theirs, Failed) and any(w in ours.what for w in words)


def _theirs_fails(difference: Difference, *words: str) -> bool:
    theirs = difference.theirs
    return isinstance(theirs, Failed) and not isinstance(difference.ours, Failed) and any(w in theirs.what for w in words)


def _is_storage_data(case: Case, difference: Difference) -> bool:
    return "storage_data" in difference.path and difference.path[0] in ("saves", "metadata")


def _is_kind_of_checkpoint_id(case: Case, difference: Difference) -> bool:
    return difference.path[-2:] == ("checkpoint_id", 0)


def _is_untrusted(case: Case, difference: Difference) -> bool:
    load = _load(case, difference)
    return load is not None and not load.trusted and _ours_fails(difference, "UntrustedObject")


def _lost_the_save(case: Case, difference: Difference) -> bool:
    load = _load(case, difference)
    return load is not None and load.ranks > 1 and _ours_fails(difference, "dropped the storage_data of the plan")


STAGING = "staging of torch"
DIFFERENCES: dict[str, Holds] = {
    "storage_data": _is_storage_data,
    "checkpoint_id": _is_kind_of_checkpoint_id,
    "objects that need trust": _is_untrusted,
    "plans that do not say which save": _lost_the_save,
    STAGING: lambda case, difference: False,  # `judge` finds it
}
