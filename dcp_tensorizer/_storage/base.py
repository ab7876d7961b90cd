"""What the package asks of a checkpoint's directory: sinks, range reads, small files put in place as a whole.

Names are literal: no globbing, and off local disks no rename (fsspec's copies, and globs). Saving and loading never
list a directory; that is for those who look for checkpoints.
"""

from __future__ import annotations

import abc
import traceback
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from ..errors import WriteError
from .redact import redact

__all__ = [
    "TAKEN",
    "TIMEOUT",
    "DirectoryLock",
    "FileInfo",
    "RangeReader",
    "Ranges",
    "Refused",
    "Sink",
    "Storage",
    "rest_of",
]

TIMEOUT = 600.0
"""Seconds after which a wait for the storage is given up, unless the user says otherwise."""

_T = TypeVar("_T")

TAKEN = "there is one already, and it must not be replaced"


class Refused(WriteError):
    """The storage said no: nothing of what was to be written is there, or will be later."""


class Sink(Protocol):
    """A file that is written in parts of equal size, in any order and by several threads unless it says otherwise."""

    part_bytes: int
    """Size of every part but the last."""
    concurrency: int
    """Parts that are worth writing at once."""
    in_order: bool
    """It takes the parts in their order only, one at a time."""
    bytes_written: int
    """Bytes taken so far: it grows as long as the write makes progress."""
    write_seconds: float
    """Time spent in `put_part`, added up over threads."""
    complete_seconds: float
    """Time spent in `complete`, when everything else is done."""

    def put_part(self, number: int, data: memoryview) -> None:
        """Takes a part; ``data`` begins on a page, and is the caller's again afterwards. Raises `OSError`."""

    def complete(self) -> None:
        """Completes the file, and makes it durable; raises `OSError`, and then there is no file."""

    def abort(self) -> None:
        """Drops the file."""


class RangeReader(abc.ABC):
    """An open file to read ranges of, from several threads."""

    @abc.abstractmethod
    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fills ``buffers`` from ``offset`` on; raises `EOFError` or `OSError`."""

    def once(self, offset: int, nbytes: int) -> RangeReader:
        """What this thread can best read a range from, in parts, if no other process reads it too.

        It is good until this thread's next call. Raises `OSError`.
        """
        return self

    def close(self) -> None:  # noqa: B027
        """Nothing is open between requests, unless a storage says otherwise."""


class FileInfo(NamedTuple):
    """A file in a directory."""

    name: str
    nbytes: int
    modified: float | None
    """When it was last written, in seconds since the epoch; None where that is unknown."""


class DirectoryLock:
    """A save under way in a directory, as far as other jobs can see it. This one is of storage where they cannot."""

    def leftovers(self) -> list[str] | None:
        """The files in the directory, if no other save is under way there, until `share`; None if that is unknown."""
        return None

    def share(self, timeout: float) -> None:
        """Lets others save there too, after ``timeout`` seconds at most; raises `WriteError`."""

    def release(self) -> None:
        """The save is over. Idempotent."""


class Storage(abc.ABC):
    """A checkpoint's directory.

    Attributes:
        path: For messages and metadata: without credentials.
        location: What `open_storage` takes to open the same directory in another process.
        in_process: The data lives in this process's memory, so another process cannot write it.
        max_threads: How many reads at once reach its full speed.
        min_threads: With how many of them a load begins; others join while those wait for the storage.
        slice_bytes: A load reads no more at once, so that what it hashes then is still in the processor's cache.
        max_coalesced_bytes: The most that a load reads at once into its targets; None: the size of its scratch memory.
        max_gap_bytes: Reading so much for nothing costs less than another request.
        max_file_bytes: A file should not be larger, unless a single tensor is.
        locks_are_visible: A lock is seen by everybody who could save here.
        connection: Kept from one save to the next, it spares the second one making it: who opens a storage with the
            same options shares it.
    """

    path: str
    location: str
    in_process = False
    max_threads = 16
    min_threads = 1 << 62
    slice_bytes = 1 << 62
    max_coalesced_bytes: int | None = None
    max_gap_bytes = 64 << 10
    max_file_bytes = 1 << 62
    locks_are_visible = False
    connection: object = None

    @abc.abstractmethod
    def child(self, name: str) -> Storage:
        """The storage of a subdirectory."""

    @abc.abstractmethod
    def listing(self) -> tuple[list[FileInfo], list[str]]:
        """The files in the directory, and the names of its subdirectories; raises `ReadError`.

        Links to files are files, and links to directories are left out.

        Raises `NotCommitted` if there is no such directory.
        """

    def uploads(self) -> list[FileInfo]:
        """Files in the directory that somebody has begun to write and that no listing shows; raises `ReadError`.

        `discard` removes them. Their sizes are unknown, and given as 0; ``modified`` is when they were begun.
        """
        return []

    @abc.abstractmethod
    def make_directory(self) -> None:
        """Creates the directory and its parents, durably; raises `WriteError`."""

    @abc.abstractmethod
    def create(self, name: str, nbytes: int, *, sync: bool) -> Sink:
        """Creates a new file of ``nbytes`` bytes."""

    @abc.abstractmethod
    def sync_directory(self) -> None:
        """Makes the names of new files durable."""

    @abc.abstractmethod
    def put(self, name: str, data: bytes, *, sync: bool, replace: bool = True) -> None:
        """Puts a small file in place as a whole; raises `WriteError`.

        Args:
            name: Of the file.
            data: Its contents.
            sync: Make them durable.
            replace: Replace an old file. Otherwise that is an error, also where another job has just put it there, as
                far as the storage can tell.
        """

    @abc.abstractmethod
    def read(self, name: str) -> bytes | None:
        """A small file's contents, None if it does not exist; raises `ReadError`."""

    @abc.abstractmethod
    def head(self, name: str) -> int | None:
        """Bytes in a file, None if it does not exist; raises `ReadError`."""

    def lock_directory(self) -> DirectoryLock:
        """Says that a save is under way here, until the lock is released; raises `WriteError`."""
        return DirectoryLock()

    @abc.abstractmethod
    def open(self, name: str) -> RangeReader:
        """Opens a file for range reads; raises `OSError`."""

    def open_uncached(self, name: str) -> RangeReader:
        """Opens a file for reads of what the medium holds, and not what a cache does; raises `OSError`."""
        return self.open(name)

    @abc.abstractmethod
    def remove(self, *names: str) -> None:
        """Removes files; one that is not there is no error."""

    def discard(self, *names: str) -> None:
        """Removes files and whatever a writer that died left of them."""
        self.remove(*names)

    def remove_directory(self) -> bool:
        """Removes the directory if it is empty; whether it is gone."""
        return True

    def scrub(self, text: str) -> str:
        """``text`` without credentials, for messages that quote another library."""
        return redact(text)

    def cause(self, error: BaseException) -> BaseException | None:
        """An error as the cause of another, unless its traceback would show credentials."""
        shown = "".join(traceback.format_exception(error))
        return error if self.scrub(shown) == shown else None


class Ranges(RangeReader):
    """Range reads by a function that gives the bytes from a first one to before a last one."""

    def __init__(self, get: Callable[[int, int], bytes]) -> None:
        self._get = get

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        wanted = sum(buffer.nbytes for buffer in buffers)
        data = memoryview(self._get(offset, offset + wanted))
        if data.nbytes != wanted:
            raise EOFError(f"the file ends {wanted - data.nbytes:,} bytes too early")
        for buffer in buffers:
            buffer[:] = data[: buffer.nbytes]
            data = data[buffer.nbytes :]


def rest_of(buffers: Iterable[memoryview], count: int) -> list[memoryview]:
    """What follows the first ``count`` bytes of some buffers."""
    rest = []
    for buffer in buffers:
        if count < buffer.nbytes:
            rest.append(buffer[count:])
        count = max(0, count - buffer.nbytes)
    return rest


def temporary_file_name(name: str) -> str:
    """Where a metadata file is written before it is put in place; no two are the same."""
    return f"{name}.{uuid.uuid4().hex}.tmp"
