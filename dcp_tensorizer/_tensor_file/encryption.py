"""Encryption at rest: tensorizer's keys, and libsodium's secretbox, which encrypts tensorizer's files.

tensorizer, for its parameter classes, and libnacl, which finds libsodium, are imported only if there is a key.

Each block of an item is encrypted separately, with XSalsa20, and authenticated with Poly1305. To save a tensor,
tensorizer encrypts it in place and decrypts it afterwards. This package encrypts blocks into a buffer, so that during a
save no tensor and no staging buffer holds ciphertext.
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


_CHECK_BYTES = 16  # encrypted zeros, which only the same key decrypts
# The maximum costs of deriving a key from a passphrase: libsodium's preset "sensitive". A forged checkpoint may demand
# any costs, because nothing authenticates them before a reader has derived the key.
_MOST_OPERATIONS, _MOST_MEMORY = 4, 1 << 30


@dataclass(frozen=True, slots=True)
class Cipher:
    """A key for libsodium's secretbox, and its derivation if it comes from a passphrase. ``repr`` hides the key."""

    key: bytes = field(repr=False)
    derivation: Derivation | None = None

    def encrypt(self, source: memoryview, target: memoryview, nonce: bytes, number: int) -> bytes:
        """Encrypts a non-empty block into ``target``, of the same size. Returns its MAC.

        ``target`` may be ``source``. ``nonce`` is that of the item's first block, ``number`` the block's number.
        """
        assert target.nbytes == source.nbytes
        mac = bytearray(MAC_BYTES)
        encrypt, _ = _secretbox()
        addresses = _address(target), _address(mac), _address(source)
        if encrypt(*addresses, source.nbytes, _counted(nonce, number), self.key):
            raise WriteError("libsodium could not encrypt a block")
        return bytes(mac)

    @staticmethod
    def new_nonce() -> bytes:
        return os.urandom(NONCE_BYTES)

    def decrypt(self, data: memoryview, nonce_and_macs: bytes, number: int) -> bool:
        """Decrypts block ``number`` of an item in place. Returns False, without a change, if its MAC does not match."""
        nonce, mac = nonce_and_macs[:NONCE_BYTES], nonce_and_macs[NONCE_BYTES + number * MAC_BYTES :][:MAC_BYTES]
        if len(mac) < MAC_BYTES:
            return False
        _, decrypt = _secretbox()
        address = _address(data)
        return decrypt(address, address, _address(mac), data.nbytes, _counted(nonce, number), self.key) == 0

    def check_value(self) -> bytes:
        """Returns a new random value that `opens` accepts with this key only, and that does not reveal the key."""
        nonce, block = self.new_nonce(), memoryview(bytearray(_CHECK_BYTES))
        return nonce + self.encrypt(block, block, nonce, 0) + bytes(block)

    def sign(self, fingerprint: bytes) -> bytes:
        """Returns the MAC of an index's fingerprint: keyed BLAKE2b, with a key derived for this purpose only."""
        key = hashlib.blake2b(key=self.key, person=b"dcptzr.index.key").digest()
        return hashlib.blake2b(fingerprint, key=key, digest_size=32).digest()

    def opens(self, check: bytes) -> bool:
        nonce_and_macs, block = check[:-_CHECK_BYTES], bytearray(check[-_CHECK_BYTES:])
        return len(block) == _CHECK_BYTES and self.decrypt(memoryview(block), nonce_and_macs, 0)


def encryption_cipher(params: EncryptionParams) -> Cipher:
    """Returns the cipher of a writer's key.

    Raises `TypeError` unless ``params`` is an ``EncryptionParams``, `ValueError` if readers do not allow the costs of
    the key's derivation, and `WriteError` without libsodium.
    """
    from tensorizer import EncryptionParams

    if not isinstance(params, EncryptionParams):
        raise TypeError(f"encryption must be tensorizer.EncryptionParams, got {type(params).__name__}")
    require_libsodium()
    made = params._crypt_info_chunk()  # the public interface of tensorizer exposes only the salt
    if made is not None and (made.opslimit > _MOST_OPERATIONS or made.memlimit > _MOST_MEMORY):
        raise ValueError(
            f"encryption must have an opslimit of at most {_MOST_OPERATIONS} and a memlimit of at most "
            f"{_MOST_MEMORY:,}, got {made.opslimit:,} and {made.memlimit:,}."
        )
    return Cipher(
        params.key,
        None if made is None else Derivation(int(made.opslimit), int(made.memlimit), made.alg, bytes(made.salt)),
    )


def decryption_key(*, key: bytes | None = None, passphrase: str | None = None) -> DecryptionParams:
    """Returns parameters for a reader, made from a key or a passphrase.

    Raises `ValueError` unless exactly one of the two is given and a key has 32 bytes. Raises `DecryptionError` without
    libsodium.
    """
    from tensorizer import DecryptionParams

    require_libsodium(DecryptionError)
    if (key is None) == (passphrase is None):
        raise ValueError("pass either key= or passphrase=")
    return DecryptionParams.from_key(key) if key is not None else DecryptionParams.from_string(passphrase)


def check_decryption(params: DecryptionParams) -> None:
    """Checks a reader's parameters.

    Raises `TypeError` unless ``DecryptionParams.from_key`` or ``DecryptionParams.from_string`` has made them, and
    `DecryptionError` without libsodium.
    """
    from tensorizer import DecryptionParams

    if not isinstance(params, DecryptionParams):
        raise TypeError(f"encryption must be tensorizer.DecryptionParams, got {type(params).__name__}")
    require_libsodium(DecryptionError)
    if params.key is None and params.source is None:
        raise TypeError("encryption must be made by DecryptionParams.from_key or DecryptionParams.from_string")


def _decryption_cipher(params: DecryptionParams, derivation: Derivation | None) -> Cipher:
    """Returns a reader's key. Deriving it from a passphrase takes the time and memory that the writer chose.

    For a passphrase, raises `DecryptionError` if the checkpoint was encrypted without one, or if the key cannot be
    derived. The message lacks the path, which the caller puts before it.
    """
    from tensorizer import EncryptionParams

    if params.key is not None:
        return Cipher(bytes(params.key))
    if derivation is None:
        raise DecryptionError(
            "was encrypted with a key, not a passphrase. Give the key (tensorizer.DecryptionParams.from_key, or "
            "--key-file)"
        )
    if derivation.opslimit > _MOST_OPERATIONS or derivation.memlimit > _MOST_MEMORY:
        raise DecryptionError(
            f"asks for an opslimit of {derivation.opslimit:,} and a memlimit of {derivation.memlimit:,} to derive the "
            f"key, and readers allow {_MOST_OPERATIONS} and {_MOST_MEMORY:,}: it may be forged. If you saved it with "
            f"these values, give the key of EncryptionParams.from_string(..., opslimit={derivation.opslimit}, "
            f"memlimit={derivation.memlimit}, salt=bytes.fromhex({derivation.salt[:16].hex()!r})) instead of the "
            f"passphrase"
        )
    try:
        made = EncryptionParams.from_string(
            params.source, opslimit=derivation.opslimit, memlimit=derivation.memlimit, salt=derivation.salt
        )
    except Exception as error:  # too little memory, or costs that libsodium refuses
        raise DecryptionError(
            f"was encrypted with a passphrase, and the key cannot be derived on this machine (the "
            f"derivation takes {derivation.memlimit:,} bytes of memory): {type(error).__name__}: {error}"
        ) from None
    return Cipher(made.key, derivation)


def unlock(
    params: DecryptionParams | None, record: Mapping[str, Any] | None, path: str, known: Cipher | None = None
) -> Cipher | None:
    """Returns the checkpoint's key after checking it, or None if the checkpoint is not encrypted.

    ``record`` is the description of the key in ``.metadata``. A ``known`` key is tried first, because deriving a key
    takes long. Raises `DecryptionError` if the key is missing, wrong, or given for an unencrypted checkpoint, or if the
    metadata was changed without the key after the save.
    """
    if known is not None and record is not None and known.opens(record["check"]):
        _check_seal(known, record["seal"], path)
        return known
    if record is None and params is None:
        return None
    if params is None:
        raise DecryptionError(
            f"{path} is encrypted. Give its key (encryption=tensorizer.DecryptionParams..., --key-file or "
            f"--passphrase-file)"
        )
    if record is None:
        raise DecryptionError(
            f"{path} is not encrypted, but a key was given. Leave the key out, or load another checkpoint"
        )
    try:
        cipher = _decryption_cipher(params, record["derivation"])
    except DecryptionError as error:
        raise DecryptionError(f"{path} {error}") from None
    if not cipher.opens(record["check"]):
        raise DecryptionError(f"{path} was encrypted with another key or passphrase. Give that one.")
    _check_seal(cipher, record["seal"], path)
    return cipher


def _check_seal(cipher: Cipher, seal: Seal, path: str) -> None:
    if not hmac.compare_digest(cipher.sign(seal.fingerprint), seal.mac):
        raise DecryptionError(
            f"{path}: its metadata was changed without its key after the save. Load another checkpoint."
        )


def find_other_key(cipher: Cipher | None, checks: Iterable[tuple[int, bytes]]) -> int | None:
    """Returns the first rank whose check value does not match ``cipher``, or None.

    Without a cipher, only an empty check value matches.
    """
    for rank, check in checks:
        is_same = not check if cipher is None else cipher.opens(check)
        if not is_same:
            return rank
    return None


def require_libsodium(kind: type[CheckpointError] = WriteError) -> None:
    """If libsodium is missing, raises an error of class ``kind`` that explains how to install it."""
    try:
        _secretbox()
    except (OSError, AttributeError, RuntimeError):
        raise kind(
            "encryption needs libsodium, which is missing or too old. Install it (apt-get install libsodium23, "
            "dnf install libsodium, conda install libsodium)"
        ) from None


@functools.cache
def _secretbox() -> tuple[Callable[..., int], Callable[..., int]]:
    """Returns ``crypto_secretbox_detached`` and ``crypto_secretbox_open_detached``, which release the GIL."""
    from libnacl import nacl

    pointer, length = ctypes.c_void_p, ctypes.c_ulonglong
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, length, pointer, pointer)
    return prototype(("crypto_secretbox_detached", nacl)), prototype(("crypto_secretbox_open_detached", nacl))


def _counted(nonce: bytes, number: int) -> bytes:
    return ((int.from_bytes(nonce, "little") + number) % (1 << 8 * NONCE_BYTES)).to_bytes(NONCE_BYTES, "little")


def _address(data: memoryview | bytearray | bytes) -> Any:
    return np.frombuffer(data, dtype=np.uint8).ctypes.data
