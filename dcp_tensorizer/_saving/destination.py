"""The destination of a save: the directory that a rank writes to, and that becomes a checkpoint."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from .._format.names import metadata_file_name, save_id_in
from .._index.locations import RankPlaces
from .._runtime.threads import Hung, in_background, in_time
from .._staging.staged_save import StagedSave
from .._storage.base import DirectoryLock, Refused, Storage
from .._writer_process.protocol import WriteDone
from ..errors import WriteError
from .commit import (
    agree_on_key,
    begin,
    commit,
    drop_record,
    put_records,
    remove_records,
    remove_with_records,
    replaced_files,
)
from .context import SaveContext
from .report import SaveReport
from .reuse import FilesOfSave
from .write_plan import Item

_T = TypeVar("_T")

_CLEAN_UP_SECONDS = 20.0  # the other ranks wait for the clean-up after a commit

logger = logging.getLogger("dcp_tensorizer")


class Destination:
    """The directory of one save, as one rank uses it, from opening it to the commit.

    All calls come from the save's thread. If the storage has no timeouts of its own and the save has its own thread,
    nothing waits for a call that hangs in the kernel, because training waits for the save's thread.

    Args:
        context: The writer's.
        storage: The directory.
        staged_save: The staged state, if the save has one.

    Attributes:
        storage: The directory that this rank writes to.
        path: The checkpoint's path for messages and reports, without credentials.
        is_given_up: The storage has hung for too long.
        commits: This rank commits, for all ranks or for itself.
        rank: This rank.
        metadata_rank: The rank in the metadata file's name; None if one file is for all.
    """

    meta = StorageMeta
    """The class of the storage's metadata that DCP sends to all ranks when the save is committed."""
    has_one_id = False
    """True if the file names of all ranks contain the coordinator's id of the save."""

    def __init__(self, context: SaveContext, storage: Storage, staged_save: StagedSave | None) -> None:
        self.storage = storage
        self.path = storage.path
        self.is_given_up = False
        self.rank, self.commits = 0, True
        self.metadata_rank: int | None = None
        self._context = context
        self._staged_save = staged_save
        if staged_save is not None:
            storage.umask = staged_save.context.umask
        self._is_on_own_thread = staged_save is not None and staged_save.is_on_own_thread
        self._lock: DirectoryLock | None = None
        self._replaced: concurrent.futures.Future[set[str]] | None = None

    def set_up(self, rank: int, *, is_coordinator: bool, use_collectives: bool) -> None:
        """Takes this rank's part in the save."""
        self.rank = rank
        self.commits = is_coordinator or not use_collectives
        self.metadata_rank = None if use_collectives else rank

    def open(self) -> None:
        """Creates the directory. The rank that commits locks it, and removes the files of dead saves.

        Raises `WriteError` if it cannot be created, or holds a checkpoint that must not be replaced.
        """
        self._in_time(self._open)

    def _open(self) -> None:
        self.storage.make_directory()
        if self.commits:
            self._lock = begin(self.storage, self._context.options.limits.timeout)
        self._check_free(self.storage)

    def _check_free(self, storage: Storage) -> None:
        """Raises `WriteError` if there is a checkpoint that must not be replaced."""
        refuses = self.commits and not self._context.options.overwrite
        if refuses and storage.head(metadata_file_name(self.metadata_rank)) is not None:
            raise WriteError(
                f"{storage.path}: Checkpoint already exists and overwrite=False: save to another path, or pass "
                f"overwrite=True"
            )
        if self.metadata_rank is not None and storage.head(metadata_file_name()) is not None:
            raise WriteError(
                f"{storage.path} holds a checkpoint of all ranks, which every load would take for the one "
                f"that is saved here without collectives: remove that, or save to another path"
            )

    def write(self, save_id: str, items: Sequence[Item]) -> WriteDone:
        """Writes this rank's items, and makes them durable; raises `WriteError`, and then none of their files is
        left.
        """
        if self.commits:
            ask = functools.partial(replaced_files, self.storage, self.metadata_rank)
            self._replaced = in_background(ask, daemon=True)
        if any(item.has_bytes for item in items):
            self._in_time(lambda: put_records(self.storage, [save_id]))
        return self._write(save_id, items)

    def _write(self, save_id: str, items: Sequence[Item]) -> WriteDone:
        context = self._context
        files = FilesOfSave(self.storage, self.rank, save_id, context.options.write, context.engine.files)
        with context.callbacks.progress(self.path, lambda: sum(item.tensor.nbytes for item in items)) as progress:
            return context.engine.client.write(files, items, self._staged_save, lambda: context.closed, progress)

    def wrote(self, written: WriteDone) -> None:
        """Notes that this rank's part is ready. The save may still fail on another rank."""
        save = self._staged_save
        if save is not None and save.files is not None:
            save.files.note(self.storage, [file.name for file in written.files])

    def commit(self, metadata: Metadata, parts: Sequence[RankPlaces]) -> set[str]:
        """Makes the save the checkpoint at its path; returns the files of the replaced checkpoint, which can be
        removed.

        ``parts`` are the ranks' reports. Raises `WriteError`; see `commit.commit`.
        """
        return self._in_time(lambda: self._commit(metadata, parts))

    def _commit(self, metadata: Metadata, parts: Sequence[RankPlaces]) -> set[str]:
        agree_on_key(self._context.options.write.cipher, parts, self.storage)
        assert self._replaced is not None
        context, options, replaced = self._context, self._context.options, self._replaced.result()
        if self.storage.locks_are_visible:  # asking again costs nothing, and others may have saved here meanwhile
            replaced |= replaced_files(self.storage, self.metadata_rank)
        put_records(self.storage, map(save_id_in, replaced))
        try:
            commit(
                self.storage,
                metadata,
                parts,
                sync=options.write.sync_files,
                overwrite=options.overwrite,
                check=self._check_commit,  # at the last moment, because checking all ranks' data may have taken seconds
                is_owned=context.owner is not None,
                **self._index_options(),
            )
        except Exception:  # not KeyboardInterrupt, after which it may be committed
            remove_records(self.storage, map(save_id_in, replaced))  # the checkpoint before stays
            raise
        return replaced

    def _index_options(self) -> dict[str, Any]:
        """The options of the index."""
        context, save = self._context, self._staged_save
        return {
            "rank": self.metadata_rank,
            "cipher": context.options.write.cipher,
            "record": None if save is None else save.record,
            "recent": context.engine.sections,
        }

    def check_wanted(self) -> None:
        """Raises `Refused` if the save has been abandoned."""
        if self.is_given_up:
            raise Refused(f"{self.path} has hung for too long")
        if self._context.closed and self._staged_save is not None:
            raise Refused(f"the writer was closed before the save to {self.path} was over")

    def _check_commit(self) -> None:
        """Raises `Refused` if the save must not be committed: it was abandoned, or another run has claimed the
        folder.
        """
        self.check_wanted()
        if self._context.owner is not None:
            self._context.owner.check()

    def remove(self, names: Iterable[str]) -> None:
        """Removes files that no checkpoint names, and the records of their saves. It does not wait for a storage that
        hangs.

        It takes a quarter of a second for 2 GB. It is done on this thread, because a caller may copy the directory as
        soon as the save is over.
        """
        self._clean_up(functools.partial(remove_with_records, self.storage, tuple(names)))

    def follow(self, report: SaveReport) -> None:
        """Reports again when the checkpoint is at its final place, if it is not there yet."""

    def give_up(self) -> None:
        """Stops waiting for the storage, which hangs."""
        self.is_given_up = True
        self.storage.give_up()

    def drop_record(self, save_id: str, after: concurrent.futures.Future[None] | None) -> None:
        """Removes the record of a save that failed on this rank, after the files that it tells of are removed."""

        def drop() -> None:
            if after is not None:
                after.exception()
            drop_record(self.storage, save_id)

        self._clean_up(drop)

    def end(self) -> None:
        """Releases the directory, so that others may clean up there. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        if not self.is_given_up and self.storage.locks_are_visible:  # then only the kernel is involved
            lock.release()
        else:
            self._clean_up(lock.release)

    def _in_time(self, operation: Callable[[], _T], most: float = math.inf) -> _T:
        """Runs an operation on the storage; gives it up, and raises `WriteError`, if it hangs."""
        timeout = min(most, self._context.options.limits.timeout)
        if not (self._is_on_own_thread and self.storage.may_hang):
            return operation()
        try:
            return in_time(operation, timeout)
        except Hung:
            self.give_up()
            raise WriteError(
                f"{self.storage.path} has not answered for {timeout:g} s: its disk or its server hangs. What was "
                f"begun there may still happen later"
            ) from None

    def _clean_up(self, operation: Callable[[], object]) -> None:
        """Runs an operation whose result nobody needs; does not wait for a storage that hangs."""
        if self.is_given_up:
            in_background(operation, name="clean-up", daemon=True)
            return
        try:
            self._in_time(operation, _CLEAN_UP_SECONDS)
        except WriteError as error:
            if not self.is_given_up:
                raise
            logger.warning("%s", str(error))
