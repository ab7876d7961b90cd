"""The contract of a checkpoint's directory: sinks, range reads, and small files that are written atomically.

File names are literal, never globbed. Only `LocalStorage` and `SftpStorage` rename files: S3 has no rename, and that of
fsspec copies and globs.
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
from ..errors import CheckpointError, ReadError, WriteError, describe
from .redact import redact

# --- tuning of reads --------------------------------------------------------------------------------------------------

UNLIMITED = sys.maxsize


@dataclass(frozen=True)
class ReadTuning:
    """Settings to read a storage at its full speed."""

    max_threads: int = 16
    """The number of parallel reads with which the storage reaches its full speed."""
    min_threads: int = UNLIMITED
    """The number of threads with which a load begins. More threads start while these wait for the storage."""
    slice_bytes: int = UNLIMITED
    """The largest piece to read before it is hashed, so that the hash finds it in the processor's cache."""
    max_coalesced_bytes: int | None = None
    """The largest single read directly into target tensors; by default, the size of a load's scratch memory."""
    max_gap_bytes: int = 64 << 10
    """The largest gap between two ranges that is cheaper to read than to skip with another request."""


TIMEOUT = 600.0
"""The default timeout of storage operations, in seconds."""

TAKEN = "it already exists and must not be replaced"

FileIdentity = tuple[int | str, ...]
"""Identifies a file and its contents. Different contents have different identities.

In S3, two files with the same contents may have the same identity.
"""


class Refused(WriteError):
    """A write was refused. Nothing was written, and the write will not take effect later."""


class Sink(abc.ABC):
    """A new file, written in parts of equal size. Unless `in_order` is set, threads may write parts in any order.

    The sink of a `SharedFile` writes the parts of one process: `complete` completes only these parts, and `abort` does
    not remove the file.
    """

    part_bytes: int
    """The size of every part but the last."""
    concurrency = 1
    """The number of parts to write in parallel."""
    in_order = False
    """Whether the sink takes only one part at a time, in order."""

    def __init__(self) -> None:
        self.bytes_written = 0
        """The number of bytes written so far."""
        self.write_seconds = 0.0
        """Seconds spent in `put`, added up over threads."""
        self.complete_seconds = 0.0
        self.parts: dict[int, dict[str, str]] = {}
        """The parts that this process wrote, for `Storage.complete_shared`."""
        self.is_aborted = False
        """Whether `abort` has begun to remove the file."""
        self._lock = free_in_child(threading.Lock())
        self._is_open = True

    def put_part(self, number: int, data: memoryview) -> None:
        """Writes a part; raises `OSError`. ``data`` begins at a page boundary, and can be reused on return."""
        self.put(number * self.part_bytes, data)

    def put(self, offset: int, data: memoryview) -> None:
        """Writes a part at its offset in the file; raises `OSError`.

        If `Storage.granule_of` returns 1, the part may be any range of the file. ``data`` begins as far from a page
        boundary as ``offset``, and can be reused when the call returns.
        """
        started = time.perf_counter()
        self._put(offset, data)
        with self._lock:
            self.bytes_written += data.nbytes
            self.write_seconds += time.perf_counter() - started

    def complete(self) -> None:
        """Completes the file, and makes its contents durable if it was created with ``sync``. Idempotent.

        After an `OSError` of this method, the caller must call `abort`.
        """
        if not self._is_open:
            return
        started = time.perf_counter()
        self._complete()
        self._is_open = False
        self.complete_seconds += time.perf_counter() - started

    def abort(self) -> None:
        """Removes the file. Idempotent; does nothing after `complete`. No thread may be writing to the file."""
        if self._is_open:
            self._is_open, self.is_aborted = False, True
            with suppress(Exception):  # the caller reports the error that made it abort
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
        """Removes the incomplete file."""


class SharedFile(NamedTuple):
    """A file that several processes write together. It becomes visible when one of them completes it."""

    name: str
    """The file's final name."""
    token: str
    """The storage's name for the incomplete file."""
    nbytes: int
    save_id: str


class RangeReader(abc.ABC):
    """Reader of the ranges of an open file, which several threads may use."""

    @abc.abstractmethod
    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fills ``buffers`` in order with the bytes at ``offset``; raises `EOFError` or `OSError`."""

    def read_range(self, offset: int, nbytes: int) -> bytes:
        """Reads ``nbytes`` bytes at ``offset``; raises `EOFError` or `OSError`."""
        content = bytearray(nbytes)
        self.read_into([memoryview(content)], offset)
        return bytes(content)

    def once(self, offset: int, nbytes: int) -> RangeReader:
        """Returns the fastest reader for a range that this thread reads once, in parts.

        The reader is valid until this thread calls `once` again, for any file. Raises `OSError`.
        """
        return self

    def close(self) -> None:  # noqa: B027
        """Closes the file. Readers of remote files need not define this method."""


class HardLinks(NamedTuple):
    """The identity of a file with several names (hard links), equal for all its names. The file takes up space once."""

    device: int
    inode: int
    names: int


class FileInfo(NamedTuple):
    """A file in a directory."""

    name: str
    nbytes: int
    modified: float | None
    """The time of the last write, in seconds since the epoch, if it is known. Copies may have the original's time."""
    changed: float | None
    """The time when the file's data, attributes or links last changed here (ctime), which programs cannot set.

    On storages without ctimes, equal to ``modified``.
    """
    shared: HardLinks | None = None


class DirectoryLock:
    """A lock on a directory. Saves share it. To remove leftovers or a checkpoint, a process must hold it exclusively.

    This base class locks nothing. Storages without locks use it.
    """

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    @property
    def is_exclusive(self) -> bool:
        """Whether this lock proves that no other save is in progress in the directory. False after `share`."""
        return False

    def share(self, timeout: float) -> None:
        """Shares the lock with other saves. If that takes longer than ``timeout`` seconds, raises `WriteError`."""

    def release(self) -> None:
        """Releases the lock. Idempotent."""


class Storage(abc.ABC):
    """A checkpoint's directory.

    Attributes:
        path: The path or URL of the directory, without credentials, for messages and metadata.
        location: The argument with which `open_storage` opens the same directory in another process.
        in_process: Whether the data is in this process's memory, where no other process can write it.
        reads: Settings for reads at full speed.
        max_file_bytes: The size that a file should not exceed, unless a single tensor does.
        locks_are_visible: Whether every job that could save here sees the lock of `lock_directory`.
        uploads_are_hidden: Whether listings show a file only when it is complete.
        renames: Whether `rename` works, so that a file can have a temporary name until it is complete.
        may_hang: Whether a call may never return, because the kernel waits for a disk or a server without a timeout.
        adopts: Whether `adopt` may succeed here, for files of at most ``max_adopted_bytes``.
        connection: A connection that storages with the same options share while it is referenced. Hold a reference
            between saves to avoid reconnecting.
        umask: The umask of the save, on storages with file modes. By default, the umask of the process.
    """

    path: str
    location: str
    in_process = False
    reads = ReadTuning()
    max_file_bytes = UNLIMITED
    locks_are_visible = False
    uploads_are_hidden = False
    renames = False
    may_hang = False
    adopts = False
    max_adopted_bytes = UNLIMITED
    connection: object = None
    umask: int | None = None

    @abc.abstractmethod
    def child(self, name: str) -> Storage:
        """Returns the storage of a subdirectory."""

    @abc.abstractmethod
    def listing(self) -> tuple[list[FileInfo], list[str]]:
        """Returns the files in the directory and the names of its subdirectories.

        Includes links to files, but not links to directories.

        Raises:
            NotCommitted: the directory does not exist.
            ReadError: the directory cannot be read.
        """

    def file_in_place(self) -> bytes | None:
        """Returns the first bytes of the file that the path names instead of a directory.

        If the path does not name a file, or the storage is not a `LocalStorage`, returns None.
        """
        return None

    def linked_directories(self) -> list[str]:
        """Returns the names of links to directories, except links to direct subdirectories of this one.

        Raises the same errors as `listing`.
        """
        return []

    def uploads(self) -> list[FileInfo]:
        """Returns the incomplete uploads to this directory and below, which listings do not show; raises `ReadError`.

        Names are relative paths, sizes are 0, and ``modified`` is the start of the upload. `discard` removes uploads.
        """
        return []

    def make_directory(self) -> None:  # noqa: B027
        """Creates the directory and its parents, durably; raises `WriteError`. Object stores have no directories."""

    @abc.abstractmethod
    def create(self, name: str, nbytes: int, *, sync: bool) -> Sink:
        """Creates a new file, into which the sink must write ``nbytes`` bytes; raises `OSError`.

        With ``sync``, `Sink.complete` makes the contents durable.
        """

    def granule_of(self, nbytes: int) -> int:
        """Returns the block size of shared files. Two processes must not write to the same block.

        Args:
            nbytes: The size of the file.

        Returns:
            1 if any process may write any byte, otherwise a multiple of 8. If the storage does not
            support shared files, 0.
        """
        return 0

    def begin_shared(self, name: str, nbytes: int, *, save_id: str) -> SharedFile:
        """Creates a file for several processes to write; raises `OSError`.

        End it with `complete_shared` or `abort_shared`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not support shared files (granule_of returns 0)")

    def open_shared(self, file: SharedFile, *, sync: bool) -> Sink:
        """Opens a shared file that this or another process has created; raises `OSError`."""
        raise NotImplementedError(f"{type(self).__name__} does not support shared files (granule_of returns 0)")

    def complete_shared(self, file: SharedFile, parts: Mapping[int, Mapping[str, str]], *, replace: bool) -> None:
        """Gives a completely written shared file its name. The name is durable after `sync_directory`.

        Unless ``replace`` is set, the file also retains its temporary name where possible, as after `mark`.

        Args:
            file: The file.
            parts: The `Sink.parts` of all processes.
            replace: Replace an existing file. Otherwise raise an error, if the storage can detect that file.

        Raises:
            OSError: the file does not have its name, or the outcome is unknown.
        """
        raise NotImplementedError(f"{type(self).__name__} does not support shared files (granule_of returns 0)")

    def mark(self, save_id: str, *names: str) -> None:  # noqa: B027
        """Gives each file a second, temporary name that contains the save's id, where possible.

        If the save dies, these names and the save's record prove that it wrote these files, or was about to remove
        them. See `is_marked`.
        """

    def is_marked(self, name: str, temporary: str) -> bool:
        """Returns whether ``temporary``, a temporary name of ``name``, is another name of the same file.

        On storages without hard links, returns whether ``temporary`` contains the id of the save that wrote the file
        (see `owner`).
        """
        owner = self.owner(name)
        return owner is not None and temporary == temporary_file_name(name, owner)

    def owner(self, name: str) -> str | None:
        """Returns the id of the save that wrote a shared file, or None if the storage does not record ids."""
        return None

    def unmark(self, save_id: str, *names: str) -> None:  # noqa: B027
        """Removes the temporary names of files; raises `OSError`. Idempotent."""

    def abort_shared(self, file: SharedFile) -> None:  # noqa: B027
        """Removes an incomplete shared file; raises `OSError`. Idempotent.

        If ``token`` is empty, removes all incomplete files of that name.
        """

    def sync_directory(self) -> None:  # noqa: B027
        """Makes the names of new files durable, on storages where `Sink.complete` does not."""

    @abc.abstractmethod
    def put(self, name: str, data: bytes, *, sync: bool, replace: bool = True, save_id: str = "") -> None:
        """Writes a small file atomically.

        Args:
            name: The name of the file.
            data: Its contents.
            sync: Make the contents durable.
            replace: Replace an existing file. Otherwise raise `Refused` if the file exists. Some storages do not detect
                a file that another job writes at the same time.
            save_id: The id of the save that the file belongs to, if any. It is part of the temporary file's name.

        Raises:
            Refused: nothing was written, and the write will not take effect later.
            WriteError: the outcome is unknown. The write may still take effect.
        """

    def put_if(self, name: str, expected: bytes | None, data: bytes, *, sync: bool = True, save_id: str = "") -> bool:
        """Replaces a small file if it has the expected contents; returns whether ``data`` was written.

        If several writers expect the same contents, one succeeds. Local disks, this process's memory, and S3 servers
        with conditional writes guarantee that. Elsewhere two writers may both succeed, and then the file has the
        contents of the later one.

        Args:
            name: The name of the file.
            expected: The contents that the file must have now. None if it must not exist.
            data: Its new contents.
            sync: As for `put`.
            save_id: As for `put`.

        Raises:
            ReadError: the current contents cannot be read.
            WriteError: the file cannot be written, or the outcome is unknown (see `put`).
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
        """Returns the contents of a small file, or their first ``most`` bytes; raises `ReadError`.

        If the file does not exist, returns None.
        """

    def read_range(self, name: str, offset: int, nbytes: int) -> bytes:
        """Reads ``nbytes`` bytes of a file at ``offset``; raises `ReadError`."""
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
        """Returns a file's size in bytes. If the file does not exist, returns None. Raises `ReadError`."""

    def identity(self, name: str) -> FileIdentity | None:
        """Returns a file's identity.

        If the file does not exist, its identity cannot be determined, or the storage cannot `adopt`, returns None.
        """
        return None

    def adopt(
        self, source: Storage, source_name: str, identity: FileIdentity, name: str, *, sync: bool
    ) -> FileIdentity | None:
        """Copies or links a file from another directory, without passing its bytes through this process.

        If this fails, the caller must write the same bytes to the new name, because a server may still carry out the
        failed request.

        Args:
            source: The directory of the existing file.
            source_name: Its name there.
            identity: Its expected identity. A file with another identity is not adopted.
            name: The new file's name.
            sync: Make its data durable, even if another job wrote it. The name is durable after `sync_directory`.

        Returns:
            The new file's identity. None if the file was not adopted, for any reason.
        """
        return None

    def put_record(self, name: str) -> None:  # noqa: B027
        """Writes a record: a small file that `is_record` recognises in this directory, but not in a copy of it.

        The record identifies the files of a save, so that the leftovers of a dead save can be removed. Storages without
        visible locks write no record. If the record cannot be written, does nothing.
        """

    def is_record(self, name: str) -> bool:
        """Returns whether a file is a record that `put_record` wrote in this directory."""
        return False

    def give_up(self) -> None:  # noqa: B027
        """Prevents a hung `put` or `complete_shared` from giving a file its name when the call resumes."""

    def links(self) -> list[str]:
        """Returns the `real_path` of the target of each link in the directory."""
        return []

    @property
    def real_path(self) -> str:
        """The directory with all links resolved."""
        return self.location

    def lock_directory(self) -> DirectoryLock:
        """Returns a lock on the directory, which is exclusive if possible; raises `WriteError`."""
        return DirectoryLock()

    @abc.abstractmethod
    def open(self, name: str) -> RangeReader:
        """Opens a file for range reads; raises `OSError`."""

    def opened_path(self, name: str) -> str:
        """Returns the path of the file that `open` opens, for messages."""
        return f"{self.path}/{name}"

    @contextmanager
    def reading(self, name: str, purpose: str = "") -> Iterator[RangeReader]:
        """Opens a file for a ``with`` block. Errors of opening and reading become `ReadError`.

        ``purpose`` follows the file's name in messages.
        """
        path = f"{self.path}/{name}{purpose}"
        try:
            reader = self.open(name)
        except OSError as error:
            raise ReadError(self.scrub(f"cannot open {path}: {error}")) from self.cause(error)
        try:
            yield reader
        except (OSError, EOFError) as error:
            raise ReadError(self.scrub(f"cannot read {path}: {describe(error)}")) from self.cause(error)
        finally:
            reader.close()

    @contextmanager
    def writing(self, doing: str) -> Iterator[None]:
        """Turns an `OSError` of the ``with`` block, but no other error, into a `WriteError`: "cannot ``doing``"."""
        try:
            yield
        except CheckpointError:
            raise
        except OSError as error:
            raise WriteError(self.scrub(f"cannot {doing}: {describe(error)}")) from self.cause(error)

    def open_uncached(self, name: str) -> RangeReader:
        """Opens a file for reads that bypass caches; raises `OSError`."""
        return self.open(name)

    def rename(self, old: str, new: str) -> None:
        """Gives a file another name, and replaces a file that has this name; raises `OSError`. Idempotent."""
        raise NotImplementedError

    @abc.abstractmethod
    def remove(self, *names: str) -> None:
        """Removes files; raises `OSError`. Ignores files that do not exist."""

    def discard(self, *names: str) -> None:
        """Removes files, and the incomplete files that a dead writer left under these names."""
        self.remove(*names)

    def remove_directory(self) -> bool:
        """Removes the directory if it is empty; returns whether the directory no longer exists."""
        return True

    def scrub(self, text: str) -> str:
        """Returns ``text`` without credentials, for messages that quote another library."""
        return redact(text)

    def cause(self, error: BaseException) -> BaseException | None:
        """Returns the cause to raise an error from: ``error``, or None if its traceback shows credentials."""
        shown = "".join(traceback.format_exception(error))
        return error if self.scrub(shown) == shown else None


def rest_of(buffers: Iterable[memoryview], count: int) -> list[memoryview]:
    rest = []
    for buffer in buffers:
        if count < buffer.nbytes:
            rest.append(buffer[count:])
        count = max(0, count - buffer.nbytes)
    return rest


def temporary_file_name(name: str, save_id: str = "") -> str:
    return f"{name}.{save_id or uuid.uuid4().hex}.tmp"


# --- files in memory --------------------------------------------------------------------------------------------------


class MemoryReader(RangeReader):
    """Reader of a file, or of a range of a file, that is in memory."""

    def __init__(self, data: memoryview | bytes, offset: int = 0) -> None:
        self._data = np.frombuffer(data, dtype=np.uint8)
        self._offset = offset

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        position = offset - self._offset
        for buffer in buffers:
            # NumPy releases the GIL while it copies.
            np.frombuffer(buffer, dtype=np.uint8)[:] = self._data[position : position + buffer.nbytes]
            position += buffer.nbytes
