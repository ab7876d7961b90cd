"""What all ranks do about a step: one small reduction, in each call of `save`."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .agreement import Agreement

__all__ = ["Action", "Vote", "decide"]


class Action(enum.Enum):
    """What is done about a step."""

    NOTHING = enum.auto()
    SAVE = enum.auto()
    JOIN = enum.auto()
    """It is being saved, or was saved last."""
    KEEP = enum.auto()
    """It was there already."""


@dataclass(frozen=True, slots=True)
class Vote:
    """What one rank knows. Of what is marked with *, only what the first rank knows counts.

    Attributes:
        step: That it is at.
        stop: It has been told to stop.
        force: It wants to save, due or not.
        is_due: * A save is due.
        is_last: * The step is being saved, or was saved last.
        is_there: * The step is there.
        failures: * How many saves have failed in a row.
    """

    step: int
    stop: bool
    force: bool
    is_due: bool
    is_last: bool
    is_there: bool
    failures: int


def decide(agreement: Agreement, vote: Vote) -> tuple[Action, bool, int]:
    """What is done, the same on all ranks; whether any rank has been told to stop; and how many saves have failed.

    Raises:
        ValueError: the ranks are at different steps.
        WriteError: a rank is gone.
    """
    first = agreement.is_first
    known = (vote.is_due, vote.is_last, vote.is_there, vote.failures) if first else (0, 0, 0, 0)
    stop, force, highest, lowest, is_due, is_last, is_there, failures = agreement.largest(
        vote.stop, vote.force, vote.step, -vote.step, *known
    )
    if highest != -lowest:
        raise ValueError(f"the ranks save different steps, from {-lowest} to {highest}: all must be at the same")
    if not (stop or force or is_due):
        action = Action.NOTHING
    elif is_last:
        action = Action.JOIN
    else:
        action = Action.KEEP if is_there else Action.SAVE
    return action, bool(stop), failures
