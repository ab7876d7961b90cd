"""Checksums of tensors: XXH3-64 of blocks and whole tensors for this package, CRC-32 and SHA-256 for tensorizer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import xxhash
from isal.isal_zlib import crc32  # ten times as fast as zlib's

from ..errors import ChecksumMismatch
from .names import StoredItem, block_size

# The size from which releasing the GIL pays off: hashing this many bytes takes about 20 microseconds. On 16 cores, each
# of eight threads waits as long to reacquire the GIL. The one-shot functions of xxhash 3 never release it, and those of
# xxhash 4 only above 64 KiB. The hash objects of both release it.
_WORTH_UNLOCKING = 512 << 10


class Digester:
    """A computation of `StoredItem.digests` for data in pieces of any size. ``block`` is `StoredItem.block`."""

    def __init__(self, block: int) -> None:
        self._step = self._left = block
        self._hash = xxhash.xxh3_64()
        self._whole = xxhash.xxh3_64()
        self._digests: list[bytes] = []

    def update(self, data: memoryview) -> None:
        self._whole.update(data)
        while data.nbytes:
            part = data[: self._left]
            self._hash.update(part)
            self._left -= part.nbytes
            data = data[part.nbytes :]
            if not self._left:
                self._close_block()

    def digests(self) -> bytes:
        """Returns the digests. Call it after the last piece."""
        if self._left < self._step:
            self._close_block()
        several = len(self._digests) > 1
        return b"".join((*self._digests, self._whole.digest()) if several else self._digests)

    def _close_block(self) -> None:
        self._digests.append(self._hash.digest())
        self._hash.reset()
        self._left = self._step


class TensorHashes:
    """The hashes of a tensor that is passed in pieces: CRC-32 and SHA-256 of header and data, and the data's digests.

    SHA-256 must not directly follow CRC-32: isal's CRC-32 leaves the upper halves of the vector registers in use, which
    slows SHA-256 down by a factor of 1.4 (0.79 s/GB instead of 0.56 on Zen 4). XXH3 clears them, so it runs in between.
    """

    def __init__(self, header: bytes, digester: Digester, *, sha256: bool = False) -> None:
        self.crc32 = crc32(header)
        self.sha256 = hashlib.sha256(header) if sha256 else None
        self._digester = digester

    def update(self, piece: memoryview, *, sha256: bool = True) -> None:
        """Hashes the next piece. Without ``sha256``, the caller computes SHA-256."""
        self.crc32 = crc32(piece, self.crc32)
        self._digester.update(piece)
        if sha256 and self.sha256 is not None:
            self.sha256.update(piece)

    def values(self) -> tuple[int, bytes]:
        """Returns CRC-32 and SHA-256, which is empty unless requested. Call it after the last piece."""
        return self.crc32, b"" if self.sha256 is None else self.sha256.digest()


def digests_of(data: bytes | memoryview) -> bytes:
    """Returns `StoredItem.digests` of data in one piece."""
    whole, block = xxhash.xxh3_64_digest(data), block_size(len(data))
    if len(data) <= block:
        return whole
    view = memoryview(data)
    blocks = [xxhash.xxh3_64_digest(view[start : start + block]) for start in range(0, len(view), block)]
    return b"".join((*blocks, whole))


class DigestCheck:
    """A check of blocks of an item against their digests, as in `check_digests`, for data in pieces.

    All pieces but the last consist of whole blocks, so that each block takes a single call: after each call, a thread
    may have to wait for the GIL.
    """

    def __init__(self, item: StoredItem, start: int, nbytes: int) -> None:
        self._block, self._digests = item.block, list[bytes]()
        self._whole = None
        self._expected = _digest_of_all(item) if nbytes == item.length else b""
        if self._expected:
            self._whole = xxhash.xxh3_64()
        else:
            first = start // item.block
            self._expected = item.digests[8 * first : 8 * (first + -(-nbytes // item.block))]

    def update(self, data: memoryview) -> None:
        if self._whole is not None:
            self._whole.update(data)
        else:
            step = self._block
            self._digests += [_digest(data[start : start + step]) for start in range(0, data.nbytes, step)]

    def matches(self) -> bool:
        """Returns whether all blocks match. Call it after the last piece."""
        found = b"".join(self._digests) if self._whole is None else self._whole.digest()
        return found == self._expected


def _digest(data: memoryview) -> bytes:
    if data.nbytes < _WORTH_UNLOCKING:
        return xxhash.xxh3_64_digest(data)
    state = xxhash.xxh3_64()
    state.update(data)  # releases the GIL in every version, so that other threads start their next reads
    return state.digest()


def all_match(items: Sequence[StoredItem], contents: Sequence[memoryview]) -> bool:
    """Returns whether all items match the digests of their whole data.

    Also returns False for parts of items, and for items without such a digest. One comparison of all digests takes a
    third of the time of a comparison for each item.
    """
    wholes = [item.digests if len(item.digests) == 8 else _digest_of_all(item) for item in items]
    if not all(wholes) or any(data.nbytes != item.length for item, data in zip(items, contents, strict=True)):
        return False
    return b"".join(map(_digest, contents)) == b"".join(wholes)


def check_digests(item: StoredItem, start: int, data: memoryview) -> None:
    """Checks blocks of an item. Raises `ChecksumMismatch`, which names the bytes of the first damaged block.

    ``data`` starts at byte ``start`` of the item, and consists of whole blocks. Only the item's last block may be
    shorter.
    """
    whole = item.digests if len(item.digests) == 8 else _digest_of_all(item)  # most items have one block
    if whole and data.nbytes == item.length and _digest(data) == whole:
        return
    step = item.block
    for number, begin in enumerate(range(0, data.nbytes, step), start // step):
        if _digest(data[begin : begin + step]) != item.digests[8 * number : 8 * number + 8]:
            raise ChecksumMismatch(f"bytes {number * step:,} to {min(number * step + step, item.length):,}")


def _digest_of_all(item: StoredItem) -> bytes:
    """Returns the digest of the whole item, which follows those of its blocks; empty bytes if there is none."""
    return item.digests[-(-item.length // item.block) * 8 :]
