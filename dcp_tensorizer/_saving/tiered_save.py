"""A save that is durable in a local folder first, and later flushed to the remote."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from .._runtime.forks import Finalizer
from .._staging.staged_save import StagedSave
from .._storage.base import DirectoryLock, Refused, Storage
from .._storage.local import LocalStorage
from .._storage.redact import redact
from .._tensor_file.names import data_file_rank, metadata_file_name
from .._tiers.flush import Superseded, copy_file, discard, missing_files, publish
from .._tiers.queue import Commit, FlushEntry, FlushRecord, Writing
from .._tiers.target import subpath_of
from .._writer_process.client import WriterProcessHung
from .._writer_process.protocol import WriteDone
from ..errors import CheckpointError, ReadError, WriteError, WriterProcessDied, describe, listed_ranks
from .commit import remove
from .flushing import CommittedMeta
from .report import SaveReport
from .save import Save
from .write_plan import Item

if TYPE_CHECKING:
    from .saver import Saver

logger = logging.getLogger("dcp_tensorizer")

_POLL_SECONDS = 0.5
_MAX_FILE_BYTES = 1 << 30
"""The size limit of files to flush, except for a file of one larger tensor. Other nodes see a file only when all of it
has arrived, and give up after a timeout in which no file arrives."""


class TieredSave(Save):
    """A save to the local folder. If that fails on a rank, this rank saves to the remote."""

    meta = CommittedMeta
    shares_id = True  # so that a later run finds the files of lost nodes on the remote, by the id in their names

    def __init__(self, saver: Saver, save_id: str, where: str | Path, staged: StagedSave | None) -> None:
        assert saver.flushing is not None
        self._flushing = saver.flushing
        super().__init__(saver, save_id, where, staged)
        name = self._flushing.target.name
        self.path = f"{name}/{self._subpath}" if self._subpath else name
        self._writing: Writing | None = None  # set while this rank's files are in the local folder
        self._local_files: dict[str, int] = {}
        self._is_published = False

    def _storage_of(self, where: str | Path) -> Storage:
        target = self._flushing.target
        subpath = subpath_of(target.remote, where)
        if subpath is None:
            raise WriteError(
                f"{redact(str(where))} is not below {target.name}, which {target.local} mirrors. Save below the "
                f"writer's path, or use a writer without local=."
            )
        self._subpath = subpath  # the checkpoint's path in the folder
        storage = LocalStorage(target.folder(subpath))
        storage.max_file_bytes = _MAX_FILE_BYTES
        return storage

    def open(self) -> None:
        """If an existing checkpoint would be an error, checks that there is none. Otherwise does nothing."""
        if self.commits and not (self._saver.options.overwrite and self.metadata_rank is None):
            self._check_free(self._remote())
            name = metadata_file_name(self.metadata_rank)
            for _, record in () if self._saver.options.overwrite else self._flushing.open_records():
                if record.subpath == self._subpath and record.commit is not None and record.commit.name == name:
                    raise WriteError(
                        f"{self.path}: Checkpoint already exists and overwrite=False. It is in {self.storage.path}, "
                        f"and not on the remote yet. Save to another path, or pass overwrite=True."
                    )

    # --- this rank's files ------------------------------------------------------------------------------------------

    def _record_files(self, items: Sequence[Item]) -> None:
        """Does nothing: the queue records the save, and the flush finds the files to replace."""

    def write_items(self, items: Sequence[Item]) -> WriteDone:
        try:
            self._in_time(self._saver.show_alive)
            record = FlushRecord(self._flushing.target.name, self._subpath, self.rank, self.id, self._saver.id)
            # recorded first, so that if this process dies, the next one finds the files
            self._writing = self._in_time(functools.partial(self._flushing.queue.begin, record))
            self._lock = self._in_time(functools.partial(self._locked, self.storage))
            # The finalizer ends the save if another rank fails, because DCP then calls no hook. It does not run at
            # exit, when a daemon thread may still be saving.
            Finalizer(self, _end, self._writing, self._lock).atexit = False
            return self._write_locally(items)
        except WriterProcessHung as error:
            self._give_up()
            reason: Exception = error
        except WriterProcessDied:
            raise
        except (CheckpointError, OSError) as error:
            reason = error
        self._release()
        self._writing, self._local_files, self.is_given_up = None, {}, False
        self._leave_local_folder(reason)
        return super().write_items(items)

    def _write_locally(self, items: Sequence[Item]) -> WriteDone:
        """Writes to the local folder. If that fails, removes local copies of flushed saves, and writes once more."""
        try:
            written = super().write_items(items)
        except WriterProcessDied:
            raise
        except CheckpointError:
            if not self._flushing.queue.free():
                raise
            self.storage.make_directory()
            written = super().write_items(items)
        self._local_files = {file.name: file.nbytes for file in written.files}
        for name, nbytes in self._local_files.items():  # other nodes cannot check them
            found = self.storage.head(name)
            if found != nbytes:
                size = "no file" if found is None else f"{found:,} bytes"
                raise WriteError(f"{self.storage.path}/{name}: found {size} after the write, expected {nbytes:,} bytes")
        return written

    def wrote(self, written: WriteDone) -> None:
        """Hands over this rank's files to the flush. On a rank that commits, `commit` does that."""
        if self._writing is None:
            super().wrote(written)
        elif not self.commits and not self._local_files:
            self._writing.abort()
            self._writing = None
        elif not self.commits:
            try:
                self._writing.written(self._local_files, sync=self._saver.options.sync_files)
            except CheckpointError as error:
                self._copy_to_remote(error)
        if not self.commits:
            self._release()

    def remove(self, names: Iterable[str]) -> None:
        """Removes files on the remote. The flush or `_release` removes local files."""
        if self._writing is None:
            super().remove(names)

    def _release(self) -> None:
        super()._release()
        if self._writing is not None and self._writing.is_unfinished:
            self._clean_up(self._writing.abort)

    # --- the commit -------------------------------------------------------------------------------------------------

    def commit(self, index: bytes, files: dict[str, int]) -> set[str]:
        """Commits the save in the local folder if this rank's files are there, otherwise on the remote."""
        commit = Commit(metadata_file_name(self.metadata_rank), files, self._saver.options.overwrite)
        self._check_wanted()
        if self._writing is not None:
            try:
                sync = self._saver.options.sync_files
                self._writing.written(self._local_files, sync=sync, commit=commit, index=index)
                return set()  # the flush removes the replaced files
            except CheckpointError as error:
                self._copy_to_remote(error)
        return self._commit_remotely(index, commit)

    def _commit_remotely(self, index: bytes, commit: Commit) -> set[str]:
        """Waits for earlier saves and the files of all ranks, and commits the save on the remote.

        Raises `WriteError` on timeout, or if the commit fails, and `ReadError` if the remote cannot be read. After an
        error, removes the save's files only if the save is certainly not committed.
        """
        is_known = True
        try:
            self._wait_for_turn(commit)
            is_known = False
            before = set[str]()
            with suppress(ReadError):  # this node's folder may be unreadable
                before = {entry.id for entry in self._flushing.queue.entries()}
            replaced = publish(self.storage, index, commit, before, self._check_commit)
        except BaseException as error:
            if is_known or isinstance(error, (Refused, Superseded)):
                remove(self.storage, commit.files)
            raise
        self._is_published = True
        return replaced or set()

    def _wait_for_turn(self, commit: Commit) -> None:
        """Waits until the remote has the earlier saves, and the files of all ranks.

        Raises `Refused` if nothing arrives within the timeout, or if the save was abandoned, and `ReadError` if the
        remote cannot be read.
        """
        missing, ahead = set(commit.files), list[tuple[FlushEntry, FlushRecord]]()

        def is_over() -> bool:
            nonlocal missing, ahead
            missing = missing_files(self.storage, missing, commit.files)
            left = self._flushing.open_records()
            # If the local disk cannot be written to, only the writer process knows what has arrived.
            left = [] if self._flushing.unknown else left
            ahead = [(e, r) for e, r in left if e.id != self.id and r.commit is not None]
            self._check_wanted()  # the requests above may have taken a long time
            return not missing and not ahead

        self._flushing.resume()
        own = self._saver.options.target
        assert own is not None  # other writers with this local folder may have other timeouts
        if self._flushing.wait(
            until=is_over, progress=lambda: len(missing), timeout=own.progress_timeout(), every=_POLL_SECONDS
        ):
            return
        if missing:
            ranks = sorted({data_file_rank(name) for name in missing})
            what, trouble = f"data of rank(s) {listed_ranks(ranks)} ({min(missing)})", None
        else:
            entry, record = ahead[0]
            what = f"the earlier checkpoint in {self._flushing.target.folder(record.subpath)}"
            trouble = self._flushing.queue.trouble(entry)
        words = (
            f"{self.path} is not committed: {what} is missing on the remote, and nothing has arrived there for "
            f"{own.timeout:g} s"
        )
        raise Refused(
            f"{words}: {trouble or 'the remote is unreachable, or a node is lost. Check the remote and the nodes.'}"
        )

    def _publish(self) -> SaveReport:
        report, arrived = super()._publish(), self._saver.reports.arrived
        if self._is_published:
            arrived(report, report.durable_at)
        elif self._writing is not None:
            self._flushing.follow(self._writing.entry, report, arrived)
            self._flushing.resume()
        return report

    # --- without the local folder -----------------------------------------------------------------------------------

    def _leave_local_folder(self, error: Exception) -> None:
        logger.warning(
            "rank %d: cannot save to %s; saving to %s directly, which takes longer. The error was: %s",
            *(self.rank, self.storage.path, self.path, describe(error)),
        )
        self.storage = self._remote()
        self._lock = self._locked(self.storage)

    def _copy_to_remote(self, error: Exception) -> None:
        """Copies this rank's local files to the remote, because their record cannot be written to the local folder.

        Raises `WriteError` if the files cannot be read, or cannot be written to the remote.
        """
        local, before = self.storage, self._lock
        self._lock = None  # `_leave_local_folder` sets the new one; release the old one after the copy
        try:
            self._leave_local_folder(error)
            for name, nbytes in self._local_files.items():
                copy_file(local, self.storage, name, nbytes, self._check_wanted)
        except (CheckpointError, OSError) as failure:
            with suppress(CheckpointError, OSError):
                discard(self._remote(), *self._local_files)
            words = f"{describe(error)}; the copy to {self.path} then failed: {describe(failure)}"
            raise WriteError(words) from failure
        finally:
            if before is not None:
                before.release()
            if self._writing is not None:
                self._writing.abort()
            self._writing, self._local_files = None, {}

    def _remote(self) -> Storage:
        return self._flushing.target.open(self._subpath)

    def _locked(self, storage: Storage) -> DirectoryLock:
        """Creates a directory that this rank writes to, and locks it, so that no other process removes it.

        Sets no attributes: if the local disk hangs, this method may still run when the save continues on the remote.
        """
        storage.make_directory()
        lock = storage.lock_directory()
        lock.share(self._saver.options.limits.timeout)
        return lock


def _end(writing: Writing, lock: DirectoryLock) -> None:
    lock.release()  # first, because a locked folder is not removed
    writing.abort()
