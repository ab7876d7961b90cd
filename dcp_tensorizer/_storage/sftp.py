"""A checkpoint's directory on an SFTP server: parts written at any offset, and metadata renamed into place."""

from __future__ import annotations

import dataclasses
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any

from ..errors import NotCommitted, ReadError, WriteError
from .base import TAKEN, FileInfo, RangeReader, Sink, temporary_file_name
from .remote import Ranges, RemoteStorage
from .sftp_client import LOST, SftpClient, read_range, sync_file, write_all

__all__ = ["SftpStorage"]


class SftpStorage(RemoteStorage):
    """Files below a directory of an SFTP server.

    Args:
        url: The directory, as the user named it: ``sftp://user:password@host:port/path``, the path taken literally.
        options: For the connection; see `SftpClient`.
        scrub: Removes credentials from a text.
        timeout: Seconds after which a request is given up.

    Raises:
        OSError: there is no connection, or the server refuses the user.
    """

    reads = dataclasses.replace(RemoteStorage.reads, max_threads=4)  # one cipher's stream carries a connection

    def __init__(self, url: str, options: Mapping[str, Any], scrub: Callable[[str], str], timeout: float) -> None:
        address, slash, path = url.partition("://")[2].partition("/")
        super().__init__(url, slash + path, scrub, timeout)
        self.client = SftpClient(address, options, timeout)

    def listing(self) -> tuple[list[FileInfo], list[str]]:
        with self._translated(ReadError, f"cannot list {self.path}"):
            try:
                entries = self.client.call(self._entries)
            except FileNotFoundError:
                raise NotCommitted(f"there is nothing at {self.path}") from None
        regular = [(name, e.st_size, float(e.st_mtime)) for name, e in entries if stat.S_ISREG(e.st_mode)]
        files = [FileInfo(name, nbytes, mtime, mtime) for name, nbytes, mtime in regular]  # it tells no other time
        return files, [name for name, entry in entries if stat.S_ISDIR(entry.st_mode)]

    def _entries(self, channel: Any) -> list[tuple[str, Any]]:
        """The names and attributes of what is in the directory; a link to a file has the file's attributes."""
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

        if parts:
            with self._translated(WriteError, f"cannot create {self.path}"):
                self.client.call(make)

    def create(self, name: str, nbytes: int, *, sync: bool) -> Sink:
        path = self._full(name)
        self.client.call(lambda channel: channel.open(path, "wb").close())
        return _SftpSink(self.client, path, nbytes, sync)

    def put(self, name: str, data: bytes, *, sync: bool, replace: bool = True, save_id: str = "") -> None:
        temporary, path = self._full(temporary_file_name(name, save_id)), self._full(name)
        with self._putting(name, data) as begin:

            def put(channel: Any) -> None:
                begin()
                with channel.open(temporary, "wb") as file:
                    write_all(file, memoryview(data))
                    if sync:
                        sync_file(channel, file)
                if replace:
                    channel.posix_rename(temporary, path)
                else:
                    _rename_to_new(channel, temporary, path)

            try:
                self.client.call(put)
            except Exception:
                _try_to_remove(self.client, temporary)
                raise

    def open(self, name: str) -> RangeReader:
        path = self._full(name)

        def get(start: int, stop: int) -> bytes:
            def read(channel: Any) -> bytes:
                with channel.open(path, "rb") as file:
                    return read_range(channel, file, start, stop)

            return self.client.call(read)

        return Ranges(get)

    def remove(self, *names: str) -> None:
        def remove(channel: Any) -> None:
            for path in map(self._full, names):
                with suppress(FileNotFoundError):
                    channel.remove(path)

        self.client.call(remove)

    def remove_directory(self) -> bool:
        try:
            self.client.call(lambda channel: channel.rmdir(self._root))
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _read(self, name: str, most: int | None) -> bytes:
        def get(channel: Any) -> bytes:
            with channel.open(self._full(name), "rb") as file:
                size = int(file.stat().st_size)
                return read_range(channel, file, 0, size if most is None else min(most, size))

        return self.client.call(get)

    def _head(self, name: str) -> int:
        return int(self.client.call(lambda channel: channel.stat(self._full(name))).st_size)

    def _is_refusal(self, error: Exception) -> bool:
        return not isinstance(error, LOST)


def _make_directory(channel: Any, path: str) -> None:
    """Makes a directory unless somebody else has; servers only say that it failed."""
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
    """Renames a file to a name that must be free; servers only say that it failed."""
    try:
        channel.rename(source, target)
    except OSError:
        with suppress(FileNotFoundError):
            channel.stat(target)
            raise FileExistsError(TAKEN) from None
        raise


def _try_to_remove(client: SftpClient, path: str) -> None:
    """Removes a file that nobody needs, if one attempt is enough for it."""
    with suppress(Exception):
        client.attempt(lambda channel: channel.remove(path))


class _SftpSink(Sink):
    """A file that is written at any offset."""

    part_bytes = 8 << 20
    concurrency = 2

    def __init__(self, client: SftpClient, path: str, nbytes: int, sync: bool) -> None:
        super().__init__()
        self._client = client
        self._path = path
        self._nbytes = nbytes
        self._sync = sync

    def _put_part(self, number: int, data: memoryview) -> None:
        def write(channel: Any) -> None:
            with channel.open(self._path, "r+b") as file:
                file.seek(number * self.part_bytes)
                write_all(file, data)

        self._client.call(write)

    def _complete(self) -> None:
        """Checks that the server has every byte, and asks it to make them durable if it can."""

        def finish(channel: Any) -> int:
            with channel.open(self._path, "r+b") as file:
                if self._sync:
                    sync_file(channel, file)
                return int(file.stat().st_size)

        nbytes = self._client.call(finish)
        if nbytes != self._nbytes:
            raise OSError(f"the server has {nbytes:,} of the file's {self._nbytes:,} bytes")

    def _abort(self) -> None:
        _try_to_remove(self._client, self._path)
