"""Answers of S3 servers that no real server of the tests gives, and what is made of the errors of connections."""

from __future__ import annotations

from typing import Any

import botocore.exceptions
import pytest

from dcp_tensorizer._storage.remote import Retries, is_transient
from dcp_tensorizer._storage.s3 import PastEnd, S3Reader, translated
from dcp_tensorizer.errors import describe


class Body:
    closed = False

    def close(self) -> None:
        self.closed = True


class IgnoresRanges:
    """A storage whose server answers every request with the whole object."""

    def __init__(self) -> None:
        self.retries = Retries(1.0)
        self.body = Body()

    def call_until_timeout(self, request: Any) -> Any:
        return request()

    def once(self, operation: str, name: str, **arguments: Any) -> Any:
        return {"Body": self.body, "ContentLength": 100}


def test_a_server_that_ignores_ranges_is_an_error() -> None:
    """If the server ignores the range, the reader raises an error and closes the body."""
    storage: Any = IgnoresRanges()
    with pytest.raises(OSError, match="the whole object instead of the requested range"):
        S3Reader(storage, "x").read_into([memoryview(bytearray(10))], 5)
    assert storage.body.closed


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (botocore.exceptions.EndpointConnectionError(endpoint_url="http://h", error="refused"), True),
        (botocore.exceptions.ConnectTimeoutError(endpoint_url="http://h"), True),
        (botocore.exceptions.ReadTimeoutError(endpoint_url="http://h"), True),
        (botocore.exceptions.ConnectionClosedError(endpoint_url="http://h"), True),
        (botocore.exceptions.SSLError(endpoint_url="https://h", error="expired"), False),
        (botocore.exceptions.NoCredentialsError(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_connections_that_may_come_back(error: Exception, transient: bool) -> None:
    """A refused connection is retried, and an invalid certificate is not."""
    as_ours = translated(error)
    assert is_transient(as_ours) == transient
    assert str(as_ours).startswith(type(error).__name__)


def test_the_end_of_a_file_is_final() -> None:
    """A range beyond the end is not requested again, which would take as long as the timeout."""
    assert not is_transient(PastEnd("the file ends before the requested range"))


def test_a_message_names_no_type_of_this_package() -> None:
    """A message names the server's code, and the base class that users know."""
    refused = {"Error": {"Code": "InvalidBucketName", "Message": "The specified bucket is not valid."}}
    error = translated(botocore.exceptions.ClientError(refused, "PutObject"))
    assert describe(error) == "OSError: InvalidBucketName: The specified bucket is not valid. (PutObject)"
    assert describe(PastEnd("the file ends")) == "OSError: the file ends"
