"""Answers of S3 servers that no real server of the tests gives."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_tensorizer._storage.retry import Retries
from dcp_tensorizer._storage.s3 import _S3Reader


class Body:
    closed = False

    def close(self) -> None:
        self.closed = True


class IgnoresRanges:
    """A storage whose server answers every request with the whole object."""

    def __init__(self) -> None:
        self.retries = Retries(1.0)
        self.body = Body()

    def patiently(self, request: Any) -> Any:
        return request()

    def call(self, operation: str, name: str, **arguments: Any) -> Any:
        return {"Body": self.body, "ContentLength": 100}


def test_a_server_that_ignores_ranges_is_an_error() -> None:
    """The reader does not return the wrong bytes, and closes the body."""
    storage: Any = IgnoresRanges()
    with pytest.raises(OSError, match="a request for a range with the whole object"):
        _S3Reader(storage, "x").read_into([memoryview(bytearray(10))], 5)
    assert storage.body.closed
