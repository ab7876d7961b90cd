"""Tests of what a storage behind a URL does when its server, or the connection to the server, fails."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import ReadError, SaveLimits, TensorizerStorageReader, TensorizerStorageWriter, WriteError
from dcp_tensorizer._storage.sftp import SftpStorage
from dcp_tensorizer.storage import Storage, open_storage
from dcp_tensorizer.testing import on_a_page, put_file

from ...lab.faults import Fault, Request, S3Proxy, s3_proxy
from ...lab.processes import workers
from ...lab.ranks import attempt
from ...lab.seams import read_range
from ...lab.states import assert_same

NAME = f"__0_0_{'a' * 32}.tensors"
CONTENT = bytes(range(251)) * (20 * (1 << 20) // 251)  # three parts

Opener = Callable[..., Storage]


class StorageFaults:
    """Tests of a storage on a real server, behind a proxy that can misbehave. Inherit from this class to run them.

    The subclass defines the fixtures `server`, `proxy`, `url` (of a directory that does not exist yet) and `opened`
    (opens that directory through the proxy), and the methods below.

    Attributes:
        secret: A text of the right credentials that no message may contain.
        wrong: An option with wrong credentials, and its value.
        refusal: What the error says of them.
        timeout: Of operations at a server that hangs.
        hanging: These operations.
        limits: Of saves while the server fails.
    """

    secret: str
    wrong: tuple[str, str]
    refusal: str
    timeout = 3.0
    hanging = ("part", "put", "read", "range", "head")
    limits = SaveLimits()

    @pytest.fixture
    def opened(self, server: Any, proxy: Any, url: str) -> Opener:
        """Opens the directory through the proxy."""
        raise NotImplementedError(f"{type(self).__name__} must define the fixture `opened`")

    def options(self, server: Any, proxy: Any = None) -> dict[str, Any]:
        """The ``storage_options``, for the server itself or for the proxy in front of it."""
        raise NotImplementedError

    def upload_faults(self, proxy: Any) -> Iterator[str]:
        """Injects one fault after the other into the write of a file; yields their names."""
        raise NotImplementedError

    def put_faults(self, proxy: Any, storage: Storage) -> Iterator[str]:
        """Injects faults into the write of a small file."""
        raise NotImplementedError

    def read_faults(self, proxy: Any) -> Iterator[str]:
        """Injects faults into the read of a range."""
        raise NotImplementedError

    def hang(self, proxy: Any) -> Callable[[], object]:
        """Makes the server silent; returns a function that ends the silence for new requests."""
        raise NotImplementedError

    def refuse_writes(self, proxy: Any) -> None:
        """Makes every write of a data file fail."""
        raise NotImplementedError

    def test_an_upload_survives(self, opened: Opener, proxy: Any) -> None:
        """The file is complete, whichever of the requests that write it fails once."""
        storage = opened()
        for fault in self.upload_faults(proxy):
            put_file(storage, NAME, CONTENT)
            assert read_range(storage, NAME, len(CONTENT)) == CONTENT, fault
            storage.remove(NAME)

    @pytest.mark.parametrize("replace", [True, False])
    def test_a_put_survives(self, opened: Opener, proxy: Any, replace: bool) -> None:
        """The file appears complete and alone, also if the answer is lost: the second request recognises the first."""
        storage, content = opened(), CONTENT[:1_000_000]
        for fault in self.put_faults(proxy, storage):
            storage.put(".metadata", content, sync=True, replace=replace)
            assert storage.read(".metadata") == content, fault
            assert [file.name for file in storage.listing()[0]] == [".metadata"], fault
            storage.remove(".metadata")

    def test_a_read_survives(self, opened: Opener, proxy: Any) -> None:
        """A range is complete although its body has broken off, or the first request was not answered."""
        storage = opened()
        put_file(storage, NAME, CONTENT)
        for fault in self.read_faults(proxy):
            assert read_range(storage, NAME, len(CONTENT)) == CONTENT, fault

    def test_a_server_that_hangs(self, opened: Opener, proxy: Any) -> None:
        """Every operation ends in an error when its timeout has passed."""
        put_file(opened(), NAME, CONTENT[:10_000])
        storage = opened(timeout=self.timeout)
        sink = storage.create("other", len(CONTENT), sync=True)
        part = on_a_page(CONTENT[: sink.part_bytes])
        end = self.hang(proxy)
        calls: dict[str, Callable[[], object]] = {
            "part": lambda: _write(sink, part),
            "put": lambda: storage.put(".metadata", b"x", sync=True),
            "read": lambda: storage.read(NAME),
            "range": lambda: read_range(storage, NAME, 10_000),
            "head": lambda: storage.head(NAME),
        }
        with ThreadPoolExecutor(len(calls)) as pool:  # they wait at the same time
            answers = {name: pool.submit(calls[name]) for name in self.hanging}
        for name, answer in answers.items():
            assert isinstance(answer.exception(), OSError | ReadError | WriteError), name
            assert "NoneType" not in str(answer.exception()), name
        end()
        sink.abort()
        opened().discard("other")

    def test_a_server_that_is_gone(self, opened: Opener, proxy: Any) -> None:
        """The errors name the path and the server's address, and show no secret."""
        storage = opened()
        proxy.close()
        with pytest.raises(ReadError) as read:
            storage.read(".metadata")
        with pytest.raises(WriteError) as put:
            storage.put(".metadata", b"x", sync=True)
        for verb, caught in (("read", read), ("write", put)):
            assert str(caught.value).startswith(f"cannot {verb} {storage.path}/.metadata")
            assert str(proxy.port) in str(caught.value)
            assert self.secret not in str(caught.value)

    def test_wrong_credentials(self, opened: Opener) -> None:
        """The error names the refusal, and does not show the credentials."""
        with pytest.raises((ReadError, WriteError), match=self.refusal) as caught:
            opened(**dict([self.wrong])).read(".metadata")
        assert self.wrong[1] not in str(caught.value)
        assert caught.value.__suppress_context__

    def test_save_replace_fail_and_load(
        self,
        server: Any,
        proxy: Any,
        url: str,
        caplog: pytest.LogCaptureFixture,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        """A save replaces another, a save that fails leaves it as it is, and neither shows a secret anywhere."""
        options, seen = self.options(server), b""
        through_proxy = self.options(server, proxy)
        with (
            caplog.at_level(logging.DEBUG, "dcp_tensorizer"),
            TensorizerStorageWriter(url, storage_options=through_proxy, limits=self.limits) as writer,
        ):
            for seed in (1, 2):
                dcp.async_save(_state(seed), storage_writer=writer, no_dist=True).result()
            names = {file.name for file in open_storage(url, options).listing()[0]}
            assert len(names) == 2
            for worker in workers():
                folder = Path(f"/proc/{worker.pid}")
                seen += (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            self.refuse_writes(proxy)
            failure = attempt(dcp.async_save(_state(3), storage_writer=writer, no_dist=True).result)
        (cause,) = failure.causes.values()
        assert type(cause) is WriteError
        assert url.rpartition("/")[2] in str(cause)
        storage = open_storage(url, options)
        assert {file.name for file in storage.listing()[0]} == names
        shown = "".join([str(failure), caplog.text, *capfd.readouterr()]).encode() + (storage.read(".metadata") or b"")
        assert self.secret.encode() not in seen + shown
        loaded = _state(0)
        dcp.load(loaded, storage_reader=TensorizerStorageReader(url, storage_options=options), no_dist=True)
        assert_same(loaded, _state(2))


class HttpFaults(StorageFaults):
    """Tests of a storage whose server speaks HTTP.

    Attributes:
        upload_requests: The number of requests that write `CONTENT`.
        expired: The server's answer to a token that has expired.
        may_resend: Which of the requests that write `CONTENT` may be sent again after a lost answer.
    """

    upload_requests: int
    expired = Fault(401, "Expired")
    may_resend: tuple[int, ...] | None = None

    @pytest.fixture
    def proxy(self, server: Any) -> Iterator[S3Proxy]:
        with s3_proxy(server.endpoint) as proxy:
            yield proxy

    def options(self, server: Any, proxy: Any = None) -> dict[str, Any]:
        options: dict[str, Any] = server.options(None if proxy is None else proxy.endpoint)
        return options

    def upload_faults(self, proxy: S3Proxy) -> Iterator[str]:
        for fault in (Fault(503, "SlowDown"), Fault(cut=0), Fault(cut=1 << 20), Fault(lose_answer=True)):
            for number in (0, self.upload_requests // 2, self.upload_requests - 1):
                if not fault.lose_answer or self.may_resend is None or number in self.may_resend:
                    yield from _injected(proxy, fault, ("PUT", "POST"), number)

    def put_faults(self, proxy: S3Proxy, storage: Storage) -> Iterator[str]:
        for fault in (Fault(503, "SlowDown"), self.expired, Fault(cut=0), Fault(lose_answer=True)):
            yield from _injected(proxy, fault, ("PUT", "POST"))

    def read_faults(self, proxy: S3Proxy) -> Iterator[str]:
        for fault in (Fault(503, "SlowDown"), self.expired, Fault(cut=0), Fault(cut=1 << 20)):
            yield from _injected(proxy, fault, ("GET",))

    def hang(self, proxy: S3Proxy) -> Callable[[], object]:
        proxy.rule = lambda request: Fault(stall=1000) if request.method == "GET" else Fault(hang=True)
        return lambda: setattr(proxy, "rule", lambda request: None)

    def refuse_writes(self, proxy: S3Proxy) -> None:
        proxy.rule = lambda request: Fault(403, "AccessDenied") if request.nbytes > 1 << 20 else None


def _injected(proxy: S3Proxy, fault: Fault, methods: tuple[str, ...], number: int = 0) -> Iterator[str]:
    """Injects a fault into one request, by its number among those of some methods."""
    count = 0

    def rule(request: Request) -> Fault | None:
        nonlocal count
        count += request.method in methods
        return fault if request.method in methods and count == number + 1 else None

    proxy.rule = rule
    name = f"{fault} of request {number}"
    yield name
    assert count > number, f"{name} was not injected"


def shorten(storage: SftpStorage, timeout: float) -> None:
    """Shortens the timeout of a connected storage. A slow machine has had the longer one to connect."""
    client = storage.client
    client.retries = dataclasses.replace(client.retries, timeout=timeout)
    client._silence_timeout = timeout / 10
    client._options |= dict.fromkeys(("timeout", "banner_timeout", "auth_timeout"), timeout / 10)
    for channel in client.idle:
        channel.get_channel().settimeout(timeout / 10)


def _state(seed: int) -> dict[str, Any]:
    """Returns two parts of a file, a small tensor, and an object."""
    large = torch.arange(10 << 20, dtype=torch.int16) + seed
    return {"large": large, "small": torch.tensor([seed, -0.0]), "step": seed}


def _write(sink: Any, part: memoryview) -> None:
    """Writes a part, and completes the file if the storage only sends it then."""
    for number in range(-(-len(CONTENT) // sink.part_bytes)):
        sink.put_part(number, part)
    sink.complete()
