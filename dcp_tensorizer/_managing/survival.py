"""Restarts from memory: the newest states of a job are kept by processes that outlive it, and a later run loads them.

One state is kept on all ranks whenever a rank dies: the one before is forgotten when each rank has the newest. Which
state is loaded, or that none is, all ranks decide together.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import socket
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

from .._format.index_rows import SaveRecord
from .._memory.shared_buffer import SharedBuffer
from .._saving.keeping import described, lack_of_room
from .._saving.saver import Saver
from .._staging.stager import StagedStateDict
from .._storage.base import Storage
from .._survival.keeper_process import KeeperDied, KeeperProcess, visits
from .._survival.messages import KeptHead
from .._survival.runtime_directory import identity, job_name
from .._threads import NEVER, Deadline, in_background
from ..errors import WriteError, describe
from ..planner import SavePlanner
from .agreement import Agreement
from .catalogue import Step
from .place import Choice
from .predecessors import Predecessors, Problem
from .restoring import Selection

__all__ = ["OnStaged", "Survival"]

logger = logging.getLogger("dcp_tensorizer")

_LOOK_SECONDS = 30.0  # whoever does not answer is taken for alive, so that this run is refused

OnStaged = Callable[[StagedStateDict], object]


class _Stage(enum.Enum):
    """How far the keeping has come; it never goes back."""

    READY = enum.auto()
    """Nobody has looked for what runs before have kept."""
    ON = enum.auto()
    ENDING = enum.auto()
    """This rank keeps no more, and the others are told at the next step."""
    OFF = enum.auto()
    """No rank keeps anything."""


class Survival:
    """What a rank keeps in memory, and what runs of the job before have kept. Nothing, if ``seconds`` is 0.

    Args:
        saver: Stages what is kept.
        folder: Of the job.
        template: Of the names of its checkpoints.
        agreement: Of all ranks.
        seconds: How long states are kept when this process is gone.
        buffers: How many staging buffers there may be.

    Attributes:
        run: The run of the job, the same on all ranks; empty if nothing is kept.
        holds: A state may be kept that no save writes.
        has_left: What is kept has been left to a later run.
    """

    def __init__(
        self, saver: Saver, folder: Storage, template: str, agreement: Agreement, seconds: float, buffers: int
    ) -> None:
        self.run = agreement.decided(lambda: uuid.uuid4().hex) if seconds else ""
        # The writer process copies from devices, and cannot do so while it writes.
        self.holds = bool(seconds) and buffers > 2 and saver.options.staging != "device"
        self._saver = saver
        self._folder = folder
        self._template = template
        self._agreement = agreement
        self._seconds = seconds
        self._spares = buffers - 1
        self.has_left = False
        self._stage = _Stage.READY if seconds else _Stage.OFF
        self._process: KeeperProcess | None = None
        self._predecessors = Predecessors(folder, agreement, self.run, [])
        self._keeping: Future[None] | None = None
        self._count = 0
        self._kept: dict[str, SharedBuffer] = {}
        self._written_last: tuple[str, Mapping[tuple[int, int], bytes]] = "", {}  # and its digests
        self._newest: str | None = None  # the state that came last, until it is known of all ranks whether they keep it

    # --- keeping ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Looks for what runs before have kept, and starts the keeper. Every rank calls it, and it begins once.

        Raises:
            WriteError: another run of the job is alive, or a rank is gone; on all ranks.
        """
        if self._stage is not _Stage.READY:
            return
        job = job_name(f"{self._folder.real_path} {self._template}")
        found, silent = visits(job, _LOOK_SECONDS)
        for visit in found:
            if visit.found.job == self.run:  # another rank was quicker
                visit.close()
        before = [visit for visit in found if visit.found.job != self.run]
        self._predecessors = Predecessors(self._folder, self._agreement, self.run, before)
        refusal = _stopped(silent[0]) if silent else self._predecessors.claim()
        if problem := next(filter(None, self._agreement.gathered(refusal)), ""):
            self._predecessors.close()
            raise WriteError(f"{self._folder.path}: {problem}")
        self._stage = _Stage.ON
        self._saver.engine.saves.spares[self] = self._spares
        try:
            self._process = KeeperProcess(job, self.run, self._seconds)
        except WriteError as error:
            self._stop_keeping(str(error))

    def settle(self) -> tuple[bool, bool]:
        """Waits until the newest state is kept; whether it could not be, and whether this rank keeps no more."""
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            error = keeping.exception()
            if isinstance(error, KeeperDied):
                self._stop_keeping(str(error))
            elif error is not None:
                logger.warning("a state is not kept in memory: %s", describe(error))
        if self._stage is _Stage.ON:
            self._look_for_room()
        has_failed = self._newest is not None and self._newest not in self._kept
        return has_failed, self._stage is _Stage.ENDING

    def advance(self, *, has_failed: bool, ends: bool) -> None:
        """Forgets what is not needed, now that it is known of all ranks whether they keep the newest state.

        Args:
            has_failed: A rank could not keep it.
            ends: A rank keeps no more.
        """
        if self._stage is _Stage.OFF:
            return
        newest, self._newest = self._newest, None
        if ends:
            self._stop_keeping("another rank keeps no more")
            self._stage, self.holds = _Stage.OFF, False
            self.end()
        elif newest is not None and has_failed:
            self._forget_all_but([number for number in self._kept if number != newest])
        elif newest is not None:
            self._forget_all_but([newest])
            self._predecessors.end()

    def next_state(self, record: SaveRecord, parent: Step | None, left: Step | None) -> OnStaged | None:
        """What is to be done with the next staged copy, to keep it; None if it is not kept.

        Args:
            record: What the index would say of it.
            parent: The checkpoint that it goes on from.
            left: See `Place`.
        """
        if self._stage is _Stage.OFF:  # it is so on all ranks; this one alone may have lost its keeper just now
            return None
        self._count += 1
        number = self._newest = hashlib.blake2b(f"{self.run} {self._count}".encode(), digest_size=16).hexdigest()
        where = self._agreement.rank, self._agreement.size
        steps = None if parent is None else parent.number, (left.save_id or None) if left else None
        head = KeptHead(number, self._count, self.run, *where, record, *steps, identity(self._folder.location))

        def keep(staged: StagedStateDict) -> None:
            if not staged.staged_save.abandoned:  # a save writes it
                staged.staged_save.on_written = functools.partial(self._written, number)
            self._keeping = in_background(lambda: self._keep(head, staged), name="keep")

        return keep

    def restore(
        self, state: dict[str, Any], selection: Selection, options: Mapping[str, Any], choice: Choice
    ) -> SaveRecord | Problem | None:
        """Loads what a run before has kept: see `Predecessors.restore`."""
        return self._predecessors.restore(state, selection, options, choice) if self._stage is not _Stage.OFF else None

    def discard(self) -> None:
        """Forgets what runs before have kept: it is not wanted."""
        self._predecessors.end()

    def forget(self) -> None:
        """Forgets all that this run has kept: the job goes on from something else."""
        self.settle()
        self._newest = None
        self._forget_all_but([])

    def end(self, deadline: Deadline = NEVER, *, has_saved: bool = False) -> None:
        """Ends the keeper, and gives the memory back. Idempotent.

        Args:
            deadline: Of the waiting for what is being kept.
            has_saved: The newest step of this run is on storage. Otherwise what runs before have kept, and nothing of
                this run has replaced, is left as it is.
        """
        if self._keeping is not None:
            wait_for([self._keeping], deadline.left)
        if has_saved:
            self._predecessors.end()
        self._predecessors.close()
        process, self._process = self._process, None
        if process is not None:
            process.end(deadline)
        self._release(list(self._kept))
        self._saver.engine.saves.spares.pop(self, None)

    def leave(self, deadline: Deadline = NEVER) -> None:
        """Leaves what is kept to a later run: this one has failed. Idempotent; takes what `end` takes."""
        if self._keeping is not None:
            wait_for([self._keeping], deadline.left)
        self.has_left = True
        self._predecessors.close()
        process, self._process = self._process, None
        if process is not None:
            process.leave(deadline)
        self._kept.clear()  # and nothing is written to their buffers any more

    def _keep(self, head: KeptHead, staged: StagedStateDict) -> None:
        staged_save = staged.staged_save
        try:
            staged_save.wait_copied()
            buffer = staged_save.buffer
            assert buffer is not None and self._process is not None
            planner = SavePlanner(enable_plan_caching=False)
            planner.set_up_planner(dict(staged))  # not `items`, which ties it to a save
            what = head, planner.create_local_plan(), planner, buffer, self._seconds
            self._process.keep(described(*what, digests_follow=staged_save.on_written is not None), buffer)
        except BaseException as error:
            if (buffer := staged_save.buffer) is not None:
                if isinstance(error, KeeperDied) and self._process is not None:
                    self._process.kill()  # it may have got the state, and answer later
                buffer.is_kept = False
            raise
        self._kept[head.id] = buffer
        self._tell_digests(head.id)

    def _written(self, number: str, known: Mapping[tuple[int, int], bytes]) -> None:
        """A save has written a state, and taken these digests, before or after the keeper has been told of it."""
        self._written_last = number, known
        if number in self._kept:
            self._tell_digests(number)

    def _tell_digests(self, number: str) -> None:
        """If it has been written. Both threads may come here at once: to be told twice is nothing to the keeper."""
        (written, known), process = self._written_last, self._process
        if written == number and process is not None:
            process.written(number, known)
            self._written_last = "", {}

    def _look_for_room(self) -> None:
        """Keeps no more, if another state cannot be staged without the memory of those that are kept."""
        if len(self._kept) > 1:  # the older one is about to be forgotten
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
            logger.warning("what a run before has kept in memory is given back: %s", why)
            self._predecessors.end()

    def _stop_keeping(self, why: str) -> None:
        """This rank keeps no more. The others are told at the next step."""
        if self._stage is not _Stage.ENDING:
            self._stage = _Stage.ENDING
            logger.warning("states are kept in memory no more, and survive=%g is off: %s", self._seconds, why)
        self._forget_all_but([])

    def _forget_all_but(self, kept: Sequence[str]) -> None:
        forgotten = [number for number in self._kept if number not in kept]
        if not forgotten:
            return
        try:
            if self._process is not None:
                self._process.forget(forgotten)
        except WriteError as error:  # also one that does not answer: what it has is to be overwritten
            if self._process is not None:
                self._process.kill()
            self._release(forgotten)
            self._stop_keeping(str(error))
        else:
            self._release(forgotten)

    def _release(self, numbers: Iterable[str]) -> None:
        for number in numbers:
            if (buffer := self._kept.pop(number, None)) is not None:
                buffer.is_kept = False


def _stopped(path: Path) -> str:
    return (
        f"a run of this job counts as alive, because its keeper on {socket.gethostname()} does not answer at {path}. "
        f"If it is stopped, continue it, or kill its processes (that path is in the keeper's command line). Then start "
        f"again"
    )
