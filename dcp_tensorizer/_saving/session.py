"""The session of a save: what one rank does in each of DCP's hooks, from the first to the last."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import math
import multiprocessing
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from .._format.names import StoredItem, metadata_file_name, save_id_in
from .._index.locations import RankPlaces
from .._index.schema import ItemKey, SaveRecord
from .._runtime.threads import Hung, QuickTurns, in_background, in_time
from .._runtime.torch_compat import DCP_VERSION
from .._staging.staged_save import StagedSave
from .._storage.base import DirectoryLock, Refused, Storage
from .._writer_process.client import WriterProcessHung
from ..errors import CheckpointError, WriteError, WriterProcessDied
from .commit import (
    agree_on_key,
    begin,
    commit,
    drop_record,
    failed_before_commit,
    put_records,
    remove,
    remove_records,
    remove_with_records,
    replaced_files,
)
from .context import SaveContext
from .engine import SaveTables
from .keeping import KeptSave
from .report import SaveReport, SaveTimes, warn_if_stale
from .write_plan import Item, resolve, write_results
from .writer_client import Written

_T = TypeVar("_T")

_CLEAN_UP_SECONDS = 20.0  # the other ranks wait for what follows a commit

logger = logging.getLogger("dcp_tensorizer")


class SaveSession:
    """One save, as one rank sees it, from DCP's first hooks to the last; all run on the save's thread.

    Args:
        context: Of the writer.
        save_id: Identifies the save.
        storage: The checkpoint's directory.
        staged_save: What was staged for it, if anything was.
        kept: What is kept of it in memory, if anything is.

    Attributes:
        id: Identifies the save.
        storage: The checkpoint's directory.
    """

    def __init__(
        self,
        context: SaveContext,
        save_id: str,
        storage: Storage,
        staged_save: StagedSave | None,
        kept: KeptSave | None = None,
    ) -> None:
        self.id = save_id
        self.storage = storage
        self._context = context
        self._staged_save = staged_save
        if staged_save is not None:
            storage.umask = staged_save.context.umask
        self._kept = kept
        self._record: SaveRecord | None = None if staged_save is None else staged_save.record
        self._times = SaveTimes() if staged_save is None else SaveTimes(staged_save.times)
        self._rank = 0
        self._is_coordinator = True
        self._use_collectives = True
        self._lock: DirectoryLock | None = None
        self._report: SaveReport | None = None
        self._is_on_own_thread = staged_save is not None and staged_save.staged_on is not threading.current_thread()
        self._turns = QuickTurns() if self._is_on_own_thread else None
        self._tables = SaveTables(context.engine.tables, save_id)
        self._is_given_up = False
        self._replaced: concurrent.futures.Future[set[str]] | None = None

    @property
    def path(self) -> str:
        """The checkpoint's path, without credentials."""
        return self.storage.path

    @property
    def is_dropped(self) -> bool:
        """Nothing can save what was staged for it any more: DCP has gone on without it."""
        return self._staged_save is not None and self._staged_save.over()

    @property
    def _removes_files(self) -> bool:
        """True if nobody but this rank removes what it has written, where the save fails on another one."""
        return True

    @property
    def _commits(self) -> bool:
        return self._is_coordinator or not self._use_collectives

    @property
    def _metadata_rank(self) -> int | None:
        return None if self._use_collectives else self._rank

    def set_up(self, *, rank: int, is_coordinator: bool, use_collectives: bool) -> None:
        """Takes this rank's part in the save."""
        self._rank = rank
        self._is_coordinator = is_coordinator
        self._use_collectives = use_collectives
        if not use_collectives:
            self._kept = None  # no rank would know what the others have
        self._context.engine.failures.set_coordinator(is_coordinator)

    def prepare(self, plan: SavePlan) -> SavePlan:
        """Creates the directory; the coordinator locks it, and removes what dead saves left there.

        Returns:
            The plan, with what this rank could leave out of its results.

        Raises:
            WriteError: it cannot be created, or holds a checkpoint that must not be overwritten.
        """
        with self._or_fail():
            self._in_time(self._open)
            if self._kept is not None:
                self._kept.planned(plan)
            return plan if self._commits else self._tables.offer(plan)

    def answer(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: the plans of all ranks, with what each may leave out."""
        with self._or_fail():
            state = None if self._kept is None else self._kept.begin(self.id, len(plans))
            return [self._tables.answer(plan, state) for plan in plans]

    def write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Writes this rank's items and makes them durable.

        Raises:
            WriteError: naming path, rank and, where known, key; nothing of this rank's is left behind.
        """
        context = self._context
        self._times.planned()
        try:
            items, written, results = self._write(plan, planner)
        except BaseException as error:  # also a Ctrl-C: nothing of this save may stay
            cleaning = None
            if isinstance(error, WriterProcessHung):
                self._give_up()
                cleaning = error.cleaning
            self._fail(error)
            self._clean_up(functools.partial(self._drop_record, cleaning))
            failed_before_commit(error)
            if not isinstance(error, CheckpointError):
                raise
            kind = WriterProcessDied if isinstance(error, WriterProcessHung) else type(error)
            failure = kind(f"rank {self._rank}: {error}")
            failed_before_commit(failure)
            raise failure from error
        finally:
            if self._staged_save is not None:
                self._staged_save.on_written = None  # it refers to whoever keeps the state
                self._staged_save.release()
                context.stager.written(self._staged_save)
            if not context.options.cache_staged_state_dict:
                context.engine.client.free()
        if self._staged_save is not None and self._staged_save.files is not None and self._removes_files:
            self._staged_save.files.note(self.storage, [file.name for file in written.done.files])
        context.engine.objects.check(items)
        self._report = self._times.written(
            path=self.path,
            save_id=self.id,
            rank=self._rank,
            nbytes=sum(item.tensor.nbytes for item in items),
            written=written,
        )
        self._wrote()
        if not self._commits:
            self._end_turns()
            context.reports.publish(self._report)
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the save, on the coordinator (without collectives: every rank its own part).

        Raises:
            WriteError: it is not committed, and what was committed before is untouched.
        """
        context = self._context
        assert self._report is not None, "write comes first"
        self._times.commit_begins()
        with self._or_fail():
            replaced, parts = self._in_time(lambda: self._replace(metadata, results))
        context.engine.failures.committed()
        if self._kept is not None:
            self._kept.committed()
        if self._record is not None:
            warn_if_stale(self.path, self._record.step, [part.unchanged for part in parts])
        report = self._report = self._times.committed(self._report)
        # It takes a quarter of a second for 2 GB, and not on another thread: whoever waited may copy the directory.
        # Before the user's callback: until then a load that began earlier may still find files of both saves.
        if replaced:
            self._clean_up(functools.partial(remove_with_records, self.storage, replaced))
        self.end()
        context.reports.publish(report)

    def end(self) -> None:
        """Lets others clean up where it was saved. Idempotent."""
        self._end_turns()
        self._let_go()

    def _let_go(self) -> None:
        """Lets go of the directory. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        if not self._is_given_up and self.storage.locks_are_visible:  # then it is the kernel's affair alone
            lock.release()
        else:
            self._clean_up(lock.release)

    def _in_time(self, operation: Callable[[], _T], most: float = math.inf) -> _T:
        """Does something with the storage, and gives that up if it hangs.

        Where the storage has no timeouts of its own, the save's thread alone does it, and no thread that hangs in the
        kernel is waited for: training waits for that of the save.

        Raises:
            WriteError: it hangs.
        """
        timeout = min(most, self._context.options.limits.timeout)
        if not (self._is_on_own_thread and self.storage.may_hang):
            return operation()
        try:
            return in_time(operation, timeout)
        except Hung:
            self._give_up()
            raise WriteError(
                f"{self.storage.path} has not answered for {timeout:g} s: its disk or its server hangs. What was "
                f"begun there may come about later"
            ) from None

    def _drop_record(self, cleaning: concurrent.futures.Future[None] | None) -> None:
        """Removes the save's record, when the files of which it tells are removed."""
        if cleaning is not None:
            cleaning.exception()
        drop_record(self.storage, self.id)

    def _clean_up(self, operation: Callable[[], object]) -> None:
        """Does what nobody need wait for, if the storage hangs."""
        if self._is_given_up:
            in_background(operation, name="clean-up", daemon=True)
            return
        try:
            self._in_time(operation, _CLEAN_UP_SECONDS)
        except WriteError as error:
            if not self._is_given_up:
                raise
            logger.warning("%s", str(error))

    def _give_up(self) -> None:
        self._is_given_up = True
        self.storage.give_up()

    def _replace(self, metadata: Metadata, results: list[list[WriteResult]]) -> tuple[set[str], list[RankPlaces]]:
        """Commits the save; returns the files of the checkpoint that it replaces, and what each rank has written."""
        replaced = self._replaced_files()
        put_records(self.storage, map(save_id_in, replaced))
        try:
            return replaced, self._commit(metadata, results)
        except Exception:  # after a Ctrl-C nobody knows: it may be committed
            remove_records(self.storage, map(save_id_in, replaced))  # they are not replaced
            raise

    def _end_turns(self) -> None:
        if self._turns is not None:
            self._turns.end()

    def _open(self) -> None:
        """Makes the directory ready; raises `WriteError`."""
        self.storage.make_directory()
        self._check_place(self.storage)
        if self._commits:
            self._lock = begin(self.storage, self._context.options.limits.timeout)

    def _check_place(self, storage: Storage) -> None:
        """Raises `WriteError` where there is a checkpoint that must not be replaced."""
        refuses = self._commits and not self._context.options.overwrite
        if refuses and storage.head(metadata_file_name(self._metadata_rank)) is not None:
            raise WriteError(
                f"{storage.path}: Checkpoint already exists and overwrite=False: save to another path, or pass "
                f"overwrite=True"
            )
        if not self._use_collectives and storage.head(metadata_file_name()) is not None:
            raise WriteError(
                f"{storage.path} holds a checkpoint of all ranks, which every load would take for the one "
                f"that is saved here without collectives: remove that, or save to another path"
            )

    def _write(self, plan: SavePlan, planner: SavePlanner) -> tuple[list[Item], Written, list[WriteResult]]:
        if self._kept is not None and not self._context.closed:
            self._kept.keep(self._tables.told(plan), planner, self._rank)
        omitted = frozenset() if self._staged_save is None else self._staged_save.omitted
        items = resolve(plan, planner, self._is_staged, omitted)
        written = self._write_files(items)
        try:
            self._tell_digests(items, written)
            cipher = self._context.options.write.cipher
            results = write_results(items, written.done, self._rank, planner, cipher, self._compare)
            if not self._commits:
                results = [replace(r, storage_data=self._tables.shortened(r.storage_data, plan)) for r in results]
        except BaseException:
            self._clean_up(functools.partial(remove, self.storage, [file.name for file in written.done.files]))
            raise
        return items, written, results

    def _tell_digests(self, items: list[Item], written: Written) -> None:
        """Tells them to whoever keeps the staged state, who need not take them again."""
        save = self._staged_save
        if save is None or save.on_written is None or save.buffer is None:
            return
        known = dict[tuple[int, int], bytes]()
        if self._context.options.write.cipher is None:
            stored = written.done.places()
            for item in items:
                if item.has_bytes and (offset := save.buffer.locate(item.tensor)) is not None:
                    known[offset, item.tensor.nbytes] = stored[item.name][0].digests
        save.on_written(known)

    def _write_files(self, items: list[Item]) -> Written:
        """Writes the items, and makes them durable; raises `WriteError`."""
        if self._commits:
            ask = functools.partial(replaced_files, self.storage, self._metadata_rank)
            self._replaced = in_background(ask, daemon=True)
        if any(item.has_bytes for item in items):
            self._in_time(lambda: put_records(self.storage, [self.id]))
        return self._write_to(self.storage, items)

    def _wrote(self) -> None:
        """This rank's items are written, and their results are ready."""

    def _replaced_files(self) -> set[str]:
        """The data files of the checkpoint that the commit replaces."""
        assert self._replaced is not None
        replaced = self._replaced.result()
        if self.storage.locks_are_visible:  # where it costs nothing to ask again: others may have saved here meanwhile
            replaced |= replaced_files(self.storage, self._metadata_rank)
        return replaced

    def _write_to(self, storage: Storage, items: list[Item]) -> Written:
        context = self._context
        return context.engine.client.write(
            storage,
            self._rank,
            self.id,
            items,
            self._staged_save,
            context.options.write,
            lambda: context.closed,
            context.reusing_save(),
        )

    def _is_staged(self, tensor: torch.Tensor) -> bool:
        buffer = None if self._staged_save is None else self._staged_save.buffer
        return buffer is not None and buffer.locate(tensor) is not None

    def _commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> list[RankPlaces]:
        """Makes the save the checkpoint at its path; returns what each rank has written."""
        context = self._context
        meta = self._meta()
        parts = self._tables.completed([result.storage_data for of_rank in results for result in of_rank])
        try:
            self._check_wanted()
            _check_trainer_lives(self.path)
            agree_on_key(context.options.write.cipher, parts, self.storage)
        except CheckpointError:  # nothing has been committed, and nothing will be
            if self._removes_files:
                remove_with_records(self.storage, [name for part in parts for name, _ in part.files])
            raise
        # The planner's own, which DCP returns to whoever saves: what torch's writer says there, this one says too.
        metadata.version, metadata.storage_meta = DCP_VERSION, meta
        self._publish(metadata, parts)
        return parts

    def _meta(self) -> StorageMeta:
        """The storage's part of what DCP returns to the caller of a save, on all ranks."""
        return StorageMeta(checkpoint_id=self.path, save_id=self.id)

    def _publish(self, metadata: Metadata, parts: list[RankPlaces]) -> None:
        """Makes the save the checkpoint at its path; raises `WriteError`."""
        options = self._context.options
        commit(
            self.storage,
            metadata,
            parts,
            sync=options.write.sync_files,
            overwrite=options.overwrite,
            check=self._check_commit,  # at the last moment: to look at the data of all ranks may have taken seconds
            is_owned=self._context.owner is not None,
            **self._index_options(),
        )

    def _check_wanted(self) -> None:
        """Raises `Refused` if the save has been abandoned."""
        if self._is_given_up:
            raise Refused(f"{self.path} has hung for too long")
        if self._context.closed and self._staged_save is not None:
            raise Refused(f"the writer was closed before the save to {self.path} was over")

    def _check_commit(self) -> None:
        """Raises `Refused` if the save must not be committed: it has been abandoned, or another run has the folder."""
        self._check_wanted()
        if self._context.owner is not None:
            self._context.owner.check()

    def _index_options(self) -> dict[str, Any]:
        """The options of the index."""
        cipher, entries = self._context.options.write.cipher, self._context.engine.entries
        return {"rank": self._metadata_rank, "cipher": cipher, "record": self._record, "entries": entries}

    def _compare(self, places: Mapping[ItemKey, StoredItem]) -> tuple[str, ...] | None:
        return None if self._record is None else self._context.freshness.compare(self._record.step, places)

    @contextmanager
    def _or_fail(self) -> Iterator[None]:
        """An error inside is that of the save, also where nobody has foreseen it."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, Exception):
            self._context.engine.failures.failed(error)
        self.end()


def _check_trainer_lives(path: str) -> None:
    """Raises where the trainer has died: in PROCESS mode its save must not be committed late."""
    trainer = multiprocessing.parent_process()
    if trainer is not None and multiprocessing.current_process().daemon and not trainer.is_alive():
        raise WriteError(f"the trainer (pid {trainer.pid}) is gone: its save to {path} is not committed")
