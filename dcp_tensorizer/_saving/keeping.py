"""Keeping states in memory while they are saved, for processes that are started again before the save is committed.

stage() ──▶ forgets the states whose saves are over: their buffers are free
write() ──▶ tells the keeper what is where in the buffer, and then writes it

All ranks keep the state of a save, or none of them uses it: the coordinator gives it its id.
"""

from __future__ import annotations

import logging
import pickle
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import NamedTuple

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from .._forks import in_child
from .._memory.garbage import collector_paused
from .._memory.memory_limit import available_memory
from .._memory.shared_buffer import SharedBuffer
from .._memory.tensor_bytes import host_bytes
from .._staging.staged_saves import StagedSaves
from .._staging.stager import StagedSave
from .._storage.base import Storage
from .._survival.keeper_process import KeeperDied, KeeperProcess
from .._survival.kept_state import KeptItem
from .._survival.messages import Extent, Keep, KeptHead
from .._survival.orphans import Orphan, committed_id
from .._survival.runtime_directory import identity, job_name, location_of, runtime_directory
from .._threads import NEVER, Deadline
from ..errors import describe
from .write_items import resolve

__all__ = ["KeptSave", "KeptState", "Keeping", "described", "keeping_of_process", "lack_of_room"]

logger = logging.getLogger("dcp_tensorizer")

_ROOM = 1.05  # of a buffer: what is allocated beside it
_EXIT_SECONDS = 5.0


class KeptState(NamedTuple):
    """What the coordinator tells all ranks of the state that their save keeps.

    Attributes:
        id, number, world_size, replaces: As in `KeptHead`.
    """

    id: str
    number: int
    world_size: int
    replaces: str | None


class KeptSave:
    """What is kept of one save, as one rank sees it.

    Args:
        where: The save's path.
        seconds: How long it is kept when this process is gone.
        staged_save: What is saved.
    """

    def __init__(self, where: str | Path, seconds: float, staged_save: StagedSave) -> None:
        self._folder, self._path = location_of(where)
        self._seconds = seconds
        self._staged_save = staged_save
        self._plan: SavePlan | None = None
        self._state: KeptState | None = None

    def planned(self, plan: SavePlan) -> None:
        """Takes what this rank could write: also what another one will."""
        self._plan = plan

    def begin(self, storage: Storage, save_id: str, world_size: int) -> KeptState:
        """On the coordinator: what all ranks are told."""
        self._state = KeptState(save_id, time.time_ns(), world_size, committed_id(storage))
        return self._state

    def keep(self, told: KeptState | None, planner: SavePlanner, rank: int) -> None:
        """Has the state kept until the save is over. If that cannot be, the log says so, and the save goes on.

        Args:
            told: By the coordinator; None on itself, and where the planner has lost it.
            planner: Gives the data.
            rank: This one.
        """
        state, plan, buffer = self._state or told, self._plan, self._staged_save.buffer
        if plan is None or buffer is None:
            return
        if state is None or not plan.usable:
            logger.warning(
                "%s: the state is not kept in memory, because %s plans repeated saves in a way of its own: use "
                "dcp_tensorizer.SavePlanner, or no plan caching",
                self._path,
                type(planner).__name__,
            )
            return
        keeping = keeping_of_process()
        where = state.world_size, None, None, identity(self._folder), self._path, state.replaces
        head = KeptHead(state.id, state.number, keeping.run, rank, *where)
        keeping.keep(head, plan, planner, self._staged_save, self._folder, self._seconds)


class _Kept(NamedTuple):
    """A state that is kept."""

    id: str
    folder: str
    staged_save: StagedSave
    buffer: SharedBuffer


class Keeping:
    """The states that the saves of this process keep, each until its save is over.

    There is a keeper for each folder, started when the first state is to be kept.

    Attributes:
        run: This process, as the run of a job.
    """

    def __init__(self) -> None:
        self.run = uuid.uuid4().hex
        self._keepers: dict[str, KeeperProcess] = {}
        self._kept: list[_Kept] = []
        self._orphans: list[Orphan] = []
        self._is_off = self._ends_at_exit = False
        self._starting = threading.RLock()
        in_child(self, Keeping._let_go)

    def _let_go(self) -> None:
        """In a forked child: all of it is its parent's."""
        self.run, self._starting = uuid.uuid4().hex, threading.RLock()
        self._keepers, self._kept, self._orphans = {}, [], []
        self._ends_at_exit = False

    def keep(
        self,
        head: KeptHead,
        plan: SavePlan,
        planner: SavePlanner,
        staged_save: StagedSave,
        folder: str,
        seconds: float,
    ) -> None:
        """Has a state kept until its save is over. It never raises: without it a save is what it always was."""
        buffer = staged_save.buffer
        if self._is_off or buffer is None:
            return
        buffer.is_kept = True
        try:
            self._keeper(folder, seconds).keep(described(head, plan, planner, buffer), buffer)
        except KeeperDied as error:
            buffer.is_kept = False
            self._turn_off(error)
        except Exception as error:
            buffer.is_kept = False
            logger.warning("%s: the state is not kept in memory: %s", head.path, describe(error))
        else:
            self._kept.append(_Kept(head.id, folder, staged_save, buffer))

    def begin_staging(self, saves: StagedSaves) -> None:
        """Forgets the states whose saves are over, and what was loaded from memory when all ranks have saved since."""
        over = [kept for kept in list(self._kept) if kept.staged_save.over()]
        if over:
            self._forget(over)
            self._end_orphans()
        elif self._orphans:
            saves.reclaim()
            if why := lack_of_room(saves, max(orphan.nbytes for orphan in self._orphans)):
                logger.warning("what was loaded from memory is given back: %s", why)
                self._end_orphans()

    def adopt(self, orphan: Orphan) -> None:
        """Keeps what was loaded from memory there, until this process has saved."""
        self._orphans.append(orphan)

    def end(self, deadline: Deadline = NEVER, *, is_abandoned: bool = False) -> None:
        """Ends the keepers, and gives their memory back. Idempotent.

        Args:
            deadline: Of the waiting for them.
            is_abandoned: A save was not over. Then they are left to a later run.
        """
        keepers, self._keepers = self._keepers, {}
        for keeper in keepers.values():
            if is_abandoned:
                keeper.leave()
            else:
                keeper.end(deadline)
        kept, self._kept = self._kept, []
        for state in kept:
            state.buffer.is_kept = is_abandoned
        orphans, self._orphans = self._orphans, []
        for orphan in orphans:  # nothing of this process has replaced them
            for visit in orphan.visits:
                visit.close()
        self._is_off = False

    def _keeper(self, folder: str, seconds: float) -> KeeperProcess:
        with self._starting:
            keeper = self._keepers.get(folder)
            if keeper is None:
                keeper = KeeperProcess(runtime_directory(), job_name(folder), self.run, seconds)
                self._keepers[folder] = keeper
            if not self._ends_at_exit:
                self._ends_at_exit = True
                Finalize(None, self._exit, exitpriority=0)  # `atexit` is not called where multiprocessing ends
            return keeper

    def _exit(self) -> None:
        """At the process's end. What is left to a later run: states of a save that is not over, or of an error."""
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        is_well = error is None or (isinstance(error, SystemExit) and not error.code)
        if is_well and all(kept.staged_save.over() for kept in self._kept):
            self.end(Deadline(_EXIT_SECONDS))

    def _forget(self, over: Sequence[_Kept]) -> None:
        self._kept = [kept for kept in self._kept if kept not in over]
        for folder in {kept.folder for kept in over}:
            try:
                if (keeper := self._keepers.get(folder)) is not None:
                    keeper.forget_all_but([kept.id for kept in self._kept if kept.folder == folder])
            except KeeperDied as error:
                self._turn_off(error)
        for kept in over:
            kept.buffer.is_kept = False

    def _turn_off(self, error: KeeperDied) -> None:
        """Keeps no more, until a writer begins anew."""
        logger.warning("states are kept in memory no more, and survive= is off: %s", str(error))
        keepers, self._keepers = self._keepers, {}
        for keeper in keepers.values():
            keeper.kill()  # it may have got a state that it did not answer for, and that is overwritten soon
            keeper.end()
        kept, self._kept = self._kept, []
        for state in kept:
            state.buffer.is_kept = False
        self._is_off = True

    def _end_orphans(self) -> None:
        orphans, self._orphans = self._orphans, []
        for visit in {visit for orphan in orphans for visit in orphan.visits}:
            visit.end()


_keeping = Keeping()


def keeping_of_process() -> Keeping:
    """The one of this process, for all of its writers."""
    return _keeping


def lack_of_room(saves: StagedSaves, nbytes: int) -> str:
    """Why another staging buffer of a size does not fit beside what is kept; empty if it does."""
    if saves.has_buffer(nbytes):
        return ""
    available = available_memory()
    if available is None or available > _ROOM * nbytes:
        return ""
    return f"another staging buffer takes {nbytes:,} bytes, and {available:,} bytes of memory are available"


@collector_paused()
def described(head: KeptHead, plan: SavePlan, planner: SavePlanner, buffer: SharedBuffer) -> Keep:
    """What a keeper is told of a staged state dict.

    Args:
        head: What it is.
        plan: What this rank could write of it, by itself.
        planner: Gives the data.
        buffer: What it is in.

    Raises:
        CheckpointError: an item cannot be saved; names its key.
    """
    wanted = SavePlan(list(plan.items))
    items, extents, inline = [], list[Extent](), bytearray()
    resolved = resolve(wanted, planner, lambda tensor: buffer.locate(tensor) is not None)
    for planned, item in zip(wanted.items, resolved, strict=True):
        number = None
        if item.has_bytes:
            number, offset = len(extents), buffer.locate(item.tensor)
            extents.append(Extent(offset is None, len(inline) if offset is None else offset, item.tensor.nbytes))
            if offset is None:
                inline += host_bytes(item.tensor)
        items.append(KeptItem(planned, item.name, item.kind, item.dtype, number))
    description = pickle.dumps(items, protocol=pickle.HIGHEST_PROTOCOL)
    return Keep(head, buffer.nbytes, tuple(extents), description, bytes(inline))
