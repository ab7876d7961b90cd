"""Saving: `TensorizerStorageWriter`, the storage writer and stager for ``torch.distributed.checkpoint``.

state dict --stage()--> SharedBuffer                              training thread     [all that training waits for]
           --DCP planner--> SavePlan --write_data()-->     the save's thread
           WriteRequest (offsets only) --> writer process  hashes and writes
           --WriteResults--> finish() --> .metadata        coordinator         [the commit]
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import logging
import multiprocessing
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ._format.encoder import BUFFER_BYTES
from ._format.encryption import encryption_cipher, find_other_key
from ._format.layout import StoredItem, metadata_file_name
from ._memory.garbage import age_objects
from ._saving.commit import begin, commit, remove, replaced_files
from ._saving.failure_counter import FailureCounter
from ._saving.report import SaveReport
from ._saving.write_items import ObjectCheck, resolve, write_results
from ._saving.writer_client import Options, WriterClient
from ._staging.stager import StagedSave, Stager, StagingFuture
from ._storage.base import TIMEOUT, DirectoryLock, Storage
from ._storage.open import open_storage
from ._storage.redact import redact
from ._threads import cores, in_background
from ._writer_process.process import WriterProcess
from .errors import CheckpointError, StagingError, WriteError, WriterProcessDied

if TYPE_CHECKING:
    from ._format.encryption import EncryptionParams

__all__ = ["TensorizerStorageWriter"]

logger = logging.getLogger("dcp_tensorizer")


@dataclasses.dataclass(slots=True)
class _Save:
    """One save, as one rank sees it, from DCP's first hook to its last; all of them run on the save's thread."""

    storage: Storage
    staged_save: StagedSave | None
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    rank: int = 0
    is_coordinator: bool = True
    use_collectives: bool = True
    began: float = dataclasses.field(default_factory=time.perf_counter)
    lock: DirectoryLock | None = None
    report: SaveReport | None = None
    replaced: concurrent.futures.Future[set[str]] | None = None

    @property
    def commits(self) -> bool:
        return self.is_coordinator or not self.use_collectives

    @property
    def metadata_rank(self) -> int | None:
        return None if self.use_collectives else self.rank

    def end(self) -> None:
        """Lets others clean up where it was saved. Idempotent."""
        if self.lock is not None:
            self.lock.release()


class TensorizerStorageWriter(StorageWriter, AsyncStager):
    """Writes checkpoints as tensorizer files, without training noticing.

    Pass it as ``storage_writer`` to ``dcp.async_save`` (or ``dcp.save``), the same one for every save of a job, and
    close it before ``destroy_process_group()``::

        with TensorizerStorageWriter("checkpoints/latest") as writer:
            for step in ...:
                future = dcp.async_save(state_dict, storage_writer=writer, process_group=gloo_group)

    ``async_save`` copies the rank's state into a buffer of shared memory and returns; a process that belongs to this
    writer, started here, hashes and writes the buffer. The checkpoint appears, whole, when every rank's data is
    durable. Saves run one at a time: a save that is requested while another is under way waits for it.

    Memory: one buffer of the size of the rank's state (allocated by `prewarm` in the background, or else in the first
    save, which then takes longer; again when the state outgrows it), kept between saves; and in the writer process up
    to ``buffer_bytes`` for the parts of a file that are being made (64 MB for local files), over some 40 MB for its
    imports (200 MB with ``staging="device"``). ``dcp.save`` needs no staging buffer: it writes from the tensors
    themselves.

    Args:
        path: Where to save: a local directory that all ranks share, or any URL that fsspec opens. A save's
            ``checkpoint_id`` overrides it for that save.
        cache_staged_state_dict: Keep the staging buffer between saves.
        staging: ``"buffer"``: everything is copied to the staging buffer. ``"shared"``: but for CPU tensors that are in
            shared memory already, which are written from where they are, and may be changed when they are written;
            not together with encryption. ``"device"``: CUDA tensors are copied to it by the writer process, which
            then has a CUDA context of its own. Unless staging overlaps, ``async_save`` returns when the state may be
            changed.
        overlap_staging: Have ``async_save`` return before the state is copied, with an ``AsyncSaveResponse``: the state
            may be changed when its ``staging_completion`` is done, see `lock`.
        overwrite: Replace a checkpoint at the path; if False, that is an error.
        sync_files: Return only when data is on permanent storage (fsync). Without it a checkpoint can be lost or
            damaged when the machine fails, not when the job does.
        thread_count: Threads that copy while training waits, and that hash in the writer process; None for as many as
            there are cores, up to four.
        storage_options: Passed to the fsspec filesystem. They reach the writer process through a socket: they are
            written nowhere.
        max_consecutive_failures: From that many failed saves in a row on, ``stage()`` raises on the coordinator, so
            that a job that looks at no future does not train on without checkpoints. None for never.
        timeout: Seconds after which a wait for the storage is given up: a write that makes no progress, or another
            save's clean-up of the same directory. Requests to S3 and SFTP servers that stay silent for a tenth of
            that are tried again.
        buffer_bytes: Memory, in the writer process, for the parts of a file that are being made or sent. Less of it
            means fewer parts in flight.
        on_report: Called with the `SaveReport` of each save that this rank has written, and on the coordinator
            committed, on the save's thread; the report is logged (logger ``dcp_tensorizer``) in any case.
        encryption: `tensorizer.EncryptionParams`, the same on every rank: a key that all tensors and objects are
            encrypted with. Names, shapes and dtypes stay readable. The key reaches the writer process through a
            socket: it is written nowhere.

    Raises:
        WriteError: there is a key, and no libsodium.
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        cache_staged_state_dict: bool = True,
        staging: str = "buffer",
        overlap_staging: bool = False,
        overwrite: bool = True,
        sync_files: bool = True,
        thread_count: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        max_consecutive_failures: int | None = 3,
        timeout: float = TIMEOUT,
        buffer_bytes: int = BUFFER_BYTES,
        on_report: Callable[[SaveReport], object] | None = None,
        encryption: EncryptionParams | None = None,
    ) -> None:
        super().__init__()
        if staging not in _STAGING:
            raise ValueError(f"staging={staging!r} is none of {', '.join(map(repr, _STAGING))}")
        if encryption is not None and staging == "shared":
            raise ValueError(
                "staging='shared' and encryption exclude each other: what is encrypted can be read twice, and if it "
                "changed in between, its key would be spent on two texts"
            )
        self._path = path
        self._cache = cache_staged_state_dict
        self._overlap = overlap_staging
        self._staging = staging
        self._synchronize_after_execute = staging != "buffer"
        self._overwrite = overwrite
        self._max_failures = max_consecutive_failures
        self._on_report = on_report
        self._options = Options(
            storage_options=dict(storage_options or {}),
            sync=sync_files,
            threads=thread_count or min(4, cores()),
            buffer_bytes=buffer_bytes,
            timeout=timeout,
            cipher=None if encryption is None else encryption_cipher(encryption),
        )
        self._closed = False
        self._error_of_trainer: StagingError | None = None
        self._set_up()
        self._handover.living_process()  # its imports overlap with whatever the trainer does next

    def _set_up(self) -> None:
        self._handover = WriterClient(self._options, devices=self._staging == "device")
        self._stager = Stager(
            cache=self._cache,
            threads=self._options.threads,
            in_place=self._staging == "shared",
            copy_from_devices=self._handover.snapshot if self._staging == "device" else None,
            overlap=self._overlap,
        )
        self._outcomes = FailureCounter(self._max_failures)
        self._local = threading.local()
        self._last_report: SaveReport | None = None
        self._objects = ObjectCheck()
        self._connection: object = None

    @property
    def _process(self) -> WriterProcess | None:
        return self._handover.process

    # --- lifetime -----------------------------------------------------------------------------------------------

    def prewarm(self, state_dict: Mapping[str, Any]) -> None:
        """Allocates the staging buffer for state dicts of this size, ahead of the first save.

        It returns at once: memory is made ready in the background (a second for some GiB), and the first save waits
        for it if need be.

        ``Stateful`` values are asked for their state, as a save does. To be called when there is one: before the
        first optimizer step, ``get_optimizer_state_dict`` makes the optimizer's state by a step of its own, which
        Adam counts.

        Raises:
            StagingError: memory is short, or the state dict holds what cannot be saved; names the key.
        """
        self._stager.prewarm({k: v.state_dict() if isinstance(v, Stateful) else v for k, v in state_dict.items()})

    def close(self, timeout: float | None = None) -> None:
        """Waits for the save under way, then ends the writer process and gives the memory back. Idempotent.

        To be called before ``destroy_process_group()``, which would fail that save.

        Args:
            timeout: Seconds to wait for the save; then it is abandoned, and the checkpoint before it stays.
        """
        if self._closed:
            return
        if not self._stager.drain(timeout):
            logger.error("the save under way was not over after %s s and is abandoned", timeout)
        self._closed = True
        self._handover.close()
        self._outcomes.settle()
        self._end_save()
        self._handover.free()
        self._stager.close()
        self._connection = None

    @property
    def last_report(self) -> SaveReport | None:
        """What the last save that this rank wrote cost; None before the first."""
        return self._last_report

    def __enter__(self) -> TensorizerStorageWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """What a copy in another process needs: in PROCESS mode DCP sends one with every save."""
        staged_save = self._stager.begin_save()
        state = {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}
        return state | {"_error_of_trainer": None if staged_save is None else staged_save.error}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy writes in its own process, unless it comes to stage something: then it is a trainer's writer."""
        self.__dict__.update(state, _on_report=None)
        self._set_up()

    # --- AsyncStager: on the training thread --------------------------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | StagingFuture:
        """Copies the state dict into the staging buffer, once the saves before are over.

        Returns:
            The staged state dict; with ``overlap_staging`` a future that is done when the state may be changed.

        Raises:
            WriteError: on the coordinator, when ``max_consecutive_failures`` saves in a row were not committed.
        """
        self._stager.wait_turn()
        self._outcomes.settle()
        self._outcomes.check()
        if self._closed:
            staged = self._stager.refuse(StagingError(_CLOSED))
        else:
            with suppress(WriterProcessDied):  # it cannot be started now, of which the save will say more
                self._handover.living_process()
            started = time.perf_counter()
            staged = self._stager.stage(state_dict)
            staged.staged_save.stage_seconds = time.perf_counter() - started
            if staged.staged_save.error is not None:
                logger.error("staging failed, and so will the save: %s", str(staged.staged_save.error))
        return StagingFuture(staged) if self._overlap else staged

    def synchronize_staging(self) -> None:
        """Returns when training may change everything that was staged."""
        self._stager.wait_released()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Inside, training may change the state: to be held around ``optimizer.step()``, with ``overlap_staging``::

            with writer.lock():
                optimizer.step()

        Where all that is left to do is copies from a GPU, entering it does not wait for them: what is queued inside,
        on the current stream, does.
        """
        self._stager.hold_training()
        yield

    # --- StorageWriter: on the save's thread --------------------------------------------------------------------

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """Where the save of the calling thread goes, or else the next one that is given no ``checkpoint_id``."""
        return getattr(self._local, "path", None) or self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Called by DCP before a save that is given a ``checkpoint_id``: it holds for the calling thread's save."""
        self._local.path = checkpoint_id

    def storage_meta(self) -> StorageMeta:
        """DCP's first hook in every save, inside the step in which it hands errors round: the save begins here.

        Raises:
            StagingError: this rank could not stage its state dict.
            WriteError: there is no path, or the writer is closed.
        """
        staged_save = self._stager.begin_save()
        if staged_save is None:
            self._stager.wait_turn()  # a synchronous save, or one that was staged by another stager
        self._end_save()
        path, self._local.path = self.checkpoint_id, None
        self._outcomes.begin(redact(str(path)))
        try:
            if error := self._error_of_trainer or (staged_save and staged_save.error):
                raise StagingError(str(error))  # one of its own: a traceback keeps frames alive, and they the tensors
            if self._closed:
                raise WriteError(_CLOSED)
            if staged_save is not None and staged_save.distributed and not torch.distributed.is_initialized():
                raise WriteError(
                    f"the process group was destroyed before the save to {redact(str(path))} had begun: each rank "
                    f"would save alone, over the others. Close the writer before destroy_process_group()."
                )
            if path is None:
                raise WriteError("nowhere to save: give the writer a path, or the save a checkpoint_id")
            storage = open_storage(path, self._options.storage_options, self._options.timeout)
        except CheckpointError as error:
            self._outcomes.failed(error)
            raise
        self._connection = storage.connection
        self._local.save = _Save(storage, staged_save)
        return StorageMeta(checkpoint_id=storage.path, save_id=self._local.save.id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by DCP with this rank's part in the save."""
        save = self._save
        save.is_coordinator = is_coordinator
        save.rank = kwargs.get("rank") or 0
        save.use_collectives = kwargs.get("use_collectives", True)
        self._outcomes.set_coordinator(is_coordinator)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Creates the directory; the coordinator claims it, and removes what dead saves left there.

        Raises:
            WriteError: it cannot be created, or holds a checkpoint that must not be overwritten.
        """
        age_objects()
        save = self._save
        try:
            save.storage.make_directory()
            if save.commits and not self._overwrite:
                name = metadata_file_name(save.metadata_rank)
                if save.storage.head(name) is not None:
                    raise WriteError(f"{save.storage.path} holds a checkpoint already, and overwrite=False")
            if not save.use_collectives:  # each rank is its own coordinator, and none knows what the others leave
                save.lock = save.storage.lock_directory()
                save.lock.share(self._options.timeout)
            elif save.is_coordinator:
                save.lock = begin(save.storage, self._options.timeout)
            if not save.use_collectives and save.storage.head(metadata_file_name()) is not None:
                raise WriteError(
                    f"{save.storage.path} holds a checkpoint of all ranks, which every load would take for the one "
                    f"that is saved here without collectives: remove that, or save to another path"
                )
        except CheckpointError as error:
            self._fail(save, error)
            raise
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Nothing of one save goes into plans: the planner may keep them for the next one."""
        age_objects()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items and makes them durable.

        Raises:
            WriteError: naming path, rank and, where known, key; nothing of this rank's is left behind.
        """
        save = self._save
        planned = time.perf_counter()
        try:
            if save.staged_save is not None:
                save.staged_save.wait_copied()
            items = resolve(plan, planner)
            if save.commits:
                save.replaced = in_background(functools.partial(replaced_files, save.storage, save.metadata_rank))
            written = self._handover.write(save.storage, save.rank, save.id, items, save.staged_save)
        except CheckpointError as error:
            self._fail(save, error)
            raise type(error)(f"rank {save.rank}: {error}") from error
        finally:
            if save.staged_save is not None:
                save.staged_save.release()
                self._stager.written(save.staged_save)
            if not self._cache:
                self._handover.free()
        done = written.done
        self._objects.check(items)
        future: Future[list[WriteResult]] = Future()
        check = b"" if self._options.cipher is None else self._options.cipher.check_value()
        future.set_result(write_results(items, written.files, done, check))
        save.report = SaveReport(
            path=save.storage.path,
            save_id=save.id,
            rank=save.rank,
            nbytes=sum(item.tensor.nbytes for item in items),
            files=len(written.files),
            attempts=written.attempts,
            stage_seconds=save.staged_save.stage_seconds if save.staged_save is not None else 0.0,
            plan_seconds=planned - save.began,
            resolve_seconds=max(0.0, time.perf_counter() - planned - done.seconds),
            hash_seconds=done.hash_seconds,
            write_seconds=done.write_seconds,
            commit_seconds=None,
            durable_at=time.time(),
        )
        if not save.commits:
            self._publish(save.report)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the save, on the coordinator (without collectives: every rank its own part).

        Raises:
            WriteError: it is not committed, and what was committed before is untouched.
        """
        save = self._save
        started = time.perf_counter()
        meta = StorageMeta(checkpoint_id=save.storage.path, save_id=save.id)
        places = ((r.index, StoredItem(*r.storage_data[0]), r.storage_data[1]) for part in results for r in part)
        try:
            _check_trainer_lives(save.storage)
            encryption = self._agreed_encryption(results)
            commit(
                save.storage,
                dataclasses.replace(metadata, storage_meta=meta),
                places,
                rank=save.metadata_rank,
                sync=self._options.sync,
                overwrite=self._overwrite,
                encryption=encryption,
            )
        except CheckpointError as error:
            self._fail(save, error)
            raise
        self._outcomes.committed()
        assert save.report is not None and save.replaced is not None, "write_data comes first"
        seconds = time.perf_counter() - started
        self._publish(dataclasses.replace(save.report, commit_seconds=seconds, durable_at=time.time()))
        # It takes a quarter of a second for 2 GB, and not on another thread: whoever waited may copy the directory.
        remove(save.storage, save.replaced.result())
        save.end()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any local path and any URL will do."""
        return isinstance(checkpoint_id, str | os.PathLike)

    # --- writing ------------------------------------------------------------------------------------------------

    @property
    def _save(self) -> _Save:
        return self._local.save  # type: ignore[no-any-return]

    def _agreed_encryption(self, results: list[list[WriteResult]]) -> dict[str, Any] | None:
        """What ``.metadata`` says of the key, which must be every rank's: else nobody could load the checkpoint."""
        checks = ((rank, part[0].storage_data[2]) for rank, part in enumerate(results) if part)
        other = find_other_key(self._options.cipher, checks)
        if other is not None:
            for name in {StoredItem(*r.storage_data[0]).file for part in results for r in part} - {""}:
                with suppress(Exception):
                    self._save.storage.remove(name)
            raise WriteError(
                f"rank {other} has another encryption key than the coordinator, or only one of them has any: give "
                f"every rank's writer the same EncryptionParams, made on one rank and sent to the others, or made of "
                f"one passphrase and one salt: EncryptionParams.from_string(passphrase, salt=...)"
            )
        return None if self._options.cipher is None else self._options.cipher.record()

    def _fail(self, save: _Save, error: CheckpointError) -> None:
        self._outcomes.failed(error)
        save.end()

    def _end_save(self) -> None:
        """This thread's save before is over: if another rank failed, no hook has said so."""
        save: _Save | None = getattr(self._local, "save", None)
        if save is not None:
            save.end()

    def _publish(self, report: SaveReport) -> None:
        self._last_report = report
        logger.info("%s", report)
        if self._on_report is not None:
            try:
                self._on_report(report)
            except Exception:
                logger.exception("on_report failed; the save did not")


_STAGING = ("buffer", "device", "shared")
_CLOSED = "the writer is closed: make a new one, or close it after the last save"
# Tied to this process, or to one of its threads.
_NOT_COPIED = {"_stager", "_handover", "_outcomes", "_local", "_last_report", "_on_report", "_connection"}


def _check_trainer_lives(storage: Storage) -> None:
    """In PROCESS mode: a save whose trainer has died must not be committed late."""
    trainer = multiprocessing.parent_process()
    if trainer is not None and multiprocessing.current_process().daemon and not trainer.is_alive():
        raise WriteError(f"the trainer (pid {trainer.pid}) is gone: its save to {storage.path} is not committed")
