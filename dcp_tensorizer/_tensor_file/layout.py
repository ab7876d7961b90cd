"""The tensorizer file format: the layout of files and headers.

A file's layout does not depend on the values of its tensors, so it is known before any hashing, and several threads
can encode the parts of a file at the same time.

    head      magic, version, flags, total size and number of tensors, then the index, in a region of 256 KiB or more
    entries   for each tensor a header (name, dtype, shape, the hashes of header and data, padding), then the data
    end       eight zero bytes

The padding aligns the data. A header may hold several hashes. In an unencrypted file, this package always writes a
CRC-32, which costs a fifteenth of the CPU time of a SHA-256. A SHA-256 is optional. With SHA-256, and without padding,
the file equals that of ``tensorizer.TensorSerializer`` byte for byte (the tests compare them).

In an encrypted file, a header describes the encryption of its tensor, with a MAC for each block. It holds no hashes.
``TensorSerializer`` stores a SHA-256 of the unencrypted tensor there. With this hash, a reader without the key can find
out whether a tensor has the same values in two files, and can verify a guess of the values.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np

from .names import INDEX_CAPACITY, MAC_BYTES, NONCE_BYTES, Derivation, block_size

if TYPE_CHECKING:
    from .encryption import Cipher


# The data of each tensor in a file begins at a multiple of this many bytes, because tensors in memory are aligned to 64
# bytes. Reading from the page cache takes 1.1 to 1.25 times as long if the addresses of source and target differ modulo
# 32 (on Zen 4).
ALIGNMENT = 64
MAGIC = b"|TZR|"
# Data version, feature flags, bytes of tensors, unused, number of tensors, length of the index's region.
HEAD = struct.Struct("<I32sQ8xQQ")
START = struct.Struct("<QHBH")  # length of the header, module index, kind of tensor, length of the name
_NAME = struct.Struct("<H")  # length of the name
_LOCATION = struct.Struct("<QQQ")  # first byte of header and data, bytes of data
_COUNT = struct.Struct("<HB")  # bytes that follow, number of hashes
_HASH = struct.Struct("<BB")  # kind, length of the value that follows
CRC32, _SHA256 = 0, 1
_NO_HASHES = _COUNT.pack(1, 0)
_LENGTH = struct.Struct("<Q")
_PASSPHRASE = struct.Struct("<HHQQiH")  # two tags; costs and algorithm of the derivation; length of the salt
_DERIVED, _BY_PWHASH = 1, 1
_BLOCKS = struct.Struct(f"<HQ{NONCE_BYTES}sQ")  # tag, bytes in a block, nonce of the first, number of MACs that follow
_XSALSA20 = 2
# torch's dtypes that numpy also has, and the item sizes of the others, unless these are one byte. They are listed here
# because the writer process does not import torch: the import takes two seconds.
_NUMPY = {"bool", *(f"{kind}int{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64))}
_NUMPY |= {"float16", "float32", "float64", "complex64", "complex128"}
_ITEMSIZE = {"bfloat16": 2, "bits16": 2, "bcomplex32": 4, "complex32": 4}
# Kinds of tensor: a module's parameter, its buffer, or (as in a state dict) neither.
_KINDS = {"parameter": 0, "buffer": 1}
_STATE_DICT = 2
END = bytes(8)

# The lowest data version of each kind of file: plain; with dtypes that numpy lacks; encrypted; with dimensions of more
# than 32 bits.
_PLAIN, _OPAQUE, ENCRYPTED, LONG = 1, 2, 3, 5
# Feature flags, from version 4 on. Versioned index: a version precedes each of its entries.
ENCRYPTED_FLAG, VERSIONED_INDEX = 1, 2


class TensorLayout(Protocol):
    """The properties of a tensor that the layout of a file depends on."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def kind(self) -> str:
        """Returns ``parameter`` or ``buffer`` for a tensor of a module, anything else for one of a state dict."""


T = TypeVar("T", bound=TensorLayout)


@dataclass(slots=True)  # not frozen: a frozen entry takes three times as long to make, and files have thousands
class Entry(Generic[T]):
    """A tensor in a file. Offsets count from the start of the file, unless a comment names another start.

    Offsets and lengths are in bytes.
    """

    tensor: T
    header_offset: int
    header: bytes  # with zeros for the hashes, as it is hashed; in an encrypted file, with zeros for nonce and MACs
    hashes_offset: int  # of the list of hashes, from the start of the header; the list is empty in an encrypted file
    offset: int  # of the data
    length: int
    padding: int  # zeros in the header before the length of the data
    block: int = 0  # bytes in each encrypted block but the last; 0 in a plain file
    has_sha256: bool = False

    def with_crc32(self, crc32: int) -> bytes:
        """Returns the header as it is stored in a file without SHA-256."""
        at = self.hashes_offset + _CRC32_AT
        return self.header[:at] + crc32.to_bytes(4, "little") + self.header[at + 4 :]

    def with_hashes(self, crc32: int, sha256: bytes = b"") -> bytes:
        """Returns the header as it is stored, with these hashes. In a file without SHA-256, ``sha256`` is empty."""
        hashes = _hashes(crc32, sha256)
        return self.header[: self.hashes_offset] + hashes + self.header[self.hashes_offset + len(hashes) :]

    def with_macs(self, nonce_and_macs: bytes) -> bytes:
        """Returns the header of an encrypted tensor as it is stored. ``nonce_and_macs`` is that of `StoredItem`."""
        header = bytearray(self.header)
        end = len(header) - _LENGTH.size - self.padding
        macs = end - (len(nonce_and_macs) - NONCE_BYTES)
        start = macs - _LENGTH.size - NONCE_BYTES
        header[start : start + NONCE_BYTES] = nonce_and_macs[:NONCE_BYTES]
        header[macs:end] = nonce_and_macs[NONCE_BYTES:]
        return bytes(header)


@dataclass(frozen=True, slots=True)
class FileLayout(Generic[T]):
    """The layout of a file: its first bytes, entries in order, size and cipher. `END` follows the entries."""

    head: bytes
    entries: tuple[Entry[T], ...]
    nbytes: int
    cipher: Cipher | None = None


def lay_out(
    tensors: Sequence[T],
    cipher: Cipher | None = None,
    *,
    sha256: bool = False,
    capacity: int = INDEX_CAPACITY,
    alignment: int = ALIGNMENT,
) -> FileLayout[T]:
    """Returns the layout of a file that holds ``tensors`` in this order.

    Names must be unique, and in an encrypted file no tensor may be empty. With a ``cipher``, the headers describe the
    encryption and hold no hashes. Otherwise they hold a CRC-32 and, with ``sha256``, also a SHA-256. ``capacity`` is
    the size in bytes of the region for the index: tensorizer writes regions of `INDEX_CAPACITY` bytes, and reads larger
    ones. ``alignment`` is that of the data, in bytes; tests pass 1 to compare files with those of ``TensorSerializer``.
    Raises `ValueError` if the index exceeds ``capacity``.
    """
    position = len(MAGIC) + HEAD.size + capacity
    hashes = _hashes(0, bytes(32)) if sha256 else _NO_CRC32
    version = _PLAIN if cipher is None else ENCRYPTED
    entries: list[Entry[T]] = []
    listing: list[tuple[int, bytes]] = []  # entries of the index: the lowest data version, and the rest
    for tensor in tensors:
        name, kind = tensor.name.encode(), _KINDS.get(tensor.kind, _STATE_DICT)
        elements, least, of_file = _describe_elements(tensor.dtype, tensor.shape, tensor.nbytes)
        block, proof = 0, hashes
        if cipher is not None:
            block = block_size(tensor.nbytes, encrypted=True)
            proof = _NO_HASHES + _crypt_info(cipher.derivation, tensor.nbytes, block)
        hashes_offset = START.size + len(name) + len(elements)
        nbytes = hashes_offset + len(proof) + _LENGTH.size
        # Readers find the length of the data by its distance from the end of the header, so padding may precede it.
        padding = -(position + nbytes) % alignment
        start = START.pack(nbytes + padding, 0, kind, len(name))
        header = start + name + elements + proof + bytes(padding) + _LENGTH.pack(tensor.nbytes)
        offset = position + len(header)
        has_sha256 = sha256 and cipher is None
        entries.append(
            Entry(tensor, position, header, hashes_offset, offset, tensor.nbytes, padding, block, has_sha256)
        )
        location = _LOCATION.pack(position, offset, tensor.nbytes)
        listing.append((least, _NAME.pack(len(name)) + name + bytes((kind,)) + elements + location))
        version = max(version, of_file)
        position = offset + tensor.nbytes
    head = _head(listing, sum(tensor.nbytes for tensor in tensors), version, cipher is not None, capacity)
    return FileLayout(head, tuple(entries), position + len(END), cipher)


def reads_empty(dtype: str) -> bool:
    """Returns whether tensorizer can read an empty tensor of ``dtype``.

    If numpy lacks the dtype, ``TensorDeserializer`` of tensorizer 2.12.1 cannot open a file with such a tensor.
    """
    return dtype in _NUMPY


@functools.lru_cache(4096)  # most of thousands of tensors have the same dtype and shape
def _describe_elements(dtype: str, shape: tuple[int, ...], nbytes: int) -> tuple[bytes, int, int]:
    """Returns the encoded dtype and shape of a tensor, and the lowest data versions of its index entry and its file."""
    least = LONG if any(extent >> 32 for extent in shape) else _PLAIN
    packed = struct.pack(f"<B{len(shape)}{'Q' if least == LONG else 'I'}", len(shape), *shape)
    if dtype in _NUMPY:
        name = np.dtype(dtype).str.encode()
    else:  # an opaque dtype of numpy's, followed by torch's name
        count = math.prod(shape)
        itemsize = nbytes // count if count else _ITEMSIZE.get(dtype, 1)
        name = f"{'|' if itemsize == 1 else '<'}V{itemsize}\0torch.{dtype}".encode()
    return bytes((len(name),)) + name + packed, least, max(least, _OPAQUE if b"\0" in name else _PLAIN)


def _head(listing: Sequence[tuple[int, bytes]], total: int, version: int, is_encrypted: bool, capacity: int) -> bytes:
    is_versioned = version == LONG
    index = b"".join(struct.pack("<I", least) + entry if is_versioned else entry for least, entry in listing)
    if len(index) > capacity:
        raise ValueError(
            f"an index of {len(listing):,} tensors must have at most {capacity:,} bytes, got {len(index):,}"
        )
    flags = (VERSIONED_INDEX | (ENCRYPTED_FLAG if is_encrypted else 0)) if is_versioned else 0
    head = MAGIC + HEAD.pack(version, flags.to_bytes(32, "little"), total, len(listing), capacity)
    return head + index.ljust(capacity, b"\0")


def _hashes(crc32: int, sha256: bytes) -> bytes:
    body = _HASH.pack(CRC32, 4) + crc32.to_bytes(4, "little")
    if sha256:
        body += _HASH.pack(_SHA256, len(sha256)) + sha256
    return _COUNT.pack(1 + len(body), 2 if sha256 else 1) + body


_NO_CRC32 = _hashes(0, b"")
_CRC32_AT = len(_NO_CRC32) - 4


def _crypt_info(derivation: Derivation | None, nbytes: int, block: int) -> bytes:
    """Returns the encryption record of a tensor, with zeros for nonce and MACs. A length precedes each section."""
    macs = -(-nbytes // block)
    sections = [_BLOCKS.pack(_XSALSA20, block, b"", macs) + bytes(MAC_BYTES * macs)]
    if derivation is not None:
        costs = derivation.opslimit, derivation.memlimit, derivation.algorithm
        salt = derivation.salt
        sections.insert(0, _PASSPHRASE.pack(_DERIVED, _BY_PWHASH, *costs, len(salt)) + salt)
    body = struct.pack("<H", len(sections)) + b"".join(_LENGTH.pack(len(part)) + part for part in sections)
    return _LENGTH.pack(len(body)) + body
