"""Proxies on loopback: one for S3 that counts requests and injects faults, and one that cuts any TCP connections."""

from __future__ import annotations

import itertools
import os
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

_PIPE = 1 << 20


@dataclass(frozen=True)
class Request:
    """A request to an S3 server."""

    method: str
    key: str
    query: dict[str, list[str]]
    nbytes: int
    authorization: str
    checksum: str

    @property
    def operation(self) -> str:
        """S3's name of the request's operation."""
        if "partNumber" in self.query:
            return "UploadPart"
        if "uploads" in self.query:
            return {"POST": "CreateMultipartUpload", "GET": "ListMultipartUploads"}[self.method]
        if "uploadId" in self.query:
            return {"POST": "CompleteMultipartUpload", "DELETE": "AbortMultipartUpload"}[self.method]
        if not self.key:
            return f"{self.method} bucket"
        names = {"PUT": "PutObject", "GET": "GetObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}
        return names[self.method]


@dataclass(frozen=True)
class Fault:
    """What the proxy does to a request.

    Attributes:
        status, code: The proxy answers, with this status and S3 error code.
        cut: The connection is reset after this many bytes of the request's or the answer's body.
        stall: After this many bytes of the answer's body, nothing more happens on this connection.
        delay: Seconds before the request is forwarded.
        rate: Bytes a second, at most.
        lose_answer: The server carries the request out, and then the connection is reset.
        hang: The server carries the request out, and then nothing more happens on this connection.
    """

    status: int = 0
    code: str = ""
    cut: int | None = None
    stall: int | None = None
    delay: float = 0.0
    rate: float = 0.0
    lose_answer: bool = False
    hang: bool = False


Rule = Callable[[Request], "Fault | None"]


class _Proxy:
    """Listens on a port that the system gives, until `close`."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self._server.getsockname()[1]
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.connections = 0  # so far

    def cut(self) -> None:
        """Ends every connection, even during a transfer."""
        raise NotImplementedError

    def close(self) -> None:
        self._ended.set()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)


class S3Proxy(_Proxy):
    """Forwards to an S3 server. ``rule`` chooses what goes wrong, and may be replaced at any time."""

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self._upstream = _address(endpoint)
        self._sockets: set[socket.socket] = set()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.rule: Rule = lambda request: None
        self.requests: list[Request] = []
        self.sent_bytes = 0  # in the bodies of answers with a ``Content-Length``
        self.most_at_once = 0
        self._at_once = 0
        start_thread(self._accept, self._threads)

    def counts(self) -> dict[str, int]:
        """How many requests of each operation there were."""
        with self._lock:
            return dict(Counter(request.operation for request in self.requests))

    def forget(self) -> None:
        """Forgets the requests so far."""
        with self._lock:
            self.requests.clear()
            self.most_at_once = 0

    def cut(self) -> None:
        with self._lock:
            for open_socket in self._sockets:
                with suppress(OSError):
                    open_socket.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            self.connections += 1
            start_thread(lambda client=client: self._serve(client), self._threads)  # type: ignore[misc]

    def _serve(self, client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with client, suppress(OSError, ConnectionError), socket.create_connection(self._upstream) as server:
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {client, server}
            try:
                while head := _head(client):
                    if not self._exchange(client, server, head):
                        break
            finally:
                with self._lock:
                    self._sockets -= {client, server}

    def _exchange(self, client: socket.socket, server: socket.socket, head: bytes) -> bool:
        """Handles one request and its answer; returns whether the connection goes on."""
        request, headers = _parse(head)
        with self._lock:
            self.requests.append(request)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            fault = self.rule(request) or Fault()
            time.sleep(fault.delay)
            if fault.status:
                return _answer(client, request, fault, headers)
            return self._forward(client, server, head, fault)
        finally:
            with self._lock:
                self._at_once -= 1

    def _forward(self, client: socket.socket, server: socket.socket, head: bytes, fault: Fault) -> bool:
        request, headers = _parse(head)
        server.sendall(head)
        answer = b""
        if "100-continue" in headers.get("expect", ""):
            answer = _head(server)
            client.sendall(answer)
            if b" 100 " not in answer.partition(b"\r\n")[0]:
                return False
        if request.nbytes:
            limit = request.nbytes if fault.cut is None else min(fault.cut, request.nbytes)
            _relay(client, server, limit, fault.rate)
            if fault.cut is not None:
                return _reset(client)
        answer = _head(server)
        if not answer:  # the client is gone, and the server has closed the connection on its half of a request
            return False
        if fault.lose_answer:
            return _reset(client)
        if fault.hang:
            return self._stall()
        client.sendall(answer)
        count = _body_length(request, answer)
        with self._lock:
            self.sent_bytes += count or 0
        for limit, then in ((fault.cut, lambda: _reset(client)), (fault.stall, self._stall)):
            if limit is not None:
                _relay(server, client, limit if count is None else min(limit, count), fault.rate)
                return then()
        if count is None:
            _relay_chunks(server, client)
        else:
            _relay(server, client, count, fault.rate)
        return True

    def _stall(self) -> bool:
        self._ended.wait()
        return False


def once(operation: str, fault: Fault, times: int = 1) -> Rule:
    """A rule for the first requests of an operation."""
    left = itertools.count(times, -1)
    return lambda request: fault if request.operation == operation and next(left) > 0 else None


def always(operation: str, fault: Fault) -> Rule:
    """A rule for every request of an operation."""
    return lambda request: fault if request.operation == operation else None


@contextmanager
def s3_proxy(endpoint: str) -> Iterator[S3Proxy]:
    proxy = S3Proxy(endpoint)
    try:
        yield proxy
    finally:
        proxy.close()


def start_thread(target: Callable[[], object], threads: list[threading.Thread]) -> None:
    """Starts a proxy's thread, and adds it to those that the proxy waits for."""
    thread = threading.Thread(target=target, name="proxy", daemon=True)
    threads.append(thread)
    thread.start()


def _address(endpoint: str) -> tuple[str, int]:
    parts = urlsplit(endpoint)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port


def _head(source: socket.socket) -> bytes:
    """The next message's head and nothing of its body; empty at the end of the connection."""
    seen = 0
    while True:
        peeked = source.recv(1 << 16, socket.MSG_PEEK)
        end = peeked.find(b"\r\n\r\n")
        if end >= 0:
            return source.recv(end + 4)
        if not peeked or len(peeked) == 1 << 16:
            return b""
        if len(peeked) == seen:
            select.select([source], [], [], 0.01)
        seen = len(peeked)


def _parse(head: bytes) -> tuple[Request, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    parts = urlsplit(target)
    _, _, key = parts.path.lstrip("/").partition("/")
    nbytes = int(headers.get("content-length") or 0)
    query = parse_qs(parts.query, keep_blank_values=True)
    return Request(
        method, key, query, nbytes, headers.get("authorization", ""), headers.get("x-amz-checksum-crc32", "")
    ), headers


def _body_length(request: Request, answer: bytes) -> int | None:
    """The size of an answer's body; None if it comes in chunks of its own."""
    status = int(answer.split(b" ", 2)[1])
    headers = answer.decode("latin-1").lower()
    if request.method == "HEAD" or status in (204, 304):
        return 0
    if "\r\ntransfer-encoding: chunked" in headers:
        return None
    for line in headers.split("\r\n"):
        if line.startswith("content-length:"):
            return int(line.partition(":")[2])
    return 0


def _answer(client: socket.socket, request: Request, fault: Fault, headers: dict[str, str]) -> bool:
    """Answers with an S3 error, and ends the connection."""
    if "100-continue" not in headers.get("expect", ""):
        left = request.nbytes
        while left and (data := client.recv(min(left, 1 << 16))):
            left -= len(data)
    text = f"<Error><Code>{fault.code}</Code><Message>injected</Message></Error>" if request.method != "HEAD" else ""
    client.sendall(
        f"HTTP/1.1 {fault.status} Injected\r\nContent-Type: application/xml\r\nConnection: close\r\n"
        f"Content-Length: {len(text)}\r\n\r\n{text}".encode()
    )
    return False


def _reset(client: socket.socket) -> bool:
    """Closes a connection like a crash: the other end sees a reset."""
    with suppress(OSError):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    return False


def _relay_chunks(source: socket.socket, target: socket.socket) -> None:
    """Moves a body that comes in chunks, the last of which is empty."""
    with source.makefile("rb", buffering=0) as lines:
        while True:
            size = lines.readline()
            target.sendall(size)
            left = int(size.split(b";")[0], 16)
            _relay(source, target, left + 2, 0.0)  # and the end of its line
            if not left:
                return


def _relay(source: socket.socket, target: socket.socket, count: int, rate: float) -> None:
    """Moves bytes inside the kernel, so that a proxy takes little CPU time."""
    read, write = os.pipe()
    started, moved = time.monotonic(), 0
    step = _PIPE if not rate else max(1024, int(rate / 20))
    try:
        while moved < count:
            taken = os.splice(source.fileno(), write, min(step, count - moved))
            if not taken:
                raise ConnectionError("the other end is gone")
            moved += taken
            while taken:
                taken -= os.splice(read, target.fileno(), taken)
            if rate:
                time.sleep(max(0.0, moved / rate - (time.monotonic() - started)))
    finally:
        os.close(read)
        os.close(write)


class TcpProxy(_Proxy):
    """Forwards connections, cuts them, and falls silent."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._upstream = port
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.forwarded = 0
        self.cut_after: int | None = None
        """After this many bytes, in both directions, every connection ends, once."""
        self.silent_until: float = 0
        """Nothing is forwarded any more on connections up to this number, counted from 1."""
        start_thread(self._accept, self._threads)

    def cut(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for end in (end for pair in pairs for end in pair):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it, which then closes it

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
                server = socket.create_connection(("127.0.0.1", self._upstream))
            except OSError:
                return
            for end in (client, server):  # or each small message waits 40 ms for an acknowledgement
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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


def flip(path: Path, offset: int) -> None:
    """Flips one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
