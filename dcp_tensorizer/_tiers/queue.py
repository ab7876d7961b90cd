"""The records of what has been saved to a local folder, and how far each has come on its way to the remote.

Every rank of a node has a record of each of its saves, in one folder beside the checkpoints. What is in a record is
written once. How far it has come is in the file's name, which changes by renaming. So each step is atomic, and whoever
comes after a death sees which was the last.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from .._descriptor import Descriptor
from .._storage.local import LocalStorage
from ..errors import MetadataError, NotCommitted, ReadError, WriteError

__all__ = [
    "FOLDER",
    "LOST",
    "OPEN",
    "REMOTE",
    "SENT",
    "TOLD",
    "UNFLUSHED",
    "WRITING",
    "Commit",
    "Entry",
    "Queue",
    "Record",
    "Writing",
]

FOLDER = ".flush"
"""The name of the folder of records, in the local folder."""

WRITING, UNFLUSHED, SENT, REMOTE, LOST, TOLD = "writing", "unflushed", "sent", "remote", "lost", "told"
OPEN = frozenset({UNFLUSHED, SENT})
"""What is not on the remote yet, as a checkpoint."""
_ORDER = (WRITING, UNFLUSHED, SENT, REMOTE, LOST, TOLD)

_ENTRY = re.compile(rf"(\d+)-(\d+)-([0-9a-f]{{32}})\.({'|'.join(_ORDER)})")
_TEMPORARY_SECONDS = 3600.0  # a record that is written takes milliseconds
_TRIES = 100  # to list records while others rename them


class _Moved(Exception):
    """A record was renamed while the folder was listed."""


class Commit(msgspec.Struct, frozen=True):
    """What the rank that commits knows of the whole checkpoint.

    Attributes:
        name: Of the metadata file.
        files: Of all ranks, and the bytes in each.
        overwrite: Replace a checkpoint on the remote.
    """

    name: str
    files: dict[str, int]
    overwrite: bool


class Record(msgspec.Struct, frozen=True):
    """One rank's part of one save.

    Attributes:
        remote: The remote folder, without credentials.
        place: Of the checkpoint, below that and below the local folder.
        rank: Who saved.
        id: Of the rank's save: part of the names of its files.
        writer: An id of the writer that saved: its saves are committed in their order.
        files: That the rank wrote to the local folder, and the bytes in each.
        commit: On the rank that commits, when the save is committed locally.
        reason: Why it was given up.
    """

    remote: str
    place: str
    rank: int
    id: str
    writer: str = ""
    files: dict[str, int] = {}
    commit: Commit | None = None
    reason: str = ""


class Entry(NamedTuple):
    """A record, as the folder shows it."""

    number: int
    """Grows from save to save."""
    rank: int
    id: str
    state: str
    changed: float
    """When it last made progress; for one that is on the remote, when that was complete (``time.time()``)."""

    @property
    def stem(self) -> str:
        return f"{self.number:08}-{self.rank}-{self.id}"

    @property
    def name(self) -> str:
        return f"{self.stem}.{self.state}"


class Queue:
    """The records of a local folder. Several processes may use it at once.

    Args:
        root: The local folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / FOLDER
        self._storage = LocalStorage(self.folder)
        self._records: dict[str, Record] = {}

    def entries(self) -> list[Entry]:
        """All records, in the order of their saves. Of one whose state was being changed, the later state."""
        for _ in range(_TRIES):
            with suppress(_Moved):
                return self._listed()
        raise ReadError(f"cannot list {self.folder}: its records change too fast")

    def _listed(self) -> list[Entry]:
        latest: dict[str, Entry] = {}
        try:
            names = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise ReadError(f"cannot list {self.folder}: {error}") from error
        for name in names:
            if match := _ENTRY.fullmatch(name):
                entry = Entry(int(match[1]), int(match[2]), match[3], match[4], self._changed(name))
                other = latest.get(entry.stem)
                if other is None or _ORDER.index(other.state) < _ORDER.index(entry.state):
                    latest[entry.stem] = entry
        return sorted(latest.values())

    def _changed(self, name: str) -> float:
        try:
            return os.stat(self.folder / name).st_mtime
        except FileNotFoundError as error:  # it has another name by now, which the list may lack
            raise _Moved from error
        except OSError as error:
            raise ReadError(f"cannot read {self.folder / name}: {error}") from error

    def record(self, entry: Entry) -> Record | None:
        """What is in a record, also if it is renamed meanwhile.

        None if it is gone, or nobody of this package wrote it.
        """
        known = self._records.get(entry.name)
        for state in _ORDER[_ORDER.index(entry.state) :] if known is None else ():
            with suppress(msgspec.MsgspecError, OSError):
                known = msgspec.json.decode((self.folder / f"{entry.stem}.{state}").read_bytes(), type=Record)
                if len(self._records) > 1000:  # of a job that has saved very often
                    self._records.clear()
                self._records[entry.name] = known
                break
        return known

    def records(self, states: Container[str] = _ORDER, remote: str | None = None) -> list[tuple[Entry, Record]]:
        """The records in some states, and what is in them, in the order of their saves.

        Args:
            states: Which ones.
            remote: Only those that go there.
        """
        found = [(entry, self.record(entry)) for entry in self.entries() if entry.state in states]
        return [(e, r) for e, r in found if r is not None and remote in (None, r.remote)]

    def index(self, entry: Entry) -> bytes:
        """The metadata of a checkpoint that was committed locally; raises `MetadataError`."""
        data = self._storage.read(f"{entry.stem}.index")
        if data is None:
            raise MetadataError(f"{self.folder}/{entry.stem}.index is missing: somebody has removed it")
        return data

    def begin(self, record: Record) -> Writing:
        """Begins a record, before the first byte of a save is written: whoever finds it knows what to clean up.

        Raises:
            CheckpointError, OSError: it cannot be written.
        """
        self._storage.make_directory()
        number = max((entry.number for entry in self.entries() if entry.id != record.id), default=0) + 1
        writing = Entry(number, record.rank, record.id, WRITING, time.time())
        while True:  # until no clean-up has taken it for that of a dead save before it was locked
            # Not synced: if the machine fails, files that nothing names are all that is left.
            self._put(writing, record, sync=False)
            with suppress(FileNotFoundError):
                descriptor = os.open(self.folder / writing.name, os.O_RDONLY | os.O_CLOEXEC)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if (self.folder / writing.name).exists():
                    return Writing(self, writing, record, descriptor)
                os.close(descriptor)

    def move(self, entry: Entry, state: str) -> Entry:
        """Takes a record to another state, now."""
        moved = entry._replace(state=state, changed=time.time())
        os.utime(self.folder / entry.name)
        os.rename(self.folder / entry.name, self.folder / moved.name)
        return moved

    def progress(self, entry: Entry) -> None:
        """Notes that the flush of a record goes on."""
        with suppress(OSError):
            os.utime(self.folder / entry.name)

    def give_up(self, entry: Entry, record: Record, reason: str) -> None:
        """Notes that a save will not be on the remote. What is left of it can be removed then."""
        self._put(entry._replace(state=LOST), msgspec.structs.replace(record, reason=reason), sync=True)
        self._unlink(entry.name)

    def remove(self, entry: Entry) -> None:
        """Removes a record, and what belongs to it; its data must be gone."""
        self._unlink(f"{entry.stem}.index", f"{entry.stem}.trouble", *(f"{entry.stem}.{state}" for state in _ORDER))

    def trouble(self, entry: Entry) -> str | None:
        """What has gone wrong while a record was flushed; empty while it is flushed, None before and after that."""
        with suppress(OSError):
            return (self.folder / f"{entry.stem}.trouble").read_text(encoding="utf-8", errors="replace")
        return None

    def set_trouble(self, entry: Entry, text: str | None) -> None:
        """Notes what has gone wrong."""
        if text is None:
            self._unlink(f"{entry.stem}.trouble")
        else:
            with suppress(OSError):  # a full disk; the flush goes on
                (self.folder / f"{entry.stem}.trouble").write_text(text, encoding="utf-8")

    @contextmanager
    def claimed(self, entry: Entry) -> Iterator[bool]:
        """Whether nobody else works on a record; nobody else will then, until the block ends."""
        try:
            descriptor = os.open(self.folder / entry.name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            yield False
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_there = (self.folder / entry.name).exists()  # not moved before it was locked
        except OSError:
            is_there = False
        try:
            yield is_there
        finally:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def sweep(self) -> None:
        """Removes what is left of records that were being written when their process died."""
        with suppress(NotCommitted, OSError):
            for file in self._storage.listing()[0]:
                if file.name.endswith(".tmp") and time.time() - (file.changed or 0) > _TEMPORARY_SECONDS:
                    self._unlink(file.name)

    def _put(self, entry: Entry, record: Record, *, sync: bool) -> None:
        self._storage.put(entry.name, msgspec.json.encode(record), sync=sync)

    def _put_index(self, entry: Entry, index: bytes, *, sync: bool) -> None:
        self._storage.put(f"{entry.stem}.index", index, sync=sync)

    def _unlink(self, *names: str) -> None:
        for name in names:
            with suppress(OSError):
                (self.folder / name).unlink(missing_ok=True)


class Writing:
    """A record of a save under way. It is locked as long as this object and this process live, and until it is over.

    Made by `Queue.begin`.

    Attributes:
        entry: The record, as the folder shows it.
        queue: It is in this one.
        record: What was known when the save began.
    """

    def __init__(self, queue: Queue, entry: Entry, record: Record, descriptor: int) -> None:
        self.entry = entry
        self.queue = queue
        self.record = record
        self._descriptor = Descriptor(descriptor)
        self._pid = os.getpid()
        self._is_handed_over = False
        self._is_aborted = False

    @property
    def is_unfinished(self) -> bool:
        """Whether what the save has written is of no use if it ends here. A forked child cannot end it."""
        return not self._is_handed_over and os.getpid() == self._pid

    def written(
        self, files: Mapping[str, int], *, sync: bool, commit: Commit | None = None, index: bytes = b""
    ) -> None:
        """The rank's files are durable, and from now on they are flushed. With ``commit``, the save is committed.

        Raises:
            CheckpointError, OSError: it could not be written down: they are not, and it is not.
        """
        if self._is_aborted:
            raise WriteError(f"{self.queue.root}/{self.record.place}: the save was ended before it was over")
        record = msgspec.structs.replace(self.record, files=dict(files), commit=commit)
        entry = self.entry._replace(state=UNFLUSHED)
        if commit is not None:
            self.queue._put_index(entry, index, sync=sync)
        self._is_handed_over = True  # before it is: whoever interrupts this must not have the files removed
        try:
            self.queue._put(entry, record, sync=sync)
        except Exception:
            self._is_handed_over = False
            raise
        self.queue._unlink(self.entry.name)
        self.entry = entry
        self._let_go()

    def abort(self) -> None:
        """The save has failed here, and its files are gone. Idempotent; does nothing after `written`."""
        if self.is_unfinished:
            self._is_aborted = True
            self.queue.remove(self.entry)
            self._let_go()

    def _let_go(self) -> None:
        with suppress(OSError):  # a forked child may have a copy of the descriptor, with which the lock would last
            fcntl.flock(self._descriptor.number, fcntl.LOCK_UN)
        self._descriptor.close()
