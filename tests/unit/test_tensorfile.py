"""Every file is one that stock tensorizer opens, and its index and digests are right."""

from __future__ import annotations

import gc
import io
import re
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tensorizer import TensorDeserializer

from dcp_tensorizer import ChecksumMismatch, _layout, _tensorfile
from dcp_tensorizer._layout import block_size
from dcp_tensorizer._tensorfile import (
    IndexEntry,
    block_digests,
    check_blocks,
    encode,
    host_bytes,
    read_index,
    unsafe_globals,
)

from .support import ALL_DTYPES, BufferSink, dtype_name, filled, raw, same

Tensors = list[tuple[str, torch.Tensor]]


def encoded(tensors: Tensors, threads: int = 1) -> tuple[bytes, list[IndexEntry]]:
    """A whole file, and where it holds the tensors."""
    sink = BufferSink()
    index = encode(tensors, sink, threads)
    assert sink.content is not None
    return sink.content, index


def check_file(tensors: Tensors, folder: Path, threads: int = 1) -> None:
    """Encodes tensors, has stock tensorizer verify and read them, and compares our index with the bytes."""
    content, index = encoded(tensors, threads)
    for (_, tensor), entry in zip(tensors, index, strict=True):
        assert content[entry.offset : entry.offset + entry.length] == raw(tensor)
    path = folder / "file.tensors"
    path.write_bytes(content)
    with TensorDeserializer(path, device="cpu", verify_hash=True) as loaded:
        assert list(loaded.keys()) == [name for name, _ in tensors]
        assert [name for name, tensor in tensors if not same(loaded[name], tensor)] == []
        theirs = {entry.name[0]: (entry.data_offset, entry.data_length) for entry in loaded._metadata.values()}
    assert {name: tuple(entry) for (name, _), entry in zip(tensors, index, strict=True)} == theirs


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_stock_tensorizer_reads_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """Bit-exact, with tensorizer's own hashes verified: 0-dim, one element, several dimensions."""
    check_file(
        [("scalar", filled(dtype, ())), ("one", filled(dtype, (1,))), ("many", filled(dtype, (3, 4, 5)))], tmp_path
    )


NAMES = [
    "model.layers.0.self_attn.q_proj.weight",
    "nul\0inside",
    "a/b",
    "/absolute",
    "../up",
    "emoji \N{GRINNING FACE}",
    "n" * 1000,
    " ",
    "\n",
    ".",
    "0",
    "a\x1eb",
    "\x1f",
    "e\u0301",
    "\xe9",
    "__metadata__",
]


def test_stock_tensorizer_reads_odd_names(tmp_path: Path) -> None:
    """Whatever is stored under its own name comes back under it."""
    check_file([(name, torch.tensor([number])) for number, name in enumerate(NAMES)], tmp_path, threads=2)


def test_tied_and_overlapping_tensors_are_stored_each(tmp_path: Path) -> None:
    """Two names for one memory are two entries with the same bytes."""
    base = torch.arange(100.0)
    check_file([("a", base), ("b", base), ("tail", base[50:])], tmp_path)


def test_tensors_that_are_not_contiguous_are_stored_in_c_order(tmp_path: Path) -> None:
    """Strides, conjugation and negation are carried out; the tensors themselves are not changed."""
    base = torch.randn(6, 8, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    before = base.clone()
    tensors = [("t", base.t()), ("conj", base.conj()), ("imag", base.conj().imag), ("step", base[::2, 1::3])]
    check_file(tensors, tmp_path)
    assert same(base, before)


def test_single_elements_of_larger_tensors_are_stored(tmp_path: Path) -> None:
    """One element is contiguous whatever its strides are; its bytes are found all the same."""
    base = torch.arange(15.0).view(5, 3)
    check_file([("one", base[1:2, 1]), ("two", base[1:2, 1:2].t()), ("bf16", base.bfloat16()[3:4, 2])], tmp_path)
    assert bytes(host_bytes(base[1:2, 1])) == raw(torch.tensor(4.0))


def test_copies_are_made_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose tensors need copies is written in several goes, and is one file all the same."""
    monkeypatch.setattr(_tensorfile, "_BATCH_BYTES", 1000)
    tensors = [(f"{n}", filled(torch.float32, (10, 20), seed=n)) for n in range(12)]
    check_file([(name, tensor.t() if n % 3 else tensor) for n, (name, tensor) in enumerate(tensors)], tmp_path)


def test_a_file_without_tensors_is_a_file() -> None:
    """Nothing to write makes an empty index."""
    content, index = encoded([])
    assert index == []
    assert read_index(content) == {}


def test_encoding_closes_the_sink_once_complete() -> None:
    """The sink is closed, not aborted, and has counted every byte of the file."""
    sink = BufferSink()
    encode([("a", torch.arange(10))], sink, 1)
    assert sink.closed
    assert not sink.aborted
    assert sink.content is not None
    assert sink.nbytes == len(sink.content)


class FailingSink(BufferSink):
    """Takes a number of bytes, then fails."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def write(self, data: Any) -> int:
        if self.bytes_written >= self.limit:
            raise OSError(28, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("limit", [0, 100, 300_000, 2_000_000])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_failing_sink_fails_the_encoding_and_is_aborted(limit: int, threads: int) -> None:
    """The sink's own error comes out, no thread of tensorizer is left, and the file is never completed."""
    before = set(threading.enumerate())
    sink = FailingSink(limit)
    with pytest.raises(OSError, match="No space left on device") as caught:
        encode([(f"{n}", torch.zeros(100_000)) for n in range(10)], sink, threads)
    assert caught.value.errno == 28
    assert sink.aborted
    assert sink.content is None
    del caught  # its traceback holds the serializer, and that its threads
    for _ in range(100):
        left = [thread for thread in threading.enumerate() if thread not in before]
        if not left:
            break
        gc.collect()  # again once what still ran has ended
        left[0].join(0.1)
    assert set(threading.enumerate()) <= before


def test_the_index_needs_only_the_head_of_a_file() -> None:
    """The first 256 KiB and a few bytes are enough, in any order of names."""
    content, index = encoded([(f"layer.{n}", torch.full((n + 1,), n)) for n in range(50)])
    found = read_index(content[: 256 * 1024 + 100])
    assert [found[f"layer.{n}"] for n in range(50)] == index


@pytest.mark.parametrize("head", [b"", b"|TZR", b"|TZR|", b"PK\x03\x04" + bytes(300_000), bytes(300_000)])
def test_what_is_not_a_tensorizer_file_is_an_error(head: bytes) -> None:
    """Neither a short file nor another kind of file has an index."""
    with pytest.raises(ValueError, match="not a tensorizer file"):
        read_index(head)


# --- digests ---------------------------------------------------------------------------------------------------------


def test_digests_are_those_of_the_blocks() -> None:
    """8 bytes for each block, XXH3-64, big-endian, in order."""
    data = bytes(range(256)) * 1000
    step = block_size(len(data))
    expected = [xxhash.xxh3_64_intdigest(data[start : start + step]) for start in range(0, len(data), step)]
    assert [n for (n,) in struct.iter_unpack(">Q", block_digests(memoryview(data)))] == expected
    assert block_digests(memoryview(b"")) == b""


@given(st.binary(min_size=1, max_size=200), st.data())
def test_every_flipped_bit_is_found_in_its_block(content: bytes, data: st.DataObject) -> None:
    """The first damaged block is named by its bytes in the tensor, also when only some blocks are checked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_layout, "_MIN_BLOCK", 16)
        step = block_size(len(content))
        digests = block_digests(memoryview(content))
        first = data.draw(st.integers(0, (len(content) - 1) // step))
        check_blocks(memoryview(content)[first * step :], first, step, digests)
        bit = data.draw(st.integers(8 * first * step, 8 * len(content) - 1))
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        start = bit // 8 // step * step
        with pytest.raises(ChecksumMismatch, match=rf"^bytes {start:,} to {start + step:,}$"):
            check_blocks(memoryview(damaged)[first * step :], first, step, digests)


def test_every_bit_of_a_small_tensor_counts() -> None:
    """All 8 * 300 single-bit errors are found."""
    content = bytearray(filled(torch.uint8, (300,)).numpy().tobytes())
    digests = block_digests(memoryview(content))
    for bit in range(8 * len(content)):
        content[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ChecksumMismatch):
            check_blocks(memoryview(content), 0, block_size(len(content)), digests)
        content[bit // 8] ^= 1 << bit % 8


def test_missing_digests_are_a_mismatch() -> None:
    """Metadata with fewer digests than blocks verifies nothing."""
    with pytest.raises(ChecksumMismatch):
        check_blocks(memoryview(b"abc"), 0, 64, b"")


# --- objects and bytes -----------------------------------------------------------------------------------------------


class Foreign:
    pass


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None, "x"]}, torch.ones(3), (True, b"b"), 3 + 4j], ids=repr)
def test_plain_objects_need_nothing(value: object) -> None:
    """What the weights-only loader takes has no unsafe globals."""
    assert unsafe_globals(saved(value)) == ()


def test_what_an_object_needs_is_named() -> None:
    """Each global once, with its module."""
    content = saved([Foreign(), Foreign(), re.compile("x")])
    assert unsafe_globals(content) == ("re._compile", f"{__name__}.Foreign")


@pytest.mark.parametrize("content", [b"", b"garbage", saved([1])[:-30]], ids=["empty", "garbage", "truncated"])
def test_an_object_that_cannot_be_parsed_is_not_trusted(content: bytes) -> None:
    """Not being able to tell is no permission."""
    assert unsafe_globals(content) == ("an object that the weights-only loader cannot parse",)


def test_host_bytes_of_a_contiguous_tensor_are_its_memory() -> None:
    """No copy is made: what is written to the bytes shows in the tensor."""
    tensor = torch.zeros(2, 3, dtype=torch.int16)
    data = host_bytes(tensor)
    assert (data.nbytes, data.itemsize) == (12, 1)
    data[0] = 7
    assert tensor[0, 0] == 7


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_host_bytes_are_in_c_order(dtype: torch.dtype) -> None:
    """For every dtype, of 0-dim, transposed and empty tensors."""
    tensor = filled(dtype, (3, 4))
    assert bytes(host_bytes(tensor)) == raw(tensor)
    assert bytes(host_bytes(tensor[1, 2])) == raw(tensor[1, 2])
    assert bytes(host_bytes(tensor[:0])) == b""
    if dtype.itemsize > 1 or dtype in (torch.uint8, torch.bool, torch.float8_e4m3fn):
        assert bytes(host_bytes(tensor.t())) == raw(tensor.t())
