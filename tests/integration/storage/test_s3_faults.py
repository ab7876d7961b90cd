"""What S3 storage does when requests fail: what it repeats, what it reports, and what it leaves behind.

The server is real. A proxy in front of it makes requests fail.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import ReadError, TensorizerStorageWriter, WriteError
from dcp_tensorizer._storage.base import Refused, SharedFile
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._storage.remote import Retries, silence_timeout
from dcp_tensorizer._storage.s3 import S3Storage
from dcp_tensorizer._tensor_file.names import data_file_name
from dcp_tensorizer.testing import on_a_page, put_file
from dcp_tensorizer.tools import verify

from ...lab.faults import Fault, S3Proxy, always, once, s3_proxy
from ...lab.seams import read_range
from ...lab.servers import SECRET, S3Server

NAME = data_file_name(0, 0, "a" * 32)
CONTENT = bytes(range(251)) * (20 * (1 << 20) // 251)  # three parts
PARTS = 3

Opener = Callable[..., S3Storage]
FEW = {"retries": {"total_max_attempts": 2}}  # for config_kwargs


# --- failures that pass ----------------------------------------------------------------------------------------------


def test_a_slow_link_is_no_fault(open_s3: Opener, proxy: S3Proxy) -> None:
    """A part may take longer than the allowed silence, as long as there is progress."""
    # The connection is silent while the last megabytes pass the buffers between client and server.
    timeout = 24.0
    storage = open_s3(timeout=timeout, config_kwargs={"retries": {"total_max_attempts": 1}})
    proxy.rule = always("UploadPart", Fault(rate=3e6))
    started = time.monotonic()
    put_file(storage, NAME, CONTENT)
    # There are two whole parts, one after the other, and a short one.
    assert time.monotonic() - started > 2 * silence_timeout(timeout)
    proxy.rule = always("GetObject", Fault(rate=5e6))
    started = time.monotonic()
    assert read_range(storage, NAME, len(CONTENT)) == CONTENT
    assert time.monotonic() - started > silence_timeout(timeout)
    assert (proxy.counts()["UploadPart"], proxy.counts()["GetObject"]) == (PARTS, 1)


@pytest.mark.parametrize("fault", [Fault(stall=5 << 20), Fault(stall=0)], ids=["in the body", "before it"])
def test_a_read_survives_silence(open_s3: Opener, proxy: S3Proxy, fault: Fault) -> None:
    """The rest is requested once, after a silence of a tenth of the timeout."""
    storage = open_s3(timeout=10.0)
    put_file(storage, NAME, CONTENT)
    proxy.rule = once("GetObject", fault)
    proxy.forget()
    assert read_range(storage, NAME, len(CONTENT)) == CONTENT
    assert proxy.counts() == {"GetObject": 2}


def test_a_read_goes_on_where_it_broke_off(storage: S3Storage, proxy: S3Proxy) -> None:
    """A read over connections that keep breaking is completed, and no byte is requested twice."""
    put_file(storage, NAME, CONTENT)
    proxy.forget()
    proxy.rule = once("GetObject", Fault(cut=4 << 20), times=4)
    assert read_range(storage, NAME, len(CONTENT)) == CONTENT
    assert proxy.counts() == {"GetObject": 5}


@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "PutObject"])
@pytest.mark.parametrize(
    "fault",
    [Fault(503, "SlowDown"), Fault(cut=0), Fault(lose_answer=True)],
    ids=["slow down", "reset", "lost answer"],
)
def test_an_outage_that_outlasts_six_attempts(open_s3: Opener, proxy: S3Proxy, operation: str, fault: Fault) -> None:
    """A request for a data file is retried until the timeout, and no upload is left (see `prefix`)."""
    storage = open_s3()
    assert storage.head(NAME) is None
    content = CONTENT if operation != "PutObject" else CONTENT[:1000]
    proxy.rule = once(operation, fault, times=8)
    put_file(storage, NAME, content)
    assert storage.read(NAME) == content
    if (operation, fault.lose_answer) != (
        "CompleteMultipartUpload",
        True,
    ):  # the server has completed it the first time
        assert proxy.counts()[operation] > 8


def test_an_upload_given_up_in_an_outage(open_s3: Opener, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """`abort` does not wait for the start of the upload until the timeout, and aborts a started upload."""
    storage = open_s3()
    assert storage.head(NAME) is None
    is_tried, is_aborted = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:  # between two attempts
        is_tried.set()
        is_aborted.wait()

    storage.retries = dataclasses.replace(storage.retries, sleep=sleep)
    proxy.rule = once("CreateMultipartUpload", Fault(lose_answer=True), times=6)
    sink = storage.create(NAME, len(CONTENT), sync=True)
    is_tried.wait()
    monkeypatch.setattr(sink, "_abort", lambda abort=sink._abort: (is_aborted.set(), abort()))
    sink.abort()
    assert proxy.counts()["CreateMultipartUpload"] == 1


def test_a_server_that_has_never_answered(s3: S3Server, prefix: str) -> None:
    """If the server has never answered, the first part fails after six attempts, not at the timeout."""
    with s3_proxy(s3.endpoint) as proxy:
        endpoint = proxy.endpoint
    storage = open_storage(f"s3://{s3.bucket}/{prefix}", s3.options(endpoint))
    assert isinstance(storage, S3Storage)
    waits: list[float] = []
    storage.retries = dataclasses.replace(storage.retries, sleep=waits.append)
    sink = storage.create(NAME, len(CONTENT), sync=True)
    with pytest.raises(ConnectionError, match=f"Could not connect to the endpoint URL.*{endpoint}"):
        sink.put_part(0, on_a_page(CONTENT[: sink.part_bytes]))
    assert len(waits) == 5
    sink.abort()


def test_the_clean_up_after_an_outage_is_short(s3: S3Server, prefix: str) -> None:
    """If a part fails although it was retried, each request of the clean-up is retried for a tenth of the timeout."""
    with s3_proxy(s3.endpoint) as proxy:
        endpoint = proxy.endpoint
    storage = open_storage(f"s3://{s3.bucket}/{prefix}", s3.options(endpoint), timeout=10.0)
    assert isinstance(storage, S3Storage)
    waits: list[float] = []
    storage.retries = dataclasses.replace(storage.retries, clock=lambda: sum(waits), sleep=waits.append)
    sink = storage.create(NAME, 1000, sync=True)
    with pytest.raises(ConnectionError, match="Could not connect to the endpoint URL"):
        sink.put_part(0, on_a_page(CONTENT[:1000]))
    assert 3 < sum(waits) <= 8
    waits.clear()
    sink.abort()
    with pytest.raises(ConnectionError, match="Could not connect to the endpoint URL"):
        storage.discard(NAME)
    assert sum(waits) <= 3 * 0.8  # one removal by `abort`, the list of uploads, and the removal


def test_a_read_outlasts_bodies_that_break_off(open_s3: Opener, proxy: S3Proxy) -> None:
    """A read is resumed until the timeout, however often its body breaks off."""
    storage = open_s3()
    put_file(storage, NAME, CONTENT)
    proxy.forget()
    proxy.rule = once("GetObject", Fault(cut=1000), times=30)
    assert read_range(storage, NAME, len(CONTENT)) == CONTENT
    assert proxy.counts() == {"GetObject": 31}


def test_an_aborted_upload_whose_first_answer_was_lost(storage: S3Storage, proxy: S3Proxy) -> None:
    """Both uploads are aborted, also the one whose id was lost (see `prefix`)."""
    proxy.rule = once("CreateMultipartUpload", Fault(lose_answer=True))
    storage.create(NAME, len(CONTENT), sync=True).abort()
    assert proxy.counts()["CreateMultipartUpload"] in (1, 2)  # it is not begun again after `abort`


def test_an_upload_whose_start_is_never_answered(open_s3: Opener, proxy: S3Proxy) -> None:
    """The first part raises the error, and the uploads are aborted (see `prefix`)."""
    proxy.rule = always("CreateMultipartUpload", Fault(lose_answer=True))
    sink = open_s3(config_kwargs=FEW).create(NAME, len(CONTENT), sync=True)
    with pytest.raises(OSError, match="Connection"):
        sink.put_part(0, on_a_page(CONTENT[: sink.part_bytes]))
    sink.abort()
    assert proxy.counts()["CreateMultipartUpload"] == 2
    assert "UploadPart" not in proxy.counts()


# --- failures that stay ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "tries", "error", "said"),
    [
        (Fault(403, "AccessDenied"), 1, PermissionError, r"AccessDenied: injected \(UploadPart\)"),
        (Fault(404, "NoSuchBucket"), 1, FileNotFoundError, "the bucket 'tests-bucket' does not exist"),
        (Fault(400, "ExpiredToken"), 2, PermissionError, "ExpiredToken"),
        (Fault(503, "SlowDown"), 2, OSError, r"SlowDown: injected \(UploadPart\)"),
        (Fault(cut=1 << 20), 2, OSError, "Connection"),
    ],
    ids=["denied", "no bucket", "expired", "slow down", "cut"],
)
def test_a_part_that_is_refused(
    open_s3: Opener, s3: S3Server, prefix: str, proxy: S3Proxy, fault: Fault, tries: int, error: Any, said: str
) -> None:
    """Denials are final and faults are retried. The error names the cause, and no upload is left."""
    storage = open_s3(config_kwargs=FEW)
    sink = storage.create(NAME, len(CONTENT), sync=True)
    proxy.rule = always("UploadPart", fault)
    with pytest.raises(error, match=said):
        sink.put_part(0, on_a_page(CONTENT[: sink.part_bytes]))
    assert proxy.counts()["UploadPart"] == tries
    sink.abort()
    assert s3.uploads(prefix) == []
    assert storage.head(NAME) is None


def test_an_upload_that_cannot_be_completed_leaves_nothing(
    open_s3: Opener, s3: S3Server, prefix: str, proxy: S3Proxy
) -> None:
    """If an upload cannot be completed, `abort` removes its parts."""
    storage = open_s3(config_kwargs=FEW)
    proxy.rule = always("CompleteMultipartUpload", Fault(500, "InternalError"))
    sink = storage.create(NAME, len(CONTENT), sync=True)
    for number in range(PARTS):
        sink.put_part(number, on_a_page(CONTENT[number * sink.part_bytes : (number + 1) * sink.part_bytes]))
    with pytest.raises(OSError, match="InternalError"):
        sink.complete()
    sink.abort()
    assert (s3.uploads(prefix), s3.objects(prefix)) == ([], [])


def test_an_upload_that_another_job_has_aborted(storage: S3Storage) -> None:
    """The object of another job is not taken for the own one, although it has the same name and size."""
    sink = storage.create(NAME, len(CONTENT), sync=True)
    for number in range(PARTS):
        sink.put_part(number, on_a_page(CONTENT[number * sink.part_bytes : (number + 1) * sink.part_bytes]))
    storage.discard(NAME)
    put_file(storage, NAME, CONTENT[::-1])
    with pytest.raises(OSError, match="NoSuchUpload"):
        sink.complete()
    sink.abort()
    assert storage.read(NAME) == CONTENT[::-1]


def test_a_shared_file_that_is_gone_is_aborted(storage: S3Storage, proxy: S3Proxy) -> None:
    """An upload that is gone counts as aborted, as on AWS, and other errors are raised."""
    file = storage.begin_shared("m.safetensors", len(CONTENT), save_id="a" * 32)
    storage.abort_shared(file)
    proxy.rule = once("AbortMultipartUpload", Fault(404, "NoSuchUpload"))
    storage.abort_shared(file)
    proxy.rule = once("AbortMultipartUpload", Fault(403, "AccessDenied"))
    with pytest.raises(PermissionError, match="AccessDenied"):
        storage.abort_shared(file)


def test_shared_files_of_a_name_are_aborted_without_their_tokens(storage: S3Storage, proxy: S3Proxy) -> None:
    """All uploads to that name alone are aborted. If the answers to their start are lost, none is left."""
    for name in ("m.safetensors", "m.safetensors", "m.safetensors2"):
        storage.begin_shared(name, len(CONTENT), save_id="a" * 32)
    storage.abort_shared(SharedFile("m.safetensors", "", 0, ""))
    assert [upload.name for upload in storage.uploads()] == ["m.safetensors2"]
    storage.discard("m.safetensors2")
    answers = iter([Fault(lose_answer=True)])
    proxy.rule = lambda request: (
        next(answers, Fault(403, "AccessDenied")) if request.operation == "CreateMultipartUpload" else None
    )
    with pytest.raises(OSError, match="AccessDenied"):
        storage.begin_shared("m.safetensors", len(CONTENT), save_id="a" * 32)
    assert storage.uploads() == []


def test_a_shared_file_that_another_save_has_aborted(storage: S3Storage) -> None:
    """If another save has aborted the upload, its object is not taken for the own one."""
    files = [storage.begin_shared("m.safetensors", len(CONTENT), save_id=save * 32) for save in "ab"]
    parts = []
    for file in files:
        sink, size = storage.open_shared(file, sync=True), storage.granule_of(len(CONTENT))
        for start in range(0, len(CONTENT), size):
            sink.put(start, on_a_page(CONTENT[start : start + size]))
        sink.complete()
        parts.append(sink.parts)
    storage.abort_shared(files[0])
    for _ in range(2):
        storage.complete_shared(files[1], parts[1], replace=True)
    with pytest.raises(OSError, match="NoSuchUpload"):
        storage.complete_shared(files[0], parts[0], replace=True)
    assert storage.is_marked("m.safetensors", f"m.safetensors.{'b' * 32}.tmp")


@pytest.mark.parametrize("fault", [Fault(403, "AccessDenied"), Fault(503, "SlowDown")], ids=["denied", "slow down"])
def test_a_read_that_is_refused(open_s3: Opener, proxy: S3Proxy, fault: Fault) -> None:
    """A refused read raises an error with path and cause, and without secrets."""
    storage = open_s3(config_kwargs=FEW)
    put_file(storage, NAME, b"x" * 100)
    proxy.rule = lambda request: fault
    with pytest.raises(OSError, match=fault.code):
        read_range(storage, NAME, 10)
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
        ([Fault(400, "ExpiredToken"), Fault(400, "ExpiredToken")], True),
        ([Fault(cut=0), Fault(400, "ExpiredToken"), Fault(400, "ExpiredToken")], False),
        ([Fault(cut=0), Fault(404, "NoSuchBucket")], False),
        ([Fault(cut=0), Fault(404, "NotFound")], False),
    ],
    ids=[
        *("denied", "no bucket", "slow down", "denied after a cut", "expired", "expired after a cut"),
        *("no bucket after a cut", "404 after a cut"),
    ],
)
def test_whether_metadata_may_appear_after_all(
    open_s3: Opener, proxy: S3Proxy, faults: list[Fault], refused: bool
) -> None:
    """A denied first request is `Refused`. After an unanswered request the outcome is unknown."""
    storage = open_s3(config_kwargs=FEW)
    left = iter(faults)
    proxy.rule = lambda request: next(left) if request.operation == "PutObject" else None
    with pytest.raises(WriteError) as caught:
        storage.put(".metadata", b"x", sync=True)
    assert isinstance(caught.value, Refused) == refused
    assert next(left, None) is None


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("fault", [Fault(403, "AccessDenied"), Fault(503, "SlowDown")], ids=["denied", "slow down"])
def test_what_a_server_does_not_give_is_not_called_damaged(
    s3: S3Server, prefix: str, proxy: S3Proxy, fault: Fault, full: bool
) -> None:
    """`verify` raises an error and does not report a file as damaged if the server does not return it."""
    url = f"s3://{s3.bucket}/{prefix}"
    with TensorizerStorageWriter(url, storage_options=s3.options()) as writer:
        dcp.save({"w": torch.ones(1000)}, storage_writer=writer, no_dist=True)
    proxy.rule = lambda request: fault if request.key.endswith(".tensors") else None
    options = s3.options(proxy.endpoint, config_kwargs=FEW)
    with pytest.raises(ReadError, match=rf"cannot read s3://.*\.tensors.*({fault.code}|{fault.status})"):
        verify(url, full=full, storage_options=options)
    proxy.rule = lambda request: None
    assert verify(url, full=full, storage_options=options).damages == ()


def test_a_connection_that_always_breaks_off_is_an_error(open_s3: Opener, proxy: S3Proxy) -> None:
    """Bodies that keep breaking off raise an error at the timeout."""
    storage = open_s3()
    put_file(storage, NAME, CONTENT)
    proxy.forget()
    waits: list[float] = []
    storage.retries = Retries(100.0, clock=lambda: sum(waits), sleep=waits.append)
    proxy.rule = always("GetObject", Fault(cut=1000))
    with pytest.raises(OSError, match="the connection broke repeatedly"):
        read_range(storage, NAME, len(CONTENT))
    assert 70 <= sum(waits) <= 80
    assert proxy.counts() == {"GetObject": len(waits) + 1}


def test_bodies_that_break_off_where_retries_are_chosen(open_s3: Opener, proxy: S3Proxy) -> None:
    """If the user limits attempts, the sixth body that breaks off is the last."""
    storage = open_s3(config_kwargs=FEW)
    put_file(storage, NAME, CONTENT)
    proxy.forget()
    proxy.rule = always("GetObject", Fault(cut=1000))
    with pytest.raises(OSError, match="the connection broke repeatedly"):
        read_range(storage, NAME, len(CONTENT))
    assert proxy.counts() == {"GetObject": 6}
