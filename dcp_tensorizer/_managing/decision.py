"""What all ranks do about a step: one small reduction, in each call of `save`."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from .agreement import Agreement

__all__ = ["Action", "Decision", "Vote", "decide"]


class Action(enum.Enum):
    """What is done about a step."""

    NOTHING = enum.auto()
    SAVE = enum.auto()
    JOIN = enum.auto()
    """It is being saved, or was saved last."""
    KEEP = enum.auto()
    """It was there already."""
    HOLD = enum.auto()
    """It is kept in memory alone: no save is due, or the save before it still runs."""


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
        must_write: It wants the step on storage, if it is due.
        is_busy: The save before still runs, and this step could be held in memory alone.
        is_due_in_memory: The step is to be held in memory, also if no save is due.
        has_failed: The newest state could not be kept in memory.
        ends: It keeps no states in memory any more.
        is_lost: * Another run has the folder now.
    """

    step: int
    stop: bool
    force: bool
    is_due: bool
    is_last: bool
    is_there: bool
    failures: int
    must_write: bool = False
    is_busy: bool = False
    is_due_in_memory: bool = False
    has_failed: bool = False
    ends: bool = False
    is_lost: bool = False


class Decision(NamedTuple):
    """What all ranks do, the same on each.

    Attributes:
        action: About the step.
        stopping: Any rank has been told to stop.
        failures: How many saves have failed in a row.
        has_failed, ends: As in a `Vote`, of any rank.
        is_due: A save is due, or was asked for.
        is_lost: Another run has the folder now.
    """

    action: Action
    stopping: bool
    failures: int
    has_failed: bool
    ends: bool
    is_due: bool
    is_lost: bool = False


def decide(agreement: Agreement, vote: Vote) -> Decision:
    """What is done.

    Raises:
        ValueError: the ranks are at different steps.
        WriteError: a rank is gone.
    """
    first = agreement.is_first
    known = (vote.is_due, vote.is_last, vote.is_there, vote.failures) if first else (0, 0, 0, 0)
    memory = vote.must_write, vote.is_busy, vote.is_due_in_memory, vote.has_failed, vote.ends
    wishes, lost = (vote.stop, vote.force, vote.step, -vote.step), int(first and vote.is_lost)
    numbers = agreement.largest(*wishes, *known, *memory, lost)
    stop, force, highest, lowest, is_due, is_last, is_there, failures = numbers[:8]
    must_write, is_busy, is_due_in_memory, has_failed, ends, is_lost = numbers[8:]
    if highest != -lowest:
        raise ValueError(f"the ranks save different steps, from {-lowest} to {highest}: all must be at the same")
    is_due = stop or force or is_due
    if not is_due:
        action = Action.HOLD if is_due_in_memory and not ends else Action.NOTHING
    elif is_last:
        action = Action.JOIN
    elif is_there:
        action = Action.KEEP
    else:
        action = Action.HOLD if is_busy and not (stop or force or must_write or ends) else Action.SAVE
    return Decision(action, bool(stop), failures, bool(has_failed), bool(ends), bool(is_due), bool(is_lost))
