"""Restarts from memory: keeper processes outlive the job and keep its newest states, and a later run loads them.

A state is forgotten only when each rank has the next one. So whenever a rank dies, there is a state that all ranks
have. All ranks decide together which state to load, if any.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import socket
import time
import uuid
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.stateful import Stateful

from .._index.schema import SaveRecord
from .._memory.checkpoint import KeptReader, described
from .._memory.client import KeeperProcess, connect_to_keepers
from .._memory.copies import MemoryVote, PeerCopies, this_host
from .._memory.find import AllMemory, Predecessors
from .._memory.protocol import Found, KeptHead
from .._memory.runtime_directory import identity, job_name
from .._memory.wire import Address
from .._runtime.memory_limit import available_memory
from .._runtime.threads import NEVER, Deadline, in_background
from .._saving.saver import Saver
from .._staging.buffer_pool import StagedSaves
from .._staging.shared_memory import SharedBuffer
from .._staging.staged_save import StagedStateDict
from .._storage.base import Storage
from ..errors import CheckpointError, ReadError, WriteError, describe
from ..planner import SavePlanner
from .lineage import Place, RestoreChoice
from .optimizer_state import dtypes_kept
from .options import JobOptions
from .ranks import Agreement
from .restore import Selection, SelectivePlanner, StatePart, error_of_load
from .steps import Step

logger = logging.getLogger("dcp_tensorizer")

_ROOM = 1.05  # of a buffer: what is allocated beside it
_LOOK_SECONDS = 30.0  # then the run of a keeper that does not answer counts as alive, and this run is refused

OnStaged = Callable[[StagedStateDict], object]


class _Stage(enum.Enum):
    """The stages of keeping states, in order."""

    READY = enum.auto()
    """States of earlier runs have not been looked for."""
    ON = enum.auto()
    ENDING = enum.auto()
    """This rank has stopped keeping states, and tells the other ranks at the next step."""
    OFF = enum.auto()
    """No rank keeps states."""


class Survival:
    """Keeps states of a rank in memory, and finds those of earlier runs. Does nothing without ``survive``.

    Args:
        saver: Stages the states.
        folder: The job's folder.
        agreement: Makes the decisions of all ranks.
        options: The options of the job.

    Attributes:
        run: The id of this run of the job, the same on all ranks; empty if nothing is kept.
        holds: States may be kept that no save writes.
        has_left: The kept states have been left to a later run.
        copies: Copies states to other hosts.
    """

    def __init__(self, saver: Saver, folder: Storage, agreement: Agreement, options: JobOptions) -> None:
        seconds = options.survive
        self.run = agreement.decided(lambda: uuid.uuid4().hex) if seconds else ""
        # With staging="device" the writer process copies, and it cannot do so while it writes.
        self.holds = bool(seconds) and options.buffers > 2 and saver.options.staging != "device"
        self._saver = saver
        self._folder = folder
        self._template = options.names.template
        self._agreement = agreement
        self._seconds = seconds
        self._reader_options = options.reader_options
        self._buffers = options.buffers
        self.copies = PeerCopies(agreement, options.copies)
        self.has_left = False
        self._stage = _Stage.READY if seconds else _Stage.OFF
        self._keeper: KeeperProcess | None = None
        self._has_begun_copies = False
        self._predecessors = Predecessors()
        self._keeping: Future[None] | None = None
        self._count = 0
        self._newest: str | None = None  # the last state, until all ranks have said whether they keep it
        self._written = ""  # the last state that a save writes

    # --- keeping ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Looks for states of earlier runs, on the first call. Every rank calls it.

        Raises `WriteError`, on all ranks, if another run of the job is alive or a rank is gone.
        """
        if self._stage is not _Stage.READY:
            return
        found, silent = connect_to_keepers(self._job_name, _LOOK_SECONDS)
        for keeper in found:
            if keeper.found.job == self.run:  # the keeper of another rank of this run
                keeper.close()
        self._predecessors = Predecessors([keeper for keeper in found if keeper.found.job != self.run])
        refusal = _stopped(silent[0]) if silent else self._predecessors.claim(self.run)
        if problem := next(filter(None, self._agreement.gathered(refusal)), ""):
            self._predecessors.close()
            raise WriteError(f"{self._folder.path}: {problem}")
        self._stage = _Stage.ON

    @property
    def _job_name(self) -> str:
        return job_name(f"{self._folder.real_path} {self._template}")

    def start_keeper(self) -> None:
        """Starts the keeper, on the first call after `begin`.

        The start takes a core for a fifth of a second. So it comes after a restore, which needs the core.
        """
        if self._stage is not _Stage.ON or self._keeper is not None:
            return
        try:
            timeout = self._saver.options.limits.timeout
            self._keeper = KeeperProcess(self._job_name, self.run, self._seconds, timeout)
        except WriteError as error:
            self._stop_keeping(str(error))

    def begin_copies(self) -> None:
        """Finds the partners of all ranks, on the first call. Every rank calls it after `start_keeper`.

        Waits until the keeper has started. Raises `WriteError` if a rank is gone.
        """
        if self._has_begun_copies:
            return
        self.copies.begin(self._keeper)
        self._has_begun_copies = True
        if self._stage is _Stage.ON:
            self._saver.engine.saves.spares[self] = self._most_buffers - 1

    def wait_kept(self) -> tuple[bool, bool]:
        """Waits until the newest state is kept; returns whether that failed, and whether this rank has stopped."""
        keeping, self._keeping = self._keeping, None
        error = None if keeping is None else keeping.exception()
        if self._stage is _Stage.ON and self._keeper is not None and not self._keeper.is_ours:
            self._stop_keeping("the keeper has ended" if error is None else describe(error))
        elif error is not None:
            logger.warning("a state is not kept in memory: %s", describe(error))
        if self._stage is _Stage.ON:
            self._look_for_room()
        has_failed = self._newest is not None and self._newest not in self._kept
        return has_failed, self._stage is _Stage.ENDING

    def vote(self) -> MemoryVote:
        """Returns this rank's vote about states in memory; waits until the newest state is kept."""
        has_failed, ends = self.wait_kept()
        about_copies = self.copies.vote(self._keeper if self._stage is _Stage.ON else None)
        return about_copies._replace(has_failed=has_failed, ends=ends)

    def advance(self, vote: MemoryVote, *, is_busy: bool) -> None:
        """Forgets states that are no longer needed, after all ranks have voted.

        ``vote`` is the joint vote. ``is_busy``: on this rank, the last save still runs.
        """
        if self._stage is _Stage.OFF:
            return
        newest, self._newest = self._newest, None
        was_on = self.copies.is_on
        self.copies.advance(vote)
        if was_on and not self.copies.is_on:
            self.copies.forget(self._keeper)
        if vote.ends:
            self._stop_keeping("another rank has stopped keeping them")
            self._stage, self.holds = _Stage.OFF, False
            self.end()
        elif newest is not None and vote.has_failed:
            self._forget_all_but([number for number in self._kept if number != newest])
        elif newest is not None:
            self._forget_for(newest, is_busy=is_busy)

    def _forget_for(self, newest: str, *, is_busy: bool) -> None:
        """Forgets the states that are not needed beside the newest one, which all ranks have.

        The last state that was copied from all ranks stays until a newer one is copied. If a host is lost, the other
        ranks need their own parts of that state. A state that is being copied stays until saves need its buffer.
        """
        saves, copied = self._saver.engine.saves, self.copies.ordered
        nbytes = self._kept[newest].nbytes if newest in self._kept else 0
        staying = {newest, self.copies.confirmed, copied} & self._kept.keys()
        in_use = {*staying, *([self._written] if is_busy else [])}
        self._forget_all_but([newest, self.copies.confirmed], but_copied=len(in_use) < self._most_buffers)
        if self.copies.is_on and len(self._kept) > 1:
            saves.reclaim()
            if why := _lack_of_room(saves, nbytes):
                self.copies.give_up(why)
                self._forget_all_but([newest])
        asks_again = self.copies.look_for_room(nbytes, max(0, self._most_buffers - len(in_use)))
        if asks_again or not self.copies.are_awaited:
            self._predecessors.end()

    @property
    def _most_buffers(self) -> int:
        """The largest number of staging buffers; with copies one more."""
        return self._buffers + self.copies.is_on

    def next_state(self, record: SaveRecord, place: Place) -> OnStaged | None:
        """Returns a function that keeps the next staged state; None if it is not kept.

        ``record`` describes the state in the index, and ``place`` is the job's.
        """
        if self._stage is _Stage.OFF:  # unlike ENDING, this is the same on all ranks
            return None
        self._count += 1
        number = self._newest = hashlib.blake2b(f"{self.run} {self._count}".encode(), digest_size=16).hexdigest()
        head = KeptHead(
            id=number,
            number=self._count,
            job=self.run,
            rank=self._agreement.rank,
            world_size=self._agreement.size,
            record=record,
            parent_step=None if place.tip is None else place.tip.number,
            left=(place.left.save_id or None) if place.left else None,
            folder=identity(self._folder.location),
            host=this_host(),
            line=place.line,
        )
        is_copied = self.copies.order(number)

        def keep(staged: StagedStateDict) -> None:
            if not staged.staged_save.abandoned:  # a save writes this state
                self._written = number
                if self._keeper is not None:
                    staged.staged_save.on_written = functools.partial(self._keeper.written, number)
            self._keeping = in_background(lambda: self._keep(head, staged, is_copied=is_copied), name="keep")

        return keep

    def restore(
        self, state: dict[str, Any], selection: Selection, choice: RestoreChoice, lost: Collection[str] = ()
    ) -> SaveRecord | Problem | None:
        """Loads a state that an earlier run has kept; see `load_kept`."""
        if self._stage is _Stage.OFF:
            return None
        options = self._reader_options
        return load_kept(self._predecessors, self._folder, self._agreement, state, selection, options, choice, lost)

    def discard(self) -> None:
        """Frees the states of earlier runs, which are no longer wanted."""
        self._predecessors.end()

    def forget(self) -> None:
        """Forgets all states of this run, because the job does not resume from them."""
        self.wait_kept()
        self._newest = None
        self._forget_all_but([])
        self.copies.forget(self._keeper)

    def end(self, deadline: Deadline = NEVER, *, has_saved: bool = False) -> None:
        """Ends the keeper, and frees its states. Idempotent.

        ``has_saved``: the newest step of this run is on storage. Then the states of earlier runs are freed, too.
        Otherwise they are left as they are.
        """
        if self._keeping is not None:
            wait_for([self._keeping], deadline.left)
        if has_saved:
            self._predecessors.end()
        self._predecessors.close()
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.end(deadline)
        self._saver.engine.saves.spares.pop(self, None)

    def leave(self, deadline: Deadline = NEVER) -> None:
        """Leaves the kept states to a later run, because this run has failed. Idempotent."""
        if self._keeping is not None:
            wait_for([self._keeping], deadline.left)
        self.has_left = True
        self._predecessors.close()
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.leave(deadline)

    @property
    def _kept(self) -> dict[str, SharedBuffer]:
        """The buffers of the kept states, by the states' ids, the oldest first."""
        return {} if self._keeper is None else self._keeper.kept

    def _keep(self, head: KeptHead, staged: StagedStateDict, *, is_copied: bool) -> None:
        staged_save = staged.staged_save
        try:
            staged_save.wait_copied()
            buffer = staged_save.buffer
            assert buffer is not None and self._keeper is not None
            planner = SavePlanner(enable_plan_caching=False)
            planner.set_up_planner(dict(staged))  # `dict` does not call `items`, which ties the state to a save
            plan, digests_follow = planner.create_local_plan(), staged_save.on_written is not None
            message = described(head, plan, planner, buffer, self._seconds, digests_follow=digests_follow)
            self._keeper.keep(message, buffer)
        except BaseException:
            if staged_save.buffer is not None:
                staged_save.buffer.is_kept = False
            raise
        if is_copied:
            self.copies.start(self._keeper, head.id)

    def _look_for_room(self) -> None:
        """Frees kept states if there is too little memory to stage the next one beside them."""
        if len(self._kept) > 1:  # the older one is about to be forgotten
            return
        saves = self._saver.engine.saves
        saves.reclaim()
        nbytes = max([self._predecessors.nbytes, *(buffer.nbytes for buffer in self._kept.values())])
        why = _lack_of_room(saves, nbytes) if nbytes else ""
        if not why:
            return
        if self._kept:
            self._stop_keeping(why)
        else:
            logger.warning("what an earlier run has kept in memory is freed: %s", why)
            self._predecessors.end()

    def _stop_keeping(self, why: str) -> None:
        """Stops keeping states on this rank. The other ranks learn of it at the next step."""
        if self._stage is not _Stage.ENDING:
            self._stage = _Stage.ENDING
            logger.warning("states are no longer kept in memory, and survive=%g is off: %s", self._seconds, why)
        self._forget_all_but([])

    def _forget_all_but(self, kept: Sequence[str], *, but_copied: bool = False) -> None:
        forgotten = [state_id for state_id in self._kept if state_id not in kept]
        try:
            if self._keeper is not None:
                self._keeper.forget(forgotten, but_copied=but_copied)
        except WriteError as error:
            self._stop_keeping(str(error))


def _lack_of_room(saves: StagedSaves, nbytes: int) -> str:
    """The reason why another staging buffer of this size does not fit into memory; empty if it does."""
    if saves.has_buffer(nbytes):
        return ""
    available = available_memory()
    if available is None or available > _ROOM * nbytes:
        return ""
    return f"another staging buffer takes {nbytes:,} bytes, and {available:,} bytes of memory are available"


def _stopped(path: Path) -> str:
    return (
        f"a run of this job counts as alive, because its keeper on {socket.gethostname()} does not answer at {path}. "
        f"If it is stopped, continue it, or kill its processes (that path is in the keeper's command line). Then start "
        f"again"
    )


# --- loading a state of an earlier run, if all ranks can reach it and it is not outdated ------------------------------


class Problem(NamedTuple):
    """The reason why a state in memory could not be loaded."""

    error: CheckpointError
    is_damage: bool  # the state is damaged; otherwise it does not fit the target
    is_whole: bool  # all parts of the state were at hand; otherwise it may fit with all of them
    has_touched: bool  # some of the target may have been overwritten


def load_kept(
    found: Predecessors,
    folder: Storage,
    agreement: Agreement,
    state: dict[str, Any],
    selection: Selection,
    options: Mapping[str, Any],
    choice: RestoreChoice,
    lost: Collection[str] = (),
) -> SaveRecord | Problem | None:
    """Loads the newest state that all ranks can reach in memory, if it resumes from the newest checkpoint.

    Args:
        found: The keepers of earlier runs.
        folder: The job's folder.
        agreement: Makes the decisions of all ranks.
        state: The target.
        selection: The keys to load.
        options: The options of the reader.
        choice: The checkpoints on storage.
        lost: The ids of the saves that were lost with a node before they were on storage.

    Returns:
        The record of the loaded state. Otherwise load from storage: None if memory has no state to load, or the problem
        with it. The log says why.

    Raises:
        CheckpointError: a complete state does not fit the target, or a rank is gone; on all ranks.
    """
    chosen = _chosen(found, folder, agreement, choice, lost)
    if chosen is None:
        return None
    head, memory = chosen
    started = time.perf_counter()
    path = f"the memory of step {head.step} on rank {agreement.rank}"
    load = functools.partial(_loaded, found, head, agreement.rank, path, state, selection, options)
    loaded, own = load(memory.places(head, agreement.rank))
    problems = agreement.gathered(own)
    is_part = head.world_size == agreement.size and memory.places(head)
    if is_part and any(p is not None and not (p.is_damage or p.is_whole) for p in problems):
        loaded, own = load(memory.places(head))  # the target is sharded in another way: all parts are needed
        problems = agreement.gathered(own)
    if problem := joint_problem(problems):
        logger.error("the state in memory, of step %d, cannot be loaded: %s", head.step, problem.error)
        return problem
    found.forget_all_but(head.id)
    with dtypes_kept(state.values()):
        for key, value in loaded.items():
            if isinstance(state[key], Stateful):
                state[key].load_state_dict(value)
            else:
                state[key] = value
    seconds = time.perf_counter() - started
    logger.info("%s: step %d is restored from memory (%.3f s)", folder.path, head.step, seconds)
    return head.record


class _Offer(NamedTuple):
    """The states in the memory of a rank's host."""

    keepers: list[Found]
    folder: tuple[int, int] | None  # the identity of the job's folder there
    host: str

    @property
    def heads(self) -> list[KeptHead]:
        """The heads of all parts."""
        return [head for keeper in self.keepers for head in keeper.heads]

    def knows(self, head: KeptHead) -> bool:
        """Returns whether this host kept a part of the state itself, and so knows the folder's identity of then."""
        return any(own.id == head.id and own.host in ("", self.host) for own in self.heads)

    def has_other_folder(self, head: KeptHead) -> bool:
        """Returns whether this host kept a part of the state itself, for a folder that has been replaced since."""
        own = [own for own in self.heads if own.id == head.id and own.host in ("", self.host)]
        return any(part.folder not in (None, self.folder) for part in own)


def _chosen(
    found: Predecessors, folder: Storage, agreement: Agreement, choice: RestoreChoice, lost: Collection[str]
) -> tuple[KeptHead, AllMemory] | None:
    """Finds the newest state that all ranks can reach, with its places, unless it is outdated. All find the same."""
    there = identity(folder.location)
    offers = agreement.gathered(_Offer(found.found, there, this_host()))
    memory = AllMemory([offer.keepers for offer in offers])
    reached = memory.states()
    if not reached:
        if any(offer.heads for offer in offers):
            logger.warning(
                "%s: no state in memory is there for all ranks, perhaps because a machine was replaced%s: this run "
                "resumes from storage, which may be some steps older",
                folder.path,
                _parts_of_newest(offers),
            )
        return None
    head = max(reached, key=lambda h: (h.step, h.number, h.id))
    tip = choice.candidates[0][0] if choice.candidates else None
    ids = {step.save_id for step in choice.steps}
    is_other = any(offer.has_other_folder(head) for offer in offers)
    is_known = any(offer.knows(head) for offer in offers)

    def refusal() -> str:
        if is_known:
            return outdated(head, tip, None if is_other else head.folder, ids, lost)
        # The hosts that kept it are gone. Other hosts number devices in another way, but see the same inode.
        is_same = head.folder is not None and there is not None and head.folder[1] == there[1]
        return outdated(head, tip, head.folder if is_same else None, ids, lost)

    if words := agreement.decided(refusal):
        logger.warning("%s: step %d is in memory, and %s", folder.path, head.step, words)
        return None
    return head, memory


def _parts_of_newest(offers: Sequence[_Offer]) -> str:
    """Describes which parts of the newest state are left on hosts that give them to others; empty if there are none."""
    heads = [head for offer in offers for keeper in offer.keepers if keeper.address for head in keeper.heads]
    if not heads:
        return ""
    newest = max(heads, key=lambda head: (head.step, head.number, head.id))
    ranks = sorted({head.rank for head in heads if head.id == newest.id})
    return f" (of step {newest.step}, of {newest.world_size} ranks only the parts of {ranks})"


def _loaded(
    found: Predecessors,
    head: KeptHead,
    rank: int,
    path: str,
    state: dict[str, Any],
    selection: Selection,
    options: Mapping[str, Any],
    elsewhere: Mapping[int, Sequence[Address]],
) -> tuple[dict[str, Any], Problem | None]:
    """Loads a state, on this rank by itself. Returns the loaded values, and the problem if there was one.

    ``elsewhere`` has the keepers on any host that have parts of the state, by the parts' ranks. If a part is damaged,
    or can no longer be read, it is taken from the next keeper that has it.
    """
    damaged: set[tuple[int, str]] = set()
    is_whole, has_begun = True, False
    first: CheckpointError | None = None
    while True:
        planner = SelectivePlanner(path, selection, state)
        checkpoint = None
        try:
            plain = StatePart().of(state)
            checkpoint = found.open(head.id, rank, path, elsewhere, damaged)
            is_whole = checkpoint.is_whole
            with closing(checkpoint), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch warns of a load in a single process
                dcp_load(plain, storage_reader=KeptReader(checkpoint, options), planner=planner, no_dist=True)
        except (Exception, CheckpointException) as error:
            cause = error_of_load(path, error)
            has_begun = has_begun or planner.has_begun
            first = first or cause
            part = checkpoint.part_in(str(cause)) if checkpoint is not None and isinstance(cause, ReadError) else None
            if checkpoint is None or part is None:
                return {}, Problem(first, isinstance(cause, ReadError), is_whole, has_begun)
            place = checkpoint.places[part]
            damaged.add((part, place))
            logger.error("rank %d's part of step %d, from %s, is not used: %s", part, head.step, place, str(cause))
        else:
            return plain, None


def joint_problem(problems: Sequence[Problem | None]) -> Problem | None:
    """The joint problem of all ranks' loads; raises `CheckpointError` if a complete state does not fit a rank."""
    found = [problem for problem in problems if problem is not None]
    if misfit := next((problem for problem in found if problem.is_whole and not problem.is_damage), None):
        raise misfit.error
    if not found:
        return None
    # A rank that succeeded has changed its target, too.
    has_touched = any(problem is None or problem.has_touched for problem in problems)
    return found[0]._replace(is_damage=any(problem.is_damage for problem in found), has_touched=has_touched)


def outdated(
    head: KeptHead,
    tip: Step | None,
    folder: tuple[int, int] | None,
    ids: Collection[str] = (),
    lost: Collection[str] = (),
) -> str:
    """Returns why a state does not resume from the newest checkpoint ``tip``; empty if it does.

    ``folder`` is the identity of the job's folder. ``ids`` are the ids of all existing checkpoints. Those in ``lost``
    were lost with a node, and count as never saved.
    """
    record, parent = head.record, None
    assert record is not None
    if record.parent is not None:
        parent = next((one for one in (record.parent, *head.line) if one not in lost), None)
    if head.folder not in (None, folder):
        return "the job's folder is another one now: it is not used"
    if tip is None:
        return "" if parent is None else "the checkpoint that it resumes from is gone: it is not used"
    if head.left == tip.save_id and (record.parent is None or record.parent in ids):
        return ""  # the job has gone back to before that one, and no run has saved since
    if parent != tip.save_id and not _has_saved(head, tip):
        return f"another job has saved step {tip.number} since, or removed checkpoints: it is not used"
    return "" if record.step >= tip.number else f"step {tip.number} is on storage: it is not used"


def _has_saved(head: KeptHead, tip: Step) -> bool:
    """Returns whether the run that kept a state has saved a checkpoint after that state's parent."""
    assert head.record is not None
    is_newer = head.parent_step is None or tip.number > head.parent_step
    is_same_run = tip.record is not None and tip.record.job == head.job
    return is_same_run and tip.branch == head.record.branch and is_newer
