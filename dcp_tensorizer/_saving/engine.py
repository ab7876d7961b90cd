"""The engine: the staging buffers and the writer process, which the writers of a process share."""

from __future__ import annotations

import logging
import threading
import weakref
from multiprocessing.util import Finalize

from .._runtime.forks import free_in_child, in_child
from .._runtime.recent import Recent
from .._runtime.threads import Deadline
from .._staging.saves import StagedSaves
from .._tiers.target import FlushTarget
from .._version import environment
from .failures import FailureCounter
from .flushing import Flushing
from .reuse import KnownFiles
from .tables import SAVES, KnownTables
from .writer_client import WriterClient

logger = logging.getLogger("dcp_tensorizer")


class Engine:
    """The resources that the writers of a process share.

    Until a writer needs them, no process runs and no memory is allocated. The engine ends with the interpreter, or when
    its last open writer is closed while no save of another writer runs. A later writer starts it again. With
    ``devices`` the writer process sees the trainer's GPUs.

    Attributes:
        checked_keys: Keys whose objects have been checked, see `warn_about_untrusted`.
        sections: The sections of the last indexes, see `entries_section`.
        tables: The tables of locations of the last saves, see `KnownTables`.
        files: The files of the last saves, and the histories of their tensors.
        connection: The connection to the storage of the last save, held open for the next save.
        warned_of_group: Whether the warning that saves share training's process group has been logged.
    """

    def __init__(self, *, devices: bool = False) -> None:
        if logger.isEnabledFor(logging.INFO):  # because `environment` reads the metadata of some installed packages
            logger.info("%s", environment())
        self.saves = StagedSaves()
        self.client = WriterClient(devices=devices)
        self.failures = FailureCounter()
        self.checked_keys: set[str] = set()
        self.sections: Recent[bytes] = Recent(SAVES)
        self.tables = KnownTables()
        self.files = KnownFiles()
        self.connection: object = None
        self.warned_of_group = False
        self._flushings: dict[tuple[str, str], Flushing] = {}
        self._all_flushings: list[weakref.ref[Flushing]] = []
        self._open: list[weakref.ref[object]] = []
        # Reentrant, because a signal handler that closes a writer may interrupt the lock's holder.
        self._opening = free_in_child(threading.RLock())
        # Not `atexit`, whose functions multiprocessing's processes do not call.
        Finalize(None, _exit, (weakref.ref(self),), exitpriority=1)

    def open(self, user: object) -> None:
        """Registers a user of the engine, until `leave` removes the user or the user is freed. Idempotent."""
        with self._opening:
            self._open = [other for other in self._open if other() not in (None, user)]
            self._open.append(weakref.ref(user))

    def leave(self, user: object) -> bool:
        """Removes a user; returns whether it was the last one."""
        with self._opening:
            self._open = [other for other in self._open if other() not in (None, user)]
            return not self._open

    def flushing(self, target: FlushTarget) -> Flushing:
        known = self._flushings.get((target.local, target.name))
        if known is None or known.target != target:  # for example, with another writer's credentials
            known = self._flushings[target.local, target.name] = Flushing(self.client, target)
            alive = [other for other in self._all_flushings if other() is not None]
            self._all_flushings = [*alive, weakref.ref(known)]
        return known

    def end_process(self, deadline: Deadline) -> None:
        """Ends the writer process. Later work starts a new one."""
        for reference in self._all_flushings:  # including replaced ones
            if (flushing := reference()) is not None:
                flushing.stop()
        self.client.end_process(deadline)

    def free(self, deadline: Deadline, stager: object) -> None:
        """Frees the memory and the connection. A buffer with copies still running at the deadline stays.

        States that other stagers have staged since the last user left also stay. `files` also stays, so that jobs that
        close a writer after each save can still reuse unchanged files. The counts of failures are reset: a job that
        closes all of its writers has seen its failures.
        """
        self.client.free()
        self.saves.close(deadline, stager)
        self.connection = None
        self.failures, self.checked_keys = FailureCounter(), set()
        self.sections, self.tables = Recent(SAVES), KnownTables()


def _exit(reference: weakref.ref[Engine]) -> None:
    engine = reference()
    if engine is not None:
        engine.saves.drain_at_exit()
        engine.failures.end_at_exit()


class _Engines(dict[bool, Engine]):
    """The engines of this process, by whether their writer processes see the trainer's GPUs."""


_engines = _Engines()
# Registered before any writer's hook, so that a writer in a forked child gets the child's engine.
in_child(_engines, _Engines.clear)


def engine_of_process(*, devices: bool) -> Engine:
    """Returns an engine of this process, which is made on first use."""
    # Without a lock: a signal handler that makes a writer could interrupt the lock's holder.
    return _engines.get(devices) or _engines.setdefault(devices, Engine(devices=devices))
