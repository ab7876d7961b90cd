"""Keeps states in memory while they are saved, for jobs that are restarted before the save is committed.

stage() ──▶ forgets the states whose saves are over: their buffers are free
write() ──▶ tells the keeper what is where in the buffer, writes it, and sends the digests of what was written
close() ──▶ ends the keeper, unless a state that it keeps is not on storage

The coordinator chooses the id of the state and sends it with the plans, so that it is the same on all ranks.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import NamedTuple

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from .._memory.checkpoint import description_of, kept_place
from .._memory.client import KeeperDied, KeeperProcess
from .._memory.find import committed_id, loaded
from .._memory.peers import Peer, Room, this_host
from .._memory.peers import lack_of_room as lack_of_room_for_replicas
from .._memory.protocol import Extent, Keep, KeptHead
from .._memory.replicas import RESERVE
from .._memory.runtime_directory import SAVES, identity, job_name, location_of
from .._memory.wire import Address
from .._runtime.forks import free_in_child
from .._runtime.gc_pause import collector_paused
from .._runtime.memory_limit import available_memory
from .._runtime.threads import NEVER, Deadline, in_background
from .._staging.buffer_pool import StagedSaves
from .._staging.shared_memory import SharedBuffer
from .._staging.staged_save import StagedSave
from .._storage.base import Storage
from .._tensor_file.dtypes import host_bytes
from .._writer_process.options import CopyOptions, SaveOptions
from ..errors import CheckpointError, WriteError, describe
from .partners import arrange, introduce
from .write_plan import resolve

logger = logging.getLogger("dcp_tensorizer")

_ROOM = 1.05  # of a buffer: what is allocated beside it
_EXIT_SECONDS = 5.0


class KeptState(NamedTuple):
    """The facts about the state of a save that the coordinator sends to all ranks; see `KeptHead`."""

    id: str
    number: int
    world_size: int
    replaces: str | None
    has_saved: bool
    """A save has been committed since the job loaded from memory: that memory is no longer needed."""
    partner: Address | None = None
    """The keeper on another host that this rank's part is copied to, if there is one."""
    rate: float = 0.0
    """Bytes a second of that copy; 0 for any number."""
    towards: str = ""
    """The address of another host, for a rank that knows none of its own by which others reach it."""


class KeepingRank(NamedTuple):
    """The facts about a rank that the coordinator needs for copies on other hosts."""

    peer: Peer
    room: Room


class KeptSave:
    """One save whose state is kept in memory, on one rank.

    The state is kept for ``seconds`` after the end of this process.
    """

    def __init__(
        self,
        keeping: Keeping,
        where: str | Path,
        storage: Storage,
        options: SaveOptions,
        staged_save: StagedSave,
    ) -> None:
        self._keeping = keeping
        self._path = location_of(where)
        self._storage = storage
        self._seconds, self._copies, self._timeout = options.survive, options.copies, options.limits.timeout
        self._staged_save = staged_save
        self._plan: SavePlan | None = None
        self._state: KeptState | None = None
        self._rank: KeepingRank | None = None

    def planned(self, plan: SavePlan) -> KeepingRank | None:
        """Takes the plan of this rank, with the items that another one will write.

        Returns what the coordinator needs for copies on other hosts; None without them.
        """
        self._plan = plan
        if self._copies.copies < 2 or self._staged_save.buffer is None:
            return None
        self._rank = self._keeping.copies.introduced(
            self._copies, self._seconds, self._timeout, self._staged_save.buffer.nbytes
        )
        return self._rank

    def begin(self, save_id: str, ranks: Sequence[KeepingRank | None], own: int) -> list[KeptState]:
        """Returns the coordinator's message to each rank. The coordinator is rank ``own``, and has not introduced
        itself.
        """
        replaces = committed_id(self._storage)
        number = max(time.time_ns(), loaded.last_number + 1)  # the clock may have been set back since
        state = KeptState(save_id, number, len(ranks), replaces, loaded.is_replaced)
        states = [state] * len(ranks)
        if self._copies.copies > 1:
            all_ranks = [self._rank if number == own else rank for number, rank in enumerate(ranks)]
            states = self._keeping.copies.arranged(self._copies, state, all_ranks)
        self._state = states[own]
        return states

    def keep(self, told: KeptState | None, planner: SavePlanner, rank: int) -> None:
        """Gives the state to the keeper until the save is over. If that fails, it is logged, and the save goes on.

        ``told`` has the facts from the coordinator. It is None on the coordinator, and where the planner has lost it.
        """
        state, buffer = self._state or told, self._staged_save.buffer
        plan, self._plan = self._plan, None  # this object lives until the next state is staged
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
        if state.has_saved:
            loaded.release()
        head = KeptHead(
            id=state.id,
            number=state.number,
            job=self._keeping.run,
            rank=rank,
            world_size=state.world_size,
            record=None,
            folder=identity(Path(self._path).parent),
            path=self._path,
            replaces=state.replaces,
            host=this_host(),
        )
        self._state = state
        self._keeping.saves[state.id] = self
        try:
            keeper = self._keeping.keeper(self._seconds, self._timeout)
            keeper.keep(described(head, plan, planner, buffer, self._seconds, digests_follow=True), buffer)
            self._staged_save.on_written = functools.partial(keeper.written, state.id)
            self._keeping.copies.start(keeper, state)
        except KeeperDied:
            self._keeping.log_loss()
        except Exception as error:
            logger.warning("%s: the state is not kept in memory: %s", self._path, describe(error))

    def committed(self) -> None:
        """Notes on the coordinator that a save is committed."""
        loaded.is_replaced = True

    @property
    def is_over(self) -> bool:
        """Returns whether the save has ended."""
        return self._staged_save.over()

    @property
    def is_on_storage(self) -> bool:
        """Returns whether the save is committed, by a look at storage."""
        return self._state is not None and committed_id(self._storage) == self._state.id


class Keeping:
    """The states that the saves of a process keep, each until its save is over, and the keeper of all of them.

    Attributes:
        run: Identifies this process, as the run of a job.
        copies: Those on other hosts.
        saves: By the ids of their states. Several threads change it, without a lock: a thread could die with it.
    """

    def __init__(self) -> None:
        self.run = uuid.uuid4().hex
        self.saves: dict[str, KeptSave] = {}
        self.copies = SaveCopies(self)
        self._keeper: KeeperProcess | None = None
        self._ends_at_exit = False
        self._starting = free_in_child(threading.Lock())

    def keeper(self, seconds: float, timeout: float) -> KeeperProcess:
        """Returns the keeper, and starts it if there is none; raises `WriteError`. The arguments are its own."""
        with self._starting:
            self.log_loss()
            if self._keeper is None or not self._keeper.is_ours:
                self._keeper = KeeperProcess(job_name(SAVES), self.run, seconds, timeout)
            if not self._ends_at_exit:
                self._ends_at_exit = True
                # Processes that multiprocessing started do not run `atexit`.
                Finalize(None, lambda: self.end(Deadline(_EXIT_SECONDS)), exitpriority=0)
            return self._keeper

    def begin_staging(self, saves: StagedSaves) -> None:
        """Forgets the states whose saves are over; and what was loaded from memory, if memory is short."""
        over = [state_id for state_id, save in list(self.saves.items()) if save.is_over]
        for state_id in over:
            self.saves.pop(state_id, None)
        if self._keeper is not None:
            with suppress(Exception):  # the next save starts another keeper; an error would fail this rank alone
                self._keeper.forget(over)
        self.log_loss()
        if loaded.nbytes:
            saves.reclaim()
            if why := lack_of_room(saves, loaded.nbytes):
                logger.warning("what was loaded from memory is freed: %s", why)
                loaded.release()

    def log_loss(self) -> None:
        """Says once that the keeper was lost, whichever thread has met its death."""
        if (keeper := self._keeper) is not None and keeper.loss:
            self._keeper = None
            logger.warning("what was kept in memory is lost: %s", keeper.loss)

    def end(self, deadline: Deadline = NEVER, *, is_abandoned: bool = False) -> None:
        """Ends the keeper, or leaves it to a later run if it has a state that is not on storage. Idempotent.

        With ``is_abandoned`` a save was not over: the keeper is left without a look at storage.
        """
        keeper, self._keeper = self._keeper, None
        saves, self.saves = self.saves, {}
        if keeper is None:
            return
        kept = [save for state_id, save in saves.items() if state_id in keeper.kept]
        if is_abandoned or not _are_on_storage(kept, deadline):
            keeper.leave(deadline)
            return
        keeper.end(deadline)
        if kept:
            loaded.release()


class SaveCopies:
    """The copies of a process's states on other hosts, each until the next save: what is on storage needs none."""

    def __init__(self, keeping: Keeping) -> None:
        self._keeping = keeping
        self._towards = ""
        self._has_looked_again = False
        self._fitting: list[int] = []  # the sizes for which there was room, on the coordinator
        self._said: set[str] = set()

    def introduced(self, options: CopyOptions, seconds: float, timeout: float, nbytes: int) -> KeepingRank:
        """Returns this rank's introduction; ``nbytes`` is the size of its state."""
        keeper: KeeperProcess | None = None
        try:
            keeper = self._keeping.keeper(seconds, timeout)
        except CheckpointError as error:
            self._warn(str(error))
        return KeepingRank(introduce(options, keeper, self._towards), Room(nbytes, 0, available_memory()))

    def arranged(self, options: CopyOptions, state: KeptState, ranks: Sequence[KeepingRank | None]) -> list[KeptState]:
        """Returns the coordinator's message to each rank."""
        known = [rank for rank in ranks if rank is not None]
        if len(known) < len(ranks):
            self._warn("not all ranks have copies=2, or plans are cached by torch")
            return [state] * len(ranks)
        found, sizes = arrange([rank.peer for rank in known], options), [rank.room.nbytes for rank in known]
        if not found.why and sizes != self._fitting:  # afterwards replicas have the memory
            rooms = [rank.room for rank in known]
            found = found._replace(why=lack_of_room_for_replicas(found.peers, found.partner_of, rooms, RESERVE, 1))
            self._fitting = [] if found.why else sizes
        towards = [found.towards(rank) for rank in range(len(ranks))]
        if found.why and (self._has_looked_again or not any(towards)):
            self._warn(found.why)
        self._has_looked_again = any(towards)  # with the addresses of others, in the next save
        return [
            state._replace(partner=found.partner(rank), rate=found.rate(rank, options), towards=towards[rank])
            for rank in range(len(ranks))
        ]

    def start(self, keeper: KeeperProcess, state: KeptState) -> None:
        """Lets the keeper begin to copy a state that it keeps, if it has a partner; logs how the last copy ended."""
        self._towards = state.towards or self._towards
        if state.partner is None:
            return
        status = keeper.copy_status()
        if status.problem and not status.is_given_up:  # as when its save was over
            self._warn(status.problem)
        try:
            keeper.copy(state.id, state.partner, state.rate, keep="")
        except WriteError as error:
            logger.info("a state is not copied to another host: %s", str(error))

    def _warn(self, why: str) -> None:
        """Warns once of each reason."""
        if why not in self._said:
            self._said.add(why)
            logger.warning("states are not copied to other hosts, as with copies=1: %s", why)


def _are_on_storage(saves: Sequence[KeptSave], deadline: Deadline) -> bool:
    """Returns whether all saves are on storage; False if that is not known in time."""
    if not saves:
        return True

    def look() -> bool:
        return all(save.is_on_storage for save in saves)

    try:
        looking = in_background(look, name="look", daemon=True)
    except RuntimeError:  # the interpreter ends, and starts no threads any more
        return look()
    try:
        return looking.result(deadline.left)
    except Exception:
        return False


def lack_of_room(saves: StagedSaves, nbytes: int) -> str:
    """Says why another staging buffer of this size does not fit into memory; empty if it does."""
    if saves.has_buffer(nbytes):
        return ""
    available = available_memory()
    if available is None or available > _ROOM * nbytes:
        return ""
    return f"another staging buffer takes {nbytes:,} bytes, and {available:,} bytes of memory are available"


@collector_paused()
def described(
    head: KeptHead,
    plan: SavePlan,
    planner: SavePlanner,
    buffer: SharedBuffer,
    seconds: float,
    *,
    digests_follow: bool = False,
) -> Keep:
    """Describes a staged state dict for a keeper; ``plan`` has all items that this rank could write.

    Raises `CheckpointError`, naming the key, if an item cannot be saved.
    """
    wanted = SavePlan(list(plan.items))
    items, extents, inline = [], list[Extent](), bytearray()
    resolved = resolve(wanted, planner, lambda tensor: buffer.locate(tensor) is not None)
    for planned, item in zip(wanted.items, resolved, strict=True):
        extent = None
        if item.has_bytes:
            offset = buffer.locate(item.tensor)
            extent = Extent(offset is None, len(inline) if offset is None else offset, item.tensor.nbytes)
            extents.append(extent)
            if offset is None:
                inline += host_bytes(item.tensor)
        items.append((planned, kept_place(head, item.name, item.kind, item.dtype, extent)))
    description = description_of(head, items, plan.planner_data, buffer.nbytes, len(inline))
    return Keep(head, buffer.nbytes, tuple(extents), description, bytes(inline), seconds, digests_follow)
