"""TCP connections to keepers on other hosts. Both ends know the secret of the keeper that accepts the connection.

    client ──▶ hello: magic, version, its ciphers, nonce
           ◀── cipher, nonce, proof      keyed BLAKE2b of all messages so far: an end without the secret learns nothing
           ──▶ proof
    then frames in both directions, each encrypted and authenticated with a key of this connection and direction:
    header (kind, bytes of the content), content, MAC

A frame is a message, in MessagePack, or raw bytes that a message has announced. Both have a maximum size, so that
no peer can make the other end allocate more. Before the proof, only some 70 bytes are read, and nothing is decoded.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from contextlib import suppress
from typing import Any

import msgspec

from .._runtime.threads import Deadline
from .frames import FRAME_MAC_BYTES, FrameCipher, FrameCipherKind, frame_ciphers

MAX_MESSAGE = 1 << 20
"""Maximum size of a message, in bytes."""
MAX_BYTES = 1 << 20
"""Maximum size of a frame of raw bytes, which is read, encrypted and sent while it is in the cache of a core."""
SECRET_BYTES = 32

_MAGIC = b"DCPTZR4"  # ends with the version
_NONCE = 32
_PROOF = 32
_HEADER = struct.Struct("<BI")
_MESSAGE, _BYTES = 1, 2
_HANDSHAKE_SECONDS = 10.0  # for the whole handshake: the longest that a client without the secret can hold a connection
_SECONDS = 60.0  # for each read and write after the handshake
_SILENT = "the connection has made no progress for too long"
_LOWER_EFFORT = 0x20  # DSCP CS1: other traffic goes first, where routers support it


class WireError(OSError):
    """Violation of the protocol, such as a wrong secret or invalid data."""


class Wire:
    """One end of a connection, for one thread at a time.

    ``is_server``: this end accepted the connection. ``seconds`` is the timeout of each read and write after the
    handshake. Raises `OSError` if the handshake fails: `WireError` if the other end violates the protocol.
    """

    def __init__(self, sock: socket.socket, secret: bytes, *, is_server: bool, seconds: float = _SECONDS) -> None:
        self._sock = sock
        self._out = bytearray()
        self._in = bytearray()
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._handshake: Deadline | None = Deadline(_HANDSHAKE_SECONDS)
        sock.settimeout(_HANDSHAKE_SECONDS)
        try:
            mine, theirs, cipher = self._shake_hands(secret, is_server=is_server)
        except BaseException:
            sock.close()
            raise
        self._handshake = None
        self._sealing, self._opening = FrameCipher(mine, cipher), FrameCipher(theirs, cipher)
        sock.settimeout(None)  # with Python's own timeouts, each call would poll before it reads
        timeout = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)

    def _shake_hands(self, secret: bytes, *, is_server: bool) -> tuple[bytes, bytes, FrameCipherKind]:
        """Proves to each end that the other knows the secret. Returns the keys to send and to receive, and the cipher.

        The server chooses one of the ciphers that both ends have. The proofs cover the choice.
        """
        nonce, ciphers = os.urandom(_NONCE), frame_ciphers()
        if is_server:
            hello = self._read(len(_MAGIC) + 1 + _NONCE)
            if not hello.startswith(_MAGIC):
                raise WireError("the peer uses another protocol, or an incompatible version of it")
            both = ciphers & hello[len(_MAGIC)]
            if not both:
                raise WireError("the peer has no cipher that this end has")
            cipher = FrameCipherKind.AES if both & FrameCipherKind.AES else FrameCipherKind.CHACHA
            own = bytes([cipher]) + nonce
            nonces = bytes(hello[len(_MAGIC) :]) + own
            self._sock.sendall(own + _derived(secret, b"server", nonces))
            proof = self._read(_PROOF)
            expected = _derived(secret, b"client", nonces)
        else:
            own = bytes([ciphers]) + nonce
            self._sock.sendall(_MAGIC + own)
            answer = self._read(1 + _NONCE + _PROOF)
            nonces, proof = own + bytes(answer[: 1 + _NONCE]), answer[1 + _NONCE :]
            expected = _derived(secret, b"server", nonces)
            cipher = FrameCipherKind.AES if answer[0] == FrameCipherKind.AES else FrameCipherKind.CHACHA
        if not hmac.compare_digest(bytes(proof), expected):
            raise WireError("the peer does not know the keeper's secret")
        if not is_server:
            self._sock.sendall(_derived(secret, b"client", nonces))
        keys = _derived(secret, b"to server", nonces), _derived(secret, b"to client", nonces)
        return (keys[1], keys[0], cipher) if is_server else (*keys, cipher)

    # --- messages ---------------------------------------------------------------------------------------------------

    def send(self, message: msgspec.Struct) -> None:
        """Sends a message. Raises `OSError` if that fails, and `WireError` if the message is too large."""
        content = msgspec.msgpack.encode(message)
        if len(content) > MAX_MESSAGE:
            raise WireError(f"a message of {len(content):,} bytes is too large")
        self._send(_MESSAGE, content)

    def receive(self, kind: Any) -> Any:
        """Receives a message of a type or of a union of types.

        Raises `OSError` if the connection fails, and `WireError` if the other end sends anything else.
        """
        nbytes = self._header(_MESSAGE, MAX_MESSAGE)
        content = memoryview(bytearray(nbytes))
        self._open(_MESSAGE, nbytes, content)
        try:
            return msgspec.msgpack.decode(content, type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise WireError(f"malformed message: {error}") from None

    def ask(self, message: msgspec.Struct, kind: Any) -> Any:
        self.send(message)
        return self.receive(kind)

    # --- raw bytes --------------------------------------------------------------------------------------------------

    def send_bytes(self, data: memoryview) -> None:
        """Sends bytes that a message has announced, in one or more frames."""
        for start in range(0, data.nbytes, MAX_BYTES):
            self._send(_BYTES, data[start : start + MAX_BYTES])

    def receive_bytes(self, target: memoryview) -> None:
        """Receives announced bytes into ``target``. After an error, its content is undefined."""
        for start in range(0, target.nbytes, MAX_BYTES):
            part = target[start : start + MAX_BYTES]
            if self._header(_BYTES, MAX_BYTES) != part.nbytes:
                raise WireError("the number of bytes is not the announced one")
            self._open(_BYTES, part.nbytes, part)

    # --- frames -----------------------------------------------------------------------------------------------------

    def _send(self, kind: int, content: memoryview | bytes) -> None:
        frame = self._buffer("_out", _HEADER.size + len(content) + FRAME_MAC_BYTES)
        _HEADER.pack_into(frame, 0, kind, len(content))
        self._sealing.seal(content, frame[_HEADER.size :], bytes(frame[: _HEADER.size]))
        try:
            self._sock.sendall(frame)
        except BlockingIOError:
            raise TimeoutError(_SILENT) from None

    def _header(self, kind: int, most: int) -> int:
        found, nbytes = _HEADER.unpack(self._read(_HEADER.size))
        if found != kind or nbytes > most:
            raise WireError(f"unexpected frame: kind {found}, {nbytes:,} bytes")
        return int(nbytes)

    def _open(self, kind: int, nbytes: int, target: memoryview) -> None:
        sealed = self._buffer("_in", nbytes + FRAME_MAC_BYTES)
        self._fill(sealed)
        if not self._opening.open(sealed, target, _HEADER.pack(kind, nbytes)):
            raise WireError("a frame was changed in transit")

    def _buffer(self, name: str, nbytes: int) -> memoryview:
        """Returns this connection's buffer for one direction, which all frames reuse."""
        if len(buffer := getattr(self, name)) < nbytes:
            buffer = bytearray(nbytes)
            setattr(self, name, buffer)
        return memoryview(buffer)[:nbytes]

    def _read(self, nbytes: int) -> bytearray:
        content = bytearray(nbytes)
        self._fill(memoryview(content))
        return content

    def _fill(self, view: memoryview) -> None:
        while view:
            if self._handshake is not None:  # one deadline for all parts that the other end sends
                if not (left := self._handshake.left):
                    raise TimeoutError(_SILENT)
                self._sock.settimeout(left)
            try:
                count = self._sock.recv_into(view, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise TimeoutError(_SILENT) from None
            if not count:
                raise ConnectionResetError("the other end is gone")
            view = view[count:]

    # --- close ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the connection, even if a thread is waiting for the other end. Idempotent."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def _derived(secret: bytes, purpose: bytes, nonces: bytes) -> bytes:
    return hashlib.blake2b(_MAGIC + nonces, key=secret, person=purpose, digest_size=32).digest()


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Address of a keeper for other hosts, with the keeper's secret, which only ranks and keepers of the job know."""

    host: str
    port: int
    secret: bytes

    def __repr__(self) -> str:
        """Returns the address without the secret."""
        return f"{self.host}:{self.port}"

    def connect(self, *, lower_effort: bool = False, seconds: float = _SECONDS) -> Wire:
        """Connects to the keeper. Raises `OSError` if it cannot be reached, or does not know the secret.

        ``lower_effort``: other traffic goes first, if the network supports that.
        """
        sock = socket.create_connection((self.host, self.port), _HANDSHAKE_SECONDS)
        if lower_effort:
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _LOWER_EFFORT)
        return Wire(sock, self.secret, is_server=False, seconds=seconds)


def listen_on(host: str) -> socket.socket:
    """Listens on an address of this host, at a free port. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=128)
