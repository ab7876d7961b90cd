"""Plans and carries out the removal of old checkpoints and of the leftovers of dead saves.

A save or a copy may be in progress in any directory. A file is therefore removed as a leftover only if it provably
belongs to a dead save (see `commit.dead_files`), or if it is older than ``older_than``, for which the user chooses an
age that no save or copy exceeds. A checkpoint is removed as old only if it is known to be a step of a job.
"""

from __future__ import annotations

import os
import posixpath
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from .._runtime.validation import check_count, check_flags, check_timeout
from .._saving.commit import remove_files, withdraw
from .._storage.base import FileInfo, Storage
from .._storage.open import open_storage
from .._tensor_file.names import is_data_file_name, is_ours, is_temporary_file_of_job
from ..errors import describe
from ._find import Folder, lines_of_steps, of_manager, steps_of, walk

_MAY_BE_IN_PROGRESS = (
    "a save or a copy may be in progress there. To remove its files once they are old enough, pass --older-than with "
    "an age that no save or copy exceeds."
)
_RETAINED = "a rule of its manager retains it. To remove it anyway, delete its directory."


@dataclass(frozen=True, slots=True)
class Collected:
    """Files of one directory that `collect` removed (with ``dry_run``: would remove), or retained for a reason.

    Attributes:
        path: The directory, without credentials.
        whole: True for a whole checkpoint; False for the leftovers of saves.
        files: Paths below the directory.
        nbytes: For removed files, the bytes that the removal frees: a file that has hard links elsewhere does not
            count. For retained files, their total size.
        kept: Why the files were retained; None for removed files.
        failed: True if the files were retained because of an error: leftovers could not be recognised, or files could
            not be removed.
    """

    path: str
    whole: bool
    files: tuple[str, ...]
    nbytes: int
    kept: str | None
    failed: bool


Removal = tuple[Folder, Collected]
"""The directory as listed for the plan, and the planned removal, or the reason against it."""


def collect(
    path: str | os.PathLike[str],
    *,
    keep_latest: int | None = None,
    older_than: float | None = None,
    only_data: bool = False,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> tuple[Collected, ...]:
    """Removes old checkpoints and the leftovers of dead saves, in and below a directory.

    A checkpoint is removed if it is known to be a step of a job, is neither among the ``keep_latest`` newest nor among
    the ``keep_latest`` highest steps of its directory, and is older than ``older_than``. With neither argument, only
    leftovers are removed. Always retained are the newest committed checkpoint, the targets of links in and below
    ``path``, the checkpoints that the directory's last manager retains by ``keep_every`` or ``keep_best``, and those in
    which a save may be in progress.

    Args:
        path: The directory.
        keep_latest: Number of checkpoints to retain in each directory, at least 1. By default, the ``keep_latest`` of
            the directory's last manager; 1 if there is no manager, or if its ``keep_latest`` is None.
        older_than: Minimum age in seconds: of a checkpoint, by the recorded time of the save; of leftovers, by the time
            of their last change. Leftovers that provably belong to dead saves are removed at any age.
        only_data: Remove only files that this package wrote. The directory of a removed checkpoint stays if it holds
            other files.
        dry_run: Remove nothing, and return what would be removed.
        storage_options: Options of a URL's storage, such as credentials.

    Raises:
        TypeError, ValueError: an argument is invalid: for example, ``keep_latest`` is less than 1, or ``older_than``
            negative or NaN.
        NotCommitted: there is no such directory.
        ReadError: the directory cannot be listed.
    """
    keep_latest = check_count("keep_latest", keep_latest, optional=True)
    older_than = check_timeout(older_than, least=0, name="older_than", optional=True)
    check_flags(only_data=only_data, dry_run=dry_run)
    removals = plan_collection(open_storage(path, storage_options), keep_latest, older_than, only_data=only_data)
    return tuple(removal[1] if dry_run else remove(removal) for removal in removals)


def plan_collection(
    storage: Storage, keep: int | None, older_than: float | None, *, only_data: bool = False
) -> list[Removal]:
    """Plans what `collect` removes; its docstring has the rules. Steps are those of `lines_of_steps`."""
    top = walk(storage)
    removals: list[Removal] = []
    if keep is not None or older_than is not None:
        removals += _old_checkpoints(top, keep, older_than, only_data)
    # A retained checkpoint may also hold leftovers of dead saves. If it is retained because of an error, that error is
    # reported already.
    done = [folder for folder, planned in removals if planned.kept is None or planned.failed]
    whole = {part.storage.path for folder in done for part in folder.checkpoints}
    for _, folder in top.walk():
        if folder.info is None:  # killed jobs leave temporary files beside their checkpoints
            files = tuple(file for file in folder.files if is_temporary_file_of_job(file.name))
            if files:
                kept = None if _are_old(files, older_than) else _MAY_BE_IN_PROGRESS
                removals.append(_removal(folder, files, whole=False, kept=kept))
        elif folder.storage.path not in whole:
            removals += _leftovers(folder, older_than)
    return _with_shared(removals)


def _removal(
    folder: Folder, files: Sequence[FileInfo], *, whole: bool, kept: str | None = None, failed: bool = False
) -> Removal:
    names, nbytes = tuple(file.name for file in files), sum(file.nbytes for file in files)
    return folder, Collected(folder.storage.path, whole, names, nbytes, kept, failed)


def remove(removal: Removal) -> Collected:
    """Carries out a plan, unless the plan has a reason against it."""
    folder, planned = removal
    if planned.kept is not None:
        return planned
    try:
        with ExitStack() as stack:
            return _remove(folder, planned, stack)
    except Exception as error:
        kept = folder.storage.scrub(f"removing its files failed: {describe(error)}")
        return replace(planned, files=(), nbytes=0, kept=kept, failed=True)


def _remove(folder: Folder, planned: Collected, stack: ExitStack) -> Collected:
    """Removes the planned files, while ``stack`` holds the locks of their directories."""
    for locked in folder.checkpoints:
        if not planned.whole and locked is not folder:
            break
        lock = stack.enter_context(locked.storage.lock_directory())
        if locked.storage.locks_are_visible and not lock.is_exclusive:
            return replace(
                planned, files=(), nbytes=0, kept="the directory is in use, for example by a save in progress"
            )
    now = walk(folder.storage)
    if _file_set(now) != _file_set(folder):
        kept = "its files have changed since they were listed. Run the command again."
        return replace(planned, files=(), nbytes=0, kept=kept)
    chosen = set(planned.files)
    if planned.whole:
        # After an interruption, the remaining files are recognised as leftovers of a dead save.
        folders = [
            (one, [file.name for file in one.files if prefix + file.name in chosen]) for prefix, one in folder.walk()
        ]
        for one, names in folders:
            withdraw(one.storage, names)
        for one, names in reversed(folders):
            remove_files(one.storage, names)
    else:
        folder.storage.discard(*planned.files)
        if folder.info is not None and folder.info.state == "unfinished":
            folder.storage.remove_directory()
    # Hard links may have been added or removed since the plan.
    shared = sum(file.nbytes for file in _chosen(now, planned) if file.shared)
    return replace(planned, nbytes=sum(file.nbytes for file in _chosen(folder, planned)) - shared)


def _file_set(top: Folder) -> set[tuple[str, FileInfo, bool]]:
    """Returns the files in and below a directory, and which of them are leftovers, to detect changes.

    Ignores the ctime of data files. They are never rewritten, but a save that makes a hard link to a data file changes
    its ctime, as does the removal of a checkpoint that shares the file.
    """
    return {
        (
            folder.storage.path,
            file._replace(shared=None, changed=None if is_data_file_name(file.name) else file.changed),
            file in left,
        )
        for _, folder in top.walk()
        for left in [set(folder.leftovers)]
        for file in folder.files
    }


def _chosen(folder: Folder, planned: Collected) -> list[FileInfo]:
    """Returns the planned files. Incomplete uploads are among the leftovers, but not in a listing."""
    names = set(planned.files)
    found = {file.name: file for file in (*folder.leftovers, *_files_below(folder))}
    return [file for name, file in found.items() if name in names]


def _with_shared(removals: Sequence[Removal]) -> list[Removal]:
    """Subtracts the bytes that a removal does not free: only deleting the last hard link of a file frees its space."""
    left: dict[tuple[int, int], int] = {}
    freeing: list[Removal] = []
    for folder, planned in removals:
        shared = 0
        for file in _chosen(folder, planned) if planned.kept is None else ():
            if file.shared is not None:
                inode = file.shared.device, file.shared.inode
                left[inode] = left.get(inode, file.shared.names) - 1
                shared += file.nbytes if left[inode] else 0
        freeing.append((folder, replace(planned, nbytes=planned.nbytes - shared)))
    return freeing


def _leftovers(folder: Folder, older_than: float | None) -> Iterator[Removal]:
    others = tuple(file for file in folder.leftovers if file not in folder.dead)
    are_old = _are_old(others, older_than)
    if files := folder.leftovers if are_old else folder.dead:
        yield _removal(folder, files, whole=False)
    if not are_old:
        yield _removal(folder, others, whole=False, kept=_MAY_BE_IN_PROGRESS)
    if folder.unknown:
        yield _removal(folder, (), whole=False, kept=folder.unknown, failed=True)


def _are_old(files: Sequence[FileInfo], older_than: float | None) -> bool:
    if older_than is None:
        return not files
    return all(file.changed is not None and time.time() - file.changed >= older_than for file in files)


def _old_checkpoints(top: Folder, keep: int | None, older_than: float | None, only_data: bool) -> Iterator[Removal]:
    linked = [path for _, folder in top.walk() for path in folder.storage.links()]
    for folder, steps, objection in lines_of_steps(top):
        if objection:
            yield _removal(folder, (), whole=True, kept=objection)
            continue
        rules, own = of_manager(steps_of(steps))
        latest = keep or rules.latest or 1
        retained = replace(rules, latest=latest).retained(own)
        # Newer checkpoints have lower steps if a job went back to an earlier step, and earlier times if a clock was set
        # back.
        by_time = sorted(steps, key=lambda step: (step.saved, step.step or 0), reverse=True)
        by_step = sorted(steps, key=lambda step: (step.step or 0, step.saved), reverse=True)
        recorded = [(step.record.serial, step) for step in by_time if step.record is not None]
        by_serial = [step for _, step in sorted(recorded, key=lambda pair: pair[0], reverse=True)]
        newest = {step.storage.path for order in (by_time, by_step, by_serial) for step in order[:latest]}
        for old in by_time:
            if old.storage.path in newest or time.time() - old.saved < (older_than or 0.0):
                continue
            parts, real = old.checkpoints, old.storage.real_path
            unknown = ""
            if old.step in retained:
                kept = _RETAINED
            elif any(path == real or path.startswith(real + "/") for path in linked):
                kept = "it is the target of a link"
            elif not _are_old([f for part in parts for f in part.leftovers if f not in part.dead], older_than):
                kept = _MAY_BE_IN_PROGRESS
            else:
                kept = unknown = next((part.unknown for part in parts if part.unknown), "")
            files = [f for f in _files_below(old) if not only_data or is_ours(posixpath.basename(f.name))]
            yield _removal(old, files, whole=True, kept=kept or None, failed=bool(unknown))


def _files_below(folder: Folder) -> list[FileInfo]:
    return [file._replace(name=prefix + file.name) for prefix, one in folder.walk() for file in one.files]
