"""The place of a job among the checkpoints of a folder: its branch, and the checkpoint that it resumes from."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .._storage.base import Storage
from .._tensor_file.names import metadata_file_name
from ..errors import MetadataError, NotCommitted
from .steps import TRUNK, Branch, Step, StepNames, belongs, clean_up, current_branch, leave, members, others, read_steps

logger = logging.getLogger("dcp_tensorizer")

_SHOWN = 5
_LONGEST_LINE = 64  # more checkpoints than can wait for their flush at once


@dataclass(slots=True)
class Place:
    """The place of a job.

    Attributes:
        branch: The job's branch.
        tip: The checkpoint that the job resumes from; None if there is none, or it is unknown.
        numbers: The existing steps of the branch.
        names: The names of all steps' directories, on any branch.
        others: The directories' names of steps on other branches.
        left: The newest checkpoint, if the job has gone back to before it and has not saved since; otherwise None.
        step: The step of the last `save` or restore; -1 before the first.
        line: The ids of the checkpoints of this run that the job resumes from, the newest first.
        serial: The highest serial of the folder's checkpoints.
    """

    branch: Branch
    tip: Step | None
    numbers: set[int]
    names: dict[int, str]
    others: list[str]
    left: Step | None
    step: int = -1
    line: tuple[str, ...] = ()
    serial: int = 0

    @classmethod
    def at(cls, branch: Branch, tip: Step | None, steps: Sequence[Step], step: int = -1) -> Place:
        """The place of a job on a branch, given all checkpoints of the folder."""
        newest = newest_of(steps)
        left = None if newest is None or belongs(newest, branch) else newest
        numbers = {other.number for other in members(sound(steps), branch)}
        others = [other.name for other in steps if other.number not in numbers]
        names = {other.number: other.name for other in steps}
        line = () if tip is None else (tip.save_id,)
        serial = max((other.serial for other in steps), default=0)
        return cls(branch, tip, numbers, names, others, left, step, line, serial)

    def begin_anew(self, branch: Branch) -> None:
        """Moves the job to a new branch, because it does not resume from its last checkpoint."""
        self.others = sorted(set(self.others) | {name for step, name in self.names.items() if step in self.numbers})
        self.branch, self.tip, self.numbers, self.left, self.line = branch, None, set(), self.tip or self.left, ()

    def advance(self, saved: Step | None) -> None:
        """Notes the result of the last save; None if it failed."""
        if saved is not None:
            self.tip, self.left = saved, None
            self.line = (saved.save_id, *self.line)[:_LONGEST_LINE]
            self.numbers.add(saved.number)
            self.names[saved.number] = saved.name

    def name_of(self, step: int, names: StepNames) -> str:
        """The name of a step's directory. An existing directory may pad its number in another way."""
        return self.names.get(step) or names.name_of(step)

    def warn_of_others(self, path: str) -> None:
        """Warns of checkpoints on other branches."""
        if self.others:
            logger.warning(
                "%s: this job does not continue from %s: they are not counted and not deleted. A save of the same step "
                "replaces one of them.",
                path,
                _listed(self.others),
            )


def newest_of(steps: Sequence[Step], branch: Branch | None = None) -> Step | None:
    """The newest readable checkpoint of a branch (None: the current one); None if there is none."""
    readable = sound(steps)
    branch = branch or current_branch(readable)
    return next(reversed(members(readable, branch)), None) if branch else None


def sound(steps: Sequence[Step]) -> list[Step]:
    """The checkpoints that can be read."""
    return [step for step in steps if not step.problem]


def read_members(folder: Storage, names: StepNames, place: Place | None) -> list[Step]:
    """Reads the checkpoints of a job's branch; without a place, those of the current branch.

    Raises `MetadataError` if two directories are of one step, and `ReadError` if the folder cannot be read.
    """
    steps = sound(read_steps(folder, names))
    branch = current_branch(steps) if place is None else place.branch
    return [] if branch is None else members(steps, branch)


def begin(folder: Storage, names: StepNames, step: int) -> Place:
    """Finds the place of a job that saves a step without having restored.

    If the step is beyond the newest checkpoint, the job counts as having loaded that one by other means. Otherwise it
    counts as a new job. Raises `CheckpointError` if the folder cannot be read, or two directories are of one step.
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
    """The checkpoints that a job can be restored from."""

    # The wanted checkpoint, then those to fall back on. Each comes with the job's branch after restoring it.
    candidates: list[tuple[Step, Branch]]
    steps: list[Step]  # all checkpoints of the folder

    def place(self, number: int) -> Place:
        """The job's place after restoring a candidate."""
        step, branch = self.candidates[number]
        return Place.at(branch, step, self.steps, step.number)


def choose(folder: Storage, names: StepNames, number: int | None, *, fallback: bool) -> RestoreChoice:
    """Finds the checkpoints that a job can be restored from.

    They are step ``number`` (None: the newest), and with ``fallback`` those before it.

    Raises `NotCommitted` if there is no checkpoint of that step, `MetadataError` if there are only checkpoints of
    unknown formats, and `CheckpointError` if the folder cannot be read or two directories are of one step.
    """
    unfinished = clean_up(folder, names)
    steps = read_steps(folder, names)
    branch = current_branch(sound(steps)) or TRUNK
    own = members(sound(steps), branch)
    newest = own[-1].number if own else -1
    # The branch of an unreadable checkpoint is unknown. One beyond the newest readable one counts as the job's.
    candidates = [*own, *(step for step in steps if step.problem and step.number > newest)]
    if number is not None:
        asked = [step for step in steps if step.number == number]
        if not asked:
            there = _listed([str(step.number) for step in steps]) or "none"
            raise NotCommitted(f"{folder.path} holds no committed checkpoint of step {number}. There are: {there}")
        candidates = [*(step for step in candidates if step.number < number), *asked]
    if not candidates:
        _look_around(folder, names)
        if unfinished:
            logger.warning(
                "%s holds no committed checkpoint, and the job begins anew: the save of %s never finished, and its "
                "files are removed",
                folder.path,
                _listed(unfinished),
            )
        return RestoreChoice([], steps)
    candidates = candidates[::-1] if fallback else candidates[-1:]
    is_last = all(step.number <= newest for step in steps if step.problem)
    tip = own[-1] if own and is_last else None  # a job that resumes from any other step leaves the branch
    return RestoreChoice([(step, branch if step is tip else leave(step)) for step in candidates], steps)


def _look_around(folder: Storage, names: StepNames) -> None:
    """Checks what a folder without readable checkpoints holds.

    Raises `MetadataError` for checkpoints of other names or formats, and warns of data without metadata.
    """
    unknown, lost = others(folder, names)
    if metadata_file_name() in unknown:
        raise MetadataError(
            f"{folder.path} is a checkpoint itself, and not a folder of checkpoints. Give the manager its parent folder"
        )
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
