"""Reads the checkpoints in a folder. Their own records tell their order, not the times of files."""

from __future__ import annotations

import functools
import itertools
import logging
import re
import string
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .._formats.own import read_head
from .._formats.recognise import kind_of_file
from .._index.schema import SaveRecord
from .._runtime.threads import in_threads
from .._saving.commit import dead_files, remove
from .._storage.base import Storage
from .._tensor_file.names import is_data_file_name, metadata_file_name
from ..errors import CheckpointError, MetadataError, NotCommitted, ReadError, describe

# --- branches: a job that goes back to an earlier checkpoint begins one -----------------------------------------------
#
# A branch is its whole history: the name of each branch on the way, and the step at which it left the one before. So
# checkpoints in between may be deleted. Checkpoints that were saved without a manager are on the `TRUNK`.

Branch = tuple[tuple[str, int], ...]
TRUNK: Branch = (("", 0),)


def leave(at: Step | None) -> Branch:
    """Makes a new branch, which begins at a checkpoint, or without one."""
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
    """The checkpoints of a branch, lowest step first."""
    return sorted((saved for saved in steps if belongs(saved, branch)), key=lambda saved: saved.number)


def current_branch(steps: Sequence[Step]) -> Branch | None:
    """The branch of the job's last save; None if there are no checkpoints.

    Branches that the job has left do not count.
    """
    left = {name for saved in steps for name, _ in saved.branch[:-1]}
    ends = [saved for saved in steps if saved.branch[-1][0] not in left]
    last = last_saved(ends)
    return None if last is None else last.branch


def last_saved(steps: Iterable[Step]) -> Step | None:
    """The checkpoint that was saved last; None if there are none.

    Serials tell, because clocks may be set back. Only a checkpoint without a serial is compared by its time.
    """
    groups: tuple[list[Step], list[Step]] = ([], [])
    for step in steps:
        groups[step.serial > 0].append(step)
    newest = [max(group, key=lambda step: (step.serial, step.saved_at, step.number)) for group in groups if group]
    return max(newest, key=lambda step: (step.saved_at, step.serial), default=None)


LATEST = "latest"
"""The file that names the directory of the newest checkpoint."""
_MAX_NAME = 1024

# The suffixes of other packages' checkpoint files. Files with other suffixes may be logs and settings.
_FOREIGN_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".distcp", ".tensors", ".tensorizer")


@dataclass(frozen=True, slots=True)
class Step:
    """A committed checkpoint.

    Attributes:
        number: The step.
        name: The name of its directory.
        save_id: The id of its save; empty if unknown.
        saved_at: The time of its save, in nanoseconds since the epoch; 0 if unknown.
        record: The manager's record in its index; None if it was saved without a manager, or cannot be read. If the
            directory was renamed or copied, the record has another step.
        problem: Why it cannot be read as a checkpoint of this package; empty if it can.
    """

    number: int
    name: str
    save_id: str = ""
    saved_at: int = 0
    record: SaveRecord | None = None
    problem: str = ""

    @property
    def branch(self) -> Branch:
        """The branch of the checkpoint."""
        return TRUNK if self.record is None else self.record.branch or TRUNK

    @property
    def serial(self) -> int:
        """The number of its save among those of the folder; 0 if it was not recorded."""
        return 0 if self.record is None else self.record.serial

    @property
    def metrics(self) -> Mapping[str, float]:
        """The recorded metrics."""
        return {} if self.record is None else self.record.metrics


def read_steps(folder: Storage, names: StepNames) -> list[Step]:
    """Reads the committed checkpoints in a folder, lowest step first.

    It takes one request for each checkpoint, one for the folder and one for `LATEST`. A listing may come from a cache,
    so the checkpoint that `LATEST` names counts even if it is not listed. Links to directories count, too. Unreadable
    checkpoints have a ``problem``. Raises `MetadataError` if two directories are of one step, and `ReadError` if the
    folder cannot be listed.
    """
    try:
        found = {*folder.listing()[1], *folder.linked_directories()}
    except NotCommitted:
        if (head := folder.file_in_place()) is not None:
            raise MetadataError(f"{folder.path} is a file {kind_of_file(head)}") from None
        found = set()
    newest = _newest(folder)
    unlisted = {newest} - found
    found |= unlisted
    places = [(number, name) for name in sorted(found) if (number := names.step_in(name)) is not None]
    read = in_threads(functools.partial(_read_step, folder), sorted(places))
    steps = [step for step in read if step is not None and not (step.problem and step.name in unlisted)]
    for step, other in itertools.pairwise(steps):
        if step.number == other.number:
            raise MetadataError(
                f"{folder.path}: {step.name} and {other.name} are both step {step.number}: remove one, or move it "
                f"elsewhere"
            )
    return steps


def _newest(folder: Storage) -> str:
    """The name in `LATEST`; empty if there is none, or it is incomplete.

    A cache may give an old size. Then the name's end is missing, and so is its newline.
    """
    try:
        name = (folder.read(LATEST, _MAX_NAME) or b"").decode()
    except (CheckpointError, UnicodeDecodeError):  # for example, a directory has that name
        return ""
    return name[:-1] if name.endswith("\n") and not {"/", "\\", "\0"} & set(name) else ""


def _read_step(folder: Storage, place: tuple[int, str]) -> Step | None:
    number, name = place
    try:
        head = read_head(folder.child(name))
    except (MetadataError, ReadError) as error:
        return Step(number, name, problem=str(error))
    if head is None:
        return None
    save_id = head.save_id if isinstance(head.save_id, str) else ""
    return Step(number, name, save_id, head.saved_at, head.record)


def others(folder: Storage, names: StepNames) -> tuple[list[str], list[str]]:
    """Looks for other contents of a folder in which `read_steps` found no checkpoint.

    Returns the names of directories and files that look like checkpoints, and of steps' directories that have data
    without metadata. It takes one request for the folder and for each directory. Raises `ReadError`.
    """
    try:
        files, folders = folder.listing()
        folders = sorted([*folders, *folder.linked_directories()])
    except NotCommitted:
        return [], []
    unknown, lost = list[str](), list[str]()
    for name, inside in zip(folders, in_threads(functools.partial(_files_in, folder), folders), strict=True):
        is_step = names.step_in(name) is not None  # in its directory, data alone is what a dead save has left
        if any(_is_of_checkpoint(file) and not (is_step and file.endswith(".tensors")) for file in inside):
            unknown.append(name)
        elif is_step and any(map(is_data_file_name, inside)):
            lost.append(name)
    unknown.extend(sorted(file.name for file in files if _is_of_checkpoint(file.name)))
    return unknown, lost


def _files_in(folder: Storage, name: str) -> list[str]:
    try:
        return [file.name for file in folder.child(name).listing()[0]]
    except NotCommitted:
        return []


def _is_of_checkpoint(name: str) -> bool:
    return name == metadata_file_name() or name.endswith(_FOREIGN_SUFFIXES)


# --- the names of steps' directories ----------------------------------------------------------------------------------

_TRIED = (0, 7, 10, 999, 1000, 123_456, 1_234_567, 2**63 - 1)  # these reveal other bases, commas and exponents


class StepNames:
    """Names of steps' directories, such as ``step-20``. The number counts: ``step-000020`` is the same step.

    ``template`` is the name with ``{}`` for the number; ``{:06}`` pads it. ``shown`` has ``N`` instead of the number.
    Raises `TypeError` unless it is a string, and `ValueError` unless it has one place for a number and can name a
    directory.
    """

    def __init__(self, template: str) -> None:
        if not isinstance(template, str):
            raise TypeError(f"name must be a str, and is {type(template).__name__}")
        self.template = template
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
            raise ValueError(f"name={template!r}: the number cannot be found again in {shown!r}: use {{}} or {{:06}}")

    def name_of(self, step: int) -> str:
        """The name of a step's directory."""
        return self.template.format(step)

    def step_in(self, name: str) -> int | None:
        """The step whose directory has this name; None for other names."""
        match = self._pattern.fullmatch(name)
        return None if match is None else int(match[1])


# --- files of dead saves ----------------------------------------------------------------------------------------------

logger = logging.getLogger("dcp_tensorizer")


def clean_up(folder: Storage, names: StepNames) -> list[str]:
    """Removes files in steps' directories that are proven to be of dead saves; see `commit.dead_files`.

    Returns the names of the directories that had some.
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
        pass  # there is no folder before the first save
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
