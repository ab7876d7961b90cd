"""Storages on real servers, with a proxy between them that can misbehave."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dcp_tensorizer._storage.base import TIMEOUT
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._storage.s3 import S3Storage
from dcp_tensorizer._storage.sftp import SftpStorage

from ...lab.faults import S3Proxy, TcpProxy, tcp_proxy
from ...lab.servers import S3Server, SftpServer


@pytest.fixture
def open_s3(s3: S3Server, proxy: S3Proxy, prefix: str) -> Callable[..., S3Storage]:
    """Opens the prefix through the proxy."""

    def open_s3(timeout: float = TIMEOUT, **options: Any) -> S3Storage:
        storage = open_storage(f"s3://{s3.bucket}/{prefix}", s3.options(proxy.endpoint, **options), timeout)
        assert isinstance(storage, S3Storage)
        storage.retries = dataclasses.replace(storage.retries, first_wait=0.0)
        return storage

    return open_s3


@pytest.fixture
def storage(open_s3: Callable[..., S3Storage]) -> S3Storage:
    return open_s3()


@pytest.fixture
def tcp(sftp: SftpServer) -> Iterator[TcpProxy]:
    """A proxy in front of the SFTP server."""
    with tcp_proxy(sftp.port) as proxy:
        yield proxy


@pytest.fixture
def open_sftp(sftp: SftpServer, tcp: TcpProxy) -> Callable[..., SftpStorage]:
    """Opens a directory through the proxy, by default a new one."""

    def open_sftp(timeout: float = TIMEOUT, url: str = "", **options: Any) -> SftpStorage:
        url = url or f"sftp://127.0.0.1/{uuid.uuid4().hex}"
        storage = open_storage(url, sftp.options(tcp.port) | options, timeout)
        assert isinstance(storage, SftpStorage)
        storage.client.retries = dataclasses.replace(storage.client.retries, first_wait=0.01)
        storage.make_directory()
        return storage

    return open_sftp
