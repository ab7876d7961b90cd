"""What every destination must do, inherited by the tests of each."""

import time
import uuid

import pytest

from dcp_tensorizer._destination import open_storage
from dcp_tensorizer._layout import data_file_name
from dcp_tensorizer._storage import redact
from dcp_tensorizer.errors import NotCommitted, WriteError

from .support import on_a_page, put_file

NAME = data_file_name(0, 0, "a" * 32)
ODD = ["a*b", "[1]", "with space", "ünïcødé ✓", "q?x", "per%20cent", "semi;colon"]


class Contract:
    """A backend's tests give `url`: a fresh directory that does not exist yet."""

    @pytest.fixture
    def storage(self, url):
        storage = open_storage(url)
        storage.make_directory()
        return storage

    def write(self, storage, name, content):
        put_file(storage, name, content)
        storage.sync_directory()

    def test_write_and_read_ranges(self, storage):
        """A sink takes its parts in any order, and ranges are read into several buffers at once."""
        sink = storage.create(NAME, 100, sync=True)
        size = sink.part_bytes
        content = (bytes(range(251)) * (2 * size // 251 + 2))[: 2 * size + 5]
        sink.abort()
        sink = storage.create(NAME, len(content), sync=True)
        for number in (2, 0, 1):
            sink.put(number, on_a_page(content[number * size : (number + 1) * size]))
        assert sink.bytes_written == len(content)
        sink.close()
        assert storage.size(NAME) == len(content)
        assert storage.read(NAME) == content
        reader = storage.open(NAME)
        first, second = bytearray(5), bytearray(3)
        reader.read_into([memoryview(first), memoryview(second)], size - 2)
        reader.close()
        assert bytes(first) + bytes(second) == content[size - 2 : size + 6]

    def test_reading_past_the_end(self, storage):
        """A range that the file does not have is an EOFError."""
        self.write(storage, NAME, b"short")
        reader = storage.open(NAME)
        with pytest.raises(EOFError):
            reader.read_into([memoryview(bytearray(10))], 0)
        reader.close()

    def test_a_failed_write_leaves_nothing(self, storage):
        """After `abort` there is no file, and closing does nothing."""
        sink = storage.create(NAME, 100, sync=True)
        sink.put(0, on_a_page(b"half"))
        sink.abort()
        sink.close()
        assert storage.size(NAME) is None

    def test_publish_replaces_as_a_whole(self, storage):
        """A published file is the new contents and nothing of the old."""
        storage.publish(".metadata", b"the old and longer one", sync=True)
        storage.publish(".metadata", b"new", sync=True)
        assert storage.read(".metadata") == b"new"

    def test_missing(self, storage):
        """What is not there has no size and no contents, and removing it is no error."""
        assert storage.size(NAME) is None
        assert storage.read(".metadata") is None
        storage.remove(NAME)

    def test_remove(self, storage):
        """A removed file is gone, its neighbours are not."""
        other = data_file_name(1, 0, "a" * 32)
        self.write(storage, NAME, b"x")
        self.write(storage, other, b"y")
        storage.remove(NAME)
        assert (storage.size(NAME), storage.size(other)) == (None, 1)

    def test_listing(self, storage, url):
        """Files with sizes and times, and subdirectories, of this directory alone; where there is none, it is said."""
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
        assert open_storage(child.location).size(NAME) == 1
        with pytest.raises(NotCommitted, match="nowhere"):
            storage.child("nowhere").listing()

    def test_reading_past_caches(self, storage):
        """Whatever lies between, the bytes are the same, at any offset and to any end."""
        content = bytes(range(251)) * 100
        self.write(storage, NAME, content)
        reader = storage.open_uncached(NAME)
        for offset, nbytes in ((0, len(content)), (4096, 8192), (4096, 5000), (17, 4096), (8192, len(content) - 8192)):
            buffer = on_a_page(bytes(nbytes))
            reader.read_into([buffer], offset)
            assert bytes(buffer) == content[offset : offset + nbytes]
        reader.close()

    @pytest.mark.parametrize("odd", ODD)
    def test_odd_directories_are_literal(self, url, odd):
        """A directory's name is taken as it is, whatever globbing or quoting would make of it."""
        storage = open_storage(f"{url}/{odd}")
        storage.make_directory()
        self.write(storage, NAME, b"x")
        storage.publish(".metadata", b"m", sync=True)
        again = open_storage(storage.location)
        assert (again.size(NAME), again.read(".metadata")) == (1, b"m")

    def test_two_writers_do_not_meet(self, storage, url):
        """Two jobs in one directory write files of their own, and the last metadata is one of theirs, whole."""
        other = open_storage(url)
        names = [NAME, data_file_name(0, 0, "b" * 32)]
        for where, name in zip((storage, other), names, strict=True):
            self.write(where, name, name.encode())
            where.publish(".metadata", name.encode() * 100, sync=True)
        assert storage.read(".metadata") == names[1].encode() * 100
        assert [storage.size(name) for name in names] == [len(name) for name in names]


class TestLocal(Contract):
    @pytest.fixture
    def url(self, tmp_path):
        return str(tmp_path / "new" / "checkpoint")

    def test_an_existing_file_is_not_written_over(self, storage):
        """Names are unique to a save: one that is taken is an error."""
        self.write(storage, NAME, b"first")
        with pytest.raises(FileExistsError):
            storage.create(NAME, 10, sync=True)
        assert storage.read(NAME) == b"first"

    def test_no_directory_below_a_file(self, tmp_path):
        """A path that leads through a file is an error naming it."""
        (tmp_path / "file").write_text("")
        with pytest.raises(WriteError, match="file/checkpoint"):
            open_storage(tmp_path / "file" / "checkpoint").make_directory()

    def test_publish_leaves_no_temporary(self, storage, tmp_path):
        """A file that cannot be put in place leaves nothing of itself."""
        (tmp_path / "new" / "checkpoint" / ".metadata").mkdir()
        with pytest.raises(WriteError):
            storage.publish(".metadata", b"x", sync=True)
        assert [path.name for path in (tmp_path / "new" / "checkpoint").iterdir()] == [".metadata"]


class TestFileUrl(Contract):
    @pytest.fixture
    def url(self, tmp_path):
        return f"file://{tmp_path}/checkpoint"


class TestMemory(Contract):
    @pytest.fixture
    def url(self):
        import fsspec

        name = uuid.uuid4().hex
        yield f"memory://{name}"
        fsspec.filesystem("memory").rm(f"/{name}", recursive=True)

    def test_only_this_process_sees_it(self, storage):
        """What lives in this process's memory is not given to the writer process."""
        assert storage.in_process


def test_credentials_are_removed_from_messages():
    """User and password of a URL appear in no text; the rest of it does."""
    assert redact("s3://key:secret@bucket/x and ftp://u:p@h/y") == "s3://bucket/x and ftp://h/y"
    assert redact("/plain/path@home") == "/plain/path@home"


def test_an_unknown_protocol():
    """A URL that nobody can open is an error that quotes it and hides the secrets among its options."""
    with pytest.raises(WriteError, match="nonsense") as caught:
        open_storage("nonsense://u:hunter2@host/x", {"password": "correct-horse"})
    assert "hunter2" not in str(caught.value)
    assert "correct-horse" not in str(caught.value)
