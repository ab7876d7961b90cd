"""Azure and Google Cloud pass the tests of `StorageFaults`, on emulators that check what they are sent."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dcp_tensorizer._storage.base import TIMEOUT
from dcp_tensorizer._storage.fsspec import StreamStorage
from dcp_tensorizer._storage.open import open_storage

from ..integration.storage.faults import HttpFaults, Opener
from ..lab.faults import Fault, S3Proxy, s3_proxy
from .servers import ACCOUNT_KEY, AzureServer, GoogleServer

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly")  # aiohttp of a part


class _CloudFaults(HttpFaults):
    secret = ACCOUNT_KEY
    upload_requests = 3
    timeout = 2.0
    hanging = ("put", "read", "range", "head")  # the libraries retry parts for minutes

    @pytest.fixture
    def url(self, server: AzureServer | GoogleServer) -> str:
        return server.url(uuid.uuid4().hex)

    @pytest.fixture
    def proxy(self, server: AzureServer | GoogleServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
        """A proxy in front of the server. The libraries wait 15 s and 1 s between attempts, and here not at all."""
        import gcsfs.retry
        from azure.storage.blob._shared.policies_async import ExponentialRetry

        monkeypatch.setattr(ExponentialRetry, "get_backoff_time", lambda self, settings: 0)
        monkeypatch.setattr(gcsfs.retry, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": _no_sleep}))
        with s3_proxy(server.endpoint) as proxy:
            yield proxy

    @pytest.fixture
    def opened(self, server: AzureServer | GoogleServer, proxy: S3Proxy, url: str) -> Opener:
        def opened(timeout: float = TIMEOUT, **options: Any) -> StreamStorage:
            storage = open_storage(url, server.options(proxy.endpoint, **options), timeout)
            assert isinstance(storage, StreamStorage)
            storage.retries = dataclasses.replace(storage.retries, first_wait=0.0)
            return storage

        return opened

    def hang(self, proxy: S3Proxy) -> Callable[[], object]:
        proxy.rule = lambda request: Fault(hang=True)
        return lambda: setattr(proxy, "rule", lambda request: None)


async def _no_sleep(seconds: float) -> None:
    await asyncio.sleep(0)


class TestAzure(_CloudFaults):
    wrong = ("key", ACCOUNT_KEY[::-1].strip("=") + "==")
    refusal = "AuthorizationFailure|AuthenticationFailed"

    @pytest.fixture
    def server(self, azure: AzureServer) -> AzureServer:
        return azure


class TestGoogle(_CloudFaults):
    test_wrong_credentials = None  # type: ignore[assignment]  # the emulator checks none
    may_resend = (0,)  # fake-gcs-server appends a part that it is sent twice, where Google takes it once

    @pytest.fixture
    def server(self, google: GoogleServer) -> GoogleServer:
        return google
