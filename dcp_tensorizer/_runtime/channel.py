"""Sends messages and descriptors between two processes over a Unix socket; defines the messages that all processes use.

Both ends are processes of one user on one machine, so messages are plain pickles.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError, describe
from .forks import free_in_child, identity, in_child
from .threads import ProgressTimeout

CHECK_SECONDS = 1.0
"""Seconds between two checks that the other end is alive."""

_HEADER = struct.Struct("<QI")  # length of the pickle, number of descriptors


@dataclass(frozen=True, slots=True)
class Ready:
    """The first message of a child process, sent when it has imported its modules."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A report of the bytes done so far for the request in progress, sent about once a second."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to a request that succeeded and has no result."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer to a request that failed. ``details`` is the traceback, as text; empty if there was no exception."""

    message: str
    details: str = ""


class Channel:
    """A connected Unix stream socket that carries whole messages, with descriptors.

    Forked children close their copy. If either end is closed, sending and receiving raise `EOFError`.

    Attributes:
        is_ready: Whether the other end has sent `Ready`.
    """

    is_ready = False

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = identity(sock.fileno())
        # Reentrant, because a signal handler may interrupt its holder.
        self._sending = free_in_child(threading.RLock())
        in_child(self, Channel._close_here)

    @property
    def _is_open(self) -> bool:
        """Returns whether this end is open, and its descriptor still belongs to the socket; see `Descriptor`."""
        if self._sock.fileno() >= 0 and identity(self._sock.fileno()) != self._file:
            self._sock.detach()  # closing it later would close a file of other code
        return self._sock.fileno() >= 0

    def fileno(self) -> int:
        """Returns the descriptor to poll. Raises `EOFError` if this end is closed."""
        if not self._is_open:
            raise EOFError("this end of the channel is closed")
        return self._sock.fileno()

    def ask(
        self,
        request: object,
        fds: Sequence[int] = (),
        *,
        timeout: float,
        check: Callable[[], object] = lambda: None,
        progress: Callable[[int], object] = lambda nbytes: None,
    ) -> tuple[Any, list[int]]:
        """Sends a request, and returns its answer and the descriptors that came with it.

        Args:
            request: A message, or its pickle: see `send`.
            fds: Descriptors to send with it.
            timeout: Seconds without progress of the other end.
            check: Called about once a second. An exception that it raises ends the wait.
            progress: Called with the bytes of each `Progress` message.

        Raises:
            TimeoutError: the other end made no progress for ``timeout`` seconds.
        """
        self.send(request, fds, timeout)
        return self.answer(timeout, check, progress)

    def answer(
        self,
        timeout: float,
        check: Callable[[], object] = lambda: None,
        progress: Callable[[int], object] = lambda nbytes: None,
    ) -> tuple[Any, list[int]]:
        """Waits for the answer to a request that was sent earlier; see `ask`."""
        before, patience = -1, ProgressTimeout(timeout, 2 * CHECK_SECONDS)
        try:
            while True:
                message, fds = self.receive(lambda: self.wait_readable(patience, check))
                if isinstance(message, Progress):
                    progress(message.nbytes)
                    if message.nbytes != before:
                        before = message.nbytes
                        patience.renew()
                    elif patience.is_over():  # reports without progress arrive too often for the poll to time out
                        raise TimeoutError
                elif isinstance(message, Ready):
                    self.is_ready = True
                    patience.renew()
                else:
                    return message, fds
        except TimeoutError:
            raise TimeoutError(f"no answer in {timeout:g} s") from None

    def serve(self, answer: Callable[[Any, list[int]], tuple[object, Sequence[int]]]) -> None:
        """Answers requests until the other end closes the channel.

        ``answer`` takes a request and its descriptors, and returns an answer and the descriptors to send with it.
        If ``answer`` raises an exception, or a request lacks descriptors or cannot be unpickled, the answer is
        `Failed`.
        """
        while True:
            try:
                request, fds = self.receive()
            except EOFError:
                return
            except Exception as error:  # the request cannot be unpickled, or lacks descriptors
                reply: tuple[object, Sequence[int]] = _failed(error), ()
            else:
                try:
                    reply = answer(request, fds)
                except Exception as error:
                    reply = _failed(error), ()
            try:
                self.send(*reply)
            except EOFError:
                return

    def send(self, message: object, fds: Sequence[int] = (), timeout: float | None = None) -> None:
        """Sends a message, or the bytes that `pickled` returned for a message.

        Raises:
            TimeoutError: the other end did not read it within ``timeout`` seconds.
        """
        body = message if isinstance(message, bytes) else pickled(message)
        header = _HEADER.pack(len(body), len(fds))
        with self._sending:
            self.fileno()
            self._sock.settimeout(timeout)
            try:
                # Descriptors are sent with the first byte of the header: SCM_RIGHTS needs at least one byte of data.
                if fds:
                    socket.send_fds(self._sock, [header[:1]], list(fds))
                    self._sock.sendall(header[1:])
                else:
                    self._sock.sendall(header)
                self._sock.sendall(body)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise EOFError("the other end of the channel is closed") from error
            finally:
                self._sock.settimeout(None)

    def wait_readable(self, timeout: ProgressTimeout, check: Callable[[], object] = lambda: None) -> None:
        """Waits for a message. Raises `TimeoutError` when ``timeout`` is over.

        ``check`` is called about once a second. An exception that it raises ends the wait.
        """
        while True:
            poll = select.poll()
            poll.register(self.fileno(), select.POLLIN)
            if poll.poll(timeout.within(CHECK_SECONDS) * 1000):
                return
            check()
            if timeout.is_over():
                raise TimeoutError

    def receive(self, wait: Callable[[], object] = lambda: None) -> tuple[Any, list[int]]:
        """Receives a message. Calls ``wait`` before each read, because the other end may stop halfway through."""
        self.fileno()
        try:
            wait()
            first, fds, _flags, _address = socket.recv_fds(self._sock, 1, 16)
            if not first:
                raise EOFError("the other end of the channel is closed")
            with ExitStack() as undo:
                for fd in fds:
                    undo.callback(os.close, fd)
                length, count = _HEADER.unpack(first + self._read(_HEADER.size - 1, wait))
                body = self._read(length, wait)
                if count != len(fds):
                    raise OSError(
                        f"the descriptor limit is reached: {len(fds)} of {count} descriptors arrived. "
                        f"Raise the limit (ulimit -n)."
                    )
                message = _unpickled(body)
                undo.pop_all()
            return message, list(fds)
        except ConnectionResetError as error:
            raise EOFError("the other end of the channel is closed") from error

    def _read(self, count: int, wait: Callable[[], object]) -> bytearray:
        buffer = bytearray(count)
        view = memoryview(buffer)
        while view:
            wait()
            received = self._sock.recv_into(view)
            if not received:
                raise EOFError("the other end of the channel closed in the middle of a message")
            view = view[received:]
        return buffer

    def shut_down(self) -> None:
        """Shuts down both directions of the socket, which also ends a `receive` of another thread."""
        if self._is_open:
            with suppress(OSError):
                # Closing is not enough: while a forked child holds a copy of the socket, the other end gets no EOF.
                self._sock.shutdown(socket.SHUT_RDWR)

    def hang_up(self, timeout: float) -> None:
        """Stops sending, and waits up to ``timeout`` seconds until the other end has read all messages and closed."""
        if self._is_open:
            with suppress(OSError, EOFError):  # another thread may close it concurrently
                self._sock.shutdown(socket.SHUT_WR)
                poll = select.poll()
                poll.register(self.fileno(), 0)  # POLLHUP only: with POLLIN, an unread answer would end the wait
                poll.poll(timeout * 1000)

    def close(self) -> None:
        """Shuts the socket down and closes it. Idempotent."""
        self.shut_down()
        self._close_here()

    def _close_here(self) -> None:
        """Closes this process's copy of the socket without a shutdown, so that the copies of other processes work."""
        if self._is_open:
            self._sock.close()


def _unpickled(body: bytearray) -> Any:
    try:
        return pickle.loads(body)
    except Exception as error:  # only the user's options can have types that this process cannot import
        raise CheckpointError(
            f"storage_options cannot be sent to another process, because that process cannot load a value: "
            f"{describe(error)}. Define the value's type in a module that can be imported."
        ) from error


def pickled(message: object) -> bytes:
    """Returns the bytes to send for a message. Raises the errors of pickling its objects."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def _failed(error: Exception) -> Failed:
    return Failed(describe(error), traceback.format_exc())
