"""Tests that each file equals that of stock tensorizer, with valid digests."""

from __future__ import annotations

import io
import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer.serialization import HashMismatchError

from dcp_tensorizer._tensor_file import encode as encoder
from dcp_tensorizer._tensor_file.dtypes import host_bytes
from dcp_tensorizer._tensor_file.encode import FileParts, PartMemory, _Encoding, encode, encode_ahead
from dcp_tensorizer._tensor_file.layout import ALIGNMENT, lay_out
from dcp_tensorizer._tensor_file.names import StoredItem
from dcp_tensorizer._writer_process.protocol import TensorSource

from ...lab.seams import BufferSink, block_digests, sources
from ...lab.states import ALL_DTYPES, dtype_name, filled, raw, same

Tensors = list[tuple[str, torch.Tensor]]


def bytes_of(tensors: Tensors) -> Callable[[TensorSource], memoryview]:
    """Returns the bytes of a tensor for `encode`."""
    by_name = dict(tensors)
    return lambda source: host_bytes(by_name[source.name])


def encoded(
    tensors: Tensors,
    threads: int = 1,
    sink: BufferSink | None = None,
    *,
    alignment: int = 1,
    sha256: bool = True,
    **options: Any,
) -> bytes:
    """Returns a whole file, after checking its items. Not aligned and with SHA-256, as stock tensorizer writes it."""
    sink = sink or BufferSink(1 << 20)
    layout = lay_out(sources(tensors), alignment=alignment, sha256=sha256)
    items = encode(layout, bytes_of(tensors), sink, threads, file="f", **options)
    assert (sink.closed, sink.aborted) == (True, False)
    content = sink.content
    assert sink.bytes_written == len(content) == layout.nbytes
    assert len(items) == len(tensors)
    for (name, tensor), item in zip(tensors, items, strict=True):
        place = "f", name, item.offset, tensor.nbytes
        assert item == StoredItem(*place, dtype_name(tensor.dtype), "tensor", block_digests(tensor))
        assert content[item.offset : item.offset + item.length] == raw(tensor)
        assert item.offset % alignment == 0
    return content


class Kept(io.BytesIO):
    """A stream that keeps its contents when tensorizer closes it."""

    content = b""

    def close(self) -> None:
        if not self.closed:
            self.content = self.getvalue()
        super().close()


def stock(tensors: Tensors) -> bytes:
    """Returns the file that tensorizer itself makes."""
    file = Kept()
    serializer = TensorSerializer(file)
    for name, tensor in tensors:  # one at a time, so that names that it would nest stay as they are
        plain = torch.frombuffer(bytearray(raw(tensor)), dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
        serializer.write_state_dict({name: plain})
    serializer.close()
    return file.content


def check_file(tensors: Tensors, folder: Path, threads: int = 1) -> None:
    """Compares a file with stock tensorizer's, which also verifies and reads the file with aligned data."""
    assert encoded(tensors, threads) == stock(tensors)
    path = folder / "file.tensors"
    path.write_bytes(encoded(tensors, threads, alignment=ALIGNMENT))
    with TensorDeserializer(path, device="cpu", verify_hash=True) as loaded:
        assert list(loaded.keys()) == [name for name, _ in tensors]
        assert [name for name, tensor in tensors if not same(loaded[name], tensor)] == []


def test_tensors_that_are_hashed_at_once_are_as_those_in_pieces(tmp_path: Path) -> None:
    """Sizes around a block and around the limit for hashing in pieces give equal files."""
    sizes = [1, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, (512 << 10) - 1, 512 << 10, (512 << 10) + 1]
    tensors = [(f"{size}", filled(torch.uint8, (size,), seed=size)) for size in sizes]
    path = tmp_path / "file"
    path.write_bytes(encoded(tensors, sha256=False))
    assert encoded(tensors, threads=3, sha256=False) == path.read_bytes()
    with TensorDeserializer(path, device="cpu", verify_hash=True) as loaded:
        assert [name for name, tensor in tensors if not same(loaded[name], tensor)] == []


def test_small_tensors_are_encoded_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads would wait for the GIL; each larger tensor may have a thread."""
    began: list[int] = []
    work = _Encoding._work

    def counted(encoding: Any, numbers: Any) -> None:
        began[-1] += 1
        work(encoding, numbers)

    monkeypatch.setattr(_Encoding, "_work", counted)
    small = [(f"small {n}", filled(torch.uint8, (1000,))) for n in range(5)]
    large = [(f"large {n}", filled(torch.uint8, (513 << 10,))) for n in range(5)]
    for tensors in (small, small + large[:1], small + large):
        began.append(0)
        encoded(tensors, threads=4, sha256=False)
    assert began == [1, 2, 4]


@pytest.mark.parametrize("sha256", [False, True])
def test_stock_tensorizer_finds_a_flipped_bit(tmp_path: Path, sha256: bool) -> None:
    """Both CRC-32 and SHA-256 find it, in the header and in the data."""
    path = tmp_path / "file"
    tensors = [("a", filled(torch.bfloat16, (7, 5))), ("b", filled(torch.float32, (3,)))]
    content = encoded(tensors, sha256=sha256)
    path.write_bytes(content)
    with TensorDeserializer(path, device="cpu", verify_hash=True) as loaded:
        assert all(same(loaded[name], tensor) for name, tensor in tensors)
    places = lay_out(sources(tensors), alignment=1, sha256=sha256).entries
    assert (content.count(b"\x01\x20"), places[0].has_sha256) == ((2, True) if sha256 else (0, False))
    for position in (places[0].header_offset + places[0].hashes_offset + 5, places[1].offset + 2):
        damaged = bytearray(content)
        damaged[position] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(HashMismatchError), TensorDeserializer(path, device="cpu", verify_hash=True) as loaded:
            dict(loaded.items())


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_stock_tensorizer_reads_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """tensorizer verifies its hashes; tensors are 0-dim, of one element, and of several dimensions."""
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
    """Tensors are read under the names under which they were stored."""
    check_file([(name, torch.tensor([number])) for number, name in enumerate(NAMES)], tmp_path, threads=2)


def test_tied_and_overlapping_tensors_are_stored_each(tmp_path: Path) -> None:
    """Two names of one memory are two entries with equal bytes."""
    base = torch.arange(100.0)
    check_file([("a", base), ("b", base), ("tail", base[50:])], tmp_path)


def test_tensors_that_are_not_contiguous_are_stored_in_c_order(tmp_path: Path) -> None:
    """Strides, conjugation and negation are resolved in a copy, and the tensors do not change."""
    base = torch.randn(6, 8, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    before = base.clone()
    tensors = [("t", base.t()), ("conj", base.conj()), ("imag", base.conj().imag), ("step", base[::2, 1::3])]
    check_file(tensors, tmp_path)
    assert same(base, before)


def test_single_elements_of_larger_tensors_are_stored(tmp_path: Path) -> None:
    """A tensor of one element is contiguous whatever its strides are."""
    base = torch.arange(15.0).view(5, 3)
    check_file([("one", base[1:2, 1]), ("two", base[1:2, 1:2].t()), ("bf16", base.bfloat16()[3:4, 2])], tmp_path)


def test_a_file_without_tensors_is_a_file() -> None:
    """The file has an empty index."""
    assert encoded([]) == stock([])


shapes = st.lists(st.integers(1, 40), max_size=3).map(tuple)


@settings(max_examples=60)
@given(
    tensors=st.lists(st.tuples(st.sampled_from(ALL_DTYPES), shapes), max_size=12),
    threads=st.integers(1, 5),
    part_bytes=st.sampled_from([4096, 8192, 1 << 16, 1 << 20]),
    piece=st.sampled_from([7, 64, 4096, 1 << 19]),
    in_order=st.booleans(),
)
def test_threads_parts_and_pieces_change_nothing(
    tensors: list[tuple[torch.dtype, tuple[int, ...]]], threads: int, part_bytes: int, piece: int, in_order: bool
) -> None:
    """The file does not depend on the number of threads, the sizes of parts and pieces, or the order of parts."""
    named = [(f"t{n}", filled(dtype, shape, seed=n)) for n, (dtype, shape) in enumerate(tensors)]
    assert encoded(named, threads, BufferSink(part_bytes, in_order=in_order), piece_bytes=piece) == stock(named)


def test_a_large_tensor_is_hashed_by_two_threads() -> None:
    """SHA-256 runs in another thread if there are fewer tensors than threads."""
    large = [("large", filled(torch.float32, (1 << 20,)))]
    assert encoded(large, 1) == encoded(large, 2) == encoded(large, 4) == stock(large)
    assert encoded(large, 2, BufferSink(1 << 20, in_order=True)) == stock(large)


class FailingSink(BufferSink):
    """A sink that takes a number of bytes, then fails."""

    def __init__(self, limit: int, *, in_order: bool) -> None:
        super().__init__(1 << 16, in_order=in_order)
        self.limit = limit

    def put_part(self, number: int, data: memoryview) -> None:
        if self.bytes_written >= self.limit:
            raise OSError(28, "No space left on device")
        super().put_part(number, data)


@pytest.mark.parametrize("limit", [0, 100, 300_000, 2_000_000])
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("in_order", [False, True])
def test_a_failing_sink_fails_the_encoding_and_is_aborted(limit: int, threads: int, in_order: bool) -> None:
    """The sink's error is raised, no thread is left, and the file is never completed."""
    before = set(threading.enumerate())
    sink = FailingSink(limit, in_order=in_order)
    tensors = [(f"{n}", torch.zeros(100_000)) for n in range(10)]
    with pytest.raises(OSError, match="No space left on device") as caught:
        encode(lay_out(sources(tensors)), bytes_of(tensors), sink, threads)
    assert caught.value.errno == 28
    assert (sink.closed, sink.aborted) == (False, True)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("in_order", [False, True])
def test_a_tensor_that_cannot_be_had_fails_the_encoding(threads: int, in_order: bool) -> None:
    """The error is raised, also while other threads wait for memory."""
    sink = BufferSink(4096, in_order=in_order)
    tensors = [(f"{n}", torch.zeros(10_000)) for n in range(20)]
    described = sources(tensors)

    del tensors[7:8]
    with pytest.raises(KeyError, match="7"):
        encode(lay_out(described), bytes_of(tensors), sink, threads)
    assert (sink.closed, sink.aborted) == (False, True)


class AddressSink(BufferSink):
    """A sink that records the addresses of parts, and holds the parts, so that no address is reused."""

    def __init__(self, part_bytes: int, *, in_order: bool = False) -> None:
        super().__init__(part_bytes, in_order=in_order)
        self.addresses: set[int] = set()

    def put_part(self, number: int, data: memoryview) -> None:
        super().put_part(number, data)
        self.addresses.add(np.frombuffer(data, dtype=np.uint8).ctypes.data)


@pytest.mark.parametrize("in_order", [False, True])
def test_the_memory_for_parts_is_bounded(in_order: bool) -> None:
    """The bound holds for slow sinks and for many parts."""
    sink = AddressSink(4096, in_order=in_order)
    tensors = [(f"{n}", filled(torch.uint8, (n * 997 % 50_000 + 1,))) for n in range(200)]
    assert encoded(tensors, 3, sink) == stock(tensors)
    assert 1 <= len(sink.addresses) <= 3 * 3 + BufferSink.concurrency + 2
    assert {address % mmap.PAGESIZE for address in sink.addresses} == {0}


@pytest.mark.parametrize(("parts", "most"), [(1, 1), (9, 4), (1000, 32)])
def test_parts_in_flight_are_as_many_as_the_memory_allows(parts: int, most: int) -> None:
    """Little memory allows few writes at once, but at least one; much allows as many as the sink does."""

    class Counting(BufferSink):
        concurrency = 32
        in_threads = deepest = 0

        def put_part(self, number: int, data: memoryview) -> None:
            with lock:
                self.in_threads += 1
                self.deepest = max(self.deepest, self.in_threads)
            super().put_part(number, data)
            with lock:
                self.in_threads -= 1

    lock = threading.Lock()
    sink = Counting(4096)
    tensor = filled(torch.uint8, (1 << 20,))
    assert encoded([("t", tensor)], 1, sink, buffer_bytes=parts * 4096) == stock([("t", tensor)])
    assert 1 <= sink.deepest <= most


@pytest.mark.parametrize(("threads", "parts"), [(1, 6), (4, 7), (16, 32), (16, 60)])
def test_no_more_parts_are_made_than_fit(threads: int, parts: int) -> None:
    """With little memory fewer threads hash; the minimum is six parts."""
    tensors = [(f"{n}", filled(torch.uint8, (40_000,))) for n in range(100)]
    sink = AddressSink(4096)
    assert encoded(tensors, threads, sink, buffer_bytes=parts * 4096) == stock(tensors)
    assert 1 <= len(sink.addresses) <= parts


def test_nothing_more_is_sent_when_a_part_has_failed() -> None:
    """Queued parts are dropped, because each could take minutes to fail."""

    class Failing(BufferSink):
        concurrency = 1
        puts = 0

        def put_part(self, number: int, data: memoryview) -> None:
            self.puts += 1
            raise OSError("no")

    sink = Failing(4096)
    tensor = filled(torch.uint8, (1 << 20,))
    with pytest.raises(OSError, match="no"):
        encode(lay_out(sources([("t", tensor)])), bytes_of([("t", tensor)]), sink, threads=2)
    assert (sink.puts, sink.aborted) == (1, True)


@pytest.mark.parametrize("part_bytes", [1 << 12, 1 << 16])
def test_the_next_file_is_written_while_the_last_parts_of_one_are_on_their_way(part_bytes: int) -> None:
    """Files with parts of different sizes share the memory of one file."""
    tensors = [(f"{n}", filled(torch.uint8, (20_000,))) for n in range(10)]
    layout, memory, may_put = lay_out(sources(tensors)), PartMemory(), threading.Event()
    last = layout.nbytes // 4096

    class Waiting(AddressSink):
        def put_part(self, number: int, data: memoryview) -> None:
            assert number < last - 1 or may_put.wait(60)
            super().put_part(number, data)

    first, second = Waiting(4096), AddressSink(part_bytes)
    _, ahead = encode_ahead(layout, bytes_of(tensors), first, 2, memory=memory)
    encode_ahead(layout, bytes_of(tensors), second, 2, memory=memory)[1].finish()
    assert not {last - 1, last} & first.parts.keys()
    may_put.set()
    ahead.finish()
    assert first.content == second.content
    most = 3 * 2 + BufferSink.concurrency + 2
    assert len(first.addresses | second.addresses) <= (most if part_bytes == 4096 else 2 * most)


def test_memory_that_fewer_parts_need_is_dropped() -> None:
    """Free parts are freed at once, and others when they are released."""
    memory = PartMemory()
    memory.allow(4096, 5)
    first = [memory.take() for _ in range(5)]
    assert memory.take() is None
    for buffer in first[:3]:
        memory.release(buffer)
    memory.allow(4096, 3)
    assert memory.take() is not None  # two are still in use
    assert memory.take() is None
    memory.clear()
    assert memory.take() is None


def test_memory_that_there_is_not_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed allocation, the next file has as much memory as before."""
    memory = PartMemory()
    memory.allow(4096, 1)
    with monkeypatch.context() as patch:
        patch.setattr(encoder, "direct_memory", raising(OSError("no memory")))
        with pytest.raises(OSError, match="no memory"):
            memory.take()
    assert memory.take() is not None
    assert memory.take() is None


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*args: Any) -> Any:
        raise error

    return fail


def test_some_memory_is_kept_for_the_next_file() -> None:
    """Whole parts up to the bound are retained; parts of another size are freed."""
    memory = PartMemory(kept_bytes=3 * 4096 + 100)
    memory.allow(4096, 5)
    taken = [buffer for _ in range(5) if (buffer := memory.take()) is not None]
    for buffer in taken:
        memory.release(buffer)
    memory.clear()
    kept = {buffer.ctypes.data for _ in range(3) if (buffer := memory.take()) is not None}
    assert len(kept) == 3
    assert kept <= {buffer.ctypes.data for buffer in taken}
    assert memory.take() is None
    memory.allow(8192, 1)
    assert (memory.take(), len(memory._free)) == (None, 0)  # three of the other size are still in use


def test_threads_that_write_parts_end_with_the_last_part() -> None:
    """The threads end before `finish`, because many files may wait for it."""
    tensors = [("t", filled(torch.uint8, (100_000,)))]
    threads: set[threading.Thread] = set()

    class Noting(BufferSink):
        def put_part(self, number: int, data: memoryview) -> None:
            threads.add(threading.current_thread())
            super().put_part(number, data)

    _, ahead = encode_ahead(lay_out(sources(tensors)), bytes_of(tensors), Noting(4096), 1)
    for thread in [*threads]:
        thread.join(60)
    assert [thread.is_alive() for thread in threads] == [False] * len(threads)
    ahead.finish()


def test_a_file_that_is_given_up_gets_no_more_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C, running writes end before the sink is aborted."""
    is_putting, may_put, seen = threading.Event(), threading.Event(), []

    class Slow(BufferSink):
        def put_part(self, number: int, data: memoryview) -> None:
            is_putting.set()
            assert may_put.wait(60)
            seen.append(self.aborted)

    def interrupt(parts: FileParts) -> None:
        assert is_putting.wait(60)
        threading.Timer(0, may_put.set).start()
        raise KeyboardInterrupt

    sink, tensors = Slow(1 << 20), [("t", filled(torch.uint8, (3000,)))]
    monkeypatch.setattr(FileParts, "finish", interrupt)
    with pytest.raises(KeyboardInterrupt):
        encode(lay_out(sources(tensors)), bytes_of(tensors), sink, 1)
    assert (seen, sink.aborted) == ([False], True)


@pytest.mark.parametrize("part_bytes", [1 << 12, 1 << 16])
def test_a_file_that_fails_leaves_its_memory_to_the_next(part_bytes: int) -> None:
    """The next file gets the memory, also for parts of another size."""
    memory = PartMemory()
    tensors = [(f"{n}", filled(torch.uint8, (20_000,))) for n in range(10)]
    layout = lay_out(sources(tensors))
    for limit in (0, 100_000, 150_000):
        failing = FailingSink(limit, in_order=False)
        with pytest.raises(OSError, match="No space left"):
            encode_ahead(layout, bytes_of(tensors), failing, 2, memory=memory)[1].finish()
    sink = BufferSink(part_bytes)
    encode_ahead(layout, bytes_of(tensors), sink, 2, memory=memory)[1].finish()
    expected = BufferSink(part_bytes)
    encode(layout, bytes_of(tensors), expected, 1)
    assert sink.content == expected.content
