"""Local files are read correctly, through the page cache and past it."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_tensorizer._runtime.direct_memory import direct_memory
from dcp_tensorizer._storage import local_io
from dcp_tensorizer._storage.local_io import LocalFile, read_into

from ...lab.processes import forget, open_descriptors
from ...lab.seams import cached

MIB = 1 << 20
PATTERN = np.random.default_rng(0).integers(0, 256, 9 * MIB, dtype=np.uint8).tobytes()

shared_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stored") / "file"
    path.write_bytes(PATTERN[: 100 * 4096 + 123])
    return path


@settings(shared_folder)
@given(
    offset=st.integers(0, 101 * 4096),
    sizes=st.lists(st.integers(0, 3 * 4096), max_size=12),
    cached=st.booleans(),
)
def test_any_range_is_read_into_any_buffers(stored: Path, offset: int, sizes: list[int], cached: bool) -> None:
    """A range is read correctly whether it is cached or not and aligned or not. Past the end it raises EOFError."""
    content = stored.read_bytes()
    if not cached:
        forget(stored)
    buffers = [memoryview(bytearray(size)) for size in sizes]
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


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "file"
    path.write_bytes(PATTERN)
    return path


@settings(shared_folder, max_examples=40)
@given(
    offset=st.one_of(st.integers(0, 4 * MIB), st.sampled_from([0, 4095, 4096, 4097])),
    cuts=st.lists(st.integers(0, 5 * MIB - 77), max_size=5),
)
def test_a_cold_range_is_read_past_the_page_cache(large: Path, offset: int, cuts: list[int]) -> None:
    """A range of any alignment is read in parts of any size, and the page cache stays empty."""
    forget(large)
    file = LocalFile(large)
    nbytes = 5 * MIB - 77
    source = file.once(offset, nbytes)
    assert source is not file
    content = bytearray(nbytes)
    edges = [0, *sorted(cuts), nbytes]
    for start, stop in itertools.pairwise(edges):
        middle = (start + stop) // 2
        source.read_into([memoryview(content)[start:middle], memoryview(content)[middle:stop]], offset + start)
    file.close()
    assert content == PATTERN[offset : offset + nbytes]
    assert not cached(large, offset + nbytes // 2)


def test_the_end_of_a_file_is_read_past_the_page_cache(large: Path) -> None:
    """The last block of a file may be incomplete."""
    path = large.with_name("odd")
    path.write_bytes(PATTERN[: 3 * MIB + 1234])
    forget(path)
    file = LocalFile(path)
    source = file.once(MIB, 2 * MIB + 1234)
    assert source is not file
    content = bytearray(2 * MIB + 1234)
    source.read_into([memoryview(content)], MIB)
    file.close()
    assert content == PATTERN[MIB : 3 * MIB + 1234]


@pytest.mark.parametrize("case", ["cached", "small", "beyond the end", "O_DIRECT is refused", "there is no O_DIRECT"])
def test_any_other_range_is_read_through_the_page_cache(
    large: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cached range, a small one, and one that O_DIRECT refuses are read through the page cache."""
    forget(large)
    offset, nbytes = 1000, 1000 if case == "small" else 2 * MIB
    if case == "cached":
        large.read_bytes()
    elif case == "beyond the end":
        offset = len(PATTERN) - MIB
    elif case == "O_DIRECT is refused":
        real = os.preadv

        def refusing(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", refusing)
    elif case == "there is no O_DIRECT":
        monkeypatch.delattr(os, "O_DIRECT")
    file = LocalFile(large)
    try:
        assert file.once(offset, nbytes) is file
        content = bytearray(nbytes)
        if case == "beyond the end":
            with pytest.raises(EOFError, match="1,048,576 bytes are missing"):
                file.read_into([memoryview(content)], offset)
        else:
            file.read_into([memoryview(content)], offset)
            assert content == PATTERN[offset : offset + nbytes]
    finally:
        file.close()


def test_a_failed_cold_read_is_an_error(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of an O_DIRECT read is raised, and not retried through the page cache."""
    forget(large)
    file = LocalFile(large)

    def failing(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(OSError, match="Input/output"):
        file.once(0, 2 * MIB)
    file.close()


def test_each_thread_keeps_what_it_read(large: Path) -> None:
    """Each thread's range is valid until its next call, and `close` leaves nothing open or mapped."""
    forget(large)
    before = open_descriptors()
    file = LocalFile(large)
    all_there = threading.Barrier(4)

    def read(number: int) -> bool:
        offset, nbytes = number * MIB + number, 2 * MIB
        source = file.once(offset, nbytes)
        all_there.wait(30)
        content = bytearray(nbytes)
        source.read_into([memoryview(content)], offset)
        return source is not file and content == PATTERN[offset : offset + nbytes]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(read, range(4))) == [True] * 4
    file.close()
    assert open_descriptors() == before
    assert str(large) not in Path("/proc/self/maps").read_text()


def test_a_cold_range_is_of_the_file_that_was_opened(tmp_path: Path) -> None:
    """A reader continues with the file that it opened, even if another file has its name."""
    path = tmp_path / "file"
    path.write_bytes(PATTERN)
    forget(path)
    file = LocalFile(path)
    path.unlink()
    path.write_bytes(b"another" * MIB)
    content = bytearray(2 * MIB)
    file.once(5, 2 * MIB).read_into([memoryview(content)], 5)
    file.close()
    assert content == PATTERN[5 : 5 + 2 * MIB]


def test_all_threads_read_the_file_that_was_opened(tmp_path: Path) -> None:
    """Each thread has its own descriptor of the opened file, and `close` closes all of them."""
    path = tmp_path / "file"
    path.write_bytes(PATTERN[:5000])
    before = open_descriptors()
    file = LocalFile(path)
    path.unlink()
    path.write_bytes(b"another")
    all_there = threading.Barrier(4)

    def read(offset: int) -> bytes:
        buffer = bytearray(1000)
        all_there.wait(30)
        file.read_into([memoryview(buffer)], offset)
        return bytes(buffer)

    with ThreadPoolExecutor(4) as pool:
        contents = list(pool.map(read, range(0, 4000, 1000)))
    assert b"".join(contents) == PATTERN[:4000]
    assert len(open_descriptors()) - len(before) == 1 + 4
    file.close()
    assert open_descriptors() == before


def test_more_buffers_than_one_preadv_takes(stored: Path) -> None:
    """One read fills 2,500 buffers of 0 to 11 bytes in order."""
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
    """The message names the end of the file and the number of missing bytes."""
    (tmp_path / "file").write_bytes(b"x" * 1000)
    file = LocalFile(tmp_path / "file")
    with pytest.raises(EOFError, match=r"ends too early, before byte 1,000: 500 bytes are missing"):
        file.read_into([memoryview(bytearray(700)), memoryview(bytearray(700))], 100)
    file.close()


def test_several_threads_read_one_file(tmp_path: Path) -> None:
    """Threads that read at the same time get their own ranges."""
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
    """A reader has at most two descriptors, until it is closed."""
    before = open_descriptors()
    file = LocalFile(stored)
    assert len(open_descriptors()) <= len(before) + 2
    file.close()
    assert open_descriptors() == before


@pytest.mark.parametrize("most", [1024, 1], ids=["at the end", "too many"])
def test_two_write_a_file_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Two sinks write runs of any alignment to one file, and write incomplete blocks last."""
    monkeypatch.setattr(local_io, "_MAX_EDGES", most)
    content = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
    ends = [0, 5, 3000, 3001, 20_000, 61_440, 61_441, 81_920, 100_000]
    path = tmp_path / "shared"
    local_io.make_shared(path, content.size, preallocate=True, umask=None)
    sinks = [local_io.LocalSink(path, None, sync=True) for _ in range(2)]
    memory = memoryview(direct_memory(content.size))
    for number, (start, stop) in enumerate(itertools.pairwise(ends)):
        piece = memory[start % local_io.BLOCK : start % local_io.BLOCK + stop - start]  # as blocks in memory are
        piece[:] = content[start:stop].data
        sinks[number % 2].put(start, piece)
    for sink in sinks:
        sink.complete()
    assert path.read_bytes() == content.tobytes()
