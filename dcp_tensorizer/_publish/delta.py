"""The delta of a tensor: the XOR of its bytes with those of the previous version, compressed with zstd.

After a training step most bytes of a weight are unchanged, so most bytes of the XOR are 0. XOR needs no dtype, and is
exact: applied to the previous version, it gives the new one. Applied twice, it gives the previous one again. So a file
is never updated in place: after a crash, applying the delta again would undo what was already changed.

This module does no I/O and does not import torch, because the writer process uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import xxhash

from ..errors import CheckpointError

LEVEL = 1
"""The level of zstd. Higher levels take several times as long and save little: the changed bits are mostly random."""

PIECE = 1 << 20
"""Bytes that are compared, hashed and compressed in one step: they fit into the L2 cache."""

_FRAME_OVERHEAD = 1 << 10
_EXPANSION = 128  # 1 byte more per 128: enough, as zstd adds 3 bytes to each block of 128 KiB that it cannot compress


def zstd() -> Any:
    """Returns the zstd module: that of the standard library from Python 3.14 on, its backport in earlier releases.

    Raises `CheckpointError` if the module cannot be imported.
    """
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd as module
        else:
            from backports import zstd as module
    except ImportError as error:
        raise CheckpointError(
            f"cannot import zstd, which deltas need ({error}). Before Python 3.14, run pip install "
            f"'dcp_tensorizer[publish]'. From 3.14 on, use a build of Python with zstd."
        ) from None
    return module


def digest_of(data: bytes | memoryview) -> str:
    """Returns the digest of a tensor's bytes: XXH3-128, in hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


class DeltaEncoder:
    """An encoder of the delta of one tensor, which takes pieces of any size."""

    def __init__(self) -> None:
        self._compressor = zstd().ZstdCompressor(level=LEVEL)
        self._hash = xxhash.xxh3_128()
        self._frame: list[bytes] = []
        self._is_changed = False

    def update(self, new: np.ndarray, old: np.ndarray) -> None:
        """Takes the next bytes of both versions, as arrays of ``uint8`` of equal size."""
        self._hash.update(new.data)
        difference = np.bitwise_xor(new, old)
        self._is_changed = self._is_changed or bool(difference.any())
        if compressed := self._compressor.compress(difference):
            self._frame.append(compressed)

    def finish(self) -> tuple[bytes, str] | None:
        """Returns the delta, one frame of zstd, and the digest of the new bytes; None if the bytes are unchanged."""
        if not self._is_changed:
            return None
        self._frame.append(self._compressor.flush())
        return b"".join(self._frame), self._hash.hexdigest()


class DeltaDecoder:
    """A decoder that applies a delta, one frame of zstd, to a tensor of ``nbytes`` bytes, piece by piece.

    It decompresses only as many bytes as requested, whatever the size in the frame's header.
    """

    def __init__(self, frame: Iterable[bytes | memoryview], nbytes: int) -> None:
        self._input = iter(frame)
        self._left = nbytes
        self._module = zstd()
        # By default, zstd refuses windows of more than 128 MiB, so its memory is limited.
        self._decompressor = self._module.ZstdDecompressor()

    def xor_into(self, data: np.ndarray) -> None:
        """Changes the next bytes of the tensor, an array of ``uint8``.

        Raises `ValueError` if the delta is damaged, or belongs to a tensor of another size.
        """
        position = 0
        while position < data.size:
            piece = self._next(data.size - position)
            if not piece:
                raise ValueError(f"its delta ends {self._left:,} bytes before the end of the tensor")
            target = data[position : position + len(piece)]
            np.bitwise_xor(target, np.frombuffer(piece, dtype=np.uint8), out=target)
            position += len(piece)
            self._left -= len(piece)
        if not self._left:
            if self._next(1):
                raise ValueError("its delta has more bytes than the tensor")
            if not self._decompressor.eof:
                raise ValueError("the end of its delta is missing")
            if self._decompressor.unused_data or next(self._input, b""):
                raise ValueError("other bytes follow its delta")

    def _next(self, most: int) -> bytes:
        """Returns between 1 and ``most`` bytes, or no bytes at the end."""
        try:
            while not self._decompressor.eof:
                is_read = self._decompressor.needs_input  # `decompress` may use its input up, and return no bytes
                data = next(self._input, b"") if is_read else b""
                if piece := self._decompressor.decompress(data, max_length=most):
                    return bytes(piece)
                if is_read and not data:
                    break
        except self._module.ZstdError as error:
            raise ValueError(f"its delta is not zstd data, or is damaged: {error}") from None
        return b""


def largest_delta(nbytes: int) -> int:
    return nbytes + nbytes // _EXPANSION + _FRAME_OVERHEAD


def pieces_of(data: memoryview) -> Iterator[np.ndarray]:
    array = np.frombuffer(data, dtype=np.uint8)
    for start in range(0, array.size, PIECE):
        yield array[start : start + PIECE]
