"""The queue of saves that are flushed from a local folder to the remote, with a record for each.

Every rank of a node has a record for each of its saves, in one folder beside the checkpoints. The state of a save is
part of the name of its record's file. To change the state, a process renames the file, or replaces it with a new one.
So each change is atomic, and if a process dies, the next one finds the last state.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from .._runtime.forks import Descriptor, Finalizer, Home
from .._storage.base import Storage
from .._storage.local import LocalStorage
from .._storage.urls import one_spelling
from ..errors import CheckpointError, MetadataError, NotCommitted, ReadError, WriteError

FOLDER = ".flush"
"""The name of the folder of records, in the local folder."""

WRITING, UNFLUSHED, SENT, REMOTE, LOST, REPORTED = "writing", "unflushed", "sent", "remote", "lost", "told"
OPEN = frozenset({UNFLUSHED, SENT})
"""The states of saves that were handed over to the flush, and are not committed on the remote yet."""
_ORDER = (WRITING, UNFLUSHED, SENT, REMOTE, LOST, REPORTED)

_ENTRY = re.compile(rf"(\d+)-(\d+)-([0-9a-f]{{32}})\.({'|'.join(_ORDER)})")
_RUN = re.compile(r"([0-9a-f]{32})(\..*\.claim)")  # the id of a run that saves here, and the name of its lease's file
_FORGET_SECONDS = 60.0  # the time that a record is retained for processes that wait for its save
_TEMPORARY_SECONDS = 3600.0  # older temporary files are abandoned: writing a record takes milliseconds
_ALIVE = ".writer"


class Commit(msgspec.Struct, frozen=True):
    """A checkpoint, as recorded by the rank that commits it."""

    name: str  # the name of the metadata file
    files: dict[str, int]  # the data files that the metadata names, with their sizes
    overwrite: bool  # a checkpoint on the remote may be replaced


class FlushRecord(msgspec.Struct, frozen=True, rename={"subpath": "place"}):
    """The contents of a record: one rank's part of one save."""

    remote: str  # the remote folder, without credentials
    subpath: str  # the path of the checkpoint, relative to both folders, with slashes; empty for the folders themselves
    rank: int
    id: str  # the id of the rank's save, which is part of the names of its files
    writer: str = ""  # the id of the writer, whose saves are committed in order
    files: dict[str, int] = {}  # the files in the local folder, with their sizes
    commit: Commit | None = None  # on a rank that commits, after the local commit
    reason: str = ""  # why the save was given up


class FlushEntry(NamedTuple):
    """A record, as the name of its file describes it."""

    number: int
    """The position of the save in the queue: later saves have larger numbers."""
    rank: int
    id: str
    state: str
    changed: float
    """The time when the state last changed or the flush last made progress (``time.time()``)."""

    @property
    def stem(self) -> str:
        return f"{self.number:08}-{self.rank}-{self.id}"

    @property
    def name(self) -> str:
        return f"{self.stem}.{self.state}"

    @property
    def is_old(self) -> bool:
        """Returns whether the record was retained long enough for processes that wait for its save."""
        return time.time() - self.changed > _FORGET_SECONDS


class Queue:
    """The records of a local folder, which several processes may use at once.

    If the disk refuses a new state of a record, only this object knows that state, until `retry` has recorded it. Until
    then, all other processes see the previous state, and repeat the step.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / FOLDER
        self._storage = LocalStorage(self.folder)
        self._records: dict[str, FlushRecord] = {}
        self._refused: dict[str, tuple[FlushEntry, FlushRecord]] = {}  # by stem

    @property
    def is_writable(self) -> bool:
        """Returns whether changes to the folder succeed, or fail only because the disk is full."""
        try:
            os.utime(self.folder)
        except OSError as error:
            return error.errno in (errno.ENOSPC, errno.EDQUOT)
        return True

    def entries(self) -> list[FlushEntry]:
        """Returns all records, in the order of their saves. If a record is being renamed, uses the later state.

        Raises `ReadError` if the folder cannot be read.
        """
        try:
            names = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            names = []
        except OSError as error:
            raise ReadError(f"cannot list {self.folder}: {error}") from error
        latest: dict[str, FlushEntry] = {}
        for match in map(_ENTRY.fullmatch, names):
            if match is None:
                continue
            entry = FlushEntry(int(match[1]), int(match[2]), match[3], match[4], time.time())
            try:
                entry = entry._replace(changed=os.stat(self.folder / entry.name).st_mtime)
            except FileNotFoundError:  # another process has just renamed or removed it
                if (state := self.state(entry)) is None:
                    continue
                entry = entry._replace(state=state)
            except OSError as error:
                raise ReadError(f"cannot read {self.folder / entry.name}: {error}") from error
            other = latest.get(entry.stem)
            if other is None or _progress(other) < _progress(entry):
                latest[entry.stem] = entry
        for stem, (entry, _) in list(self._refused.items()):
            if stem in latest and _progress(latest[stem]) < _progress(entry):
                latest[stem] = entry
            else:  # another process has removed the record, or recorded a later state
                self._refused.pop(stem, None)
        return sorted(latest.values())

    def state(self, entry: FlushEntry) -> str | None:
        """Returns the current state of a record. If the record no longer exists, returns None."""
        # In the order of the states, so that a record that is being renamed is found.
        found = [state for state in _ORDER if (self.folder / f"{entry.stem}.{state}").exists()]
        if found and entry.stem in self._refused:
            found.append(self._refused[entry.stem][0].state)
        return max(found, key=_ORDER.index, default=None)

    def record(self, entry: FlushEntry) -> FlushRecord | None:
        """Reads a record, even if another process renames it.

        If the record no longer exists or cannot be read, or this package did not write it, returns None.
        """
        return self._read(entry)[1]

    def _read(self, entry: FlushEntry) -> tuple[FlushEntry, FlushRecord | None]:
        """Reads a record. Returns the entry in the state that the record had when it was read."""
        refused = self._refused.get(entry.stem)
        if refused is not None and refused[0].state == entry.state:
            return entry, refused[1]
        for state in _ORDER[_ORDER.index(entry.state) :]:
            now = entry._replace(state=state)
            if (known := self._records.get(now.name)) is not None:
                return now, known
            with suppress(msgspec.MsgspecError, ValueError, RecursionError, OSError):
                known = msgspec.json.decode((self.folder / now.name).read_bytes(), type=FlushRecord)
                if len(self._records) > 1000:  # bounds the memory of a job with very many saves
                    self._records.clear()
                self._records[now.name] = known
                return now, known
        return entry, None

    def records(
        self, states: Container[str] = _ORDER, remote: str | None = None
    ) -> list[tuple[FlushEntry, FlushRecord]]:
        """Reads the records in some states, in the order of their saves; raises `ReadError`.

        With ``remote``, a `FlushTarget.name`, reads only the records of saves to this remote folder. If another process
        moves a record while it is read, the entry has the later state.
        """
        read = [self._read(entry) for entry in self.entries() if entry.state in states]
        found = [(entry, record) for entry, record in read if record is not None and entry.state in states]
        # Release 0.1.0 recorded the remote as the user had spelled it.
        return [(e, r) for e, r in found if remote in (None, one_spelling(r.remote))]

    def damage(self, entry: FlushEntry) -> str:
        """If the disk cannot read an existing record, returns the reason, otherwise an empty string."""
        try:
            (self.folder / entry.name).read_bytes()
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"its record {self.folder / entry.name} cannot be read: {error}"
        return ""

    def index(self, entry: FlushEntry) -> bytes:
        """Reads the metadata of a checkpoint that was committed locally.

        Raises `MetadataError` if it is missing, and `ReadError` if it cannot be read.
        """
        data = self._storage.read(f"{entry.stem}.index")
        if data is None:
            raise MetadataError(f"{self.folder}/{entry.stem}.index is missing")
        return data

    def begin(self, record: FlushRecord) -> Writing:
        """Creates the record of a save. Call it before writing the first byte, so that leftovers are recognised.

        Raises `CheckpointError` or `OSError` if the record cannot be written.
        """
        self._storage.make_directory()
        number = max((entry.number for entry in self.entries() if entry.id != record.id), default=0) + 1
        writing = FlushEntry(number, record.rank, record.id, WRITING, time.time())
        while True:  # once more if a clean-up takes the save for dead, and removes its unlocked record
            # Not synced: after a failure of the machine, files without a record only take space.
            self._storage.put(writing.name, msgspec.json.encode(record), sync=False)
            with suppress(FileNotFoundError):
                descriptor = os.open(self.folder / writing.name, os.O_RDONLY | os.O_CLOEXEC)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if (self.folder / writing.name).exists():
                    return Writing(self, writing, record, descriptor)
                os.close(descriptor)

    def admit(self, name: str, run: str) -> None:
        """Records a run that saves to this local folder and is about to lease the remote folder. Idempotent.

        ``name`` is the name of the lease's file. The local folder is flushed as long as the remote folder belongs to
        one of the recorded runs (`runs`). Ignores errors.
        """
        with suppress(CheckpointError):  # the next save reports the error
            self._storage.make_directory()
        self._try_to_put(f"{run}{name}", b"")

    def runs(self) -> dict[str, set[str]]:
        """Returns the ids of the runs that have saved to this local folder, by lease file; raises `OSError`."""
        found: dict[str, set[str]] = {}
        for match in map(_RUN.fullmatch, os.listdir(self.folder)):
            if match is not None:
                found.setdefault(match[2], set()).add(match[1])
        return found

    def move(self, entry: FlushEntry, state: str) -> FlushEntry:
        """Moves a record to another state. Raises `FileNotFoundError` if another process has moved it first."""
        moved, path = entry._replace(state=state, changed=time.time()), self._path(entry)
        try:
            os.utime(path)
            os.rename(path, self.folder / moved.name)
        except FileNotFoundError:
            raise
        except OSError:
            if (record := self.record(entry)) is None:
                raise
            self._refused[entry.stem] = moved, record
        else:
            self._refused.pop(entry.stem, None)
        return moved

    def progress(self, entry: FlushEntry) -> None:
        """Records that a flush has made progress. Ignores errors."""
        with suppress(OSError):
            os.utime(self._path(entry))

    def give_up(self, entry: FlushEntry, record: FlushRecord, reason: str, state: str = LOST) -> None:
        """Records that a save will not be on the remote, so that its files can be removed.

        Pass `REPORTED` as ``state`` if the loss has already been reported.
        """
        lost, record = entry._replace(state=state), msgspec.structs.replace(record, reason=reason)
        path = self._path(entry)
        try:
            self._storage.put(lost.name, msgspec.json.encode(record), sync=True)
        except WriteError:
            self._refused[entry.stem] = lost, record
        else:
            self._refused.pop(entry.stem, None)
            self._unlink(path.name)

    def retry(self) -> bool:
        """Records the states that the disk has refused; returns False if it still refuses any."""
        for entry, record in list(self._refused.values()):
            with self.claimed(entry) as is_free, suppress(CheckpointError):
                if is_free:
                    path = self._path(entry)
                    self._storage.put(entry.name, msgspec.json.encode(record), sync=True)
                    self._refused.pop(entry.stem, None)
                    self._unlink(path.name)
        return not self._refused

    def remove(self, entry: FlushEntry) -> None:
        """Removes a record and the files that belong to it. Remove the data files first."""
        self._unlink(*(f"{entry.stem}.{suffix}" for suffix in ("index", "trouble", "committed", *_ORDER)))

    def drop(self, entry: FlushEntry, record: FlushRecord, *, forget: bool = True) -> bool:
        """Removes a rank's local files, and then the record, unless a save or load has locked the files' folder.

        Returns whether it has removed the files. With ``forget=False``, leaves the record.
        """
        folder = self.root / record.subpath
        local = LocalStorage(folder)
        if not folder.is_dir():
            if forget:
                self.remove(entry)
            return False
        try:
            with local.lock_directory() as lock:
                if local.locks_are_visible and not lock.is_exclusive:
                    return False
                local.remove(*record.files)
        except (CheckpointError, OSError):
            return False
        with suppress(OSError):
            while folder != self.root:
                folder.rmdir()
                folder = folder.parent
        if forget:
            self.remove(entry)
        return True

    def drop_written(self, entry: FlushEntry, record: FlushRecord) -> None:
        """Removes the files of an unfinished save, and then its record."""
        local = LocalStorage(self.root / record.subpath)
        with suppress(CheckpointError, OSError):
            names = [file.name for file in local.listing()[0]]
            local.remove(
                *(n for n in names if n.startswith(f"__{record.rank}_") and n.endswith(f"_{record.id}.tensors"))
            )
            remove_unused(local)
        self.remove(entry)  # last: if this process dies before that, the next one finds the files by this record

    def free(self) -> bool:
        """Frees space: removes the local copies of saves that are on the remote; returns whether it removed any."""
        dropped = [
            self.drop(entry, record, forget=entry.is_old)
            for entry, record in self.records({REMOTE})
            if any((self.root / record.subpath / name).exists() for name in record.files)
        ]
        return any(dropped)

    def confirm(self, entry: FlushEntry) -> None:
        """Records, on a rank that is not the coordinator, that the save is committed.

        If the save is lost with a node before it is on the remote, the next job reports the loss as an error.
        """
        self._try_to_put(f"{entry.stem}.committed", b"")

    def is_confirmed(self, entry: FlushEntry) -> bool:
        return (self.folder / f"{entry.stem}.committed").exists()

    def trouble(self, entry: FlushEntry) -> str | None:
        """Returns the last error of flushing a record: empty during a flush without errors, None before and after."""
        with suppress(OSError):
            return (self.folder / f"{entry.stem}.trouble").read_text(encoding="utf-8", errors="replace")
        return None

    def set_trouble(self, entry: FlushEntry, text: str | None) -> bool:
        """Records the last error of flushing a record (see `trouble`); returns False if the disk refuses it."""
        name = f"{entry.stem}.trouble"
        if text is not None:
            return self._try_to_put(name, text.encode())
        self._unlink(name)
        return not (self.folder / name).exists()

    @contextmanager
    def claimed(self, entry: FlushEntry) -> Iterator[bool]:
        """Locks a record in a ``with`` block. Yields whether it is locked, and still in the state of ``entry``."""
        path = self._path(entry)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            yield False
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have moved the record before it was locked.
            is_there = path.exists() and self.state(entry) == entry.state
        except OSError:
            is_there = False
        try:
            yield is_there
        finally:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def is_alive(self, writer: str) -> bool:
        try:
            descriptor = os.open(self.folder / f"{writer}{_ALIVE}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def clean_up(self) -> None:
        """Removes the leftovers of dead processes, and the files of saves that were given up and reported."""
        with suppress(NotCommitted, OSError):
            for file in self._storage.listing()[0]:
                if file.name.endswith(".tmp") and time.time() - (file.changed or 0) > _TEMPORARY_SECONDS:
                    self._unlink(file.name)
                if file.name.endswith(_ALIVE) and not self.is_alive(file.name.removesuffix(_ALIVE)):
                    self._unlink(file.name)
        for entry in self.entries():
            if entry.state == WRITING:
                with self.claimed(entry) as is_dead:
                    record = self.record(entry) if is_dead else None
                    if record is not None:
                        self.drop_written(entry, record)
            elif entry.state == REPORTED and (record := self.record(entry)) is not None:
                self.drop(entry, record)

    def _path(self, entry: FlushEntry) -> Path:
        """Returns the file of a record. If the disk refused the record's state, the file's name has an older state."""
        states = _ORDER[: _ORDER.index(entry.state) + 1] if entry.stem in self._refused else ()
        paths = [self.folder / f"{entry.stem}.{state}" for state in reversed(states)]
        return next((path for path in paths if path.exists()), self.folder / entry.name)

    def _try_to_put(self, name: str, content: bytes) -> bool:
        with suppress(OSError):
            (self.folder / name).write_bytes(content)
            return True
        return False

    def _unlink(self, *names: str) -> None:
        for name in names:
            with suppress(OSError):
                (self.folder / name).unlink(missing_ok=True)


def _progress(entry: FlushEntry) -> tuple[int, float]:
    return _ORDER.index(entry.state), entry.changed


def remove_unused(storage: Storage) -> None:
    """Removes a directory if it is empty and no process has locked it."""
    with storage.lock_directory() as lock:
        if lock.is_exclusive or not storage.locks_are_visible:
            storage.remove_directory()


class AliveMark:
    """Mark of a living writer in a folder of records, until `end` is called or this object is freed.

    Raises `CheckpointError` or `OSError` if the mark cannot be written.
    """

    def __init__(self, queue: Queue, writer: str) -> None:
        queue._storage.make_directory()
        path = queue.folder / f"{writer}{_ALIVE}"
        while True:  # once more if another process takes the writer for dead, and removes its unlocked file
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists():
                break
            os.close(descriptor)
        self._descriptor = Descriptor(descriptor)
        self._remove = Finalizer(self, queue._unlink, path.name)

    def end(self) -> None:
        """Removes the mark. Idempotent."""
        self._remove()
        self._descriptor.close()


class Writing:
    """The record of a save in progress, from `Queue.begin`. It is locked until the save or this process ends."""

    def __init__(self, queue: Queue, entry: FlushEntry, record: FlushRecord, descriptor: int) -> None:
        self.entry = entry
        self.queue = queue
        self.record = record
        self._descriptor = Descriptor(descriptor)
        self._home = Home()
        self._is_handed_over = False
        self._is_aborted = False

    @property
    def is_unfinished(self) -> bool:
        """Returns whether to remove the files if the save ends now. Always False in forked children."""
        return not self._is_handed_over and self._home.is_here

    def written(
        self, files: Mapping[str, int], *, sync: bool, commit: Commit | None = None, index: bytes = b""
    ) -> None:
        """Hands durable files over to the flush. With ``commit``, also commits the save locally.

        If the disk refuses that, removes the local copies of saves that are on the remote, and tries once more. If the
        record cannot be written, raises `WriteError`, and hands over nothing.
        """
        queue, storage, entry = self.queue, self.queue._storage, self.entry._replace(state=UNFLUSHED)
        record = msgspec.structs.replace(self.record, files=dict(files), commit=commit)
        for is_last in (False, True):
            if self._is_aborted:
                raise WriteError(f"{queue.root}/{record.subpath}: the save was interrupted")
            try:
                if commit is not None:
                    storage.put(f"{entry.stem}.index", index, sync=sync)
                self._is_handed_over = True  # set before the write, so that an interruption does not remove the files
                storage.put(entry.name, msgspec.json.encode(record), sync=sync)
                break
            except Exception as error:
                self._is_handed_over = False
                if is_last or not isinstance(error, CheckpointError | OSError) or not queue.free():
                    if isinstance(error, OSError):
                        raise WriteError(f"cannot write to {queue.folder}: {error}") from error
                    raise
        queue._unlink(self.entry.name)
        self.entry = entry
        self._unlock()

    def abort(self) -> None:
        """Removes the local files and the record of a failed save. Idempotent.

        Does nothing if the files were handed over to the flush.
        """
        if self.is_unfinished:
            self._is_aborted = True
            self.queue.drop_written(self.entry, self.record)
            self._unlock()

    def _unlock(self) -> None:
        with suppress(OSError):  # close is not enough: a forked child's copy of the descriptor would hold the lock
            fcntl.flock(self._descriptor.number, fcntl.LOCK_UN)
        self._descriptor.close()
