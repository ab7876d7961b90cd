"""A checkpoint's directory on an SFTP server.

fsspec's SFTP has one channel, which breaks when two threads use it. It requests one part at a time, waits without a
timeout, never reconnects, and has no fsync.
"""

from __future__ import annotations

import dataclasses
import socket
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import paramiko
from paramiko.sftp import CMD_EXTENDED, CMD_READ, CMD_STATUS, CMD_VERSION, int64

from .._runtime.forks import Finalizer, free_in_child, in_child
from ..errors import WriteError
from .base import TAKEN, FileInfo, RangeReader, Sink, temporary_file_name
from .remote import Ranges, RemoteStorage, Retries, is_transient, silence_timeout


class SftpStorage(RemoteStorage):
    """A directory on an SFTP server. Its URL is ``sftp://user:password@host:port/path``, whose path is taken literally.

    For ``options``, and for errors, see `SftpClient`.
    """

    reads = dataclasses.replace(RemoteStorage.reads, max_threads=4)  # a connection is one encrypted stream
    renames = True

    def __init__(self, url: str, options: Mapping[str, Any], scrub: Callable[[str], str], timeout: float) -> None:
        address, slash, path = url.partition("://")[2].partition("/")
        super().__init__(url, slash + path, scrub, timeout)
        self.client = SftpClient(address, options, timeout)

    def _list(self) -> tuple[list[FileInfo], list[str]]:
        entries = self.client.call(self._entries)
        regular = [(name, e.st_size, float(e.st_mtime)) for name, e in entries if stat.S_ISREG(e.st_mode)]
        files = [FileInfo(name, nbytes, mtime, mtime) for name, nbytes, mtime in regular]  # SFTP has no ctime
        return files, [name for name, entry in entries if stat.S_ISDIR(entry.st_mode)]

    def _entries(self, channel: Any) -> list[tuple[str, Any]]:
        """Returns the names and attributes of the directory's entries. A link to a file has the file's attributes."""
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
                try:
                    channel.mkdir(lead + path)
                except OSError:  # servers report no reason: the directory may exist
                    if not _is_directory(channel, lead + path):
                        raise

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

    def rename(self, old: str, new: str) -> None:
        source, target = self._full(old), self._full(new)

        def rename(channel: Any) -> None:
            try:
                channel.posix_rename(source, target)
            except FileNotFoundError:
                channel.stat(target)  # exists if the response to an earlier attempt was lost

        self.client.call(rename)

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


def _is_directory(channel: Any, path: str) -> bool:
    try:
        return stat.S_ISDIR(channel.stat(path).st_mode)
    except FileNotFoundError:
        return False


def _rename_to_new(channel: Any, source: str, target: str) -> None:
    """Renames a file to a name that must not exist.

    If that fails, checks whether the name exists, because servers give no reason.
    """
    try:
        channel.rename(source, target)
    except OSError:
        with suppress(FileNotFoundError):
            channel.stat(target)
            raise FileExistsError(TAKEN) from None
        raise


def _try_to_remove(client: SftpClient, path: str) -> None:
    with suppress(Exception):
        client.attempt(lambda channel: channel.remove(path))


class _SftpSink(Sink):
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
        def finish(channel: Any) -> int:
            with channel.open(self._path, "r+b") as file:
                if self._sync:
                    sync_file(channel, file)
                return int(file.stat().st_size)

        nbytes = self._client.call(finish)
        if nbytes != self._nbytes:
            raise OSError(f"the file has {nbytes:,} bytes on the server, expected {self._nbytes:,}")

    def _abort(self) -> None:
        _try_to_remove(self._client, self._path)


# --- the connection ---------------------------------------------------------------------------------------------------

LOST = (ConnectionError, TimeoutError)
"""Errors after which the outcome of a request is unknown."""

_T = TypeVar("_T")

_KEEPALIVE = 20
_CHANNELS = 8  # OpenSSH allows 10 per connection by default (MaxSessions)
_FOR_FSSPEC = {"skip_instance_cache", "use_listings_cache", "temppath"}
_FSYNC = "fsync@openssh.com"
_REQUESTS = 256  # read requests in progress at a time: 8 MiB
_inherited: list[object] = []
"""In a forked child, the copies of its parent's connections, which the child must never free."""


class _Channel(paramiko.SFTPClient):  # type: ignore[misc]
    """An SFTP channel that records the extensions of its server, which paramiko discards."""

    extensions: frozenset[str] = frozenset()

    def _read_packet(self) -> tuple[int, bytes]:
        kind, data = super()._read_packet()
        if kind == CMD_VERSION:
            message, names = paramiko.Message(data), list[str]()
            message.get_int()  # the version
            while message.get_remainder():
                names.append(message.get_text())
                message.get_binary()  # the extension's version
            self.extensions = frozenset(names)
        return kind, data


class SftpClient:
    """One SSH connection, with a channel for each active thread, because paramiko's channels are not thread-safe.

    All waits have a timeout. A connection that is silent for a tenth of ``timeout`` is closed, and its threads retry
    over a new one, as often as `Retries` allows. The first call connects. The connection is closed when this object is
    freed.

    ``address`` is the server's, as in a URL: ``user:password@host:port``, of which only the host is required.
    ``options`` are ``host_key_policy`` (a name, or a paramiko policy), and paramiko's own options of ``connect``.
    Raises `ValueError` if the port or ``host_key_policy`` is invalid.
    """

    def __init__(self, address: str, options: Mapping[str, Any], timeout: float) -> None:
        self._silence_timeout = silence_timeout(timeout)
        self.retries = Retries(timeout)
        waits = dict.fromkeys(("timeout", "banner_timeout", "auth_timeout"), self._silence_timeout)
        self._options = waits | _of_address(address) | {k: v for k, v in options.items() if k not in _FOR_FSSPEC}
        self._policy = _policy(self._options.pop("host_key_policy", "auto_add"))
        self._lock = free_in_child(threading.Lock())
        self._begin()
        in_child(self, SftpClient._release)

    def _begin(self) -> None:
        self._free = threading.BoundedSemaphore(_CHANNELS)
        self.idle: list[Any] = []
        self._connection: Any = None
        self._failure: OSError | None = None

    def _release(self) -> None:
        """In a forked child, abandons the parent's connection without sending a message. The next call reconnects."""
        connection, idle = self._connection, self.idle
        self._begin()
        if connection is not None:
            # A freed channel would send a message to the server, in the middle of the parent's messages.
            _inherited.append((connection, idle))
            transport = connection.get_transport()
            if transport is not None:
                transport.active = False
                if isinstance(transport.sock, socket.socket):
                    transport.sock.close()

    def call(self, use: Callable[[Any], _T]) -> _T:
        """Calls a function with a channel (paramiko's ``SFTPClient``). If the connection is lost, calls it again.

        Raises `EOFError` at the end of a file, and `OSError` for all other errors.
        """

        def may_succeed(error: Exception) -> bool:
            return is_transient(error) and not isinstance(error, EOFError)

        return self.retries.call(lambda: self.attempt(use), may_succeed)

    def attempt(self, use: Callable[[Any], _T]) -> _T:
        """Like `call`, without retries."""
        known = self._failure
        with self._free, self._channel(known) as channel:
            return use(channel)

    def _connected(self, known: OSError | None) -> Any:
        """Returns the connection. If it is lost, connects again.

        ``known`` is the last failure to connect before the attempt began. If another thread has failed since then,
        raises that thread's error, because threads would otherwise connect one after the other, and each would wait
        for a hung server until the timeout.
        """
        if not _is_active(self._connection):
            if self._failure is not None and self._failure is not known:
                raise type(self._failure)(*self._failure.args)
            self.idle.clear()
            try:
                self._connection = self._connect()
            except OSError as error:
                self._failure = type(error)(*error.args)  # without its traceback
                raise
        return self._connection

    @contextmanager
    def _channel(self, known: OSError | None) -> Iterator[Any]:
        """Yields a channel for a ``with`` block.

        After an error other than `FileNotFoundError`, closes the channel, or, after a timeout, the connection.
        """
        with self._lock:
            connection = self._connected(known)
            channel = self.idle.pop() if self.idle else None
        try:
            if channel is None:
                channel = self._open(connection)
            yield channel
        except FileNotFoundError:
            self._give_back(channel, connection)
            raise
        except Exception as error:
            if isinstance(error, TimeoutError):
                connection.close()
            elif channel is not None:
                with suppress(Exception):
                    channel.close()
            raise _translated(error, connection) from None
        self._give_back(channel, connection)

    def _give_back(self, channel: Any, connection: Any) -> None:
        with self._lock:
            if connection is self._connection:
                self.idle.append(channel)

    def _connect(self) -> Any:
        connection = paramiko.SSHClient()
        if isinstance(self._policy, paramiko.RejectPolicy):
            connection.load_system_host_keys()
        connection.set_missing_host_key_policy(self._policy)
        try:
            connection.connect(**self._options)
            transport = connection.get_transport()
            transport.set_keepalive(_KEEPALIVE)
            # paramiko sends without a timeout. Some systems can set one on the socket.
            if isinstance(transport.sock, socket.socket) and hasattr(socket, "TCP_USER_TIMEOUT"):
                milliseconds = max(1, int(1000 * self._silence_timeout))
                transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        except Exception as error:
            transport = connection.get_transport()
            was_answered = _is_active(connection) and transport.initial_kex_done
            connection.close()
            refused = isinstance(error, paramiko.AuthenticationException | paramiko.BadHostKeyException)
            if refused or (
                was_answered and isinstance(error, paramiko.SSHException)
            ):  # paramiko also raises SSHException if there is no key to offer
                raise PermissionError(f"{type(error).__name__}: {error}") from None
            if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
                raise ConnectionRefusedError(str(error)) from None
            if isinstance(error, paramiko.SSHException | EOFError):
                raise ConnectionResetError(f"no SSH connection: {str(error) or type(error).__name__}") from None
            raise
        Finalizer(self, connection.close)
        return connection

    def _open(self, connection: Any) -> Any:
        silent = threading.Event()

        def give_up() -> None:
            silent.set()
            connection.close()  # nothing else interrupts the wait for the subsystem

        timer = threading.Timer(self._silence_timeout, give_up)
        timer.daemon = True
        timer.start()
        try:
            channel = connection.get_transport().open_session(timeout=self._silence_timeout)
            channel.settimeout(self._silence_timeout)
            channel.invoke_subsystem("sftp")
            return _Channel(channel)
        except Exception:
            if silent.is_set():
                raise TimeoutError(f"the server has been silent for {self._silence_timeout:g} s") from None
            raise
        finally:
            timer.cancel()


def write_all(file: Any, data: memoryview) -> None:
    """Writes at a file's position, and waits for the server's responses only at the end; raises `OSError`."""
    file.set_pipelined(True)
    file.write(data[:-1])
    file.set_pipelined(False)  # this write waits for its response, and for all earlier ones
    file.write(data[-1:])


def read_range(channel: Any, file: Any, start: int, stop: int) -> bytes:
    """Reads a range of an open file; the result is shorter if the file ends.

    Does not use paramiko's ``prefetch``, which sends requests from a thread. If all responses arrive before that
    thread's next request, paramiko assumes that the rest is done, and then requests one piece at a time.
    """
    pieces: deque[_Piece] = deque()
    data = bytearray()
    for offset in range(start, stop, file.MAX_REQUEST_SIZE):
        if len(pieces) == _REQUESTS:
            data += pieces.popleft().whole()
        pieces.append(_Piece(channel, file.handle, offset, min(file.MAX_REQUEST_SIZE, stop - offset)))
    for piece in pieces:
        data += piece.whole()
    return bytes(data)


class _Piece:
    """A read request in progress. paramiko calls `_async_response` with the response."""

    def __init__(self, channel: Any, handle: bytes, offset: int, nbytes: int) -> None:
        self._channel, self._handle, self._offset, self._nbytes = channel, handle, offset, nbytes
        self._data: bytes | None = None
        channel._async_request(self, CMD_READ, handle, int64(offset), nbytes)

    def _async_response(self, kind: int, message: paramiko.Message, number: int) -> None:
        self._data = b""
        if kind != CMD_STATUS:
            self._data = message.get_string()
            return
        with suppress(EOFError):  # the end of the file
            self._channel._convert_status(message)

    def whole(self) -> bytes:
        while self._data is None:
            self._channel._read_response()
        rest = self._nbytes - len(self._data)
        if not self._data or not rest:
            return self._data
        return self._data + _Piece(self._channel, self._handle, self._offset + len(self._data), rest).whole()


def sync_file(channel: Any, file: Any) -> None:
    if _FSYNC in channel.extensions:
        channel._request(CMD_EXTENDED, _FSYNC, file.handle)


def _of_address(address: str) -> dict[str, Any]:
    """Returns the parts of an address as options of ``connect``.

    If the port is invalid, raises `ValueError`, which does not quote the address, because that may contain a password.
    """
    parts = urlsplit(f"//{address}")
    try:
        port = parts.port
    except ValueError:
        raise ValueError("the port is invalid. Percent-encode user and password in the URL") from None
    options = {
        "hostname": parts.hostname,
        "port": port,
        "username": parts.username and unquote(parts.username),
        "password": parts.password and unquote(parts.password),
    }
    return {key: value for key, value in options.items() if value is not None}


def _policy(wanted: Any) -> Any:
    named = {"auto_add": paramiko.AutoAddPolicy, "warning": paramiko.WarningPolicy, "reject": paramiko.RejectPolicy}
    if isinstance(wanted, str):
        if wanted not in named:
            raise ValueError(f"host_key_policy {wanted!r} is not one of {', '.join(named)}")
        wanted = named[wanted]
    return wanted() if isinstance(wanted, type) else wanted


def _is_active(connection: Any) -> bool:
    transport = connection and connection.get_transport()
    return bool(transport and transport.is_active())


def _translated(error: Exception, connection: Any) -> Exception:
    is_known = (
        (
            isinstance(error, EOFError) and error.args
        )  # an EOFError without arguments is the end of the connection, not of a file
        or isinstance(error, TimeoutError | ConnectionError)
        or (isinstance(error, OSError) and (error.errno is not None or _is_active(connection)))
    )
    if is_known or (_is_active(connection) and not isinstance(error, paramiko.SSHException | EOFError)):
        return error
    return ConnectionResetError(f"the connection was lost: {error}" if str(error) else "the connection was lost")
