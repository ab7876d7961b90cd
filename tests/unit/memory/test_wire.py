"""Connections between keepers: authentication, and bytes that change in transit."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import msgspec
import pytest

from dcp_tensorizer._memory import wire as wire_module
from dcp_tensorizer._memory.frames import FrameCipherKind, frame_ciphers
from dcp_tensorizer._memory.wire import MAX_BYTES, MAX_MESSAGE, Address, Wire, WireError, listen_on
from dcp_tensorizer._runtime.threads import in_background

from ...lab.waiting import WAIT

SECRET = bytes(range(32))


BOTH = FrameCipherKind.CHACHA | FrameCipherKind.AES


@pytest.fixture(autouse=True, params=[FrameCipherKind.CHACHA, frame_ciphers()], ids=["chacha", "best"])
def _ciphers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs each test with each cipher."""
    monkeypatch.setattr(wire_module, "frame_ciphers", lambda: request.param)


class Word(msgspec.Struct, tag="word", array_like=True):
    text: str


class Number(msgspec.Struct, tag="number", array_like=True):
    value: int


def both(client_secret: bytes = SECRET, server_secret: bytes = SECRET) -> tuple[Any, Any]:
    """Returns the results of both ends: connections, or the raised errors."""
    ends = socket.socketpair()
    with ThreadPoolExecutor(2) as pool:
        made = [
            pool.submit(Wire, end, secret, is_server=is_server)
            for end, secret, is_server in zip(ends, (client_secret, server_secret), (False, True), strict=True)
        ]
    return tuple(_outcome(future) for future in made)  # type: ignore[return-value]


def _outcome(future: Future[Wire]) -> Wire | BaseException:
    return future.exception() or future.result()


def relayed(change: Callable[[bytes], bytes]) -> tuple[Wire, Wire]:
    """Returns both ends of a connection through a relay that changes what the client sends after the proof."""
    listener = listen_on("127.0.0.1")
    client_side, near = socket.socketpair()
    address = Address("127.0.0.1", listener.getsockname()[1], SECRET)

    def carry(source: socket.socket, target: socket.socket, *, changes: bool) -> None:
        left = 8 + 32 + 32  # hello and proof
        while data := source.recv(left or 1 << 16):
            target.sendall(change(data) if changes and not left else data)
            left = max(0, left - len(data))
        target.close()

    far = socket.create_connection((address.host, address.port))
    for pair, changes in (((near, far), True), ((far, near), False)):
        threading.Thread(target=carry, args=pair, kwargs={"changes": changes}, daemon=True).start()
    connection, _ = listener.accept()
    listener.close()
    with ThreadPoolExecutor(2) as pool:
        client = pool.submit(Wire, client_side, SECRET, is_server=False)
        server = pool.submit(Wire, connection, SECRET, is_server=True)
    return client.result(), server.result()


def test_messages_and_bytes() -> None:
    """Messages and bytes of any allowed size, also empty ones, arrive in both directions."""
    client, server = both()
    client.send(Word("hello"))
    assert server.receive(Word | Number) == Word("hello")
    for nbytes in (0, 1, 70_000):
        data = bytes(i % 251 for i in range(nbytes))
        server.send_bytes(memoryview(data))
        target = bytearray(nbytes)
        client.receive_bytes(memoryview(target))
        assert bytes(target) == data
    server.send(Number(7))
    assert client.receive(Number) == Number(7)
    client.close()
    with pytest.raises(ConnectionError):
        server.receive(Word)
    server.close()


@pytest.mark.parametrize("older", [0, 1], ids=["client", "server"])
def test_an_end_that_has_one_cipher_alone(monkeypatch: pytest.MonkeyPatch, older: int) -> None:
    """The other end uses the only cipher that both ends have."""
    found = [BOTH, BOTH]
    found[older] = FrameCipherKind.CHACHA
    ends = socket.socketpair()
    names = {"client": found[0], "server": found[1]}
    monkeypatch.setattr(wire_module, "frame_ciphers", lambda: names[threading.current_thread().name])
    made: dict[str, Wire] = {}

    def make(number: int) -> None:
        made[threading.current_thread().name] = Wire(ends[number], SECRET, is_server=bool(number))

    threads = [threading.Thread(target=make, args=(n,), name=name) for n, name in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made["client"].send(Word("hello"))
    assert made["server"].receive(Word) == Word("hello")
    assert (made["client"]._sealing._aes, made["server"]._opening._aes) == (None, None)
    for wire in made.values():
        wire.close()


def test_who_does_not_know_the_secret() -> None:
    """The client fails first and sends no proof, and the server fails without it."""
    client, server = both(client_secret=bytes(32))
    assert isinstance(client, WireError) and "does not know the keeper's secret" in str(client)
    assert isinstance(server, ConnectionError)


def test_who_repeats_what_he_has_heard() -> None:
    """A proof is valid for one connection."""
    ends = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(Wire, ends[1], SECRET, is_server=True)
        ends[0].sendall(b"DCPTZR4\1" + bytes(32))
        heard = ends[0].recv(65)
        ends[0].sendall(heard[33:])
        assert isinstance(server.exception(), WireError)
    ends[0].close()


def test_who_is_no_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other bytes than a hello, and silence, end the connection."""
    monkeypatch.setattr(wire_module, "_HANDSHAKE_SECONDS", 0.05)
    for words in (b"GET / HTTP/1.1\r\nHost: keeper.example.com:80\r\n\r\n", b""):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(words)
            with pytest.raises(OSError, match=r"the peer uses another protocol|timed out"):
                Wire(theirs, SECRET, is_server=True)


def test_who_sends_slowly_is_not_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole handshake has one deadline, even if a byte arrives now and then."""
    monkeypatch.setattr(wire_module, "_HANDSHAKE_SECONDS", 0.5)
    ends, is_over = socket.socketpair(), threading.Event()

    def send_slowly() -> None:
        with suppress(OSError):
            for byte in b"DCPTZR4\1" + bytes(64):
                ends[0].send(bytes([byte]))
                is_over.wait(0.1)

    slow = in_background(send_slowly)
    with pytest.raises(TimeoutError):
        Wire(ends[1], SECRET, is_server=True)
    is_over.set()
    slow.result(WAIT)
    ends[0].close()


def test_a_changed_frame() -> None:
    """A change of any bit is detected."""
    for place in (-1, 5):
        client, server = relayed(lambda data, place=place: _flipped(data, place))  # type: ignore[misc]
        client.send(Word("hello"))
        with pytest.raises(WireError, match="changed in transit"):
            server.receive(Word)
        client.close()
        server.close()


def test_a_frame_that_is_repeated() -> None:
    """Frames are counted, so a repeated frame is detected."""
    client, server = relayed(lambda data: data * 2)
    client.send(Word("hello"))
    assert server.receive(Word) == Word("hello")
    with pytest.raises(WireError, match="changed in transit"):
        server.receive(Word)
    client.close()
    server.close()


def _flipped(data: bytes, place: int) -> bytes:
    changed = bytearray(data)
    changed[place] ^= 1
    return bytes(changed)


def test_what_is_too_large() -> None:
    """A peer cannot make the other end allocate more than a frame's maximum size."""
    client, server = both()
    with closing(client), closing(server):
        with pytest.raises(WireError, match="is too large"):
            client.send(Word("x" * MAX_MESSAGE))
        client._sock.sendall(wire_module._HEADER.pack(2, MAX_BYTES + 1))
        with pytest.raises(WireError, match="unexpected frame"):
            server.receive_bytes(memoryview(bytearray(MAX_BYTES + 1)))


def test_what_was_not_expected() -> None:
    """A message is accepted neither as bytes nor as a message of another type."""
    for receive, error in (
        (lambda wire: wire.receive_bytes(memoryview(bytearray(5))), "unexpected frame: kind 1"),
        (lambda wire: wire.receive(Number), "malformed message"),
    ):
        client, server = both()
        with closing(client), closing(server):
            client.send(Word("hello"))
            with pytest.raises(WireError, match=error):
                receive(server)


def test_an_address_has_no_secret_in_its_name() -> None:
    """The repr has no secret, because it may be logged."""
    assert repr(Address("10.0.0.1", 5, SECRET)) == "10.0.0.1:5"
