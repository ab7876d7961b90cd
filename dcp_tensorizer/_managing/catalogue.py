"""Which checkpoints lie in a folder, by their own records and not by the times of files."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from .._format.index_rows import Head
from .._format.layout import is_data_file_name, metadata_file_name
from .._loading.metadata_reader import read_head
from .._storage.base import Storage
from .._threads import in_threads
from ..errors import CheckpointError, MetadataError, NotCommitted, ReadError
from .branches import TRUNK, Branch
from .names import StepNames

__all__ = ["Step", "data_without_metadata", "read_steps", "unknown_checkpoints"]

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
    """

    number: int
    name: str
    save_id: str = ""
    saved_at: int = 0
    branch: Branch = TRUNK
    metrics: Mapping[str, float] = field(default_factory=dict)
    job: str = ""
    problem: str = ""


def read_steps(folder: Storage, names: StepNames) -> list[Step]:
    """The committed checkpoints in a folder, lowest step first. One request for the folder, and one for each of them.

    A directory may have been moved elsewhere, with a link left in its place. One that cannot be read says why.

    Raises:
        MetadataError: two directories are of one step; names them.
        ReadError: the folder cannot be listed.
    """
    try:
        found = [*folder.listing()[1], *folder.linked_directories()]
    except NotCommitted:
        return []
    places = [(number, name) for name in sorted(found) if (number := names.step_in(name)) is not None]
    read = in_threads(functools.partial(_read_step, folder), sorted(places))
    steps = [step for step in read if step is not None]
    for step, other in itertools.pairwise(steps):
        if step.number == other.number:
            raise MetadataError(
                f"{folder.path}: {step.name} and {other.name} are both step {step.number}: remove one, or move it "
                f"elsewhere"
            )
    return steps


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
    return Step(number, name, save_id, head.saved_at, record.branch or TRUNK, record.metrics, record.job)


def unknown_checkpoints(folder: Storage, names: StepNames) -> list[str]:
    """What looks like a checkpoint in a folder where `read_steps` found none: names of directories, and files.

    Raises:
        ReadError: the folder cannot be listed.
    """
    try:
        files, folders = folder.listing()
        folders += folder.linked_directories()
    except NotCommitted:
        return []
    looks = functools.partial(_looks_like_checkpoint, folder, names)
    found = in_threads(looks, sorted(folders))
    return [name for name, is_one in zip(sorted(folders), found, strict=True) if is_one] + sorted(
        file.name for file in files if _is_of_checkpoint(file.name)
    )


def data_without_metadata(folder: Storage, names: StepNames) -> list[str]:
    """The directories of steps that hold data, in a folder where `read_steps` found no checkpoint.

    Raises:
        ReadError: the folder cannot be listed.
    """
    try:
        folders = [name for name in sorted(folder.listing()[1]) if names.step_in(name) is not None]
    except NotCommitted:
        return []
    holds = in_threads(functools.partial(_holds_data, folder), folders)
    return [name for name, has_data in zip(folders, holds, strict=True) if has_data]


def _holds_data(folder: Storage, name: str) -> bool:
    try:
        return any(is_data_file_name(file.name) for file in folder.child(name).listing()[0])
    except CheckpointError:  # it is for a warning
        return False


def _looks_like_checkpoint(folder: Storage, names: StepNames, name: str) -> bool:
    """Whether a directory holds a checkpoint; not what a dead save has left under the name of a step."""
    try:
        files, _ = folder.child(name).listing()
    except NotCommitted:
        return False
    ours = names.step_in(name) is not None
    return any(_is_of_checkpoint(file.name) and not (ours and file.name.endswith(".tensors")) for file in files)


def _is_of_checkpoint(name: str) -> bool:
    return name == metadata_file_name() or name.endswith(_FOREIGN_SUFFIXES)
