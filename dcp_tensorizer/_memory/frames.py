"""Authenticated encryption of the frames of a connection to a keeper on another host."""

from __future__ import annotations

import ctypes
import enum
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from .._runtime.interpreter import collector_paused
from .._tensor_file.encryption import require_libsodium
from ..errors import WriteError

FRAME_MAC_BYTES = 16
"""The bytes that encryption adds to a frame of a connection."""


class FrameCipherKind(enum.IntFlag):
    CHACHA = 1
    """ChaCha20-Poly1305 of libsodium: 1.7 GB/s on a core that reaches 20 GB/s with AES."""
    AES = 2
    """AES-256-GCM of OpenSSL, if the installed package `cryptography` can encrypt into existing memory."""


@functools.cache
def frame_ciphers() -> FrameCipherKind:
    """Returns the ciphers that this process has. Raises `WriteError` without libsodium."""
    require_libsodium()
    return FrameCipherKind.CHACHA if _aes() is None else FrameCipherKind.CHACHA | FrameCipherKind.AES


class FrameCipher:
    """Cipher for the frames of one direction of a connection.

    The nonce counts the frames: if a frame was left out, repeated or moved, `open` returns False. ``key`` has 32
    bytes, and is only for this connection and direction. ``kind`` is one of `frame_ciphers`.
    """

    def __init__(self, key: bytes, kind: FrameCipherKind = FrameCipherKind.CHACHA) -> None:
        aes = _aes() if kind is FrameCipherKind.AES else None
        self._aes = None if aes is None else aes(key)
        self._key = key
        self._count = 0

    def seal(self, source: memoryview | bytes, target: memoryview, header: bytes) -> None:
        """Encrypts a frame into ``target``, followed by the MAC, which also authenticates ``header``."""
        assert target.nbytes == len(source) + FRAME_MAC_BYTES
        if self._aes is not None:
            self._aes.encrypt_into(self._next_nonce(), source, header, target)
            return
        seal, _ = _aead()
        arguments = _address(target), None, _address(source), len(source), header, len(header)
        if seal(*arguments, None, self._next_nonce(), self._key):
            raise WriteError("libsodium could not encrypt a frame")

    def open(self, sealed: memoryview, target: memoryview, header: bytes) -> bool:
        """Decrypts a frame into ``target``. ``sealed`` is the frame, followed by its MAC.

        Returns False if the frame or its header was changed, or is not the next one. The content of ``target`` is then
        undefined.
        """
        assert sealed.nbytes == target.nbytes + FRAME_MAC_BYTES
        if self._aes is not None:
            from cryptography.exceptions import InvalidTag

            try:
                self._aes.decrypt_into(self._next_nonce(), sealed, header, target)
            except InvalidTag:
                return False
            return True
        _, open_ = _aead()
        arguments = _address(target), None, None, _address(sealed), sealed.nbytes, header, len(header)
        return open_(*arguments, self._next_nonce(), self._key) == 0

    def _next_nonce(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(12, "little")


@functools.cache
@collector_paused()  # the garbage collector would add a quarter of a second to a restart
def _aes() -> Any:
    """Returns the AES-GCM of `cryptography`, or None if that package is missing, broken or too old.

    Older versions cannot encrypt into existing memory.
    """
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except Exception:
        return None
    return AESGCM if hasattr(AESGCM, "encrypt_into") and hasattr(AESGCM, "decrypt_into") else None


@functools.cache
def _aead() -> tuple[Callable[..., int], Callable[..., int]]:
    """Returns libsodium's AEAD functions to encrypt and to decrypt. They run without the GIL."""
    from libnacl import nacl

    pointer, length = ctypes.c_void_p, ctypes.c_ulonglong
    seal = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, length, pointer, length, pointer, pointer, pointer)
    open_ = ctypes.CFUNCTYPE(
        ctypes.c_int, pointer, pointer, pointer, pointer, length, pointer, length, pointer, pointer
    )
    name = "crypto_aead_chacha20poly1305_ietf"
    return seal((f"{name}_encrypt", nacl)), open_((f"{name}_decrypt", nacl))


def _address(data: memoryview | bytes) -> Any:
    """Returns the address of bytes, or None for empty ones."""
    return np.frombuffer(data, dtype=np.uint8).ctypes.data if len(data) else None
