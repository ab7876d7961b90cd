"""Encryption at rest: tensorizer's keys, and libsodium's secretbox, which tensorizer's files are encrypted with.

It imports tensorizer for its classes of parameters, and libnacl, through which it finds libsodium; both only where
there is a key.

Each block of an item is encrypted by itself, with XSalsa20, and authenticated with Poly1305. tensorizer encrypts
tensors where they are and decrypts them afterwards; here blocks are encrypted into a buffer, so that nobody ever finds
a tensor, or a staging buffer, encrypted.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import hmac
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CheckpointError, DecryptionError, WriteError
from .names import MAC_BYTES, NONCE_BYTES, Derivation, Seal

if TYPE_CHECKING:
    from tensorizer import DecryptionParams as DecryptionParams
    from tensorizer import EncryptionParams as EncryptionParams


_CHECK_BYTES = 16  # of zeros: another key cannot open them
_MOST_OPERATIONS = 1024  # libsodium's "sensitive" is 4; a file must not make a reader compute for days


@dataclass(frozen=True, slots=True)
class Cipher:
    """A key, and what it was derived from. It is in no ``repr``.

    Attributes:
        key: For libsodium's secretbox.
        derivation: How it was made from a passphrase; None if it was not.
    """

    key: bytes = field(repr=False)
    derivation: Derivation | None = None

    def encrypt(self, source: memoryview, target: memoryview, nonce: bytes, number: int) -> bytes:
        """Encrypts a block into ``target``, of the same size, which may be ``source`` itself.

        Args:
            source: The block; not empty.
            target: Where it goes.
            nonce: Of the item's first block.
            number: The block's, in the item.

        Returns:
            Its MAC.
        """
        assert target.nbytes == source.nbytes
        mac = bytearray(MAC_BYTES)
        encrypt, _ = _secretbox()
        places = _address(target), _address(mac), _address(source)
        if encrypt(*places, source.nbytes, _counted(nonce, number), self.key):
            raise WriteError("libsodium could not encrypt a block")
        return bytes(mac)

    @staticmethod
    def new_nonce() -> bytes:
        """Makes a nonce for an item; no two are the same."""
        return os.urandom(NONCE_BYTES)

    def decrypt(self, data: memoryview, nonce_and_macs: bytes, number: int) -> bool:
        """Decrypts a block where it is, unless it is not what was encrypted: then it stays, and this is False.

        Args:
            data: The block.
            nonce_and_macs: The item's (`StoredItem.nonce_and_macs`).
            number: The block's, in the item.
        """
        nonce, mac = nonce_and_macs[:NONCE_BYTES], nonce_and_macs[NONCE_BYTES + number * MAC_BYTES :][:MAC_BYTES]
        if len(mac) < MAC_BYTES:
            return False
        _, decrypt = _secretbox()
        address = _address(data)
        return decrypt(address, address, _address(mac), data.nbytes, _counted(nonce, number), self.key) == 0

    def check_value(self) -> bytes:
        """Makes a value that tells this key from others (see `opens`), and says nothing else; no two are the same."""
        nonce, block = self.new_nonce(), memoryview(bytearray(_CHECK_BYTES))
        return nonce + self.encrypt(block, block, nonce, 0) + bytes(block)

    def record(self) -> dict[str, Any]:
        """The description of this key in ``.metadata``."""
        return {"derivation": self.derivation and tuple(self.derivation), "check": self.check_value()}

    def sign(self, fingerprint: bytes) -> bytes:
        """The MAC of an index's fingerprint: keyed BLAKE2b, with a key for this alone that is made of this one."""
        key = hashlib.blake2b(key=self.key, person=b"dcptzr.index.key").digest()
        return hashlib.blake2b(fingerprint, key=key, digest_size=32).digest()

    def opens(self, check: bytes) -> bool:
        """Returns whether a check value was made with this key."""
        nonce_and_macs, block = check[:-_CHECK_BYTES], bytearray(check[-_CHECK_BYTES:])
        return len(block) == _CHECK_BYTES and self.decrypt(memoryview(block), nonce_and_macs, 0)


def encryption_cipher(params: EncryptionParams) -> Cipher:
    """The cipher of a writer's key.

    Raises:
        TypeError: it is something else.
        ValueError: no reader would make the key again, because that takes too long.
        WriteError: there is no libsodium.
    """
    from tensorizer import EncryptionParams

    if not isinstance(params, EncryptionParams):
        raise TypeError(f"encryption must be tensorizer.EncryptionParams, and is {type(params).__name__}")
    _require_library(WriteError)
    made = params._crypt_info_chunk()  # tensorizer shows no more than the salt in public
    if made is not None and made.opslimit > _MOST_OPERATIONS:
        raise ValueError(f"encryption has an opslimit of {made.opslimit:,}: pass at most {_MOST_OPERATIONS:,}")
    return Cipher(
        params.key,
        None if made is None else Derivation(int(made.opslimit), int(made.memlimit), made.alg, bytes(made.salt)),
    )


def decryption_key(*, key: bytes | None = None, passphrase: str | None = None) -> DecryptionParams:
    """Parameters for a reader, made of a key or a passphrase.

    Raises:
        ValueError: the key is not of 32 bytes, or there is not one of the two.
        DecryptionError: there is no libsodium.
    """
    from tensorizer import DecryptionParams

    _require_library(DecryptionError)
    if (key is None) == (passphrase is None):
        raise ValueError("a checkpoint has one key, or one passphrase")
    return DecryptionParams.from_key(key) if key is not None else DecryptionParams.from_string(passphrase)


def check_decryption(params: DecryptionParams) -> None:
    """Checks the key or passphrase of a reader.

    Raises:
        TypeError: it is something else.
        DecryptionError: there is no libsodium.
    """
    from tensorizer import DecryptionParams

    if not isinstance(params, DecryptionParams):
        raise TypeError(f"encryption must be tensorizer.DecryptionParams, and is {type(params).__name__}")
    _require_library(DecryptionError)
    if params.key is None and params.source is None:
        raise TypeError("encryption must be made by DecryptionParams.from_key or DecryptionParams.from_string")


def _decryption_cipher(params: DecryptionParams, derivation: Derivation | None) -> Cipher:
    """A reader's key for a checkpoint. Deriving it from a passphrase takes the time and memory that were chosen then.

    Raises:
        DecryptionError: there is a passphrase, and the checkpoint was not encrypted with one.
    """
    from tensorizer import EncryptionParams

    if params.key is not None:
        return Cipher(bytes(params.key))
    if derivation is None:
        raise DecryptionError(
            "was encrypted with a key and not with a passphrase: use tensorizer.DecryptionParams.from_key"
        )
    if derivation.opslimit > _MOST_OPERATIONS:  # nothing in the metadata is known to be true before there is a key
        raise DecryptionError(f"claims to need {derivation.opslimit:,} passes to make a key: it is damaged")
    try:
        made = EncryptionParams.from_string(
            params.source, opslimit=derivation.opslimit, memlimit=derivation.memlimit, salt=derivation.salt
        )
    except Exception as error:  # memory is short, or its metadata asks for what libsodium does not do
        raise DecryptionError(
            f"was encrypted with a passphrase, of which no key can be made here ({derivation.memlimit:,} bytes of "
            f"memory are needed for it): {type(error).__name__}: {error}"
        ) from None
    return Cipher(made.key, derivation)


def unlock(
    params: DecryptionParams | None, record: Mapping[str, Any] | None, path: str, known: Cipher | None = None
) -> Cipher | None:
    """The key of a checkpoint, found to be the right one; None for one that is not encrypted.

    Args:
        params: What the user gave.
        record: What the checkpoint's ``.metadata`` says of its key.
        path: The checkpoint's, for messages.
        known: A key that was found before; if it is the right one, none is derived, which takes long.

    Raises:
        DecryptionError: there is no key, a wrong one, or one too many; or the metadata is not what was saved.
    """
    if known is not None and record is not None and known.opens(record["check"]):
        _check_seal(known, record["seal"], path)
        return known
    if record is None and params is None:
        return None
    if params is None:
        raise DecryptionError(
            f"{path} is encrypted: give its key (encryption=tensorizer.DecryptionParams..., or --key-file)"
        )
    if record is None:
        raise DecryptionError(
            f"{path} is not encrypted, and a key was given: leave the key out, or name another checkpoint"
        )
    derivation = None if record["derivation"] is None else Derivation(*record["derivation"])
    try:
        cipher = _decryption_cipher(params, derivation)
    except DecryptionError as error:
        raise DecryptionError(f"{path} {error}") from None
    if not cipher.opens(record["check"]):
        raise DecryptionError(f"{path} was encrypted with another key, or passphrase, than was given")
    _check_seal(cipher, record["seal"], path)
    return cipher


def _check_seal(cipher: Cipher, seal: Seal, path: str) -> None:
    """Raises `DecryptionError` for an index that was not made with its checkpoint's key."""
    if not hmac.compare_digest(cipher.sign(seal.fingerprint), seal.mac):
        raise DecryptionError(
            f"{path}: its metadata was changed without its key after the save. Nothing in it can be "
            f"trusted: load another checkpoint."
        )


def find_other_key(cipher: Cipher | None, checks: Iterable[tuple[int, bytes]]) -> int | None:
    """The first rank whose check value is of another key than ``cipher``'s, or of none where there is one."""
    for rank, check in checks:
        is_same = not check if cipher is None else cipher.opens(check)
        if not is_same:
            return rank
    return None


def _require_library(kind: type[CheckpointError]) -> None:
    try:
        _secretbox()
    except (OSError, AttributeError, RuntimeError):
        raise kind(
            "encryption needs libsodium, which is missing or too old: install it with the system's packages "
            "(apt-get install libsodium23, dnf install libsodium, conda install libsodium)"
        ) from None


@functools.cache
def _secretbox() -> tuple[Callable[..., int], Callable[..., int]]:
    """``crypto_secretbox_detached`` and ``crypto_secretbox_open_detached``; they run without the interpreter lock."""
    from libnacl import nacl

    pointer, length = ctypes.c_void_p, ctypes.c_ulonglong
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, length, pointer, pointer)
    return prototype(("crypto_secretbox_detached", nacl)), prototype(("crypto_secretbox_open_detached", nacl))


def _counted(nonce: bytes, number: int) -> bytes:
    """The nonce of an item's ``number``-th block."""
    return ((int.from_bytes(nonce, "little") + number) % (1 << 8 * NONCE_BYTES)).to_bytes(NONCE_BYTES, "little")


def _address(data: memoryview | bytearray | bytes) -> Any:
    return np.frombuffer(data, dtype=np.uint8).ctypes.data
