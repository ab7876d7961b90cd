"""The checkpoints of a job: `CheckpointManager` decides when to save, what to retain, and what to resume from.

save() ──every rank──▶ one small all-reduce: due? stopping? the same step?
       ──if due──────▶ dcp.async_save with one writer, one planner, a separate group
       ──committed───▶ rank 0 deletes checkpoints that no rule retains
restore() ──rank 0──▶ the newest checkpoint of the branch ──all ranks──▶ dcp.load
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat

from ._index.schema import SaveRecord
from ._job.exports import Exports
from ._job.metrics import GoodputClock, GoodputReport
from ._job.options import (
    check_export,
    check_growth,
    check_metrics,
    check_state,
    check_survival,
    options_of_reader,
    split_limits,
)
from ._job.policy import Action, SaveInterval, SavePolicy, StopSignals, Vote, check_interval, decide
from ._job.ranks import Agreement, Heartbeats, make_groups
from ._job.restore import Problem, Selection, load_first, load_from_memory
from ._job.retention import Retaining, Retention
from ._job.saves import Collect, Saves, StepSave, collected_part
from ._job.steps import (
    Branch,
    Position,
    Step,
    StepNames,
    current_branch,
    first_position,
    members,
    new_branch,
    newest_of,
    read_steps,
    restorable,
    sound,
)
from ._job.unflushed import finish_unflushed
from ._memory.copies import CopyOptions, check_copies
from ._memory.survival import Survival
from ._runtime.forks import Home
from ._runtime.threads import NEVER, Deadline
from ._runtime.validation import check_count, check_flags, check_path, check_patterns, check_step, check_timeout
from ._storage.lease import Lease, lease_file_name
from ._storage.open import absolute_path
from ._tensor_file.names import metadata_file_name
from ._tiers.tiered_storage import NearestStorage, nearest
from .errors import CheckpointError, ReadError, WriteError
from .models import Export
from .writer import TensorizerStorageWriter, WriterOptions

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.utils.hooks import RemovableHandle
    from typing_extensions import Self, Unpack

__all__ = ["CheckpointManager", "GoodputReport"]

logger = logging.getLogger("dcp_tensorizer")


class CheckpointManager:
    """Checkpoint manager of a job: saves its steps, deletes old checkpoints, and resumes from the newest::

        with CheckpointManager("checkpoints", save_every=500, save_at_end=True, keep_latest=3) as manager:
            start = manager.restore(state) or 0
            for step in range(start + 1, steps + 1):
                loss = train(...)
                manager.save(step, state, metrics={"loss": loss})  # saves if a save is due
                if manager.stopping:
                    break

    Every rank makes a manager, and makes the same calls to `save`, `restore`, `wait` and `close` in the same order. The
    other methods are not collective. The manager makes two gloo groups, with the timeout of the ranks' process group.
    Except during a commit, no rank waits longer than this timeout for an unresponsive rank. Close the manager before
    ``destroy_process_group()``, and before the interpreter exits: a function that `atexit` calls can no longer save the
    last step. ``on_report`` and ``on_progress`` cannot call `save`, `restore`, `wait` or `close`. Errors of the manager
    are never wrapped in DCP's ``CheckpointException``.

    Args:
        folder: The folder of the checkpoints: a local directory that all ranks share, or any URL that fsspec opens.
        name: Template for the names of the checkpoints' directories. ``"step-{:06}"`` pads the number. The manager
            recognises directories by the number, padded or not.
        save_every: Save the first step at or after each multiple of this number.
        save_interval: Save when this many seconds have passed since the last save, by rank 0's clock. ``"auto"``: the
            interval that loses the least time, computed from the cost of saves and the failures of the job in all its
            runs. ``(60, 3600)``: the same, with a lower and an upper bound. With ``save_every`` as well, a save is due
            when either condition holds. With neither, every call to `save` saves.
        keep_latest: Retain this many of the newest checkpoints. After each commit, the manager deletes the checkpoints
            that no ``keep_`` rule retains, except the newest. Without rules it deletes nothing.
        keep_every: Retain the checkpoints whose step is a multiple of this.
        keep_best: Retain the checkpoint with the smallest value of this metric; ``("accuracy", "max")``: with the
            largest. While no checkpoint has a number for this metric, the manager warns and deletes nothing.
        delete_after: Minimum age in seconds of a checkpoint that the manager deletes on object stores and network
            mounts, where a job that loads a checkpoint cannot lock it.
        delete_other_files: If a checkpoint to be deleted contains files that no save wrote, delete it with these files.
            If False, such a checkpoint stays, with a warning.
        must_change: Patterns of keys. The manager warns if none of the matching floating-point or complex tensors
            differs from the previous save: the saved state may not be the one in training.
        stop_signals: Signals that ask the job to stop. The next `save` on every rank then saves even if no save is due,
            and waits for the commit, and `stopping` is true. Earlier handlers are called as well. A second signal, more
            than 5 seconds later, acts as it would without the manager.
        survive: Seconds for which the newest states stay in this machine's memory after a rank has died. A job that
            restarts there within that time resumes from them. With 0, no state is held.
        survive_every: With ``survive`` and 3 buffers: hold the first step at or after each multiple of this number in
            memory, even if no save is due.
        buffers: Maximum number of staging buffers with ``survive``. 3: a step that is due while the previous save still
            runs is held only in memory, and training does not wait. 2: training waits for that save.
        copies: Number of hosts that hold each state, with ``survive``. 2: another host holds a copy of the newest state
            in memory, and a job that has lost a host resumes from that copy. Copies are encrypted on the network.
        copy_options: How states are copied: see `CopyOptions`.
        export: Which models for inference to save as well, and when: see `Export`.
        save_at_end: On `close`, also save the step of the last `save` call, unless it is saved already. `close`
            saves the objects of that call as they are then, so they must not change after the call. Nothing is saved if
            an error ends the ``with`` block, `close` has a timeout, or `restore` was called after that `save`.
        process_group: The ranks of the job; by default all.
        reader_options: Options of `TensorizerStorageReader` for `restore`. Storage options, ``local``, the timeout and
            the key default to those of the writer. With a passphrase, use the same salt in every run. ``page_cache`` is
            False by default.
        writer_options: Options of `TensorizerStorageWriter`. With ``local``, the ``keep_`` rules count only the
            checkpoints in ``folder``.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value, or differs from that of another rank; or
            ``stop_signals`` is not empty, and this is not the main thread.
        WriteError: the folder's URL cannot be opened, its path is relative and the working directory no longer exists,
            or another rank has ended or does not respond.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        name: str = "step-{}",
        save_every: int | None = None,
        save_interval: SaveInterval | None = None,
        keep_latest: int | None = None,
        keep_every: int | None = None,
        keep_best: str | tuple[str, Literal["min", "max"]] | None = None,
        delete_after: float = 0.0,
        delete_other_files: bool = False,
        must_change: Sequence[str] = ("*",),
        stop_signals: Sequence[int] = (signal.SIGTERM,),
        survive: float = 0.0,
        survive_every: int | None = None,
        buffers: int = 3,
        copies: int = 1,
        copy_options: CopyOptions = CopyOptions(),  # noqa: B008 - it is frozen
        export: Export | None = None,
        save_at_end: bool = False,
        process_group: dist.ProcessGroup | None = None,
        reader_options: Mapping[str, Any] | None = None,
        **writer_options: Unpack[WriterOptions],
    ) -> None:
        check_path(folder)
        options: dict[str, Any] = dict(writer_options)
        self._names = StepNames(name)
        self._clock = GoodputClock()
        save_every = check_count("save_every", save_every, optional=True)
        save_interval = None if save_interval is None else check_interval(save_interval)
        self._retention = Retention.of(keep_latest, keep_every, keep_best, delete_after, delete_other_files)
        must_change = check_patterns("must_change", must_change)
        self._signals = StopSignals(stop_signals)
        survive, survive_every, buffers = check_survival(survive, survive_every, buffers, options)
        copies, copy_options = check_copies(copies, copy_options, survive)
        self._policy = SavePolicy(save_every, save_interval, survive_every, clock=self._clock)
        check_export(export, options)
        check_flags(save_at_end=save_at_end)
        limits, self._max_failures = split_limits(options, inspect.signature(CheckpointManager).parameters)
        self._writer = TensorizerStorageWriter(folder, limits=limits, **options)
        try:
            opener = nearest(folder, options.get("storage_options"), limits.timeout, options.get("local"))
            self._open_folder = functools.partial(opener, absolute_path(folder))
            self._folder = self._open_folder()
            self._reader_options = options_of_reader(folder, options, limits, reader_options)
            of_saves, of_agreements = make_groups(process_group)
            agreement, heartbeats = Agreement(of_agreements), Heartbeats(of_saves)
            agreement.check_same(  # before the first collective whose course depends on an option
                {
                    "folder": self._folder.path,
                    "name": self._names.template,
                    "save_every": save_every,
                    "save_interval": save_interval,
                    "keep_latest": self._retention.latest,
                    "keep_every": self._retention.every,
                    "keep_best": self._retention.metric and (self._retention.metric, self._retention.mode),
                    "delete_after": self._retention.delete_after,
                    "delete_other_files": delete_other_files,
                    "survive": survive,
                    "survive_every": survive_every,
                    "buffers": buffers,
                    "copies": copies,
                    "export": export and (str(export.path), export.every, export.at_end),
                    "save_at_end": save_at_end,
                    "limits.max_consecutive_failures": self._max_failures,
                }
            )
            heartbeats.watch_saves(self._writer.saver)
            self._writer.saver.freshness.must_change = must_change
            self._save_at_end = save_at_end
            self._buffers, self._copies, self._copy_options = buffers, copies, copy_options
            self._last_step: int | None = None
            self._save_last: Callable[[], object] = lambda: None  # saves the last step, unless it is saved
            self._stopping = self._closed = self._is_over = False
            self._home = Home()
            self._position: Position | None = None  # the job's position; None before its first save or restore
            self._serial = 0  # of the last save of this run
            self._has_lease = False
            self._make_parts(agreement, heartbeats, survive, export)
        except BaseException:
            self._writer.close()
            raise
        self._signals.install()

    def _make_parts(self, agreement: Agreement, heartbeats: Heartbeats, survive: float, export: Export | None) -> None:
        """Makes the parts that do the work in this process. In a forked child they can only restore."""
        saver, is_copy = self._writer.saver, self._is_copy
        folder = self._folder
        remote = folder.remote if isinstance(folder, NearestStorage) else folder
        self._agreement, self._heartbeats = agreement, heartbeats
        self._flushing = None if is_copy else saver.flushing
        self._lease = Lease(remote, lease_file_name(self._names.shown))  # a restore takes no lease
        if not is_copy:
            saver.owner = self._lease
        self._survival = Survival(
            saver,
            folder,
            self._names.template,
            agreement,
            seconds=survive,
            buffers=self._buffers,
            copies=self._copies,
            copy_options=self._copy_options,
        )
        rules = self._retention if agreement.is_first else None
        self._retaining = Retaining(remote, self._names, rules, self._lease, self._flushing, lambda: self._position)
        self._exports = None
        if export is not None:
            self._exports = Exports(export, self._writer, heartbeats, self._lease)
        self._saves = Saves(
            self._writer,
            agreement,
            heartbeats,
            self._clock,
            stages_all=survive > 0,  # a restart may have nothing but the state in memory
            after=self._retaining.after,
            exports=self._exports,
        )
        self._home_of_parts = Home()

    def __repr__(self) -> str:
        """Returns the folder, without secrets."""
        return f"{type(self).__name__}({self._folder.path!r}, name={self._names.template!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if self._is_copy:
            return
        if kind is not None and not (isinstance(error, SystemExit) and not error.code):
            self._survival.leave()
        with suppress(
            *() if kind is None else (CheckpointError,)
        ):  # if the ``with`` block has raised an error, that error wins
            self.close()

    # --- what every rank calls --------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        force: bool = False,
        metrics: Mapping[str, SupportsFloat] | None = None,
        wait: bool = False,
        exclude: Sequence[str] = (),
        trainable_only: bool = False,
    ) -> Future[str] | None:
        """Saves a step if a save is due, or if a rank has received a stop signal. Call it after each step.

        It returns when the state is copied (with ``overlap_staging``, earlier), and the save continues in the
        background. If the previous save still runs when the next is due, the call waits for that save first (with
        ``survive``, see ``buffers``). If the job is `stopping`, the call waits for its own save.

        Args:
            step: The step of training, the same on every rank.
            state: A state dict, as for ``dcp.async_save``.
            force: Save even if no save is due, unless the step is being saved, or is saved already. If any rank passes
                True, all save.
            metrics: Numbers to record with the checkpoint. Only those of rank 0 count.
            wait: Return only after the commit and, on rank 0, the deletion of old checkpoints: see `wait`.
            exclude: Patterns of keys to leave out. The manager warns about a pattern that matches no key of the first
                rank's state.
            trainable_only: Leave out the frozen parameters. The state must contain a module or parameter.

        Returns:
            A future of the checkpoint's path, done when the save is committed or has failed. If no save was due, or the
            step is held only in memory (``survive``): None.

        Raises:
            TypeError, ValueError: an argument is invalid, or the ranks save different steps.
            WriteError: too many saves in a row have failed (``limits``; the next call tries again), the manager is
                closed, another rank has ended or does not respond, another run has taken over the folder, or this is a
                forked child of the manager's process.
            CheckpointError: the call waited for the save, and the save failed; or, in the first call, the folder cannot
                be read, or has two directories of the same step.
            StagingError: with ``trainable_only``, the state has no module or parameter.
            Exception: the error of a ``state_dict`` method on this rank. A save that is due then fails on all ranks.
        """
        since = self._clock.now()
        self._check_open()
        self._check_at_home()
        self._check_thread()
        check_state(state)
        check_flags(force=force, wait=wait, trainable_only=trainable_only)
        step, recorded = check_step(step), check_metrics(metrics)
        collect = functools.partial(collected_part, state, check_patterns("exclude", exclude), trainable_only)
        save = functools.partial(self._step, step, collect, recorded)
        self._last_step = step
        if self._save_at_end:
            self._save_last = functools.partial(save, stop=False, force=True, must_write=True)
        action, future = save(stop=self._signals.seen, force=force, must_write=wait)
        if action is not Action.NOTHING and (wait or self._stopping):
            self._wait(until_published=False)  # waiting for a publication is collective; `wait` may differ by rank
        self._clock.stalled(since, saves=action is Action.SAVE)
        return future

    def restore(
        self,
        state: dict[str, Any],
        step: int | None = None,
        *,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        strict: bool = True,
        allow_shape_mismatch: bool = False,
        grow: Mapping[str, float | None] = MappingProxyType({}),
        fallback: bool = False,
    ) -> int | None:
        """Loads a checkpoint into the state: by default the newest, the same on every rank.

        A job that goes back to an earlier step begins a branch. The checkpoints beyond that step stay, but `steps` does
        not list them, and the ``keep_`` rules neither count nor delete them. With ``survive`` and without ``step``, a
        newer state that an earlier run left in memory takes precedence. An optimizer that has not taken a step yet also
        gets the saved state. A forked child restores from storage, without the other ranks, and has no effect on the
        parent's manager.

        Args:
            state: A state dict, as for ``dcp.load``.
            step: The step to load; None for the newest.
            include: Patterns of the keys to load, such as ``model.*``; by default all. Keys are those of the flattened
                state dict.
            exclude: Patterns of keys whose values stay unchanged.
            strict: Raise an error if the checkpoint lacks a key of the state, has optimizer state that the optimizer
                cannot load, or has values where the state has an empty dict. If False, log a warning that names such
                keys, and leave their values unchanged. In either case, raise an error if a parameter group of an
                optimizer has a different number of parameters in the checkpoint.
            allow_shape_mismatch: If the checkpoint has a tensor in a different shape, log a warning, and leave the
                tensor and its optimizer state unchanged. If False, raise an error.
            grow: Patterns of tensors that may be larger than the saved ones, such as those of a vocabulary that grew,
                each with the value of the new elements. With None, new elements stay unchanged. The saved elements are
                loaded at the beginning of the tensor, in each dimension. The optimizer state of such a parameter is
                padded with zeros.
            fallback: If a checkpoint is damaged or unreadable, load the previous one, and log an error.

        Returns:
            The step. If there is nothing to load, and nothing in the folder looks like a checkpoint: None.

        Raises:
            TypeError, ValueError: an argument is invalid.
            NotCommitted: ``step`` has no checkpoint.
            MetadataError: the folder has only checkpoints with other names or unknown formats, or two of the same step;
                ``.metadata`` is damaged; a pattern matches nothing, a key is missing, or a shape is different.
            ReadError: the checkpoint is damaged, or cannot be read.
            WriteError: the manager is closed, another rank has ended or does not respond, or, with ``survive``, another
                run of the job is alive.
        """
        since = self._clock.now()
        self._check_open()
        self._check_thread()
        check_state(state)
        check_flags(fallback=fallback)
        selection = Selection(
            check_patterns("include", include),
            check_patterns("exclude", exclude),
            strict,
            allow_shape_mismatch,
            check_growth(grow),
        )
        step = None if step is None else check_step(step)
        self._last_step, self._save_last = None, lambda: None  # the state is no longer that of the last step
        self._come_home()
        restored = self._restored(state, selection, step, fallback=fallback)
        self._clock.restored(since)
        is_whole = strict and not include and not exclude
        if restored is not None and is_whole and not self._is_copy:  # after a partial load, saves may be partial too
            self._saves.warm_up(lambda: collected_part(state))
        return restored

    def wait(self) -> None:
        """Waits for the save in progress. Raises `CheckpointError` as `close` does.

        Collective. Rank 0, which deletes old checkpoints, also waits for the deletions. If a save of a step was due,
        and the step is only in memory, the step is saved first. The call also waits until the last export is published.
        In a forked child it does nothing.
        """
        self._wait(until_published=True)

    def _wait(self, *, until_published: bool) -> None:
        if self._is_copy or self._is_over:
            return
        self._check_thread()
        self._write_held()
        self._saves.wait()
        if until_published:
            self._saves.wait_published(NEVER)
        self._saves.raise_error()

    @property
    def stopping(self) -> bool:
        """Returns whether the job is to stop, because some rank received a stop signal.

        The value changes only in `save`, which then saves.
        """
        return self._stopping

    def lock(self) -> AbstractContextManager[None]:
        """Returns the lock for ``with manager.lock():`` around ``optimizer.step()`` with ``overlap_staging``.

        See `TensorizerStorageWriter.lock`.
        """
        return self._writer.lock()

    def hold_optimizer(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Makes each step of an optimizer wait for running copies, as `lock` does.

        See `TensorizerStorageWriter.hold_optimizer`.
        """
        return self._writer.hold_optimizer(optimizer)

    def close(self, timeout: float | None = None) -> None:
        """Waits for the save in progress, ends the writer process, and destroys the process groups of this manager.

        Idempotent. Rank 0, which deletes old checkpoints, also waits for the deletions.

        Unless it has a timeout, or an error has ended the ``with`` block, the call is collective: it first saves the
        step in memory, if a save was due, and with ``save_at_end`` the last step. It warns, on the first rank, if the
        step of the last `save` call is not committed in the end. It frees the states in memory, unless the last due
        step is not committed, or an error has ended the ``with`` block. A job that is `stopping` waits for a
        publication for at most ``limits.timeout`` seconds, and then logs the unpublished model. In a forked child the
        call does nothing.

        Args:
            timeout: Timeout in seconds. After it, the save in progress is abandoned, and the previous checkpoint
                stays.

        Raises:
            TypeError, ValueError: the timeout is not a number of seconds.
            CheckpointError: the last save, its export or its publication has failed, and no call has raised the error
                yet. Every rank raises it; with a timeout, only rank 0 raises an error of publishing.
            ValueError: ``save_at_end`` is set, and the last steps of the ranks differ.
        """
        if self._is_over or self._is_copy:
            return
        timeout = check_timeout(timeout, least=0, optional=True)
        self._check_thread()
        self._closed = True
        deadline = Deadline(timeout)
        is_end = not self._survival.has_left
        is_with_all = timeout is None and is_end
        try:
            if is_with_all:
                self._write_held()
                if not self._stopping:
                    self._save_last()
                if not self._stopping and self._exports is not None:
                    self._saves.wait()
                    self._saves.error = self._exports.run_last(self._saves.wait_committed()) or self._saves.error
            elif self._saves.held_step is not None:
                logger.warning(
                    "%s: step %d is only in memory. It is not saved, because close() has a timeout, or an error has "
                    "ended the `with` block",
                    self._folder.path,
                    self._saves.held_step,
                )
        finally:
            self._signals.uninstall()
            self._end(deadline, is_with_all=is_with_all)
        logger.info("%s: %s", self._folder.path, self.report())
        self._retaining.wait(deadline)
        self._is_over = True  # set here so that `close` can be called again after an interruption
        self._agreement.close()
        if self._saves.is_over:  # an abandoned save still uses its group
            self._heartbeats.close()
        self._saves.raise_error()
        if is_end and self._agreement.is_first:
            self._warn_of_last_step()

    def _end(self, deadline: Deadline, *, is_with_all: bool) -> None:
        """Waits for all work in progress, up to the deadline, and ends it. ``is_with_all``: all ranks do so."""
        if self._exports is not None:
            self._saves.wait(deadline)  # an export reads the buffers that the writer frees
        self._writer.close(deadline.left)
        self._saves.wait(deadline)
        timeout = self._writer.saver.options.limits.timeout
        try:
            # A stopping job waits for a publication no longer than a save waits for storage.
            until = Deadline(deadline.within(timeout)) if self._stopping else deadline
            self._saves.wait_published(until, on_all_ranks=is_with_all)
        finally:
            if self._exports is not None:
                self._exports.close()
            if self._saves.failures.count or self._saves.is_busy or self._saves.held_step is not None:
                self._survival.leave(deadline)  # the newest step exists only in memory
            self._survival.end(deadline, has_saved=self._saves.saved is not None)

    def _warn_of_last_step(self) -> None:
        position, saved, step = self._position, self._saves.saved, self._last_step
        if position is None or step is None or step in position.numbers or (saved is not None and saved.number == step):
            return
        last = saved or position.tip
        logger.warning(
            "%s: the job ends at step %d, and %s. To save the last step, %s, or pass force=True to the last save",
            self._folder.path,
            step,
            "no step is committed" if last is None else f"the last committed step is {last.number}",
            "call close without a timeout" if self._save_at_end else "pass save_at_end=True to the manager",
        )

    # --- what each rank may call by itself --------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Lists the steps of the committed checkpoints of the job's branch, lowest first.

        Raises:
            MetadataError: the folder is a file, or two directories hold the same step.
            ReadError: the folder cannot be read.
        """
        return [step.number for step in self._members()]

    def latest(self) -> int | None:
        """Returns the highest of the `steps`, or None without checkpoints. Raises what `steps` raises."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Returns the best step by the metric of ``keep_best``, or None if no checkpoint has a value of the metric.

        Raises what `steps` raises, and `ValueError` without ``keep_best``.
        """
        if self._retention.metric is None:
            raise ValueError("best() needs keep_best=. Pass it to the manager.")
        best = self._retention.best(self._members())
        return None if best is None else best.number

    def path(self, step: int) -> str:
        """Returns the path or URL of a step's checkpoint, even if it does not exist yet."""
        self._come_home()
        step = check_step(step)
        name = self._names.name_of(step) if self._position is None else self._position.name_of(step, self._names)
        return self._folder.child(name).location

    def wait_remote(self, timeout: float | None = None) -> bool:
        """Waits until all saves have been copied from ``local`` to the folder.

        See `TensorizerStorageWriter.wait_remote`.
        """
        self._check_at_home()
        return self._writer.wait_remote(timeout)

    def report(self) -> GoodputReport:
        """Returns the cost of checkpoints for this rank so far."""
        return self._clock.report()

    def _members(self) -> list[Step]:
        self._come_home()
        steps = sound(read_steps(self._folder, self._names))
        branch = current_branch(steps) if self._position is None else self._position.branch
        return [] if branch is None else members(steps, branch)

    def _check_open(self) -> None:
        if self._closed:
            raise WriteError("the manager is closed. Make a new one, or close it after the last save.")

    def _check_thread(self) -> None:
        if self._saves.is_in_save:
            raise WriteError(
                f"{self._folder.path}: on_report and on_progress cannot save, restore, wait, or close the manager, "
                f"because that would wait for the save that calls them. Do it after they have returned."
            )

    # --- in a forked child ------------------------------------------------------------------------------------------

    @property
    def _is_copy(self) -> bool:
        """Returns whether this is a forked child."""
        return not self._home.is_here

    def _check_at_home(self) -> None:
        if self._is_copy:
            raise WriteError(
                f"{self._folder.path}: a forked child of the process that made the manager cannot save, only restore. "
                f"To save here, make another manager in this process, for another folder."
            )

    def _come_home(self) -> None:
        """In a forked child, replaces the manager's parts, because a child reads by itself, over new connections."""
        if not self._home_of_parts.is_here:
            self._folder = self._open_folder()
            self._make_parts(Agreement(None), Heartbeats(None), 0.0, None)

    # --- a step, as all ranks decide --------------------------------------------------------------------------------

    def _step(
        self,
        step: int,
        collect: Collect,
        metrics: dict[str, float],
        *,
        stop: bool,
        force: bool,
        must_write: bool,
    ) -> tuple[Action, Future[str] | None]:
        self._survival.find_predecessors()
        self._survival.start_keeper()
        self._survival.find_partners()
        self._take_lease()
        if self._position is None:
            finish_unflushed(self._flushing, self._agreement)
            self._position = self._agreement.decided(functools.partial(first_position, self._folder, self._names, step))
        action, vote = self._decide(step, stop=stop, force=force, must_write=must_write)
        if vote.is_lost or vote.memory.is_superseded:
            superseded = (
                f"{self._folder.path}: a later run of this job has taken over the keeper on another host, to which "
                f"this run copies its states. Stop this run, or stop the other run and restart this one."
            )
            raise WriteError(self._agreement.decided(lambda: self._lease.lost or superseded))
        if step < self._position.step:  # true on all ranks or none: they have just compared their steps
            self._go_back(step)
            action, vote = self._decide(step, stop=stop, force=force, must_write=must_write)
        self._position.step = step
        self._survival.advance(vote.memory, is_busy=self._saves.is_busy)
        self._saves.failures.check(self._max_failures, vote.failures)
        if action in (Action.JOIN, Action.KEEP) and self._is_gone(step):
            action = Action.SAVE
        future = self._act(action, vote, collect, metrics)
        self._stopping = vote.stop  # set last: if `_act` raises an error, `close` saves the step with ``save_at_end``
        return action, future

    def _take_lease(self) -> None:
        if self._has_lease:
            return
        self._has_lease = True
        if self._flushing is not None:  # before the lease is taken, so that the flush of each node recognises it
            self._flushing.queue.admit(self._lease.name, self._agreement.decided(lambda: self._lease.id))
            self._agreement.largest(0)
        if self._agreement.is_first:
            self._lease.take()

    def _is_gone(self, step: int) -> bool:
        """Returns whether a saved step was deleted. If so, updates the position to the remaining steps.

        Collective. The call costs a request, so make it only before the job skips the step.
        """
        position = self._agreement.decided(functools.partial(self._position_without, step))
        if position is None:
            return False
        logger.warning("%s: step %d was saved, then deleted: saving it again", self._folder.path, step)
        self._saves.wait()
        self._saves.forget()
        self._position = position
        return True

    def _position_without(self, step: int) -> Position | None:
        """Returns the job's position without a deleted step.

        If the step exists, is being saved, or cannot be looked up, returns None.
        """
        assert self._position is not None
        if self._saves.is_last(step) and self._saves.is_busy:
            return None
        try:
            name = self._position.name_of(step, self._names)
            if self._folder.child(name).head(metadata_file_name()) is not None:
                return None
            steps = read_steps(self._folder, self._names)
        except CheckpointError as error:
            logger.warning("cannot check whether step %d still exists: %s", step, str(error))
            return None
        return Position.at(self._position.branch, newest_of(steps, self._position.branch), steps, self._position.step)

    def _decide(self, step: int, *, stop: bool, force: bool, must_write: bool) -> tuple[Action, Vote]:
        assert self._position is not None
        memory, holds = self._survival.vote(), self._survival.holds
        vote = Vote(
            step=step,
            stop=stop,
            force=force,
            is_due=self._policy.is_due(step),
            is_last=self._saves.is_last(step),
            is_there=step in self._position.numbers,
            failures=self._saves.failures.unreported,
            must_write=must_write,
            is_busy=holds and self._saves.is_busy,
            is_due_in_memory=holds and self._policy.is_due_in_memory(step),
            is_lost=bool(self._lease.lost),
            memory=memory,
        )
        return decide(self._agreement, vote)

    def _go_back(self, step: int) -> None:
        assert self._position is not None
        logger.warning(
            "%s: the job has gone back from step %d to step %d without restore(): its saves from here on form a new "
            "branch",
            self._folder.path,
            self._position.step,
            step,
        )
        self._write_held()
        self._saves.wait()
        self._advance()
        self._position.begin_branch(self._agreement.decided(lambda: new_branch(None)))
        self._survival.forget()
        self._continue_from(max(0, step - 1))

    def _advance(self) -> None:
        assert self._position is not None
        self._position.advance(self._saves.wait_committed())

    def _continue_from(self, step: int) -> None:
        assert self._position is not None
        self._saves.forget()
        if self._agreement.is_first:
            self._position.warn_of_others(self._folder.path)
        self._policy.record_save(step, is_due=True)  # the next save is due relative to this step
        if self._exports is not None:
            self._exports.continue_from(step)

    def _act(self, action: Action, vote: Vote, collect: Collect, metrics: dict[str, float]) -> Future[str] | None:
        assert self._position is not None
        step = vote.step
        if action is Action.NOTHING:
            self._saves.warm_up(collect)
            return None
        if action is Action.JOIN:
            return self._saves.future
        if action is Action.KEEP:
            future: Future[str] = Future()
            future.set_result(self.path(step))
            return future
        if action is Action.SAVE or not self._saves.is_busy:
            self._advance()  # staging would wait for the previous save anyway
        self._policy.record_save(step, is_due=vote.asks_for_save)
        name = self._position.name_of(step, self._names)
        self._serial = max(self._serial, self._position.serial) + 1
        record = SaveRecord(
            step,
            parent=(self._position.tip.save_id or None) if self._position.tip else None,
            branch=self._position.branch,
            metrics=metrics,
            job=self._survival.run,
            lived=self._clock.lived,
            restarts=self._clock.restarts,
            is_end=vote.stop,
            serial=self._serial,
            **self._retention.recorded(),
        )
        hold = self._survival.next_state(record, self._position)
        save = StepSave(self._folder.child(name), name, record, is_due=vote.asks_for_save)
        if action is Action.SAVE:
            return self._saves.start(save, collect, hold)
        if hold is not None:
            self._saves.hold(save, collect, hold)
        return None

    def _write_held(self) -> None:
        if self._position is not None and self._saves.held_step is not None:
            self._advance()
            self._saves.write_held()

    # --- a restore, as all ranks decide -----------------------------------------------------------------------------

    def _restored(self, state: dict[str, Any], selection: Selection, step: int | None, *, fallback: bool) -> int | None:
        self._write_held()
        self._saves.wait()
        lost = finish_unflushed(self._flushing, self._agreement)
        self._survival.find_predecessors()
        self._survival.forget()
        find = functools.partial(restorable, self._folder, self._names, step, fallback=fallback)
        candidates, steps = self._agreement.decided(find)
        loaded: SaveRecord | Problem | None = None
        record: SaveRecord | None
        tip = candidates[0][0] if candidates else None
        chosen = None if step is not None else self._survival.newest_state(tip, {s.save_id for s in steps}, lost)
        if chosen is not None:
            options, predecessors = self._reader_options, self._survival.predecessors
            loaded = load_from_memory(
                predecessors, *chosen, self._folder.path, self._agreement, state, selection, options
            )
        if isinstance(loaded, SaveRecord):
            tip, record = newest_of(steps, loaded.branch), loaded
            position: Position | None = Position.at(loaded.branch, tip, steps, loaded.step)
        else:
            position = self._restore_from_storage(state, selection, candidates, steps, loaded)
            record = None if position is None or position.tip is None else position.tip.record
        self._survival.start_keeper()
        if position is None:
            return None
        self._position = position
        self._continue_from(position.step)
        self._clock.resume(record)
        return position.step

    def _restore_from_storage(
        self,
        state: dict[str, Any],
        selection: Selection,
        candidates: Sequence[tuple[Step, Branch]],
        steps: Sequence[Step],
        problem: Problem | None,
    ) -> Position | None:
        """Loads the first undamaged checkpoint. Returns the job's new position, or None without a checkpoint.

        ``candidates`` and ``steps`` are the result of `restorable`. ``problem`` is the reason why a state in memory was
        not loaded. The job may have nothing but its states in memory, so they are freed only after a checkpoint has
        been loaded, or if they are damaged.
        """
        options, wanted = self._reader_options, [step for step, _ in candidates]
        number = load_first(self._folder, wanted, state, selection, self._heartbeats, options)
        if number is not None or (problem is not None and problem.is_damage):
            self._survival.predecessors.end()
        may_differ = not selection.strict or selection.allow_shape_mismatch  # values that do not fit stay unchanged
        if problem is not None and (number is None or (problem.has_touched and may_differ)):
            raise ReadError(
                f"{self._folder.path}: the state in memory could not be loaded, and storage may not have all of it. "
                f"The state that was passed to restore() may be partly overwritten. Rebuild that state, and call "
                f"restore() again. {problem.error}"
            )
        if number is None:
            return None
        step, branch = candidates[number]
        if self._agreement.is_first and step.record is not None and step.record.step != step.number:
            logger.warning(
                "%s/%s records step %d: it was renamed or copied. Restoring it as step %d",
                self._folder.path,
                step.name,
                step.record.step,
                step.number,
            )
        return Position.at(branch, step, steps, step.number)
