"""One rank's part in a save: the work of DCP's hooks, and the directory that becomes a checkpoint."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from .._index.schema import SaveRecord
from .._index.write import encode
from .._runtime.interpreter import ShortSwitchInterval
from .._runtime.spans import Span
from .._runtime.threads import Hung, in_background, in_time
from .._runtime.torch_compat import DCP_VERSION
from .._staging.staged_save import StagedSave, StagedStateDict
from .._storage.base import DirectoryLock, Refused, Storage
from .._storage.open import open_storage
from .._tensor_file.names import metadata_file_name
from .._writer_process.client import WriterProcessHung
from .._writer_process.protocol import WriteDone
from ..errors import CheckpointError, ReadError, StagingError, WriteError, WriterProcessDied, describe
from .commit import (
    WrittenFiles,
    agree_on_key,
    begin,
    commit,
    drop_record,
    failed_before_commit,
    put_records,
    remove_with_records,
    replaced_files,
)
from .report import SaveReport, report_of, warn_if_stale
from .reuse import FilesOfSave
from .tables import SaveTables
from .write_plan import Item, in_files, resolve, warn_about_untrusted, write_results

if TYPE_CHECKING:
    from .saver import Saver

_T = TypeVar("_T")

_CLEAN_UP_SECONDS = 20.0  # timeout of a clean-up, for which the other ranks wait after a commit

logger = logging.getLogger("dcp_tensorizer")


class SaveDescription(NamedTuple):
    record: SaveRecord | None = None
    error: StagingError | None = None  # if this rank has no state: the error with which the save fails on all ranks
    omitted: frozenset[str] = frozenset()  # keys of tensors that other ranks write and this rank does not stage
    # Called with the staged copy, whose tensors may not have their values yet. No save reuses the copy's buffer until
    # the function's owner clears `SharedBuffer.is_kept`.
    on_staged: Callable[[StagedStateDict], object] | None = None
    # Receives the names of the files that this rank writes. If the save fails, the manager removes these files.
    files: WrittenFiles | None = None
    spans: tuple[Span, ...] = ()  # of staging, set when the stager has returned


class Save:
    """One rank's part in a save, from DCP's first hook to its last. All calls come from the save's thread.

    Training waits for that thread before it stages again. So if the storage has no timeouts, a call that hangs in the
    kernel is abandoned after the writer's timeout.

    Args:
        saver: The state that the saves of one writer share.
        save_id: The id of the save.
        where: The checkpoint's path. If it cannot be opened, the constructor raises `WriteError`.
        staged: The staged state; None if the save writes from the tensors themselves.

    Attributes:
        storage: The directory that this rank writes to.
        path: The checkpoint's path for messages and reports, without credentials.
        commits: This rank commits, for all ranks, or only for itself.
        metadata_rank: The rank in the metadata file's name; None if one metadata file is for all ranks.
        is_given_up: The storage did not respond within the timeout.
    """

    meta = StorageMeta
    """The class of the storage's metadata that DCP sends to all ranks after the commit."""
    shares_id = False
    """True if the file names of all ranks contain the coordinator's id of the save."""

    def __init__(self, saver: Saver, save_id: str, where: str | Path, staged: StagedSave | None) -> None:
        self.id = save_id
        self._saver = saver
        self.storage = self._storage_of(where)
        self.path = self.storage.path
        self.rank, self.commits = 0, True
        self.metadata_rank: int | None = None
        self.is_given_up = False
        self._staged = staged
        self._description: SaveDescription = (None if staged is None else staged.description) or SaveDescription()
        self._spans, self._lapped = [*self._description.spans], time.perf_counter()
        self._written: WriteDone | None = None
        self._has_own_thread = staged is not None and staged.is_on_own_thread
        self._interval = ShortSwitchInterval() if self._has_own_thread else None
        self._tables = SaveTables(saver.engine.tables, save_id)
        self._lock: DirectoryLock | None = None
        self._replaced: concurrent.futures.Future[set[str]] | None = None
        if staged is not None:
            self.storage.umask = staged.context.umask

    def _storage_of(self, where: str | Path) -> Storage:
        options = self._saver.options
        return open_storage(where, options.storage_options, options.limits.timeout)

    @property
    def is_dropped(self) -> bool:
        """Returns whether DCP has dropped the staged state, so that no save can write it."""
        return self._staged is not None and self._staged.over()

    # --- DCP's hooks ------------------------------------------------------------------------------------------------

    def set_up(self, *, rank: int, is_coordinator: bool, use_collectives: bool) -> None:
        self.rank = rank
        self.commits = is_coordinator or not use_collectives
        self.metadata_rank = None if use_collectives else rank
        self._saver.engine.failures.set_coordinator(is_coordinator)

    def prepare(self, plan: SavePlan) -> SavePlan:
        """Creates the directory. The rank that commits locks it, and removes the files of dead saves.

        Returns the plan. On a rank that does not commit, the plan has the digests of the tables of locations that the
        rank could leave out of its results (see `tables`). Raises `WriteError` if the directory cannot be created, or
        holds a checkpoint that must not be overwritten.
        """
        with self.or_fail():
            self.open()
            return plan if self.commits else self._tables.offer(plan)

    def answer(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: adds to each plan the digests of the tables of locations that the rank need not send."""
        with self.or_fail():
            return [self._tables.answer(plan) for plan in plans]

    def write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Writes this rank's items, and makes them durable.

        If that fails, removes this rank's files, and raises `WriteError`, naming path, rank and, where known, key.
        """
        self._lap("plan")
        if self.shares_id:
            self.id = self._tables.save_of(plan) or self.id
        with self.whole_or_nothing():
            buffer = None if self._staged is None else self._staged.buffer
            items = resolve(plan, planner, buffer, self._description.omitted)
            self._record_files(items)
            written = self.write_items(items)
            try:
                self._report_digests(items, written)
                saver, record = self._saver, self._description.record
                compare = None if record is None else functools.partial(saver.freshness.compare, record.step)
                results = write_results(items, written, self.rank, planner, saver.options.cipher, compare)
                if not self.commits:
                    results = [replace(r, storage_data=self._tables.shortened(r.storage_data, plan)) for r in results]
                self.wrote(written)
            except BaseException:
                self.remove([file.name for file in written.files])
                raise
        self._end_write(items, written)
        return results

    @contextmanager
    def whole_or_nothing(self) -> Iterator[None]:
        """Releases the staged state after a write. If the write fails, ends the save, and removes the save's record.

        Adds the rank to the message of a `CheckpointError`, and marks every error with `failed_before_commit`.
        """
        saver = self._saver
        try:
            yield
        except BaseException as error:  # also KeyboardInterrupt: no file of this save may stay
            hung = error if isinstance(error, WriterProcessHung) else None
            if hung is not None:
                self._give_up()
            self._fail(error)
            cleaning = None if hung is None else hung.cleaning

            def drop() -> None:
                if cleaning is not None:  # until the files are removed, the record proves which save they belong to
                    cleaning.exception()
                drop_record(self.storage, self.id)

            self._clean_up(drop)
            failed_before_commit(error)
            if not isinstance(error, CheckpointError):
                raise
            kind = type(error) if hung is None else WriterProcessDied
            failure = kind(f"rank {self.rank}: {error}")
            failed_before_commit(failure)
            raise failure from error
        finally:
            if self._staged is not None:
                self._staged.on_written = None  # the callback refers to the object that holds the state
                self._staged.release()
                if not self._staged.keeps_buffer and self._staged.buffer is not None:
                    self._staged.buffer.close()  # frees the memory when the save is over
            if not saver.options.cache_staged_state_dict:
                saver.engine.client.free()

    def _end_write(self, items: Sequence[Item], written: WriteDone) -> None:
        warn_about_untrusted(items, self._saver.engine.checked_keys)
        self._lap("write", sum(item.tensor.nbytes for item in items))
        self._spans += written.spans
        self._written = written
        if not self.commits:
            self._end_interval()
            self._publish()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the save, on the coordinator; without collectives every rank commits its own part.

        Raises `WriteError` if the save is not committed, or if the outcome is unknown, as after a lost response. If it
        is not committed, the previous checkpoint is untouched.
        """
        assert self._written is not None, "write comes first"
        self._lap("agree")
        # DCP returns this object to the caller. torch's writer sets the same fields.
        metadata.version = DCP_VERSION
        metadata.storage_meta = self.meta(checkpoint_id=self.path, save_id=self.id)
        with self.or_fail():
            replaced = self._complete(metadata, results)
        self._saver.engine.failures.committed()
        self._lap("commit")
        try:
            self._committed()
        finally:
            # Before the user's callback, which may copy the directory, and with it the replaced checkpoint's files.
            if replaced:
                self.remove(replaced)
            self.end()
            self._publish()

    def end(self) -> None:
        """Releases the directory, so that other saves may clean up in it. Idempotent."""
        self._end_interval()
        self._release()

    # --- the parts of the hooks -------------------------------------------------------------------------------------

    def _report_digests(self, items: list[Item], written: WriteDone) -> None:
        """Passes the digests to the object that holds the staged state, so that it need not compute them."""
        save = self._staged
        if save is None or save.on_written is None or save.buffer is None:
            return
        known = dict[tuple[int, int], bytes]()
        if self._saver.options.cipher is None:
            stored = written.items()
            for item in items:
                if item.has_bytes and (offset := save.buffer.locate(item.tensor)) is not None:
                    known[offset, item.tensor.nbytes] = stored[item.name].digests
        save.on_written(known)

    def _complete(self, metadata: Metadata, results: list[list[WriteResult]]) -> set[str]:
        parts = self._tables.completed([result.storage_data for of_rank in results for result in of_rank])
        files = dict(file for part in parts for file in part.files)
        cipher, record = self._saver.options.cipher, self._description.record
        try:
            self._check_wanted()
            agree_on_key(cipher, parts)
            index = encode(
                metadata,
                parts,
                rank=self.metadata_rank,
                cipher=cipher,
                record=record,
                recent=self._saver.engine.sections,
            )
        except Exception as error:  # the save will never be committed
            self.remove(files)
            if isinstance(error, Refused):
                raise
            raise WriteError(f"{self.path} is not committed: {describe(error)}") from error
        replaced = self.commit(index, files)
        if record is not None:
            warn_if_stale(self.path, record.step, [part.unchanged for part in parts])
        return replaced

    def _committed(self) -> None:
        """Runs after the commit, before the replaced files are removed."""

    def _lap(self, name: str, nbytes: int = 0) -> None:
        began, self._lapped = self._lapped, time.perf_counter()
        self._spans.append(Span(name, began, self._lapped, nbytes=nbytes))

    def _publish(self) -> SaveReport:
        assert self._written is not None
        report = report_of(self._spans, self._written, path=self.path, save_id=self.id, rank=self.rank)
        self._saver.reports.publish(report)
        return report

    def _end_interval(self) -> None:
        if self._interval is not None:
            self._interval.end()

    @contextmanager
    def or_fail(self) -> Iterator[None]:
        """If the ``with`` block raises an error, records it as the reason for the failure, and ends the save.

        Raises `WriteError` for a `ReadError`: the save has failed because it could not read its directory.
        """
        try:
            yield
        except BaseException as error:
            self._fail(error)
            if isinstance(error, ReadError):
                raise WriteError(f"cannot save to {self.path}: {error}") from error
            raise

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, Exception):
            self._saver.engine.failures.failed(error)
        self.end()

    # --- the directory ----------------------------------------------------------------------------------------------

    def open(self) -> None:
        def opened() -> None:
            self.storage.make_directory()
            if self.commits:
                self._lock = begin(self.storage, self._saver.options.limits.timeout)
            self._check_free(self.storage)

        self._in_time(opened)

    def _check_free(self, storage: Storage) -> None:
        refuses = self.commits and not self._saver.options.overwrite
        if refuses and storage.head(metadata_file_name(self.metadata_rank)) is not None:
            raise WriteError(
                f"{storage.path}: Checkpoint already exists and overwrite=False. Save to another path, or pass "
                f"overwrite=True."
            )
        if self.metadata_rank is not None and storage.head(metadata_file_name()) is not None:
            raise WriteError(
                f"{storage.path} holds a checkpoint of all ranks, which every load would prefer to a save without "
                f"collectives. Remove that checkpoint, or save to another path."
            )

    def _record_files(self, items: Sequence[Item]) -> None:
        if self.commits:
            ask = functools.partial(replaced_files, self.storage, self.metadata_rank)
            self._replaced = in_background(ask, daemon=True)
        if any(item.has_bytes for item in items):
            self._in_time(lambda: put_records(self.storage, [self.id]))

    def write_items(self, items: Sequence[Item]) -> WriteDone:
        """Writes this rank's items, and makes them durable. On failure, removes the files and raises `WriteError`."""
        saver = self._saver
        files = FilesOfSave(self.storage, self.rank, self.id, saver.options, saver.engine.files)
        with saver.reports.progress(self.path, lambda: sum(item.tensor.nbytes for item in items)) as progress:
            stored = in_files(items, is_encrypted=saver.options.cipher is not None)
            return saver.engine.client.write(files, stored, self._staged, lambda: saver.closed, progress)

    def wrote(self, written: WriteDone) -> None:
        if self._description.files is not None:
            self._description.files.set(self.storage, [file.name for file in written.files])

    def commit(self, index: bytes, files: dict[str, int]) -> set[str]:
        """Commits the save as the checkpoint at its path; returns the replaced checkpoint's files, for removal.

        ``files`` has the sizes of all ranks' files. Raises errors as `commit.commit` does.
        """
        saver = self._saver
        assert self._replaced is not None
        operation = functools.partial(
            commit,
            self.storage,
            index,
            files,
            self._replaced.result,
            save_id=self.id,
            rank=self.metadata_rank,
            sync=saver.options.sync_files,
            overwrite=saver.options.overwrite,
            check=self._check_commit,
            is_owned=saver.owner is not None,
        )
        return self._in_time(operation)

    def _check_wanted(self) -> None:
        """Raises `Refused` if the save must no longer be committed."""
        if self.is_given_up:
            raise Refused(f"the save to {self.path} is not committed: its storage did not respond. Check the storage.")
        if self._saver.closed and self._staged is not None:
            raise Refused(f"the writer was closed during the save to {self.path}, which is not committed")
        trainer = multiprocessing.parent_process()  # in PROCESS mode: a dead trainer's save must not be committed late
        if trainer is not None and multiprocessing.current_process().daemon and not trainer.is_alive():
            raise Refused(f"the trainer (pid {trainer.pid}) has died: its save to {self.path} is not committed")

    def _check_commit(self) -> None:
        self._check_wanted()
        if self._saver.owner is not None:
            self._saver.owner.check()

    def remove(self, names: Iterable[str]) -> None:
        """Removes files that no checkpoint names, and the records of their saves.

        The removal takes 0.25 s for 2 GB. Unless the storage was given up (see `_clean_up`), this method waits for
        the removal, because a caller may copy the directory as soon as the save is over.
        """
        self._clean_up(functools.partial(remove_with_records, self.storage, tuple(names)))

    def _release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is None:
            return
        if not self.is_given_up and self.storage.locks_are_visible:  # a lock of the kernel: no storage delays a release
            lock.release()
        else:
            self._clean_up(lock.release)

    def _give_up(self) -> None:
        self.is_given_up = True
        self.storage.give_up()

    def _in_time(self, operation: Callable[[], _T], most: float = math.inf) -> _T:
        """Runs an operation on the storage.

        On a save's own thread, if the operation hangs, gives up the storage and raises `WriteError`.
        """
        timeout = min(most, self._saver.options.limits.timeout)
        if not (self._has_own_thread and self.storage.may_hang):
            return operation()
        try:
            return in_time(operation, timeout)
        except Hung:
            self._give_up()
            raise WriteError(
                f"{self.storage.path} has not responded for {timeout:g} s: its disk or its server hangs. Writes that "
                f"have begun may still complete. Check the storage."
            ) from None

    def _clean_up(self, operation: Callable[[], object]) -> None:
        """Runs an operation whose result is not needed.

        Does not wait for a storage that was given up. On a save's own thread, gives up a storage that hangs for
        `_CLEAN_UP_SECONDS`.
        """
        if self.is_given_up:
            in_background(operation, name="clean-up", daemon=True)
            return
        try:
            self._in_time(operation, _CLEAN_UP_SECONDS)
        except WriteError as error:
            if not self.is_given_up:
                raise
            logger.warning("%s", str(error))
