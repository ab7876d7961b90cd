"""A save that is durable in a local folder first, and flushed to the remote when it is."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from .._format.names import data_file_rank, metadata_file_name
from .._index.locations import RankPlaces
from .._runtime.forks import Finalizer
from .._staging.staged_save import StagedSave
from .._storage.base import DirectoryLock, Refused, Storage
from .._storage.local import LocalStorage
from .._tiers.flush import Superseded, copy_file, discard, free, missing_files, publish, undo
from .._tiers.queue import Commit, FlushEntry, FlushRecord, Writing
from ..errors import CheckpointError, WriteError, WriterProcessDied, describe
from .commit import encoded, remove
from .context import SaveContext
from .flushing import CommittedMeta, Flushing
from .session import SaveSession
from .write_plan import Item
from .writer_client import Written

_T = TypeVar("_T")

logger = logging.getLogger("dcp_tensorizer")

_LOOK_SECONDS = 0.5
_MAX_FILE_BYTES = 1 << 30
"""Of a file that is flushed. Other nodes see only whole files arrive: where none does for long, a node looks lost."""


class TieredSession(SaveSession):
    """One save, as one rank sees it. No rank looks at another's local folder: it may be on another node.

    Args:
        context: Of the writer.
        save_id: Of the save.
        flushing: Of the local folder.
        place: Of the checkpoint in it.
        staged_save: What was staged for it, if anything was.
    """

    def __init__(
        self, context: SaveContext, save_id: str, flushing: Flushing, place: str, staged_save: StagedSave | None
    ) -> None:
        storage = LocalStorage(flushing.target.folder(place))
        storage.max_file_bytes = _MAX_FILE_BYTES
        super().__init__(context, save_id, storage, staged_save)
        self._flushing = flushing
        self._place = place
        self._writing: Writing | None = None
        self._local_files: dict[str, int] = {}
        self._is_published = False

    @property
    def path(self) -> str:
        name = self._flushing.target.name
        return f"{name}/{self._place}" if self._place else name

    @property
    def _removes_files(self) -> bool:
        return self._writing is None  # the flush has them, or `undo` removes them

    def write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        # The files of all ranks have the id of one save in their names: so it is known what a lost node has left.
        self.id = self._tables.save_of(plan) or self.id
        results = super().write(plan, planner)
        if not self._commits:
            self._follow()
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        self._follow()

    def _let_go(self) -> None:
        """Also removes what this rank has written here, unless the flush has it."""
        super()._let_go()
        if self._writing is not None:
            undo(self._writing)

    def _in_time(self, operation: Callable[[], _T], most: float = math.inf) -> _T:
        """Does something with the storages: a commit may wait for the flush, for as long as that makes progress."""
        return operation()

    def _open(self) -> None:
        """Asks the remote, only where that is needed."""
        if self._commits and not (self._context.options.overwrite and self._use_collectives):
            self._check_place(self._flushing.target.open(self._place))

    def _begin(self) -> None:
        """Locks the local folder, so that nobody clears it away."""
        self._context.show_life()
        try:
            record = FlushRecord(self._flushing.target.name, self._place, self._rank, self.id, self._context.id)
            self._writing = self._flushing.queue.begin(record)  # first: whoever comes after a death knows where to look
            self.storage.make_directory()
            self._lock = self.storage.lock_directory()
            self._lock.share(self._context.options.limits.timeout)
            # If another rank fails, no hook says so. Not at exit: a save on a daemon thread may be under way then.
            Finalizer(self, _end, self._writing, self._lock).atexit = False
        except (CheckpointError, OSError) as error:
            self._go_direct(error)

    def _check_place(self, storage: Storage) -> None:
        """Also what is on its way there must not be replaced."""
        super()._check_place(storage)
        if self._context.options.overwrite:
            return
        name = metadata_file_name(self._metadata_rank)
        for _, record in self._flushing.open_records():
            if record.place == self._place and record.commit is not None and record.commit.name == name:
                raise WriteError(
                    f"{self.path}: Checkpoint already exists and overwrite=False. It is in {self.storage.path}, and "
                    f"not on the remote yet: save to another path, or pass overwrite=True"
                )

    def _write_files(self, items: list[Item]) -> Written:
        self._begin()
        if self._writing is not None:
            try:
                return self._write_locally(items)
            except WriterProcessDied:
                raise
            except CheckpointError as error:
                self._go_direct(error)
        return self._write_to(self.storage, items)

    def _write_locally(self, items: list[Item]) -> Written:
        """Writes the items to the local folder; raises `WriteError`.

        If that fails, room is made there, where there is something that is on the remote as well.
        """
        try:
            written = self._write_to(self.storage, items)
        except WriterProcessDied:
            raise
        except CheckpointError:
            if not free(self._flushing.queue):
                raise
            self.storage.make_directory()
            written = self._write_to(self.storage, items)
        self._local_files = {file.name: file.nbytes for file in written.done.files}
        for name, nbytes in self._local_files.items():  # no other node can look
            found = self.storage.head(name)
            if found != nbytes:
                raise WriteError(f"{self.storage.path}/{name} has {found} bytes after it was written, not {nbytes:,}")
        return written

    def _go_direct(self, error: Exception) -> None:
        """Lets this rank save to the remote from now on."""
        self._let_go()
        self._writing, self._local_files = None, {}
        self._leave_local(error)

    def _leave_local(self, error: Exception) -> None:
        """Puts this rank's files on the remote from now on."""
        logger.warning(
            "rank %d: %s is not used, and this save goes to %s directly, which takes longer: %s",
            *(self._rank, self.storage.path, self.path, describe(error)),
        )
        self.storage = self._flushing.target.open(self._place)
        self.storage.make_directory()
        self._lock = self.storage.lock_directory()
        self._lock.share(self._context.options.limits.timeout)

    def _wrote(self) -> None:
        if self._commits:
            return
        with self._or_fail():
            try:
                self._hand_over(None, b"")
            except CheckpointError as error:
                self._bring(error)
        self.end()

    def _replaced_files(self) -> set[str]:
        return set()  # it is the flush that replaces

    def _hand_over(self, commit: Commit | None, index: bytes) -> None:
        """This rank's local files are to be flushed. With a commit, the save is committed locally.

        Raises:
            CheckpointError: it could not be written down.
        """
        if self._writing is None:
            return
        if commit is None and not self._local_files:
            self._writing.abort()
            self._writing = None
            return
        queue, sync = self._flushing.queue, self._context.options.write.sync_files
        try:
            try:
                self._writing.written(self._local_files, sync=sync, commit=commit, index=index)
            except (CheckpointError, OSError):
                if not free(queue):
                    raise
                self._writing.written(self._local_files, sync=sync, commit=commit, index=index)
        except OSError as error:
            raise WriteError(f"cannot write to {queue.folder}: {error}") from error

    def _publish(self, metadata: Metadata, parts: list[RankPlaces]) -> None:
        index = encoded(self.storage, metadata, parts, **self._index_options())
        files = dict(file for part in parts for file in part.files)
        commit = Commit(metadata_file_name(self._metadata_rank), files, self._context.options.overwrite)
        self._check_wanted()
        try:
            if self._writing is not None:
                self._hand_over(commit, index)
                return
        except CheckpointError as error:
            self._bring(error)
        self._publish_directly(index, commit)

    def _bring(self, error: Exception) -> None:
        """Brings this rank's files to the remote itself: they are in the local folder, which takes no record of them.

        Raises:
            WriteError: they cannot be read there any more, or not be written.
        """
        files, local, before = self._local_files, self.storage, self._lock
        self._lock = None  # until they are there
        try:
            self._leave_local(error)
            for name, nbytes in files.items():
                copy_file(local, self.storage, name, nbytes, self._check_wanted)
        except (CheckpointError, OSError) as failure:
            with suppress(CheckpointError, OSError):
                discard(self._flushing.target.open(self._place), *files)
            raise WriteError(f"{describe(error)}; and {describe(failure)}") from failure
        finally:
            if before is not None:
                before.release()
            if self._writing is not None:
                undo(self._writing)
            self._writing, self._local_files = None, {}

    def _publish_directly(self, index: bytes, commit: Commit) -> None:
        """Commits the save on the remote: when what was saved before is there, and the files of all ranks are.

        Raises:
            WriteError: they have not come in time, or it cannot be committed. Of its files none is left there, unless
                nobody knows what has become of the commit.
        """
        remote = self._flushing.target.open(self._place)
        is_known = True
        try:
            self._wait_for_turn(remote, commit)
            is_known = False
            before = {entry.id for entry in self._flushing.entries()}
            replaced = publish(remote, index, commit, before, self._check_commit)
        except BaseException as error:
            if is_known or isinstance(error, (Refused, Superseded)):
                remove(remote, commit.files)
            raise
        remove(remote, replaced or ())
        self._is_published = True

    def _wait_for_turn(self, remote: Storage, commit: Commit) -> None:
        """Waits until the remote has what was saved before, and the files of all ranks.

        Raises:
            Refused: nothing of that has come for the timeout, or nobody wants the save any more.
            ReadError: the remote cannot be looked at.
        """
        self._flushing.resume()
        own = self._context.options.target
        assert own is not None  # other writers with this local folder may have other timeouts
        patience, before = own.patience(), None
        missing = set(commit.files)
        while True:
            missing = missing_files(remote, missing, commit.files)
            ahead = self._flushing.commits_before(self.id)
            self._check_wanted()  # it may have waited for long
            if not missing and not ahead:
                return
            now = len(missing), self._flushing.progress()
            if now != before:
                before = now
                patience.renew()
            elif patience.is_over():
                raise Refused(f"{self.path}: {self._reason(missing, ahead)} has not come for {own.timeout:g} s")
            time.sleep(_LOOK_SECONDS)

    def _reason(self, missing: set[str], ahead: list[tuple[FlushEntry, FlushRecord]]) -> str:
        """Says what a commit waits for."""
        if missing:
            ranks = sorted({data_file_rank(name) for name in missing})
            return f"data of rank {', '.join(map(str, ranks[:8]))} ({min(missing)})"
        entry, record = ahead[0]
        trouble = self._flushing.queue.trouble(entry)
        words = f"{record.place or 'what'} was saved before, lies in {self._flushing.target.folder(record.place)}, and"
        return words + (f" cannot be flushed ({trouble}): it" if trouble else "")

    def _meta(self) -> StorageMeta:
        return CommittedMeta(checkpoint_id=self.path, save_id=self.id)

    def _follow(self) -> None:
        """Reports when the remote has the save."""
        report = self._report
        assert report is not None
        if self._is_published:
            self._context.reports.arrived(report, report.durable_at)
        elif self._writing is not None:
            self._flushing.follow(self._writing.entry, report, self._context.reports.arrived)
            self._flushing.resume()


def _end(writing: Writing, lock: DirectoryLock) -> None:
    lock.release()  # or else the folder would be in use, and stay
    undo(writing)
