"""Restarts from memory: keeper processes outlive the trainers, and hold their newest states for a later run.

A newer state replaces an older one only when all ranks hold the newer one. So whenever a rank dies, all ranks have at
least one state in common.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import socket
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from itertools import chain
from typing import TYPE_CHECKING

from .._index.schema import SaveRecord
from .._runtime.forks import Descriptor
from .._runtime.memory_limit import available_memory
from .._runtime.threads import NEVER, Deadline, in_background
from .._saving.saver import Saver
from .._staging.shared_memory import SharedBuffer
from .._staging.staged_save import StagedStateDict
from .._storage.base import Storage
from ..errors import ReadError, WriteError, describe
from ..planner import SavePlanner
from .checkpoint import StateCheckpoint, state_part
from .client import KeeperConnection, KeeperProcess, connect_to_keepers
from .copies import CopyOptions, MemoryVote, PeerCopies, this_host
from .protocol import Found, StateHead, StatePart
from .replicas import RESERVE, RemotePart
from .runtime_directory import identity, job_name
from .wire import Address

if TYPE_CHECKING:
    from .._job.ranks import Agreement
    from .._job.steps import Position, Step

logger = logging.getLogger("dcp_tensorizer")

_DEATH_SECONDS = 5.0  # a keeper notices within this time that its trainer is gone
_CLAIM_SECONDS = 0.05  # the pause between two claims
_ANSWER_SECONDS = 30.0  # then the run of a keeper that does not answer counts as alive, and this run is refused

OnStaged = Callable[[StagedStateDict], object]


class _Stage(enum.Enum):
    READY = enum.auto()
    """Before the search for states of earlier runs."""
    ON = enum.auto()
    ENDING = enum.auto()
    """This rank has stopped holding states, and reports it to the other ranks at the next step."""
    OFF = enum.auto()
    """No rank holds states."""


class Survival:
    """A rank's states in memory, and the states that earlier runs left. Does nothing without ``survive``.

    Args:
        template: The template of the names of steps' directories.
        seconds: How long keepers hold states when this process is gone; 0: no states are held.
        buffers: Maximum number of staging buffers, without the extra one for copies.

    Attributes:
        run: The id of this run of the job, the same on all ranks; empty without ``survive``.
        holds: Whether states that no save writes may be held.
        has_left: Whether the states have been left to a later run.
    """

    def __init__(
        self,
        saver: Saver,
        folder: Storage,
        template: str,
        agreement: Agreement,
        *,
        seconds: float,
        buffers: int,
        copies: int,
        copy_options: CopyOptions,
    ) -> None:
        self.run = agreement.decided(lambda: uuid.uuid4().hex) if seconds else ""
        # With staging="device" the writer process copies the state, and it cannot copy while it writes.
        self.holds = bool(seconds) and buffers > 2 and saver.options.staging != "device"
        self._saver = saver
        self._folder = folder
        self._template = template
        self._agreement = agreement
        self._seconds = seconds
        self._buffers = buffers
        self.copies = PeerCopies(agreement, copies, copy_options)
        self.has_left = False
        self._stage = _Stage.READY if seconds else _Stage.OFF
        self._keeper: KeeperProcess | None = None
        self._has_partners = False
        self.predecessors = Predecessors()
        self._holding: Future[None] | None = None
        self._count = 0
        self._newest: str | None = None  # the last state, until all ranks have reported whether they hold it
        self._written = ""  # the last state that a save writes

    # --- holding states ---------------------------------------------------------------------------------------------

    def find_predecessors(self) -> None:
        """Finds the keepers of earlier runs on this host, and claims them, on the first call. Collective.

        Raises `WriteError`, on all ranks, if another run of the job is alive or a rank is gone.
        """
        if self._stage is not _Stage.READY:
            return
        found, silent = connect_to_keepers(self._job_name, _ANSWER_SECONDS)
        for keeper in found:
            if keeper.found.job == self.run:  # the keeper of another rank of this run
                keeper.close()
        self.predecessors = Predecessors([keeper for keeper in found if keeper.found.job != self.run])
        if silent:
            refusal = (
                f"a run of this job counts as alive, because its keeper on {socket.gethostname()} does not answer at "
                f"{silent[0]}. Kill the processes of that run, among them its keeper, whose command line has that "
                f"path, and start again. If that run is only suspended, you can resume it instead."
            )
        else:
            refusal = self.predecessors.claim(self.run)
        if problem := next(filter(None, self._agreement.gathered(refusal)), ""):
            self.predecessors.close()
            raise WriteError(f"{self._folder.path}: {problem}")
        self._stage = _Stage.ON

    @property
    def _job_name(self) -> str:
        return job_name(f"{self._folder.real_path} {self._template}")

    def start_keeper(self) -> None:
        """Starts the keeper, on the first call after `find_predecessors`.

        The start uses a core for a fifth of a second, so it follows a restore, which needs the core.
        """
        if self._stage is not _Stage.ON or self._keeper is not None:
            return
        try:
            timeout = self._saver.options.limits.timeout
            self._keeper = KeeperProcess(self._job_name, self.run, self._seconds, timeout)
        except WriteError as error:
            self._stop_holding(str(error))

    def find_partners(self) -> None:
        """Finds the partners of all ranks, on the first call. Collective; call it after `start_keeper`.

        With copies, waits until the keeper has started. Raises `WriteError` if a rank is gone.
        """
        if self._has_partners:
            return
        self.copies.find_partners(self._keeper)
        self._has_partners = True
        if self._stage is _Stage.ON:
            self._saver.engine.saves.spares[self] = self._most_buffers - 1

    def wait_held(self) -> None:
        """Waits until the newest state is held, or holding it has failed.

        Stops holding states if the keeper has ended, or if too little memory is available for the next state. In the
        second case, if this run holds no state yet, frees the states of earlier runs instead.
        """
        holding, self._holding = self._holding, None
        error = None if holding is None else holding.exception()
        if self._stage is _Stage.ON and self._keeper is not None and not self._keeper.is_ours:
            self._stop_holding("the keeper has ended" if error is None else describe(error))
        elif error is not None:
            logger.warning("a state is not held in memory: %s", describe(error))
        if self._stage is _Stage.ON:
            self._check_memory()

    def vote(self) -> MemoryVote:
        """Waits until the newest state is held. Returns this rank's vote about states in memory."""
        self.wait_held()
        has_failed = self._newest is not None and self._newest not in self._held
        about_copies = self.copies.vote(self._keeper if self._stage is _Stage.ON else None)
        return about_copies._replace(has_failed=has_failed, ends=self._stage is _Stage.ENDING)

    def advance(self, vote: MemoryVote, *, is_busy: bool) -> None:
        """Forgets the states that are no longer needed after a vote.

        ``vote`` is the joint vote of all ranks. ``is_busy``: on this rank, the last save still runs.

        The last state that was copied from all ranks stays until a newer one is copied: if a host is lost, the other
        ranks need their own parts of the copied state. A state that is being copied stays until saves need its buffer.
        """
        if self._stage is _Stage.OFF:
            return
        newest, self._newest = self._newest, None
        was_on = self.copies.is_on
        self.copies.advance(vote)
        if was_on and not self.copies.is_on:
            self.copies.forget(self._keeper)
        if vote.ends:
            self._stop_holding("another rank has stopped holding them")
            self._stage, self.holds = _Stage.OFF, False
            self.end()
            return
        if newest is None:
            return
        if vote.has_failed:
            self._forget_all_but([number for number in self._held if number != newest])
            return
        # All ranks have the newest state.
        confirmed = self.copies.confirmed
        nbytes = self._held[newest].nbytes if newest in self._held else 0
        staying = {newest, confirmed, self.copies.ordered} & self._held.keys()
        in_use = {*staying, *([self._written] if is_busy else [])}
        self._forget_all_but([newest, confirmed], but_copied=len(in_use) < self._most_buffers)
        if self.copies.is_on and len(self._held) > 1 and (why := self._lack_of_memory(nbytes)):
            self.copies.problem = why
            self._forget_all_but([newest])
        asks_again = self.copies.check_memory(nbytes, max(0, self._most_buffers - len(in_use)))
        if asks_again or not self.copies.is_on or self.copies.confirmed:
            self.predecessors.end()

    @property
    def _most_buffers(self) -> int:
        return self._buffers + self.copies.is_on

    def next_state(self, record: SaveRecord, position: Position) -> OnStaged | None:
        """Returns a function that makes the keeper hold the next staged state, or None if no rank holds states.

        ``record`` is the record that an index of this state gets, and ``position`` is the position of the job.
        """
        if self._stage is _Stage.OFF:  # unlike ENDING, this is the same on all ranks
            return None
        self._count += 1
        number = self._newest = hashlib.blake2b(f"{self.run} {self._count}".encode(), digest_size=16).hexdigest()
        head = StateHead(
            id=number,
            number=self._count,
            job=self.run,
            rank=self._agreement.rank,
            world_size=self._agreement.size,
            record=record,
            parent_step=None if position.tip is None else position.tip.number,
            left=(position.left.save_id or None) if position.left else None,
            folder=identity(self._folder.location),
            host=this_host(),
            line=position.line,
        )
        self.copies.order(number)

        def hold(staged: StagedStateDict) -> None:
            if not staged.staged_save.abandoned:  # a save writes this state
                self._written = number
                if self._keeper is not None:
                    staged.staged_save.on_written = functools.partial(self._keeper.written, number)
            self._holding = in_background(functools.partial(self._hold, head, staged), name="hold")

        return hold

    def newest_state(
        self, tip: Step | None, ids: Collection[str], lost: Collection[str]
    ) -> tuple[StateHead, AllMemory] | None:
        """Finds the newest state of an earlier run that all ranks can load, unless it is outdated.

        Collective; the result is the same on all ranks. ``tip`` is the newest checkpoint on storage, ``ids`` are the
        ids of all checkpoints, and ``lost`` those of saves that were lost with a node before they reached storage.
        """
        if self._stage is _Stage.OFF:
            return None
        there = identity(self._folder.location)
        offers = self._agreement.gathered((self.predecessors.found, there, this_host()))
        memory = AllMemory([keepers for keepers, _, _ in offers])
        reached = memory.states()
        if not reached:
            if memory.parts:
                logger.warning(
                    "%s: no state in memory can be loaded by all ranks, perhaps because a machine was replaced%s. This "
                    "run resumes from the newest checkpoint on storage, if there is one",
                    self._folder.path,
                    memory.parts_of_newest(),
                )
            return None
        head = max(reached, key=_order)
        own = [  # only the host that held a part first can compare the folder of the part with its own
            (part.folder, folder)
            for keepers, folder, host in offers
            for keeper in keepers
            for part in keeper.heads
            if part.id == head.id and part.host in ("", host)
        ]
        if own:
            is_same = all(then in (None, now) for then, now in own)
        else:  # these hosts are gone. Other hosts have other device numbers, but the same inode number.
            is_same = head.folder is not None and there is not None and head.folder[1] == there[1]
        refusal = functools.partial(outdated, head, tip, head.folder if is_same else None, ids, lost)
        if words := self._agreement.decided(refusal):
            logger.warning("%s: the state of step %d in memory is not used: %s", self._folder.path, head.step, words)
            return None
        return head, memory

    def forget(self) -> None:
        """Forgets all states of this run. Call it before a restore, and when the job goes back to an earlier step."""
        self.wait_held()
        self._newest = None
        self._forget_all_but([])
        self.copies.forget(self._keeper)

    def end(self, deadline: Deadline = NEVER, *, has_saved: bool = False) -> None:
        """Ends the keeper, and frees its states. Idempotent.

        ``has_saved``: the newest step of this run is on storage. If True, also frees the states of earlier runs.
        """
        if self._holding is not None:
            wait_for([self._holding], deadline.left)
        if has_saved:
            self.predecessors.end()
        self.predecessors.close()
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.end(deadline)
        self._saver.engine.saves.spares.pop(self, None)

    def leave(self, deadline: Deadline = NEVER) -> None:
        """Leaves the states to a later run, because this run has failed. Idempotent."""
        if self._holding is not None:
            wait_for([self._holding], deadline.left)
        self.has_left = True
        self.predecessors.close()
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.leave(deadline)

    @property
    def _held(self) -> dict[str, SharedBuffer]:
        return {} if self._keeper is None else self._keeper.held

    def _hold(self, head: StateHead, staged: StagedStateDict) -> None:
        staged_save = staged.staged_save
        try:
            staged_save.wait_copied()
            buffer = staged_save.buffer
            assert buffer is not None and self._keeper is not None
            self._keeper.hold(state_part(head, staged, SavePlanner(enable_plan_caching=False)), buffer)
        except BaseException:
            if staged_save.buffer is not None:
                staged_save.buffer.is_kept = False
            raise
        if self.copies.ordered == head.id:  # unchanged until the next vote, which waits for this thread
            self.copies.start(self._keeper)

    def _check_memory(self) -> None:
        if len(self._held) > 1:  # the older state is about to be forgotten
            return
        nbytes = max([self.predecessors.nbytes, *(buffer.nbytes for buffer in self._held.values())])
        why = self._lack_of_memory(nbytes) if nbytes else ""
        if not why:
            return
        if self._held:
            self._stop_holding(why)
        else:
            logger.warning("the states of an earlier run are freed from memory: %s", why)
            self.predecessors.end()

    def _lack_of_memory(self, nbytes: int) -> str:
        """Returns why another staging buffer of this size does not fit into memory, or an empty string if it fits."""
        saves = self._saver.engine.saves
        saves.reclaim()  # a buffer of a finished save may fit
        available = None if saves.has_buffer(nbytes) else available_memory()
        if available is None or available >= nbytes + RESERVE:
            return ""
        return (
            f"another staging buffer takes {nbytes:,} bytes, {available:,} bytes of memory are available, and "
            f"{RESERVE:,} must remain"
        )

    def _stop_holding(self, why: str) -> None:
        """Stops holding states on this rank. The next vote reports it to the other ranks."""
        if self._stage is not _Stage.ENDING:
            self._stage = _Stage.ENDING
            logger.warning("states are not held in memory from now on, and survive=%g is off: %s", self._seconds, why)
        self._forget_all_but([])

    def _forget_all_but(self, staying: Sequence[str], *, but_copied: bool = False) -> None:
        forgotten = [state_id for state_id in self._held if state_id not in staying]
        try:
            if self._keeper is not None:
                self._keeper.forget(forgotten, but_copied=but_copied)
        except WriteError as error:
            self._stop_holding(str(error))


# --- the states of earlier runs ---------------------------------------------------------------------------------------


class Predecessors:
    """Keepers of earlier trainers on this machine.

    ``nbytes`` is the size of the last buffer that `open` opened, or 0 if it is on another machine, or none was opened.
    """

    def __init__(self, keepers: Sequence[KeeperConnection] = ()) -> None:
        self.nbytes = 0
        self._keepers = list(keepers)

    def claim(self, run: str) -> str:
        """Reserves the keepers for a run of the job.

        If a keeper refuses because another run is alive or is starting, returns the reason, and otherwise an empty
        string.
        """
        deadline = time.monotonic() + _DEATH_SECONDS
        for keeper in self._keepers:
            while True:
                try:
                    if keeper.claim(run):
                        break
                except ReadError:  # the keeper has just ended
                    break
                if time.monotonic() > deadline:
                    return (
                        f"another run of this job is alive (its trainer is process {keeper.found.trainer} on "
                        f"{socket.gethostname()}), or is starting. End the other run first."
                    )
                time.sleep(_CLAIM_SECONDS)
        return ""

    @property
    def found(self) -> list[Found]:
        return [keeper.found for keeper in self._keepers]

    def open(
        self,
        state_id: str,
        rank: int,
        path: str,
        elsewhere: Mapping[int, Sequence[Address]],
        damaged: Collection[tuple[int, str]],
    ) -> StateCheckpoint:
        """Opens a state as a checkpoint. If several ranks have the same item, ``rank`` gets its own.

        ``elsewhere`` has the addresses of keepers on all hosts, by the ranks of the parts that they hold. ``damaged``
        has the rank and the holder of each unusable part. Raises `ReadError` if no keeper sends one of the parts, or
        the parts form no checkpoint.
        """
        holders: dict[int, list[KeeperConnection | Address]] = {}
        for keeper in self._keepers:
            for head in keeper.found.heads:
                if head.id == state_id:
                    holders.setdefault(head.rank, []).append(keeper)
        here = {keeper.found.address for keeper in self._keepers}
        for other, addresses in elsewhere.items():
            holders.setdefault(other, []).extend(address for address in addresses if address not in here)
        parts: list[tuple[StatePart, Descriptor | RemotePart]] = []
        used: dict[int, str] = {}
        try:
            for other in sorted(holders, key=lambda other: (other == rank, other)):
                usable = [holder for holder in holders[other] if (other, _name_of(holder)) not in damaged]
                holder, part = _part_of(usable, state_id, other)
                used[other] = _name_of(holder)
                parts.append(part)
            checkpoint = StateCheckpoint(path, parts)
        except BaseException as error:
            for _, buffer in parts:
                (buffer.release if isinstance(buffer, RemotePart) else buffer.close)()
            if not isinstance(error, Exception):  # a KeyboardInterrupt
                raise
            # For example, a keeper of another release holds the state.
            raise ReadError(f"{path} cannot be read: {describe(error)}") from error
        checkpoint.holders = used
        last = parts[-1][1]
        self.nbytes = parts[-1][0].nbytes if isinstance(last, Descriptor) else 0
        return checkpoint

    def forget_all_but(self, state_id: str) -> None:
        for keeper in self._keepers:
            keeper.forget_all_but(state_id)

    def end(self) -> None:
        self.nbytes = 0
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.end()

    def close(self) -> None:
        """Closes the connections. The keepers continue. Idempotent."""
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.close()


def _name_of(holder: KeeperConnection | Address) -> str:
    if isinstance(holder, Address):
        return f"the keeper at {holder!r}"
    return f"the keeper of process {holder.found.trainer} on {socket.gethostname()}"


def _part_of(
    holders: Sequence[KeeperConnection | Address], state_id: str, rank: int
) -> tuple[KeeperConnection | Address, tuple[StatePart, Descriptor | RemotePart]]:
    """Gets a part from the first holder that sends it. Raises `ReadError` if no holder does."""
    failure = ReadError(f"no undamaged copy of rank {rank}'s part is left")
    for holder in holders:
        try:
            if isinstance(holder, KeeperConnection):
                return holder, holder.part(state_id, rank)
            remote = RemotePart(holder, state_id, rank)
            return holder, (remote.record(), remote)
        except ReadError as error:
            failure = error
            logger.warning("rank %d's part could not be read from %s: %s", rank, _name_of(holder), str(error))
    raise failure


def _order(head: StateHead) -> tuple[int, int, str]:
    """Returns a key that sorts states, the newest last."""
    return head.step, head.number, head.id


class AllMemory:
    """States in the memory of all hosts of the job.

    ``found`` has, for each rank, what the keepers on its host hold. ``parts`` are the heads of the parts of each state,
    by the state's id and the parts' ranks.
    """

    def __init__(self, found: Sequence[Sequence[Found]]) -> None:
        self._found = found
        self.parts: dict[str, dict[int, StateHead]] = {}
        self._holders: dict[str, dict[int, list[Address]]] = {}
        for keeper in chain.from_iterable(found):
            for head in keeper.heads:
                self.parts.setdefault(head.id, {}).setdefault(head.rank, head)
                if keeper.address is not None:
                    holders = self._holders.setdefault(head.id, {}).setdefault(head.rank, [])
                    holders += [keeper.address] * (keeper.address not in holders)

    def states(self) -> list[StateHead]:
        """Returns the states that all ranks can load from their own or other hosts.

        Each is returned as the head of its lowest rank's part. A keeper without an address serves only its own host.
        """
        found = []
        for state_id, parts in self.parts.items():
            head, given = parts[min(parts)], self._holders.get(state_id, {}).keys()
            here = [
                {part.rank for keeper in keepers for part in keeper.heads if part.id == state_id}
                for keepers in self._found
            ]
            is_reached = all(given | own >= self._needed(head, rank) for rank, own in enumerate(here))
            if len(parts) == head.world_size and is_reached:
                found.append(head)
        return found

    def parts_of_newest(self) -> str:
        """Describes the parts of the newest state that keepers serve to other hosts. Empty without such parts."""
        heads = [next(iter(self.parts[state_id].values())) for state_id in self._holders]
        if not heads:
            return ""
        newest = max(heads, key=_order)
        ranks = sorted(self._holders[newest.id])
        return f" (of step {newest.step}, keepers hold the parts of ranks {ranks} of {newest.world_size})"

    def holders(self, head: StateHead, rank: int | None = None) -> dict[int, list[Address]]:
        """Returns the keepers that serve parts of a state to other hosts, by the parts' ranks.

        With ``rank``, returns only the keepers of the parts that this rank needs.
        """
        holders = self._holders.get(head.id, {})
        needed = holders.keys() if rank is None else holders.keys() & self._needed(head, rank)
        return {part: holders[part] for part in sorted(needed)}

    def _needed(self, head: StateHead, rank: int) -> set[int]:
        """Returns the parts that a rank needs: its own, or all parts if the number of ranks has changed."""
        return {rank} if head.world_size == len(self._found) else set(range(head.world_size))


def outdated(
    head: StateHead,
    tip: Step | None,
    folder: tuple[int, int] | None,
    ids: Collection[str] = (),
    lost: Collection[str] = (),
) -> str:
    """Returns why a state must not be used instead of the newest checkpoint ``tip``, or an empty string if it may.

    ``folder`` is the state's own ``folder`` if that is still the job's, and otherwise None. ``ids`` are the ids of all
    existing checkpoints. ``lost`` are the ids of saves that were lost with a node; such a save counts as never made.
    """
    record, parent = head.record, None
    assert record is not None
    if record.parent is not None:
        parent = next((one for one in (record.parent, *head.line) if one not in lost), None)
    if head.folder not in (None, folder):
        return "the job's folder was replaced"
    if tip is None:
        return "" if parent is None else "the checkpoint that preceded it no longer exists"
    if head.left == tip.save_id and (record.parent is None or record.parent in ids):
        return ""  # the job has gone back to a step before the tip, and no run has saved since
    is_newer = head.parent_step is None or tip.number > head.parent_step
    is_of_run = tip.record is not None and tip.record.job == head.job and tip.branch == record.branch
    if parent != tip.save_id and not (is_newer and is_of_run):
        return f"another run has saved step {tip.number} since, or checkpoints were removed"
    return "" if record.step >= tip.number else f"step {tip.number} is on storage"
