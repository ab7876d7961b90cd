"""A checkpoint's directory on an SFTP server: parts at any offset, pipelined, and metadata by an atomic rename."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from ._layout import temporary_file_name
from ._retry import is_transient, retry
from ._storage import TAKEN, RangeReader, Sink, scatter
from ._stream import StreamStorage

__all__ = ["SftpStorage"]

_T = TypeVar("_T")

_KEEPALIVE = 20


class SftpStorage(StreamStorage):
    """Files over one SSH connection, with a channel for each thread: paramiko's are for one thread at a time."""

    read_threads = 4  # OpenSSH allows 10 channels a connection, and the connection is one cipher's stream anyway

    def __init__(self, filesystem: Any, root: str, url: str, scrub: Callable[[str], str], patience: float) -> None:
        super().__init__(filesystem, root, url, scrub)
        self._patience = patience  # for an answer; a connection that is silent for so long is given up
        self._lock = threading.Lock()
        self._idle: list[Any] = []
        self._adopt(filesystem)

    def create(self, name: str, nbytes: int, *, sync: bool) -> Sink:
        path = self._full(name)
        self.with_channel(lambda ftp: ftp.open(path, "wb").close())
        return _SftpSink(self, path, nbytes)

    def read(self, name: str) -> bytes | None:
        def get(ftp: Any) -> bytes:
            with ftp.open(self._full(name), "rb") as file:
                file.prefetch()
                return bytes(file.read())

        try:
            return self.with_channel(get)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._read_error(name, error) from None

    def size(self, name: str) -> int | None:
        try:
            return int(self.with_channel(lambda ftp: ftp.stat(self._full(name))).st_size)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._read_error(name, error) from None

    def open(self, name: str) -> RangeReader:
        return _SftpReader(self, self._full(name))

    def remove(self, *names: str) -> None:
        for path in map(self._full, names):
            with suppress(FileNotFoundError):
                self.with_channel(functools.partial(_remove, path))

    def with_channel(self, use: Callable[[Any], _T]) -> _T:
        """What a function makes of a channel; tried again with a fresh connection where this one is gone."""

        def attempt() -> _T:
            with self._channel() as ftp:
                return use(ftp)

        return retry(attempt, self._renew, self._is_transient)

    def _put(self, name: str, data: bytes, replace: bool) -> None:
        temporary, path = self._full(temporary_file_name(name)), self._full(name)

        def put(ftp: Any) -> None:
            with ftp.open(temporary, "wb") as file:
                write_all(file, memoryview(data))
            if replace:
                ftp.posix_rename(temporary, path)
            else:
                _rename_to_new(ftp, temporary, path)

        try:
            self.with_channel(put)
        except Exception:
            with suppress(Exception):
                self.with_channel(lambda ftp: ftp.remove(temporary))
            raise

    @contextmanager
    def _channel(self) -> Iterator[Any]:
        """A channel that nobody else uses; one that has failed is not used again."""
        with self._lock:
            filesystem = self._filesystem
            ftp = self._idle.pop() if self._idle else None
        if ftp is None:
            ftp = filesystem.client.open_sftp()
            ftp.get_channel().settimeout(self._patience)
        try:
            yield ftp
        except FileNotFoundError:
            self._give_back(ftp, filesystem)
            raise
        except TimeoutError:
            filesystem.client.close()
            raise
        except BaseException as error:
            with suppress(Exception):
                ftp.close()
            if isinstance(error, EOFError) and not error.args:  # with a text it is the server's: a file ends
                raise ConnectionResetError("the connection was lost") from None
            raise
        self._give_back(ftp, filesystem)

    def _give_back(self, ftp: Any, filesystem: Any) -> None:
        with self._lock:
            if filesystem is self._filesystem:
                self._idle.append(ftp)
                return
        ftp.close()

    def _is_connected(self) -> bool:
        transport = self._filesystem.client.get_transport()
        return transport is not None and transport.is_active()

    def _is_transient(self, error: Exception) -> bool:
        """Whether to try again; not where a file ends."""
        return not self._is_connected() or (is_transient(error) and not isinstance(error, EOFError))

    def _renew(self) -> None:
        with self._lock:
            if self._is_connected():  # another thread has renewed it
                return
            self._idle.clear()
            self._filesystem.client.close()
            with suppress(Exception):  # then the next attempt finds no connection, and says so
                super()._renew()
                self._adopt(self._filesystem)

    def _adopt(self, filesystem: Any) -> None:
        """Closes a connection with its storage: nobody else does."""
        filesystem.client.get_transport().set_keepalive(_KEEPALIVE)
        filesystem.ftp.get_channel().settimeout(self._patience)
        weakref.finalize(self, filesystem.client.close)


def _remove(path: str, ftp: Any) -> None:
    ftp.remove(path)


def write_all(file: Any, data: memoryview) -> None:
    """Writes at a file's position without waiting for each answer, then waits for all of them; raises `OSError`."""
    file.set_pipelined(True)
    file.write(data[:-1])
    file.set_pipelined(False)  # the answer to this write is awaited, and with it those to all before
    file.write(data[-1:])


def _rename_to_new(ftp: Any, source: str, target: str) -> None:
    """Renames a file to a name that must not be taken; servers say no more than that it failed."""
    try:
        ftp.rename(source, target)
    except OSError:
        with suppress(FileNotFoundError):
            ftp.stat(target)
            raise FileExistsError(TAKEN) from None
        raise


class _SftpReader:
    def __init__(self, storage: SftpStorage, path: str) -> None:
        self._storage = storage
        self._path = path

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        wanted = sum(buffer.nbytes for buffer in buffers)

        def get(ftp: Any) -> bytes:
            with ftp.open(self._path, "rb") as file:
                (data,) = file.readv([(offset, wanted)])
                return bytes(data)

        data = memoryview(self._storage.with_channel(get))
        if data.nbytes != wanted:
            raise EOFError(f"the file ends {wanted - data.nbytes:,} bytes too early")
        scatter([data], buffers)

    def close(self) -> None:
        """Nothing is open between requests."""


class _SftpSink:
    """A file that is written at any offset."""

    part_bytes = 8 << 20
    concurrency = 2
    in_order = False

    def __init__(self, storage: SftpStorage, path: str, nbytes: int) -> None:
        self._storage = storage
        self._path = path
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._is_open = True
        self.bytes_written = 0
        self.write_seconds = 0.0
        self.close_seconds = 0.0

    def put(self, number: int, data: memoryview) -> None:
        started = time.perf_counter()

        def write(ftp: Any) -> None:
            with ftp.open(self._path, "r+b") as file:
                file.seek(number * self.part_bytes)
                write_all(file, data)

        self._storage.with_channel(write)
        with self._lock:
            self.bytes_written += data.nbytes
            self.write_seconds += time.perf_counter() - started

    def close(self) -> None:
        """Checks that the server has everything. Idempotent."""
        if self._is_open:
            found = self._storage.with_channel(lambda ftp: ftp.stat(self._path)).st_size
            if found != self._nbytes:
                raise OSError(f"the server has {found:,} of the file's {self._nbytes:,} bytes")
            self._is_open = False

    def abort(self) -> None:
        """Removes the file. Idempotent; does nothing after `close`."""
        if self._is_open:
            self._is_open = False
            with suppress(Exception):
                self._storage.with_channel(lambda ftp: ftp.remove(self._path))
