"""Every storage does what every storage must do: `StorageTests`, and what it does by itself."""

import uuid

import pytest

from dcp_tensorizer._storage.fsspec import StreamStorage
from dcp_tensorizer._tensor_file.names import data_file_name
from dcp_tensorizer.errors import ReadError, WriteError
from dcp_tensorizer.storage import open_storage
from dcp_tensorizer.testing import StorageTests, on_a_page

NAME = data_file_name(0, 0, "a" * 32)


class TestLocal(StorageTests):
    replaces_exclusively = True

    @pytest.fixture
    def url(self, tmp_path):
        return str(tmp_path / "new" / "checkpoint")

    def test_an_existing_file_is_not_written_over(self, storage):
        """Creating a file that exists is an error, because names are unique to a save."""
        self.write(storage, NAME, b"first")
        with pytest.raises(FileExistsError):
            storage.create(NAME, 10, sync=True)
        assert storage.read(NAME) == b"first"

    def test_no_directory_below_a_file(self, tmp_path):
        """A directory below a file is an error that names the path."""
        (tmp_path / "file").write_text("")
        with pytest.raises(WriteError, match="file/checkpoint"):
            open_storage(tmp_path / "file" / "checkpoint").make_directory()

    def test_put_leaves_no_temporary_file(self, storage, tmp_path):
        """A failed put leaves nothing behind."""
        (tmp_path / "new" / "checkpoint" / ".metadata").mkdir()
        with pytest.raises(WriteError):
            storage.put(".metadata", b"x", sync=True)
        assert [path.name for path in (tmp_path / "new" / "checkpoint").iterdir()] == [".metadata"]


class TestS3(StorageTests):
    replaces_exclusively = True

    @pytest.fixture
    def options(self, s3):
        return s3.options()

    @pytest.fixture
    def url(self, s3):
        """Yields a new prefix, and checks that no upload below it is left."""
        name = uuid.uuid4().hex
        yield f"s3://{s3.bucket}/{name}"
        assert s3.uploads(name) == []

    def test_an_abandoned_upload_is_discarded(self, storage, s3, url):
        """`discard` removes the upload of a writer that died in the middle of a file."""
        sink = storage.create(NAME, 20 << 20, sync=True)
        sink.put_part(1, on_a_page(bytes(sink.part_bytes)))
        prefix = url.rpartition("/")[2]
        assert s3.uploads(prefix) == [f"{prefix}/{NAME}"]
        storage.discard(NAME)
        assert s3.uploads(prefix) == []
        assert storage.head(NAME) is None

    def test_a_missing_bucket(self, s3):
        """Writes to a missing bucket and reads from it raise errors that name the bucket."""
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
        """A bucket without a prefix is a directory whose file names are keys."""
        storage = open_storage(f"s3://{s3.bucket}", s3.options())
        name = data_file_name(0, 0, uuid.uuid4().hex)
        self.write(storage, name, b"x")
        assert s3.client().head_object(Bucket=s3.bucket, Key=name)["ContentLength"] == 1
        storage.remove(name)


class TestS3Stream(StorageTests):
    """s3fs's streams, which are used with a session of aiobotocore."""

    @pytest.fixture
    def options(self, s3):
        return s3.options(session=None)

    @pytest.fixture
    def url(self, s3):
        """Yields a new prefix, and checks that no upload below it is left."""
        name = uuid.uuid4().hex
        yield f"s3://{s3.bucket}/{name}"
        assert s3.uploads(name) == []

    def test_an_aborted_stream_leaves_nothing(self, storage, s3, url):
        """An aborted stream that has sent parts leaves neither an object nor an upload."""
        assert type(storage) is StreamStorage
        sink = storage.create(NAME, 60 << 20, sync=True)
        part = on_a_page(bytes(sink.part_bytes))
        for number in range(5):
            sink.put_part(number, part)
        prefix = url.rpartition("/")[2]
        assert s3.uploads(prefix) == [f"{prefix}/{NAME}"]
        sink.abort()
        assert (s3.uploads(prefix), s3.objects(prefix)) == ([], [])


class TestSftp(StorageTests):
    @pytest.fixture
    def options(self, sftp):
        return sftp.options()

    @pytest.fixture
    def url(self):
        return f"sftp://127.0.0.1/new/{uuid.uuid4().hex}"

    def test_put_leaves_no_temporary_file(self, storage, sftp, url):
        """`put` renames its temporary file, or removes it after a failure."""
        storage.put(".metadata", b"x", sync=True)
        with pytest.raises(WriteError):
            storage.put(".metadata", b"y", sync=True, replace=False)
        assert [path.name for path in (sftp.folder / "new" / url.rpartition("/")[2]).iterdir()] == [".metadata"]


class TestFileUrl(StorageTests):
    replaces_exclusively = True

    @pytest.fixture
    def url(self, tmp_path):
        return f"file://{tmp_path}/checkpoint"


class TestMemory(StorageTests):
    replaces_exclusively = True

    @pytest.fixture
    def url(self):
        import fsspec

        name = uuid.uuid4().hex
        yield f"memory://{name}"
        fsspec.filesystem("memory").rm(f"/{name}", recursive=True)

    def test_only_this_process_sees_it(self, storage):
        """A storage in memory reports that other processes cannot see it."""
        assert storage.in_process
