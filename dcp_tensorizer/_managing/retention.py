"""The rules that decide which checkpoints are kept, and the deletion of the others."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from .._format.names import is_ours, metadata_file_name
from .._loading.validate import read_head
from .._runtime.validation import check_choice, check_count, check_timeout, check_type
from .._saving.commit import dead_files, remove, remove_files, withdraw
from .._storage.base import Storage
from ..errors import CheckpointError, NotCommitted, ReadError, describe
from .step_folder import Step, StepNames, members, read_steps


@dataclass(frozen=True, slots=True)
class Retention:
    """The rules. A checkpoint is kept if any of them keeps it; without rules all are.

    If no checkpoint has the metric, the best one is unknown, and all are kept.

    Attributes:
        latest: How many of the newest to keep. The newest is always kept.
        every: Keep the steps that are multiples of this.
        metric: Keep the best by this metric.
        mode: Whether the least or the largest value is best.
        delete_after: Age in seconds from which a checkpoint is deleted, if others could not see a lock.
        delete_other_files: Also delete checkpoints with files that no save wrote, and these files.
    """

    latest: int | None
    every: int | None
    metric: str | None
    mode: Literal["min", "max"]
    delete_after: float = 0.0
    delete_other_files: bool = False

    @classmethod
    def of(
        cls,
        keep_latest: int | None,
        keep_every: int | None,
        keep_best: str | tuple[str, Literal["min", "max"]] | None,
        delete_after: float = 0.0,
        delete_other_files: bool = False,
    ) -> Retention:
        """Makes the rules from the manager's arguments; raises `TypeError` or `ValueError`."""
        check_count("keep_latest", keep_latest, optional=True)
        check_count("keep_every", keep_every, optional=True)
        metric, mode = keep_best if isinstance(keep_best, tuple) and len(keep_best) == 2 else (keep_best, "min")
        if metric is not None and not isinstance(metric, str):
            raise TypeError(f"keep_best must be the name of a metric, or (name, 'min' or 'max'), and is {keep_best!r}")
        check_choice("the mode in keep_best", mode, ("min", "max"))
        check_timeout(delete_after, least=0, name="delete_after")
        check_type("delete_other_files", delete_other_files, bool)
        return cls(keep_latest, keep_every, metric, mode, delete_after, delete_other_files)  # type: ignore[arg-type]

    @property
    def keeps_all(self) -> bool:
        """Returns whether there are no rules."""
        return self.latest is None and self.every is None and self.metric is None

    def best(self, steps: Sequence[Step]) -> Step | None:
        """The best step by the metric, the newest of equal ones; None if none has a value."""
        if self.metric is None:
            return None
        name, sign = self.metric, -1 if self.mode == "min" else 1
        measured = [step for step in steps if not math.isnan(step.metrics.get(name, math.nan))]
        return max(measured, key=lambda step: (sign * step.metrics[name], step.number), default=None)

    def kept(self, steps: Sequence[Step]) -> set[int]:
        """The numbers of the steps to keep."""
        numbers = sorted((step.number for step in steps), reverse=True)
        if self.keeps_all or (self.metric is not None and not any(self.metric in step.metrics for step in steps)):
            return set(numbers)
        kept = set(numbers[: self.latest or 1])
        if self.every is not None:
            kept |= {number for number in numbers if number % self.every == 0}
        best = self.best(steps)
        return kept if best is None else kept | {best.number}


# --- deletion of checkpoints that no rule keeps, and that nobody uses -------------------------------------------------

logger = logging.getLogger("dcp_tensorizer")

_LINKED = "it is a link: remove it, and its target, by hand"


def retain(
    folder: Storage, names: StepNames, saved: Step, rules: Retention, check: Callable[[], object] = lambda: None
) -> list[Step]:
    """Deletes the checkpoints of a branch that no rule keeps, after the commit of ``saved``; returns them.

    ``saved`` itself always stays. Failures are logged, and no save fails because of them. ``check`` as in `delete_old`.
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
    """Deletes the ``steps`` of a branch that no rule keeps, except ``spared``; returns them. Reasons to stay are
    logged.

    ``check`` is called just before each deletion, and raises if this job must not delete any more.
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

    With ``other_files``, files that no save wrote are deleted, too; otherwise they are a reason to stay. Raises
    `CheckpointError` or `OSError` if it cannot be examined or removed.
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


def clean_up(folder: Storage, names: StepNames) -> list[str]:
    """Removes the files of dead saves in directories of steps, if that is proven; see `commit.dead_files`.

    Returns the directories that had some.
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
        pass  # no directory, such as before the first save
    except (CheckpointError, OSError) as error:
        logger.info("%s: what dead saves have left is not removed: %s", folder.path, describe(error))
    return cleaned


def _clean_up_step(storage: Storage) -> bool:
    if storage.head(metadata_file_name()) is not None:
        return False  # the next save there cleans up
    lock = storage.lock_directory()
    try:
        if not lock.is_exclusive:
            return False
        dead = dead_files(storage, [file.name for file in storage.listing()[0]])
        remove(storage, dead)
        storage.remove_directory()
        return bool(dead)
    finally:
        lock.release()
