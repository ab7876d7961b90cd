"""Local files that are written past the page cache have the right contents."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_tensorizer._storage.local_io import LocalSink, Residency
from dcp_tensorizer.testing import on_a_page

from ...lab.processes import file_size_limit, open_descriptors

MIB = 1 << 20
PATTERN = np.random.default_rng(0).integers(0, 256, 9 * MIB, dtype=np.uint8).tobytes()

shared_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


PART = LocalSink.part_bytes


def put_parts(sink: LocalSink, content: bytes, order: list[int]) -> None:
    for number in order:
        sink.put_part(number, on_a_page(content[number * PART : (number + 1) * PART]))


@settings(shared_folder, max_examples=25)
@given(
    parts=st.integers(0, 2),
    rest=st.sampled_from([0, 1, 100, 4095, 4096, 4097, 8192, MIB + 5, PART - 1]),
    data=st.data(),
    sync=st.booleans(),
)
def test_parts_make_the_file_they_should(
    tmp_path: Path, parts: int, rest: int, data: st.DataObject, sync: bool
) -> None:
    """A file has exactly the bytes of its parts, of any size, in any order, synced or not."""
    content = PATTERN[: parts * PART + rest]
    order = data.draw(st.permutations(range(parts + bool(rest))))
    path = tmp_path / "file"
    sink = LocalSink(path, len(content), sync=sync)
    try:
        put_parts(sink, content, order)
        assert sink.bytes_written == len(content)
        sink.complete()
        assert path.read_bytes() == content
    finally:
        sink.abort()
        path.unlink(missing_ok=True)


def test_several_threads_write_parts(tmp_path: Path) -> None:
    """Threads write parts at the same time: each part is at its offset, and all bytes are counted."""
    content = PATTERN * 3
    sink = LocalSink(tmp_path / "file", len(content), sync=True)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: put_parts(sink, content, [number]), range(-(-len(content) // PART))))
    sink.complete()
    assert sink.bytes_written == len(content)
    assert sink.write_seconds > 0
    assert sink.complete_seconds > 0
    assert (tmp_path / "file").read_bytes() == content


def cached_pages(path: Path) -> int:
    """Returns the number of a file's pages in the page cache."""
    with open(path, "rb") as file:
        residency = Residency(file.fileno())
        count = sum(map(residency.holds_page, range(0, path.stat().st_size, mmap.PAGESIZE)))
        residency.close()
    return count


def test_a_save_leaves_the_page_cache_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A written file does not stay in the page cache, with O_DIRECT or without it."""
    for name in ("direct", "buffered"):
        sink = LocalSink(tmp_path / name, len(PATTERN), sync=True)
        put_parts(sink, PATTERN, [0, 1, 2])
        sink.complete()
        assert cached_pages(tmp_path / name) == 0
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    (tmp_path / "cached").write_bytes(PATTERN)
    assert cached_pages(tmp_path / "cached") > 0


def test_a_complete_file_stays(tmp_path: Path) -> None:
    """After `complete`, further calls of `complete` and `abort` do nothing."""
    sink = LocalSink(tmp_path / "file", 3, sync=True)
    sink.put_part(0, on_a_page(b"abc"))
    sink.complete()
    sink.complete()
    sink.abort()
    assert (tmp_path / "file").read_bytes() == b"abc"


def test_an_existing_file_is_not_touched(tmp_path: Path) -> None:
    """Creating a file that exists is an error, because names are unique to a save."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError):
        LocalSink(path, 0, sync=False)
    assert path.read_bytes() == b"old"


def test_abort_removes_the_file_and_its_descriptors(tmp_path: Path) -> None:
    """`abort` leaves no file, and a second call does nothing."""
    before = open_descriptors()
    sink = LocalSink(tmp_path / "file", 4 * MIB, sync=True)
    put_parts(sink, PATTERN[: 4 * MIB], [0])
    sink.abort()
    sink.abort()
    assert list(tmp_path.iterdir()) == []
    assert open_descriptors() == before


def test_a_failed_close_closes_each_descriptor_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If closing fails (full quota), `complete` raises, `abort` removes the file, and no descriptor is closed twice."""
    before, real, closed = open_descriptors(), os.close, list[int]()

    def failing(fd: int) -> None:
        closed.append(fd)
        real(fd)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    sink = LocalSink(tmp_path / "file", 3, sync=True)
    of_sink = open_descriptors().keys() - before.keys()
    sink.put_part(0, on_a_page(b"abc"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", failing)
        with pytest.raises(OSError, match="quota"):
            sink.complete()
        sink.abort()
    assert (sorted(closed), open_descriptors()) == (sorted(of_sink), before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("nbytes", [5000, 2 * MIB], ids=["buffered", "direct"])
def test_a_failed_write_raises(tmp_path: Path, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write raises the system's error, and the file can be aborted."""
    monkeypatch.delattr(os, "posix_fallocate")  # it would fail before the write
    sink = LocalSink(tmp_path / "file", nbytes, sync=True)
    with (
        file_size_limit(1000),
        pytest.raises(OSError, match=r"File too large. Raise the file size limit .*ulimit -f") as caught,
    ):
        put_parts(sink, PATTERN[:nbytes], [0])
    assert caught.value.errno == errno.EFBIG
    sink.abort()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_before_the_work_begins(tmp_path: Path) -> None:
    """If the space cannot be reserved, the error is raised and no file is left."""
    before = open_descriptors()
    with file_size_limit(MIB), pytest.raises(OSError, match="File too large"):
        LocalSink(tmp_path / "file", 2 * MIB, sync=False)
    assert list(tmp_path.iterdir()) == []
    assert open_descriptors() == before


def test_without_direct_io_the_file_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without O_DIRECT, or if the first write refuses it, all parts go through the page cache."""
    real = os.pwrite
    direct = set()

    def refusing(fd: int, data: memoryview, offset: int) -> int:
        if os.get_blocking(fd) and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            direct.add(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, data, offset)

    content = PATTERN[: PART + 5000]
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refusing)
        sink = LocalSink(tmp_path / "refused", len(content), sync=True)
        put_parts(sink, content, [1, 0])
        sink.complete()
    assert direct
    monkeypatch.delattr(os, "O_DIRECT")
    sink = LocalSink(tmp_path / "unknown", len(content), sync=True)
    put_parts(sink, content, [1, 0])
    sink.complete()
    assert (tmp_path / "refused").read_bytes() == (tmp_path / "unknown").read_bytes() == content
