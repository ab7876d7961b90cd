"""Local files written and read past the page cache hold what a plain file would."""

from __future__ import annotations

import errno
import io
import os
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_tensorizer import _direct_io
from dcp_tensorizer._direct_io import LocalFile, LocalSink, read_into

from .support import open_descriptors

MIB = 1 << 20
PATTERN = np.random.default_rng(0).integers(0, 256, 9 * MIB, dtype=np.uint8).tobytes()

shared_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@contextmanager
def small_limits() -> Iterator[None]:
    """Direct I/O from two blocks on, through a bounce buffer of four, so that small files meet every edge."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_direct_io, "_BOUNCE", 4 * 4096)
        patch.setattr(_direct_io, "_DIRECT_MIN", 2 * 4096)
        yield


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """The operating system refuses files larger than this, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def same_writes(path: Path, writes: list[tuple[int, int, int]], nbytes: int) -> None:
    """Carries out seeks (offset, whence) and writes of a number of bytes on a sink and on a BytesIO, and compares."""
    sink, reference = LocalSink(path, nbytes, sync=False), io.BytesIO()
    try:
        for number, (offset, whence, count) in enumerate(writes):
            data = memoryview(PATTERN)[number : number + count]
            base = {os.SEEK_SET: 0, os.SEEK_CUR: reference.tell(), os.SEEK_END: len(reference.getvalue())}[whence]
            moved = max(offset, -base)
            assert sink.seek(moved, whence) == reference.seek(moved, whence)
            assert sink.write(data) == reference.write(data) == count
            assert sink.tell() == reference.tell()
            assert sink.nbytes == len(reference.getvalue())
        assert sink.bytes_written == sum(count for _, _, count in writes)
        sink.close()
        assert path.read_bytes() == reference.getvalue()
    finally:
        sink.abort()
        path.unlink(missing_ok=True)


around_blocks = st.builds(lambda blocks, more: max(0, 4096 * blocks + more), st.integers(0, 12), st.integers(-2, 2))
whences = st.sampled_from([os.SEEK_SET, os.SEEK_SET, os.SEEK_CUR, os.SEEK_END])


def moves(sizes: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, int, int]]:
    forward = st.tuples(sizes, st.just(os.SEEK_SET), sizes)
    relative = st.tuples(sizes.flatmap(lambda n: st.sampled_from([n, -n])), whences.filter(bool), sizes)
    return forward | relative


@shared_folder
@given(writes=st.lists(moves(around_blocks), max_size=8), nbytes=around_blocks)
def test_any_seeks_and_writes_make_the_file_they_should(
    tmp_path: Path, writes: list[tuple[int, int, int]], nbytes: int
) -> None:
    """Aligned and unaligned, overlapping, past the end: the same bytes as in a BytesIO, whatever was preallocated."""
    with small_limits():
        same_writes(tmp_path / "file", writes, nbytes)


large_sizes = st.sampled_from([0, 1, 100, 4095, 4096, MIB - 1, MIB + 4096, MIB + 5000, 5 * MIB + 7])


@settings(shared_folder, max_examples=15)
@given(writes=st.lists(moves(large_sizes), min_size=1, max_size=4))
def test_large_writes_make_the_file_they_should(tmp_path: Path, writes: list[tuple[int, int, int]]) -> None:
    """The same with the real limits and writes above and below one MiB."""
    same_writes(tmp_path / "file", writes, 8 * MIB)


@pytest.mark.parametrize(
    "data",
    [b"", b"abc", bytearray(b"abc"), memoryview(b"abc"), np.arange(3.0), np.arange(6, dtype=np.int16).reshape(2, 3)],
    ids=["empty", "bytes", "bytearray", "memoryview", "floats", "matrix"],
)
def test_whatever_has_a_buffer_can_be_written(tmp_path: Path, data: Any) -> None:
    """Counts are in bytes, whatever the type of the elements."""
    sink = LocalSink(tmp_path / "file", 0, sync=True)
    assert sink.write(data) == memoryview(data).nbytes
    sink.close()
    assert (tmp_path / "file").read_bytes() == bytes(data)


def test_preallocated_space_that_is_not_used_is_cut_off(tmp_path: Path) -> None:
    """The file has the size of what was written; closing again does nothing."""
    sink = LocalSink(tmp_path / "file", 10 * MIB, sync=True)
    sink.write(b"abc")
    sink.close()
    sink.close()
    assert (tmp_path / "file").read_bytes() == b"abc"
    assert sink.write_seconds > 0
    assert sink.close_seconds > 0


def test_an_existing_file_is_not_touched(tmp_path: Path) -> None:
    """Data files have names of their own; meeting one means that something is wrong."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError):
        LocalSink(path, 0, sync=False)
    assert path.read_bytes() == b"old"


def test_abort_removes_the_file_and_its_descriptors(tmp_path: Path) -> None:
    """Nothing is left, a second abort does nothing, and writing on is an error that says so."""
    before = open_descriptors()
    sink = LocalSink(tmp_path / "file", 4 * MIB, sync=True)
    sink.write(PATTERN[: 2 * MIB])
    sink.abort()
    sink.abort()
    assert list(tmp_path.iterdir()) == []
    assert open_descriptors() == before
    with pytest.raises(OSError, match="given up") as caught:
        sink.write(b"more")
    assert caught.value.errno == errno.ECANCELED


def test_abort_after_close_keeps_the_file(tmp_path: Path) -> None:
    """A complete file is not removed by a late abort."""
    sink = LocalSink(tmp_path / "file", 0, sync=True)
    sink.write(b"abc")
    sink.close()
    sink.abort()
    assert (tmp_path / "file").read_bytes() == b"abc"


@pytest.mark.parametrize("sizes", [[1000] * 200, [64 * 1024 + 1] * 10, [4 * MIB]], ids=["small", "middle", "direct"])
def test_a_failed_write_fails_all_that_follow(tmp_path: Path, sizes: list[int]) -> None:
    """What is lost stays lost: later writes and the close raise the first error, and abort removes the file."""
    sink = LocalSink(tmp_path / "file", 0, sync=True)

    def write_all() -> None:
        for size in sizes:
            sink.write(PATTERN[:size])

    with file_size_limit(150_000), pytest.raises(OSError, match="File too large") as first:
        write_all()
    assert first.value.errno == errno.EFBIG
    sink.seek(0)
    for _ in range(2):
        with pytest.raises(OSError, match="File too large"):
            sink.write(b"x")
    sink.abort()
    assert list(tmp_path.iterdir()) == []


def test_closing_after_a_failed_write_fails_and_leaves_no_file(tmp_path: Path) -> None:
    """A file that lacks data must not look complete."""
    before = open_descriptors()
    sink = LocalSink(tmp_path / "file", 0, sync=True)
    with file_size_limit(1000), pytest.raises(OSError, match="File too large"):
        sink.write(PATTERN[:5000])
    with pytest.raises(OSError, match="File too large"):
        sink.close()
    sink.abort()
    assert open_descriptors() == before
    assert list(tmp_path.iterdir()) == []


def test_writing_nothing_past_the_end_does_not_lengthen_the_file(tmp_path: Path) -> None:
    """As with any file, only bytes count."""
    same_writes(tmp_path / "file", [(0, os.SEEK_SET, 10), (5000, os.SEEK_SET, 0)], 0)


def test_a_full_disk_is_known_before_the_work_begins(tmp_path: Path) -> None:
    """Preallocation fails, and nothing is left of the file."""
    before = open_descriptors()
    with file_size_limit(MIB), pytest.raises(OSError, match="File too large"):
        LocalSink(tmp_path / "file", 2 * MIB, sync=False)
    assert list(tmp_path.iterdir()) == []
    assert open_descriptors() == before


def test_abort_while_another_thread_writes(tmp_path: Path) -> None:
    """The writing thread gets an error, never another file's descriptor, and the file is gone."""
    sink = LocalSink(tmp_path / "file", 0, sync=False)
    started = threading.Event()

    def write() -> OSError:
        while True:
            try:
                sink.seek(0)
                sink.write(PATTERN[: 2 * MIB])
            except OSError as error:
                return error
            started.set()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        assert started.wait(10)
        sink.abort()
        assert writing.result(10).errno == errno.ECANCELED
    assert list(tmp_path.iterdir()) == []


def test_without_direct_io_the_file_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where O_DIRECT is not to be had, everything is buffered."""
    monkeypatch.delattr(os, "O_DIRECT")
    same_writes(tmp_path / "file", [(5, os.SEEK_SET, 3 * MIB), (0, os.SEEK_SET, 100)], 0)


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stored") / "file"
    path.write_bytes(PATTERN[: 100 * 4096 + 123])
    return path


def forget(path: Path) -> None:
    """Drops a file's pages from the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@settings(shared_folder)
@given(
    offset=st.integers(0, 101 * 4096),
    sizes=st.lists(st.integers(0, 3 * 4096) | around_blocks, max_size=12),
    cached=st.booleans(),
)
def test_any_range_is_read_into_any_buffers(stored: Path, offset: int, sizes: list[int], cached: bool) -> None:
    """Cold or cached, aligned or not; a range that ends past the file's end is an EOFError, never zeros."""
    content = stored.read_bytes()
    if not cached:
        forget(stored)
    buffers = [memoryview(bytearray(size)) for size in sizes]
    with small_limits():
        file = LocalFile(stored)
        try:
            if offset + sum(sizes) > len(content) and sum(sizes):
                with pytest.raises(EOFError, match="too early"):
                    file.read_into(buffers, offset)
            else:
                file.read_into(buffers, offset)
                assert b"".join(buffers) == content[offset : offset + sum(sizes)]
        finally:
            file.close()


def test_large_cold_reads_are_exact(tmp_path: Path) -> None:
    """With the real limits: several bounce buffers' worth, from an odd offset to the last byte."""
    path = tmp_path / "file"
    path.write_bytes(PATTERN)
    forget(path)
    buffer = bytearray(len(PATTERN) - 77)
    file = LocalFile(path)
    file.read_into([memoryview(buffer)[:1000], memoryview(buffer)[1000:]], 77)
    file.close()
    assert buffer == PATTERN[77:]


def test_more_buffers_than_one_preadv_takes(stored: Path) -> None:
    """2,500 buffers of 11 bytes, some of them empty, are filled in order."""
    content = stored.read_bytes()
    buffers = [memoryview(bytearray(11 if number % 7 else 0)) for number in range(2500)]
    wanted = sum(buffer.nbytes for buffer in buffers)
    descriptor = os.open(stored, os.O_RDONLY)
    try:
        read_into(descriptor, buffers, 5)
    finally:
        os.close(descriptor)
    assert b"".join(buffers) == content[5 : 5 + wanted]


def test_a_short_file_is_an_error_that_says_by_how_much(tmp_path: Path) -> None:
    """The message has the end of the file and the bytes that are missing."""
    (tmp_path / "file").write_bytes(b"x" * 1000)
    file = LocalFile(tmp_path / "file")
    with pytest.raises(EOFError, match=r"ends at byte 1,000, 500 bytes too early"):
        file.read_into([memoryview(bytearray(700)), memoryview(bytearray(700))], 100)
    file.close()


def test_several_threads_read_one_file(tmp_path: Path) -> None:
    """Each thread gets its own range, though they share descriptors."""
    path = tmp_path / "file"
    path.write_bytes(PATTERN)
    forget(path)
    file = LocalFile(path)

    def read(number: int) -> bool:
        start, count = number * 700_001, 600_000 + number
        buffer = bytearray(count)
        file.read_into([memoryview(buffer)], start)
        return buffer == PATTERN[start : start + count]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(read, range(12))) == [True] * 12
    file.close()


def test_closing_gives_the_descriptors_back(stored: Path) -> None:
    """A reader holds two descriptors at most, until it is closed."""
    before = open_descriptors()
    file = LocalFile(stored)
    assert len(open_descriptors()) <= len(before) + 2
    file.close()
    assert open_descriptors() == before
