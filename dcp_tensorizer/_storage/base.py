"""The contract of a checkpoint's directory: sinks, range reads, and small files that appear complete.

File names are taken literally, without globbing. Only local disks and SFTP rename files, because fsspec's rename copies
them, and globs. Saves and loads never list a directory. Only the manager and the tools do, to find checkpoints.
"""

from __future__ import annotations

import abc
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .._runtime.forks import free_in_child
from ..errors import CheckpointError, ReadError, WriteError
from .redact import redact

# --- tuning of reads --------------------------------------------------------------------------------------------------

UNLIMITED = sys.maxsize
"""No limit on a number of bytes or threads."""


@dataclass(frozen=True)
class ReadTuning:
    """Settings to read a storage at its full speed."""

    max_threads: int = 16
    """The number of parallel reads that reach the full speed."""
    min_threads: int = UNLIMITED
    """The number of threads that begin a load. Others join while these wait for the storage."""
    slice_bytes: int = UNLIMITED
    """The largest piece to read and then hash, so that it is still in the processor's cache."""
    max_coalesced_bytes: int | None = None
    """The largest single read straight into targets. None: the size of the scratch memory."""
    max_gap_bytes: int = 64 << 10
    """The largest gap between two ranges that is cheaper to read than another request."""


TIMEOUT = 600.0
"""Seconds after which the package stops waiting for the storage, unless the user says otherwise."""

TAKEN = "it exists already, and must not be replaced"

FileIdentity = tuple[int | str, ...]
"""Identifies a file and its contents: another file, or other contents, have another identity."""


class Refused(WriteError):
    """The storage refused a write: the file is not there, and will not appear later."""


class Sink(abc.ABC):
    """A new file, written in parts of equal size: in any order and by several threads, unless `in_order` is set.

    A storage's sink defines `_put_part`, `_complete` and `_abort`. The sink of a `SharedFile` is one process's part in
    it: `complete` makes that part durable, and `abort` leaves the file.
    """

    part_bytes: int
    """The size of every part but the last."""
    concurrency = 1
    """The number of parts to write in parallel."""
    in_order = False
    """The sink takes one part at a time, in order."""

    def __init__(self) -> None:
        self.bytes_written = 0
        """Bytes taken so far. It grows as long as the write makes progress."""
        self.write_seconds = 0.0
        """Time spent in `put`, added up over threads."""
        self.complete_seconds = 0.0
        """Time spent in `complete`."""
        self.parts: dict[int, dict[str, str]] = {}
        """The parts that this process wrote, for `Storage.complete_shared`."""
        self._lock = free_in_child(threading.Lock())
        self._is_open = True

    def put_part(self, number: int, data: memoryview) -> None:
        """Writes a part; raises `OSError`. ``data`` begins on a page. Afterwards the caller may change it again."""
        self.put(number * self.part_bytes, data)

    def put(self, offset: int, data: memoryview) -> None:
        """Writes a part at its offset in the file; if `Storage.granule_of` is 1, any bytes. Raises `OSError`.

        ``data`` begins at the same distance from a page as ``offset``. Afterwards the caller may change it again.
        """
        started = time.perf_counter()
        self._put(offset, data)
        with self._lock:
            self.bytes_written += data.nbytes
            self.write_seconds += time.perf_counter() - started

    def complete(self) -> None:
        """Completes the file and makes it durable. Idempotent; raises `OSError`, and then the caller calls `abort`."""
        if not self._is_open:
            return
        started = time.perf_counter()
        self._complete()
        self._is_open = False
        self.complete_seconds += time.perf_counter() - started

    def abort(self) -> None:
        """Drops the file, when no thread writes to it any more. Idempotent; does nothing after `complete`."""
        if self._is_open:
            self._is_open = False
            with suppress(Exception):  # the caller reports the error for which it gives up
                self._abort()

    def _put(self, offset: int, data: memoryview) -> None:
        number, start = divmod(offset, self.part_bytes)
        if start:
            raise OSError(f"no part of {self.part_bytes:,} bytes begins at {offset:,}")
        self._put_part(number, data)

    @abc.abstractmethod
    def _put_part(self, number: int, data: memoryview) -> None:
        """Writes a part."""

    @abc.abstractmethod
    def _complete(self) -> None:
        """Completes the file."""

    @abc.abstractmethod
    def _abort(self) -> None:
        """Removes what there is of the file."""


class SharedFile(NamedTuple):
    """A file that several processes write together. It appears when one of them completes it."""

    name: str
    """The name that the file will have."""
    token: str
    """The storage's name for the incomplete file."""
    nbytes: int
    save_id: str
    """The save that writes it."""


class RangeReader(abc.ABC):
    """An open file whose ranges several threads read."""

    @abc.abstractmethod
    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fills ``buffers``, one after the other, from ``offset`` on; raises `EOFError` or `OSError`."""

    def read_range(self, offset: int, nbytes: int) -> bytes:
        """Reads ``nbytes`` bytes from ``offset`` on; raises `EOFError` or `OSError`."""
        content = bytearray(nbytes)
        self.read_into([memoryview(content)], offset)
        return bytes(content)

    def once(self, offset: int, nbytes: int) -> RangeReader:
        """Returns the fastest reader for a range that this thread reads once, in parts.

        The reader is valid until this thread's next call. Raises `OSError`.
        """
        return self

    def close(self) -> None:  # noqa: B027
        """Closes the file. For remote files there is nothing to do."""


class HardLinks(NamedTuple):
    """A file with several names (hard links). It takes space once, and the record is the same under each name."""

    device: int
    inode: int
    names: int


class FileInfo(NamedTuple):
    """A file in a directory."""

    name: str
    nbytes: int
    modified: float | None
    """When it was last written, in seconds since the epoch; None if unknown. A copy may have the original's time."""
    changed: float | None
    """When it was last created, changed, linked or unlinked here (ctime). No program can set it back."""
    shared: HardLinks | None = None


class DirectoryLock:
    """A lock that tells other jobs that a save is in progress in a directory. A ``with`` block releases it at its end.

    This base class is for storages without locks.
    """

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    @property
    def is_exclusive(self) -> bool:
        """True if no other save is in progress there. False if one may be, and after `share`."""
        return False

    def share(self, timeout: float) -> None:
        """Shares the lock with other saves; raises `WriteError` if that is not possible in ``timeout`` seconds."""

    def release(self) -> None:
        """Ends the lock when the save is over. Idempotent."""


class Storage(abc.ABC):
    """A checkpoint's directory.

    Attributes:
        path: The directory without credentials, for messages and metadata.
        location: The argument with which `open_storage` opens the same directory in another process.
        in_process: The data lives in this process's memory, so that no other process can write it.
        reads: Settings for reads at full speed.
        max_file_bytes: The size that a file should not exceed, unless a single tensor does.
        locks_are_visible: Every job that could save here sees a lock.
        uploads_are_hidden: A file is an upload until it is complete, and no listing shows it.
        may_hang: Calls may never return, because the kernel waits for a disk or a server without a timeout.
        adopts: `adopt` may work here, for files of ``max_adopted_bytes`` at most.
        connection: A connection that storages with the same options share, as long as there is a reference to it. A
            reference that is held from one save to the next saves the time to connect.
        umask: The umask of the save that is written here, if files have modes; None for the process's own.
    """

    path: str
    location: str
    in_process = False
    reads = ReadTuning()
    max_file_bytes = UNLIMITED
    locks_are_visible = False
    uploads_are_hidden = False
    may_hang = False
    adopts = False
    max_adopted_bytes = UNLIMITED
    connection: object = None
    umask: int | None = None

    @abc.abstractmethod
    def child(self, name: str) -> Storage:
        """The storage of a subdirectory."""

    @abc.abstractmethod
    def listing(self) -> tuple[list[FileInfo], list[str]]:
        """The files in the directory and the names of its subdirectories; raises `NotCommitted` or `ReadError`.

        Links to files count as files. Links to directories are left out.
        """

    def file_in_place(self) -> bytes | None:
        """The first bytes of a file that has the directory's path; None if there is none, or that is unknown."""
        return None

    def linked_directories(self) -> list[str]:
        """The names of links to directories elsewhere; raises what `listing` raises."""
        return []

    def uploads(self) -> list[FileInfo]:
        """The files that are being uploaded here or below, which no listing shows; raises `ReadError`.

        Their names are paths from here, their sizes 0, and ``modified`` is when the upload began. `discard` removes
        them.
        """
        return []

    def make_directory(self) -> None:  # noqa: B027
        """Creates the directory and its parents, durably; raises `WriteError`. Object stores have no directories."""

    @abc.abstractmethod
    def create(self, name: str, nbytes: int, *, sync: bool) -> Sink:
        """Creates a new file of ``nbytes`` bytes; raises `OSError`."""

    def granule_of(self, nbytes: int) -> int:
        """The block size of shared files: each block must be written by one process alone.

        Args:
            nbytes: The size of the file.

        Returns:
            1 if any process may write any byte; otherwise a multiple of 8; 0 if processes cannot share a file here.
        """
        return 0

    def begin_shared(self, name: str, nbytes: int, *, save_id: str) -> SharedFile:
        """Begins a file that several processes write; raises `OSError`. `complete_shared` or `abort_shared` ends it."""
        raise NotImplementedError(f"{type(self).__name__}.granule_of says that several processes cannot write a file")

    def open_shared(self, file: SharedFile, *, sync: bool) -> Sink:
        """Opens a shared file that this or another process has begun; raises `OSError`."""
        raise NotImplementedError(f"{type(self).__name__}.granule_of says that several processes cannot write a file")

    def complete_shared(self, file: SharedFile, parts: Mapping[int, Mapping[str, str]], *, replace: bool) -> None:
        """Gives a shared file its name, once all of it is written. The name is durable after `sync_directory`.

        Where possible, a new file keeps its temporary name, too, as after `mark`.

        Args:
            file: The file.
            parts: The `Sink.parts` of all processes.
            replace: Replace an old file. Otherwise an old file is an error, as far as the storage can tell.

        Raises:
            OSError: the file has not got its name, or that is unknown.
        """
        raise NotImplementedError(f"{type(self).__name__}.granule_of says that several processes cannot write a file")

    def mark(self, save_id: str, *names: str) -> None:  # noqa: B027
        """Gives files second, temporary names of a save, where that is possible.

        If the save dies, they and its record prove that it has written these files, or was to remove them. See
        `is_marked`.
        """

    def is_marked(self, name: str, temporary: str) -> bool:
        """Returns whether ``temporary``, a temporary name of ``name``, is another name of the same file.

        On a storage without hard links it returns whether ``temporary`` is of the save that is the file's `owner`.
        """
        owner = self.owner(name)
        return owner is not None and temporary == temporary_file_name(name, owner)

    def owner(self, name: str) -> str | None:
        """The id of the save that has written a shared file, where files carry it; otherwise None."""
        return None

    def unmark(self, save_id: str, *names: str) -> None:  # noqa: B027
        """Removes the temporary names of files; raises `OSError`. Idempotent."""

    def abort_shared(self, file: SharedFile) -> None:  # noqa: B027
        """Drops a shared file that is not complete; raises `OSError`. Idempotent.

        Without a ``token``, it drops all that were begun under that name.
        """

    def sync_directory(self) -> None:  # noqa: B027
        """Makes the names of new files durable, where they are not durable with the files."""

    @abc.abstractmethod
    def put(self, name: str, data: bytes, *, sync: bool, replace: bool = True, save_id: str = "") -> None:
        """Writes a small file, which appears complete or not at all.

        Args:
            name: The name of the file.
            data: Its contents.
            sync: Make the contents durable.
            replace: Replace an old file. Otherwise an old file is an error, as far as the storage can tell, even if
                another job has just put it there.
            save_id: The save to which the file belongs, if any. It is part of the temporary file's name.

        Raises:
            Refused: the file is not there, and will not appear later.
            WriteError: it is unknown whether the file is there, or will appear.
        """

    def put_if(self, name: str, expected: bytes | None, data: bytes, *, sync: bool = True, save_id: str = "") -> bool:
        """Replaces a small file if it has the expected contents; returns whether it did.

        If several writers expect the same contents, one succeeds. That is certain on local disks, in this process's
        memory, and on S3 servers with conditional writes. Elsewhere two writers may succeed at the same moment, and the
        later file stays.

        Args:
            name: The name of the file.
            expected: Its current contents; None: there is no such file.
            data: Its new contents.
            sync: As for `put`.
            save_id: As for `put`.

        Raises:
            ReadError: the current contents cannot be read.
            WriteError: the file cannot be put, or it is unknown whether it was (see `put`).
        """
        if expected is not None and self.read(name) != expected:
            return False
        try:
            self.put(name, data, sync=sync, replace=expected is not None, save_id=save_id)
        except Refused:
            if expected is None and self.head(name) is not None:
                return False
            raise
        return True

    @abc.abstractmethod
    def read(self, name: str, most: int | None = None) -> bytes | None:
        """A small file's contents, ``most`` bytes of them at most; None if it does not exist; raises `ReadError`."""

    def read_range(self, name: str, offset: int, nbytes: int) -> bytes:
        """Reads ``nbytes`` bytes of a file from ``offset`` on; raises `ReadError`."""
        try:
            file = self.open(name)
            try:
                return file.read_range(offset, nbytes)
            finally:
                file.close()
        except (OSError, EOFError) as error:
            message = f"cannot read {nbytes:,} bytes at {offset:,} of {self.path}/{name}: {error}"
            raise ReadError(self.scrub(message)) from self.cause(error)

    @abc.abstractmethod
    def head(self, name: str) -> int | None:
        """A file's size, None if it does not exist; raises `ReadError`."""

    def identity(self, name: str) -> FileIdentity | None:
        """Returns a file's identity; None where `adopt` does not work, or if there is no such file."""
        return None

    def adopt(
        self, source: Storage, source_name: str, identity: FileIdentity, name: str, *, sync: bool
    ) -> FileIdentity | None:
        """Copies or links a file from another directory, without passing its bytes through this process.

        A later attempt to write this file must write the same bytes: a server may still carry out an earlier request.

        Args:
            source: The directory of the existing file.
            source_name: Its name there.
            identity: Its expected identity. A file with another identity is not adopted.
            name: The new file's name.
            sync: Make its data durable, also if another job has written it. The name is durable after `sync_directory`.

        Returns:
            The new file's identity; None if that is not possible, for whatever reason. Then there is no new file.
        """
        return None

    def put_record(self, name: str) -> None:  # noqa: B027
        """Writes a record: a small file that `is_record` recognises in this very directory, and in no copy of it.

        It identifies the files of a save, so that leftovers of a dead one can be removed. Storages without visible
        locks write no record. If a record cannot be written, the save goes on without.
        """

    def is_record(self, name: str) -> bool:
        """Returns whether a file is what `put_record` wrote in this very directory."""
        return False

    def give_up(self) -> None:  # noqa: B027
        """Prevents a `put` that hangs from taking effect if it ever resumes."""

    def links(self) -> list[str]:
        """The `real_path` of each target of a link in the directory."""
        return []

    @property
    def real_path(self) -> str:
        """The directory with all links resolved, so that it has one name."""
        return self.location

    def lock_directory(self) -> DirectoryLock:
        """Locks the directory, which tells other jobs that a save is in progress here; raises `WriteError`."""
        return DirectoryLock()

    @abc.abstractmethod
    def open(self, name: str) -> RangeReader:
        """Opens a file for range reads; raises `OSError`."""

    @contextmanager
    def reading(self, name: str, purpose: str = "") -> Iterator[RangeReader]:
        """Opens a file for a block. Errors of opening and reading it become `ReadError`.

        ``purpose`` follows the file's name in the messages.
        """
        path = f"{self.path}/{name}{purpose}"
        try:
            reader = self.open(name)
        except OSError as error:
            raise ReadError(self.scrub(f"cannot open {path}: {error}")) from self.cause(error)
        try:
            yield reader
        except (OSError, EOFError) as error:
            raise ReadError(self.scrub(f"cannot read {path}: {type(error).__name__}: {error}")) from self.cause(error)
        finally:
            reader.close()

    @contextmanager
    def writing(self, doing: str) -> Iterator[None]:
        """Turns an `OSError` of a block into a `WriteError`: it cannot do ``doing``. Errors of this package pass."""
        try:
            yield
        except CheckpointError:
            raise
        except OSError as error:
            raise WriteError(self.scrub(f"cannot {doing}: {type(error).__name__}: {error}")) from self.cause(error)

    def open_uncached(self, name: str) -> RangeReader:
        """Opens a file to read what is on the medium, not in a cache; raises `OSError`."""
        return self.open(name)

    @abc.abstractmethod
    def remove(self, *names: str) -> None:
        """Removes files; raises `OSError`. A file that does not exist is no error."""

    def discard(self, *names: str) -> None:
        """Removes files, and incomplete ones that a dead writer has left."""
        self.remove(*names)

    def remove_directory(self) -> bool:
        """Removes the directory if it is empty; returns whether it is gone."""
        return True

    def scrub(self, text: str) -> str:
        """``text`` without credentials, for messages that quote another library."""
        return redact(text)

    def cause(self, error: BaseException) -> BaseException | None:
        """The cause to raise an error from: ``error``, or None if its traceback would show credentials."""
        shown = "".join(traceback.format_exception(error))
        return error if self.scrub(shown) == shown else None


def rest_of(buffers: Iterable[memoryview], count: int) -> list[memoryview]:
    """Returns the rest of some buffers after their first ``count`` bytes."""
    rest = []
    for buffer in buffers:
        if count < buffer.nbytes:
            rest.append(buffer[count:])
        count = max(0, count - buffer.nbytes)
    return rest


def temporary_file_name(name: str, save_id: str = "") -> str:
    """The temporary name under which a file is written: one name for each save, a new one for a file of no save."""
    return f"{name}.{save_id or uuid.uuid4().hex}.tmp"


# --- files in memory --------------------------------------------------------------------------------------------------


class MemoryReader(RangeReader):
    """A file, or a range of one, that is in memory."""

    def __init__(self, data: memoryview | bytes, offset: int = 0) -> None:
        self._data = np.frombuffer(data, dtype=np.uint8)
        self._offset = offset

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        position = offset - self._offset
        for buffer in buffers:
            # NumPy copies without the interpreter lock.
            np.frombuffer(buffer, dtype=np.uint8)[:] = self._data[position : position + buffer.nbytes]
            position += buffer.nbytes
