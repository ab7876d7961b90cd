"""fsspec's filesystems are made with the right options, and their errors show no secret."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from dcp_tensorizer import CheckpointManager, ReadError, TensorizerStorageReader, TensorizerStorageWriter, WriteError
from dcp_tensorizer._storage.open import check_location, open_storage


@pytest.mark.parametrize("url", ["nonsense://u:hunter2@h/x", "simplecache::nonsense://u:hunter2@h/x"])
def test_an_error_while_opening_shows_no_secret(url: str) -> None:
    """The error quotes the URL without credentials, and shows no exception behind it."""
    with pytest.raises(WriteError, match="nonsense") as caught:
        open_storage(url, {"password": "correct-horse"})
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert "hunter2" not in str(caught.value)
    assert "correct-horse" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "library", "extra"),
    [
        ("s3://bucket/a", "s3fs", "s3"),
        ("simplecache::s3://bucket/a", "s3fs", "s3"),
        ("gs://bucket/a", "gcsfs", "gcs"),
        ("abfs://container/a", "adlfs", "azure"),
        ("sftp://host/a", "paramiko", "sftp"),
    ],
)
def test_a_missing_library_is_installed_by_an_extra(
    monkeypatch: pytest.MonkeyPatch, url: str, library: str, extra: str
) -> None:
    """A missing library raises an error with the command that installs it, also before the URL is opened."""
    monkeypatch.setitem(sys.modules, library, None)
    for name in ("s3fs.core", "dcp_tensorizer._storage.sftp", "dcp_tensorizer._storage.sftp"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for known in ("s3", "gs", "abfs"):
        monkeypatch.delitem(_registry, known, raising=False)
    for taker in (open_storage, check_location, TensorizerStorageWriter):
        with pytest.raises(WriteError, match=re.escape(f"pip install 'dcp_tensorizer[{extra}]'")):
            taker(url)


@pytest.mark.parametrize(
    "url",
    [
        "gs://bucket/run/a::1",
        "s3://bucket/a::latest",
        "az://container/a::memory://b",
        "memory://run/a::1",
        "simplecache::memory://run/a::1",
        "sftp://u:hunter2@host/a::1",
        "file:///data/a::1",
        "/data/a::1",
    ],
)
def test_a_path_with_two_colons_is_refused(url: str) -> None:
    """fsspec splits URLs at ::, so that two paths could lead to one directory. Nothing is opened."""
    takers = (open_storage, check_location, TensorizerStorageWriter, TensorizerStorageReader, CheckpointManager)
    for taker in takers:
        with pytest.raises(WriteError, match="its path contains ::, which chains") as caught:
            taker(url)
        assert "hunter2" not in str(caught.value)


def test_chains_and_addresses_with_two_colons_are_accepted(tmp_path: Path) -> None:
    """A filesystem that opens another one may precede ::, and an IPv6 address and a path that is no text contain it."""
    urls = ["simplecache::memory://run", "dir://a::memory://run", "zip://x::/data/a.zip", "sftp://u@[::1]:22/run"]
    assert [check_location(url) for url in urls] == urls
    assert check_location(tmp_path / "a::1") == tmp_path / "a::1"


def test_a_storage_removes_its_options_from_messages() -> None:
    """A storage can be reopened with the options that it was opened with."""
    storage = open_storage("memory://bucket", {"token": "correct-horse", "endpoint_url": "http://minio.local:9000"})
    assert storage.scrub("correct-horse at http://minio.local:9000") == "*** at http://minio.local:9000"


@pytest.mark.parametrize(
    ("protocol", "defaults"),
    [("gs", {"requests_timeout": 30.0}), ("abfs", {"connection_timeout": 6, "read_timeout": 6}), ("memory", {})],
)
def test_filesystems_that_connect_by_themselves_get_timeouts(
    monkeypatch: pytest.MonkeyPatch, protocol: str, defaults: dict[str, float]
) -> None:
    """Filesystems get the timeouts by their own option names, unless the user sets these options."""
    given: list[dict[str, Any]] = []

    class Recording(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
        def __init__(
            self,
            block_size: int = 0,
            requests_timeout: float = 0,
            connection_timeout: float = 0,
            read_timeout: float = 0,
            **options: Any,
        ) -> None:
            options |= {"requests_timeout": requests_timeout, "connection_timeout": connection_timeout}
            options |= {"read_timeout": read_timeout}
            given.append({key: options[key] for key in options if options[key] and key.endswith("timeout")})
            super().__init__()

    monkeypatch.setitem(_registry, protocol, Recording)
    open_storage(f"{protocol}://bucket/x", {}, 60.0)
    open_storage(f"{protocol}://bucket/x", {"block_size": 1} | dict.fromkeys(defaults, 1), 60.0)
    assert given == [defaults, dict.fromkeys(defaults, 1)]


@pytest.mark.parametrize("protocol", ["gs", "az"])
def test_a_library_that_retries_is_interrupted(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    """Listings, reads and writes of small files end after the timeout, however long the library retries."""

    class Hanging(AsyncFileSystem):  # type: ignore[misc]
        cachable = False

        async def hang(self, *args: Any, **options: Any) -> None:
            await asyncio.Event().wait()

        _ls = _info = _cat_file = _pipe_file = _makedirs = hang

    Hanging.protocol = protocol
    monkeypatch.setitem(_registry, protocol, Hanging)
    storage = open_storage(f"{protocol}://bucket/x", {}, 0.1)
    calls: list[tuple[type[Exception], Callable[[], object]]] = [
        (ReadError, storage.listing),
        (ReadError, lambda: storage.read("a")),
        (ReadError, lambda: storage.head("a")),
        (OSError, lambda: storage.open("a").read_range(0, 1)),
        (WriteError, lambda: storage.put("a", b"x", sync=True)),
        (WriteError, storage.make_directory),
    ]
    for kind, call in calls:
        with pytest.raises(kind, match="the request timed out"):
            call()


def test_azures_filesystems_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storages with the same options share one filesystem, because adlfs never frees one. Its listings are dropped."""
    made: list[Azure] = []

    class Azure(MemoryFileSystem):
        protocol = "az"

        def __init__(self, account_name: str, **options: Any) -> None:
            super().__init__(account_name=account_name, **options)
            self.forgotten = 0
            made.append(self)

        def invalidate_cache(self, path: str | None = None) -> None:
            self.forgotten += 1

    monkeypatch.setitem(_registry, "az", Azure)
    opened = [open_storage(f"az://container/step{step}", {"account_name": "a"}) for step in range(3)]
    assert [storage.path for storage in opened] == [f"az://container/step{step}" for step in range(3)]
    open_storage("az://container/step1", {"account_name": "b"})
    assert [(azure.storage_options["account_name"], azure.forgotten) for azure in made] == [("a", 3), ("b", 1)]
    assert opened[0].head("nothing") is None


def test_each_storage_of_a_chain_has_filesystems_of_its_own() -> None:
    """The filesystem behind a cache is new each time, because fsspec would reuse one with older keys."""
    options = {"memory": {"use_listings_cache": False}}
    first, second = (open_storage("simplecache::memory://chained", options) for _ in range(2))
    behind = [storage.filesystem.fs for storage in (first, second)]  # type: ignore[attr-defined]
    assert behind[0] is not behind[1]
    assert [filesystem.storage_options for filesystem in behind] == [{"use_listings_cache": False}] * 2
    assert options == {"memory": {"use_listings_cache": False}}


def test_azures_filesystems_have_the_keys_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of a variable that Azure's library reads makes another filesystem, and no other variable does."""

    class Azure(MemoryFileSystem):
        protocol = "abfs"
        cachable = False

    monkeypatch.setitem(_registry, "abfs", Azure)
    filesystems = [open_storage("abfs://x").filesystem]  # type: ignore[attr-defined]
    for name in ("AZURE_CLIENT_SECRET", "https_proxy", "STEP"):
        monkeypatch.setenv(name, "new")
        filesystems.append(open_storage("abfs://x").filesystem)  # type: ignore[attr-defined]
    assert [a is b for a, b in pairwise(filesystems)] == [False, False, True]
