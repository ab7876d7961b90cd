"""Runs the saves of a job, one at a time, and after each what comes after it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from .._index.schema import SaveRecord
from .._runtime.threads import NEVER, Deadline, Hung, in_background, in_time
from .._saving.commit import WrittenFiles, is_uncommitted
from .._saving.engine import FailuresInARow
from .._saving.saver import SaveDescription
from .._staging.staged_save import StagedStateDict
from .._staging.state_tree import fingerprint
from .._storage.base import Storage
from ..errors import CheckpointError, StagingError, WriteError, describe, unwrap
from ..planner import SavePlanner
from ..writer import DescribedStager, TensorizerStorageWriter
from .agreement import Agreement, Together, is_of_ranks
from .goodput import GoodputClock
from .restart import OnStaged
from .restore import StatePart
from .step_folder import Step

logger = logging.getLogger("dcp_tensorizer")

_CLEAN_UP_SECONDS = 20.0


@dataclass(slots=True)
class _StepSave:
    """One save.

    Attributes:
        began: A moment of the clock.
        future: Done when it is committed; gives its path.
        over: Done when what comes after it has been done, too.
        saved: The checkpoint.
        files: That this rank has written.
    """

    step: int
    storage: Storage
    name: str
    record: SaveRecord
    began: float
    future: Future[str] = field(default_factory=Future)
    over: Future[None] = field(default_factory=Future)
    saved: Step | None = None
    files: WrittenFiles = field(default_factory=WrittenFiles)

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()  # nobody can cancel it: the other ranks save in any case

    @property
    def has_failed(self) -> bool:
        return self.future.done() and self.future.exception() is not None


class _Held(NamedTuple):
    """A step that is in memory alone.

    Attributes:
        storage: The checkpoint's directory.
        name: Of that directory.
        staged: The staged copy; None if the state could not be collected.
        refusal: Why there is none.
        record: What the index would say of it.
        is_due: A save of it was due.
    """

    storage: Storage
    name: str
    staged: StagedStateDict | None
    refusal: StagingError | None
    record: SaveRecord
    is_due: bool


class Saves:
    """The saves of one rank.

    Args:
        writer: Writes all of them.
        agreement: Of all ranks.
        together: Keeps them together, on a group for them alone; None without ranks.
        clock: Takes their times.
        must_change: Patterns of the keys of which some must differ from the save before.
        max_failures: So many saves may fail in a row; None for any number.
        after: Called with each checkpoint when it is committed, on a thread of its own.
        omits_replicas: What other ranks write need not be staged.

    Attributes:
        failures: Those of the last saves, one after the other.
        error: Of the last save, if that has failed and nobody has been told.
        part: What is saved of states, from now on.
        together: Their ranks; None without ranks.
    """

    def __init__(
        self,
        writer: TensorizerStorageWriter,
        agreement: Agreement,
        *,
        together: Together | None,
        clock: GoodputClock,
        must_change: Sequence[str],
        max_failures: int | None,
        after: Callable[[Step], None],
        omits_replicas: bool,
    ) -> None:
        self.failures = FailuresInARow()
        self.error: BaseException | None = None
        self.part = StatePart()
        self._writer = writer
        self._planner = SavePlanner()
        self._replicas = Replicas(self._planner, agreement) if omits_replicas else None
        self.together = together
        self._clock = clock
        self._max_failures = max_failures
        writer.saver.freshness.must_change = tuple(must_change)
        self._after = after
        self._is_warm = False
        self._last: _StepSave | None = None
        self._held: _Held | None = None
        self._following = threading.local()

    def warm_up(self, state: Mapping[str, Any]) -> None:
        """Allocates the staging buffer, if this is asked before the first save. Optimizers must have their state."""
        if not self._is_warm:
            self._is_warm = True
            with suppress(StagingError):  # the save will say it
                self._writer.prewarm(self.part.of(state))

    def start(
        self,
        storage: Storage,
        name: str,
        state: Mapping[str, Any],
        record: SaveRecord,
        on_staged: OnStaged | None = None,
    ) -> Future[str]:
        """Stages the part of the state that is saved, and returns while it is.

        Raises what a ``state_dict`` raises, when the save has begun: it fails on the other ranks, which would wait for
        this one.

        Args:
            storage: Where to save.
            name: Of that directory.
            state: What to save.
            record: What the index will say of it.
            on_staged: See `SaveDescription`.
        """
        since = self._clock.now()
        collected, error = _collected(state, self.part)
        future = self._start(storage, name, collected, record, since, _refusal(error), on_staged)
        if error is not None:
            raise error
        return future

    def _start(
        self,
        storage: Storage,
        name: str,
        collected: dict[str, Any],
        record: SaveRecord,
        since: float,
        refusal: StagingError | None,
        on_staged: OnStaged | None = None,
    ) -> Future[str]:
        """Saves what has been collected, or fails by ``refusal``, as the save does on the other ranks."""
        before, self._is_warm, self._held = self._last, True, None
        omitted = frozenset[str]()
        if self._replicas is not None:
            follows = before is not None and before.saved is not None
            omitted = self._replicas.omitted(None if refusal else collected, follows=follows)
        save = _StepSave(record.step, storage, name, record, since)
        description = SaveDescription(record, refusal, omitted, on_staged, save.files)
        response = async_save(
            collected,
            checkpoint_id=storage.location,
            storage_writer=self._writer,
            async_stager=DescribedStager(self._writer, description),
            planner=self._planner,
            process_group=None if self.together is None else self.together.group,
        )
        done = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
        self._last = save
        in_background(lambda: self._follow(save, done, before), name="checkpoint-manager")
        return save.future

    def hold(
        self,
        storage: Storage,
        name: str,
        state: Mapping[str, Any],
        record: SaveRecord,
        on_staged: OnStaged,
        *,
        is_due: bool,
    ) -> None:
        """Stages a state that is not written unless `write_held` is called; takes what `start` takes."""

        def keep(staged: StagedStateDict) -> None:
            self._held = _Held(storage, name, staged, None, record, is_due)
            on_staged(staged)

        is_due = is_due or (self._held is not None and self._held.is_due)  # it takes the place of that one
        collected, error = _collected(state, self.part)
        if error is not None:  # other ranks hold the step: if it is written, the save has to fail on all of them
            self._held = _Held(storage, name, None, _refusal(error), record, is_due)
            raise error
        self._writer.saver.hold(collected, keep)

    def write_held(self) -> None:
        """Begins the save of the newest step, if that is in memory alone and a save of it was due."""
        held = self._held
        if held is None or not held.is_due:
            return
        refusal, state = held.refusal, dict[str, Any]()
        if held.staged is not None:
            try:
                held.staged.staged_save.wait_copied()
                state = dict(held.staged)  # not `items`, which ties it to a save
            except StagingError as error:
                refusal = error
        self._start(held.storage, held.name, state, held.record, self._clock.now(), refusal)

    @property
    def held_step(self) -> int | None:
        """The newest step, if that is in memory alone and a save of it was due."""
        return None if self._held is None or not self._held.is_due else self._held.record.step

    @property
    def is_busy(self) -> bool:
        """Returns whether the last save still runs."""
        return self._last is not None and not self._last.future.done()

    def check(self, failures: int) -> None:
        """Raises `WriteError` if so many saves have failed in a row that training would go on without checkpoints."""
        self.failures.check(self._max_failures, failures)

    def is_last(self, step: int) -> bool:
        """Returns whether the last save is of a step, and has not failed."""
        return self._last is not None and self._last.step == step and not self._last.has_failed

    @property
    def future(self) -> Future[str]:
        """The future of the last save."""
        assert self._last is not None
        return self._last.future

    @property
    def has_saved(self) -> bool:
        """Returns whether the last save is committed."""
        return self._last is not None and self._last.saved is not None

    def settled(self) -> Step | None:
        """The checkpoint of the last save, when that is over; None if it failed, or there was none."""
        if self._last is None:
            return None
        self._last.future.exception()
        return self._last.saved

    def forget(self) -> None:
        """The job stands elsewhere: the last save, which is over, is not what it goes on from."""
        self._last = self._held = None

    def wait(self, deadline: Deadline = NEVER) -> None:
        """Waits for the last save, and for what comes after it.

        A callback of a save's future waits for the save alone: what comes after it follows the callbacks.
        """
        if self._last is not None:
            in_callback = getattr(self._following, "is_here", False)
            waited_for: Future[Any] = self._last.future if in_callback else self._last.over
            wait_for([waited_for], deadline.left)

    def tell(self) -> None:
        """Raises the error of the last save, if it has failed and nobody has been told."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def _follow(self, save: _StepSave, done: Future[Any], before: _StepSave | None) -> None:
        self._following.is_here = True
        try:
            meta: StorageMeta | None = done.result().storage_meta
        except BaseException as error:
            cause = unwrap(error)
            if self.together is not None and is_of_ranks(cause):
                assert isinstance(cause, RuntimeError)
                cause = self.together.error_of(cause, f"{save.storage.path} was not saved")
            self._fail(save, cause)
            if is_uncommitted(error):
                with suppress(Hung):  # a disk that does not answer: the thread is left alone
                    in_time(save.files.remove, _CLEAN_UP_SECONDS)
        else:
            save_id = "" if meta is None else meta.save_id or ""
            branch, metrics = save.record.branch, save.record.metrics
            save.saved = Step(save.step, save.name, save_id, time.time_ns(), branch, metrics, save.record.job)
            self.error = None
            self.failures.committed(save.storage.path)
            self._clock.saved(save.began)
            try:
                save.future.set_result(save.storage.location)
            except BaseException:  # of a callback; whoever waits has been told before
                logger.exception("a callback of the save of %s failed; the save did not", save.storage.path)
            if before is not None:
                before.over.result()
            with suppress(Exception):  # it has said so itself
                self._after(save.saved)
        finally:
            self._following.is_here = False
            save.over.set_result(None)

    def _fail(self, save: _StepSave, cause: BaseException) -> None:
        if not isinstance(cause, CheckpointError):
            failure = WriteError(f"{save.storage.path} was not saved: {describe(cause)}")
            failure.__cause__ = cause
            cause = failure
        self.error = cause
        self.failures.failed(str(cause))
        self._clock.failed()
        save.future.set_exception(cause)


def _refusal(error: BaseException | None) -> StagingError | None:
    return None if error is None else StagingError(f"the state could not be collected: {describe(error)}")


def _collected(state: Mapping[str, Any], part: StatePart) -> tuple[dict[str, Any], BaseException | None]:
    """Asks ``Stateful`` values for their state, as DCP does; returns also the error of one of them."""
    try:
        return part.of(state), None
    except (Exception, CheckpointException) as error:  # DCP's is no Exception: a load in it has failed
        return {}, error


# What a rank need not stage, because other ranks hold the same and write it.


class Replicas:
    """Knows of a rank's last save what other ranks wrote of it.

    The planner decides by keys, shapes and shardings on all ranks alone. So as long as these are the same on each rank
    as in the last save, each writes what it wrote then.

    Args:
        planner: Of all saves.
        agreement: Of all ranks.
    """

    def __init__(self, planner: SavePlanner, agreement: Agreement) -> None:
        self._planner = planner
        self._agreement = agreement
        self._last: int | None = None

    def omitted(self, state: Mapping[str, Any] | None, *, follows: bool) -> frozenset[str]:
        """The keys of the tensors that need not be staged. Every rank must ask before each save, after the last one.

        Args:
            state: What is saved; None if it could not be collected.
            follows: The last save was committed.

        Raises:
            WriteError: a rank is gone.
        """
        if self._agreement.is_alone:
            return frozenset()
        current = None
        if state is not None:
            with suppress(Exception):  # of a tensor without a shape, say: staging will say so, and all ranks hear of it
                current = fingerprint(state)
        is_same = follows and current is not None and current == self._last
        self._last = current
        (differs,) = self._agreement.largest(int(not is_same))
        return frozenset() if differs else self._planner.written_elsewhere
