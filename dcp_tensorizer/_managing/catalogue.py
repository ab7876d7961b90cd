"""Which checkpoints lie in a folder, by their own records and not by the times of files."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .._format.index_rows import Head
from .._format.layout import is_data_file_name, metadata_file_name
from .._loading.directory_format import kind_of_file
from .._loading.metadata_reader import read_head
from .._storage.base import Storage
from .._threads import in_threads
from ..errors import CheckpointError, MetadataError, NotCommitted, ReadError
from .branches import TRUNK, Branch
from .names import StepNames

__all__ = ["LATEST", "Others", "Step", "others", "read_steps"]

LATEST = "latest"
"""The file that names the directory of the newest checkpoint."""
_MAX_NAME = 1024

# What the files are called in which others keep checkpoints. Where names are not understood, only these are looked for:
# logs and settings may lie in the folder too.
_FOREIGN_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".distcp", ".tensors", ".tensorizer")


@dataclass(frozen=True, slots=True)
class Step:
    """A committed checkpoint.

    Attributes:
        number: The step.
        name: Of its directory.
        save_id: Of the save that wrote it; empty if that is not known.
        saved_at: When, in nanoseconds since the epoch; 0 if that is not known.
        branch: See `branches`.
        metrics: That were recorded with it.
        job: The run of the job that saved it; empty if that is not known.
        problem: Why it is not one of this package that can be read; empty if it is.
        recorded: The step that its index says, which is another one if the directory was renamed or copied; None if it
            does not say.
    """

    number: int
    name: str
    save_id: str = ""
    saved_at: int = 0
    branch: Branch = TRUNK
    metrics: Mapping[str, float] = field(default_factory=dict)
    job: str = ""
    problem: str = ""
    recorded: int | None = None


def read_steps(folder: Storage, names: StepNames) -> list[Step]:
    """The committed checkpoints in a folder, lowest step first. One request for each, for the folder, and for `LATEST`.

    A listing may come from a cache. What `LATEST` names counts, if it is a checkpoint, whether or not it is listed. A
    directory may have been moved elsewhere, with a link left in its place. One that cannot be read says why.

    Raises:
        MetadataError: two directories are of one step; names them.
        ReadError: the folder cannot be listed.
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
    """The name that `LATEST` has; empty if there is none. One without its line's end is cut off: of an old size."""
    try:
        name = (folder.read(LATEST, _MAX_NAME) or b"").decode()
    except (CheckpointError, UnicodeDecodeError):  # a directory of that name, say
        return ""
    return name[:-1] if name.endswith("\n") and not {"/", "\\", "\0"} & set(name) else ""


def _read_step(folder: Storage, place: tuple[int, str]) -> Step | None:
    number, name = place
    try:
        head = read_head(folder.child(name))
    except (MetadataError, ReadError) as error:
        return Step(number, name, problem=str(error))
    return None if head is None else step_of(number, name, head)


def step_of(number: int, name: str, head: Head) -> Step:
    """A checkpoint of which the head has been read. Its directory has the last word on its number."""
    record, save_id = head.record, head.save_id if isinstance(head.save_id, str) else ""
    if record is None:
        return Step(number, name, save_id, head.saved_at)
    return Step(
        number, name, save_id, head.saved_at, record.branch or TRUNK, record.metrics, record.job, recorded=record.step
    )


class Others(NamedTuple):
    """What else lies in a folder where `read_steps` found no checkpoint.

    Attributes:
        unknown: What looks like a checkpoint: names of directories, and files.
        lost: Directories of steps that hold data without metadata.
    """

    unknown: list[str]
    lost: list[str]


def others(folder: Storage, names: StepNames) -> Others:
    """Looks around in a folder; raises `ReadError` if it cannot be listed. One request for it and each directory."""
    try:
        files, folders = folder.listing()
        folders = sorted([*folders, *folder.linked_directories()])
    except NotCommitted:
        return Others([], [])
    found = Others([], [])
    for name, inside in zip(folders, in_threads(functools.partial(_files_in, folder), folders), strict=True):
        is_step = names.step_in(name) is not None  # data alone is no checkpoint there: dead saves leave it
        if any(_is_of_checkpoint(file) and not (is_step and file.endswith(".tensors")) for file in inside):
            found.unknown.append(name)
        elif is_step and any(map(is_data_file_name, inside)):
            found.lost.append(name)
    found.unknown.extend(sorted(file.name for file in files if _is_of_checkpoint(file.name)))
    return found


def _files_in(folder: Storage, name: str) -> list[str]:
    try:
        return [file.name for file in folder.child(name).listing()[0]]
    except NotCommitted:
        return []


def _is_of_checkpoint(name: str) -> bool:
    return name == metadata_file_name() or name.endswith(_FOREIGN_SUFFIXES)
