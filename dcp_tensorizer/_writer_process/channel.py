"""Whole messages, with descriptors, over a socket between a trainer and its writer process.

Both ends are the same installation on the same machine, so messages travel as plain pickles.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from .._descriptor import identity
from .._forks import in_child
from .._threads import Patience

__all__ = ["LOOK_SECONDS", "Channel", "pickled"]

LOOK_SECONDS = 1.0
"""Between two looks at whether the other end is still there."""

_HEADER = struct.Struct("<QI")  # length of the pickle, number of descriptors


class Channel:
    """Whole messages, with descriptors, over a connected Unix stream socket.

    A forked child has no part in the conversation: its copy is closed.

    Raises:
        EOFError: the other end is gone, or this one has been closed.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = identity(sock.fileno())
        in_child(self, Channel._close_here)

    @property
    def is_ours(self) -> bool:
        """Whether this end is open, and the number still stands for the socket: see `Descriptor`."""
        if self._sock.fileno() >= 0 and identity(self._sock.fileno()) != self._file:
            self._sock.detach()  # it would close somebody else's file in the end
        return self._sock.fileno() >= 0

    def fileno(self) -> int:
        """The descriptor to wait for; raises `EOFError`."""
        if not self.is_ours:
            raise EOFError("this end of the channel is closed")
        return self._sock.fileno()

    def send(self, message: object, fds: Sequence[int] = (), timeout: float | None = None) -> None:
        """Sends a message; raises `TimeoutError` if the other end does not take it in time."""
        self.send_pickled(pickled(message), fds, timeout)

    def send_pickled(self, body: bytes, fds: Sequence[int] = (), timeout: float | None = None) -> None:
        """Sends what `pickled` has made of a message."""
        header = _HEADER.pack(len(body), len(fds))
        self.fileno()
        self._sock.settimeout(timeout)
        try:
            # Descriptors ride on the first byte of the header: SCM_RIGHTS needs at least one byte of data.
            if fds:
                socket.send_fds(self._sock, [header[:1]], list(fds))
                self._sock.sendall(header[1:])
            else:
                self._sock.sendall(header)
            self._sock.sendall(body)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError("the other end of the channel is gone") from error
        finally:
            self._sock.settimeout(None)

    def wait_readable(self, patience: Patience, check: Callable[[], object] = lambda: None) -> None:
        """Waits until there is something to receive.

        Args:
            patience: For how long.
            check: Called now and then. What it raises ends the wait.

        Raises:
            TimeoutError: there is nothing for too long.
        """
        while True:
            poll = select.poll()
            poll.register(self.fileno(), select.POLLIN)
            if poll.poll(patience.within(LOOK_SECONDS) * 1000):
                return
            check()
            if patience.is_over():
                raise TimeoutError

    def receive(self, wait: Callable[[], object] = lambda: None) -> tuple[Any, list[int]]:
        """Receives a message.

        Args:
            wait: Called before each read from the socket: the other end may stop in the middle of a message.
        """
        self.fileno()
        try:
            wait()
            first, fds, _flags, _address = socket.recv_fds(self._sock, 1, 16)
            if not first:
                raise EOFError("the other end of the channel is gone")
            with ExitStack() as undo:
                for fd in fds:
                    undo.callback(os.close, fd)
                length, count = _HEADER.unpack(first + self._read(_HEADER.size - 1, wait))
                body = self._read(length, wait)
                if count != len(fds):
                    raise OSError(
                        f"{count} descriptors were sent and {len(fds)} arrived: the descriptor limit is reached"
                    )
                message = pickle.loads(body)  # which fails if it has what only the sender knows
                undo.pop_all()
            return message, list(fds)
        except ConnectionResetError as error:
            raise EOFError("the other end of the channel is gone") from error

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
        """Ends the conversation for both ends, and for whoever waits in `receive`."""
        if self.is_ours:
            with suppress(OSError):
                # Closing alone would not tell the other end, while a forked child holds a copy of the descriptor.
                self._sock.shutdown(socket.SHUT_RDWR)

    def hang_up(self, timeout: float) -> None:
        """Sends no more, and waits until the other end has read all and closed, or the time is over."""
        if self.is_ours:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)
                poll = select.poll()
                poll.register(self._sock, 0)  # for POLLHUP, which comes unasked: an answer may be there to read
                poll.poll(timeout * 1000)

    def close(self) -> None:
        self.shut_down()
        self._close_here()

    def _close_here(self) -> None:
        """The conversation goes on for whoever else has a copy of the socket."""
        if self.is_ours:
            self._sock.close()


def pickled(message: object) -> bytes:
    """A message as it travels. Raises whatever its objects raise."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
