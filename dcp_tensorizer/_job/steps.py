"""The checkpoints in a folder, ordered by their records, not by file times; a job's position among them."""

from __future__ import annotations

import functools
import itertools
import logging
import re
import string
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from .._formats.recognise import kind_of_file
from .._index.container import committed
from .._index.schema import SaveRecord
from .._runtime.threads import in_threads
from .._runtime.validation import plain
from .._saving.commit import dead_files, remove
from .._storage.base import Storage
from .._tensor_file.names import is_data_file_name, metadata_file_name
from ..errors import CheckpointError, MetadataError, NotCommitted, ReadError, describe, listed

logger = logging.getLogger("dcp_tensorizer")

# --- branches: a job that goes back to an earlier checkpoint begins a branch ------------------------------------------
#
# A `Branch` has its whole history: for each branch from the first one to itself, the name, and the step at which that
# branch left the one before. So the history does not depend on checkpoints, any of which may be deleted. Checkpoints
# that were saved without a manager are on the `TRUNK`.

Branch = tuple[tuple[str, int], ...]
TRUNK: Branch = (("", 0),)


def new_branch(at: Step | None) -> Branch:
    name = uuid.uuid4().hex
    return ((name, 0),) if at is None else (*at.branch, (name, at.number))


def belongs(saved: Step, branch: Branch) -> bool:
    """Returns whether a checkpoint is on a branch, or on an earlier part of its history."""
    own = saved.branch[-1][0]
    for (name, _), following in zip(branch, (*branch[1:], None), strict=True):
        if name == own:
            return following is None or saved.number <= following[1]
    return False


def members(steps: Iterable[Step], branch: Branch) -> list[Step]:
    """Returns the checkpoints that belong to a branch, lowest step first."""
    return sorted((saved for saved in steps if belongs(saved, branch)), key=lambda saved: saved.number)


def current_branch(steps: Sequence[Step]) -> Branch | None:
    """Returns the branch of the job's last save, or None without checkpoints.

    Branches that the job has left do not count.
    """
    left = {name for saved in steps for name, _ in saved.branch[:-1]}
    ends = [saved for saved in steps if saved.branch[-1][0] not in left]
    last = last_saved(ends)
    return None if last is None else last.branch


def last_saved(steps: Iterable[Step]) -> Step | None:
    """Returns the checkpoint that was saved last, or None without checkpoints.

    Compares serials, because clocks may be set back. Compares times only if a checkpoint has no serial.
    """
    groups: tuple[list[Step], list[Step]] = ([], [])
    for step in steps:
        groups[step.serial > 0].append(step)
    newest = [max(group, key=lambda step: (step.serial, step.saved_at, step.number)) for group in groups if group]
    return max(newest, key=lambda step: (step.saved_at, step.serial), default=None)


LATEST = "latest"
"""The file that names the directory of the newest checkpoint."""
_MAX_NAME = 1024

# The suffixes of checkpoint files, of this package and of others. Files with other suffixes may be logs and settings.
_FOREIGN_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".distcp", ".tensors", ".tensorizer")


@dataclass(frozen=True, slots=True)
class Step:
    """Committed checkpoint.

    Attributes:
        number: The step.
        name: The name of its directory.
        save_id: The id of its save; empty if unknown.
        saved_at: The time of its save, in nanoseconds since the epoch; 0 if unknown.
        record: The manager's record in its index; None if the checkpoint was saved without a manager, or is unreadable.
            If the directory was renamed, or copied under another name, the record may have a different step.
        problem: Why the checkpoint is unreadable for this package; empty if it is readable.
    """

    number: int
    name: str
    save_id: str = ""
    saved_at: int = 0
    record: SaveRecord | None = None
    problem: str = ""

    @property
    def branch(self) -> Branch:
        return TRUNK if self.record is None else self.record.branch or TRUNK

    @property
    def serial(self) -> int:
        """Returns the number of its save among the saves of the folder, or 0 if none was recorded."""
        return 0 if self.record is None else self.record.serial

    @property
    def metrics(self) -> Mapping[str, float]:
        return {} if self.record is None else self.record.metrics


def read_steps(folder: Storage, names: StepNames) -> list[Step]:
    """Reads the committed checkpoints in a folder, lowest step first.

    Makes one request for each checkpoint, one for the folder and one for `LATEST`. A listing may come from a cache, so
    the checkpoint that `LATEST` names counts even if it is not listed. Links to directories also count. Unreadable
    checkpoints have a ``problem``. Raises `MetadataError` if the folder is a file, or two directories hold the same
    step, and `ReadError` if the folder cannot be listed.
    """
    try:
        found = {*folder.listing()[1], *folder.linked_directories()}
    except NotCommitted:
        if (head := folder.file_in_place()) is not None:
            raise MetadataError(f"{folder.path} is a file {kind_of_file(head)}") from None
        found = set()
    newest = ""
    with suppress(CheckpointError, UnicodeDecodeError):  # for example, a directory has that name
        newest = (folder.read(LATEST, _MAX_NAME) or b"").decode()
    # If a cache returns an old size, the end of the name is missing, with its newline.
    is_name = newest.endswith("\n") and not {"/", "\\", "\0"} & set(newest)
    unlisted = {newest[:-1] if is_name else ""} - found
    found |= unlisted
    numbered = [(number, name) for name in sorted(found) if (number := names.step_in(name)) is not None]
    read = in_threads(functools.partial(_read_step, folder), sorted(numbered))
    steps = [step for step in read if step is not None and not (step.problem and step.name in unlisted)]
    for step, other in itertools.pairwise(steps):
        if step.number == other.number:
            raise MetadataError(
                f"{folder.path}: {step.name} and {other.name} are both step {step.number}. Remove one of them, or move "
                f"it elsewhere."
            )
    return steps


def _read_step(folder: Storage, numbered: tuple[int, str]) -> Step | None:
    number, name = numbered
    try:
        file = committed(folder.child(name))
    except (MetadataError, ReadError) as error:
        return Step(number, name, problem=str(error))
    if file is None:
        return None
    head = file.head
    save_id = head.save_id if isinstance(head.save_id, str) else ""
    return Step(number, name, save_id, head.saved_at, head.record)


def _files_in(folder: Storage, name: str) -> list[str]:
    try:
        return [file.name for file in folder.child(name).listing()[0]]
    except NotCommitted:
        return []


def _is_of_checkpoint(name: str) -> bool:
    return name == metadata_file_name() or name.endswith(_FOREIGN_SUFFIXES)


# --- the names of steps' directories ----------------------------------------------------------------------------------

_TRIED = (0, 7, 10, 999, 1000, 123_456, 1_234_567, 2**63 - 1)  # their names reveal other bases, commas and exponents


class StepNames:
    """Names of steps' directories, such as ``step-20``. Padding does not count: ``step-000020`` is the same step.

    ``template`` is the name with ``{}`` for the number; ``{:06}`` pads it. ``shown`` has ``N`` instead of the number.
    """

    def __init__(self, template: str) -> None:
        if not isinstance(template, str):
            raise TypeError(f"name must be a str, got {type(template).__name__}.")
        self.template: str = plain(template)
        try:
            parts = [(text, field) for text, field, _, _ in string.Formatter().parse(template)]
            made = [(step, template.format(step)) for step in _TRIED]
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise ValueError(f"name={template!r} must have one {{}} for the step: {error}") from None
        if sum(field is not None for _, field in parts) != 1 or "/" in template or "\\" in template:
            raise ValueError(f"name={template!r} must have one {{}} for the step, and no slash")
        prefix = parts[0][0]
        suffix = parts[1][0] if len(parts) > 1 else ""
        self.shown = f"{prefix}N{suffix}"
        self._pattern = re.compile(re.escape(prefix) + r"(\d+)" + re.escape(suffix))
        lost = [name for step, name in made if self.step_in(name) != step]
        if lost or re.search(r"\d$", prefix) or re.match(r"\d", suffix):
            shown = (lost or [made[-1][1]])[0]
            raise ValueError(
                f"name={template!r}: the step cannot be parsed back out of {shown!r}. Use {{}} or {{:06}}."
            )

    def name_of(self, step: int) -> str:
        return self.template.format(step)

    def step_in(self, name: str) -> int | None:
        match = self._pattern.fullmatch(name)
        return None if match is None else int(match[1])


# --- files of dead saves ----------------------------------------------------------------------------------------------


def clean_up(folder: Storage, names: StepNames) -> list[str]:
    """Removes files of dead saves (`commit.dead_files`) from those directories of steps that have no metadata.

    Returns the names of the directories that had such files.
    """
    cleaned: list[str] = []
    if not folder.locks_are_visible:
        return cleaned
    try:
        _, found = folder.listing()
        for name in found:
            if names.step_in(name) is not None and _clean_up_step(folder.child(name)):
                cleaned.append(name)
    except NotCommitted:
        pass  # the folder does not exist before the first save
    except (CheckpointError, OSError) as error:
        logger.info("%s: files of dead saves are not removed: %s", folder.path, describe(error))
    return cleaned


def _clean_up_step(storage: Storage) -> bool:
    if storage.head(metadata_file_name()) is not None:
        return False  # the next save to this directory cleans up
    with storage.lock_directory() as lock:
        if not lock.is_exclusive:
            return False
        dead = dead_files(storage, [file.name for file in storage.listing()[0]])
        remove(storage, dead)
        storage.remove_directory()
        return bool(dead)


# --- the position of a job: its branch, and the checkpoint that it resumes from ---------------------------------------

_LONGEST_LINE = 64  # ids in `Position.line`: more than the checkpoints that can wait for their flush


@dataclass(slots=True)
class Position:
    """Position of a job among its checkpoints.

    Attributes:
        branch: The job's branch.
        tip: The last checkpoint of this run; before the first one, the checkpoint that the run resumed from; None if
            there is no such checkpoint, or it is unknown.
        numbers: The existing steps of the branch.
        names: The names of all steps' directories, on any branch.
        others: The names of the directories of steps on other branches, and of unreadable checkpoints.
        left: Until the first save on this branch: the newest checkpoint, if it is on another branch; otherwise None.
        step: The step of the last `save` or restore; -1 before the first.
        line: The save ids of the checkpoint that this run resumed from, and of those saved since, the newest first.
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
    def at(cls, branch: Branch, tip: Step | None, steps: Sequence[Step], step: int = -1) -> Position:
        """Makes the position of a job on a branch, given all checkpoints of the folder."""
        newest = newest_of(steps)
        left = None if newest is None or belongs(newest, branch) else newest
        numbers = {other.number for other in members(sound(steps), branch)}
        others = [other.name for other in steps if other.number not in numbers]
        names = {other.number: other.name for other in steps}
        line = () if tip is None else (tip.save_id,)
        serial = max((other.serial for other in steps), default=0)
        return cls(branch, tip, numbers, names, others, left, step, line, serial)

    def begin_branch(self, branch: Branch) -> None:
        """Moves the job to a new branch, because it does not resume from its last checkpoint."""
        self.others = sorted(set(self.others) | {name for step, name in self.names.items() if step in self.numbers})
        self.branch, self.tip, self.numbers, self.left, self.line = branch, None, set(), self.tip or self.left, ()

    def advance(self, saved: Step | None) -> None:
        """Records the checkpoint of the last save. ``saved`` is None if that save failed, or there was none."""
        if saved is not None:
            self.tip, self.left = saved, None
            self.line = (saved.save_id, *self.line)[:_LONGEST_LINE]
            self.numbers.add(saved.number)
            self.names[saved.number] = saved.name

    def name_of(self, step: int, names: StepNames) -> str:
        """Returns the name of a step's directory. An existing directory may pad its number differently."""
        return self.names.get(step) or names.name_of(step)

    def warn_of_others(self, path: str) -> None:
        if self.others:
            logger.warning(
                "%s: this job neither counts nor deletes %s. Such a checkpoint is on another branch, or this package "
                "did not save it, or cannot read it. It is replaced if this job saves its step.",
                path,
                listed(self.others),
            )


def newest_of(steps: Sequence[Step], branch: Branch | None = None) -> Step | None:
    """Returns the newest readable checkpoint of a branch (None: the current one), or None without checkpoints."""
    readable = sound(steps)
    branch = branch or current_branch(readable)
    return next(reversed(members(readable, branch)), None) if branch else None


def sound(steps: Sequence[Step]) -> list[Step]:
    """Returns the readable checkpoints."""
    return [step for step in steps if not step.problem]


def first_position(folder: Storage, names: StepNames, step: int) -> Position:
    """Finds the position of a job that saves a step without having restored.

    If the step is beyond the newest checkpoint, the job is assumed to have loaded that checkpoint by other means.
    Otherwise it counts as a new job. Raises `CheckpointError` if the folder cannot be read, or two directories hold
    the same step.
    """
    clean_up(folder, names)
    steps = read_steps(folder, names)
    branch = current_branch(sound(steps))
    newest = max((other.number for other in steps), default=-1)
    if branch is None or step <= newest:
        branch = new_branch(None)
    position = Position.at(branch, None, steps)
    position.warn_of_others(folder.path)
    return position


def restorable(
    folder: Storage, names: StepNames, number: int | None, *, fallback: bool
) -> tuple[list[tuple[Step, Branch]], list[Step]]:
    """Finds the checkpoints that a job can be restored from: step ``number`` (None: the newest), then the fallbacks.

    Each comes with the job's branch after the restore. Without ``fallback`` there is at most one. Also returns all
    checkpoints of the folder.

    Raises `NotCommitted` if that step has no checkpoint, `MetadataError` if the folder has only checkpoints with other
    names or of unknown formats, and `CheckpointError` if the folder cannot be read or two directories hold the same
    step.
    """
    unfinished = clean_up(folder, names)
    steps = read_steps(folder, names)
    branch = current_branch(sound(steps)) or TRUNK
    own = members(sound(steps), branch)
    newest = own[-1].number if own else -1
    # The branch of an unreadable checkpoint is unknown. One beyond the newest readable checkpoint counts as the job's.
    candidates = [*own, *(step for step in steps if step.problem and step.number > newest)]
    if number is not None:
        asked = [step for step in steps if step.number == number]
        if not asked:
            there = listed([step.number for step in steps]) or "none"
            raise NotCommitted(f"{folder.path} has no committed checkpoint of step {number}. The folder has: {there}")
        candidates = [*(step for step in candidates if step.number < number), *asked]
    if not candidates:
        _check_others(folder, names)
        if unfinished:
            logger.warning(
                "%s has no committed checkpoint. The files of saves that never finished were removed from %s",
                folder.path,
                listed(unfinished),
            )
        return [], steps
    candidates = candidates[::-1] if fallback else candidates[-1:]
    is_last = all(step.number <= newest for step in steps if step.problem)
    tip = own[-1] if own and is_last else None  # a job that resumes from any other step leaves the branch
    return [(step, branch if step is tip else new_branch(step)) for step in candidates], steps


def _check_others(folder: Storage, names: StepNames) -> None:
    """Checks the other contents of a folder in which `read_steps` found no checkpoint.

    Raises `MetadataError` for directories and files that look like checkpoints, and warns about steps' directories that
    have data without metadata. Makes one request for the folder and one for each directory.
    """
    try:
        files, folders = folder.listing()
        folders = sorted([*folders, *folder.linked_directories()])
    except NotCommitted:
        return
    unknown, lost = list[str](), list[str]()
    for name, inside in zip(folders, in_threads(functools.partial(_files_in, folder), folders), strict=True):
        is_step = names.step_in(name) is not None  # in a step's directory, data without metadata belongs to a dead save
        if any(_is_of_checkpoint(file) and not (is_step and file.endswith(".tensors")) for file in inside):
            unknown.append(name)
        elif is_step and any(map(is_data_file_name, inside)):
            lost.append(name)
    unknown.extend(sorted(file.name for file in files if _is_of_checkpoint(file.name)))
    if metadata_file_name() in unknown:
        raise MetadataError(
            f"{folder.path} is a checkpoint, not a folder of checkpoints. Pass its parent folder to the manager."
        )
    if unknown:
        raise MetadataError(
            f"{folder.path} has no checkpoint named {names.template!r}, but has {listed(unknown)}. Pass a matching "
            f"name=, load such a checkpoint with dcp.load, convert it, or choose another folder."
        )
    if lost:
        logger.warning(
            "%s has no committed checkpoint, but there is data without .metadata in %s. A save has not finished there, "
            "or a copy has left out hidden files, as `cp step/* ...` does. Copy with `cp -r`",
            folder.path,
            listed(lost),
        )
