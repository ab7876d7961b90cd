"""The contract of storages, as a test class to inherit from."""

from __future__ import annotations

import mmap
import os
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .._tensor_file.names import data_file_name
from ..errors import NotCommitted, ReadError
from ..storage import Refused, Storage, open_storage

NAME = data_file_name(0, 0, "a" * 32)
OTHER = data_file_name(3, 1, "b" * 32)
_ODD = ["a*b", "[1]", "with space", "ünïcødé ✓", "q?x", "per%20cent", "semi;colon"]
_OPENED_ELSEWHERE = """
import pickle, sys
from dcp_tensorizer.storage import open_storage
location, options = pickle.loads(bytes.fromhex(sys.argv[1]))
print(open_storage(location, options).read(".metadata").decode())
"""


class StorageTests:
    """Tests of the contract of a storage. Inherit from this class to run them.

    The subclass defines the fixture `url`: the URL or path of a directory that does not exist yet, a different one for
    each test. If the storage takes options, the subclass also defines the fixture `options`. The storage's package must
    be installed, so that its entry point is found.

    Attributes:
        creates_exclusively: True if exactly one job succeeds when several put the same new file at the same time with
            ``replace=False``.
        replaces_exclusively: True if exactly one job succeeds when several replace the same contents at the same time
            with `put_if`.
    """

    creates_exclusively = True
    replaces_exclusively = False

    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError(f"{type(self).__name__} must define the fixture `url`")

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {}

    @pytest.fixture
    def storage(self, url: str, options: dict[str, Any]) -> Storage:
        """The storage of `url`, whose directory exists."""
        storage = open_storage(url, options)
        storage.make_directory()
        return storage

    def write(self, storage: Storage, name: str, content: bytes) -> None:
        """Writes a whole file durably."""
        put_file(storage, name, content)
        storage.sync_directory()

    def test_write_and_read_ranges(self, storage: Storage) -> None:
        """A sink takes parts in any order unless it is ``in_order``. A reader fills several buffers from one range."""
        sink = storage.create(NAME, 100, sync=True)
        size = sink.part_bytes
        content = (bytes(range(251)) * (2 * size // 251 + 2))[: 2 * size + 5]
        sink.abort()
        sink = storage.create(NAME, len(content), sync=True)
        for number in (0, 1, 2) if sink.in_order else (2, 0, 1):
            sink.put_part(number, on_a_page(content[number * size : (number + 1) * size]))
        assert sink.bytes_written == len(content)
        sink.complete()
        assert storage.head(NAME) == len(content)
        assert storage.read(NAME) == content
        reader = storage.open(NAME)
        first, second = bytearray(5), bytearray(3)
        reader.read_into([memoryview(first), memoryview(second)], size - 2)
        reader.close()
        assert bytes(first) + bytes(second) == content[size - 2 : size + 6]

    def test_reading_past_the_end(self, storage: Storage) -> None:
        """A read past the end of the file raises EOFError."""
        self.write(storage, NAME, b"short")
        reader = storage.open(NAME)
        with pytest.raises(EOFError):
            reader.read_into([memoryview(bytearray(10))], 0)
        reader.close()

    def test_a_failed_write_leaves_nothing(self, storage: Storage) -> None:
        """After `abort` the file does not exist, and `complete` does nothing."""
        sink = storage.create(NAME, 100, sync=True)
        sink.put_part(0, on_a_page(b"half"))
        sink.abort()
        sink.complete()
        assert storage.head(NAME) is None

    def test_put_replaces_a_whole_file(self, storage: Storage) -> None:
        """`put` replaces all contents of the old file."""
        storage.put(".metadata", b"the old and longer one", sync=True)
        storage.put(".metadata", b"new", sync=True)
        assert storage.read(".metadata") == b"new"

    def test_put_refuses_to_replace(self, storage: Storage) -> None:
        """With replace=False, `put` raises Refused if the file exists, and does not change the file."""
        storage.put(".metadata", b"first", sync=True, replace=False)
        with pytest.raises(Refused, match=r"\.metadata.*must not be replaced"):
            storage.put(".metadata", b"second", sync=True, replace=False)
        assert storage.read(".metadata") == b"first"

    def test_an_empty_file(self, storage: Storage) -> None:
        """A file of no bytes exists, and is empty."""
        self.write(storage, NAME, b"")
        assert (storage.head(NAME), storage.read(NAME)) == (0, b"")

    def test_a_part_of_a_file(self, storage: Storage) -> None:
        """`read` returns at most as many bytes as requested, and `read_range` exactly as many, or raises ReadError."""
        self.write(storage, NAME, b"0123456789")
        assert [storage.read(NAME, most) for most in (4, 10, 11)] == [b"0123", b"0123456789", b"0123456789"]
        assert storage.read("missing", 4) is None
        assert storage.read_range(NAME, 3, 4) == b"3456"
        with pytest.raises(ReadError, match=NAME):
            storage.read_range(NAME, 8, 4)

    def test_many_small_reads_at_once(self, storage: Storage) -> None:
        """More threads than `max_threads` may read ranges at the same time."""
        content = bytes(range(256)) * 64
        self.write(storage, NAME, content)
        reader = storage.open(NAME)

        def read(offset: int) -> bytes:
            buffer = bytearray(10)
            reader.read_into([memoryview(buffer)], offset)
            return bytes(buffer)

        offsets = range(0, len(content) - 10, 97)
        with ThreadPoolExecutor(2 * storage.reads.max_threads) as pool:
            assert list(pool.map(read, offsets)) == [content[offset : offset + 10] for offset in offsets]
        reader.close()

    def test_files_are_adopted_or_not(self, storage: Storage) -> None:
        """An adopted file has the same bytes, and outlives its source; a file with another identity is not adopted."""
        source, target = storage.child("a"), storage.child("b")
        source.make_directory()
        target.make_directory()
        self.write(source, NAME, b"content")
        identity = source.identity(NAME)
        assert (identity is not None) == storage.adopts
        assert (source.identity("missing"), target.head(OTHER)) == (None, None)
        assert target.adopt(source, "missing", identity or (7, "x"), OTHER, sync=True) is None
        if identity is not None:
            assert target.adopt(source, NAME, (*identity[:-1], "another"), OTHER, sync=True) is None
            assert target.head(OTHER) is None
            adopted = target.adopt(source, NAME, identity, OTHER, sync=True)
            assert adopted == target.identity(OTHER)
            source.remove(NAME)
            assert target.read(OTHER) == b"content"
            assert target.identity(OTHER) == adopted
            assert target.adopt(source, NAME, identity, OTHER + ".2", sync=True) is None

    def test_opened_in_another_process(self, storage: Storage, options: dict[str, Any]) -> None:
        """Another process can open the same directory with `location` and the options."""
        if storage.in_process:
            return
        storage.put(".metadata", b"theirs", sync=True)
        given = pickle.dumps((storage.location, options)).hex()
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _OPENED_ELSEWHERE, given],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, "theirs\n"), done.stderr

    def test_missing(self, storage: Storage) -> None:
        """`head` and `read` return None for a missing file, and `remove` ignores it."""
        assert storage.head(NAME) is None
        assert storage.read(".metadata") is None
        storage.remove(NAME)

    def test_remove(self, storage: Storage) -> None:
        """`remove` and `discard` remove only the named files."""
        names = [data_file_name(rank, 0, "a" * 32) for rank in range(5)]
        for name in names:
            self.write(storage, name, b"x")
        storage.remove(names[0])
        storage.remove(names[1], names[2], NAME)
        storage.discard(names[3])
        assert [storage.head(name) for name in names] == [None, None, None, None, 1]

    def test_listing(self, storage: Storage, url: str, options: dict[str, Any]) -> None:
        """`listing` returns files with sizes and times, and subdirectories; a missing directory raises NotCommitted."""
        started = time.time()
        child = storage.child("below [1]*")
        child.make_directory()
        self.write(storage, NAME, b"1234")
        self.write(child, NAME, b"x")
        files, folders = storage.listing()
        assert [(file.name, file.nbytes) for file in files] == [(NAME, 4)]
        assert folders == ["below [1]*"]
        assert files[0].modified is None or abs(files[0].modified - started) < 60
        assert [file.name for file in child.listing()[0]] == [NAME]
        assert open_storage(child.location, options).head(NAME) == 1
        assert open_storage(url + "/", options).child("below [1]*").path == child.path
        assert storage.uploads() == []
        with pytest.raises(NotCommitted, match="nowhere"):
            storage.child("nowhere").listing()

    def test_reading_past_caches(self, storage: Storage) -> None:
        """An uncached read returns the file's bytes, at any offset and of any size."""
        content = bytes(range(251)) * 100
        self.write(storage, NAME, content)
        reader = storage.open_uncached(NAME)
        for offset, nbytes in ((0, len(content)), (4096, 8192), (4096, 5000), (17, 4096), (8192, len(content) - 8192)):
            buffer = on_a_page(bytes(nbytes))
            reader.read_into([buffer], offset)
            assert bytes(buffer) == content[offset : offset + nbytes]
        reader.close()

    @pytest.mark.parametrize("odd", _ODD)
    def test_odd_directories_are_literal(self, url: str, options: dict[str, Any], odd: str) -> None:
        """Directory names are neither globbed nor unquoted."""
        storage = open_storage(f"{url}/{odd}", options)
        storage.make_directory()
        self.write(storage, NAME, b"x")
        storage.put(".metadata", b"m", sync=True)
        again = open_storage(storage.location, options)
        assert (again.head(NAME), again.read(".metadata")) == (1, b"m")

    def test_two_writers_do_not_meet(self, storage: Storage, url: str, options: dict[str, Any]) -> None:
        """Two jobs in one directory write separate files, and the last metadata file replaces the first."""
        other = open_storage(url, options)
        names = [NAME, data_file_name(0, 0, "b" * 32)]
        for where, name in zip((storage, other), names, strict=True):
            self.write(where, name, name.encode())
            where.put(".metadata", name.encode() * 100, sync=True)
        assert storage.read(".metadata") == names[1].encode() * 100
        assert [storage.head(name) for name in names] == [len(name) for name in names]

    def test_of_jobs_that_meet_one_wins(self, storage: Storage, url: str, options: dict[str, Any]) -> None:
        """Of several puts with replace=False at the same time, one succeeds, and the file has that put's contents."""
        if storage.in_process or not self.creates_exclusively:
            return  # no other job can write there, or the storage does not promise it
        storages = [open_storage(url, options) for _ in range(6)]
        start = threading.Barrier(len(storages))

        def put(number: int) -> bool:
            start.wait()
            try:
                storages[number].put(".metadata", b"%d" % number * 1000, sync=True, replace=False)
            except Refused:
                return False
            return True

        with ThreadPoolExecutor(len(storages)) as pool:
            won = list(pool.map(put, range(len(storages))))
        assert won.count(True) == 1
        assert storage.read(".metadata") == b"%d" % won.index(True) * 1000

    def test_put_if_knows_what_it_replaces(self, storage: Storage) -> None:
        """`put_if` writes the file only if its contents are the expected ones."""
        assert not storage.put_if("record", b"0", b"1")
        assert storage.put_if("record", None, b"1")
        assert not storage.put_if("record", None, b"2")
        assert not storage.put_if("record", b"0", b"2")
        assert storage.read("record") == b"1"
        assert storage.put_if("record", b"1", b"2")
        assert storage.read("record") == b"2"
        assert [file.name for file in storage.listing()[0]] == ["record"]

    @pytest.mark.parametrize("first", [None, b"first"])
    def test_of_those_that_replace_one_file_one_does(
        self, storage: Storage, url: str, options: dict[str, Any], first: bytes | None
    ) -> None:
        """Exactly one `put_if` succeeds, or at least one if the storage promises no more.

        The file has the data of a `put_if` that succeeded.
        """
        if first is not None:
            storage.put("record", first, sync=True)
        storages = [storage if storage.in_process else open_storage(url, options) for _ in range(6)]
        start = threading.Barrier(len(storages))

        def put(number: int) -> bool:
            start.wait()
            return storages[number].put_if("record", first, b"%d" % number * 1000)

        with ThreadPoolExecutor(len(storages)) as pool:
            won = [number for number, has_won in enumerate(pool.map(put, range(len(storages)))) if has_won]
        is_exclusive = self.creates_exclusively if first is None else self.replaces_exclusively
        assert len(won) == 1 or (won and not is_exclusive)
        assert storage.read("record") in [b"%d" % number * 1000 for number in won]


def put_file(storage: Storage, name: str, content: bytes, *, sync: bool = True) -> None:
    """Writes a whole file through a sink, part by part."""
    sink = storage.create(name, len(content), sync=sync)
    for number, start in enumerate(range(0, len(content), sink.part_bytes)):
        sink.put_part(number, on_a_page(content[start : start + sink.part_bytes]))
    sink.complete()


def on_a_page(content: bytes) -> memoryview:
    """Returns a page-aligned copy, as sinks require."""
    memory = mmap.mmap(-1, max(1, len(content)))
    memory[: len(content)] = content
    return memoryview(memory)[: len(content)]
