"""Tests of the deltas of tensors: they are exact, and never decode to more bytes than the tensor has."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from dcp_tensorizer._publish.delta import PIECE, DeltaDecoder, DeltaEncoder, digest_of, largest_delta, pieces_of, zstd

SIZES = [1, 7, PIECE - 1, PIECE, 2 * PIECE + 5]


def delta_of(new: np.ndarray, old: np.ndarray) -> tuple[bytes, str] | None:
    """Returns the delta of a tensor in memory, encoded in the pieces in which files are read."""
    encoder = DeltaEncoder()
    for piece, before in zip(pieces_of(new.data), pieces_of(old.data), strict=True):
        encoder.update(piece, before)
    return encoder.finish()


def pieces(frame: bytes, size: int = 1000) -> list[bytes]:
    """Cuts a frame into pieces, as when a file is read."""
    return [frame[start : start + size] for start in range(0, len(frame), size)]


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_delta_gives_the_new_bytes(nbytes: int) -> None:
    """A delta applied to the old bytes, in pieces of any size, gives the new bytes; its digest is theirs."""
    random = np.random.default_rng(nbytes)
    old = random.integers(0, 256, nbytes, dtype=np.uint8)
    new = old.copy()
    new[random.integers(0, nbytes, 1 + nbytes // 40)] ^= 3
    made = delta_of(new, old)
    if made is None:
        assert (new == old).all()
        return
    frame, digest = made
    assert digest == digest_of(new.data)
    assert len(frame) <= largest_delta(nbytes)
    result = old.copy()
    decoder = DeltaDecoder(pieces(frame), nbytes)
    for start in range(0, nbytes, 99_991):
        decoder.xor_into(result[start : start + 99_991])
    assert (result == new).all()


@pytest.mark.parametrize("size", [1, 4099, 128 << 10, PIECE, 4 * PIECE], ids=lambda size: f"pieces of {size}")
def test_a_long_delta_is_read_in_pieces_of_any_size(size: int) -> None:
    """A delta gives the new bytes, whatever the pieces in which it is read, and in which it is applied."""
    random = np.random.default_rng(size)
    nbytes = 16 * PIECE if size > 1 else PIECE // 8
    old = random.integers(0, 256, nbytes, dtype=np.uint8)
    new = old.copy()
    new[::2] ^= random.random(nbytes // 2) < 0.18
    new[: nbytes // 3] = random.integers(0, 256, nbytes // 3, dtype=np.uint8)
    made = delta_of(new, old)
    assert made is not None
    for step in (99_991, PIECE, nbytes):
        result = old.copy()
        decoder = DeltaDecoder(pieces(made[0], size), nbytes)
        for start in range(0, nbytes, step):
            decoder.xor_into(result[start : start + step])
        assert digest_of(result.data) == made[1]


def test_random_bytes_fit_into_the_longest_delta() -> None:
    """Incompressible data grows by less than the bound of readers."""
    data = np.random.default_rng(0).integers(0, 256, 3 * PIECE, dtype=np.uint8)
    made = delta_of(data, np.zeros_like(data))
    assert made is not None
    assert data.size < len(made[0]) <= largest_delta(data.size)


def test_the_same_bytes_have_no_delta() -> None:
    """An unchanged tensor has no delta."""
    same = np.frombuffer(b"abc" * 1000, dtype=np.uint8)
    assert delta_of(same, same) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda frame: frame[:-1], "end of its delta is missing|ends .* bytes before the end"),
        (lambda frame: frame[: len(frame) // 2], "bytes before the end of the tensor"),
        (lambda frame: b"no zstd at all" + frame, "not zstd data, or is damaged"),
        (lambda frame: frame + b"\0" * 10, "other bytes follow"),
        (lambda frame: frame + zstd().compress(b"more"), "other bytes follow"),
        (lambda frame: zstd().compress(b"\0" * 5001, level=1), "has more bytes than the tensor"),
        (lambda frame: zstd().compress(b"\0" * 4999, level=1), "ends 1 bytes before the end"),
        (lambda frame: b"", "ends 5,000 bytes before the end"),
    ],
    ids=["last byte", "half", "garbage", "zeros behind", "frame behind", "longer", "shorter", "nothing"],
)
def test_a_damaged_delta_is_an_error(change: object, message: str) -> None:
    """A delta that is cut, extended or changed is an error."""
    old = np.random.default_rng(1).integers(0, 256, 5000, dtype=np.uint8)
    made = delta_of(old ^ 1, old)
    assert made is not None
    frame = change(made[0])  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        DeltaDecoder(pieces(frame), old.size).xor_into(old)


def test_a_bomb_takes_no_memory() -> None:
    """A frame of a gigabyte of zeros for a tensor of 1,000 bytes is not decompressed beyond these bytes."""
    compressor = zstd().ZstdCompressor(level=1)
    zeros = bytes(1 << 24)
    bomb = b"".join(compressor.compress(zeros) for _ in range(64)) + compressor.flush()
    assert len(bomb) < 200_000
    target = np.zeros(1000, dtype=np.uint8)
    tracemalloc.start()
    with pytest.raises(ValueError, match="has more bytes than the tensor"):
        DeltaDecoder(pieces(bomb, PIECE), target.size).xor_into(target)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
