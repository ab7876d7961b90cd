"""Finds the checkpoints and the leftovers of saves in and below a directory."""

from __future__ import annotations

import itertools
import logging
import math
import os
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .._index.container import is_index, looks_like_pickle
from .._index.schema import SaveRecord
from .._job.retention import Retention
from .._job.steps import Step, current_branch, last_saved, members
from .._saving.commit import dead_files, leftovers, recorded_uploads
from .._storage.base import FileInfo, Storage
from .._storage.local import LocalStorage
from .._storage.open import open_storage
from .._tensor_file.names import (
    data_file_rank,
    is_data_file_name,
    is_metadata_file_name,
    is_ours,
    metadata_file_name,
    save_id_in,
)
from .._tiers import queue
from ..errors import CheckpointError, NotCommitted, UnsupportedFormat
from ._view import data_files, read_parts, record_of, saved_at, view_checkpoint

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

State = Literal["committed", "unfinished", "unflushed", "flushed", "incomplete", "torch", "unreadable"]

logger = logging.getLogger("dcp_tensorizer")

_NUMBER = re.compile(r"\d+")
_TRAILER = 24  # last bytes, which mark the pickles that this package wrote before its first release
_MAX_NAMED, _MAX_DEPTH = 3, 2  # limits of `where_below`: named checkpoints, searched levels of directories


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A directory with a checkpoint, or with files of an unfinished save.

    Attributes:
        path: The path, without credentials.
        step: The step that a manager recorded, if the directory's name has it; otherwise the last number in the name.
            None if the name has no number.
        saved: The time of the save in UTC, from the metadata. If the metadata is missing or cannot be read, the time
            of the last write to a file in the directory. None if the storage reports no times, or for a year beyond
            9999.
        state: ``committed``: complete. ``unfinished``: a save is in progress, or has died. ``unflushed``: in a local
            folder (``local=...``), and not yet on the remote storage. ``flushed``: a local copy of a checkpoint that is
            also on the remote storage. ``incomplete``: data files that the metadata names are missing or have other
            sizes, for example while the checkpoint is being copied.
            ``torch``: written by torch's own ``FileSystemWriter``. ``unreadable``: damaged, or of a format or version
            that this release does not read.
        nbytes: Bytes of all files in the directory.
        shared_nbytes: Bytes of files that this checkpoint shares with others, and that take up space only once
            (``reuse_unchanged``).
        ranks: Number of ranks that wrote data files of the checkpoint; None unless committed.
        tensors, objects: Number of its tensors and of its other values; None unless committed.
        leftover_nbytes: Bytes of the files of uncommitted saves, without incomplete uploads, whose sizes are unknown.
            0 if ``state`` is ``incomplete``, ``torch`` or ``unreadable``.
        metrics: The metrics that a manager recorded.
        best: The metric of the manager's ``keep_best``, if this checkpoint is the best by it; otherwise None.
    """

    path: str
    step: int | None
    saved: datetime | None
    state: State
    nbytes: int
    shared_nbytes: int
    ranks: int | None
    tensors: int | None
    objects: int | None
    leftover_nbytes: int
    metrics: Mapping[str, float]
    best: str | None


@dataclass(frozen=True, slots=True)
class Folder:
    """A listed directory, and the checkpoint or the leftovers of a save in it.

    Attributes:
        info: What `list_checkpoints` returns for the directory; None for a directory without a checkpoint or leftovers.
        parts: The number of ranks that have committed, if each rank saves by itself; otherwise 0.
        leftovers: The known files of uncommitted saves, in the order in which to remove them, without files that a
            flush needs.
        dead: The leftovers of saves whose record files are valid (see `commit.dead_files`). These saves are dead if the
            lock of the directory is free.
        unknown: Why the directory may have more leftovers; otherwise empty.
        keys: A hash of the keys; None unless committed.
        record: The manager's record; None if there is none, or if the directory's name does not have the recorded step.
    """

    storage: Storage
    files: tuple[FileInfo, ...]
    folders: tuple[Folder, ...]
    info: CheckpointInfo | None = None
    parts: int = 0
    leftovers: tuple[FileInfo, ...] = ()
    dead: tuple[FileInfo, ...] = ()
    unknown: str = ""
    keys: int | None = None
    record: SaveRecord | None = None

    @property
    def name(self) -> str:
        return self.storage.path.rstrip("/").rpartition("/")[2]

    @property
    def step(self) -> int | None:
        return None if self.info is None else self.info.step

    def walk(self, prefix: str = "") -> Iterator[tuple[str, Folder]]:
        """Yields the directory and all below it, parents first, each with the prefix of the paths of its files."""
        yield prefix, self
        for folder in self.folders:
            yield from folder.walk(f"{prefix}{folder.name}/")

    @property
    def checkpoints(self) -> list[Folder]:
        """The directories, from this one down, that hold a checkpoint or leftovers."""
        return [folder for _, folder in self.walk() if folder.info is not None]

    @property
    def saved(self) -> float:
        """The time of the checkpoint's save, in seconds since the epoch; 0 if unknown."""
        return 0.0 if self.info is None or self.info.saved is None else self.info.saved.timestamp()


def list_checkpoints(
    path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> tuple[CheckpointInfo, ...]:
    """Lists the checkpoints in and below a directory, sorted by directory and then by step, the highest first.

    Links to directories are not followed.

    Args:
        path: The directory.
        storage_options: Options of a URL's storage, such as credentials.

    Raises:
        NotCommitted: there is no such directory.
        ReadError: the directory cannot be listed.
    """
    top = walk(open_storage(path, storage_options))
    best: dict[str, str | None] = {}
    for _, folders, _ in lines_of_steps(top):
        rules, steps = of_manager(steps_of(folders))
        if (found := rules.best(steps)) is not None:
            best |= {folder.storage.path: rules.metric for folder in folders if folder.step == found.number}

    infos = [folder.info for folder in top.checkpoints if folder.info is not None]

    def order(info: CheckpointInfo) -> tuple[list[tuple[int, str]], float, str]:
        above, _, name = info.path.rstrip("/").rpartition("/")
        # by text, and by the numbers in the text, the highest first
        naturally = [(-int(number or 0), text) for number, text in re.findall(r"(\d*)(\D*)", above)]
        return naturally, math.inf if info.step is None else -info.step, name

    return tuple(sorted((replace(info, best=best.get(info.path)) for info in infos), key=order))


def step_of(name: str) -> int | None:
    numbers = _NUMBER.findall(name)
    return int(numbers[-1]) if numbers else None


def read_parts_at(storage: Storage) -> dict[int | None, Metadata]:
    """Reads a checkpoint's metadata (see `read_parts`). A `NotCommitted` also names the checkpoints below the path."""
    try:
        return read_parts(storage)
    except NotCommitted as error:
        raise NotCommitted(f"{error}{where_below(storage)}") from None


def checkpoints_in(storage: Storage) -> list[str]:
    """Returns the subdirectories that hold a checkpoint, the highest step first; none if the directory is missing."""
    return list(_checkpoints_below(storage, 1))


def where_below(storage: Storage) -> str:
    """Returns a hint that names checkpoints below a directory; without any, an empty string."""
    try:
        found = list(itertools.islice(_checkpoints_below(storage, _MAX_DEPTH), _MAX_NAMED + 1))
    except CheckpointError:
        return ""
    shown = ", ".join(found[:_MAX_NAMED]) + (" and others" if len(found) > _MAX_NAMED else "")
    what = "There is a checkpoint" if len(found) == 1 else "There are checkpoints"
    return f" {what} below it: {shown}." if found else ""


def _checkpoints_below(storage: Storage, depth: int) -> Iterator[str]:
    """Yields the relative paths of checkpoints, the highest step first.

    Skips directories that have been deleted since their parent was listed.
    """
    with suppress(NotCommitted):
        for name in sorted(storage.listing()[1], key=lambda name: (step_of(name) or 0, name), reverse=True):
            child = storage.child(name)
            with suppress(NotCommitted):
                if any(is_metadata_file_name(file.name) for file in child.listing()[0]):
                    yield name
                elif depth > 1:
                    yield from (f"{name}/{below}" for below in _checkpoints_below(child, depth - 1))


def walk(storage: Storage) -> Folder:
    around: dict[str, str] = {}
    if isinstance(storage, LocalStorage):
        for folder in Path(storage.real_path).parents:
            around |= _local_saves(folder)
    try:
        uploads = _Uploads(
            [
                file
                for file in storage.uploads()
                if is_data_file_name(name := posixpath.basename(file.name)) or name.endswith(".safetensors")
            ]
        )
    except CheckpointError as error:
        uploads = _Uploads((), f"the leftovers of saves there cannot be recognised: {error}")
    return _walk(storage, around, uploads)


class _Uploads(NamedTuple):
    """The incomplete uploads of saves, in and below a directory. Their names are paths relative to the directory.

    A listing shows neither these uploads nor a directory that holds nothing else, for example because its first save
    was killed.
    """

    files: Sequence[FileInfo]
    unknown: str = ""
    """Why ``files`` may lack some of these uploads; otherwise empty."""

    def here(self, storage: Storage, listed: Sequence[FileInfo]) -> list[FileInfo]:
        """Returns the uploads in the directory itself; those of a model's files only if a save has recorded them.

        Skips uploads whose names are listed: the listed file may be committed, and `discard` would remove it, too.
        """
        names = {file.name for file in listed}
        begun = [file for file in self.files if "/" not in file.name and file.name not in names]
        if all(is_data_file_name(file.name) for file in begun):
            return begun
        recorded = {name for uploads in recorded_uploads(storage, names).values() for name in uploads}
        return [file for file in begun if is_data_file_name(file.name) or file.name in recorded]

    def below(self) -> dict[str, _Uploads]:
        found: dict[str, list[FileInfo]] = {}
        for file in self.files:
            folder, slash, rest = file.name.partition("/")
            if folder and slash:
                found.setdefault(folder, []).append(file._replace(name=rest))
        return {folder: _Uploads(files, self.unknown) for folder, files in found.items()}


def _walk(storage: Storage, saves: Mapping[str, str], uploads: _Uploads) -> Folder:
    """Lists a directory (see `walk`). ``saves`` are the `_local_saves` of the folders that contain it."""
    files: list[FileInfo] = []
    names: list[str] = []
    try:
        files, names = storage.listing()
    except NotCommitted:
        if not uploads.files:
            raise
    if queue.FOLDER in names and isinstance(storage, LocalStorage):
        saves = {**saves, **_local_saves(Path(storage.location))}
    below, folders = uploads.below(), []
    for name in {**dict.fromkeys(names), **below}:
        try:
            folders.append(_walk(storage.child(name), saves, below.get(name, _Uploads((), uploads.unknown))))
        except NotCommitted:
            pass  # removed since the listing
        except CheckpointError as error:  # other directories may be readable
            logger.warning("a directory is missing from the listing: %s", error)
    here = uploads.here(storage, files)
    folder = Folder(storage, tuple(files), tuple(folders))
    is_checkpoint = here or any(is_ours(file.name) for file in files)
    return _with_checkpoint(folder, saves, here, uploads.unknown) if is_checkpoint else folder


def _local_saves(folder: Path) -> dict[str, str]:
    """Returns the state of each save in the flush queue of a local folder, by the id of the save.

    Files of these saves never count as leftovers, whatever their age: the flush deletes them.
    """
    entries = queue.Queue(folder).entries()  # of all ranks of the node; the state of the slowest rank counts
    return {entry.id: entry.state for entry in sorted(entries, key=lambda entry: entry.state in queue.OPEN)}


def _with_checkpoint(folder: Folder, saves: Mapping[str, str], uploads: Sequence[FileInfo], unseen: str) -> Folder:
    storage, files = folder.storage, folder.files
    left, dead, unknown = _leftovers(storage, files, saves)
    leftovers = (*uploads, *left)
    times = [file.modified for file in files or uploads if file.modified is not None]
    flushes = {saves.get(save_id_in(file.name)) for file in files if is_data_file_name(file.name)}
    info = CheckpointInfo(
        path=storage.path,
        step=step_of(folder.name),
        saved=_time(max(times)) if times else None,
        state="unflushed" if flushes & queue.OPEN else "flushed" if queue.REMOTE in flushes else "unfinished",
        nbytes=sum(file.nbytes for file in files),
        shared_nbytes=sum(file.nbytes for file in files if file.shared is not None),
        ranks=None,
        tensors=None,
        objects=None,
        leftover_nbytes=sum(file.nbytes for file in leftovers),
        metrics={},
        best=None,
    )
    try:
        parts = read_parts(storage)
        view = view_checkpoint(storage, parts)
    except NotCommitted:
        return replace(folder, info=info, leftovers=leftovers, dead=dead, unknown=unknown or unseen)
    except CheckpointError as error:
        torchs = isinstance(error, UnsupportedFormat) and _is_torchs(storage, files)
        return replace(folder, info=replace(info, state="torch" if torchs else "unreadable", leftover_nbytes=0))
    named, record = data_files(parts), record_of(parts)
    info = replace(info, saved=_time(saved_at(parts)))
    if record is not None:
        info = replace(info, metrics=record.metrics)
        if record.step in map(int, _NUMBER.findall(folder.name)):
            info = replace(info, step=record.step)
        else:
            record = None
    if not named.items() <= {(file.name, file.nbytes) for file in files}:
        info = replace(info, state="incomplete", leftover_nbytes=0)
        return replace(folder, info=info, record=record)
    ranks = len(set(map(data_file_rank, named)))
    return replace(
        folder,
        info=replace(info, state="committed", ranks=ranks, tensors=len(view.tensors), objects=len(view.objects)),
        parts=0 if None in parts else len(parts),
        leftovers=leftovers,
        dead=dead,
        unknown=unknown or unseen,
        keys=hash(frozenset([*view.tensors, *view.objects])),
        record=record,
    )


def _is_torchs(storage: Storage, files: Sequence[FileInfo]) -> bool:
    """Returns whether ``.metadata`` is a pickle of torch's own writer. Reads only its first and last bytes."""
    name = metadata_file_name()
    for nbytes in (file.nbytes for file in files if file.name == name):
        with suppress(CheckpointError):
            ends = storage.read_range(name, 0, 1) + storage.read_range(name, max(0, nbytes - _TRAILER), _TRAILER)
            return looks_like_pickle(ends) and not is_index(ends)
    return False


def _leftovers(
    storage: Storage, files: Sequence[FileInfo], saves: Mapping[str, str]
) -> tuple[tuple[FileInfo, ...], tuple[FileInfo, ...], str]:
    """Returns ``leftovers``, ``dead`` and ``unknown`` of a `Folder`."""

    def is_known(name: str) -> bool:
        return is_ours(name) and save_id_in(name) in saves

    by_name = {file.name: file for file in files}
    left, dead = list[FileInfo](), list[FileInfo]()
    unknown = ""
    try:
        left = [by_name[name] for name in leftovers(storage, list(by_name)) if not is_known(name)]
        dead = [by_name[name] for name in dead_files(storage, list(by_name)) if not is_known(name)]
    except CheckpointError as error:
        unknown = f"the leftovers of saves there cannot be recognised: {error}"
    return tuple(left), tuple(dead), unknown


def _time(seconds: float) -> datetime | None:
    with suppress(ValueError, OverflowError):  # some file systems report times beyond the year 9999
        return datetime.fromtimestamp(seconds, timezone.utc)
    return None


# --- the steps of one job ---------------------------------------------------------------------------------------------
#
# A manager records the step of each checkpoint. Without a record, the name and the keys decide whether a checkpoint is
# a step. A number in the name is not enough: directories of ranks or models also have numbers in their names, and often
# have equal keys.

_STEP = re.compile(r"(\D*(?:step|iter|iteration|epoch|checkpoint|ckpt)[-_=. ]*)\d+", re.IGNORECASE)
_NOT_STEPS = (
    "its checkpoints might not be steps of one job. Without a manager's records, steps must be named like step-10 and "
    "step-20 and have equal keys, and beside them, no other directory with a checkpoint may have a number in its name. "
    "Delete old checkpoints by hand."
)
_IN_A_STEP = (
    "one of its parent directories is named like a step. To delete old checkpoints in this directory, pass its own "
    "path to gc."
)


def lines_of_steps(folder: Folder, *, in_step: bool = False) -> Iterator[tuple[Folder, list[Folder], str]]:
    """Yields, for each job below a directory, the directory of its steps, its committed steps, and an empty string.

    If a directory holds several committed checkpoints with numbers and without a manager's records, yields these as
    one job. If they might not be steps of one job, the third value explains why. ``in_step`` is whether a directory
    between the user's path and this directory is named like a step.
    """
    if folder.info is not None:
        return
    jobs, others = _jobs([child for child in folder.folders if child.info is not None])
    yield from ((folder, _counted(steps), "") for steps in jobs)
    parents = [child for child in folder.folders if child.info is None and child.checkpoints]
    numbered = [child.name for child in (*others, *parents) if _NUMBER.search(child.name)]
    steps = _counted(others)
    if len(steps) > 1:
        words = {match and match[1] for match in map(_STEP.fullmatch, numbered)}
        is_line = len(words) == 1 and None not in words and len({step.keys for step in steps}) == 1
        yield folder, steps, _IN_A_STEP if in_step else "" if is_line else _NOT_STEPS
    for parent in parents:
        yield from lines_of_steps(parent, in_step=in_step or _STEP.search(parent.name) is not None)


def _counted(folders: Sequence[Folder]) -> list[Folder]:
    """Returns the committed checkpoints that have a step.

    If each rank saves by itself, leaves out checkpoints of fewer ranks than another, which may be incomplete.
    """
    committed = [one for one in folders if one.info is not None and one.info.state == "committed"]
    most = max((one.parts for one in committed), default=0)
    return [one for one in committed if one.step is not None and one.parts in (0, most)]


def steps_of(folders: Sequence[Folder]) -> list[Step]:
    return [
        Step(folder.step, folder.name, saved_at=int(folder.saved * 1e9), record=folder.record)
        for folder in folders
        if folder.step is not None
    ]


def of_manager(steps: Sequence[Step]) -> tuple[Retention, list[Step]]:
    """Returns a manager's retention rules as of its last save, and the steps to which they apply: the current branch.

    Without a manager, the rules are empty.
    """
    own = members(steps, current_branch(steps) or ())
    last = last_saved(own)
    if last is None or last.record is None:
        return Retention(), own
    return Retention.of_record(last.record), own


def _jobs(folders: Sequence[Folder]) -> tuple[list[list[Folder]], list[Folder]]:
    """Returns the steps that managers recorded, grouped by job, and the other checkpoints in a directory.

    The names of a job's steps differ only by the step. A checkpoint with such a name counts as a step of the job even
    if it was saved without a manager, because the manager also counts it.
    """
    jobs: dict[str, list[Folder]] = defaultdict(list)  # by a pattern of the names
    unrecorded: list[Folder] = []
    for folder in folders:
        if folder.record is None:
            unrecorded.append(folder)
            continue
        *_, number = (number for number in _NUMBER.finditer(folder.name) if int(number[0]) == folder.step)
        before, after = folder.name[: number.start()], folder.name[number.end() :]
        jobs[rf"{re.escape(before)}(\d+){re.escape(after)}"].append(folder)
    others: list[Folder] = []
    for folder in unrecorded:
        matches = ((re.fullmatch(names, folder.name), steps) for names, steps in jobs.items())
        step, steps = next(((int(match[1]), steps) for match, steps in matches if match), (folder.step, others))
        assert folder.info is not None
        steps.append(replace(folder, info=replace(folder.info, step=step)))
    return list(jobs.values()), others
