"""A checkpoint's directory on an SFTP server: parts at any offset, pipelined, and metadata by an atomic rename."""

from __future__ import annotations

import copy
import stat
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any

from ..errors import CheckpointError, NotCommitted, ReadError, WriteError
from .base import TAKEN, FileInfo, RangeReader, Ranges, Refused, Sink, Storage, temporary_file_name
from .redact import redact
from .sftp_client import LOST, SftpClient, sync_file, write_all

__all__ = ["SftpStorage"]


class SftpStorage(Storage):
    """Files below a directory of an SFTP server.

    Args:
        url: The directory, as the user named it: ``sftp://user:password@host:port/path``, the path taken literally.
        options: For the connection; see `SftpClient`.
        scrub: Removes credentials from a text.
        timeout: Seconds after which a wait for the server is given up.

    Raises:
        OSError: there is no connection, or the server refuses the user.
    """

    max_threads = 4  # a connection is one cipher's stream
    max_gap_bytes = 512 << 10

    def __init__(self, url: str, options: Mapping[str, Any], scrub: Callable[[str], str], timeout: float) -> None:
        address, slash, path = url.partition("://")[2].partition("/")
        self._root = (slash + path).rstrip("/")
        self._scrub = scrub
        self.path = redact(url)
        self.location = url
        self._client = SftpClient(address, options, timeout)

    def scrub(self, text: str) -> str:
        return self._scrub(text)

    def child(self, name: str) -> Storage:
        child = copy.copy(self)
        child._root, child.path, child.location = (
            f"{where}/{name}" for where in (self._root, self.path, self.location)
        )
        return child

    def listing(self) -> tuple[list[FileInfo], list[str]]:
        try:
            entries = self._client.call(self._entries)
        except FileNotFoundError:
            raise NotCommitted(f"there is nothing at {self.path}") from None
        except Exception as error:
            raise ReadError(self.scrub(f"cannot list {self.path}: {type(error).__name__}: {error}")) from None
        files = [FileInfo(name, e.st_size, float(e.st_mtime)) for name, e in entries if stat.S_ISREG(e.st_mode)]
        return files, [name for name, entry in entries if stat.S_ISDIR(entry.st_mode)]

    def _entries(self, channel: Any) -> list[tuple[str, Any]]:
        """Names and attributes of what is in the directory, of links those of the files that they lead to."""
        entries = [(entry.filename, entry) for entry in channel.listdir_attr(self._root or "/")]
        for number, (name, entry) in enumerate(entries):
            if stat.S_ISLNK(entry.st_mode):
                with suppress(OSError):
                    target = channel.stat(self._full(name))
                    if stat.S_ISREG(target.st_mode):
                        entries[number] = (name, target)
        return entries

    def make_directory(self) -> None:
        parts = [part for part in self._root.split("/") if part]
        lead = "/" if self._root.startswith("/") else ""

        def make(channel: Any) -> None:
            if _is_directory(channel, self._root):
                return
            for path in accumulate(parts, lambda above, name: f"{above}/{name}"):
                _make_directory(channel, lead + path)

        try:
            if parts:
                self._client.call(make)
        except Exception as error:
            raise WriteError(self.scrub(f"cannot create {self.path}: {type(error).__name__}: {error}")) from None

    def create(self, name: str, nbytes: int, *, sync: bool) -> Sink:
        path = self._full(name)
        self._client.call(lambda channel: channel.open(path, "wb").close())
        return _SftpSink(self._client, path, nbytes, sync)

    def sync_directory(self) -> None:
        """The protocol has nothing for it."""

    def put(self, name: str, data: bytes, *, sync: bool, replace: bool = True) -> None:
        temporary, path = self._full(temporary_file_name(name)), self._full(name)
        tries = 0

        def put(channel: Any) -> None:
            nonlocal tries
            tries += 1
            with channel.open(temporary, "wb") as file:
                write_all(file, memoryview(data))
                if sync:
                    sync_file(channel, file)
            if replace:
                channel.posix_rename(temporary, path)
            else:
                _rename_to_new(channel, temporary, path)

        try:
            try:
                self._client.call(put)
            except FileExistsError:
                if self.read(name) != data:  # an answer that was lost, and a retry that met its own file
                    raise
                _drop(self._client, temporary)
        except Exception as error:
            _drop(self._client, temporary)
            # What has become of a try whose answer was lost, another one's failure does not say.
            final = isinstance(error, FileExistsError) or (tries == 1 and not isinstance(error, LOST))
            kind = Refused if final else WriteError
            raise kind(self.scrub(f"cannot write {self.path}/{name}: {type(error).__name__}: {error}")) from None

    def read(self, name: str) -> bytes | None:
        def get(channel: Any) -> bytes:
            with channel.open(self._full(name), "rb") as file:
                file.prefetch()
                return bytes(file.read())

        try:
            return self._client.call(get)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._read_error(name, error) from None

    def head(self, name: str) -> int | None:
        try:
            return int(self._client.call(lambda channel: channel.stat(self._full(name))).st_size)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._read_error(name, error) from None

    def open(self, name: str) -> RangeReader:
        path = self._full(name)

        def get(start: int, stop: int) -> bytes:
            def read(channel: Any) -> bytes:
                with channel.open(path, "rb") as file:
                    (data,) = file.readv([(start, stop - start)])
                    return bytes(data)

            return self._client.call(read)

        return Ranges(get)

    def remove(self, *names: str) -> None:
        def remove(channel: Any) -> None:
            for path in map(self._full, names):
                with suppress(FileNotFoundError):
                    channel.remove(path)

        self._client.call(remove)

    def remove_directory(self) -> bool:
        try:
            self._client.call(lambda channel: channel.rmdir(self._root))
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _full(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _read_error(self, name: str, error: Exception) -> CheckpointError:
        return ReadError(self.scrub(f"cannot read {self.path}/{name}: {type(error).__name__}: {error}"))


def _make_directory(channel: Any, path: str) -> None:
    """Makes a directory unless somebody else has: servers say no more than that it failed."""
    try:
        channel.mkdir(path)
    except OSError:
        if not _is_directory(channel, path):
            raise


def _is_directory(channel: Any, path: str) -> bool:
    try:
        return stat.S_ISDIR(channel.stat(path).st_mode)
    except FileNotFoundError:
        return False


def _rename_to_new(channel: Any, source: str, target: str) -> None:
    """Renames a file to a name that must not be taken; servers say no more than that it failed."""
    try:
        channel.rename(source, target)
    except OSError:
        with suppress(FileNotFoundError):
            channel.stat(target)
            raise FileExistsError(TAKEN) from None
        raise


def _drop(client: SftpClient, path: str) -> None:
    """Removes what is of no use any more, if that can be done at once."""
    with suppress(Exception):
        client.attempt(lambda channel: channel.remove(path))


class _SftpSink:
    """A file that is written at any offset."""

    part_bytes = 8 << 20
    concurrency = 2
    in_order = False

    def __init__(self, client: SftpClient, path: str, nbytes: int, sync: bool) -> None:
        self._client = client
        self._path = path
        self._nbytes = nbytes
        self._sync = sync
        self._lock = threading.Lock()
        self._is_open = True
        self.bytes_written = 0
        self.write_seconds = 0.0
        self.complete_seconds = 0.0

    def put_part(self, number: int, data: memoryview) -> None:
        started = time.perf_counter()

        def write(channel: Any) -> None:
            with channel.open(self._path, "r+b") as file:
                file.seek(number * self.part_bytes)
                write_all(file, data)

        self._client.call(write)
        with self._lock:
            self.bytes_written += data.nbytes
            self.write_seconds += time.perf_counter() - started

    def complete(self) -> None:
        """Checks that the server has everything, and has it make that durable, where it can. Idempotent."""
        if not self._is_open:
            return
        started = time.perf_counter()

        def finish(channel: Any) -> int:
            with channel.open(self._path, "r+b") as file:
                if self._sync:
                    sync_file(channel, file)
                return int(file.stat().st_size)

        found = self._client.call(finish)
        if found != self._nbytes:
            raise OSError(f"the server has {found:,} of the file's {self._nbytes:,} bytes")
        self._is_open = False
        self.complete_seconds += time.perf_counter() - started

    def abort(self) -> None:
        """Removes the file. Idempotent; does nothing after `complete`."""
        if self._is_open:
            self._is_open = False
            _drop(self._client, self._path)
