"""The place of a job among the checkpoints of a folder: its branch, and which checkpoints are of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .._index.schema import SaveRecord
from .._storage.base import Storage
from ..errors import MetadataError, NotCommitted
from .retention import clean_up
from .step_folder import TRUNK, Branch, Step, StepNames, belongs, current_branch, leave, members, others, read_steps

logger = logging.getLogger("dcp_tensorizer")

_SHOWN = 5


@dataclass(slots=True)
class Place:
    """The place of a job.

    Attributes:
        branch: That it is on.
        tip: The checkpoint that it goes on from; None if there is none, or it is not known.
        numbers: The steps of the branch that are there.
        names: Of the directories of all steps, whatever branch they are on.
        others: The names of those of other branches.
        left: The newest checkpoint, if the job has gone back to before it, and has saved nothing since.
        step: The step that the job has come to: in `save` last, or by what it has restored; -1 before the first.
    """

    branch: Branch
    tip: Step | None
    numbers: set[int]
    names: dict[int, str]
    others: list[str]
    left: Step | None
    step: int = -1

    @classmethod
    def at(cls, branch: Branch, tip: Step | None, steps: Sequence[Step], step: int = -1) -> Place:
        """On a branch, among all checkpoints of a folder."""
        newest = newest_of(steps)
        left = None if newest is None or belongs(newest, branch) else newest
        numbers = {other.number for other in members(sound(steps), branch)}
        others = [other.name for other in steps if other.number not in numbers]
        names = {other.number: other.name for other in steps}
        return cls(branch, tip, numbers, names, others, left, step)

    def begin_anew(self, branch: Branch) -> None:
        """The job goes on from something else than its last checkpoint, and nobody knows from what: on a new branch."""
        self.others = sorted(set(self.others) | {name for step, name in self.names.items() if step in self.numbers})
        self.branch, self.tip, self.numbers, self.left = branch, None, set(), self.tip or self.left

    def advance(self, saved: Step | None) -> None:
        """The last save is over; None if it failed."""
        if saved is not None:
            self.tip, self.left = saved, None
            self.numbers.add(saved.number)
            self.names[saved.number] = saved.name

    def name_of(self, step: int, names: StepNames) -> str:
        """The name of a step's directory: one that is there may be spelled in another way."""
        return self.names.get(step) or names.name_of(step)

    def record(self, step: int, metrics: dict[str, float], job: str) -> SaveRecord:
        """The record of a save for its index."""
        return SaveRecord(step, (self.tip.save_id or None) if self.tip else None, self.branch, metrics, job)

    def warn_of_others(self, path: str) -> None:
        """Says which checkpoints are not of this job's branch."""
        if self.others:
            logger.warning(
                "%s: not counted and not deleted are %s, which this job does not go on from. A save of the same step "
                "replaces one of them.",
                path,
                _listed(self.others),
            )


def newest_of(steps: Sequence[Step], branch: Branch | None = None) -> Step | None:
    """The newest checkpoint that can be read, of a branch or of the current one; None if there is none."""
    readable = sound(steps)
    branch = branch or current_branch(readable)
    return next(reversed(members(readable, branch)), None) if branch else None


def sound(steps: Sequence[Step]) -> list[Step]:
    """The checkpoints that can be read."""
    return [step for step in steps if not step.problem]


def read_members(folder: Storage, names: StepNames, place: Place | None) -> list[Step]:
    """The checkpoints of a job's branch as they are now; of a job that has no place yet, of the current one.

    Raises:
        MetadataError: two directories are of one step.
        ReadError: the folder cannot be read.
    """
    steps = sound(read_steps(folder, names))
    branch = current_branch(steps) if place is None else place.branch
    return [] if branch is None else members(steps, branch)


def begin(folder: Storage, names: StepNames, step: int) -> Place:
    """The place of a job that has restored nothing, and is to save a step.

    Beyond the newest checkpoint it goes on from that: it has loaded it by itself. Otherwise it began anew.

    Raises:
        CheckpointError: the folder cannot be read, or two directories are of one step.
    """
    clean_up(folder, names)
    steps = read_steps(folder, names)
    branch = current_branch(sound(steps))
    newest = max((other.number for other in steps), default=-1)
    if branch is None or step <= newest:
        branch = leave(None)
    place = Place.at(branch, None, steps)
    place.warn_of_others(folder.path)
    return place


class RestoreChoice(NamedTuple):
    """The checkpoints that a job can be restored from.

    Attributes:
        candidates: What was asked for, and what is to fall back on; each with the branch that the job is on then.
        steps: All checkpoints of the folder.
    """

    candidates: list[tuple[Step, Branch]]
    steps: list[Step]

    def place(self, number: int) -> Place:
        """The place of the job when it has restored a candidate."""
        step, branch = self.candidates[number]
        return Place.at(branch, step, self.steps, step.number)


def choose(folder: Storage, names: StepNames, number: int | None, *, fallback: bool) -> RestoreChoice:
    """Finds the checkpoints that a job can be restored from: none if there are no checkpoints at all.

    Args:
        folder: Of the checkpoints.
        names: Of their directories.
        number: The step that was asked for; None: the newest.
        fallback: Also give those before it.

    Raises:
        NotCommitted: there is no checkpoint of that step.
        MetadataError: nothing is there that is understood, but something that looks like a checkpoint.
        CheckpointError: the folder cannot be read, or two directories are of one step.
    """
    clean_up(folder, names)
    steps = read_steps(folder, names)
    branch = current_branch(sound(steps)) or TRUNK
    own = members(sound(steps), branch)
    newest = own[-1].number if own else -1
    # One that cannot be read is on no branch: beyond the newest it is what the job has saved last.
    candidates = [*own, *(step for step in steps if step.problem and step.number > newest)]
    if number is not None:
        asked = [step for step in steps if step.number == number]
        if not asked:
            there = _listed([str(step.number) for step in steps]) or "none"
            raise NotCommitted(f"{folder.path} holds no committed checkpoint of step {number}. There are: {there}")
        candidates = [*(step for step in candidates if step.number < number), *asked]
    if not candidates:
        _look_around(folder, names)
        return RestoreChoice([], steps)
    candidates = candidates[::-1] if fallback else candidates[-1:]
    is_last = all(step.number <= newest for step in steps if step.problem)
    tip = own[-1] if own and is_last else None  # whoever goes on from anything else leaves the branch
    return RestoreChoice([(step, branch if step is tip else leave(step)) for step in candidates], steps)


def _look_around(folder: Storage, names: StepNames) -> None:
    """Sees what else is there, where a job would begin at 0.

    Raises:
        MetadataError: checkpoints that it does not know.
    """
    unknown, lost = others(folder, names)
    if unknown:
        raise MetadataError(
            f"{folder.path} holds no checkpoint named {names.template!r}, but {_listed(unknown)}: pass name= as they "
            f"are named, load one by dcp.load or convert it, or choose another folder to start anew"
        )
    if lost:
        logger.warning(
            "%s holds no committed checkpoint. But data lies in %s, without .metadata: a save never finished there, or "
            "is not finished yet, or a copy has left out hidden files, as `cp step/* ...` does: copy by `cp -r`",
            folder.path,
            _listed(lost),
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
