"""The engine: the staging buffers and the writer process, which the writers of a process share.

Frameworks make a writer for every save. So a writer is a cheap handle, and the engine has what is worth keeping.
"""

from __future__ import annotations

import logging
import re
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from typing import NamedTuple

from torch.distributed.checkpoint.planner import SavePlan

from .._index.locations import RankPlaces
from .._runtime.forks import free_in_child, in_child
from .._runtime.ranks import is_distributed, rank_of_job
from .._runtime.recent import Recent
from .._runtime.threads import Deadline, is_running
from .._staging.buffer_pool import StagedSaves
from .._tiers.target import FlushTarget
from .._version import environment
from ..errors import WriteError, describe
from .flushing import Flushing
from .reuse import KnownFiles
from .write_plan import plan_with
from .writer_client import WriterClient


class Engine:
    """The resources that the writers of a process share. It starts nothing, and takes no memory, before the first
    staging.

    It ends with the interpreter, or when its last open writer is closed. A later writer starts it again. With
    ``devices`` the writer process sees the trainer's GPUs.

    Attributes:
        saves: The staged saves and their buffers.
        client: Writes them through the writer process.
        failures: Counts the saves in a row that were not committed.
        looked_at: Keys whose objects have been looked at, see `warn_of_refused`.
        sections: Those of the last indexes, see `entries_section`.
        tables: The coordinator's memory of the ranks' tables of places.
        files: The contents of the files of the last saves.
        connection: To the storage of the last save, kept for the next one.
        warned_of_group: A warning has said that saves share their process group with training.
    """

    def __init__(self, *, devices: bool = False) -> None:
        if logger.isEnabledFor(logging.INFO):  # it reads the metadata of some installed packages
            logger.info("%s", environment())
        self.saves = StagedSaves()
        self.client = WriterClient(devices=devices)
        self.failures = FailureCounter()
        self.looked_at: set[str] = set()
        self.sections: Recent[bytes] = Recent(_SAVES)
        self.tables = KnownTables()
        self.files = KnownFiles()
        self.connection: object = None
        self.warned_of_group = False
        self._flushings: dict[tuple[str, str], Flushing] = {}
        self._all_flushings: list[weakref.ref[Flushing]] = []
        self._open: list[weakref.ref[object]] = []
        # Reentrant, because a signal handler that closes a writer may interrupt its holder.
        self._opening = free_in_child(threading.RLock())
        # Not `atexit`, which multiprocessing's processes do not call.
        Finalize(None, _exit, (weakref.ref(self),), exitpriority=1)

    def open(self, user: object) -> None:
        """Registers a user of the engine, until it calls `leave` or is freed. Idempotent."""
        with self._opening:
            self._open = [other for other in self._open if other() not in (None, user)]
            self._open.append(weakref.ref(user))

    def leave(self, user: object) -> bool:
        """Removes a user; returns whether it was the last one."""
        with self._opening:
            self._open = [other for other in self._open if other() not in (None, user)]
            return not self._open

    def flushing(self, target: FlushTarget) -> Flushing:
        """The flush of a local folder."""
        known = self._flushings.get((target.local, target.name))
        if known is None or known.target != target:  # such as another writer's credentials
            known = self._flushings[target.local, target.name] = Flushing(self.client, target)
            alive = [other for other in self._all_flushings if other() is not None]
            self._all_flushings = [*alive, weakref.ref(known)]
        return known

    def end_process(self, deadline: Deadline) -> None:
        """Ends the writer process. It is started again if it is needed."""
        for reference in self._all_flushings:  # also those that were replaced
            if (flushing := reference()) is not None:
                flushing.stop()
        self.client.end_process(deadline)

    def free(self, deadline: Deadline, stager: object) -> None:
        """Frees the memory and the connection. A buffer that is still being copied to at the deadline stays.

        States that other stagers have staged since the last user left stay, too, and so do the contents of the last
        files, for jobs that close a writer after each save. Failures are counted from 0 again: a job that closes all of
        its writers has seen them.
        """
        self.client.free()
        self.saves.close(deadline, stager)
        self.connection = None
        self.failures, self.looked_at = FailureCounter(), set()
        self.sections, self.tables = Recent(_SAVES), KnownTables()


def _exit(reference: weakref.ref[Engine]) -> None:
    """Finishes a save in progress at the end of the program, and logs if it was not committed."""
    engine = reference()
    if engine is not None:
        engine.saves.drain_at_exit()
        engine.failures.end_at_exit()


class _Engines(dict[bool, Engine]):
    """The engines of this process, by whether their writer processes see its GPUs."""


_engines = _Engines()
# Registered before those of any writer, so that a writer in a forked child gets an engine of the child's own.
in_child(_engines, _Engines.clear)


def engine_of_process(*, devices: bool) -> Engine:
    """The engine of this process, made on first use: one whose writer process sees the GPUs, and one for everything
    else.
    """
    # Without a lock: a signal handler that makes a writer could interrupt its holder.
    return _engines.get(devices) or _engines.setdefault(devices, Engine(devices=devices))


# --- counting failed saves, so that a failure is reported even if its future is dropped -------------------------------

logger = logging.getLogger("dcp_tensorizer")

_SAVES = 4  # to remember: a job may save its model and its optimizer in turn, and other states between them
_UNKNOWN = "it was interrupted, or another rank or a collective failed: the caller of the save has got the error"
_END_SECONDS = 5.0  # for the thread of a save that is over, at the end of the program
_DESTROYED = (
    "the process group was destroyed before it was over: close the writer or the manager, or leave its `with` block, "
    "before destroy_process_group()"
)


@dataclass(slots=True)
class _Outcome:
    path: str
    """Empty if there is none."""
    group: str | None
    """The name of its process group."""
    error: str = _UNKNOWN
    is_coordinator: bool | None = None
    """None before DCP has set it."""
    was_distributed: bool = field(default_factory=is_distributed)
    """There was a process group when it began."""

    @property
    def cause(self) -> str:
        """Why it failed, as far as that is known here."""
        is_destroyed = self.was_distributed and not is_distributed()
        return _DESTROYED if self.error is _UNKNOWN and is_destroyed else self.error

    @property
    def name(self) -> str:
        return f"the save to {self.path}" if self.path else "a save without a path"


class FailuresInARow:
    """The saves that were not committed since the last one that was."""

    def __init__(self) -> None:
        self.count = 0
        self.last_error = ""
        self.last_committed = "none"

    def failed(self, error: str) -> None:
        """Counts a save that was not committed."""
        self.count += 1
        self.last_error = error

    def committed(self, path: str) -> None:
        """Notes that a save was committed."""
        self.count, self.last_committed = 0, path

    def check(self, limit: int | None, count: int | None = None) -> None:
        """Raises `WriteError` when ``limit`` saves in a row have failed; None is no limit. ``count`` is that of another
        rank.
        """
        count = self.count if count is None else count
        if limit is not None and count >= limit:
            raise WriteError(
                f"{count} saves in a row were not committed. The last error was: {self.last_error}. The last "
                f"checkpoint that was committed: {self.last_committed}. Fix the cause; "
                f"SaveLimits(max_consecutive_failures=None) trains on without checkpoints."
            )


class FailureCounter:
    """Counts failed saves in a row, of all writers of a process, because frameworks make a writer for every save.

    The saves of each process group are counted apart, and so are paths that differ in more than numbers. A save belongs
    to its thread. It has failed if it is over and `committed` was not called. Only the coordinator can know; on other
    ranks nothing is counted.
    """

    def __init__(self) -> None:
        self._saves: dict[threading.Thread, _Outcome] = {}
        self._is_coordinator: dict[str | None, bool] = {}
        self._in_a_row: dict[tuple[str | None, str], FailuresInARow] = {}
        self._last_committed: str | None = None

    def begin(self, path: str, group: str | None = None) -> None:
        """Begins a save of a process group on the calling thread, which ends the one before."""
        self.end()
        self._saves[threading.current_thread()] = _Outcome(path, group)

    def set_coordinator(self, is_coordinator: bool) -> None:
        """Sets whether this rank is the coordinator of the calling thread's save, and of later ones of its process
        group that fail early.
        """
        save = self._saves.get(threading.current_thread())
        if save is not None:
            save.is_coordinator = self._is_coordinator[save.group] = is_coordinator

    def failed(self, error: BaseException) -> None:
        """Notes that the calling thread's save fails on this rank."""
        save = self._saves.get(threading.current_thread())
        if save is not None:
            save.error = describe(error)
            logger.error("%s failed: %s", save.name, save.error)

    def committed(self) -> None:
        """Notes that the calling thread's save is committed."""
        save = self._saves.pop(threading.current_thread(), None)
        if save is not None:
            self._last_committed = save.path
            self._in_a_row.pop(_counted_as(save.path, save.group), None)

    def end(self) -> None:
        """Ends the saves of the calling thread and of ended threads: unless committed, they have failed."""
        for thread in list(self._saves):
            if thread is threading.current_thread() or not is_running(thread):
                save = self._saves.pop(thread, None)
                if save is not None and self._coordinates(save):
                    self._in_a_row.setdefault(_counted_as(save.path, save.group), FailuresInARow()).failed(save.cause)
                    if save.error is _UNKNOWN:  # otherwise `failed` has logged it
                        logger.error("%s was not committed: %s", save.name, save.cause)

    def end_at_exit(self) -> None:
        """Logs, at the end of the program, background saves that were not committed, unless their errors are logged
        already.
        """
        for thread, save in list(self._saves.items()):
            if thread is threading.current_thread():
                continue
            thread.join(_END_SECONDS)
            if not is_running(thread) and save.error is _UNKNOWN and self._coordinates(save):
                logger.error("%s was not committed: %s", save.name, save.cause)

    def check(self, limit: int | None, path: str, group: str | None = None) -> None:
        """Raises `WriteError` when ``limit`` saves in a row of a process group to such paths have failed; None is no
        limit.
        """
        if (in_a_row := self._in_a_row.get(_counted_as(path, group))) is not None:
            in_a_row.last_committed = self._last_committed or "none"
            in_a_row.check(limit)

    def _coordinates(self, save: _Outcome) -> bool:
        if save.is_coordinator is not None:
            return save.is_coordinator
        # If a save failed before DCP named its coordinator, it is that of its group's saves before, or else rank 0.
        return self._is_coordinator.get(save.group, rank_of_job() == 0)


def _counted_as(path: str, group: str | None) -> tuple[str | None, str]:
    """What is counted together: many jobs have the step in the path."""
    return group, re.sub(r"\d+", "#", path)


# --- tables of places that the coordinator knows from earlier saves, so that ranks need not send them again -----------
#
# A rank offers the digests of its last tables together with its plan. The coordinator answers, together with the plan
# that it sends back, which of them it knows, and keeps these until the save is over. The answer names the rank's save.
# So an answer that a planner has kept from another save is ignored, and the rank sends its table.

_MAX_BYTES = 256 << 20  # 34 bytes per item: 7 million items of all ranks


class Offer(NamedTuple):
    """A rank's offer in ``SavePlan.storage_data``: the id of its save, and digests of tables.

    The coordinator's answer also has the id of its own save.
    """

    save_id: str
    digests: tuple[bytes, ...]
    save: str = ""


class KnownTables:
    """A rank's memory of its own tables' digests, and a coordinator's of all ranks' tables, up to ``max_bytes``."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._own: deque[bytes] = deque(maxlen=_SAVES)
        self._tables: Recent[bytes] = Recent(max_bytes, size=len)

    @property
    def own(self) -> tuple[bytes, ...]:
        """The digests of this rank's last tables."""
        return tuple(self._own)

    def find(self, digest: bytes) -> bytes | None:
        """A table by its digest; None if it is unknown."""
        return self._tables.find(digest)

    def add_own(self, digest: bytes) -> None:
        """Remembers a table of this rank."""
        if digest not in self._own:
            self._own.append(digest)

    def keep(self, parts: Iterable[RankPlaces]) -> None:
        """Remembers the tables of a save."""
        for part in parts:
            self._tables.keep(part.table_digest, part.table)


class SaveTables:
    """The tables of one save; ``save_id`` is the rank's."""

    def __init__(self, known: KnownTables, save_id: str) -> None:
        self._known = known
        self._save_id = save_id
        self._promised: dict[bytes, bytes] = {}

    def offer(self, plan: SavePlan) -> SavePlan:
        """On a rank: adds to its plan the digests of its tables."""
        return plan_with(plan, Offer(self._save_id, self._known.own))

    def answer(self, plan: SavePlan) -> SavePlan:
        """On the coordinator: adds to a rank's plan the digests that it knows."""
        offer = plan.storage_data
        if not isinstance(offer, Offer):
            return plan
        found = {digest: table for digest in offer.digests if (table := self._known.find(digest)) is not None}
        self._promised.update(found)
        return plan_with(plan, Offer(offer.save_id, tuple(found), self._save_id))

    def save_of(self, plan: SavePlan) -> str:
        """On a rank: the id of the coordinator's save; empty if unknown."""
        answer = plan.storage_data
        return answer.save if isinstance(answer, Offer) and answer.save_id == self._save_id else ""

    def shortened(self, part: RankPlaces, plan: SavePlan) -> RankPlaces:
        """On a rank: its report, without the table if the coordinator knows it."""
        self._known.add_own(part.table_digest)
        answer = plan.storage_data
        is_known = isinstance(answer, Offer) and answer.save_id == self._save_id and part.table_digest in answer.digests
        return part._replace(table=b"") if is_known else part

    def completed(self, parts: Sequence[RankPlaces]) -> list[RankPlaces]:
        """On the coordinator: the ranks' reports with their tables.

        Raises `WriteError`, naming the rank, if a table is unknown.
        """
        whole = [part if part.table else part._replace(table=self._promised_to(part)) for part in parts]
        self._known.keep(whole)
        return whole

    def _promised_to(self, part: RankPlaces) -> bytes:
        try:
            return self._promised[part.table_digest]
        except KeyError:
            raise WriteError(
                f"rank {part.rank} has not sent the places of its data, and the coordinator does not know them: plans "
                f"of two saves were mixed up. Give each save the planner's own plans."
            ) from None
