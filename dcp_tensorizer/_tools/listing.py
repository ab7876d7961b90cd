"""Which checkpoints lie in a directory and below it, and what saves have left there."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from .._format.index import is_index, looks_like_pickle
from .._format.layout import data_file_rank, is_data_file_name, is_metadata_file_name, is_ours, metadata_file_name
from .._saving.commit import dead_files, leftovers
from .._storage.base import FileInfo, Storage
from ..errors import CheckpointError, NotCommitted, UnsupportedFormat
from .checkpoint_view import data_files, read_parts, saved_at
from .stored_values import view_checkpoint

__all__ = ["Folder", "Listed", "State", "find", "step_of", "walk", "where_below"]

State = Literal["committed", "unfinished", "incomplete", "torch", "unreadable"]

_NUMBER = re.compile(r"\d+")
_TRAILER = 24  # bytes at the end that tell a pickle of ours from torch's
_MAX_NAMED, _MAX_DEPTH = 3, 2  # of a hint


@dataclass(frozen=True, slots=True)
class Listed:
    """A directory with a checkpoint, or with what a save has left of one.

    Attributes:
        path: Without credentials.
        state: ``committed``; ``incomplete``: data files that its metadata names are missing or of other sizes, as in a
            copy under way; ``unfinished``; ``torch``: written by torch's own FileSystemWriter; or ``unreadable``:
            damaged, or of another format.
        step: See `step_of`.
        saved: When it was saved, in seconds since the epoch: by its own record, which copies keep; without one, when a
            file in it was last written.
        files: All files in it.
        ranks, tensors, objects: What is in it; None if it is not committed.
        parts: Ranks that have committed, where each saves for itself; 0 where all commit together.
        leftovers: Files of saves that were not committed, as far as a listing shows.
        dead: Those of them that are of dead saves, unless a save is under way there.
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
    files, names = storage.listing()
    folders = []
    for name in names:
        with suppress(CheckpointError):  # a directory that went away, or is not ours to read
            folders.append(walk(storage.child(name)))
    listed = _look_at(storage, files) if any(is_ours(file.name) for file in files) else None
    return Folder(storage, _name(storage), tuple(files), tuple(folders), listed)


def _look_at(storage: Storage, files: list[FileInfo]) -> Listed:
    left, dead = _leftovers(storage, files)
    listed = Listed(
        storage,
        storage.path,
        "unfinished",
        step_of(_name(storage)),
        _last_written(files),
        tuple(files),
        leftovers=left,
        dead=dead,
    )
    try:
        parts = read_parts(storage)
        view = view_checkpoint(storage, parts)
    except NotCommitted:
        return listed
    except CheckpointError as error:
        torchs = isinstance(error, UnsupportedFormat) and _is_torchs(storage, files)
        return replace(listed, state="torch" if torchs else "unreadable", leftovers=(), dead=())
    named = data_files(parts)
    listed = replace(listed, saved=saved_at(parts))
    if not named.items() <= {(file.name, file.nbytes) for file in files}:
        return replace(listed, state="incomplete", leftovers=(), dead=())
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


def _leftovers(storage: Storage, files: Sequence[FileInfo]) -> tuple[tuple[FileInfo, ...], tuple[FileInfo, ...]]:
    """The files of saves that were not committed, also those that no listing shows; and those that are of dead saves.

    None if that cannot be told. They are in the order in which they can be removed.
    """
    by_name = {file.name: file for file in files}
    try:
        left = [by_name[name] for name in leftovers(storage, list(by_name))]
        dead = [by_name[name] for name in dead_files(storage, list(by_name))]
        begun = [file for file in storage.uploads() if is_data_file_name(file.name)]
    except CheckpointError:
        return (), ()
    return (*begun, *left), tuple(dead)


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
