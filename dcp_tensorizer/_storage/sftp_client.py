"""A connection to an SFTP server, made again when it is lost; the only module that imports paramiko."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import paramiko
from paramiko.sftp import CMD_EXTENDED, CMD_VERSION

from .retry import is_transient, patience_of, retry

__all__ = ["LOST", "SftpClient", "sync_file", "write_all"]

LOST = (ConnectionError, TimeoutError)
"""Errors after which nobody knows what has become of a request."""

_T = TypeVar("_T")

_KEEPALIVE = 20
_CHANNELS = 8  # OpenSSH allows 10 a connection, unless it is told otherwise (MaxSessions)
_FOR_FSSPEC = {"skip_instance_cache", "use_listings_cache", "temppath"}
_FSYNC = "fsync@openssh.com"


class _Channel(paramiko.SFTPClient):  # type: ignore[misc]
    """Knows what its server offers beyond the protocol, which paramiko passes over."""

    extensions: frozenset[str] = frozenset()

    def _read_packet(self) -> tuple[int, bytes]:
        kind, data = super()._read_packet()
        if kind == CMD_VERSION:
            self.extensions = frozenset(_extensions(paramiko.Message(data)))
        return kind, data


class SftpClient:
    """One SSH connection, with a channel for each thread at work: paramiko's are for one thread at a time.

    All waits end: a connection that is silent for a tenth of ``timeout`` is closed, and whoever waits for it tries
    again over the next one, until ``timeout`` is over. It ends with this object.

    Args:
        address: Of the server, as in a URL: ``user:password@host:port``, of which only the host must be there.
        options: ``host_key_policy`` (a name, or a paramiko policy), and paramiko's own for connecting.
        timeout: Seconds after which a request is given up.

    Raises:
        OSError: there is no connection, or the server refuses the user.
    """

    def __init__(self, address: str, options: Mapping[str, Any], timeout: float) -> None:
        self._patience = patience_of(timeout)
        self._timeout = timeout
        waits = dict.fromkeys(("timeout", "banner_timeout", "auth_timeout"), self._patience)
        self._options = waits | _of_address(address) | {k: v for k, v in options.items() if k not in _FOR_FSSPEC}
        self._policy = self._options.pop("host_key_policy", "auto_add")
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(_CHANNELS)
        self._idle: list[Any] = []
        self._connection: Any = None
        self._failure: OSError | None = None
        self.call(lambda channel: None)

    def call(self, use: Callable[[Any], _T]) -> _T:
        """What a function makes of a channel (paramiko's ``SFTPClient``); it is called again if the connection is lost.

        Raises:
            EOFError: a file ends.
            OSError: anything else that the server says, or that happens on the way to it.
        """
        return retry(lambda: self.attempt(use), _is_transient, self._timeout)

    def attempt(self, use: Callable[[Any], _T]) -> _T:
        """The same, once."""
        known = self._failure
        with self._free, self._channel(known) as channel:
            return use(channel)

    def _connected(self, known: OSError | None) -> Any:
        """The connection; made again if it is lost, but not after another thread's failure that we did not know of.

        Threads that each waited for one more attempt at a server that hangs would wait for long.
        """
        if not _is_active(self._connection):
            if self._failure is not None and self._failure is not known:
                raise type(self._failure)(*self._failure.args)
            self._idle.clear()
            try:
                self._connection = self._connect()
            except OSError as error:
                self._failure = type(error)(*error.args)  # without the frames that it has been through
                raise
        return self._connection

    @contextmanager
    def _channel(self, known: OSError | None) -> Iterator[Any]:
        """A channel that nobody else uses; one that has failed is not used again."""
        with self._lock:
            connection = self._connected(known)
            channel = self._idle.pop() if self._idle else None
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
                self._idle.append(channel)

    def _connect(self) -> Any:
        connection = paramiko.SSHClient()
        policy = _policy(self._policy)
        if isinstance(policy, paramiko.RejectPolicy):
            connection.load_system_host_keys()
        connection.set_missing_host_key_policy(policy)
        try:
            connection.connect(**self._options)
            transport = connection.get_transport()
            transport.set_keepalive(_KEEPALIVE)
            # What is sent and not taken is waited for without a timeout; where it can be told so, the system has one.
            if isinstance(transport.sock, socket.socket) and hasattr(socket, "TCP_USER_TIMEOUT"):
                milliseconds = max(1, int(1000 * self._patience))
                transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        except Exception as error:
            transport = connection.get_transport()
            was_answered = _is_active(connection) and transport.initial_kex_done
            connection.close()
            refused = isinstance(error, paramiko.AuthenticationException | paramiko.BadHostKeyException)
            if refused or (was_answered and isinstance(error, paramiko.SSHException)):  # also: no key to offer
                raise PermissionError(f"{type(error).__name__}: {error}") from None
            if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
                raise ConnectionRefusedError(str(error)) from None
            if isinstance(error, paramiko.SSHException | EOFError):
                raise ConnectionResetError(f"no SSH connection: {error}") from None
            raise
        weakref.finalize(self, connection.close)
        return connection

    def _open(self, connection: Any) -> Any:
        """A fresh channel."""
        silent = threading.Event()

        def give_up() -> None:
            silent.set()
            connection.close()  # nothing else ends the wait for a subsystem

        timer = threading.Timer(self._patience, give_up)
        timer.daemon = True
        timer.start()
        try:
            channel = connection.get_transport().open_session(timeout=self._patience)
            channel.settimeout(self._patience)
            channel.invoke_subsystem("sftp")
            return _Channel(channel)
        except Exception:
            if silent.is_set():
                raise TimeoutError(f"the server has been silent for {self._patience:g} s") from None
            raise
        finally:
            timer.cancel()


def write_all(file: Any, data: memoryview) -> None:
    """Writes at a file's position without waiting for each answer, then waits for all of them; raises `OSError`."""
    file.set_pipelined(True)
    file.write(data[:-1])
    file.set_pipelined(False)  # the answer to this write is awaited, and with it those to all before
    file.write(data[-1:])


def sync_file(channel: Any, file: Any) -> None:
    """Makes an open file's contents durable, where the server offers that."""
    if _FSYNC in channel.extensions:
        channel._request(CMD_EXTENDED, _FSYNC, file.handle)


def _extensions(message: paramiko.Message) -> Iterator[str]:
    message.get_int()  # the version
    while message.get_remainder():
        yield message.get_text()
        message.get_binary()  # the extension's version


def _of_address(address: str) -> dict[str, Any]:
    """Raises `ValueError`, without the address: what is wrong with it may be its password."""
    parts = urlsplit(f"//{address}")
    try:
        port = parts.port
    except ValueError:
        raise ValueError("the port is no number: in a URL, user and password are percent-encoded") from None
    found = {
        "hostname": parts.hostname,
        "port": port,
        "username": parts.username and unquote(parts.username),
        "password": parts.password and unquote(parts.password),
    }
    return {key: value for key, value in found.items() if value is not None}


def _policy(wanted: Any) -> Any:
    """A host key policy: by name, class or instance."""
    named = {"auto_add": paramiko.AutoAddPolicy, "warning": paramiko.WarningPolicy, "reject": paramiko.RejectPolicy}
    if isinstance(wanted, str):
        if wanted not in named:
            raise ValueError(f"host_key_policy {wanted!r} is not one of {', '.join(named)}")
        wanted = named[wanted]
    return wanted() if isinstance(wanted, type) else wanted


def _is_active(connection: Any) -> bool:
    transport = connection and connection.get_transport()
    return bool(transport and transport.is_active())


def _is_transient(error: Exception) -> bool:
    return is_transient(error) and not isinstance(error, EOFError)  # which is a file's


def _translated(error: Exception, connection: Any) -> Exception:
    """What went wrong on a channel, as one of Python's errors."""
    said = (
        (isinstance(error, EOFError) and error.args)  # without a text it is the connection's end, not a file's
        or isinstance(error, TimeoutError | ConnectionError)
        or (isinstance(error, OSError) and (error.errno is not None or _is_active(connection)))
    )
    if said or (_is_active(connection) and not isinstance(error, paramiko.SSHException | EOFError)):
        return error
    return ConnectionResetError(f"the connection was lost: {error}" if str(error) else "the connection was lost")
