"""The queue of saves that are flushed from a local folder to the remote, with a record for each.

Every rank of a node has a record for each of its saves, in one folder beside the checkpoints. The contents of a record
never change. Its state is part of the file's name, and changes by renaming. So each step is atomic, and if a process
dies, the next one finds the last state.

A disk may refuse changes while its checkpoints can still be read. Then new states are written to another folder
("aside") in the memory of this machine, which all of its processes can read.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from .._runtime.forks import Descriptor, Finalizer, Home
from .._storage.local import LocalStorage
from ..errors import CheckpointError, MetadataError, NotCommitted, ReadError, WriteError

FOLDER = ".flush"
"""The name of the folder of records, in the local folder."""

WRITING, UNFLUSHED, SENT, REMOTE, LOST, REPORTED = "writing", "unflushed", "sent", "remote", "lost", "told"
OPEN = frozenset({UNFLUSHED, SENT})
"""The states of saves that are not committed on the remote yet."""
_ORDER = (WRITING, UNFLUSHED, SENT, REMOTE, LOST, REPORTED)

_ENTRY = re.compile(rf"(\d+)-(\d+)-([0-9a-f]{{32}})\.({'|'.join(_ORDER)})")
_RUN = re.compile(r"([0-9a-f]{32})(\..*\.claim)")  # the id of a run that saves here, and the name of its lease's file
_TEMPORARY_SECONDS = 3600.0  # the age of abandoned temporary files: writing a record takes milliseconds
_ALIVE = ".writer"
_TRIES = 100  # attempts to list records while others rename them
_FULL = (errno.ENOSPC, errno.EDQUOT)
_MEMORY = ("/dev/shm",)  # preferred, because the folder of temporary files may be on the same disk


class _Moved(Exception):
    """A record was renamed while the folder was listed."""


class Commit(msgspec.Struct, frozen=True):
    """A whole checkpoint, as recorded by the coordinator."""

    name: str  # the name of the metadata file
    files: dict[str, int]  # the files of all ranks, with their sizes
    overwrite: bool  # a checkpoint on the remote may be replaced


class FlushRecord(msgspec.Struct, frozen=True):
    """One rank's part of one save."""

    remote: str  # the remote folder, without credentials
    place: str  # the path of the checkpoint, relative to both folders
    rank: int
    id: str  # the id of the rank's save, which is part of its file names
    writer: str = ""  # the id of the writer, whose saves are committed in order
    files: dict[str, int] = {}  # the files in the local folder, with their sizes
    commit: Commit | None = None  # on the coordinator, after the local commit
    reason: str = ""  # why the save was given up


class FlushEntry(NamedTuple):
    """A record, as listed in the folder."""

    number: int
    """The position of the save: later saves have larger numbers."""
    rank: int
    id: str
    state: str
    changed: float
    """The time when the flush last made progress or ended (``time.time()``)."""

    @property
    def stem(self) -> str:
        return f"{self.number:08}-{self.rank}-{self.id}"

    @property
    def name(self) -> str:
        return f"{self.stem}.{self.state}"


class Queue:
    """The records of a local folder, which several processes may use at once.

    ``is_writable`` is False if the disk refused the last change of a record, except because it was full.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / FOLDER
        self.is_writable = True
        self._storage = LocalStorage(self.folder)
        self._records: dict[str, FlushRecord] = {}

    def entries(self) -> list[FlushEntry]:
        """Returns all records, in the order of their saves. If a record is being renamed, uses the later state."""
        for _ in range(_TRIES):
            with suppress(_Moved):
                return self._listed()
        raise ReadError(f"cannot list {self.folder}: its records change too fast")

    def _listed(self) -> list[FlushEntry]:
        latest: dict[str, FlushEntry] = {}
        try:
            names = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise ReadError(f"cannot list {self.folder}: {error}") from error
        for path in [*(self.folder / name for name in names), *self._files_aside()]:
            if match := _ENTRY.fullmatch(path.name):
                entry = FlushEntry(int(match[1]), int(match[2]), match[3], match[4], _changed(path))
                other = latest.get(entry.stem)
                if other is None and path.parent != self.folder:
                    continue  # the record itself was removed
                if other is None or _progress(other) < _progress(entry):
                    latest[entry.stem] = entry
        return sorted(latest.values())

    def state(self, entry: FlushEntry) -> str | None:
        """Returns the current state of a record. If the record no longer exists, None."""
        # In the order of the states, so that a record that is being renamed is found.
        state = None
        for other in _ORDER:
            if any((folder / f"{entry.stem}.{other}").exists() for folder in self._folders()):
                state = other
        return state

    def record(self, entry: FlushEntry) -> FlushRecord | None:
        """Reads a record, even if another process renames it.

        If the record no longer exists, or this package did not write it, returns None.
        """
        known = self._records.get(entry.name)
        names = [f"{entry.stem}.{state}" for state in _ORDER[_ORDER.index(entry.state) :]]
        for path in [folder / name for name in names for folder in self._folders()] if known is None else ():
            with suppress(msgspec.MsgspecError, ValueError, RecursionError, OSError):
                known = msgspec.json.decode(path.read_bytes(), type=FlushRecord)
                if len(self._records) > 1000:  # bounds the memory of a job with very many saves
                    self._records.clear()
                self._records[entry.name] = known
                break
        return known

    def records(
        self, states: Container[str] = _ORDER, remote: str | None = None
    ) -> list[tuple[FlushEntry, FlushRecord]]:
        """Reads the records in some states, in the order of their saves."""
        found = [(entry, self.record(entry)) for entry in self.entries() if entry.state in states]
        return [(e, r) for e, r in found if r is not None and remote in (None, r.remote)]

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
        """Reads the metadata of a checkpoint that was committed locally; raises `MetadataError`."""
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
        while True:  # again, if a clean-up removes the record, as that of a dead save, before it is locked
            # Not synced: after a failure of the machine, files without a record only take space.
            self._put(writing, record, sync=False)
            with suppress(FileNotFoundError):
                descriptor = os.open(self.folder / writing.name, os.O_RDONLY | os.O_CLOEXEC)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if (self.folder / writing.name).exists():
                    return Writing(self, writing, record, descriptor)
                os.close(descriptor)

    def admit(self, name: str, run: str) -> None:
        """Records that a run saves to this local folder. Idempotent.

        ``name`` is the name of the lease file in the remote folder.
        """
        if run not in self.runs().get(name, ()):
            with suppress(CheckpointError):  # the next save reports the error
                self._storage.make_directory()
            self._put_optional(f"{run}{name}", b"")

    def runs(self) -> dict[str, set[str]]:
        """Returns the ids of the runs that have saved to this local folder, by lease file; raises `ReadError`."""
        try:
            names = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            names = []
        except OSError as error:
            raise ReadError(f"cannot list {self.folder}: {error}") from error
        found: dict[str, set[str]] = {}
        for match in map(_RUN.fullmatch, [*names, *(path.name for path in self._files_aside())]):
            if match is not None:
                found.setdefault(match[2], set()).add(match[1])
        return found

    def move(self, entry: FlushEntry, state: str) -> FlushEntry:
        """Moves a record to another state. If several processes do so at once, one succeeds."""
        moved = entry._replace(state=state, changed=time.time())
        if self._is_aside(entry.name):
            os.rename(self._aside / entry.name, self._aside / moved.name)
            return moved
        try:
            os.utime(self.folder / entry.name)
            os.rename(self.folder / entry.name, self.folder / moved.name)
        except FileNotFoundError:
            raise
        except OSError as error:
            self._put_aside(moved.name, self._content(entry), error)
        return moved

    def progress(self, entry: FlushEntry) -> None:
        """Records that a flush has made progress."""
        with suppress(OSError):
            try:
                os.utime((self._aside if self._is_aside(entry.name) else self.folder) / entry.name)
            except FileNotFoundError:
                pass
            except OSError as error:
                self._put_aside(entry.name, self._content(entry), error)

    def give_up(self, entry: FlushEntry, record: FlushRecord, reason: str, state: str = LOST) -> None:
        """Records that a save will not be on the remote, so that its files can be removed.

        Pass `REPORTED` as ``state`` if the loss has already been reported.
        """
        lost, record = entry._replace(state=state), msgspec.structs.replace(record, reason=reason)
        try:
            self._put(lost, record, sync=True)
        except WriteError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            try:
                self._put_aside(lost.name, msgspec.json.encode(record), error.__cause__)
            except OSError:
                raise error from error.__cause__
        self._unlink(entry.name)

    def remove(self, entry: FlushEntry) -> None:
        """Removes a record and the files that belong to it. Remove the data files before."""
        own = [f"{entry.stem}.{suffix}" for suffix in ("index", "trouble", "committed", *_ORDER)]
        self._unlink(*own)
        if not any(
            (self.folder / name).exists() for name in own
        ):  # otherwise the record would return to an earlier state
            for name in own if self._has_aside() else ():
                with suppress(OSError):
                    (self._aside / name).unlink(missing_ok=True)
            with suppress(OSError):
                self._aside.rmdir()

    def confirm(self, entry: FlushEntry) -> None:
        """Records, on a rank that is not the coordinator, that the save is committed, so that its loss is an error."""
        self._put_optional(f"{entry.stem}.committed", b"")

    def is_confirmed(self, entry: FlushEntry) -> bool:
        """Returns whether `confirm` was called for a record."""
        return any((folder / f"{entry.stem}.committed").exists() for folder in self._folders())

    def trouble(self, entry: FlushEntry) -> str | None:
        """Returns the last error of flushing a record: empty during a flush without errors, None before and after."""
        for folder in self._folders():
            with suppress(OSError):
                return (folder / f"{entry.stem}.trouble").read_text(encoding="utf-8", errors="replace")
        return None

    def set_trouble(self, entry: FlushEntry, text: str | None) -> None:
        """Records the last error of flushing a record (see `trouble`)."""
        name = f"{entry.stem}.trouble"
        if text is None:
            self._unlink(name)
            if self._is_aside(name):
                self._put_optional(name, b"")
        else:
            self._put_optional(name, text.encode())

    @contextmanager
    def claimed(self, entry: FlushEntry) -> Iterator[bool]:
        """Locks a record for the block. Yields whether that succeeded and the record is still in the given state."""
        # Locks the file in the folder even if a later state is aside, because all processes see that file.
        names = [f"{entry.stem}.{state}" for state in _ORDER[: _ORDER.index(entry.state) + 1]]
        name = next((name for name in reversed(names) if (self.folder / name).exists()), entry.name)
        try:
            descriptor = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            yield False
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have moved the record before it was locked.
            is_there = (self.folder / name).exists() and self.state(entry) == entry.state
        except OSError:
            is_there = False
        try:
            yield is_there
        finally:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def is_alive(self, writer: str) -> bool:
        """Returns whether a writer that has saved here is alive."""
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

    def sweep(self) -> None:
        """Removes temporary files and marks of dead processes.

        If the folder is writable again, moves the states that were written aside back to it.
        """
        with suppress(NotCommitted, OSError):
            for file in self._storage.listing()[0]:
                if file.name.endswith(".tmp") and time.time() - (file.changed or 0) > _TEMPORARY_SECONDS:
                    self._unlink(file.name)
                if file.name.endswith(_ALIVE) and not self.is_alive(file.name.removesuffix(_ALIVE)):
                    self._unlink(file.name)
        with suppress(CheckpointError, OSError):
            aside = {path.name: path for path in self._files_aside()}
            for entry in self.entries() if aside else ():
                if entry.name in aside:
                    self._bring_back(entry)
            for name, path in aside.items():
                if _ENTRY.fullmatch(name) is None and not name.endswith(".tmp"):
                    (self.folder / name).write_bytes(path.read_bytes())
                    path.unlink()
            if aside:
                self._aside.rmdir()

    def _bring_back(self, entry: FlushEntry) -> None:
        with self.claimed(entry) as is_free:
            if is_free:
                self._storage.put(entry.name, self._content(entry), sync=True)
                self._unlink(*(f"{entry.stem}.{state}" for state in _ORDER if state != entry.state))
                for state in _ORDER:
                    (self._aside / f"{entry.stem}.{state}").unlink(missing_ok=True)

    def _put(self, entry: FlushEntry, record: FlushRecord, *, sync: bool) -> None:
        self._storage.put(entry.name, msgspec.json.encode(record), sync=sync)

    def _unlink(self, *names: str) -> None:
        for name in names:
            with suppress(OSError):
                (self.folder / name).unlink(missing_ok=True)

    # --- states that are written aside -------------------------------------------------------------------------

    @property
    def _aside(self) -> Path:
        """Returns the folder for changes that the disk refuses; raises `OSError` if `folder` has no status."""
        status = os.stat(self.folder)
        named = f"{os.path.realpath(self.folder)} {status.st_dev} {status.st_ino}".encode("utf-8", "surrogatepass")
        base = next((base for base in _MEMORY if os.access(base, os.W_OK)), tempfile.gettempdir())
        name = hashlib.blake2b(named, digest_size=8).hexdigest()
        return Path(base, f"dcp_tensorizer-flush-{os.getuid()}-{name}")

    def _has_aside(self) -> bool:
        with suppress(OSError):
            status = os.lstat(self._aside)
            return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
        return False

    def _folders(self) -> list[Path]:
        """Returns the folders that may contain a record, the one with later states first."""
        return [self._aside, self.folder] if self._has_aside() else [self.folder]

    def _files_aside(self) -> list[Path]:
        if self._has_aside():
            with suppress(OSError):
                return [self._aside / name for name in os.listdir(self._aside)]
        return []

    def _is_aside(self, name: str) -> bool:
        return self._has_aside() and (self._aside / name).exists()

    def _put_optional(self, name: str, content: bytes) -> None:
        """Writes a file that helps other processes, but is not required. Ignores errors."""
        with suppress(OSError):
            try:
                (self.folder / name).write_bytes(content)
                self.is_writable = True
            except OSError as error:
                self._put_aside(name, content, error)

    def _content(self, entry: FlushEntry) -> bytes:
        record = self.record(entry)
        if record is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), entry.name)
        return msgspec.json.encode(record)

    def _put_aside(self, name: str, content: bytes, error: OSError) -> None:
        """Writes a file aside that the disk has refused with ``error``. If that fails, raises ``error``."""
        self.is_writable = error.errno in _FULL
        try:
            with suppress(FileExistsError):
                self._aside.mkdir(mode=0o700)
            if not self._has_aside():
                raise error
            temporary = self._aside / f"{name}.{os.getpid()}.tmp"
            temporary.write_bytes(content)
            os.replace(temporary, self._aside / name)
        except OSError as other:
            raise error from other


def _changed(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except FileNotFoundError as error:  # another process has renamed it
        raise _Moved from error
    except OSError as error:
        raise ReadError(f"cannot read {path}: {error}") from error


def _progress(entry: FlushEntry) -> tuple[int, float]:
    return _ORDER.index(entry.state), entry.changed


class AliveMark:
    """Marks a writer as alive in a folder of records until `end` is called or this object is freed.

    Raises `CheckpointError` or `OSError` if the mark cannot be written.
    """

    def __init__(self, queue: Queue, writer: str) -> None:
        queue._storage.make_directory()
        path = queue.folder / f"{writer}{_ALIVE}"
        while True:  # again, if another process removes the file, as that of a dead writer, before it is locked
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

        Raises `CheckpointError` or `OSError` if the record cannot be written. Then the save has not changed.
        """
        if self._is_aborted:
            raise WriteError(f"{self.queue.root}/{self.record.place}: the save was interrupted")
        record = msgspec.structs.replace(self.record, files=dict(files), commit=commit)
        entry = self.entry._replace(state=UNFLUSHED)
        if commit is not None:
            self.queue._storage.put(f"{entry.stem}.index", index, sync=sync)
        self._is_handed_over = True  # set before the write, so that an interruption does not remove the files
        try:
            self.queue._put(entry, record, sync=sync)
        except Exception:
            self._is_handed_over = False
            raise
        self.queue._unlink(self.entry.name)
        self.entry = entry
        self._unlock()

    def abort(self) -> None:
        """Removes the record of a failed save whose files were removed. Idempotent; does nothing after `written`."""
        if self.is_unfinished:
            self._is_aborted = True
            self.queue.remove(self.entry)
            self._unlock()

    def _unlock(self) -> None:
        with suppress(OSError):  # close is not enough: a forked child's copy of the descriptor would hold the lock
            fcntl.flock(self._descriptor.number, fcntl.LOCK_UN)
        self._descriptor.close()
