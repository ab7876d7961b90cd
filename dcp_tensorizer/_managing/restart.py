"""Restarts from memory: keeper processes that outlive the job keep its newest states, and a later run loads them.

Whenever a rank dies, all ranks have one common state: the one before is forgotten only when each rank has the newest.
All ranks decide together which state is loaded, if any.
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
from .._restart.client import KeeperProcess, visits
from .._restart.find import Elsewhere, Held, Predecessors
from .._restart.peers import this_host
from .._restart.protocol import KeptHead
from .._restart.runtime_directory import identity, job_name
from .._restart.wire import Address
from .._runtime.threads import NEVER, Deadline, in_background
from .._saving.keeping import described, lack_of_room
from .._saving.saver import Saver
from .._staging.shared_memory import SharedBuffer
from .._staging.staged_save import StagedStateDict
from .._storage.base import Storage
from ..any_format import KeptReader
from ..errors import CheckpointError, ReadError, WriteError, describe
from ..planner import SavePlanner
from .agreement import Agreement
from .copies import MemoryVote, PeerCopies
from .lineage import Place, RestoreChoice
from .options import JobOptions
from .restore import Selection, SelectivePlanner, StatePart, error_of_load
from .step_folder import Step

logger = logging.getLogger("dcp_tensorizer")

_LOOK_SECONDS = 30.0  # a keeper that does not answer counts as alive, and this run is refused

OnStaged = Callable[[StagedStateDict], object]


class _Stage(enum.Enum):
    """Stages of keeping states, in order."""

    READY = enum.auto()
    """Nobody has looked yet for states of earlier runs."""
    ON = enum.auto()
    ENDING = enum.auto()
    """This rank has stopped keeping states, and tells the others at the next step."""
    OFF = enum.auto()
    """No rank keeps states."""


class Survival:
    """Keeps states of a rank in memory, and finds those of earlier runs. Does nothing without ``survive``.

    Args:
        saver: Stages what is kept.
        folder: Of the job.
        agreement: Of all ranks.
        options: Of the job.

    Attributes:
        run: The run of the job, the same on all ranks; empty if nothing is kept.
        holds: A state may be kept that no save writes.
        has_left: What is kept has been left to a later run.
        copies: What is copied to other hosts.
    """

    def __init__(
        self,
        saver: Saver,
        folder: Storage,
        agreement: Agreement,
        options: JobOptions,
    ) -> None:
        seconds = options.survive
        self.run = agreement.decided(lambda: uuid.uuid4().hex) if seconds else ""
        # The writer process copies from devices, and cannot do so while it writes.
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
        self._newest: str | None = None  # the state that came last, until it is known of all ranks whether they keep it
        self._written = ""  # the last state that a save writes

    # --- keeping ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Looks for states of earlier runs; only the first call does so. Every rank calls it.

        Raises `WriteError`, on all ranks, if another run of the job is alive or a rank is gone.
        """
        if self._stage is not _Stage.READY:
            return
        found, silent = visits(self._job_name, _LOOK_SECONDS)
        for visit in found:
            if visit.found.job == self.run:  # another rank has claimed it first
                visit.close()
        self._predecessors = Predecessors([visit for visit in found if visit.found.job != self.run])
        refusal = _stopped(silent[0]) if silent else self._predecessors.claim(self.run)
        if problem := next(filter(None, self._agreement.gathered(refusal)), ""):
            self._predecessors.close()
            raise WriteError(f"{self._folder.path}: {problem}")
        self._stage = _Stage.ON

    @property
    def _job_name(self) -> str:
        return job_name(f"{self._folder.real_path} {self._template}")

    def start_keeper(self) -> None:
        """Starts the keeper; only the first call after `begin` does so.

        Its start takes a fifth of a second of a core, which a restore needs for itself.
        """
        if self._stage is not _Stage.ON or self._keeper is not None:
            return
        try:
            self._keeper = KeeperProcess(self._job_name, self.run, self._seconds)
        except WriteError as error:
            self._stop_keeping(str(error))

    def begin_copies(self) -> None:
        """Finds the partners of all ranks; only the first call does so. Every rank calls it, after `start_keeper`.

        It waits until the keeper has started. Raises `WriteError` if a rank is gone.
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
        """This rank's knowledge about states in memory; waits until the newest state is kept."""
        has_failed, ends = self.wait_kept()
        about_copies = self.copies.vote(self._keeper if self._stage is _Stage.ON else None)
        return about_copies._replace(has_failed=has_failed, ends=ends)

    def advance(self, vote: MemoryVote, *, is_busy: bool) -> None:
        """Forgets states that are not needed, after all ranks have voted.

        ``vote`` has what holds for any rank. ``is_busy``: on this rank, the last save still runs.
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
        """Forgets what is not needed beside the newest state, which all ranks have.

        The last state that was copied from all ranks stays until a newer one is copied: if a host is lost, the
        remaining ranks need their own parts of it. A state that is being copied stays as long as saves do not need its
        buffer.
        """
        saves, copied = self._saver.engine.saves, self.copies.ordered
        nbytes = self._kept[newest].nbytes if newest in self._kept else 0
        staying = {newest, self.copies.confirmed, copied} & self._kept.keys()
        in_use = {*staying, *([self._written] if is_busy else [])}
        self._forget_all_but([newest, self.copies.confirmed], but_copied=len(in_use) < self._most_buffers)
        if self.copies.is_on and len(self._kept) > 1:
            saves.reclaim()
            if why := lack_of_room(saves, nbytes):
                self.copies.give_up(why)
                self._forget_all_but([newest])
        asks_again = self.copies.look_for_room(nbytes, max(0, self._most_buffers - len(in_use)))
        if asks_again or not self.copies.are_awaited:
            self._predecessors.end()

    @property
    def _most_buffers(self) -> int:
        """How many staging buffers there may be; for copies one more."""
        return self._buffers + self.copies.is_on

    def next_state(self, record: SaveRecord, place: Place) -> OnStaged | None:
        """Returns a function that keeps the next staged copy; None if it is not kept.

        ``record`` describes it in the index, and ``place`` is that of the job.
        """
        if self._stage is _Stage.OFF:  # OFF is the same on all ranks; only this one may have lost its keeper meanwhile
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
            if not staged.staged_save.abandoned:  # a save writes it
                self._written = number
                if self._keeper is not None:
                    staged.staged_save.on_written = functools.partial(self._keeper.written, number)
            self._keeping = in_background(lambda: self._keep(head, staged, is_copied=is_copied), name="keep")

        return keep

    def restore(
        self, state: dict[str, Any], selection: Selection, choice: RestoreChoice, lost: Collection[str] = ()
    ) -> SaveRecord | Problem | None:
        """Loads a state that an earlier run has kept: see `load_kept`."""
        if self._stage is _Stage.OFF:
            return None
        options = self._reader_options
        return load_kept(self._predecessors, self._folder, self._agreement, state, selection, options, choice, lost)

    def discard(self) -> None:
        """Forgets the states of earlier runs, which are no longer wanted."""
        self._predecessors.end()

    def forget(self) -> None:
        """Forgets all states of this run, because the job goes on from something else."""
        self.wait_kept()
        self._newest = None
        self._forget_all_but([])
        self.copies.forget(self._keeper)

    def end(self, deadline: Deadline = NEVER, *, has_saved: bool = False) -> None:
        """Ends the keeper, and frees the memory. Idempotent.

        ``has_saved``: the newest step of this run is on storage. Otherwise states of earlier runs, which none of this
        run has replaced, are left as they are.
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
        """Leaves the kept states to a later run, because this one has failed. Idempotent; arguments as of `end`."""
        if self._keeping is not None:
            wait_for([self._keeping], deadline.left)
        self.has_left = True
        self._predecessors.close()
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.leave(deadline)

    @property
    def _kept(self) -> dict[str, SharedBuffer]:
        """The buffers of the states that are kept, by their ids; the oldest comes first."""
        return {} if self._keeper is None else self._keeper.kept

    def _keep(self, head: KeptHead, staged: StagedStateDict, *, is_copied: bool) -> None:
        staged_save = staged.staged_save
        try:
            staged_save.wait_copied()
            buffer = staged_save.buffer
            assert buffer is not None and self._keeper is not None
            planner = SavePlanner(enable_plan_caching=False)
            planner.set_up_planner(dict(staged))  # not by `items`, which ties it to a save
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
        """Stops keeping states if the next one could not be staged without the memory of those that are kept."""
        if len(self._kept) > 1:  # the older one is forgotten soon
            return
        saves = self._saver.engine.saves
        saves.reclaim()
        nbytes = max([self._predecessors.nbytes, *(buffer.nbytes for buffer in self._kept.values())])
        why = lack_of_room(saves, nbytes) if nbytes else ""
        if not why:
            return
        if self._kept:
            self._stop_keeping(why)
        else:
            logger.warning("what an earlier run has kept in memory is freed: %s", why)
            self._predecessors.end()

    def _stop_keeping(self, why: str) -> None:
        """Stops keeping states on this rank. The others are told at the next step."""
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


def _stopped(path: Path) -> str:
    return (
        f"a run of this job counts as alive, because its keeper on {socket.gethostname()} does not answer at {path}. "
        f"If it is stopped, continue it, or kill its processes (that path is in the keeper's command line). Then start "
        f"again"
    )


# --- states of earlier runs: can all ranks load them, and are they current? -------------------------------------------


class Problem(NamedTuple):
    """Why a state in memory could not be loaded."""

    error: CheckpointError
    is_damage: bool  # the state is of no use; otherwise it does not fit the target
    is_whole: bool  # all of it is on this machine; otherwise the whole may fit although a part does not
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
    """Loads the newest state that all ranks can reach in memory, if it goes on from the newest checkpoint.

    Args:
        found: The keepers of earlier runs.
        folder: Of the job.
        agreement: Of all ranks.
        state: What to load it into.
        selection: Which keys.
        options: For the reader.
        choice: What is on storage.
        lost: The ids of the saves that were lost with a node before they were on storage.

    Returns:
        What was recorded with it. None, or why it could not be loaded: the state is to be loaded from storage.
        The log says why.

    Raises:
        CheckpointError: it is whole and does not fit, as `load_first` says, or a rank is gone; on all ranks.
    """
    chosen = _chosen(found, folder, agreement, choice, lost)
    if chosen is None:
        return None
    head, memory = chosen
    started = time.perf_counter()
    path = f"the memory of step {head.step} on rank {agreement.rank}"
    load = functools.partial(_loaded, found, head, agreement.rank, path, state, selection, options)
    loaded, own = load(memory.own_places(head, agreement.rank, agreement.size))
    problems = agreement.gathered(own)
    is_part = head.world_size == agreement.size and memory.places(head)
    if is_part and any(p is not None and not (p.is_damage or p.is_whole) for p in problems):
        loaded, own = load(memory.places(head))  # the state is sharded differently now
        problems = agreement.gathered(own)
    if problem := _joint(problems):
        logger.error("the state in memory, of step %d, cannot be loaded: %s", head.step, problem.error)
        return problem
    found.forget_all_but(head.id)
    for key, value in loaded.items():
        if isinstance(state[key], Stateful):
            state[key].load_state_dict(value)
        else:
            state[key] = value
    seconds = time.perf_counter() - started
    logger.info("%s: step %d is restored from memory (%.3f s)", folder.path, head.step, seconds)
    return head.record


class _Offer(NamedTuple):
    """One rank's knowledge of the states in memory."""

    heads: list[KeptHead]  # of all parts on its host
    held: list[Held]  # everything that its host's keepers give to other hosts
    folder: tuple[int, int] | None  # the identity of the job's folder there
    host: str

    def knows(self, head: KeptHead) -> bool:
        """Returns whether its host is the one that a state was kept on."""
        return any(own.id == head.id and own.host in ("", self.host) for own in self.heads)

    def has_other_folder(self, head: KeptHead) -> bool:
        """Returns whether the job's folder is another one now, as seen by a host that a state was kept on."""
        own = [own for own in self.heads if own.id == head.id and own.host in ("", self.host)]
        return any(part.folder not in (None, self.folder) for part in own)


def _chosen(
    found: Predecessors, folder: Storage, agreement: Agreement, choice: RestoreChoice, lost: Collection[str]
) -> tuple[KeptHead, Elsewhere] | None:
    """The newest state that all ranks can reach, if it is not outdated, and where it is; the same on all ranks."""
    there = identity(folder.location)
    offers = agreement.gathered(_Offer(found.heads, found.held, there, this_host()))
    memory = Elsewhere([(offer.heads, offer.held) for offer in offers])
    reached = [kept.head for kept in memory.states()]
    if not reached:
        if any(offer.heads for offer in offers):
            logger.warning(
                "%s: no state in memory is there for all ranks, perhaps because a machine was replaced%s: this run "
                "goes on from storage, which may be some steps older",
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
            return _outdated(head, tip, None if is_other else head.folder, ids, lost)
        # Its hosts are gone. Others have another number for the disk, and the same for the folder.
        is_same = head.folder is not None and there is not None and head.folder[1] == there[1]
        return _outdated(head, tip, head.folder if is_same else None, ids, lost)

    if words := agreement.decided(refusal):
        logger.warning("%s: step %d is in memory, and %s", folder.path, head.step, words)
        return None
    return head, memory


def _parts_of_newest(offers: Sequence[_Offer]) -> str:
    """The parts that are there of the newest state that keepers give to other hosts; empty if there is none."""
    heads = [head for offer in offers for held in offer.held for head in held.heads]
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
    """Loads a state, on this rank by itself; returns what was loaded, and why it could not be.

    ``elsewhere`` has the keepers on any host that have parts of it, by the parts' ranks. A part that is damaged, or
    cannot be read any more, is taken from somewhere else, as long as somebody has it.
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
                warnings.simplefilter("ignore", UserWarning)  # torch's warning about a load in a single process
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


def _joint(problems: Sequence[Problem | None]) -> Problem | None:
    """The joint result of all ranks' loads; raises `CheckpointError` if a rank's state is whole, but does not fit."""
    found = [problem for problem in problems if problem is not None]
    if misfit := next((problem for problem in found if problem.is_whole and not problem.is_damage), None):
        raise misfit.error
    if not found:
        return None
    # a rank that succeeded has changed its state, too
    has_touched = any(problem is None or problem.has_touched for problem in problems)
    return found[0]._replace(is_damage=any(problem.is_damage for problem in found), has_touched=has_touched)


def _outdated(
    head: KeptHead,
    tip: Step | None,
    folder: tuple[int, int] | None,
    ids: Collection[str] = (),
    lost: Collection[str] = (),
) -> str:
    """Why a state does not go on from the newest checkpoint ``tip``; empty if it does.

    ``folder`` is the identity of the job's folder, and ``ids`` are those of all existing checkpoints. Those that a lost
    node had alone, ``lost``, count as never saved.
    """
    record, parent = head.record, None
    assert record is not None
    if record.parent is not None:
        parent = next((one for one in (record.parent, *head.line) if one not in lost), None)
    if head.folder not in (None, folder):
        return "the job's folder is another one now: it is not used"
    if tip is None:
        return "" if parent is None else "the checkpoint that it goes on from is gone: it is not used"
    if head.left == tip.save_id and (record.parent is None or record.parent in ids):
        return ""  # the job has gone back behind that one, and nobody has saved since
    if parent != tip.save_id and not _has_saved(head, tip):
        return f"another job has saved step {tip.number} since, or removed checkpoints: it is not used"
    return "" if record.step >= tip.number else f"step {tip.number} is on storage: it is not used"


def _has_saved(head: KeptHead, tip: Step) -> bool:
    """Returns whether a checkpoint is of the run that kept a state, and newer than that state's parent."""
    assert head.record is not None
    is_newer = head.parent_step is None or tip.number > head.parent_step
    is_same_run = tip.record is not None and tip.record.job == head.job
    return is_same_run and tip.branch == head.record.branch and is_newer
