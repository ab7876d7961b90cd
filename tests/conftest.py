"""The servers that tests share: each is started by the first test that needs it, and ends with the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .lab.servers import S3Server, SftpServer, s3_server, sftp_server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def sftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SftpServer]:
    with sftp_server(tmp_path_factory.mktemp("sftp")) as server:
        yield server
