"""Saving: `TensorizerStorageWriter`, the storage writer and stager for ``torch.distributed.checkpoint``.

DCP calls the hooks of this module, which pass the work to ``_saving.save``.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ._planning.global_plan import checked_messages, wholes_of
from ._runtime.forks import in_child
from ._runtime.interpreter import age_objects
from ._runtime.ranks import world_size_of_job
from ._runtime.threads import Deadline
from ._runtime.torch_compat import path_of_save, real_tensors
from ._runtime.validation import check_path, check_timeout
from ._saving.report import Reports, SaveReport, warn_of_other_process
from ._saving.save import Save, SaveDescription
from ._saving.saver import Saver
from ._saving.write_plan import plan_with
from ._staging.device import expandable_segments
from ._staging.staged_save import StagingFuture
from ._storage.open import absolute_path, is_location, path_to_write
from ._storage.redact import redact, shown
from ._tensor_file.encryption import encryption_cipher
from ._tiers.target import target_of
from ._writer_process.options import MAX_UNFLUSHED, SaveLimits, SaveOptions, Staging
from .errors import WriteError

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle
    from typing_extensions import Self

    from ._runtime.process_context import ProcessContext
    from ._tensor_file.encryption import EncryptionParams
    from .errors import StagingError

_PER_PROCESS = {"_saver", "_local"}  # bound to this process, or to one of its threads
_OF_GROUP = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE")
"""In PROCESS mode DCP sets these environment variables in the process that saves, for that process's process group."""

__all__ = ["SaveReport", "TensorizerStorageWriter", "WriterOptions"]


class WriterOptions(TypedDict, total=False):
    """The options of `TensorizerStorageWriter`, for type checks of code that passes them on."""

    cache_staged_state_dict: bool
    staging: Staging
    overlap_staging: bool
    overwrite: bool
    sync_files: bool
    thread_count: int | None
    storage_options: Mapping[str, Any] | None
    sha256: bool
    reuse_unchanged: bool
    encryption: EncryptionParams | None
    on_report: Callable[[SaveReport], object] | None
    on_progress: Callable[[int, int], object] | None
    limits: SaveLimits
    local: str | os.PathLike[str] | None
    max_unflushed: int


class TensorizerStorageWriter(StorageWriter, AsyncStager):
    """Storage writer that saves checkpoints as tensorizer files while training continues.

    Pass the writer as ``storage_writer`` to ``dcp.async_save`` (or ``dcp.save``), and close it before
    ``destroy_process_group()``::

        with TensorizerStorageWriter("checkpoints/latest") as writer:
            for step in ...:
                future = dcp.async_save(state_dict, storage_writer=writer, process_group=gloo_group)

    By default ``async_save`` copies the rank's state into a buffer of shared memory and returns; the writer process
    hashes and writes the buffer. When every rank's data is durable, the coordinator commits the checkpoint atomically.
    Asynchronous saves of one writer on one process group run one at a time.

    A writer is a cheap handle, so you may make a new one for every save. All writers of a process share the buffer and
    the writer process; those with ``staging="device"`` share a separate pair. The first ``async_save`` or `prewarm`
    starts the writer process. If you wait for the future of a writer's last save, you need not close the writer.

    Memory: one buffer of the size of the rank's state is cached between saves. `prewarm` allocates the buffer in the
    background; without `prewarm`, the first save allocates it, and takes longer. The writer process takes some 40 MB
    for its imports (200 MB with ``staging="device"``), and up to ``limits.buffer_bytes`` for the parts of files. It
    caches up to 64 MB of that memory between saves. ``dcp.save`` writes from the tensors themselves.

    Args:
        path: Where to save: a local directory that all ranks share, or any URL that fsspec opens. A save's
            ``checkpoint_id`` overrides it for that save.
        cache_staged_state_dict: Cache the staging buffer between saves.
        staging: ``"buffer"``: all tensors are copied to the staging buffer. ``"shared"``: CPU tensors in shared memory
            are not copied, but written from that memory, and may be changed once they are written; all other tensors
            are copied; encryption is not possible. ``"device"``: the writer process, with a separate CUDA
            context, copies CUDA tensors to the buffer. Without ``overlap_staging``, ``async_save`` returns when the
            state may be changed.
        overlap_staging: ``async_save`` returns before the state is copied, with an ``AsyncSaveResponse``. The state may
            be changed when the response's ``staging_completion`` is done; see `lock`.
        overwrite: Replace a checkpoint at the path. If False, a checkpoint at the path is an error.
        sync_files: Finish a save only when its data is on permanent storage (fsync). If False, a checkpoint can be lost
            or damaged when the machine fails, but not when only the job fails.
        thread_count: Number of threads for the copy to the staging buffer, and for hashing in the writer process. If
            None, the rank's share of the node's cores, or the cores that the rank is bound to if they are fewer; up to
            four.
        storage_options: Options of a URL's storage, such as credentials. They reach the writer process through a
            socket, and are never written to disk.
        on_report: Called with the `SaveReport` of each save, on the save's thread: on the coordinator when the save is
            committed, on other ranks when they have written their parts. With ``local``, called once more, on any
            thread, when the save has arrived at the path. The report is also logged (logger ``dcp_tensorizer``). With
            ``AsyncCheckpointerType.PROCESS``, neither ``on_report`` nor ``on_progress`` is called.
        on_progress: Called with the bytes that this rank has written and the bytes that it writes in all: before the
            first byte, about once a second, and at the end; by one thread at a time. `ProgressLine` shows them on a
            terminal. If ``on_progress`` raises an error, the save logs the error, and continues without further calls.
        sha256: Store a SHA-256 of each tensor in the files, besides the CRC-32. This takes 0.6 s of CPU time per GB in
            the writer process. Neither hash protects against an attacker, who can change it together with the data.
        reuse_unchanged: Do not write tensors again that have not changed since they were last saved. Their files get
            an additional name by a hard link, or are copied by the object store. Every checkpoint is still complete.
            This option cannot be combined with encryption or ``local``.
        encryption: `tensorizer.EncryptionParams`, the same on every rank, with the key that encrypts all tensors and
            objects. Names, shapes and dtypes stay readable. The key reaches the writer process through a socket, and is
            never written to disk.
        limits: Limits on waiting, memory and failures: see `SaveLimits`.
        local: A folder, on each node's own disk, that mirrors the path. A save is first made durable in the
            folder. Later the writer process sends the save to the path, while no other save needs the process.
        max_unflushed: Training waits when this many checkpoints are only in the local folder; 3 by default. Another
            number requires ``local``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value that is not allowed; ``local`` is given without ``path``; or two options
            cannot be combined: ``encryption`` with ``sha256``, ``reuse_unchanged`` or ``staging="shared"``; ``local``
            with ``reuse_unchanged``; ``staging="device"`` with torch's expandable segments.
        WriteError: ``encryption`` needs libsodium, which is missing; the path is invalid, read-only (http), or relative
            without a working directory; or its URL has an unknown protocol, or needs a library that is missing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        cache_staged_state_dict: bool = True,
        staging: Staging = "buffer",
        overlap_staging: bool = False,
        overwrite: bool = True,
        sync_files: bool = True,
        thread_count: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        sha256: bool = False,
        reuse_unchanged: bool = False,
        encryption: EncryptionParams | None = None,
        on_report: Callable[[SaveReport], object] | None = None,
        on_progress: Callable[[int, int], object] | None = None,
        limits: SaveLimits = SaveLimits(),  # noqa: B008 - it is frozen
        local: str | os.PathLike[str] | None = None,
        max_unflushed: int = MAX_UNFLUSHED,
    ) -> None:
        options = SaveOptions(
            cache_staged_state_dict=cache_staged_state_dict,
            staging=staging,
            overlap_staging=overlap_staging,
            overwrite=overwrite,
            sync_files=sync_files,
            thread_count=thread_count,  # type: ignore[arg-type]  # None: the default
            storage_options=storage_options,  # type: ignore[arg-type]
            sha256=sha256,
            reuse_unchanged=reuse_unchanged,
            cipher=None if encryption is None else encryption_cipher(encryption),
            limits=limits,
            max_unflushed=max_unflushed,
        )
        self._path = None if path is None else path_to_write(path, options.storage_options)
        if local is None and options.max_unflushed != MAX_UNFLUSHED:
            raise ValueError("max_unflushed requires local=, the folder whose checkpoints it counts. Pass both")
        if local is not None:
            target = target_of(path, local, options.storage_options, options.limits.timeout)
            options = replace(options, target=target)
        self._begin(options, Reports(on_report, on_progress))

    def __repr__(self) -> str:
        """Returns the path and the options, without secrets."""
        return shown(self, self._path, self._options.storage_options, self._options.arguments())

    # --- lifetime -----------------------------------------------------------------------------------------------

    def prewarm(self, state_dict: Mapping[str, Any]) -> None:
        """Starts the writer process, and allocates a staging buffer for state dicts of the size of ``state_dict``.

        Returns immediately: memory is allocated in the background, and the first save waits for the allocation if
        necessary. ``Stateful`` values are replaced by their ``state_dict()``, as in a save. Call `prewarm` after the
        first optimizer step: before that step, ``get_optimizer_state_dict`` makes the optimizer's state by running an
        extra step, which Adam counts.

        Raises:
            StagingError: there is not enough memory; or a value cannot be saved, and the message names its key.
        """
        self._saver.prewarm({k: v.state_dict() if isinstance(v, Stateful) else v for k, v in state_dict.items()})

    def close(self, timeout: float | None = None) -> None:
        """Waits for this writer's saves and, with ``local``, for the flush of the local folder. Idempotent.

        Then ends the writer process and frees the memory, unless another open writer has used them, or a save that
        another writer has staged still runs. Call `close` before ``destroy_process_group()``, which would make a
        running save fail. A signal handler may call `close` at any time. If the handler has interrupted the copy of a
        state, that state's save is abandoned immediately.

        Args:
            timeout: Timeout in seconds for the whole call; 0: do not wait. On timeout the save in progress is
                abandoned, its writer process is killed, and the previous checkpoint stays. Checkpoints that are only in
                the local folder then stay there for the next job, and their number is logged. If None, waits as long as
                the saves take, and as long as the flush makes progress.

        Raises:
            TypeError, ValueError: the timeout is not a number of seconds.
        """
        deadline = Deadline(check_timeout(timeout, least=0, optional=True))
        if not self._saver.closed:
            self._saver.close(deadline)

    def wait_remote(self, timeout: float | None = None) -> bool:
        """Waits until the path has everything from the local folder, including saves of dead jobs.

        Returns False on timeout, or if the flush makes no progress for ``limits.timeout`` seconds.

        Args:
            timeout: Timeout in seconds. If None, waits as long as the flush makes progress.

        Raises:
            TypeError, ValueError: the timeout is not a number of seconds.
            ReadError: the local folder cannot be read, or cannot be written to, so it is unknown which checkpoints have
                arrived at the path.
            WriteError: the flush has given up a checkpoint.
        """
        return self._saver.wait_remote(Deadline(check_timeout(timeout, least=0, optional=True)))

    @property
    def last_report(self) -> SaveReport | None:
        """The report of the last save that this rank wrote; None before the first save.

        With ``AsyncCheckpointerType.PROCESS``, another process has the reports.
        """
        return self._saver.reports.last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def saver(self) -> Saver:
        """The state that the saves of this writer share, for `CheckpointManager`."""
        return self._saver

    # --- AsyncStager: on the training thread --------------------------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | StagingFuture:
        """Copies the state dict into the staging buffer, once the previous saves are over.

        Returns:
            The staged state dict; with ``overlap_staging``, a future that is done when the state may be changed.
        """
        staged = self._saver.stage(state_dict, SaveDescription(), path_of_save() or self._path)
        return StagingFuture(staged) if self._options.overlap_staging else staged

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Returns whether DCP calls `synchronize_staging` once the save has begun."""
        return self._saver.stager.way.holds_training or self._saver.refusal is not None

    def synchronize_staging(self) -> None:
        """Waits until training may change the state that was staged.

        Raises:
            WriteError: on the coordinator, when ``limits.max_consecutive_failures`` saves in a row were not committed.
        """
        self._saver.raise_refusal()
        self._saver.stager.wait_released()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Makes the code inside the context wait for running copies.

        With ``overlap_staging``, enter the context around ``optimizer.step()``::

            with writer.lock():
                optimizer.step()

        This is not a real lock: several threads may be inside at once, and leaving does nothing. Entering waits for all
        copies, except those that this process makes from a GPU: work that is queued inside the context on the current
        stream waits for these. If tensors in shared memory are written without a copy (``staging="shared"``), entering
        waits until the state may be changed.

        Raises:
            StagingError: with ``overlap_staging``, if a CUDA graph is being captured: its replays would not wait.
            WriteError: on the coordinator, when ``limits.max_consecutive_failures`` saves in a row were not committed.
        """
        self._saver.raise_refusal()
        self._saver.stager.hold_training()
        yield

    def hold_optimizer(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Makes each step of an optimizer wait for running copies, as `lock` does, without a change to the loop.

        Applies only to ``optimizer.step()``. Other code that changes the state needs `lock`: a forward pass with
        BatchNorm, moving averages of the weights, optimizers that step in the backward pass, the scales of FP8. With
        ``overlap_staging``, a step that a CUDA graph captures raises `StagingError`: enter `lock` around the graph's
        replays.

        Args:
            optimizer: The optimizer. Once the writer has been freed, the optimizer's steps no longer wait.

        Returns:
            A handle, whose ``remove()`` removes the hook.
        """
        writer = weakref.ref(self)

        def hold(*_: object) -> None:
            if (held := writer()) is not None:
                held._saver.raise_refusal()
                held._saver.stager.hold_training()

        return optimizer.register_step_pre_hook(hold)

    # --- StorageWriter: on the save's thread --------------------------------------------------------------------

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """The path for the save that the calling thread begins: that of `reset`, otherwise the writer's path."""
        return getattr(self._local, "path", None) or self._path

    @property
    def save_id(self) -> str:
        """The id of this writer's last save that began in this process; before the first save, the first save's id."""
        return self._saver.save_id

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Sets the path of the calling thread's save. DCP calls this method before a save with a ``checkpoint_id``.

        If a ``state_dict()`` or a planner's ``set_up_planner`` fails before the save begins, the path applies to the
        thread's next save without a ``checkpoint_id``. A relative path is relative to the working directory at the time
        of staging; without staging, at the time of the save.
        """
        if checkpoint_id is not None:
            check_path(checkpoint_id)
        self._local.path = checkpoint_id

    def storage_meta(self) -> StorageMeta:
        """Returns the path and the id of the calling thread's save.

        In every save, DCP calls this hook first, inside a step whose errors it sends to all ranks. The hook begins the
        save of a staged state. Other saves begin in `set_up_storage_writer`, so that a call to `storage_meta` alone
        begins no save.

        Raises:
            StagingError: this rank could not stage its state dict.
            WriteError: the save of the staged state cannot begin: for example, it has no path, or the writer is closed.
        """
        self._saver.before_save()
        staged_save = self._saver.engine.saves.begin(self._saver.stager)
        if staged_save is not None:
            try:
                self._local.begun = self.checkpoint_id, self._saver.begin(self.checkpoint_id, staged_save)
            except BaseException:
                self._local.path = None  # the path was for the failed save
                raise
        if (begun := self._begun()) is not None:
            return StorageMeta(checkpoint_id=begun.path, save_id=begun.id)
        path, context = self.checkpoint_id, self._context_of_trainer
        if path is not None:
            with suppress(WriteError):  # the save reports the error
                path = redact(str(absolute_path(path, None if context is None else context.directory)))
        return StorageMeta(checkpoint_id=path, save_id=self._saver.next_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Sets this rank's role in the save. DCP calls this method after `storage_meta`.

        If `storage_meta` has not begun the save, for example because no state was staged, this method begins it.

        Raises:
            StagingError: this rank could not stage its state dict.
            WriteError: the save cannot begin: for example, it has no path, or the writer is closed.
        """
        try:
            save = self._begun()
            if save is None:
                if self._context_of_trainer is not None:
                    self._context_of_trainer.apply(_OF_GROUP)
                save = self._saver.begin(self.checkpoint_id, None, self._context_of_trainer, self._error_of_trainer)
        finally:
            self._local.begun = self._local.path = None
        save.set_up(
            rank=kwargs.get("rank") or 0,
            is_coordinator=is_coordinator,
            use_collectives=kwargs.get("use_collectives", True),
        )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Creates the checkpoint's directory. The rank that commits also locks it, and removes files of dead saves.

        With ``local``, `write_data` creates the directory in the local folder instead.

        Raises:
            WriteError: the directory cannot be created, or holds a checkpoint that must not be overwritten.
        """
        age_objects()
        prepared = self._saver.save.prepare(plan)
        if world_size_of_job() == 1:
            return prepared
        return plan_with(prepared, wholes_of(plan, prepared.storage_data))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: checks that the ranks' tensors match, and adds a message to each plan.

        The message has the digests of the tables of locations that the rank need not send (see ``_saving.tables``).

        Raises:
            WriteError: under one key, ranks have tensors of different shapes or dtypes, and the save would store the
                tensor of only one rank.
        """
        age_objects()
        save = self._saver.save
        with save.or_fail():
            messages = checked_messages([plan.storage_data for plan in plans])
        return save.answer([plan_with(plan, message) for plan, message in zip(plans, messages, strict=True)])

    @real_tensors()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items and makes them durable.

        Raises:
            WriteError: the items cannot be written. The message names path, rank and, where known, key. This rank's
                files are removed.
        """
        future: Future[list[WriteResult]] = Future()
        with self._saver.around_write():
            future.set_result(self._saver.save.write(plan, planner))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the save on the coordinator. Without collectives, every rank commits its own part.

        Raises:
            WriteError: the save is not committed, and the previous checkpoint is untouched; or the outcome is unknown,
                as after a lost response from the storage.
        """
        self._saver.save.finish(metadata, results)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether ``checkpoint_id`` is a local path, or a URL of a known protocol. Does not open it."""
        return is_location(checkpoint_id)

    def _begun(self) -> Save | None:
        """Returns the save that `storage_meta` has begun on the calling thread, until `set_up_storage_writer`.

        Returns None if there is none, or if it is left over from a save whose planner has failed between the two hooks:
        DCP has then dropped the staged state, or set another path.
        """
        path, save = getattr(self._local, "begun", None) or (None, None)
        return None if save is None or save.is_dropped or path != self.checkpoint_id else save

    # --- copies of the writer: DCP sends one with every save in PROCESS mode, and a forked child has one ------------

    def _begin(self, options: SaveOptions, reports: Reports) -> None:
        if options.staging == "device" and (setting := expandable_segments()) is not None:
            raise ValueError(
                f"staging='device' and expandable segments ({setting}) cannot be combined: another process that opens "
                f"such memory may crash. Use staging='buffer', or disable expandable segments."
            )
        self._options = options
        self._error_of_trainer: StagingError | None = None
        self._context_of_trainer: ProcessContext | None = None
        self._begin_here(self._new_saver(reports, closed=False))

    def _begin_here(self, saver: Saver) -> None:
        self._saver = saver
        # Per thread, because saves without staging may run at the same time.
        self._local = threading.local()
        in_child(self, TensorizerStorageWriter._renew)

    def _new_saver(self, reports: Reports, *, closed: bool) -> Saver:
        return Saver(self._options, reports, closed=closed)

    def _renew(self) -> None:
        """Makes a new saver in a forked child: the writer process, buffers and saves belong to the parent."""
        before = self._saver.reports
        self._saver = self._new_saver(Reports(before.on_report, before.on_progress), closed=self._saver.closed)
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        staged_save = self._saver.engine.saves.begin(self._saver.stager)
        state = {name: value for name, value in self.__dict__.items() if name not in _PER_PROCESS}
        state["_closed"] = self._saver.closed
        if staged_save is not None:
            state |= {"_error_of_trainer": staged_save.error, "_context_of_trainer": staged_save.context}
            reports = self._saver.reports
            if reports.on_report is not None or reports.on_progress is not None:
                warn_of_other_process()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copy, which writes, and may stage, in the process that unpickles it."""
        closed = state.pop("_closed")
        self.__dict__.update(state)
        self._begin_here(self._new_saver(Reports(), closed=closed))


class DescribedStager(AsyncStager):
    """A stager for the one save that ``save`` describes. It stages with its writer."""

    def __init__(self, writer: TensorizerStorageWriter, save: SaveDescription = SaveDescription()) -> None:  # noqa: B008 - a tuple
        self._writer, self._save = writer, save

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | StagingFuture:
        writer = self._writer
        staged = writer.saver.stage(state_dict, self._save, path_of_save() or writer._path)
        return StagingFuture(staged) if writer._options.overlap_staging else staged

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._writer.should_synchronize_after_execute

    def synchronize_staging(self) -> None:
        self._writer.synchronize_staging()

    def close(self) -> None:
        """Does nothing: the owner of the writer closes the writer."""
