"""What every storage must do. The tests of each storage inherit it."""

import pickle
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from dcp_tensorizer._format.names import data_file_name
from dcp_tensorizer._storage.base import Refused
from dcp_tensorizer._storage.fsspec import StreamStorage
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer.errors import NotCommitted, ReadError, WriteError

from ...support import on_a_page, put_file, run_python

NAME = data_file_name(0, 0, "a" * 32)
OTHER = data_file_name(3, 1, "b" * 32)
ODD = ["a*b", "[1]", "with space", "ünïcødé ✓", "q?x", "per%20cent", "semi;colon"]


class Contract:
    """A subclass gives the fixture `url`: a directory that does not exist yet."""

    is_exact = True
    """Of several that replace the same contents, one succeeds."""

    @pytest.fixture
    def options(self):
        """The backend's ``storage_options``."""
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
        """A sink takes its parts in the order that it asks for, and a range is read into several buffers."""
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
        """After `abort` there is no file, and `complete` does nothing."""
        sink = storage.create(NAME, 100, sync=True)
        sink.put_part(0, on_a_page(b"half"))
        sink.abort()
        sink.complete()
        assert storage.head(NAME) is None

    def test_put_replaces_a_whole_file(self, storage):
        """The file has the new contents and nothing of the old."""
        storage.put(".metadata", b"the old and longer one", sync=True)
        storage.put(".metadata", b"new", sync=True)
        assert storage.read(".metadata") == b"new"

    def test_put_refuses_to_replace(self, storage):
        """With replace=False an existing file stays as it is, and that is an error."""
        storage.put(".metadata", b"first", sync=True, replace=False)
        with pytest.raises(Refused, match=r"\.metadata.*must not be replaced"):
            storage.put(".metadata", b"second", sync=True, replace=False)
        assert storage.read(".metadata") == b"first"

    def test_an_empty_file(self, storage):
        """A file of no bytes exists, and is empty."""
        self.write(storage, NAME, b"")
        assert (storage.head(NAME), storage.read(NAME)) == (0, b"")

    def test_many_small_reads_at_once(self, storage):
        """More threads than the storage asks for may read ranges."""
        content = bytes(range(256)) * 64
        self.write(storage, NAME, content)
        reader = storage.open(NAME)

        def read(offset):
            buffer = bytearray(10)
            reader.read_into([memoryview(buffer)], offset)
            return bytes(buffer)

        offsets = range(0, len(content) - 10, 97)
        with ThreadPoolExecutor(2 * storage.reads.max_threads) as pool:
            assert list(pool.map(read, offsets)) == [content[offset : offset + 10] for offset in offsets]
        reader.close()

    def test_files_are_adopted_or_not(self, storage):
        """An adopted file has the same bytes, and outlives the first; a file that is not what it was is not adopted."""
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

    def test_opened_in_another_process(self, storage, options):
        """Another process opens the same directory with location and options alone."""
        if storage.in_process:
            return
        storage.put(".metadata", b"theirs", sync=True)
        script = "import pickle, sys; from dcp_tensorizer._storage.open import open_storage; "
        script += "path, options = pickle.loads(bytes.fromhex(sys.argv[1])); "
        script += "print(open_storage(path, options).read('.metadata').decode())"
        assert run_python(script, pickle.dumps((storage.location, options)).hex()).stdout == "theirs\n"

    def test_missing(self, storage):
        """A missing file has no size and no contents, and its removal is no error."""
        assert storage.head(NAME) is None
        assert storage.read(".metadata") is None
        storage.remove(NAME)

    def test_remove(self, storage):
        """`remove` and `discard` remove the named files, and leave the others."""
        names = [data_file_name(rank, 0, "a" * 32) for rank in range(5)]
        for name in names:
            self.write(storage, name, b"x")
        storage.remove(names[0])
        storage.remove(names[1], names[2], NAME)
        storage.discard(names[3])
        assert [storage.head(name) for name in names] == [None, None, None, None, 1]

    def test_listing(self, storage, url, options):
        """It has this directory's files, with sizes and times, and subdirectories; a missing directory is an error."""
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
        """A read past caches gives the same bytes, at any offset and of any size."""
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
        """Nothing in a directory's name is globbed or unquoted."""
        storage = open_storage(f"{url}/{odd}", options)
        storage.make_directory()
        self.write(storage, NAME, b"x")
        storage.put(".metadata", b"m", sync=True)
        again = open_storage(storage.location, options)
        assert (again.head(NAME), again.read(".metadata")) == (1, b"m")

    def test_two_writers_do_not_meet(self, storage, url, options):
        """Two jobs in one directory write separate files, and the metadata is that of the last, whole."""
        other = open_storage(url, options)
        names = [NAME, data_file_name(0, 0, "b" * 32)]
        for where, name in zip((storage, other), names, strict=True):
            self.write(where, name, name.encode())
            where.put(".metadata", name.encode() * 100, sync=True)
        assert storage.read(".metadata") == names[1].encode() * 100
        assert [storage.head(name) for name in names] == [len(name) for name in names]

    def test_of_jobs_that_meet_one_wins(self, storage, url, options):
        """With replace=False all but one are refused, and the file is the winner's."""
        if storage.in_process:  # no other job can meet this one
            return
        storages = [open_storage(url, options) for _ in range(6)]
        start = threading.Barrier(len(storages))

        def put(number):
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

    def test_put_if_knows_what_it_replaces(self, storage):
        """A file is put where there is none, or where its contents are those expected; otherwise it stays."""
        assert not storage.put_if("record", b"0", b"1")
        assert storage.put_if("record", None, b"1")
        assert not storage.put_if("record", None, b"2")
        assert not storage.put_if("record", b"0", b"2")
        assert storage.read("record") == b"1"
        assert storage.put_if("record", b"1", b"2")
        assert storage.read("record") == b"2"
        assert [file.name for file in storage.listing()[0]] == ["record"]

    @pytest.mark.parametrize("first", [None, b"first"])
    def test_of_those_that_replace_one_file_one_does(self, storage, url, options, first):
        """Where the storage has conditional writes or locks; elsewhere one of them stays, and is whole."""
        if first is not None:
            storage.put("record", first, sync=True)
        storages = [storage if storage.in_process else open_storage(url, options) for _ in range(6)]
        start = threading.Barrier(len(storages))

        def put(number):
            start.wait()
            return storages[number].put_if("record", first, b"%d" % number * 1000)

        with ThreadPoolExecutor(len(storages)) as pool:
            won = [number for number, has_won in enumerate(pool.map(put, range(len(storages)))) if has_won]
        assert len(won) == 1 or (won and not self.is_exact)
        assert storage.read("record") in [b"%d" % number * 1000 for number in won]


class TestLocal(Contract):
    @pytest.fixture
    def url(self, tmp_path):
        return str(tmp_path / "new" / "checkpoint")

    def test_an_existing_file_is_not_written_over(self, storage):
        """A name that is taken is an error, since names are unique to a save."""
        self.write(storage, NAME, b"first")
        with pytest.raises(FileExistsError):
            storage.create(NAME, 10, sync=True)
        assert storage.read(NAME) == b"first"

    def test_no_directory_below_a_file(self, tmp_path):
        """A path through a file is an error that names the path."""
        (tmp_path / "file").write_text("")
        with pytest.raises(WriteError, match="file/checkpoint"):
            open_storage(tmp_path / "file" / "checkpoint").make_directory()

    def test_put_leaves_no_temporary_file(self, storage, tmp_path):
        """A failed put leaves nothing behind."""
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
        """`discard` removes what a writer that died in the middle of a file left."""
        sink = storage.create(NAME, 20 << 20, sync=True)
        sink.put_part(1, on_a_page(bytes(sink.part_bytes)))
        prefix = url.rpartition("/")[2]
        assert s3.uploads(prefix) == [f"{prefix}/{NAME}"]
        storage.discard(NAME)
        assert s3.uploads(prefix) == []
        assert storage.head(NAME) is None

    def test_a_missing_bucket(self, s3):
        """Writes and reads are errors that name the bucket."""
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
        """Without a prefix, file names are keys."""
        storage = open_storage(f"s3://{s3.bucket}", s3.options())
        name = data_file_name(0, 0, uuid.uuid4().hex)
        self.write(storage, name, b"x")
        assert s3.client().head_object(Bucket=s3.bucket, Key=name)["ContentLength"] == 1
        storage.remove(name)


class TestS3Stream(Contract):
    """s3fs's streams, which serve a session of aiobotocore's, like those of other object stores."""

    is_exact = False

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
        """Not even after it has sent parts is there an object or an upload."""
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
    is_exact = False

    @pytest.fixture
    def options(self, sftp):
        return sftp.options()

    @pytest.fixture
    def url(self):
        return f"sftp://127.0.0.1/new/{uuid.uuid4().hex}"

    def test_put_leaves_no_temporary_file(self, storage, sftp, url):
        """Its temporary file is renamed, or removed after a failure."""
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
        """It says that other processes cannot see it."""
        assert storage.in_process
