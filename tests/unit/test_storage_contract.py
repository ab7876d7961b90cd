"""What every destination must do, inherited by the tests of each."""

import pickle
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from dcp_tensorizer._format.layout import data_file_name
from dcp_tensorizer._storage.base import Refused
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._storage.redact import redact
from dcp_tensorizer._storage.stream import StreamStorage
from dcp_tensorizer.errors import NotCommitted, ReadError, WriteError

from .support import on_a_page, put_file, run_python

NAME = data_file_name(0, 0, "a" * 32)
ODD = ["a*b", "[1]", "with space", "ünïcødé ✓", "q?x", "per%20cent", "semi;colon"]


class Contract:
    """A backend's tests give `url`: a fresh directory that does not exist yet."""

    @pytest.fixture
    def options(self):
        """``storage_options`` of the backend."""
        return {}

    @pytest.fixture
    def storage(self, url, options):
        storage = open_storage(url, options)
        storage.make_directory()
        return storage

    def write(self, storage, name, content):
        put_file(storage, name, content)
        storage.sync_directory()

    def test_write_and_read_ranges(self, storage):
        """A sink takes its parts in the order it says, and ranges are read into several buffers at once."""
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
        sink.put_part(0, on_a_page(b"half"))
        sink.abort()
        sink.complete()
        assert storage.head(NAME) is None

    def test_publish_replaces_as_a_whole(self, storage):
        """A published file is the new contents and nothing of the old."""
        storage.put(".metadata", b"the old and longer one", sync=True)
        storage.put(".metadata", b"new", sync=True)
        assert storage.read(".metadata") == b"new"

    def test_publish_does_not_replace_unless_it_may(self, storage):
        """With replace=False a file that is there stays as it is, and that is an error; nothing else is left."""
        storage.put(".metadata", b"first", sync=True, replace=False)
        with pytest.raises(Refused, match=r"\.metadata.*must not be replaced"):
            storage.put(".metadata", b"second", sync=True, replace=False)
        assert storage.read(".metadata") == b"first"

    def test_an_empty_file(self, storage):
        """A file of no bytes is there, and has none."""
        self.write(storage, NAME, b"")
        assert (storage.head(NAME), storage.read(NAME)) == (0, b"")

    def test_many_small_reads_at_once(self, storage):
        """Ranges are read by more threads than the storage asks for."""
        content = bytes(range(256)) * 64
        self.write(storage, NAME, content)
        reader = storage.open(NAME)

        def read(offset):
            buffer = bytearray(10)
            reader.read_into([memoryview(buffer)], offset)
            return bytes(buffer)

        offsets = range(0, len(content) - 10, 97)
        with ThreadPoolExecutor(2 * storage.max_threads) as pool:
            assert list(pool.map(read, offsets)) == [content[offset : offset + 10] for offset in offsets]
        reader.close()

    def test_opened_in_another_process(self, storage, options):
        """What one process wrote, another one reads by location and options alone."""
        if storage.in_process:
            return
        storage.put(".metadata", b"theirs", sync=True)
        script = "import pickle, sys; from dcp_tensorizer._storage.open import open_storage; "
        script += "path, options = pickle.loads(bytes.fromhex(sys.argv[1])); "
        script += "print(open_storage(path, options).read('.metadata').decode())"
        assert run_python(script, pickle.dumps((storage.location, options)).hex()).stdout == "theirs\n"

    def test_missing(self, storage):
        """What is not there has no size and no contents, and removing it is no error."""
        assert storage.head(NAME) is None
        assert storage.read(".metadata") is None
        storage.remove(NAME)

    def test_remove(self, storage):
        """Removed files are gone, their neighbours are not; discarding does the same to files that are whole."""
        names = [data_file_name(rank, 0, "a" * 32) for rank in range(5)]
        for name in names:
            self.write(storage, name, b"x")
        storage.remove(names[0])
        storage.remove(names[1], names[2], NAME)
        storage.discard(names[3])
        assert [storage.head(name) for name in names] == [None, None, None, None, 1]

    def test_listing(self, storage, url, options):
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
        assert open_storage(child.location, options).head(NAME) == 1
        assert open_storage(url + "/", options).child("below [1]*").path == child.path
        assert storage.uploads() == []
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
    def test_odd_directories_are_literal(self, url, options, odd):
        """A directory's name is taken as it is, whatever globbing or quoting would make of it."""
        storage = open_storage(f"{url}/{odd}", options)
        storage.make_directory()
        self.write(storage, NAME, b"x")
        storage.put(".metadata", b"m", sync=True)
        again = open_storage(storage.location, options)
        assert (again.head(NAME), again.read(".metadata")) == (1, b"m")

    def test_two_writers_do_not_meet(self, storage, url, options):
        """Two jobs in one directory write files of their own, and the last metadata is one of theirs, whole."""
        other = open_storage(url, options)
        names = [NAME, data_file_name(0, 0, "b" * 32)]
        for where, name in zip((storage, other), names, strict=True):
            self.write(where, name, name.encode())
            where.put(".metadata", name.encode() * 100, sync=True)
        assert storage.read(".metadata") == names[1].encode() * 100
        assert [storage.head(name) for name in names] == [len(name) for name in names]


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
            storage.put(".metadata", b"x", sync=True)
        assert [path.name for path in (tmp_path / "new" / "checkpoint").iterdir()] == [".metadata"]


class TestS3(Contract):
    @pytest.fixture
    def options(self, s3):
        return s3.options()

    @pytest.fixture
    def url(self, s3):
        """A fresh prefix, below which no upload is left open in the end."""
        name = uuid.uuid4().hex
        yield f"s3://{s3.bucket}/{name}"
        assert s3.uploads(name) == []

    def test_an_abandoned_upload_is_discarded(self, storage, s3, url):
        """Of a writer that died in the middle of a file, whoever knows its name leaves nothing."""
        sink = storage.create(NAME, 20 << 20, sync=True)
        sink.put_part(1, on_a_page(bytes(sink.part_bytes)))
        prefix = url.rpartition("/")[2]
        assert s3.uploads(prefix) == [f"{prefix}/{NAME}"]
        storage.discard(NAME)
        assert s3.uploads(prefix) == []
        assert storage.head(NAME) is None

    def test_a_missing_bucket(self, s3):
        """Writing to it and reading from it are errors that name it."""
        storage = open_storage("s3://no-such-bucket/x", s3.options())
        storage.make_directory()
        sink = storage.create(NAME, 20 << 20, sync=True)
        with pytest.raises(FileNotFoundError, match="no-such-bucket"):
            sink.put_part(0, on_a_page(bytes(sink.part_bytes)))
        sink.abort()
        with pytest.raises(WriteError, match="bucket 'no-such-bucket' does not exist"):
            storage.put(".metadata", b"x", sync=True)
        with pytest.raises(ReadError, match="bucket 'no-such-bucket' does not exist"):
            storage.read(".metadata")

    def test_a_bucket_by_itself_is_a_directory(self, s3):
        """Without a prefix the names are the keys."""
        storage = open_storage(f"s3://{s3.bucket}", s3.options())
        name = data_file_name(0, 0, uuid.uuid4().hex)
        self.write(storage, name, b"x")
        assert s3.client().head_object(Bucket=s3.bucket, Key=name)["ContentLength"] == 1
        storage.remove(name)


class TestS3Stream(Contract):
    """s3fs's streams, as they serve for a session of aiobotocore's, and as those of other object stores do."""

    @pytest.fixture
    def options(self, s3):
        return s3.options(session=None)

    @pytest.fixture
    def url(self, s3):
        """A fresh prefix, below which no upload is left open in the end."""
        name = uuid.uuid4().hex
        yield f"s3://{s3.bucket}/{name}"
        assert s3.uploads(name) == []

    def test_an_aborted_stream_leaves_nothing(self, storage, s3, url):
        """Not even when it has sent parts: no object and no upload."""
        assert type(storage) is StreamStorage
        sink = storage.create(NAME, 60 << 20, sync=True)
        part = on_a_page(bytes(sink.part_bytes))
        for number in range(5):
            sink.put_part(number, part)
        prefix = url.rpartition("/")[2]
        assert s3.uploads(prefix) == [f"{prefix}/{NAME}"]
        sink.abort()
        assert (s3.uploads(prefix), s3.objects(prefix)) == ([], [])


class TestSftp(Contract):
    @pytest.fixture
    def options(self, sftp):
        return sftp.options()

    @pytest.fixture
    def url(self):
        return f"sftp://127.0.0.1/new/{uuid.uuid4().hex}"

    def test_publish_leaves_no_temporary(self, storage, sftp, url):
        """What is put in place has been renamed, and what could not be is removed."""
        storage.put(".metadata", b"x", sync=True)
        with pytest.raises(WriteError):
            storage.put(".metadata", b"y", sync=True, replace=False)
        assert [path.name for path in (sftp.folder / "new" / url.rpartition("/")[2]).iterdir()] == [".metadata"]


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
