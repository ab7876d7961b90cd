"""Deletes checkpoints that no rule keeps, where nobody can be harmed by it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from .._format.layout import is_ours, metadata_file_name
from .._loading.metadata_reader import read_head
from .._saving.commit import dead_files, remove
from .._saving.removal import remove_files, withdraw
from .._storage.base import Storage
from ..errors import CheckpointError, NotCommitted, ReadError, describe
from .branches import members
from .catalogue import Step, read_steps
from .names import StepNames
from .retention import Retention

__all__ = ["clean_up", "delete_old", "delete_step", "retain"]

logger = logging.getLogger("dcp_tensorizer")

_LINKED = "it is a link: remove it, and what it leads to, by hand"


def retain(
    folder: Storage, names: StepNames, saved: Step, rules: Retention, check: Callable[[], object] = lambda: None
) -> list[Step]:
    """Deletes what the rules do not keep of the branch of a checkpoint that has just been committed; returns that.

    That checkpoint stays in any case. What fails is said in the log: no save fails by it.

    Args:
        folder: Of the checkpoints.
        names: Of their directories.
        saved: The checkpoint.
        rules: What is kept.
        check: See `delete_old`.
    """
    try:
        steps = members([step for step in read_steps(folder, names) if not step.problem], saved.branch)
        if saved.number not in {step.number for step in steps}:
            raise ReadError(f"{folder.path} does not show step {saved.number}, which has just been saved")
    except CheckpointError as error:
        logger.warning("old checkpoints are not deleted: %s", error)
        return []
    return delete_old(folder, steps, rules, saved.number, check)


def delete_old(
    folder: Storage,
    steps: Sequence[Step],
    rules: Retention,
    spared: int = -1,
    check: Callable[[], object] = lambda: None,
) -> list[Step]:
    """Deletes those of a branch's checkpoints that no rule keeps; returns them. What stays is said in the log.

    Args:
        folder: Of the checkpoints.
        steps: All of the branch.
        rules: What is kept.
        spared: A step that stays whatever the rules say.
        check: Called just before each deletion: it raises if this job must not delete anything any more.
    """
    kept, linked = rules.kept(steps) | {spared}, folder.linked_directories()
    deleted = []
    for step in steps:
        if step.number in kept:
            continue
        storage = folder.child(step.name)
        if not storage.locks_are_visible and time.time() - step.saved_at / 1e9 < rules.delete_after:
            continue
        try:
            reason = _LINKED if step.name in linked else ""
            reason = reason or delete_step(storage, step, other_files=rules.delete_other_files, check=check)
        except Exception as error:
            reason = storage.scrub(describe(error))
        if reason:
            logger.warning("%s is not deleted: %s", storage.path, reason)
        else:
            logger.info("deleted %s", storage.path)
            deleted.append(step)
    return deleted


def delete_step(
    storage: Storage, step: Step, *, other_files: bool = False, check: Callable[[], object] = lambda: None
) -> str:
    """Deletes a checkpoint, its metadata first; returns why it must stay, or an empty string.

    Args:
        storage: The checkpoint's directory.
        step: Which one it is.
        other_files: Delete also what no save wrote. Otherwise it is a reason to stay.
        check: See `delete_old`.

    Raises:
        CheckpointError, OSError: it cannot be looked at, or not be removed.
    """
    with ExitStack() as stack:
        lock = storage.lock_directory()
        stack.callback(lock.release)
        if storage.locks_are_visible and not lock.is_exclusive:
            return "it is being saved or loaded"
        try:
            files, folders = storage.listing()
        except NotCommitted:
            return ""
        names = [file.name for file in files]
        others = [*folders, *(name for name in names if not is_ours(name))]
        if others and not other_files:
            return f"it holds what no save wrote: {', '.join(sorted(others)[:3])}"
        head = read_head(storage)
        if head is not None and head.save_id != step.save_id:
            return "something else has been saved there"
        check()
        withdraw(storage, names)
        for name in folders:
            _remove_tree(storage.child(name))
        remove_files(storage, names)
    return ""


def _remove_tree(storage: Storage) -> None:
    files, folders = storage.listing()
    for name in folders:
        _remove_tree(storage.child(name))
    remove_files(storage, [file.name for file in files])


def clean_up(folder: Storage, names: StepNames) -> None:
    """Removes what dead saves have left in directories of steps, where that is proven; see `commit.dead_files`."""
    if not folder.locks_are_visible:
        return
    try:
        _, found = folder.listing()
        for name in found:
            if names.step_in(name) is not None:
                _clean_up_step(folder.child(name))
    except NotCommitted:
        return  # there is no directory, as in a first run
    except (CheckpointError, OSError) as error:
        logger.info("%s: what dead saves have left is not removed: %s", folder.path, describe(error))


def _clean_up_step(storage: Storage) -> None:
    if storage.head(metadata_file_name()) is not None:
        return  # the next save there does it
    lock = storage.lock_directory()
    try:
        if lock.is_exclusive:
            remove(storage, dead_files(storage, [file.name for file in storage.listing()[0]]))
            storage.remove_directory()
    finally:
        lock.release()
