"""The saves of a job, one at a time, and the work after each commit."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save
from torch.distributed.checkpoint.stateful import Stateful

from .._index.schema import SaveRecord
from .._memory.survival import OnStaged
from .._runtime.forks import limit_advice
from .._runtime.patterns import matches
from .._runtime.threads import NEVER, Deadline, Hung, in_background, in_time, is_exit
from .._saving.commit import WrittenFiles, is_uncommitted
from .._saving.failures import FailuresInARow
from .._saving.save import SaveDescription
from .._staging.staged_save import StagedStateDict
from .._staging.state_tree import fingerprint
from .._storage.base import Storage
from ..errors import CheckpointError, StagingError, WriteError, describe, listed, unwrap
from ..planner import SavePlanner
from ..writer import DescribedStager, TensorizerStorageWriter
from .exports import Exports, ties_in
from .metrics import GoodputClock
from .ranks import Agreement, Heartbeats
from .restore import WRAPPERS
from .steps import Step

logger = logging.getLogger("dcp_tensorizer")

_CLEAN_UP_SECONDS = 20.0

Collect = Callable[[], tuple[dict[str, Any], set[str]]]
"""Function that collects the part of a state to save, as `collected_part` does."""


@dataclass(slots=True)
class StepSave:
    """Save of a step. With ``survive``, the step may be only in memory before its save begins."""

    storage: Storage  # the checkpoint's directory
    name: str  # the name of that directory
    record: SaveRecord
    is_due: bool = True  # a save of the step was due
    staged: StagedStateDict | None = None  # the state, while it is only in memory
    refusal: StagingError | None = None  # why the state could not be collected
    began: float = 0.0
    future: Future[str] = field(default_factory=Future)  # the path; done when the save is committed or has failed
    over: Future[None] = field(default_factory=Future)  # done when the save and the work after it are over
    saved: Step | None = None  # the checkpoint, once it is committed
    files: WrittenFiles = field(default_factory=WrittenFiles)

    def __post_init__(self) -> None:
        # The future cannot be cancelled, because the other ranks save regardless.
        self.future.set_running_or_notify_cancel()

    @property
    def has_failed(self) -> bool:
        return self.future.done() and self.future.exception() is not None


class Saves:
    """Saves of one rank.

    Args:
        heartbeats: Saves use its group.
        stages_all: Each rank also stages the tensors that other ranks write.
        after: Called with each committed checkpoint, on a background thread.

    Attributes:
        error: The error of the last save, its export or its publication, if no call has raised it yet.
    """

    def __init__(
        self,
        writer: TensorizerStorageWriter,
        agreement: Agreement,
        heartbeats: Heartbeats,
        clock: GoodputClock,
        *,
        stages_all: bool,
        after: Callable[[Step], None],
        exports: Exports | None,
    ) -> None:
        self.failures = FailuresInARow()
        self.error: BaseException | None = None
        self._writer = writer
        self.planner = SavePlanner()
        self._agreement = agreement
        self._stages_all = stages_all or agreement.is_alone
        self._fingerprint: int | None = None  # of the last state; None if it could not be collected
        self._heartbeats = heartbeats
        self._clock = clock
        self._after = after
        self._exports = exports
        self._is_warm = False
        self._unmatched: set[str] = set()  # the patterns that a warning has named
        self._last: StepSave | None = None
        self._held: StepSave | None = None
        self._following = threading.local()

    def warm_up(self, collect: Collect) -> None:
        """Allocates the staging buffer before the first save. Optimizers must already have their state."""
        if not self._is_warm:
            self._is_warm = True
            with suppress(StagingError):  # the save will report the error
                self._writer.prewarm(collect()[0])

    def start(
        self,
        save: StepSave,
        collect: Collect,
        on_staged: OnStaged | None = None,
        ties: Mapping[str, str] | None = None,
    ) -> Future[str]:
        """Stages the state that ``collect`` returns, and starts its save in the background.

        If a ``state_dict`` raises an error, or the save has a ``refusal``, the save begins nevertheless, and fails on
        all ranks, because otherwise the other ranks would wait for this rank. Then the error of ``state_dict``, if any,
        is raised here. ``on_staged`` is that of `SaveDescription`. ``ties`` are the tied tensors of the state; None:
        those of the collected state.
        """
        save.began = self._clock.now()
        collected, error = self._collected(collect)
        save.refusal = save.refusal or _refusal(error)
        before, self._is_warm, self._held = self._last, True, None
        omitted = self._written_elsewhere(None if save.refusal else collected, before)
        if self._exports is not None:
            self._wait_exported()
            on_staged = self._exports.retaining(ties_in(collected) if ties is None else ties, on_staged)
        description = SaveDescription(save.record, save.refusal, omitted, on_staged, save.files)
        try:
            response = async_save(
                collected,
                checkpoint_id=save.storage.location,
                storage_writer=self._writer,
                async_stager=DescribedStager(self._writer, description),
                planner=self.planner,
                process_group=self._heartbeats.group,
            )
        except RuntimeError as failure:  # for example, torch cannot start its thread
            advice = limit_advice(failure) or (is_exit(failure) and ". Close the manager before the interpreter exits.")
            if not advice:
                raise
            raise WriteError(f"{save.storage.path} was not saved: {failure}{advice}") from failure
        done = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
        self._last = save
        in_background(functools.partial(self._follow, save, done, before), name="checkpoint-manager")
        if error is not None:
            raise error
        return save.future

    def _written_elsewhere(self, state: Mapping[str, Any] | None, before: StepSave | None) -> frozenset[str]:
        """Returns the keys of tensors that this rank need not stage, because other ranks write them. Collective.

        The planner uses only the keys, types, shapes, dtypes and shardings of all ranks. If these have not changed on
        any rank since the last save, each rank writes the same items again. ``state`` is None if it could not be
        collected. Raises `WriteError` if a rank is gone.
        """
        if self._stages_all:
            return frozenset()
        last, self._fingerprint = self._fingerprint, None
        if state is not None:
            with suppress(Exception):  # for example, a tensor without a shape: staging reports it to all ranks
                self._fingerprint = fingerprint(state)
        is_same = before is not None and before.saved is not None and last is not None and self._fingerprint == last
        (differs,) = self._agreement.largest(int(not is_same))
        return frozenset() if differs else self.planner.written_elsewhere

    def _wait_exported(self) -> None:
        """Waits for the export of the last save, and releases its state: the next one is about to be staged."""
        if self._exports is not None:
            self.wait()
            self._exports.release_staged()

    def wait_published(self, deadline: Deadline, *, on_all_ranks: bool = True) -> None:
        """Waits until the last export is published, or until the deadline. One rank publishes. A failure sets `error`.

        With ``on_all_ranks``, the call is collective, and all ranks get the error.
        """
        exports = self._exports
        if exports is None or not exports.publishes or self._is_in_callback:
            return
        if not on_all_ranks:
            self.error = exports.wait_published(deadline) or self.error
            return
        try:
            with self._heartbeats.watch("published"):
                own = exports.wait_published(deadline)
            errors = self._agreement.gathered(own)
        except WriteError as error:  # a rank is gone
            errors = [error]
        self.error = next((error for error in errors if error is not None), self.error)

    def hold(self, save: StepSave, collect: Collect, on_staged: OnStaged) -> None:
        """Stages a state that `write_held` may write later. The arguments are those of `start`."""

        def hold(staged: StagedStateDict) -> None:
            staged.staged_save.ties = ties
            save.staged, self._held = staged, save
            on_staged(staged)

        self._wait_exported()
        save.is_due = save.is_due or (self._held is not None and self._held.is_due)  # this step replaces the held one
        collected, error = self._collected(collect)
        ties = {} if self._exports is None else ties_in(collected)
        if error is not None:  # other ranks hold the step, and if they write it, the save must fail on all ranks
            save.refusal, self._held = _refusal(error), save
            raise error
        self._writer.saver.hold(collected, hold)

    def _collected(self, collect: Collect) -> tuple[dict[str, Any], BaseException | None]:
        """Collects the state. Returns it, and the error of a failed ``state_dict`` or None.

        Warns once about each pattern that matches nothing on the first rank. The state of the first rank may lack keys
        of other ranks.
        """
        try:
            collected, unmatched = collect()
        except (Exception, CheckpointException) as error:  # a load inside may raise CheckpointException
            return {}, error
        unmatched -= self._unmatched
        if unmatched and self._agreement.is_first:
            self._unmatched |= unmatched
            logger.warning(
                "exclude: no key of the state on the first rank matches %s. Keys of nested dicts are "
                "joined by dots, as in 'model.weight'. A list has one key; its elements have none",
                listed(sorted(unmatched)),
            )
        return collected, None

    def write_held(self) -> None:
        """Begins the save of the newest step, if it is only in memory and a save of it was due."""
        save = self._held
        if save is None or not save.is_due:
            return
        (staged, save.staged), state, ties = (save.staged, None), dict[str, Any](), None
        if staged is not None:
            try:
                staged.staged_save.wait_copied()
                # `StagedStateDict.items` would bind the state to a save; `dict` copies it without calling `items`.
                state = dict(staged)
                ties = staged.staged_save.ties
            except StagingError as error:
                save.refusal = error
        self.start(save, lambda: (state, set()), ties=ties)

    @property
    def held_step(self) -> int | None:
        """Returns the newest step if it is only in memory and a save of it was due, and otherwise None."""
        return None if self._held is None or not self._held.is_due else self._held.record.step

    @property
    def is_busy(self) -> bool:
        return self._last is not None and not self._last.future.done()

    @property
    def is_over(self) -> bool:
        """Returns whether the last save and the work after it are over."""
        return self._last is None or self._last.over.done()

    def is_last(self, step: int) -> bool:
        return self._last is not None and self._last.record.step == step and not self._last.has_failed

    @property
    def future(self) -> Future[str]:
        assert self._last is not None
        return self._last.future

    @property
    def saved(self) -> Step | None:
        return None if self._last is None else self._last.saved

    def wait_committed(self) -> Step | None:
        """Waits for the last save. Returns its checkpoint, or None if it failed or no save was made."""
        if self._last is None:
            return None
        self._last.future.exception()
        return self.saved

    def forget(self) -> None:
        """Drops the last save, which must be over, and the step in memory: the job does not continue from them."""
        self._last = self._held = None

    def wait(self, deadline: Deadline = NEVER) -> None:
        """Waits for the last save and the work after it.

        A callback of a save's future waits only for the save, because the work after it follows the callbacks.
        """
        if self._last is not None:
            waited_for: Future[Any] = self._last.future if self._is_in_callback else self._last.over
            wait_for([waited_for], deadline.left)

    @property
    def is_in_save(self) -> bool:
        """Returns whether the calling thread is that of a save in progress, as in ``on_report``."""
        saver = self._writer.saver
        return any(save.thread is threading.current_thread() for save in saver.engine.saves.of(saver.stager))

    @property
    def _is_in_callback(self) -> bool:
        """Returns whether the caller is a callback of a save's future."""
        return getattr(self._following, "is_here", False)

    def raise_error(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error

    def _follow(self, save: StepSave, done: Future[Any], before: StepSave | None) -> None:
        self._following.is_here = True
        try:
            meta: StorageMeta | None = done.result().storage_meta
        except BaseException as error:
            cause = unwrap(error)
            cause = self._heartbeats.error_of(cause, f"{save.storage.path} was not saved") or cause
            if not isinstance(cause, CheckpointError):
                failure = WriteError(f"{save.storage.path} was not saved: {describe(cause)}")
                failure.__cause__ = cause
                cause = failure
            self.error = cause
            self.failures.failed(str(cause))
            self._clock.failed()
            save.future.set_exception(cause)
            if is_uncommitted(error):
                with suppress(Hung):  # the disk does not respond: the thread is abandoned
                    in_time(save.files.remove, _CLEAN_UP_SECONDS)
        else:
            save_id = "" if meta is None else meta.save_id or ""
            record = save.record
            save.saved = Step(record.step, save.name, save_id, time.time_ns(), record)
            self.error = None
            self.failures.committed(save.storage.path)
            self._clock.saved(save.began)
            try:
                save.future.set_result(save.storage.location)
            except BaseException:  # a callback has failed; waiting threads are notified before callbacks
                logger.exception("a callback failed after the save of %s, which is committed", save.storage.path)
            if before is not None:
                before.over.result()
            with suppress(Exception):  # the save is committed, and does not fail because of this work
                self._after(save.saved)
            if self._exports is not None and self._exports.is_due(save.record.step):
                self.error = self._exports.run(save.saved)
        finally:
            self._following.is_here = False
            save.over.set_result(None)


def _refusal(error: BaseException | None) -> StagingError | None:
    return None if error is None else StagingError(f"the state could not be collected: {describe(error)}")


# --- the saved part of a state ----------------------------------------------------------------------------------------


def collected_part(
    state: Mapping[str, Any], exclude: Sequence[str] = (), trainable_only: bool = False
) -> tuple[dict[str, Any], set[str]]:
    """Collects a part of a state, with the state dicts of ``Stateful`` values. Does not change the state itself.

    Leaves out keys that a pattern of ``exclude`` matches, and with ``trainable_only`` frozen parameters. The keys of
    nested dicts are joined by dots. A list counts as one value. Also returns the patterns that match no key. Raises
    `StagingError` if ``trainable_only`` is set, and the state has no module or parameter.
    """
    collected = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()}
    unmatched = set(exclude)
    if not exclude and not trainable_only:
        return collected, unmatched
    frozen = _frozen(state, collected) if trainable_only else set()
    trained = (torch.nn.Module, torch.nn.Parameter)
    if trainable_only and not any(isinstance(value, trained) for value in _values(state)):
        raise StagingError(
            "trainable_only=True: the state has no module or parameter. Put the module itself into the state, as "
            '{"model": model}, or pass exclude=.'
        )

    def part_of(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        part: dict[str, Any] = {}
        for key, value in state.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict) and value:
                if inner := part_of(value, f"{name}."):
                    part[key] = inner
                continue
            matching = {pattern for pattern in exclude if matches((name,), (pattern,))}
            unmatched.difference_update(matching)
            is_frozen = trainable_only and isinstance(value, torch.nn.Parameter) and not value.requires_grad
            if not (matching or is_frozen or name in frozen):
                part[key] = value
        return part

    return part_of(collected, ""), unmatched


def _frozen(state: Mapping[str, Any], collected: Mapping[str, Any]) -> set[str]:
    """Returns the keys that the modules' frozen parameters have in the collected state, one for each of their names."""
    frozen = set()
    for key, value in state.items():
        if isinstance(value, torch.nn.Module):
            parameters = value.named_parameters(remove_duplicate=False)
            names = {WRAPPERS.sub("", name) for name, parameter in parameters if not parameter.requires_grad}
            if names and names.isdisjoint(collected[key]):
                logger.warning(
                    "trainable_only=True: no key in the state dict of %r is the name of a frozen parameter, such as "
                    "%r. If the state dict has the frozen parameters under other names, pass exclude=",
                    key,
                    min(names),
                )
            frozen |= {f"{key}.{name}" for name in names}
    return frozen


def _values(state: Mapping[str, Any]) -> Iterator[Any]:
    for value in state.values():
        if isinstance(value, dict):
            yield from _values(value)
        else:
            yield value
