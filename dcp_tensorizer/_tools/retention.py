"""Which checkpoints lie below a path, and which of their files can go.

Everything here may meet a save under way, and must not harm it. On a local disk a save locks its directory, so files
are removed only by the holder of that lock. Elsewhere nobody can see whether a save is under way. There, files are
removed only if they are older than any save takes, and only the user knows how long that is.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from .._format.layout import data_file_rank, is_data_file_name, is_metadata_file_name, is_temporary_file_name
from .._saving.commit import leftovers
from .._storage.base import DirectoryLock, FileInfo, Storage
from ..errors import CheckpointError, NotCommitted, describe
from .checkpoint_view import data_files, read_parts, view_checkpoint

__all__ = ["Listed", "Removal", "collect", "find", "plan_collection"]

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Listed:
    """A directory with a checkpoint, or with what a save has left of one.

    Attributes:
        path: Without credentials.
        state: ``committed``; ``incomplete``: data files that its metadata names are missing or of other sizes, as in a
            copy under way; ``unfinished``; or ``unreadable``: damaged, or of another format.
        step: The last number in its name.
        saved: When it was committed, or last written to, in seconds since the epoch.
        files: All files in it.
        ranks, tensors, objects: What is in it; None if it is not committed.
        parts: Ranks that have committed, where each saves for itself; 0 where all commit together.
        leftovers: Files of saves that were not committed, as far as a listing shows.
    """

    storage: Storage
    path: str
    state: str
    step: int | None
    saved: float | None
    files: tuple[FileInfo, ...]
    ranks: int | None = None
    tensors: int | None = None
    objects: int | None = None
    parts: int = 0
    leftovers: tuple[FileInfo, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


@dataclass(frozen=True, slots=True)
class Removal:
    """What is to be removed from a directory, or why nothing is.

    Attributes:
        files: All of the checkpoint's files, or the leftovers in its directory.
        whole: The checkpoint is removed, and with it its directory.
        kept: Why files are kept that could be removed; empty if they are removed.
        failed: They are kept because they could not be removed, and not because somebody may need them.
    """

    listed: Listed
    files: tuple[FileInfo, ...]
    whole: bool
    kept: str = ""
    failed: bool = False

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def find(storage: Storage) -> list[Listed]:
    """The checkpoints in a directory and in those below it, newest first.

    Raises:
        NotCommitted: there is no such directory.
        ReadError: it cannot be listed.
    """
    return sorted(_walk(storage, *storage.listing()), key=_age)


def plan_collection(checkpoints: Sequence[Listed], keep: int | None, older_than: float | None) -> list[Removal]:
    """What `collect` would remove.

    A committed checkpoint is removed only if all of this holds: in its directory it is neither among the ``keep``
    newest nor among those with the ``keep`` highest steps, and it is older than ``older_than`` seconds. The newest one
    is never removed, nor is the one with the highest step, from which a job would resume. Where ranks save for
    themselves, a checkpoint of fewer ranks than another beside it may lack some: it neither counts nor is removed.

    Args:
        checkpoints: What `find` gives.
        keep: Committed checkpoints to keep in each directory; None and no ``older_than``: all of them.
        older_than: Seconds.
    """
    safe = _safe_paths([listed for listed in checkpoints if listed.state == "committed"], keep or 1)
    removals = []
    for listed in checkpoints:
        asked = listed.state == "committed" and (keep is not None or older_than is not None)
        whole = asked and listed.path not in safe and _is_old([listed.saved], older_than or 0.0)
        files = tuple(file for file in listed.files if _is_ours(file.name)) if whole else listed.leftovers
        if files:
            removals.append(Removal(listed, files, whole, _objection(listed, older_than)))
    return removals


def _safe_paths(committed: Sequence[Listed], keep: int) -> set[str]:
    siblings = defaultdict(list)
    for listed in committed:
        siblings[listed.path.rpartition("/")[0]].append(listed)
    safe: set[str] = set()
    for beside in siblings.values():
        most = max(listed.parts for listed in beside)
        safe.update(listed.path for listed in beside if 0 < listed.parts < most)
        by_time = [listed for listed in beside if listed.path not in safe]
        # Times tell which is newest, unless the files were copied; steps do, unless a job went back to an earlier one.
        by_step = sorted(by_time, key=lambda listed: -1 if listed.step is None else listed.step, reverse=True)
        safe.update(listed.path for order in (by_time, by_step) for listed in order[:keep])
    return safe


def collect(removal: Removal) -> Removal:
    """Removes what was planned, unless there is a reason not to; returns what was removed, or why it was not."""
    storage = removal.listed.storage
    if removal.kept:
        return removal
    try:
        lock = storage.lock_directory()
        try:
            reason = _remove(removal, lock)
        finally:
            lock.release()
    except Exception as error:
        return replace(removal, files=(), kept=storage.scrub(f"cannot remove: {describe(error)}"), failed=True)
    return replace(removal, files=(), kept=reason) if reason else removal


def _remove(removal: Removal, lock: DirectoryLock) -> str:
    """Removes files from a locked directory, unless there is a reason not to, which it returns."""
    storage = removal.listed.storage
    if storage.locks_are_visible and lock.leftovers() is None:
        return "a save is under way there"
    if set(storage.listing()[0]) != set(removal.listed.files):
        return "a save has been there in the meantime"
    names = [file.name for file in removal.files]
    if removal.whole:
        # The metadata first: from then on the rest are leftovers, as of a save that died.
        storage.remove(*filter(is_metadata_file_name, names))
        storage.remove(*itertools.filterfalse(is_metadata_file_name, names))
    else:
        storage.discard(*names)
    if removal.whole or removal.listed.state == "unfinished":
        storage.remove_directory()
    return ""


def _walk(storage: Storage, files: list[FileInfo], folders: list[str]) -> Iterator[Listed]:
    if any(_is_ours(file.name) for file in files):
        yield _look_at(storage, files)
        return
    for name in folders:
        child = storage.child(name)
        with suppress(CheckpointError):  # a directory that went away, or is not ours to read
            yield from _walk(child, *child.listing())


def _look_at(storage: Storage, files: list[FileInfo]) -> Listed:
    numbers = _NUMBER.findall(storage.path.rstrip("/").rpartition("/")[2])
    listed = Listed(
        storage,
        storage.path,
        "unfinished",
        int(numbers[-1]) if numbers else None,
        _last_written(files),
        tuple(files),
        leftovers=_leftovers(storage, files),
    )
    try:
        parts = read_parts(storage)
        view = view_checkpoint(storage, parts)
    except NotCommitted:
        return listed
    except CheckpointError:
        return replace(listed, state="unreadable", leftovers=())
    named = data_files(parts)
    if not named.items() <= {(file.name, file.nbytes) for file in files}:
        return replace(listed, state="incomplete", leftovers=())
    return replace(
        listed,
        state="committed",
        saved=_last_written([file for file in files if is_metadata_file_name(file.name)]),
        ranks=len(set(map(data_file_rank, named))),
        tensors=len(view.tensors),
        objects=len(view.objects),
        parts=0 if None in parts else len(parts),
    )


def _last_written(files: Sequence[FileInfo]) -> float | None:
    return max((file.modified for file in files if file.modified is not None), default=None)


def _leftovers(storage: Storage, files: Sequence[FileInfo]) -> tuple[FileInfo, ...]:
    """The files of saves that were not committed, also those that no listing shows; none if that cannot be told."""
    try:
        names = set(leftovers(storage, [file.name for file in files]))
        begun = [file for file in storage.uploads() if is_data_file_name(file.name)]
    except CheckpointError:
        return ()
    return (*(file for file in files if file.name in names), *begun)


def _objection(listed: Listed, older_than: float | None) -> str:
    """Why nothing may be removed from a directory, if that is known without its lock."""
    if listed.storage.locks_are_visible:
        return ""
    times = [file.modified for file in listed.leftovers]
    if times and (older_than is None or not _is_old(times, older_than)):
        return "a save may be under way there: say with --older-than how long no save can take"
    return ""


def _is_old(times: Sequence[float | None], seconds: float) -> bool:
    return all(moment is not None and time.time() - moment >= seconds for moment in times)


def _is_ours(name: str) -> bool:
    return is_data_file_name(name) or is_metadata_file_name(name) or is_temporary_file_name(name)


def _age(listed: Listed) -> tuple[float, int, str]:
    return -(listed.saved or 0.0), -(listed.step or 0), listed.path
