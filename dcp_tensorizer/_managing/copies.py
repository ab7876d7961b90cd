"""Copies of a job's states on other hosts, which outlive the loss of a host: as the trainers see them.

The keepers copy. The trainers decide together, in the reduction at the beginning of each step, which state is copied:
the same on all ranks, the newest one when no copy is under way. A copy counts when all ranks have it.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from .._restart.client import KeeperProcess
from .._restart.peers import Room, lack_of_room
from .._restart.replicas import RESERVE
from .._restart.wire import Address
from .._runtime.memory_limit import available_memory
from .._saving.partners import Arrangement, CopyOptions, arrange, introduce
from ..errors import WriteError
from .agreement import Agreement

logger = logging.getLogger("dcp_tensorizer")


class MemoryVote(NamedTuple):
    """The knowledge of one rank about states in memory; in a decision, whether it holds for any rank."""

    has_failed: bool = False  # the newest state could not be kept
    ends: bool = False  # the rank has stopped keeping states
    copy_runs: bool = False  # a copy is under way
    copy_failed: bool = False  # the copy that was ordered last is not whole
    copies_end: bool = False  # this rank's states are no longer copied
    is_superseded: bool = False  # a later run of the job has the keeper that this rank's states are copied to


NOTHING_IN_MEMORY = MemoryVote()


class PeerCopies:
    """The copies of a job's states, as one rank sees them. Does nothing for one copy.

    Attributes:
        is_on: States are copied; the same on all ranks.
        confirmed: The id of the newest state that is copied from all ranks; empty if there is none.
    """

    def __init__(self, agreement: Agreement, options: CopyOptions) -> None:
        self.is_on = options.copies > 1
        self.confirmed = ""
        self._agreement = agreement
        self._options = options
        self._arrangement = Arrangement([], [], "the ranks have not introduced themselves yet", {}, {})
        self._partner: Address | None = None
        self._rate = 0.0
        self._has_room = False
        self._tries = 0
        self._ordered = ""  # the state that was to be copied last; the same on all ranks
        self._begun = ""  # the same, if this rank's keeper has begun with it
        self._problem = ""  # of the last copy
        self._ends = ""  # why this rank's states are copied no more

    @property
    def is_ready(self) -> bool:
        """Returns whether there is a partner, and memory for the replicas."""
        return self.is_on and self._has_room

    @property
    def are_awaited(self) -> bool:
        """Returns whether no state of this run has been copied yet, and one may be."""
        return self.is_on and not self.confirmed

    @property
    def ordered(self) -> str:
        """The id of the state that is being copied; empty if none is."""
        return self._ordered

    # --- all ranks together -----------------------------------------------------------------------------------------

    def begin(self, keeper: KeeperProcess | None) -> None:
        """Finds each rank's partner, and lets the keepers reach each other.

        All ranks call it; one without a keeper passes None. Raises `WriteError` if a rank is gone.
        """
        if not self.is_on:
            return
        rank, options = self._agreement.rank, self._options
        found = arrange(self._agreement.gathered(introduce(options, keeper)), options)
        if any(found.towards(other) for other in range(self._agreement.size)):
            found = arrange(self._agreement.gathered(introduce(options, keeper, found.towards(rank))), options)
        self._arrangement = found
        if found.why:
            self._end(found.why)
            return
        self._partner, self._rate = found.partner(rank), found.rate(rank, options)
        if self._agreement.is_first:
            hosts = len({peer.host for peer in found.peers})
            logger.info(
                "states are copied between %d hosts; this one's to the host of rank %d", hosts, found.partner_of[0]
            )

    def look_for_room(self, nbytes: int, missing: int) -> bool:
        """Checks once whether the replicas fit on all hosts; returns whether to ask again.

        All ranks call it, with the size of a state and the number of staging buffers that they have not allocated yet.
        They ask again when the memory of earlier runs' states has been freed.
        """
        if not self.is_on or self._has_room:
            return False
        rooms = self._agreement.gathered(Room(nbytes, missing, available_memory()))
        why = lack_of_room(self._arrangement.peers, self._arrangement.partner_of, rooms, RESERVE)
        self._has_room = not why
        self._tries += 1
        if why and self._tries > 1:
            self._end(why)
        return bool(why) and self.is_on

    def advance(self, vote: MemoryVote) -> None:
        """Takes the joint vote of all ranks, the same on each of them."""
        if not self.is_on:
            return
        if vote.copies_end:
            self._end(self._ends or "another rank's are not")
        elif self._ordered and not vote.copy_runs:
            if not vote.copy_failed:
                self.confirmed = self._ordered
            self._ordered = ""

    def order(self, state_id: str) -> bool:
        """Decides whether the state that is staged next is copied, the same on all ranks."""
        if not self.is_ready or self._ordered:
            return False
        self._ordered = state_id
        return True

    # --- this rank --------------------------------------------------------------------------------------------------

    def start(self, keeper: KeeperProcess, state_id: str) -> None:
        """Lets the keeper begin to copy a state that it keeps; a failure is told to the others at the next step."""
        assert self._partner is not None
        try:
            keeper.copy(state_id, self._partner, self._rate, self.confirmed)
        except WriteError as error:
            logger.info("a state is not copied to another host: %s", str(error))
        else:
            self._begun = state_id

    def forget(self, keeper: KeeperProcess | None) -> None:
        """Forgets all copies: the job has restored something else, or makes no further copies."""
        self.confirmed = ""
        if self._begun and keeper is not None and keeper.is_ours:
            try:
                keeper.drop_copies()
            except WriteError as error:
                logger.warning("the copies of states on another host may still be there: %s", str(error))
        self._begun = ""

    def vote(self, keeper: KeeperProcess | None) -> MemoryVote:
        """This rank's knowledge about copies, from the status of the one that was begun last."""
        if not self.is_on:
            return MemoryVote()
        if self._ends or not self._ordered:
            return MemoryVote(copies_end=bool(self._ends))
        if keeper is None or self._begun != self._ordered:
            return MemoryVote(copy_failed=True)
        try:
            status = keeper.copy_status()
        except WriteError:
            return MemoryVote(copy_failed=True)
        if status.problem and status.problem != self._problem:
            self._problem = status.problem
            log = logger.info if status.is_given_up else logger.warning
            log("a state was not copied to another host: %s", status.problem)
        if status.is_full:
            self._ends = status.problem
        return MemoryVote(
            copy_runs=status.is_running,
            copy_failed=bool(status.problem),
            copies_end=bool(self._ends),
            is_superseded=status.is_claimed,
        )

    def give_up(self, why: str) -> None:
        """Ends the copies of this rank's states. The others are told at the next step."""
        self._ends = why

    def _end(self, why: str) -> None:
        self.is_on, self._ordered = False, ""
        logger.warning("states are not copied to other hosts, as with copies=1: %s", why)
