"""S3 and SFTP pass the tests of `StorageFaults`."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dcp_tensorizer import SaveLimits
from dcp_tensorizer._storage.base import TIMEOUT, Storage
from dcp_tensorizer._storage.sftp import SftpStorage

from ...lab.faults import Fault, TcpProxy
from ...lab.servers import PASSWORD, SECRET, S3Server, SftpServer
from .faults import HttpFaults, Opener, StorageFaults, shorten


class TestS3(HttpFaults):
    secret = SECRET
    wrong = ("secret", "wrong-secret-42")
    refusal = "SignatureDoesNotMatch"
    upload_requests = 5  # it begins, has three parts, and is completed
    expired = Fault(400, "ExpiredToken")

    @pytest.fixture
    def server(self, s3: S3Server) -> S3Server:
        return s3

    @pytest.fixture
    def url(self, s3: S3Server, prefix: str) -> str:
        return f"s3://{s3.bucket}/{prefix}"

    @pytest.fixture
    def opened(self, open_s3: Opener) -> Opener:
        return open_s3


# A lost connection is also an error in a thread of paramiko's, which no caller can catch.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
class TestSftp(StorageFaults):
    secret = PASSWORD
    wrong = ("password", "wrong-password-42")
    refusal = "Authentication failed"
    limits = SaveLimits(timeout=5.0)

    @pytest.fixture
    def server(self, sftp: SftpServer) -> SftpServer:
        return sftp

    @pytest.fixture
    def proxy(self, tcp: TcpProxy) -> TcpProxy:
        return tcp

    @pytest.fixture
    def url(self) -> str:
        return f"sftp://127.0.0.1/{uuid.uuid4().hex}"

    @pytest.fixture
    def opened(self, open_sftp: Callable[..., SftpStorage], url: str) -> Opener:
        def opened(timeout: float = TIMEOUT, **options: Any) -> SftpStorage:
            storage = open_sftp(url=url, **options)
            if timeout < TIMEOUT:
                shorten(storage, timeout)
            return storage

        return opened

    def options(self, server: SftpServer, proxy: TcpProxy | None = None) -> dict[str, Any]:
        return server.options(None if proxy is None else proxy.port)

    def upload_faults(self, proxy: TcpProxy) -> Iterator[str]:
        return _cuts(proxy, 0, 3 << 20, 12 << 20)

    def put_faults(self, proxy: TcpProxy, storage: Storage) -> Iterator[str]:
        yield from _cuts(proxy, 0, 300_000)
        assert isinstance(storage, SftpStorage)
        client, attempt, connections = storage.client, storage.client.attempt, proxy.connections
        cuts = iter([True])

        def attempt_and_lose(use: Callable[[Any], object]) -> object:
            def use_and_lose(channel: Any) -> object:
                result = use(channel)
                if next(cuts, False):
                    proxy.cut()
                    channel.stat("/")
                return result

            return attempt(use_and_lose)

        client.attempt = attempt_and_lose  # type: ignore[method-assign,assignment]
        yield "a lost answer"
        client.attempt = attempt  # type: ignore[method-assign]
        assert proxy.connections == connections + 1

    def read_faults(self, proxy: TcpProxy) -> Iterator[str]:
        return _cuts(proxy, 0, 5 << 20)

    def hang(self, proxy: TcpProxy) -> Callable[[], object]:
        proxy.silent_until = math.inf
        return lambda: setattr(proxy, "silent_until", proxy.connections)

    def refuse_writes(self, proxy: TcpProxy) -> None:
        proxy.close()


def _cuts(proxy: TcpProxy, *after: int) -> Iterator[str]:
    """Cuts every connection after so many more bytes."""
    for nbytes in after:
        connections, proxy.cut_after = proxy.connections, proxy.forwarded + nbytes
        yield f"a connection that is lost after {nbytes:,} bytes"
        assert proxy.connections == connections + 1
