"""Retention: which checkpoints stay, the deletion of the others, and the file `latest`."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any, Literal

from .._index.container import committed
from .._index.schema import SaveRecord
from .._runtime.forks import free_in_child
from .._runtime.threads import Deadline, in_background
from .._runtime.validation import check_choice, check_count, check_flags, check_name, check_timeout
from .._saving.commit import remove_files, withdraw
from .._saving.flushing import Flushing
from .._storage.base import Storage
from .._storage.lease import Lease
from .._tensor_file.names import is_ours
from ..errors import CheckpointError, NotCommitted, ReadError, describe, listed
from .steps import LATEST, Position, Step, StepNames, members, read_steps, sound


@dataclass(frozen=True, slots=True)
class Retention:
    """Rules that retain checkpoints: options of `CheckpointManager`.

    A checkpoint stays if any rule retains it, or if there are no rules. The newest always stays. If no checkpoint has a
    value of the metric, the best one is unknown, and all checkpoints stay.
    """

    latest: int | None = None
    every: int | None = None
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    delete_after: float = 0.0
    delete_other_files: bool = False

    def __post_init__(self) -> None:
        check_flags(self)

    @classmethod
    def of(
        cls,
        keep_latest: int | None,
        keep_every: int | None,
        keep_best: str | tuple[str, Literal["min", "max"]] | None,
        delete_after: float = 0.0,
        delete_other_files: bool = False,
    ) -> Retention:
        metric, mode = keep_best if isinstance(keep_best, tuple) and len(keep_best) == 2 else (keep_best, "min")
        if metric is not None and not isinstance(metric, str):
            raise TypeError(f"keep_best must be the name of a metric, or (name, 'min' or 'max'), got {keep_best!r}.")
        return cls(
            latest=check_count("keep_latest", keep_latest, optional=True),
            every=check_count("keep_every", keep_every, optional=True),
            metric=None if metric is None else check_name("the metric in keep_best", metric),
            mode=check_choice("the mode in keep_best", mode, ("min", "max")),  # type: ignore[arg-type]
            delete_after=check_timeout(delete_after, least=0, name="delete_after"),
            delete_other_files=delete_other_files,
        )

    @classmethod
    def of_record(cls, record: SaveRecord) -> Retention:
        return cls.of(record.keep_latest, record.keep_every, record.keep_best)

    def recorded(self) -> dict[str, Any]:
        """Returns the fields of `SaveRecord` that `of_record` reads."""
        best = None if self.metric is None else (self.metric, self.mode)
        return {"keep_latest": self.latest, "keep_every": self.every, "keep_best": best}

    @property
    def keeps_all(self) -> bool:
        return self.latest is None and self.every is None and self.metric is None

    def best(self, steps: Sequence[Step]) -> Step | None:
        """Returns the best step by the metric, the newest of equal ones; None without a metric or without values."""
        if self.metric is None:
            return None
        name, sign = self.metric, -1 if self.mode == "min" else 1
        measured = [step for step in steps if not math.isnan(step.metrics.get(name, math.nan))]
        return max(measured, key=lambda step: (sign * step.metrics[name], step.number), default=None)

    def retained(self, steps: Sequence[Step]) -> set[int]:
        numbers = sorted((step.number for step in steps), reverse=True)
        best = self.best(steps)
        if self.keeps_all or (self.metric is not None and best is None):
            return set(numbers)
        retained = set(numbers[: self.latest or 1])
        if self.every is not None:
            retained |= {number for number in numbers if number % self.every == 0}
        return retained if best is None else retained | {best.number}


# --- deletion of checkpoints that no rule retains, and that no process uses -------------------------------------------

logger = logging.getLogger("dcp_tensorizer")

_LINKED = "it is a link. Remove the link and its target by hand"


def _delete(storage: Storage, step: Step, owner: Lease, *, other_files: bool) -> str:
    """Deletes a checkpoint, its metadata first. Returns why it must stay, or an empty string if it is gone.

    Raises `CheckpointError` or `OSError` if the checkpoint cannot be read or removed, or another run has taken the
    lease.
    """
    with storage.lock_directory() as lock:
        if storage.locks_are_visible and not lock.is_exclusive:
            return "it is being saved or loaded"
        try:
            files, folders = storage.listing()
        except NotCommitted:
            return ""
        names = [file.name for file in files]
        others = [*folders, *(name for name in names if not is_ours(name))]
        if others and not other_files:
            return f"it contains files or directories that no save wrote: {', '.join(sorted(others)[:3])}"
        file = committed(storage)
        if file is not None and file.head.save_id != step.save_id:
            return "another save has replaced it"
        owner.check()
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


# --- after each commit: the file `LATEST` names the newest checkpoint, and old ones are deleted -----------------------


class Retaining:
    """Work after a commit, on the first rank: writes the checkpoint's name to `latest`, and deletes old checkpoints.

    With a local folder, ``folder`` is the remote one, and only checkpoints on the remote count. ``rules`` is None on
    the other ranks, which change nothing.
    """

    def __init__(
        self,
        folder: Storage,
        names: StepNames,
        rules: Retention | None,
        owner: Lease,
        flushing: Flushing | None,
        position: Callable[[], Position | None],
    ) -> None:
        self._folder = folder
        self._names = names
        self._rules = rules
        self._owner = owner
        self._flushing = flushing
        self._position = position
        self._lock = free_in_child(threading.Lock())
        self._running: list[Future[None]] = []
        self._deleted: set[int] = set()
        self._has_warned = False
        self._latest = 0  # the serial of the checkpoint whose name this run has written to `LATEST`
        self._has_failed = False

    def after(self, saved: Step) -> None:
        """Does the work for a committed checkpoint, once the checkpoint is on the remote.

        Called on a background thread.
        """
        if self._rules is None:
            return
        self._warn_of_metric(saved)
        self._deleted.discard(saved.number)
        arrival = None if self._flushing is None else self._flushing.future(saved.save_id)
        if arrival is None:
            self._retain(saved)
        else:
            retaining = weakref.ref(self)  # the future holds its callbacks, which must not keep the job's objects alive

            def resume(done: Future[float]) -> None:
                alive = retaining()
                if alive is not None and done.exception() is None:
                    alive._begin(lambda: alive._retain(saved))
                elif alive is not None:  # if another run has taken the lease, the next save reports it
                    alive._begin(alive._owner.take)

            arrival.add_done_callback(resume)

    def wait(self, deadline: Deadline) -> None:
        wait_for(self._running, deadline.left)

    def _warn_of_metric(self, saved: Step) -> None:
        assert self._rules is not None
        metric = self._rules.metric
        if metric is None or self._has_warned or self._rules.best([saved]) is not None:
            return
        self._has_warned = True
        if metric in saved.metrics:
            problem = f"the metric {metric!r} of step {saved.number} is NaN, but keep_best needs a number"
        else:
            given = f" (step {saved.number} has {listed(sorted(saved.metrics))})" if saved.metrics else ""
            problem = (
                f"step {saved.number} was saved without the metric {metric!r}, which keep_best needs{given}: pass "
                f"metrics={{{metric!r}: ...}} to save"
            )
        logger.warning(
            "%s: %s. While no checkpoint has a value of this metric, none is deleted", self._folder.path, problem
        )

    def _begin(self, what: Callable[[], None]) -> None:
        running = [other for other in self._running if not other.done()]
        self._running = [*running, in_background(what, name="checkpoint-manager")]

    def _retain(self, saved: Step) -> None:
        """Updates `LATEST`, and deletes the checkpoints of the branch that no rule retains, except ``saved``.

        Logs failures, and the reason if a checkpoint that no rule retains must stay. A failure here fails no save.
        """
        rules, folder = self._rules, self._folder
        assert rules is not None
        with self._lock:
            position = self._position()
            if saved.number in self._deleted:
                return  # a later step has arrived first, and the rules have deleted this step
            if position is not None and position.branch != saved.branch:
                return  # the job has left that branch, and the step that it resumed from must stay
            try:
                self._owner.check()
                self._move_latest(saved)
                if rules.keeps_all:
                    return
                steps = members(sound(read_steps(folder, self._names)), saved.branch)
                if saved.number not in {step.number for step in steps}:
                    raise ReadError(f"{folder.path} does not list step {saved.number}, which was just saved")
                linked = folder.linked_directories()
            except CheckpointError as error:
                logger.warning("old checkpoints are not deleted: %s", str(error))
                return
            staying = rules.retained(steps) | {saved.number}
            for step in steps:
                storage = folder.child(step.name)
                is_recent = not storage.locks_are_visible and time.time() - step.saved_at / 1e9 < rules.delete_after
                if step.number in staying or is_recent:
                    continue
                try:
                    reason = _LINKED if step.name in linked else ""
                    reason = reason or _delete(storage, step, self._owner, other_files=rules.delete_other_files)
                except Exception as error:
                    reason = storage.scrub(describe(error))
                if reason:
                    logger.warning("%s is not deleted: %s", storage.path, reason)
                    continue
                logger.info("deleted %s", storage.path)
                self._deleted.add(step.number)
                if position is not None:
                    position.numbers.discard(step.number)

    def _move_latest(self, saved: Step) -> None:
        """Writes a checkpoint's name to `LATEST`, unless this run has written the name of a later checkpoint there.

        Logs the first failure. The file is plain text, for people and scripts. Restores also read it, because a listing
        of the folder may come from a cache, and lack the newest checkpoint.
        """
        if saved.serial <= self._latest:
            return  # a later checkpoint has arrived first
        self._latest = saved.serial
        try:
            self._folder.put(LATEST, f"{saved.name}\n".encode(), sync=False)
        except CheckpointError as error:  # for example, a directory has that name
            if not self._has_failed:
                logger.warning("the file '%s' is not updated: %s", LATEST, str(error))
            self._has_failed = True
