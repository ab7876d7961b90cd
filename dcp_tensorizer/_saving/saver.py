"""The state that the saves of one writer share, and the beginning of each save."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from .._runtime.forks import free_in_child
from .._runtime.process_context import ProcessContext
from .._runtime.ranks import is_distributed, rank_of_job
from .._runtime.spans import Span
from .._runtime.threads import Deadline
from .._runtime.torch_compat import group_devices, group_of_save
from .._staging.shared_mappings import SharedWay
from .._staging.staged_save import StagedSave, StagedStateDict, name_of_group
from .._staging.stager import Stager
from .._staging.ways import BUFFER
from .._storage.lease import Lease
from .._storage.open import absolute_path
from .._storage.redact import redact
from .._tiers.queue import AliveMark
from .._writer_process.gpu_ipc import DeviceWay
from .._writer_process.options import SaveOptions
from ..errors import CheckpointError, StagingError, WriteError, WriterProcessDied
from .engine import engine_of_process
from .flushing import Flushing
from .report import Freshness, Reports
from .save import Save, SaveDescription
from .tiered_save import TieredSave

logger = logging.getLogger("dcp_tensorizer")

_CLOSED = "the writer is closed: make a new one, or close it after the last save"


class Saver:
    """The state that the saves of one writer share. Begins the saves, and cleans up after them.

    Args:
        options: The writer's options.
        reports: Passes the reports and the progress of the writer's saves to the user.
        closed: The writer has been closed, and stages nothing.

    Attributes:
        save_id: The id of the last save that began; before the first save, the first save's id.
        next_id: The id of the next save.
        flushing: The flush of the local folder; None without ``local``.
        kind: The class of the writer's saves.
        freshness: Compares each save with the previous one.
        owner: The run's lease of the folder of the saves; None without a lease.
        refusal: The error that `raise_refusal` raises next.
        before_save: Called in DCP's first hook of each save.
        around_write: Makes the context in which each save writes this rank's data.
    """

    def __init__(self, options: SaveOptions, reports: Reports, *, closed: bool = False) -> None:
        self.options = options
        self.reports = reports
        self.closed = closed
        self.engine = engine_of_process(devices=options.staging == "device")
        way = BUFFER
        if options.staging == "device":
            way = DeviceWay(self.engine.client, options.limits.timeout)
        elif options.staging == "shared":
            way = SharedWay()
        self.stager = Stager(
            self.engine.saves,
            cache_staged_state_dict=options.cache_staged_state_dict,
            thread_count=options.thread_count,
            way=way,
            overlap_staging=options.overlap_staging,
        )
        self.flushing = None if options.target is None else self.engine.flushing(options.target)
        self.kind: type[Save] = Save if options.target is None else TieredSave
        self.freshness = Freshness()
        self.owner: Lease | None = None
        self.id = uuid.uuid4().hex
        self.save_id = self.next_id = uuid.uuid4().hex
        # Saves without staging may begin at the same time, even in a signal handler.
        self._numbering = free_in_child(threading.RLock())
        self._of_thread = threading.local()
        self.refusal: WriteError | None = None
        self.before_save: Callable[[], object] = lambda: None
        self.around_write: Callable[[], AbstractContextManager[object]] = nullcontext
        self._alive_mark: AliveMark | None = None
        self._flushes = False

    def prewarm(self, state_dict: Mapping[str, Any]) -> None:
        """Starts the writer process, and allocates the staging buffer in the background.

        Raises `StagingError` if there is not enough memory, or, naming the key, if a value cannot be saved.
        """
        self._ensure_process()
        if self.flushing is not None and not self.closed:  # an earlier job may have left saves in the local folder
            self.flushing.resume()
        self.stager.prewarm(state_dict)

    def wait_remote(self, deadline: Deadline) -> bool:
        """Waits until the remote has everything from the local folder; returns False on timeout.

        Raises `WriteError` if a checkpoint was given up, and `ReadError` if it is unknown what the remote has.
        """
        if self.flushing is None:
            return True
        if not self.closed:
            self.engine.open(self)
            self._flushes = True
            self.flushing.resume()
        is_over = self.flushing.wait(deadline)
        self.flushing.check()
        return is_over

    def stage(
        self, state_dict: dict[str, Any], save: SaveDescription, path: str | os.PathLike[str] | None
    ) -> StagedStateDict:
        """Copies a state dict into the staging buffer, once the previous saves are over.

        If the state must not or cannot be saved, the save fails on all ranks. If the reason is that too many saves in a
        row were not committed, `raise_refusal` also raises the error, on the coordinator.
        """
        called = time.perf_counter()
        self.end_save()  # a failed synchronous save still holds its directory
        self.engine.saves.wait_turn(self.stager)
        self.engine.failures.end()
        limit = self.options.limits.max_consecutive_failures
        if refusal := self.engine.failures.in_a_row(_shown(path), name_of_group()).refusal(limit):
            self.refusal = refusal  # in the save, `begin` raises the error
            return self.stager.refuse(StagingError(str(refusal)))
        if self.closed or save.error is not None:
            return self.stager.refuse(save.error or StagingError(_CLOSED))
        self._ensure_process()
        if self.closed:  # another thread has closed the writer, and has not seen the new process
            if self._leave():
                self.engine.end_process(Deadline(0.0))
            return self.stager.refuse(StagingError(_CLOSED))
        started, flushing = time.perf_counter(), self.flushing
        if (
            flushing is not None
            and flushing.unflushed() >= self.options.max_unflushed
            and (error := self._wait_for_flush(flushing)) is not None
        ):
            return self.stager.refuse(error)
        staged = self.stager.stage(state_dict, save.omitted, is_kept=save.on_staged is not None)
        spans = Span("wait", called, started), Span("stage", started, time.perf_counter())
        # without ``on_staged``: its owner may hold the copy, which would then be in a reference cycle
        staged.staged_save.description = save._replace(on_staged=None, spans=spans)
        if save.on_staged is not None:
            save.on_staged(staged)
        return staged

    def hold(self, state_dict: dict[str, Any], on_staged: Callable[[StagedStateDict], object]) -> None:
        """Copies a state dict that no save writes. A save of another state may be in progress."""
        staged = self.stager.stage(state_dict, is_kept=True)
        staged.staged_save.abandoned = True  # no save waits for this copy
        on_staged(staged)

    def begin(
        self,
        path: str | os.PathLike[str] | None,
        staged_save: StagedSave | None,
        context: ProcessContext | None = None,
        error: StagingError | None = None,
    ) -> Save:
        """Begins the calling thread's save, inside the step in which DCP sends errors to all ranks.

        If the save writes from the tensors themselves, ``staged_save`` is None. If another process has staged the
        tensors, ``context`` and ``error`` are those of that staging.

        Raises `StagingError` if this rank could not stage its state dict, and `WriteError` if the save cannot begin:
        for example, it has no path, the writer is closed, or too many saves in a row were not committed.
        """
        if staged_save is None:  # a synchronous save, or one that another stager has staged
            self.engine.saves.wait_turn(self.stager)
        else:
            context = staged_save.context
        self.end_save()
        group = name_of_group() if staged_save is None else staged_save.group
        if not self.closed:  # saving with a closed writer is a bug of the caller, not a failure of the storage
            if staged_save is not None:
                in_a_row = self.engine.failures.in_a_row(_shown(path), group)
                in_a_row.check(self.options.limits.max_consecutive_failures)
            self.engine.failures.begin(_shown(path), group)
        try:
            if error := error or (None if staged_save is None else staged_save.error):
                # A new error: the traceback of the old one would keep frames and their tensors alive.
                raise StagingError(str(error))
            where = self._where(path, None if context is None else context.directory, staged_save)
            self._check_group(where, staged_save)
            with self._numbering:
                save_id, self.next_id = self.next_id, uuid.uuid4().hex
            save: Save = self.kind(self, save_id, where, staged_save)
        except CheckpointError as failure:
            self.engine.failures.failed(failure)
            raise
        self.save_id = save_id
        if self.flushing is not None:
            self._flushes = True
            self.engine.open(self)  # also without staging, because the flush needs the process
        self.engine.connection = save.storage.connection
        self._of_thread.save = save
        return save

    @property
    def save(self) -> Save:
        """The calling thread's save. Saves without staging may run at the same time, each on its own thread."""
        return self._of_thread.save  # type: ignore[no-any-return]

    def end_save(self) -> None:
        """Ends this thread's last save. When another rank has failed, DCP calls no hook that would end it."""
        save: Save | None = getattr(self._of_thread, "save", None)
        if save is not None:
            save.end()

    def raise_refusal(self) -> None:
        """Raises, once and on the training thread, the error of a save that was refused after too many failed saves.

        If `stage` raised the error, the save would not begin, and the other ranks would wait for this rank.
        """
        refusal, self.refusal = self.refusal, None
        if refusal is not None:
            raise refusal

    def close(self, deadline: Deadline) -> None:
        """Waits for the saves of this writer, and for the flush of the local folder.

        Then, if no other writer uses the engine, ends the writer process and frees the memory. On timeout, ends the
        process in any case.
        """
        is_over = self.engine.saves.drain(self.stager, deadline)
        if self.flushing is not None and self._flushes:  # also flushes saves of dead jobs
            self.flushing.end(deadline)
        self.closed = True
        if self._alive_mark is not None:
            self._alive_mark.end()
        if ends_engine := self._leave():
            self.engine.end_process(deadline)
        elif not is_over:
            self.engine.client.end_process(deadline)
        with suppress(RuntimeError):  # a signal handler may have interrupted a write to the log's stream
            if not is_over:
                logger.error("the writer is closed, and the save in progress is abandoned")
            self.engine.failures.end()
        self.end_save()
        if ends_engine:
            self.engine.free(deadline, self.stager)

    def _leave(self) -> bool:
        """Stops using the engine; returns whether no other writer uses it."""
        return self.engine.leave(self) and self.engine.saves.only_of(self.stager)

    def _ensure_process(self) -> None:
        self.engine.open(self)
        self._flushes = self.flushing is not None
        with suppress(WriterProcessDied):  # if no process can be started during the save either, the trainer writes
            self.engine.client.ensure_process()

    def _wait_for_flush(self, flushing: Flushing) -> StagingError | None:
        """Waits while too many checkpoints are only in the local folder.

        If nothing arrives on the remote within the timeout, or if the writer is closed, returns the error.
        """
        most = self.options.max_unflushed
        flushing.resume()
        logger.info("%s: training waits for the flush (max_unflushed=%d)", flushing.target.name, most)
        if flushing.wait(until=lambda: self.closed or flushing.unflushed() < most):
            return StagingError(_CLOSED) if self.closed else None
        count = flushing.unflushed()
        return StagingError(
            f"{count} checkpoint{' is' if count == 1 else 's are'} only in {flushing.target.local}, and nothing has "
            f"arrived at {flushing.target.name} for {flushing.target.timeout:g} s: the remote is unreachable, or a "
            f"node is lost. Check the remote."
        )

    def _where(
        self, path: str | os.PathLike[str] | None, directory: str | None, staged_save: StagedSave | None
    ) -> str | Path:
        if self.closed:
            raise WriteError(_CLOSED)
        if path is None:
            raise WriteError("no path: pass one to the writer, or checkpoint_id= to the save")
        if staged_save is not None and staged_save.distributed and not is_distributed():
            raise WriteError(
                f"the process group was destroyed before the save to {redact(str(path))} had begun: the ranks would "
                f"overwrite each other's files. Close the writer before destroy_process_group()."
            )
        return absolute_path(path, directory)

    def _check_group(self, where: str | Path, staged_save: StagedSave | None) -> None:
        """Warns, once, if a background save uses training's gloo group: the job may then hang or abort.

        If the group also has a GPU backend, does not warn, because training's collectives use that backend.
        """
        if staged_save is None or not staged_save.distributed or self.engine.warned_of_group:
            return
        world = torch.distributed.group.WORLD
        if (
            world is None
            or not staged_save.is_on_own_thread
            or group_of_save() is not world
            or group_devices(world) != {"cpu"}
        ):
            return
        self.engine.warned_of_group = True
        if rank_of_job() == 0:
            logger.warning(
                "the save to %s runs its collectives on the job's default process group, in a thread. If training "
                "uses that group during the save, the job hangs silently, or gloo aborts it. Make a group for "
                'saves, once, on every rank, and pass it to each save: process_group=dist.new_group(backend="gloo")',
                redact(str(where)),
            )

    def show_alive(self) -> None:
        """Marks the writer as alive in the local folder until it is closed, so that its saves do not count as dead."""
        if self.flushing is not None and self._alive_mark is None and not self.closed:
            with suppress(CheckpointError, OSError):
                self._alive_mark = AliveMark(self.flushing.queue, self.id)


def _shown(path: str | os.PathLike[str] | None) -> str:
    return "" if path is None else redact(str(path))
