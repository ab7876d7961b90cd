"""The engine: the staging buffers and the writer process, which the writers of a process share.

Frameworks make a writer for every save. So a writer is a cheap handle, and what is worth keeping is here.
"""

from __future__ import annotations

import threading
import weakref
from multiprocessing.util import Finalize

from .._forks import free_in_child, in_child
from .._format.entry_writer import EntryWriter
from .._staging.staged_saves import StagedSaves
from .._threads import Deadline
from .._tiers.target import Target
from .failure_counter import FailureCounter
from .flushing import Flushing
from .keeping import Keeping
from .known_tables import KnownTables
from .reuse import KnownFiles
from .write_items import ObjectCheck
from .writer_client import WriterClient

__all__ = ["Engine", "engine_of_process"]


class Engine:
    """What the writers of a process share. It starts nothing, and takes no memory, before the first staging.

    It ends with the interpreter, or when the last writer that is open is closed. A later writer starts it again.

    Args:
        devices: The writer process sees the trainer's GPUs.

    Attributes:
        saves: What was staged, and the buffers that it is in.
        client: Writes them by the writer process.
        failures: Knows how many saves in a row were not committed.
        objects: Warns of objects that will not load.
        entries: Writes what the checkpoints are said to hold.
        tables: What the coordinator knows of where ranks' data is.
        files: What is in the files of the last saves.
        keeping: What of the saves under way is kept in memory, for when this process dies.
        connection: To the storage of the last save, kept for the next one.
        warned_of_group: A warning has said that saves share their process group with training.
    """

    def __init__(self, *, devices: bool = False) -> None:
        self.saves = StagedSaves()
        self.client = WriterClient(devices=devices)
        self.failures = FailureCounter()
        self.objects = ObjectCheck()
        self.entries = EntryWriter()
        self.tables = KnownTables()
        self.files = KnownFiles()
        self.keeping = Keeping()
        self.connection: object = None
        self.warned_of_group = False
        self._flushings: dict[tuple[str, str], Flushing] = {}
        self._all_flushings: list[weakref.ref[Flushing]] = []
        self._open: list[weakref.ref[object]] = []
        # A signal's handler may interrupt its holder, and close a writer.
        self._opening = free_in_child(threading.RLock())
        # `atexit` is not called where multiprocessing ends a process. Before what is kept in memory ends: priority 0.
        Finalize(None, _exit, (weakref.ref(self),), exitpriority=1)

    def open(self, user: object) -> None:
        """Somebody uses it, until he calls `leave` or is gone. Idempotent."""
        with self._opening:
            self._open = [other for other in self._open if other() not in (None, user)]
            self._open.append(weakref.ref(user))

    def leave(self, user: object) -> bool:
        """Somebody uses it no more. Whether he was the last one."""
        with self._opening:
            self._open = [other for other in self._open if other() not in (None, user)]
            return not self._open

    def flushing(self, target: Target) -> Flushing:
        """The flush of a local folder."""
        known = self._flushings.get((target.local, target.name))
        if known is None or known.target != target:  # others have given other credentials, say
            known = self._flushings[target.local, target.name] = Flushing(self.client, target)
            alive = [other for other in self._all_flushings if other() is not None]
            self._all_flushings = [*alive, weakref.ref(known)]
        return known

    def end_process(self, deadline: Deadline) -> None:
        """Ends the writer process, for good unless somebody uses it again."""
        for reference in self._all_flushings:  # also those that another one has replaced
            if (flushing := reference()) is not None:
                flushing.stop()
        self.client.end_process(deadline)

    def free(self, deadline: Deadline, stager: object) -> None:
        """Gives the memory and the connection back; what is still copied at the deadline keeps its buffer.

        It keeps what others than the stager have staged since the last user has left, to begin anew; and what is in
        the files of the last saves, for jobs that close a writer after each save.

        Failures are counted anew: whoever closes all writers has seen them.
        """
        self.client.free()
        self.saves.close(deadline, stager)
        self.connection = None
        self.failures, self.objects = FailureCounter(), ObjectCheck()
        self.entries, self.tables = EntryWriter(), KnownTables()


def _exit(reference: weakref.ref[Engine]) -> None:
    """At the end of the program: a save under way is finished, and if it was not committed, that is said."""
    engine = reference()
    if engine is not None:
        engine.saves.drain_at_exit()
        engine.failures.end_at_exit()


class _Engines(dict[bool, Engine]):
    """The engines of this process, by whether they see its GPUs."""


_engines = _Engines()
# From the start, and so before any writer: what a writer asks for in a forked child is an engine of that child's.
in_child(_engines, _Engines.clear)


def engine_of_process(*, devices: bool) -> Engine:
    """The engine of this process, made when it is first asked for.

    Args:
        devices: Its writer process sees the trainer's GPUs. There is one engine that does, and one that does not.
    """
    # Without a lock: a signal's handler may interrupt its holder, and make a writer.
    return _engines.get(devices) or _engines.setdefault(devices, Engine(devices=devices))
