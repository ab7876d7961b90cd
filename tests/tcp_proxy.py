"""A proxy on loopback in front of any server: it counts bytes and connections, and interrupts them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .proxy import start_thread


class TcpProxy:
    """Forwards connections, cuts them, and falls silent."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.port = self._server.getsockname()[1]
        self.connections = 0
        self.forwarded = 0
        self.cut_after: int | None = None
        """After this many bytes, in both directions, every connection ends, once."""
        self.silent_until: float = 0
        """Nothing is forwarded any more on connections up to this number, counted from 1."""
        self._ended = threading.Event()
        start_thread(self._accept, self._threads)

    def cut(self) -> None:
        """Ends every connection, whatever is on its way."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for end in (end for pair in pairs for end in pair):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it, which then closes it

    def close(self) -> None:
        self._ended.set()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
                server = socket.create_connection(("127.0.0.1", self._upstream))
            except OSError:
                return
            with self._lock:
                self.connections += 1
                self._pairs.append((client, server))
                number = self.connections
            start_thread(lambda a=client, b=server, n=number: self._pump(a, b, n), self._threads)  # type: ignore[misc]
            start_thread(lambda a=server, b=client, n=number: self._pump(a, b, n), self._threads)  # type: ignore[misc]

    def _pump(self, source: socket.socket, target: socket.socket, number: int) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if number <= self.silent_until:
                    self._ended.wait()
                    break
                target.sendall(data)
                with self._lock:
                    self.forwarded += len(data)
                    overdue = self.cut_after is not None and self.forwarded > self.cut_after
                    if overdue:
                        self.cut_after = None
                if overdue:
                    self.cut()
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()


@contextmanager
def tcp_proxy(port: int) -> Iterator[TcpProxy]:
    proxy = TcpProxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
