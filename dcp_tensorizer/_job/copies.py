"""Decides which states are copied to other hosts, so that the loss of a host does not lose them.

The keepers make the copies. The trainers decide together, in the reduction at the beginning of each step: if no copy is
in progress, all ranks copy the newest state. A copy counts once the states of all ranks are copied.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from .._memory.client import KeeperProcess
from .._memory.peers import Room, lack_of_room
from .._memory.replicas import RESERVE
from .._memory.wire import Address
from .._runtime.memory_limit import available_memory
from .._saving.partners import Arrangement, arrange, introduce
from .._writer_process.options import CopyOptions
from ..errors import WriteError
from .ranks import Agreement

logger = logging.getLogger("dcp_tensorizer")


class MemoryVote(NamedTuple):
    """Facts about a rank's states in memory. In a decision, each tells whether it is true of any rank."""

    has_failed: bool = False  # the newest state could not be kept
    ends: bool = False  # the rank has stopped keeping states
    copy_runs: bool = False  # a copy is in progress
    copy_failed: bool = False  # the last copy is not complete
    copies_end: bool = False  # this rank's states are no longer copied
    is_superseded: bool = False  # a later run of the job has claimed the keeper that holds this rank's copies


NOTHING_IN_MEMORY = MemoryVote()


class PeerCopies:
    """The copies of a rank's states on another host. With ``copies=1`` it does nothing.

    Attributes:
        is_on: States are copied; the same on all ranks.
        confirmed: The id of the newest state that is copied from all ranks; empty if there is none.
        ordered: The id of the state that is being copied; empty if none is. The same on all ranks.
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
        self.ordered = ""
        self._begun = ""  # the state that this rank's keeper has begun to copy last
        self._problem = ""  # why the last copy failed
        self._ends = ""  # why this rank's states are no longer copied

    @property
    def is_ready(self) -> bool:
        """Returns whether there is a partner, and memory for the replicas."""
        return self.is_on and self._has_room

    @property
    def are_awaited(self) -> bool:
        """Returns whether the first copy of this run is yet to come."""
        return self.is_on and not self.confirmed

    # --- all ranks together -----------------------------------------------------------------------------------------

    def begin(self, keeper: KeeperProcess | None) -> None:
        """Finds each rank's partner, and lets the keepers reach each other.

        All ranks call it; a rank without a keeper passes None. Raises `WriteError` if a rank is gone.
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
        """Checks whether the replicas fit on all hosts; returns whether to call it again.

        All ranks call it, with the size of a state and the number of staging buffers that they have yet to allocate.
        They call it a second time once the memory of earlier runs' states is freed. Then it is final.
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
        """Notes the joint vote of all ranks, which is the same on each of them."""
        if not self.is_on:
            return
        if vote.copies_end:
            self._end(self._ends or "another rank's are not")
        elif self.ordered and not vote.copy_runs:
            if not vote.copy_failed:
                self.confirmed = self.ordered
            self.ordered = ""

    def order(self, state_id: str) -> bool:
        """Decides whether to copy the state that is staged next. All ranks decide alike."""
        if not self.is_ready or self.ordered:
            return False
        self.ordered = state_id
        return True

    # --- this rank --------------------------------------------------------------------------------------------------

    def start(self, keeper: KeeperProcess, state_id: str) -> None:
        """Lets the keeper begin to copy a state that it keeps. The other ranks learn of a failure at the next step."""
        assert self._partner is not None
        try:
            keeper.copy(state_id, self._partner, self._rate, self.confirmed)
        except WriteError as error:
            logger.info("a state is not copied to another host: %s", str(error))
        else:
            self._begun = state_id

    def forget(self, keeper: KeeperProcess | None) -> None:
        """Removes all copies, because the job has restored another state, or makes no further copies."""
        self.confirmed = ""
        if self._begun and keeper is not None and keeper.is_ours:
            try:
                keeper.drop_copies()
            except WriteError as error:
                logger.warning("the copies of states on another host may still be there: %s", str(error))
        self._begun = ""

    def vote(self, keeper: KeeperProcess | None) -> MemoryVote:
        """Returns this rank's vote about copies, by the status of the last one."""
        if not self.is_on:
            return MemoryVote()
        if self._ends or not self.ordered:
            return MemoryVote(copies_end=bool(self._ends))
        if keeper is None or self._begun != self.ordered:
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
        """Ends the copies of this rank's states. The other ranks learn of it at the next step."""
        self._ends = why

    def _end(self, why: str) -> None:
        self.is_on, self.ordered = False, ""
        logger.warning("states are not copied to other hosts, as with copies=1: %s", why)
