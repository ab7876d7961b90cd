"""The session of a save: the work of one rank in each of DCP's hooks, from the first to the last."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from .._format.names import StoredItem
from .._index.schema import ItemKey, SaveRecord
from .._runtime.threads import QuickTurns
from .._runtime.torch_compat import DCP_VERSION
from .._staging.staged_save import StagedSave
from .._writer_process.client import WriterProcessHung
from .._writer_process.protocol import WriteDone
from ..errors import CheckpointError, WriteError, WriterProcessDied
from .commit import failed_before_commit
from .context import SaveContext
from .destination import Destination
from .engine import SaveTables, keeping_rank
from .keeping import KeptSave, KeptState
from .report import SaveReport, SaveTimes, warn_if_stale
from .write_plan import Item, resolve, warn_of_refused, write_results


class SaveSession:
    """One save, as one rank sees it, from DCP's first hook to the last; all run on the save's thread.

    ``staged_save`` is None if the save writes from the tensors themselves. ``kept`` is the part of the save that is
    kept in memory, if any. ``path`` is the checkpoint's, without credentials.
    """

    def __init__(
        self,
        context: SaveContext,
        save_id: str,
        destination: Destination,
        staged_save: StagedSave | None,
        kept: KeptSave | None = None,
    ) -> None:
        self.id = save_id
        self.path = destination.path
        self._destination = destination
        self._context = context
        self._staged_save = staged_save
        self._kept = kept
        self._record: SaveRecord | None = None if staged_save is None else staged_save.record
        self._times = SaveTimes() if staged_save is None else SaveTimes(staged_save.times)
        self._report: SaveReport | None = None
        self._turns = QuickTurns() if staged_save is not None and staged_save.is_on_own_thread else None
        self._tables = SaveTables(context.engine.tables, save_id)

    @property
    def is_dropped(self) -> bool:
        """Returns whether DCP has dropped the staged state, so that nothing can save it any more."""
        return self._staged_save is not None and self._staged_save.over()

    def set_up(self, *, rank: int, is_coordinator: bool, use_collectives: bool) -> None:
        """Takes this rank's part in the save."""
        self._destination.set_up(rank, is_coordinator=is_coordinator, use_collectives=use_collectives)
        if not use_collectives:
            self._kept = None  # no rank would know what the others keep
        self._context.engine.failures.set_coordinator(is_coordinator)

    def prepare(self, plan: SavePlan) -> SavePlan:
        """Creates the directory. The coordinator locks it, and removes the files of dead saves.

        Returns the plan, with what this rank could leave out of its results. Raises `WriteError` if the directory
        cannot be created, or holds a checkpoint that must not be overwritten.
        """
        with self.or_fail():
            self._destination.open()
            keeping = None if self._kept is None else self._kept.planned(plan)
            return plan if self._destination.commits else self._tables.offer(plan, keeping)

    def answer(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Adds to the plans of all ranks, on the coordinator, what each may leave out."""
        with self.or_fail():
            states: list[KeptState | None] = [None] * len(plans)
            if self._kept is not None:
                states = [*self._kept.begin(self.id, [keeping_rank(plan) for plan in plans], self._destination.rank)]
            return [self._tables.answer(plan, state) for plan, state in zip(plans, states, strict=True)]

    def write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Writes this rank's items, and makes them durable.

        Raises `WriteError`, naming path, rank and, where known, key. Then this rank's files are removed.
        """
        context, destination = self._context, self._destination
        self._times.planned()
        if destination.has_one_id:
            self.id = self._tables.save_of(plan) or self.id
        try:
            items, written, results = self._write(plan, planner)
        except BaseException as error:  # also KeyboardInterrupt: no file of this save may stay
            hung = error if isinstance(error, WriterProcessHung) else None
            if hung is not None:
                destination.give_up()
            self._fail(error)
            destination.drop_record(self.id, None if hung is None else hung.cleaning)
            failed_before_commit(error)
            if not isinstance(error, CheckpointError):
                raise
            kind = type(error) if hung is None else WriterProcessDied
            failure = kind(f"rank {destination.rank}: {error}")
            failed_before_commit(failure)
            raise failure from error
        finally:
            if self._staged_save is not None:
                self._staged_save.on_written = None  # it refers to the object that keeps the state
                self._staged_save.release()
                context.stager.written(self._staged_save)
            if not context.options.cache_staged_state_dict:
                context.engine.client.free()
        warn_of_refused(items, context.engine.looked_at)
        self._report = self._times.written(
            path=self.path,
            save_id=self.id,
            rank=destination.rank,
            nbytes=sum(item.tensor.nbytes for item in items),
            done=written,
        )
        if not destination.commits:
            self._end_turns()
            self._publish(self._report)
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the save, on the coordinator; without collectives every rank commits its own part.

        Raises `WriteError` if it is not committed, and then the checkpoint before is untouched.
        """
        assert self._report is not None, "write comes first"
        self._times.commit_begins()
        with self.or_fail():
            replaced = self._commit(metadata, results)
        self._context.engine.failures.committed()
        report = self._report = self._times.committed(self._report)
        try:
            self._committed()
        finally:
            # Before the user's callback, because until then a load that began earlier may find files of both saves.
            if replaced:
                self._destination.remove(replaced)
            self.end()
            self._publish(report)

    def _committed(self) -> None:
        """Does what follows the commit, before the files that it has replaced are removed."""
        if self._kept is not None:
            self._kept.committed()

    def end(self) -> None:
        """Releases the directory, so that others may clean up there. Idempotent."""
        self._end_turns()
        self._destination.end()

    def _publish(self, report: SaveReport) -> None:
        self._context.reports.publish(report)
        self._destination.follow(report)

    def _end_turns(self) -> None:
        if self._turns is not None:
            self._turns.end()

    def _write(self, plan: SavePlan, planner: SavePlanner) -> tuple[list[Item], WriteDone, list[WriteResult]]:
        if self._kept is not None and not self._context.closed:
            self._kept.keep(self._tables.told(plan), planner, self._destination.rank)
        omitted = frozenset() if self._staged_save is None else self._staged_save.omitted
        items = resolve(plan, planner, self._is_staged, omitted)
        written = self._destination.write(self.id, items)
        try:
            self._tell_digests(items, written)
            cipher = self._context.options.write.cipher
            results = write_results(items, written, self._destination.rank, planner, cipher, self._compare)
            if not self._destination.commits:
                results = [replace(r, storage_data=self._tables.shortened(r.storage_data, plan)) for r in results]
            self._destination.wrote(written)
        except BaseException:
            self._destination.remove([file.name for file in written.files])
            raise
        return items, written, results

    def _tell_digests(self, items: list[Item], written: WriteDone) -> None:
        """Passes the digests to the object that keeps the staged state, which then need not take them."""
        save = self._staged_save
        if save is None or save.on_written is None or save.buffer is None:
            return
        known = dict[tuple[int, int], bytes]()
        if self._context.options.write.cipher is None:
            stored = written.places()
            for item in items:
                if item.has_bytes and (offset := save.buffer.locate(item.tensor)) is not None:
                    known[offset, item.tensor.nbytes] = stored[item.name][0].digests
        save.on_written(known)

    def _is_staged(self, tensor: torch.Tensor) -> bool:
        buffer = None if self._staged_save is None else self._staged_save.buffer
        return buffer is not None and buffer.locate(tensor) is not None

    def _commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> set[str]:
        """Makes the save the checkpoint at its path; returns the files of the one that it replaces."""
        parts = self._tables.completed([result.storage_data for of_rank in results for result in of_rank])
        try:
            self._begin_commit(metadata)
        except CheckpointError:  # nothing has been committed or will be
            self._destination.remove([name for part in parts for name, _ in part.files])
            raise
        replaced = self._destination.commit(metadata, parts)
        if self._record is not None:
            warn_if_stale(self.path, self._record.step, [part.unchanged for part in parts])
        return replaced

    def _begin_commit(self, metadata: Metadata) -> None:
        """Checks that the save may be committed, and completes DCP's metadata; raises `WriteError`."""
        self._destination.check_wanted()
        _check_trainer_lives(self.path)
        # DCP returns this object of the planner to the caller, with the same fields as torch's writer sets.
        metadata.version = DCP_VERSION
        metadata.storage_meta = self._destination.meta(checkpoint_id=self.path, save_id=self.id)

    def _compare(self, places: Mapping[ItemKey, StoredItem]) -> tuple[str, ...] | None:
        return None if self._record is None else self._context.freshness.compare(self._record.step, places)

    @contextmanager
    def or_fail(self) -> Iterator[None]:
        """Makes the save fail with any error inside."""
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
    """Raises if the trainer has died: in PROCESS mode its save must not be committed late."""
    trainer = multiprocessing.parent_process()
    if trainer is not None and multiprocessing.current_process().daemon and not trainer.is_alive():
        raise WriteError(f"the trainer (pid {trainer.pid}) is gone: its save to {path} is not committed")
