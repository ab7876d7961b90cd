"""The text of a URL says where it leads."""

from __future__ import annotations

import pytest

from dcp_tensorizer import CheckpointManager, TensorizerStorageWriter, WriteError
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._storage.urls import check_writable, is_in_process, one_spelling, protocols_of


@pytest.mark.parametrize(
    ("url", "protocols"),
    [
        ("/data/run", []),
        ("run", []),
        ("c://run", []),
        ("s3://bucket/memory", ["s3"]),
        ("memory://run", ["memory"]),
        ("simplecache::memory://run", ["simplecache", "memory"]),
        ("dir://a::simplecache::s3+x://b", ["simplecache", "dir", "s3+x"]),
        ("zip://a.zip::/data/b", ["zip"]),
    ],
)
def test_protocols(url: str, protocols: list[str]) -> None:
    """Each part of a chain has a protocol, and paths have none."""
    assert protocols_of(url) == protocols


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3a://bucket/run", "s3://bucket/run"),
        ("gcs://bucket/run", "gs://bucket/run"),
        ("abfss://container/run", "az://container/run"),
        ("ssh://host/run", "sftp://host/run"),
        ("s3://bucket/s3a://run", "s3://bucket/s3a://run"),
        ("/data/s3a", "/data/s3a"),
    ],
)
def test_one_spelling(url: str, expected: str) -> None:
    """The names of one protocol have one spelling, and paths stay as they are."""
    assert one_spelling(url) == expected


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("memory://run", True),
        ("simplecache::memory://run", True),
        ("dir::memory://run", True),
        ("s3://memory/run", False),
        ("simplecache::file:///memory/run", False),
    ],
)
def test_what_is_in_process(url: str, expected: bool) -> None:
    """A cache in front of this process's memory is in this process as well."""
    assert is_in_process(url) == expected
    if "s3" not in url:
        assert open_storage(url).in_process == expected


@pytest.mark.parametrize("url", ["/http://run", "s3://http/run", "memory://run", "sftp://h/https"])
def test_what_can_be_written(url: str) -> None:
    """Only the protocol decides whether a URL can be written."""
    check_writable(url)


@pytest.mark.parametrize("url", ["http://u:hunter2@h/run", "simplecache::https://h/run?sig=hunter2"])
def test_what_is_only_read(url: str) -> None:
    """The error of a read-only URL names it without credentials. The storage raises the same error."""
    storage = open_storage(url)
    calls = [lambda: check_writable(url), storage.make_directory, lambda: storage.create("x", 1, sync=True)]
    for call in calls:
        with pytest.raises(WriteError, match=r"cannot write to .*https?://h/run.*\. Save to a local") as caught:
            call()
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["zip://lo::a.zip", "tar://lo::a.tar", "https://h/run"])
def test_a_writer_of_what_is_only_read(url: str) -> None:
    """Writers and managers refuse a URL to which no save could succeed when they are made."""
    for taker in (TensorizerStorageWriter, CheckpointManager):
        with pytest.raises(WriteError, match="URLs are read-only"):
            taker(url)
