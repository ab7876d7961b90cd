"""Which checkpoints lie in a directory and below it, and what saves have left there."""

from __future__ import annotations

import itertools
import logging
import math
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from .._format.index import is_index, looks_like_pickle
from .._format.layout import (
    data_file_rank,
    is_data_file_name,
    is_metadata_file_name,
    is_ours,
    metadata_file_name,
    save_id_in,
)
from .._saving.commit import dead_files, leftovers
from .._storage.base import FileInfo, Storage
from .._storage.local import LocalStorage
from .._tiers import queue
from ..errors import CheckpointError, NotCommitted, UnsupportedFormat
from .checkpoint_view import data_files, read_parts, saved_at
from .stored_values import view_checkpoint

__all__ = ["Folder", "Listed", "State", "find", "step_of", "walk", "where_below"]

State = Literal["committed", "unfinished", "unflushed", "flushed", "incomplete", "torch", "unreadable"]

logger = logging.getLogger("dcp_tensorizer")

_NUMBER = re.compile(r"\d+")
_TRAILER = 24  # bytes at the end that tell a pickle of ours from torch's
_MAX_NAMED, _MAX_DEPTH = 3, 2  # of a hint


@dataclass(frozen=True, slots=True)
class Listed:
    """A directory with a checkpoint, or with what a save has left of one.

    Attributes:
        path: Without credentials.
        state: ``committed``; ``incomplete``: data files that its metadata names are missing or of other sizes, as in a
            copy under way; ``unfinished``; ``unflushed``: in a local folder, and not on the remote yet; ``flushed``:
            the local copy of what is there; ``torch``: written by torch's own FileSystemWriter; or ``unreadable``:
            damaged, or of another format.
        step: See `step_of`.
        saved: When it was saved, in seconds since the epoch: by its own record, which copies keep; without one, when a
            file in it was last written.
        files: All files in it.
        ranks, tensors, objects: What is in it; None if it is not committed.
        parts: Ranks that have committed, where each saves for itself; 0 where all commit together.
        leftovers: Files of saves that were not committed, as far as a listing shows, and that no flush knows of.
        dead: Those of them that are of dead saves, unless a save is under way there.
        unknown: Why there may be leftovers beyond those; empty if there are none.
        contents: The same for checkpoints of the same keys; None if it is not committed.
    """

    storage: Storage
    path: str
    state: State
    step: int | None
    saved: float | None
    files: tuple[FileInfo, ...]
    ranks: int | None = None
    tensors: int | None = None
    objects: int | None = None
    parts: int = 0
    leftovers: tuple[FileInfo, ...] = ()
    dead: tuple[FileInfo, ...] = ()
    unknown: str = ""
    contents: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def shared_nbytes(self) -> int:
        """Of files that have names elsewhere, too."""
        return sum(file.nbytes for file in self.files if file.shared is not None)


@dataclass(frozen=True, slots=True)
class Folder:
    """A directory, as it was when it was listed.

    Attributes:
        name: Its own.
        files: In it.
        folders: In it.
        listed: The checkpoint in it, if there is one.
    """

    storage: Storage
    name: str
    files: tuple[FileInfo, ...]
    folders: tuple[Folder, ...]
    listed: Listed | None

    def walk(self) -> Iterator[Folder]:
        """Itself and all below it; who is in another comes after it."""
        yield self
        for folder in self.folders:
            yield from folder.walk()

    @property
    def checkpoints(self) -> list[Listed]:
        """Those in it and below it."""
        return [folder.listed for folder in self.walk() if folder.listed is not None]


def find(storage: Storage) -> list[Listed]:
    """The checkpoints in a directory and in those below it: by directory, and there the highest step first.

    Raises:
        NotCommitted: there is no such directory.
        ReadError: it cannot be listed.
    """
    return sorted(walk(storage).checkpoints, key=_order)


def step_of(name: str) -> int | None:
    """The step of a checkpoint, by the name of its directory: the last number in that."""
    numbers = _NUMBER.findall(name)
    return int(numbers[-1]) if numbers else None


def where_below(storage: Storage) -> str:
    """A hint for somebody who named a directory that holds no checkpoint itself; empty if there are none below it."""
    try:
        found = list(itertools.islice(_checkpoints_below(storage, _MAX_DEPTH), _MAX_NAMED + 1))
    except CheckpointError:
        return ""
    shown = ", ".join(found[:_MAX_NAMED]) + (" and others" if len(found) > _MAX_NAMED else "")
    return f" There are checkpoints below it: {shown}." if found else ""


def _checkpoints_below(storage: Storage, depth: int) -> Iterator[str]:
    """The paths of checkpoints below a directory, without a look at what is in them."""
    for name in sorted(storage.listing()[1], key=lambda name: (step_of(name) or 0, name), reverse=True):
        child = storage.child(name)
        if any(is_metadata_file_name(file.name) for file in child.listing()[0]):
            yield name
        elif depth > 1:
            yield from (f"{name}/{below}" for below in _checkpoints_below(child, depth - 1))


def walk(storage: Storage) -> Folder:
    """A directory and all below it.

    Raises:
        NotCommitted: there is no such directory.
        ReadError: it cannot be listed.
    """
    around: dict[str, str] = {}
    if isinstance(storage, LocalStorage):
        for folder in Path(storage.real_path).parents:
            around |= _local_saves(folder)
    return _walk(storage, around, _begun(storage))


class _Begun(NamedTuple):
    """Data files that have been begun in and below a directory and that no listing shows, by their names below it.

    A directory may hold nothing else, as when its first save was killed: no listing shows such a directory, either.
    """

    files: Sequence[FileInfo]
    unknown: str = ""
    """Why there may be others."""

    def here(self, listed: Sequence[FileInfo]) -> list[FileInfo]:
        """Those in the directory itself, but for others of its files, which may be committed: `discard` takes both."""
        names = {file.name for file in listed}
        return [file for file in self.files if "/" not in file.name and file.name not in names]

    def below(self) -> dict[str, _Begun]:
        """By subdirectory."""
        found: dict[str, list[FileInfo]] = {}
        for file in self.files:
            folder, slash, rest = file.name.partition("/")
            if folder and slash:
                found.setdefault(folder, []).append(file._replace(name=rest))
        return {folder: _Begun(files, self.unknown) for folder, files in found.items()}


def _begun(storage: Storage) -> _Begun:
    try:
        return _Begun([file for file in storage.uploads() if is_data_file_name(posixpath.basename(file.name))])
    except CheckpointError as error:
        return _Begun((), f"what saves have left there cannot be told: {error}")


def _walk(storage: Storage, saves: Mapping[str, str], begun: _Begun) -> Folder:
    """See `walk`; ``saves``: those in local folders around the directory, see `_local_saves`."""
    files: list[FileInfo] = []
    names: list[str] = []
    try:
        files, names = storage.listing()
    except NotCommitted:
        if not begun.files:
            raise
    if queue.FOLDER in names and isinstance(storage, LocalStorage):
        saves = {**saves, **_local_saves(Path(storage.location))}
    below, folders = begun.below(), []
    for name in {**dict.fromkeys(names), **below}:
        try:
            folders.append(_walk(storage.child(name), saves, below.get(name, _Begun((), begun.unknown))))
        except NotCommitted:
            pass  # it went away
        except CheckpointError as error:  # it is not ours to read, and others are
            logger.warning("what is below it is not listed: %s", error)
    here = begun.here(files)
    is_checkpoint = here or any(is_ours(file.name) for file in files)
    listed = _look_at(storage, files, saves, here, begun.unknown) if is_checkpoint else None
    return Folder(storage, _name(storage), tuple(files), tuple(folders), listed)


def _local_saves(folder: Path) -> dict[str, str]:
    """How far each save has come that a local folder has a record of, by its id; none where there are no records.

    Their files are of no dead save, however old they are: the flush removes them when it may.
    """
    entries = queue.Queue(folder).entries()  # of all ranks of the node, whose parts may have come less far
    return {entry.id: entry.state for entry in sorted(entries, key=lambda entry: entry.state in queue.OPEN)}


def _look_at(
    storage: Storage, files: list[FileInfo], saves: Mapping[str, str], begun: Sequence[FileInfo], unseen: str
) -> Listed:
    left, dead, unknown = _leftovers(storage, files, saves)
    listed = Listed(
        storage,
        storage.path,
        _uncommitted(files, saves),
        step_of(_name(storage)),
        _last_written(files or begun),
        tuple(files),
        leftovers=(*begun, *left),
        dead=dead,
        unknown=unknown or unseen,
    )
    try:
        parts = read_parts(storage)
        view = view_checkpoint(storage, parts)
    except NotCommitted:
        return listed
    except CheckpointError as error:
        torchs = isinstance(error, UnsupportedFormat) and _is_torchs(storage, files)
        return replace(listed, state="torch" if torchs else "unreadable", leftovers=(), dead=(), unknown="")
    named = data_files(parts)
    listed = replace(listed, saved=saved_at(parts))
    if not named.items() <= {(file.name, file.nbytes) for file in files}:
        return replace(listed, state="incomplete", leftovers=(), dead=(), unknown="")
    return replace(
        listed,
        state="committed",
        ranks=len(set(map(data_file_rank, named))),
        tensors=len(view.tensors),
        objects=len(view.objects),
        parts=0 if None in parts else len(parts),
        contents=hash(frozenset([*view.tensors, *view.objects])),
    )


def _is_torchs(storage: Storage, files: Sequence[FileInfo]) -> bool:
    """Whether ``.metadata`` is a pickle as torch's own writer leaves it; of a large one, only the ends are read."""
    name = metadata_file_name()
    for nbytes in (file.nbytes for file in files if file.name == name):
        with suppress(CheckpointError):
            ends = storage.read_range(name, 0, 1) + storage.read_range(name, max(0, nbytes - _TRAILER), _TRAILER)
            return looks_like_pickle(ends) and not is_index(ends)
    return False


def _uncommitted(files: Sequence[FileInfo], saves: Mapping[str, str]) -> State:
    """The state of a directory without metadata."""
    states = {saves.get(save_id_in(file.name)) for file in files if is_data_file_name(file.name)}
    if states & queue.OPEN:
        return "unflushed"
    return "flushed" if queue.REMOTE in states else "unfinished"


def _leftovers(
    storage: Storage, files: Sequence[FileInfo], saves: Mapping[str, str]
) -> tuple[tuple[FileInfo, ...], tuple[FileInfo, ...], str]:
    """See `Listed`: its leftovers, in the order in which they can be removed, the dead ones, and what is unknown."""
    by_name = {file.name: file for file in files}
    left, dead = list[FileInfo](), list[FileInfo]()
    unknown = ""
    try:
        left = [by_name[name] for name in leftovers(storage, list(by_name)) if save_id_in(name) not in saves]
        dead = [by_name[name] for name in dead_files(storage, list(by_name)) if save_id_in(name) not in saves]
    except CheckpointError as error:
        unknown = f"what saves have left there cannot be told: {error}"
    return tuple(left), tuple(dead), unknown


def _name(storage: Storage) -> str:
    return storage.path.rstrip("/").rpartition("/")[2]


def _last_written(files: Sequence[FileInfo]) -> float | None:
    return max((file.modified for file in files if file.modified is not None), default=None)


def _order(listed: Listed) -> tuple[list[tuple[int, str]], float, str]:
    above, _, name = listed.path.rstrip("/").rpartition("/")
    return _naturally(above), math.inf if listed.step is None else -listed.step, name


def _naturally(path: str) -> list[tuple[int, str]]:
    """Sorts paths by their text, and by the numbers in them, the highest first."""
    return [(-int(number or 0), text) for number, text in re.findall(r"(\d*)(\D*)", path)]
