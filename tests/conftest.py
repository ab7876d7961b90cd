"""What all tests share. A server is started by the first test that needs it, and ends with the session."""

from __future__ import annotations

import uuid
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Any

import pytest

from .lab.faults import S3Proxy, s3_proxy
from .lab.leak_check import mark, temporary_directory
from .lab.servers import S3Server, SftpServer, s3_server, sftp_server

__all__ = ["mark", "temporary_directory"]

with suppress(ImportError):  # the environment of the frameworks does without it
    from hypothesis import HealthCheck, settings

    # Two busy cores make single examples slow now and then; the number of examples bounds the time.
    settings.register_profile(
        "tests", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("tests")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def sftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SftpServer]:
    with sftp_server(tmp_path_factory.mktemp("sftp")) as server:
        yield server


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[S3Proxy]:
    """A proxy in front of the S3 server."""
    with s3_proxy(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture
def prefix(s3: S3Server) -> Iterator[str]:
    """A new prefix. It is an error if an upload below it is left open."""
    name = uuid.uuid4().hex
    yield name
    assert s3.uploads(name) == []


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """What torch logs of keys with lone surrogates is in the reports that test processes send: they take only UTF-8."""
    return _sendable((yield))


def _sendable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _sendable(one) for key, one in value.items()}
    return type(value)(map(_sendable, value)) if isinstance(value, (list, tuple)) else value
