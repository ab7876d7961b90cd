"""Which requests S3 storage sends, with which options and credentials, to a real server behind a proxy."""

from __future__ import annotations

import base64
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dcp_tensorizer import ReadError, WriteError
from dcp_tensorizer._storage.fsspec import StreamStorage
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._storage.s3 import S3Storage
from dcp_tensorizer._tensor_file.names import data_file_name
from dcp_tensorizer.testing import on_a_page, put_file

from ...lab.faults import Fault, Request, S3Proxy, always, once
from ...lab.seams import read_range
from ...lab.servers import KEY, OTHER_KEY, SECRET, S3Server

NAME = data_file_name(0, 0, "a" * 32)
CONTENT = bytes(range(251)) * (20 * (1 << 20) // 251)  # three parts
PARTS = 3

Opener = Callable[..., S3Storage]


# --- requests --------------------------------------------------------------------------------------------------------


def test_requests_of_a_large_file(storage: S3Storage, proxy: S3Proxy) -> None:
    """Opening a storage and making a directory send no request, and an upload sends those of a multipart upload."""
    storage.make_directory()
    put_file(storage, NAME, CONTENT)
    storage.sync_directory()
    assert proxy.counts() == {"CreateMultipartUpload": 1, "UploadPart": PARTS, "CompleteMultipartUpload": 1}


def test_requests_of_small_files(storage: S3Storage, proxy: S3Proxy) -> None:
    """Each put, read, head and removal is one request, and nothing is listed."""
    put_file(storage, NAME, b"small")
    storage.put(".metadata", b"m", sync=True)
    assert proxy.counts() == {"PutObject": 2}
    proxy.forget()
    assert (storage.read(".metadata"), storage.read("missing")) == (b"m", None)
    assert (storage.head(NAME), storage.head("missing")) == (5, None)
    storage.remove(NAME, ".metadata", "missing")
    assert proxy.counts() == {"GetObject": 2, "HeadObject": 2, "DeleteObject": 3}


def test_a_file_that_is_replaced_is_not_read_on(storage: S3Storage) -> None:
    """A reader does not mix the bytes of two versions: it raises, and a reader opened later reads the new one."""
    put_file(storage, NAME, b"old" * 100)
    reader = storage.open(NAME)
    assert reader.read_range(0, 3) == b"old"
    put_file(storage, NAME, b"new" * 100)
    with pytest.raises(OSError, match="it was replaced while it was being read"):
        reader.read_range(3, 3)
    assert storage.read_range(NAME, 3, 3) == b"new"


def test_a_range_is_one_request(storage: S3Storage, proxy: S3Proxy) -> None:
    """A range fills several buffers, and an empty range sends no request."""
    put_file(storage, NAME, CONTENT)
    proxy.forget()
    assert read_range(storage, NAME, 10_000_001, 12345) == CONTENT[12345 : 12345 + 10_000_001]
    storage.open(NAME).read_into([], 5)
    assert proxy.counts() == {"GetObject": 1}


def test_parts_are_sent_at_once(storage: S3Storage, proxy: S3Proxy) -> None:
    """The server gets all parts before it answers the first."""
    together = threading.Barrier(PARTS, timeout=60)

    def rule(request: Request) -> None:
        if request.operation == "UploadPart":
            together.wait()

    proxy.rule = rule
    sink = storage.create(NAME, len(CONTENT), sync=True)
    size = sink.part_bytes
    parts = [on_a_page(CONTENT[number * size : (number + 1) * size]) for number in range(PARTS)]
    with ThreadPoolExecutor(sink.concurrency) as pool:
        list(pool.map(sink.put_part, range(PARTS), parts))
    sink.complete()
    proxy.rule = lambda request: None
    assert proxy.most_at_once == PARTS
    assert read_range(storage, NAME, len(CONTENT)) == CONTENT


@pytest.mark.parametrize("nbytes", [1 << 30, 64 << 30, 100 << 30, 5 << 40])
def test_a_file_has_at_most_as_many_parts_as_s3_allows(storage: S3Storage, nbytes: int) -> None:
    """Parts have 8 MiB, except in files that are larger than `max_file_bytes`."""
    sink = storage.create(NAME, nbytes, sync=True)
    sink.abort()
    assert -(-nbytes // sink.part_bytes) <= 10_000
    assert (sink.part_bytes == 8 << 20) == (nbytes <= storage.max_file_bytes)


def test_parts_are_made_while_an_upload_is_begun(storage: S3Storage, proxy: S3Proxy) -> None:
    """Creating a sink does not wait for the start of the upload."""
    asked, go_on = threading.Event(), threading.Event()

    def rule(request: Request) -> None:
        if request.operation == "CreateMultipartUpload":
            asked.set()
            go_on.wait(60)

    proxy.rule = rule
    sink = storage.create(NAME, len(CONTENT), sync=True)
    assert asked.wait(60) and not go_on.is_set()
    go_on.set()
    sink.abort()


def test_metadata_that_exist_are_not_sent(storage: S3Storage, proxy: S3Proxy) -> None:
    """With replace=False the server is asked first, because some servers ignore conditional puts."""
    storage.put(".metadata", b"first", sync=True)
    proxy.forget()
    with pytest.raises(WriteError, match="must not be replaced"):
        storage.put(".metadata", b"second", sync=True, replace=False)
    assert proxy.counts() == {"HeadObject": 1}


# --- checksums -------------------------------------------------------------------------------------------------------


def checksums(proxy: S3Proxy, operation: str) -> list[str]:
    return [request.checksum for request in proxy.requests if request.operation == operation]


def test_parts_carry_their_checksums(storage: S3Storage, proxy: S3Proxy) -> None:
    """Each part has a CRC-32 that the server checks, also in a file of one part."""
    put_file(storage, NAME, CONTENT)
    put_file(storage, "small", b"123456789")
    size = storage.create("other", 0, sync=True).part_bytes
    parts = [CONTENT[start : start + size] for start in range(0, len(CONTENT), size)]
    expected = [base64.b64encode(zlib.crc32(part).to_bytes(4, "big")).decode() for part in parts]
    assert sorted(checksums(proxy, "UploadPart")) == sorted(expected)
    assert checksums(proxy, "PutObject") == ["y/Q5Jg=="]


@pytest.mark.parametrize(
    "options",
    [
        {"config_kwargs": {"request_checksum_calculation": "when_required"}},
        {"s3_additional_kwargs": {"ChecksumAlgorithm": "SHA256"}},
    ],
    ids=["none", "another"],
)
def test_checksums_are_as_the_user_wants_them(open_s3: Opener, proxy: S3Proxy, options: dict[str, Any]) -> None:
    """There is no CRC-32 if the user turns checksums off or chooses another algorithm."""
    put_file(open_s3(**options), NAME, b"123456789")
    assert checksums(proxy, "PutObject") == [""]


def test_completing_an_upload_repeats_checksums(open_s3: Opener, proxy: S3Proxy) -> None:
    """The parts' checksums complete the upload, as AWS requires for a chosen algorithm."""
    storage = open_s3(s3_additional_kwargs={"ChecksumAlgorithm": "SHA256"})
    answers = {"ETag": '"1"', "ChecksumSHA256": "abc", "ChecksumCRC32": "def", "ChecksumType": "COMPOSITE"}
    assert storage.part(answers) == {"ETag": '"1"', "ChecksumSHA256": "abc"}
    assert open_s3().part(answers) == {"ETag": '"1"'}
    put_file(storage, NAME, CONTENT)
    assert read_range(storage, NAME, len(CONTENT)) == CONTENT


# --- connections and credentials -------------------------------------------------------------------------------------


def test_connections_are_kept_from_one_save_to_the_next(open_s3: Opener, proxy: S3Proxy) -> None:
    """Storages with the same options share connections as long as a reference exists."""
    kept = open_s3().connection
    for _ in range(3):
        put_file(open_s3(), NAME, b"x")
    assert proxy.connections == 1
    open_s3(config_kwargs={"read_timeout": 77}).head(NAME)
    assert proxy.connections == 2
    del kept
    open_s3().head(NAME)
    open_s3().head(NAME)
    assert proxy.connections == 4


def test_a_denial_is_not_kept(s3: S3Server, proxy: S3Proxy, prefix: str) -> None:
    """After a denial, the next storage reads the corrected credentials."""
    url, options = f"s3://{s3.bucket}/{prefix}", {"endpoint_url": proxy.endpoint}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        first = open_storage(url, options)
        assert first.head(NAME) is None
        assert open_storage(url, options).connection is first.connection
        proxy.rule = once("HeadObject", Fault(403, "AccessDenied"))
        with pytest.raises(ReadError, match="403"):
            first.head(NAME)
        again = open_storage(url, options)
        assert again.connection is not first.connection
        assert again.head(NAME) is None
        patch.setenv("AWS_ACCESS_KEY_ID", OTHER_KEY)
        assert open_storage(url, options).connection is not again.connection


def test_credentials_that_have_expired_are_looked_up_again(
    s3: S3Server, proxy: S3Proxy, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a token expires during an upload, a new client uses the replaced credentials."""
    credentials = tmp_path / "credentials"

    def put_in_place(key: str) -> None:
        credentials.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {SECRET}\n")

    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    put_in_place(KEY)
    storage = open_storage(f"s3://{s3.bucket}/{prefix}", {"endpoint_url": proxy.endpoint})
    sink = storage.create(NAME, len(CONTENT), sync=True)
    sink.put_part(0, on_a_page(CONTENT[: sink.part_bytes]))
    put_in_place(OTHER_KEY)
    proxy.rule = lambda request: Fault(400, "ExpiredToken") if f"={KEY}/" in request.authorization else None
    for number in (1, 2):
        sink.put_part(number, on_a_page(CONTENT[number * sink.part_bytes : (number + 1) * sink.part_bytes]))
    sink.complete()
    assert storage.read(NAME) == CONTENT
    assert proxy.counts()["UploadPart"] == PARTS + 1


def test_keys_that_were_rotated_since_a_storage_was_opened(
    s3: S3Server, proxy: S3Proxy, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a denial, an open storage uses the credentials of the changed environment."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    storage = open_storage(f"s3://{s3.bucket}/{prefix}", {"endpoint_url": proxy.endpoint})
    storage.put(NAME, b"x", sync=True)
    proxy.rule = lambda request: Fault(403, "InvalidAccessKeyId") if f"={KEY}/" in request.authorization else None
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", OTHER_KEY)
    assert storage.read(NAME) == b"x"
    proxy.forget()
    assert storage.read(NAME) == b"x"
    assert proxy.counts() == {"GetObject": 1}


def test_anonymous_access(open_s3: Opener) -> None:
    """Anonymous requests have no signature, which this server refuses."""
    with pytest.raises(ReadError, match=r"AccessDenied.*\(GetObject\)"):
        open_s3(anon=True).read(".metadata")


# --- options ---------------------------------------------------------------------------------------------------------


def test_options_of_s3fs(open_s3: Opener, s3: S3Server, prefix: str) -> None:
    """Requests get the arguments that they accept, and options of aiobotocore alone are ignored."""
    storage = open_s3(
        s3_additional_kwargs={"ContentType": "application/x-tensors"},
        config_kwargs={"connector_args": {"keepalive_timeout": 30}, "s3": {"addressing_style": "path"}},
        requester_pays=True,
    )
    put_file(storage, NAME, CONTENT)
    assert read_range(storage, NAME, len(CONTENT)) == CONTENT
    head = s3.client().head_object(Bucket=s3.bucket, Key=f"{prefix}/{NAME}")
    assert head["ContentType"] == "application/x-tensors"


def test_a_session_of_the_users_goes_through_s3fs(s3: S3Server, prefix: str) -> None:
    """With a session of aiobotocore, s3fs streams the file."""
    import aiobotocore.session

    session = aiobotocore.session.AioSession()
    storage = open_storage(f"s3://{s3.bucket}/{prefix}", s3.options(session=session))
    put_file(storage, NAME, CONTENT)
    assert storage.read(NAME) == CONTENT
    assert isinstance(storage, StreamStorage)
    storage.filesystem.close_session(storage.filesystem.loop, storage.filesystem._s3creator)


def test_the_owner_of_an_object_is_known_whatever_the_case_of_the_header(
    storage: S3Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of an object is read whatever the case of its header, which servers in Go change."""
    file = storage.begin_shared(NAME, len(CONTENT), save_id="a" * 32)
    sink = storage.open_shared(file, sync=True)
    sink.put(0, on_a_page(CONTENT[: storage.granule_of(len(CONTENT))]))
    sink.complete()
    parts, original = sink.parts, storage.call
    storage.complete_shared(file, parts, replace=True)

    def titled(operation: str, name: str, **arguments: Any) -> Any:
        answer = original(operation, name, **arguments)
        return answer | {"Metadata": {key.title(): value for key, value in answer.get("Metadata", {}).items()}}

    monkeypatch.setattr(storage, "call", titled)
    assert storage.owner(NAME) == "a" * 32
    storage.complete_shared(file, parts, replace=True)  # again, because an answer was lost
    put_file(storage, NAME, b"another's")
    assert storage.owner(NAME) is None


# --- open uploads ----------------------------------------------------------------------------------------------------


def test_uploads_are_listed(storage: S3Storage, s3: S3Server, prefix: str) -> None:
    """Uploads to this directory and below are listed with their start, from several answers."""
    storage.uploads_per_page = 1
    names = [data_file_name(rank, 0, "b" * 32) for rank in range(3)]
    child = storage.child("step-1")
    begun = [where.create(name, len(CONTENT), sync=True) for where in (storage, child) for name in names]
    for sink in begun:
        sink.put_part(0, on_a_page(CONTENT[: sink.part_bytes]))  # which waits until the upload is in progress
    uploads = storage.uploads()
    assert sorted(file.name for file in uploads) == sorted([*names, *(f"step-1/{name}" for name in names)])
    assert all(file.modified is not None and abs(file.modified - time.time()) < 60 for file in uploads)
    storage.discard(*names)
    assert sorted(file.name for file in storage.uploads()) == [f"step-1/{name}" for name in names]
    assert sorted(file.name for file in child.uploads()) == names
    for sink in begun:
        sink.abort()
    assert child.uploads() == []


@pytest.mark.parametrize("fault", [Fault(403, "AccessDenied"), Fault(501, "NotImplemented")], ids=["denied", "unknown"])
def test_discarding_where_uploads_cannot_be_listed(storage: S3Storage, proxy: S3Proxy, fault: Fault) -> None:
    """If uploads cannot be listed, the objects are removed."""
    put_file(storage, NAME, b"x")
    proxy.rule = always("ListMultipartUploads", fault)
    storage.discard(NAME)
    assert storage.head(NAME) is None
    with pytest.raises(ReadError, match=f"cannot list the uploads to {storage.path}.*{fault.code}"):
        storage.uploads()


@pytest.mark.parametrize("expected", [None, b"old"])
def test_a_server_without_conditional_writes(storage: S3Storage, proxy: S3Proxy, expected: bytes | None) -> None:
    """If the server has no conditional writes, the object is put without a condition, after the check."""
    if expected is not None:
        storage.put("record", expected, sync=True)
    proxy.rule = once("PutObject", Fault(501, "NotImplemented"))
    assert storage.put_if("record", expected, b"new")
    assert storage.read("record") == b"new"
    assert not storage.put_if("record", expected, b"newer")
