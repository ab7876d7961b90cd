"""What storages on Azure and Google Cloud do when requests fail.

The servers are emulators that check what they are sent. A proxy in front of each makes requests fail.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from dcp_tensorizer import ReadError, WriteError
from dcp_tensorizer._storage.base import TIMEOUT
from dcp_tensorizer._storage.fsspec import StreamStorage
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._tensor_file.names import data_file_name
from dcp_tensorizer.testing import put_file

from ..lab.faults import Fault, Request, Rule, S3Proxy, s3_proxy
from ..lab.seams import read_range
from .servers import ACCOUNT_KEY, AzureServer, GoogleServer

NAME = data_file_name(0, 0, "a" * 32)
CONTENT = bytes(range(251)) * (20 * (1 << 20) // 251)
BUSY = Fault(503, "ServerBusy")
LONG = 120.0
"""Seconds that no operation takes, also on a busy machine, unless it ignores its timeout."""

Opener = Callable[..., StreamStorage]

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly")  # aiohttp of a part


@pytest.fixture(params=["azure", "google"])
def server(request: pytest.FixtureRequest) -> AzureServer | GoogleServer:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@pytest.fixture
def proxy(server: AzureServer | GoogleServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    """A proxy in front of the server. Before they try again, the libraries wait 15 s and 1 s, and here not at all."""
    import gcsfs.retry
    from azure.storage.blob._shared.policies_async import ExponentialRetry

    monkeypatch.setattr(ExponentialRetry, "get_backoff_time", lambda self, settings: 0)
    monkeypatch.setattr(gcsfs.retry, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": _no_sleep}))
    with s3_proxy(server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def open_cloud(server: AzureServer | GoogleServer, proxy: S3Proxy) -> Opener:
    """Opens one new directory through the proxy."""
    url = server.url(uuid.uuid4().hex)

    def open_cloud(timeout: float = TIMEOUT, **options: Any) -> StreamStorage:
        storage = open_storage(url, server.options(proxy.endpoint, **options), timeout)
        assert isinstance(storage, StreamStorage)
        storage.retries = dataclasses.replace(storage.retries, first_wait=0.0)
        return storage

    return open_cloud


async def _no_sleep(seconds: float) -> None:
    await asyncio.sleep(0)


def first(fault: Fault, *methods: str) -> Rule:
    """A rule for the first request of each method."""
    left = set(methods)

    def rule(request: Request) -> Fault | None:
        if request.method in left:
            left.discard(request.method)
            return fault
        return None

    return rule


@pytest.mark.parametrize("fault", [BUSY, Fault(401, "Expired"), Fault(cut=0)], ids=["busy", "expired token", "reset"])
def test_small_files_survive(open_cloud: Opener, proxy: S3Proxy, fault: Fault) -> None:
    """Metadata is written, looked at and read after overload, an expired token, or a reset."""
    storage = open_cloud()
    proxy.rule = first(fault, "PUT", "POST")
    storage.put(".metadata", b"whole", sync=True)
    proxy.rule = first(fault, "HEAD", "GET")
    assert (storage.head(".metadata"), storage.read(".metadata")) == (5, b"whole")


@pytest.mark.parametrize(
    "fault", [BUSY, Fault(cut=1 << 20), Fault(lose_answer=True)], ids=["busy", "cut", "lost answer"]
)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_upload_survives(
    server: AzureServer | GoogleServer, open_cloud: Opener, proxy: S3Proxy, fault: Fault, number: int
) -> None:
    """A file of several parts is whole though one of the requests that write it fails: any of them."""
    if fault.lose_answer and isinstance(server, GoogleServer):
        number = 0  # a piece that it is sent twice, fake-gcs-server appends twice, where Google takes it once
    storage = open_cloud()
    count = itertools.count()
    proxy.rule = lambda request: fault if request.method in ("PUT", "POST") and next(count) == number else None
    put_file(storage, NAME, CONTENT)
    assert read_range(storage, NAME, len(CONTENT)) == CONTENT


def test_a_read_survives_a_cut(open_cloud: Opener, proxy: S3Proxy) -> None:
    """A body that breaks off is asked for again."""
    storage = open_cloud()
    put_file(storage, NAME, CONTENT)
    proxy.rule = first(Fault(cut=1 << 20), "GET")
    assert read_range(storage, NAME, len(CONTENT)) == CONTENT


def test_metadata_whose_answer_is_lost(open_cloud: Opener, proxy: S3Proxy) -> None:
    """The second request meets the object of the first, and recognises it."""
    storage = open_cloud()
    proxy.rule = first(Fault(lose_answer=True), "PUT", "POST")
    storage.put(".metadata", b"whole", sync=True, replace=False)
    assert storage.read(".metadata") == b"whole"


def test_a_server_that_hangs(open_cloud: Opener, proxy: S3Proxy) -> None:
    """Reads and writes end in an error when the timeout is over."""
    storage = open_cloud(timeout=2.0)
    storage.put(".metadata", b"whole", sync=True)
    proxy.rule = lambda request: Fault(hang=True)
    started = time.monotonic()
    with ThreadPoolExecutor(2) as pool:  # they wait at the same time
        read = pool.submit(storage.read, ".metadata").exception
        put = pool.submit(storage.put, ".metadata", b"other", sync=True).exception
        assert isinstance(read(), ReadError)
        assert isinstance(put(), WriteError)
    assert time.monotonic() - started < LONG


def test_wrong_credentials(azure: AzureServer) -> None:
    """The error shows neither the key nor what it was made of."""
    wrong = ACCOUNT_KEY[::-1].strip("=") + "=="
    storage = open_storage(azure.url("x"), azure.options(key=wrong))
    with pytest.raises(ReadError, match=r"AuthorizationFailure|AuthenticationFailed") as caught:
        storage.read(".metadata")
    assert wrong not in str(caught.value)
    assert caught.value.__suppress_context__
