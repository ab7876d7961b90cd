"""What runs of the job before have kept in memory: whether it can be loaded, on all ranks, and is not outdated."""

from __future__ import annotations

import logging
import socket
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.stateful import Stateful

from .._format.index_rows import SaveRecord
from .._storage.base import Storage
from .._survival.keeper_process import Visit
from .._survival.kept_checkpoint import KeptCheckpoint
from .._survival.messages import KeptHead
from .._survival.orphans import holders, reachable, taken
from .._survival.runtime_directory import identity
from ..any_format import KeptReader
from ..errors import CheckpointError, ReadError, describe
from .agreement import Agreement
from .catalogue import Step
from .place import Choice
from .restoring import Selection, SelectivePlanner, error_of_load
from .state_part import StatePart

__all__ = ["Predecessors", "Problem"]

logger = logging.getLogger("dcp_tensorizer")

_DEATH_SECONDS = 5.0  # until a keeper has seen that its trainer is gone
_LOOK_SECONDS = 0.05


class Problem(NamedTuple):
    """Why a state in memory could not be loaded.

    Attributes:
        error: Says it.
        is_damage: The state is of no use; otherwise it does not fit what was asked for.
        is_whole: All of it is on this machine; otherwise what does not fit a part of it may fit the whole.
        has_touched: Some of the target may have been overwritten.
    """

    error: CheckpointError
    is_damage: bool
    is_whole: bool
    has_touched: bool


class Predecessors:
    """The keepers of runs before, on this machine.

    Args:
        folder: Of the job.
        agreement: Of all ranks.
        run: This run of the job.
        visits: Connections to them.

    Attributes:
        nbytes: Of the buffer that this rank has loaded from; 0 if there is none.
    """

    def __init__(self, folder: Storage, agreement: Agreement, run: str, visits: Sequence[Visit]) -> None:
        self._folder = folder
        self._agreement = agreement
        self._run = run
        self.nbytes = 0
        self._visits = list(visits)

    def claim(self) -> str:
        """Has the keepers wait for this run; says why one does not, which is that a run of the job is alive."""
        deadline = time.monotonic() + _DEATH_SECONDS
        for visit in self._visits:
            while True:
                try:
                    if visit.claim(self._run):
                        break
                except ReadError:  # it has just ended
                    break
                if time.monotonic() > deadline:
                    return (
                        f"another run of this job is alive (its trainer is process {visit.found.trainer} on "
                        f"{socket.gethostname()}), or another one is being started: end it first. Two runs would "
                        f"replace each other's checkpoints"
                    )
                time.sleep(_LOOK_SECONDS)
        return ""

    def restore(
        self, state: dict[str, Any], selection: Selection, options: Mapping[str, Any], choice: Choice
    ) -> SaveRecord | Problem | None:
        """Loads the newest state that all ranks can reach in memory, if it goes on from the newest checkpoint.

        Args:
            state: What to load it into.
            selection: Which keys.
            options: For the reader.
            choice: What is on storage.

        Returns:
            What was recorded with it. None, or why it could not be loaded: the state is to be loaded from storage.
            The log says why.

        Raises:
            CheckpointError: it is whole and does not fit, as `load_first` says, or a rank is gone; on all ranks.
        """
        head = self._chosen(choice)
        if head is None:
            return None
        started = time.perf_counter()
        loaded, own = self._load(head, state, selection, options)
        if problem := _joint(self._agreement.gathered(own)):
            logger.error("the state in memory, of step %d, cannot be loaded: %s", head.step, problem.error)
            return problem
        for visit in self._visits:
            visit.forget_all_but(head.id)
        for key, value in loaded.items():
            if isinstance(state[key], Stateful):
                state[key].load_state_dict(value)
            else:
                state[key] = value
        seconds = time.perf_counter() - started
        logger.info("%s: step %d is restored from memory (%.3f s)", self._folder.path, head.step, seconds)
        return head.record

    def end(self) -> None:
        """Ends them, and gives their memory back: what they have is not wanted any more. Idempotent."""
        self.nbytes = 0
        visits, self._visits = self._visits, []
        for visit in visits:
            visit.end()

    def close(self) -> None:
        """Leaves them as they are. Idempotent."""
        visits, self._visits = self._visits, []
        for visit in visits:
            visit.close()

    def _chosen(self, choice: Choice) -> KeptHead | None:
        """The newest state that all ranks can reach, if it is not outdated; the same on all ranks."""
        everywhere = self._agreement.gathered(reachable(self._visits, self._agreement.rank, self._agreement.size))
        common = set.intersection(*map(set, everywhere))
        if not common:
            if any(everywhere) or any(visit.found.heads for visit in self._visits):
                logger.warning(
                    "%s: no state in memory is there for all ranks, as where a machine was replaced: this run goes on "
                    "from storage, which may be some steps older",
                    self._folder.path,
                )
            return None
        # What the first rank's keeper says of it counts.
        head = max((everywhere[0][number] for number in common), key=lambda h: (h.step, h.number, h.id))
        tip = choice.candidates[0][0] if choice.candidates else None
        folder, ids = identity(self._folder.location), {step.save_id for step in choice.steps}
        refusal = self._agreement.decided(lambda: _outdated(head, tip, folder, ids))
        if refusal:
            logger.warning("%s: step %d is in memory, and %s", self._folder.path, head.step, refusal)
            return None
        return head

    def _load(
        self, head: KeptHead, state: dict[str, Any], selection: Selection, options: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Problem | None]:
        """Loads a state, on this rank by itself; what was loaded, and why it could not be."""
        path = f"the memory of step {head.step} on rank {self._agreement.rank}"
        planner = SelectivePlanner(path, selection, state)
        is_whole = True
        try:
            plain = StatePart().of(state)
            checkpoint, is_whole = self._opened(head, path)
            with closing(checkpoint), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch's, that one process loads by itself
                dcp_load(
                    plain,
                    storage_reader=KeptReader(checkpoint, options),
                    planner=planner,
                    no_dist=True,
                )
        except (Exception, CheckpointException) as error:
            cause = error_of_load(path, error)
            return {}, Problem(cause, isinstance(cause, ReadError), is_whole, planner.has_begun)
        return plain, None

    def _opened(self, head: KeptHead, path: str) -> tuple[KeptCheckpoint, bool]:
        """A state as a checkpoint, and whether this machine has all of it; raises `ReadError`."""
        try:
            states = taken(holders(self._visits, head.id, self._agreement.rank), head.id)
            self.nbytes = states[-1][0].state.nbytes
            return KeptCheckpoint(path, states), len(states) == head.world_size
        except Exception as error:  # it is of another release, say
            raise ReadError(f"{path} cannot be read: {describe(error)}") from error


def _joint(problems: Sequence[Problem | None]) -> Problem | None:
    """What has come of all ranks' loads.

    Raises:
        CheckpointError: a rank's state is whole, and does not fit.
    """
    found = [problem for problem in problems if problem is not None]
    if misfit := next((problem for problem in found if problem.is_whole and not problem.is_damage), None):
        raise misfit.error
    if not found:
        return None
    has_touched = any(problem is None or problem.has_touched for problem in problems)  # also where it was loaded
    return found[0]._replace(is_damage=any(problem.is_damage for problem in found), has_touched=has_touched)


def _outdated(head: KeptHead, tip: Step | None, folder: tuple[int, int] | None, ids: Collection[str] = ()) -> str:
    """Why a state does not go on from the newest checkpoint; empty if it does.

    Args:
        head: The state.
        tip: The newest checkpoint.
        folder: The identity of the job's folder.
        ids: Of all checkpoints that are there.
    """
    record = head.record
    assert record is not None
    if head.folder not in (None, folder):
        return "the job's folder is another one now: it is not used"
    if tip is None:
        return "" if record.parent is None else "the checkpoint that it goes on from is gone: it is not used"
    if head.left == tip.save_id and (record.parent is None or record.parent in ids):
        return ""  # the job has gone back to before that one, and nobody has saved since
    if record.parent != tip.save_id and not _has_saved(head, tip):
        return f"another job has saved step {tip.number} since, or removed checkpoints: it is not used"
    return "" if record.step >= tip.number else f"step {tip.number} is on storage: it is not used"


def _has_saved(head: KeptHead, tip: Step) -> bool:
    """Whether a checkpoint is of the run that has kept a state, and newer than what that goes on from."""
    assert head.record is not None
    is_newer = head.parent_step is None or tip.number > head.parent_step
    return tip.job == head.job and tip.branch == head.record.branch and is_newer
