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
_TRAILER = 24  # bytes at the end that distinguish this package's pickles from torch's
_MAX_NAMED, _MAX_DEPTH = 3, 2  # of a hint: checkpoints named, and levels of directories searched


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A directory with a checkpoint, or with the files of an unfinished one.

    Attributes:
        path: The path, without credentials.
        step: The last number in the directory's name.
        saved: The time of the save in UTC, as the checkpoint records it. Without a record, the time of the last write
            to a file in the directory. None if the storage has no times, or for a year beyond 9999.
        state: ``committed``: complete. ``unfinished``: a save is in progress, or has died. ``unflushed``: in a local
            folder (``local=...``), and not on the remote yet. ``flushed``: a local copy of the remote's checkpoint.
            ``incomplete``: data files that the metadata names are missing or of other sizes, as in a copy in progress.
            ``torch``: written by torch's own ``FileSystemWriter``. ``unreadable``: damaged, or of another format.
        nbytes: Bytes of all files in the directory.
        shared_nbytes: Bytes of files that other checkpoints share, and that take space once (``reuse_unchanged``).
        ranks, tensors, objects: Number of ranks that wrote the checkpoint, and of its values; None unless committed.
        leftover_nbytes: Bytes of files that are not part of the checkpoint, as far as a listing shows.
        metrics: The metrics that a manager recorded.
        best: The metric of ``keep_best`` by which this is the best of its manager's checkpoints; otherwise None.
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
        info: The record that `list_checkpoints` returns; None for a directory without a checkpoint or leftovers.
        step: The step that a manager recorded, if the directory's name contains it; otherwise `step_of` the name.
        parts: The number of ranks that have committed, if each saves for itself; otherwise 0.
        leftovers: Files of uncommitted saves, as far as a listing shows, in the order in which to remove them, without
            files that a flush needs.
        dead: The leftovers of dead saves; empty while a save is in progress.
        unknown: Why there may be more leftovers; otherwise empty.
        keys: A hash of the keys; None unless committed.
        record: The manager's record; None without a record, or if the directory's name has another step.
    """

    storage: Storage
    files: tuple[FileInfo, ...]
    folders: tuple[Folder, ...]
    info: CheckpointInfo | None = None
    step: int | None = None
    parts: int = 0
    leftovers: tuple[FileInfo, ...] = ()
    dead: tuple[FileInfo, ...] = ()
    unknown: str = ""
    keys: int | None = None
    record: SaveRecord | None = None

    @property
    def name(self) -> str:
        return self.storage.path.rstrip("/").rpartition("/")[2]

    def walk(self) -> Iterator[Folder]:
        """Yields the directory and all directories below it, parents first."""
        yield self
        for folder in self.folders:
            yield from folder.walk()

    # The properties below cover all checkpoints in and below the directory: a single one, or the parts of one.

    @property
    def checkpoints(self) -> list[Folder]:
        return [folder for folder in self.walk() if folder.info is not None]

    @property
    def infos(self) -> list[CheckpointInfo]:
        return [folder.info for folder in self.walk() if folder.info is not None]

    @property
    def committed(self) -> bool:
        return all(info.state == "committed" for info in self.infos)

    @property
    def contents(self) -> int | None:
        return hash(frozenset(part.keys for part in self.checkpoints)) if self.committed else None

    @property
    def saved(self) -> float:
        """The time of the last part, in seconds since the epoch; 0 if unknown."""
        return max(0.0 if info.saved is None else info.saved.timestamp() for info in self.infos)

    @property
    def ranks(self) -> int:
        """The number of ranks that have committed, if each saves for itself; otherwise 0."""
        return min(part.parts for part in self.checkpoints)


def list_checkpoints(
    path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> tuple[CheckpointInfo, ...]:
    """Lists the checkpoints in and below a directory, by directory and then by step, the highest first.

    Links to directories are not followed.

    Args:
        path: The directory.
        storage_options: Passed to the fsspec filesystem of a URL.

    Raises:
        NotCommitted: there is no such directory.
        ReadError: it cannot be listed.
    """
    top = walk(open_storage(path, storage_options))
    best: dict[str, str | None] = {}
    for folders, _ in arrange(top):
        rules, steps = of_manager(steps_of(folders))
        if (found := rules.best(steps)) is not None:
            best |= {folder.storage.path: rules.metric for folder in folders if folder.step == found.number}

    def order(info: CheckpointInfo) -> tuple[list[tuple[int, str]], float, str]:
        above, _, name = info.path.rstrip("/").rpartition("/")
        # by text, and by the numbers in the text, the highest first
        naturally = [(-int(number or 0), text) for number, text in re.findall(r"(\d*)(\D*)", above)]
        return naturally, math.inf if info.step is None else -info.step, name

    return tuple(sorted((replace(info, best=best.get(info.path)) for info in top.infos), key=order))


def step_of(name: str) -> int | None:
    """Returns the last number in the name of a checkpoint's directory."""
    numbers = _NUMBER.findall(name)
    return int(numbers[-1]) if numbers else None


def read_parts_at(storage: Storage) -> dict[int | None, Metadata]:
    """Reads a checkpoint's metadata (see `read_parts`). `NotCommitted` also names checkpoints below the path."""
    try:
        return read_parts(storage)
    except NotCommitted as error:
        raise NotCommitted(f"{error}{where_below(storage)}") from None


def checkpoints_in(storage: Storage) -> list[str]:
    """Returns the subdirectories that hold a checkpoint, the highest step first; for a missing directory, none."""
    try:
        return list(_checkpoints_below(storage, 1))
    except NotCommitted:
        return []


def where_below(storage: Storage) -> str:
    """Returns a hint that names the checkpoints below a directory. Without any, returns an empty string."""
    try:
        found = list(itertools.islice(_checkpoints_below(storage, _MAX_DEPTH), _MAX_NAMED + 1))
    except CheckpointError:
        return ""
    shown = ", ".join(found[:_MAX_NAMED]) + (" and others" if len(found) > _MAX_NAMED else "")
    return f" There are checkpoints below it: {shown}." if found else ""


def _checkpoints_below(storage: Storage, depth: int) -> Iterator[str]:
    """Yields the paths of checkpoints below a directory, found by their file names."""
    for name in sorted(storage.listing()[1], key=lambda name: (step_of(name) or 0, name), reverse=True):
        child = storage.child(name)
        if any(is_metadata_file_name(file.name) for file in child.listing()[0]):
            yield name
        elif depth > 1:
            yield from (f"{name}/{below}" for below in _checkpoints_below(child, depth - 1))


def walk(storage: Storage) -> Folder:
    """Lists a directory and all directories below it.

    Raises `NotCommitted` if there is no such directory, and `ReadError` if it cannot be listed.
    """
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
    """Data files in incomplete uploads in and below a directory, by their paths below it.

    No listing shows them, nor a directory that has no other files, for example after its first save was killed.
    """

    files: Sequence[FileInfo]
    unknown: str = ""
    """Why there may be more uploads; otherwise empty."""

    def here(self, storage: Storage, listed: Sequence[FileInfo]) -> list[FileInfo]:
        """Returns the uploads in the directory itself; files of a model only if a save has recorded them.

        Uploads to listed files are skipped: such a file may be committed, and `discard` would remove it as well.
        """
        names = {file.name for file in listed}
        begun = [file for file in self.files if "/" not in file.name and file.name not in names]
        if all(is_data_file_name(file.name) for file in begun):
            return begun
        recorded = {name for uploads in recorded_uploads(storage, names).values() for name in uploads}
        return [file for file in begun if is_data_file_name(file.name) or file.name in recorded]

    def below(self) -> dict[str, _Uploads]:
        """Returns the uploads below the directory, by subdirectory."""
        found: dict[str, list[FileInfo]] = {}
        for file in self.files:
            folder, slash, rest = file.name.partition("/")
            if folder and slash:
                found.setdefault(folder, []).append(file._replace(name=rest))
        return {folder: _Uploads(files, self.unknown) for folder, files in found.items()}


def _walk(storage: Storage, saves: Mapping[str, str], uploads: _Uploads) -> Folder:
    """Lists a directory (see `walk`). ``saves`` are those of the local folders around it (see `_local_saves`)."""
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
            pass  # removed meanwhile
        except CheckpointError as error:  # other directories may be readable
            logger.warning("a directory is missing from the listing: %s", error)
    here = uploads.here(storage, files)
    folder = Folder(storage, tuple(files), tuple(folders))
    folder = replace(folder, step=step_of(folder.name))
    is_checkpoint = here or any(is_ours(file.name) for file in files)
    return _with_checkpoint(folder, saves, here, uploads.unknown) if is_checkpoint else folder


def _local_saves(folder: Path) -> dict[str, str]:
    """Returns the state of each save with a record in a local folder, by the id of the save.

    Their files never count as leftovers, whatever their age: the flush deletes them itself.
    """
    entries = queue.Queue(folder).entries()  # of all ranks of the node; the state of the slowest rank counts
    return {entry.id: entry.state for entry in sorted(entries, key=lambda entry: entry.state in queue.OPEN)}


def _with_checkpoint(folder: Folder, saves: Mapping[str, str], uploads: Sequence[FileInfo], unseen: str) -> Folder:
    """Returns the folder with its checkpoint, or with the leftovers of a save."""
    storage, files = folder.storage, folder.files
    left, dead, unknown = _leftovers(storage, files, saves)
    leftovers = (*uploads, *left)
    times = [file.modified for file in files or uploads if file.modified is not None]
    flushes = {saves.get(save_id_in(file.name)) for file in files if is_data_file_name(file.name)}
    info = CheckpointInfo(
        path=storage.path,
        step=folder.step,
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
    named, record, step = data_files(parts), record_of(parts), folder.step
    metrics = {} if record is None else record.metrics
    if record is not None and record.step in map(int, _NUMBER.findall(folder.name)):
        step = record.step
    else:
        record = None
    info = replace(info, saved=_time(saved_at(parts)), step=step, metrics=metrics)
    if not named.items() <= {(file.name, file.nbytes) for file in files}:
        info = replace(info, state="incomplete", leftover_nbytes=0)
        return replace(folder, info=info, step=step, record=record)
    ranks = len(set(map(data_file_rank, named)))
    return replace(
        folder,
        info=replace(info, state="committed", ranks=ranks, tensors=len(view.tensors), objects=len(view.objects)),
        step=step,
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


# --- distinguishing steps from parts of one checkpoint ----------------------------------------------------------------
#
# A manager records the step of each checkpoint. Without records, the names decide. A number alone does not make a step:
# ranks and models also have numbers, often with the same keys. The name must look more like a step than the name of the
# directory around it. Otherwise the checkpoint may be a part of a larger one.

_STEP = re.compile(r"(?:step|iter|iteration|epoch|checkpoint|ckpt)[-_=. ]*\d", re.IGNORECASE)
_PART = re.compile(
    r"(?:^|[^a-z])(?:rank|shard|part|worker|node|host|gpu|device|process|replica|stage|expert|layer)[-_=. ]*\d",
    re.IGNORECASE,
)


Group = tuple[list[Folder], str]
"""The checkpoints in one directory, and why they must not be removed as old steps; empty if they may be removed."""


def arrange(top: Folder) -> list[Group]:
    """Returns the checkpoints below a directory, grouped by directory."""
    return _arrange(top, None)[1]


def _arrange(folder: Folder, outer: int | None) -> tuple[Folder | None, list[Group]]:
    """Decides whether a directory is one checkpoint (possibly in parts) or holds groups of checkpoints.

    ``outer`` is the highest `_claim` of the directories around it; None for the directory that the user named.
    """
    if folder.info is not None:
        return folder, []
    own = _claim(folder.name)
    around = max(0, own - 1) if outer is None else max(own, outer)  # the user named this directory: it may hold steps
    found: list[Folder] = []
    groups: list[Group] = []
    for child in folder.folders:
        one, below = _arrange(child, around)
        found += [] if one is None else [one]
        groups += below
    jobs, others = _jobs(found)
    groups += [(steps, "") for steps in jobs]
    if not others:
        return None, groups
    arrangement = _arrangement(others, around)
    if arrangement == "parts" and outer is not None and not groups:
        return folder, []
    objection = "" if arrangement == "steps" else f"{folder.storage.path} may hold the parts of one checkpoint"
    return None, [*groups, (others, objection)]


def steps_of(folders: Sequence[Folder]) -> list[Step]:
    """Returns the committed steps of a `Group`, as a manager sees them."""
    return [
        Step(folder.step, folder.name, saved_at=int(folder.saved * 1e9), record=folder.record)
        for folder in folders
        if folder.committed and folder.step is not None
    ]


def of_manager(steps: Sequence[Step]) -> tuple[Retention, list[Step]]:
    """Returns a manager's retention rules as of the last save, and the steps of its branch, to which they apply.

    Without a manager, the rules are empty.
    """
    own = members(steps, current_branch(steps) or ())
    last = last_saved(own)
    if last is None or last.record is None:
        return Retention(), own
    return Retention.of(last.record.keep_latest, last.record.keep_every, last.record.keep_best), own


def _jobs(folders: Sequence[Folder]) -> tuple[list[list[Folder]], list[Folder]]:
    """Separates the steps that managers recorded, by job, from the other checkpoints in a directory.

    The names of a job's steps differ only by the step. A checkpoint with such a name counts as a step of the job even
    if it was saved without a manager, as it does for the manager.
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
        steps.append(replace(folder, step=step))
    return list(jobs.values()), others


def _arrangement(folders: Sequence[Folder], around: int) -> Literal["steps", "parts", "unknown"]:
    """Decides whether checkpoints in a directory are ``steps`` of one job, ``parts`` of one checkpoint, or ``unknown``.

    Parts have several names with the same numbers and different contents, such as Accelerate's
    ``pytorch_model_fsdp_0`` and ``optimizer_0``. Steps have names that differ only by a number, and similar contents.
    """
    by_name = defaultdict(list)
    for folder in folders:
        by_name[_NUMBER.sub("#", folder.name)].append(folder)
    numbers = {frozenset(tuple(_NUMBER.findall(one.name)) for one in group) for group in by_name.values()}
    if len(by_name) > 1 and len(numbers) == 1:
        return "unknown" if _some_are_alike(folders) else "parts"
    numbered = [group for name, group in by_name.items() if "#" in name]
    if len(numbered) != 1 or not (len(folders) == 1 or _some_are_alike(numbered[0])):
        return "unknown"
    claim = _claim(numbered[0][0].name)
    # ``run-1`` with a model and an optimizer in it is also one numbered name, but several checkpoints.
    is_step = claim > around and (claim > 1 or all(folder.info is not None for folder in numbered[0]))
    return "steps" if is_step else "unknown"


def _some_are_alike(folders: Sequence[Folder]) -> bool:
    known = [folder.contents for folder in folders if folder.committed]
    return len(set(known)) < len(known)


def _claim(name: str) -> int:
    """Rates how much a name looks like a step: ``step-10`` 3, ``10`` 2, ``model-10`` 1, ``rank-10`` 0."""
    if _PART.search(name) or not _NUMBER.search(name):
        return 0
    if _STEP.search(name):
        return 3
    return 2 if name.isdecimal() else 1
