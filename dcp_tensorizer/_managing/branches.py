"""Which checkpoints belong together: a job that goes back to an earlier one begins a branch.

A branch is known by all that led to it: the name of each branch on the way, and the step at which it left the one
before. So checkpoints in between may be gone. What was saved without a manager is on the `TRUNK`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

__all__ = ["TRUNK", "Branch", "Saved", "belongs", "current_branch", "leave", "members"]

Branch = tuple[tuple[str, int], ...]
TRUNK: Branch = (("", 0),)


class Saved(Protocol):
    """What is to be known of a checkpoint here; ``saved_at`` in any unit."""

    @property
    def number(self) -> int: ...
    @property
    def branch(self) -> Branch: ...
    @property
    def saved_at(self) -> int: ...


_Saved = TypeVar("_Saved", bound=Saved)


def leave(at: Saved | None) -> Branch:
    """A new branch, which begins at a checkpoint, or with nothing."""
    name = uuid.uuid4().hex
    return ((name, 0),) if at is None else (*at.branch, (name, at.number))


def belongs(saved: Saved, branch: Branch) -> bool:
    """Whether a checkpoint is on a branch, or on one of those that led to it, from before that was left."""
    own = saved.branch[-1][0]
    for (name, _), following in zip(branch, (*branch[1:], None), strict=True):
        if name == own:
            return following is None or saved.number <= following[1]
    return False


def members(steps: Iterable[_Saved], branch: Branch) -> list[_Saved]:
    """The checkpoints of a branch, lowest step first."""
    return sorted((saved for saved in steps if belongs(saved, branch)), key=lambda saved: saved.number)


def current_branch(steps: Sequence[Saved]) -> Branch | None:
    """The branch that a job was on last; None if there are no checkpoints.

    One that was left is never it, whatever the clocks say. Of the others it is that of the last save.
    """
    left = {name for saved in steps for name, _ in saved.branch[:-1]}
    ends = [saved for saved in steps if saved.branch[-1][0] not in left]
    last = max(ends, key=lambda saved: (saved.saved_at, saved.number), default=None)
    return None if last is None else last.branch
