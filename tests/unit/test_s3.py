"""What S3 costs, and what happens when it misbehaves: what is tried again, what is not, and what is left behind.

The server is a real one; what goes wrong is done by a proxy in front of it.
"""

from __future__ import annotations

import base64
import itertools
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dcp_tensorizer import ReadError, WriteError
from dcp_tensorizer._format.layout import data_file_name
from dcp_tensorizer._storage import retry
from dcp_tensorizer._storage import s3 as s3_module
from dcp_tensorizer._storage.base import TIMEOUT, Refused
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._storage.retry import patience_of
from dcp_tensorizer._storage.s3 import S3Storage, _S3Reader

from ..proxy import Fault, Request, S3Proxy, s3_proxy
from ..servers import KEY, OTHER_KEY, SECRET, S3Server
from .support import on_a_page, put_file

NAME = data_file_name(0, 0, "a" * 32)
CONTENT = bytes(range(251)) * (20 * (1 << 20) // 251)  # of three parts
PARTS = 3
_BUSY = 2.0  # seconds that a busy machine may take longer


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[S3Proxy]:
    with s3_proxy(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture
def prefix(s3: S3Server) -> Iterator[str]:
    """A fresh one, below which no upload is left open in the end."""
    name = uuid.uuid4().hex
    yield name
    assert s3.uploads(name) == []


Opener = Callable[..., S3Storage]


@pytest.fixture
def opened(s3: S3Server, proxy: S3Proxy, prefix: str) -> Opener:
    """Opens the prefix by way of the proxy."""

    def opened(timeout: float = TIMEOUT, **options: Any) -> S3Storage:
        storage = open_storage(f"s3://{s3.bucket}/{prefix}", s3.options(proxy.endpoint, **options), timeout)
        assert isinstance(storage, S3Storage)
        return storage

    return opened


@pytest.fixture
def storage(opened: Opener) -> S3Storage:
    return opened()


def once(operation: str, fault: Fault, times: int = 1) -> Callable[[Request], Fault | None]:
    """A rule for the first requests of an operation."""
    left = itertools.count(times, -1)
    return lambda request: fault if request.operation == operation and next(left) > 0 else None


def always(operation: str, fault: Fault) -> Callable[[Request], Fault | None]:
    return lambda request: fault if request.operation == operation else None


def read(storage: S3Storage, size: int = len(CONTENT), offset: int = 0) -> bytes:
    buffer = bytearray(size)
    reader = storage.open(NAME)
    reader.read_into([memoryview(buffer)[: size // 3], memoryview(buffer)[size // 3 :]], offset)
    reader.close()
    return bytes(buffer)


# --- what it costs ---------------------------------------------------------------------------------------------------


def test_requests_of_a_large_file(storage: S3Storage, proxy: S3Proxy) -> None:
    """A multipart upload and its parts; opening and making a directory cost nothing."""
    storage.make_directory()
    put_file(storage, NAME, CONTENT)
    storage.sync_directory()
    assert proxy.counts() == {"CreateMultipartUpload": 1, "UploadPart": PARTS, "CompleteMultipartUpload": 1}


def test_requests_of_small_files(storage: S3Storage, proxy: S3Proxy) -> None:
    """One each to write, read, ask for, and remove; none of them lists anything."""
    put_file(storage, NAME, b"small")
    storage.put(".metadata", b"m", sync=True)
    assert proxy.counts() == {"PutObject": 2}
    proxy.forget()
    assert (storage.read(".metadata"), storage.read("missing")) == (b"m", None)
    assert (storage.head(NAME), storage.head("missing")) == (5, None)
    storage.remove(NAME, ".metadata", "missing")
    assert proxy.counts() == {"GetObject": 2, "HeadObject": 2, "DeleteObject": 3}


def test_a_range_is_one_request(storage: S3Storage, proxy: S3Proxy) -> None:
    """However many buffers it fills; nothing is asked for where nothing is wanted."""
    put_file(storage, NAME, CONTENT)
    proxy.forget()
    assert read(storage, 10_000_001, 12345) == CONTENT[12345 : 12345 + 10_000_001]
    storage.open(NAME).read_into([], 5)
    assert proxy.counts() == {"GetObject": 1}


def test_parts_are_sent_at_once(storage: S3Storage, proxy: S3Proxy) -> None:
    """Several are in flight: the server gets the next ones while it has not answered the first."""
    together = threading.Barrier(PARTS, timeout=30)

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
    assert read(storage) == CONTENT


@pytest.mark.parametrize("nbytes", [1 << 30, 64 << 30, 100 << 30, 5 << 40])
def test_a_file_has_at_most_as_many_parts_as_s3_allows(storage: S3Storage, nbytes: int) -> None:
    """Up to what a file should hold they are of 8 MiB; the parts of a larger tensor grow."""
    sink = storage.create(NAME, nbytes, sync=True)
    sink.abort()
    assert -(-nbytes // sink.part_bytes) <= 10_000
    assert (sink.part_bytes == 8 << 20) == (nbytes <= storage.max_file_bytes)


# --- what may pass ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"])
@pytest.mark.parametrize(
    "fault",
    [
        Fault(503, "SlowDown"),
        Fault(500, "InternalError"),
        Fault(cut=0),
        Fault(lose_answer=True),
    ],
    ids=["slow down", "internal error", "reset", "lost answer"],
)
def test_an_upload_survives(storage: S3Storage, proxy: S3Proxy, operation: str, fault: Fault) -> None:
    """Overload and lost connections, at each step: the file is whole, at the price of a few more requests.

    An answer that was lost may have been that to another upload: it is not left open.
    """
    proxy.rule = once(operation, fault)
    put_file(storage, NAME, CONTENT)
    assert read(storage) == CONTENT
    assert proxy.counts()[operation] > {"UploadPart": PARTS}.get(operation, 1)


def test_an_upload_survives_a_cut_in_the_middle_of_a_part(storage: S3Storage, proxy: S3Proxy) -> None:
    """The part is sent again from its beginning."""
    proxy.rule = once("UploadPart", Fault(cut=3 << 20))
    put_file(storage, NAME, CONTENT)
    assert read(storage) == CONTENT
    assert proxy.counts()["UploadPart"] == PARTS + 1


def test_a_slow_link_is_no_fault(opened: Opener, proxy: S3Proxy) -> None:
    """A part may take longer than a silence may, as long as it gets on.

    It is silent, too, while the last megabytes are on their way through the buffers between client and server.
    """
    timeout = 24.0
    storage = opened(timeout=timeout, config_kwargs={"retries": {"total_max_attempts": 1}})
    proxy.rule = always("UploadPart", Fault(rate=3e6))
    started = time.monotonic()
    put_file(storage, NAME, CONTENT)
    # Two whole parts, one after the other, and a short one.
    assert time.monotonic() - started > 2 * patience_of(timeout)
    proxy.rule = always("GetObject", Fault(rate=5e6))
    started = time.monotonic()
    assert read(storage) == CONTENT
    assert time.monotonic() - started > patience_of(timeout)
    assert (proxy.counts()["UploadPart"], proxy.counts()["GetObject"]) == (PARTS, 1)


@pytest.mark.parametrize(
    "fault",
    [Fault(503, "SlowDown"), Fault(cut=0), Fault(cut=5 << 20), Fault(stall=5 << 20), Fault(stall=0)],
    ids=["slow down", "reset", "cut", "stall in the body", "stall before it"],
)
def test_a_read_survives(opened: Opener, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Overload, a reset before and within the body, a server that falls silent: the rest is asked for, once.

    Silence is long when it takes a tenth of the time after which all is given up.
    """
    monkeypatch.setattr(retry, "_FIRST_WAIT", 0.0)
    storage = opened(timeout=10.0)
    put_file(storage, NAME, CONTENT)
    proxy.rule = once("GetObject", fault)
    proxy.forget()
    assert read(storage) == CONTENT
    assert proxy.counts() == {"GetObject": 2}


def test_a_read_goes_on_where_it_broke_off(storage: S3Storage, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that break off again and again bring it to its end all the same, and nothing twice."""
    monkeypatch.setattr(retry, "_FIRST_WAIT", 0.0)
    put_file(storage, NAME, CONTENT)
    proxy.forget()
    proxy.rule = once("GetObject", Fault(cut=4 << 20), times=4)
    assert read(storage) == CONTENT
    assert proxy.counts() == {"GetObject": 5}


def test_an_aborted_upload_whose_first_answer_was_lost(storage: S3Storage, proxy: S3Proxy) -> None:
    """Nothing is left of either one, which the fixture sees."""
    proxy.rule = once("CreateMultipartUpload", Fault(lose_answer=True))
    storage.create(NAME, len(CONTENT), sync=True).abort()
    assert proxy.counts()["CreateMultipartUpload"] == 2


def test_an_upload_whose_beginning_is_never_answered(opened: Opener, proxy: S3Proxy) -> None:
    """Whoever needs it gets the error, and what the server has begun is aborted, which the fixture sees."""
    proxy.rule = always("CreateMultipartUpload", Fault(lose_answer=True))
    sink = opened(timeout=5).create(NAME, len(CONTENT), sync=True)
    with pytest.raises(OSError, match="Connection"):
        sink.put_part(0, on_a_page(CONTENT[: sink.part_bytes]))
    sink.abort()
    assert proxy.counts()["CreateMultipartUpload"] > 1 and "UploadPart" not in proxy.counts()


def test_parts_are_made_while_an_upload_is_begun(storage: S3Storage, proxy: S3Proxy) -> None:
    """The request has not been answered when there is a sink to fill parts for."""
    asked, go_on = threading.Event(), threading.Event()

    def rule(request: Request) -> None:
        if request.operation == "CreateMultipartUpload":
            asked.set()
            go_on.wait(30)

    proxy.rule = rule
    sink = storage.create(NAME, len(CONTENT), sync=True)
    assert asked.wait(30) and not go_on.is_set()
    go_on.set()
    sink.abort()


def checksums(proxy: S3Proxy, operation: str) -> list[str]:
    return [request.checksum for request in proxy.requests if request.operation == operation]


def test_parts_carry_their_checksums(storage: S3Storage, proxy: S3Proxy) -> None:
    """The CRC-32 of each, which the server looks at; also of a file of one part."""
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
def test_checksums_are_as_the_user_wants_them(opened: Opener, proxy: S3Proxy, options: dict[str, Any]) -> None:
    """None for servers that do not know them, or another algorithm's."""
    put_file(opened(**options), NAME, b"123456789")
    assert checksums(proxy, "PutObject") == [""]


def test_checksums_of_parts_are_said_again_when_they_are_put_together(opened: Opener, proxy: S3Proxy) -> None:
    """As AWS wants it when the user has chosen an algorithm."""
    storage = opened(s3_additional_kwargs={"ChecksumAlgorithm": "SHA256"})
    answers = {"ETag": '"1"', "ChecksumSHA256": "abc", "ChecksumCRC32": "def", "ChecksumType": "COMPOSITE"}
    assert storage.part(answers) == {"ETag": '"1"', "ChecksumSHA256": "abc"}
    assert opened().part(answers) == {"ETag": '"1"'}
    put_file(storage, NAME, CONTENT)
    assert read(storage) == CONTENT


def test_connections_are_kept_from_one_save_to_the_next(opened: Opener, proxy: S3Proxy) -> None:
    """As long as somebody keeps a storage's. Other options have connections of their own."""
    kept = opened().connection
    for _ in range(3):
        put_file(opened(), NAME, b"x")
    assert proxy.connections == 1
    opened(config_kwargs={"read_timeout": 77}).head(NAME)
    assert proxy.connections == 2
    del kept
    opened().head(NAME)
    opened().head(NAME)
    assert proxy.connections == 4


def test_a_denial_is_not_kept(s3: S3Server, proxy: S3Proxy, prefix: str) -> None:
    """Who has been refused may mend the credentials and try again, in the same process."""
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


@pytest.mark.parametrize("replace", [True, False])
def test_metadata_whose_answer_is_lost_is_published(storage: S3Storage, proxy: S3Proxy, replace: bool) -> None:
    """The second request meets the object of the first, and knows it."""
    proxy.rule = once("PutObject", Fault(lose_answer=True))
    storage.put(".metadata", b"whole", sync=True, replace=replace)
    assert storage.read(".metadata") == b"whole"


def test_credentials_that_have_expired_are_looked_up_again(
    s3: S3Server, proxy: S3Proxy, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mid-upload a fresh client finds those that have been put in place meanwhile."""
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


# --- what will not pass ----------------------------------------------------------------------------------------------

FEW = {"retries": {"total_max_attempts": 2}, "read_timeout": 1, "connect_timeout": 1}


@pytest.mark.parametrize(
    ("fault", "tries", "error", "said"),
    [
        (Fault(403, "AccessDenied"), 1, PermissionError, r"AccessDenied: injected \(UploadPart, tried 1 times\)"),
        (Fault(404, "NoSuchBucket"), 1, FileNotFoundError, "the bucket 'tests-bucket' does not exist"),
        (Fault(400, "ExpiredToken"), 2, PermissionError, "ExpiredToken"),
        (Fault(503, "SlowDown"), 2, OSError, r"SlowDown: injected \(UploadPart, tried 2 times\)"),
        (Fault(cut=1 << 20), 2, OSError, "Connection"),
    ],
    ids=["denied", "no bucket", "expired", "slow down", "cut"],
)
def test_a_part_that_is_refused(
    opened: Opener, s3: S3Server, prefix: str, proxy: S3Proxy, fault: Fault, tries: int, error: Any, said: str
) -> None:
    """Denials are final, faults are once their tries are used up; the error says which, and no upload is left."""
    storage = opened(config_kwargs=FEW)
    sink = storage.create(NAME, len(CONTENT), sync=True)
    proxy.rule = always("UploadPart", fault)
    with pytest.raises(error, match=said):
        sink.put_part(0, on_a_page(CONTENT[: sink.part_bytes]))
    assert proxy.counts()["UploadPart"] == tries
    sink.abort()
    assert s3.uploads(prefix) == []
    assert storage.head(NAME) is None


def test_an_upload_that_cannot_be_completed_leaves_nothing(
    opened: Opener, s3: S3Server, prefix: str, proxy: S3Proxy
) -> None:
    """The parts are dropped by aborting, for which closing leaves the time."""
    storage = opened(config_kwargs=FEW)
    proxy.rule = always("CompleteMultipartUpload", Fault(500, "InternalError"))
    sink = storage.create(NAME, len(CONTENT), sync=True)
    for number in range(PARTS):
        sink.put_part(number, on_a_page(CONTENT[number * sink.part_bytes : (number + 1) * sink.part_bytes]))
    with pytest.raises(OSError, match="InternalError"):
        sink.complete()
    sink.abort()
    assert (s3.uploads(prefix), s3.objects(prefix)) == ([], [])


@pytest.mark.parametrize("fault", [Fault(403, "AccessDenied"), Fault(503, "SlowDown")], ids=["denied", "slow down"])
def test_a_read_that_is_refused(opened: Opener, proxy: S3Proxy, fault: Fault) -> None:
    """The errors name path and cause, and no secret."""
    storage = opened(config_kwargs=FEW)
    put_file(storage, NAME, b"x" * 100)
    proxy.rule = lambda request: fault
    with pytest.raises(OSError, match=fault.code):
        read(storage, 10)
    for call in (lambda: storage.read(".metadata"), lambda: storage.head(NAME)):
        with pytest.raises(ReadError, match=rf"cannot read {storage.path}/.*({fault.code}|{fault.status})") as caught:
            call()
        assert SECRET not in str(caught.value)
        assert caught.value.__suppress_context__
    with pytest.raises(WriteError, match=rf"{storage.path}/\.metadata.*{fault.code}"):
        storage.put(".metadata", b"x", sync=True)


@pytest.mark.parametrize(
    ("faults", "refused"),
    [
        ([Fault(403, "AccessDenied")], True),
        ([Fault(404, "NoSuchBucket")], True),
        ([Fault(503, "SlowDown"), Fault(503, "SlowDown")], False),
        ([Fault(cut=0), Fault(403, "AccessDenied")], False),
    ],
    ids=["denied", "no bucket", "slow down", "denied after a cut"],
)
def test_whether_metadata_may_be_there_after_all(
    opened: Opener, proxy: S3Proxy, faults: list[Fault], refused: bool
) -> None:
    """The server has refused them if it says so to the first request; otherwise one may be carried out unanswered."""
    storage = opened(config_kwargs=FEW)
    left = iter(faults)
    proxy.rule = lambda request: next(left) if request.operation == "PutObject" else None
    with pytest.raises(WriteError) as caught:
        storage.put(".metadata", b"x", sync=True)
    assert isinstance(caught.value, Refused) == refused
    assert next(left, None) is None


def test_a_connection_that_always_breaks_off_is_an_error(
    opened: Opener, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After six bodies in a row that end too early."""
    monkeypatch.setattr(retry, "_FIRST_WAIT", 0.0)
    storage = opened()
    put_file(storage, NAME, CONTENT)
    proxy.forget()
    proxy.rule = always("GetObject", Fault(cut=1000))
    with pytest.raises(OSError, match="the connection broke off again and again"):
        read(storage)
    assert proxy.counts() == {"GetObject": 6}


@pytest.mark.parametrize("fault", [Fault(403, "AccessDenied"), Fault(501, "NotImplemented")], ids=["denied", "unknown"])
def test_discarding_where_uploads_cannot_be_listed(storage: S3Storage, proxy: S3Proxy, fault: Fault) -> None:
    """The objects are removed all the same."""
    put_file(storage, NAME, b"x")
    proxy.rule = always("ListMultipartUploads", fault)
    storage.discard(NAME)
    assert storage.head(NAME) is None
    with pytest.raises(ReadError, match=f"cannot list the uploads to {storage.path}.*{fault.code}"):
        storage.uploads()


def test_metadata_that_are_there_are_not_even_sent(storage: S3Storage, proxy: S3Proxy) -> None:
    """Not all servers know conditional puts: with overwrite=False they are asked first."""
    storage.put(".metadata", b"first", sync=True)
    proxy.forget()
    with pytest.raises(WriteError, match="must not be replaced"):
        storage.put(".metadata", b"second", sync=True, replace=False)
    assert proxy.counts() == {"HeadObject": 1}


HANGING = {
    "write": ("UploadPart", Fault(hang=True)),
    "metadata": ("PutObject", Fault(hang=True)),
    "read": ("GetObject", Fault(hang=True)),
    "read on": ("GetObject", Fault(stall=1000)),
}


@pytest.mark.parametrize("what", HANGING)
def test_a_server_that_hangs(opened: Opener, proxy: S3Proxy, what: str) -> None:
    """Whatever is asked of it ends in an error within the timeout, after another try or more."""
    limit = 3.0
    storage = opened(timeout=limit)
    put_file(storage, NAME, CONTENT[:10_000])
    sink = storage.create("other", len(CONTENT), sync=True)
    part = on_a_page(CONTENT[: sink.part_bytes])
    operation, fault = HANGING[what]
    calls: dict[str, Callable[[], object]] = {
        "write": lambda: sink.put_part(0, part),
        "metadata": lambda: storage.put(".metadata", b"x", sync=True),
        "read": lambda: read(storage, 10_000),
        "read on": lambda: read(storage, 10_000),
    }
    proxy.forget()
    proxy.rule = always(operation, fault)
    started = time.monotonic()
    with pytest.raises((OSError, WriteError)):
        calls[what]()
    assert time.monotonic() - started < limit + _BUSY
    assert proxy.counts()[operation] >= 2
    sink.abort()


def test_a_server_that_is_gone(s3: S3Server, prefix: str) -> None:
    """Its address is in the error."""
    with s3_proxy(s3.endpoint) as proxy:
        endpoint = proxy.endpoint
    storage = open_storage(f"s3://{s3.bucket}/{prefix}", s3.options(endpoint, config_kwargs=FEW))
    with pytest.raises(ReadError, match=f"Could not connect to the endpoint URL.*{endpoint}"):
        storage.read(".metadata")


def test_wrong_credentials(s3: S3Server, prefix: str) -> None:
    """The error says so, without them."""
    storage = open_storage(f"s3://{s3.bucket}/{prefix}", s3.options() | {"secret": "wrong-secret-42"})
    with pytest.raises(ReadError, match="SignatureDoesNotMatch") as caught:
        storage.read(".metadata")
    assert "wrong-secret-42" not in str(caught.value)


# --- uploads that nobody completes -----------------------------------------------------------------------------------


def test_uploads_are_listed(storage: S3Storage, s3: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this directory, in as many answers as it takes, with the time when they were begun."""
    monkeypatch.setattr(s3_module, "_UPLOADS", 1)
    names = [data_file_name(rank, 0, "b" * 32) for rank in range(3)]
    child = storage.child("step-1")
    begun = [where.create(name, len(CONTENT), sync=True) for where in (storage, child) for name in names]
    for sink in begun:
        sink.put_part(0, on_a_page(CONTENT[: sink.part_bytes]))  # which waits until the upload is under way
    found = storage.uploads()
    assert sorted(file.name for file in found) == names
    assert all(file.modified is not None and abs(file.modified - time.time()) < 60 for file in found)
    storage.discard(*names)
    assert storage.uploads() == []
    assert len(child.uploads()) == 3
    for sink in begun:
        sink.abort()
    assert child.uploads() == []


# --- options ---------------------------------------------------------------------------------------------------------


def test_what_s3fs_takes_is_taken(opened: Opener, s3: S3Server, prefix: str) -> None:
    """Arguments for requests go with those that know them; what only aiobotocore knows is left out."""
    storage = opened(
        s3_additional_kwargs={"ContentType": "application/x-tensors"},
        config_kwargs={"connector_args": {"keepalive_timeout": 30}, "s3": {"addressing_style": "path"}},
        requester_pays=True,
    )
    put_file(storage, NAME, CONTENT)
    assert read(storage) == CONTENT
    found = s3.client().head_object(Bucket=s3.bucket, Key=f"{prefix}/{NAME}")
    assert found["ContentType"] == "application/x-tensors"


def test_anonymous_access(opened: Opener) -> None:
    """Without a signature, which this server refuses."""
    with pytest.raises(ReadError, match=r"AccessDenied.*GetObject, tried 1 times"):
        opened(anon=True).read(".metadata")


def test_an_s3_session_of_ones_own_goes_through_s3fs(s3: S3Server, prefix: str) -> None:
    """Such a session is aiobotocore's: s3fs streams the file, which is the same."""
    import aiobotocore.session

    session = aiobotocore.session.AioSession()
    storage = open_storage(f"s3://{s3.bucket}/{prefix}", s3.options(session=session))
    put_file(storage, NAME, CONTENT)
    assert storage.read(NAME) == CONTENT
    assert not isinstance(storage, S3Storage)
    storage._filesystem.close_session(storage._filesystem.loop, storage._filesystem._s3creator)  # type: ignore[attr-defined]


def test_a_server_that_ignores_ranges_is_an_error() -> None:
    """And not the wrong bytes."""

    class Body:
        closed = False

        def close(self) -> None:
            self.closed = True

    class Stub:
        timeout = 1.0
        body = Body()

        def call(self, operation: str, name: str, **arguments: Any) -> Any:
            return {"Body": self.body, "ContentLength": 100}

    stub = Stub()
    with pytest.raises(OSError, match="a range"):
        _S3Reader(stub, "x").read_into([memoryview(bytearray(10))], 5)  # type: ignore[arg-type]
    assert stub.body.closed
