"""SFTP storage when connections are lost, with a real server behind a proxy."""

from __future__ import annotations

import gc
import math
import socket
import threading
import urllib.parse
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from paramiko.sftp import CMD_CLOSE, CMD_FSTAT, CMD_OPEN, CMD_READ

from dcp_tensorizer import CheckpointManager, ReadError, SaveLimits, WriteError
from dcp_tensorizer._storage.base import Refused, Storage
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._storage.sftp import SftpStorage
from dcp_tensorizer._tensor_file.names import data_file_name
from dcp_tensorizer.testing import on_a_page, put_file
from dcp_tensorizer.tools import list_checkpoints

from ...lab.faults import TcpProxy
from ...lab.servers import PASSWORD, USER, SftpServer
from .faults import shorten

NAME = data_file_name(0, 0, "a" * 32)
CONTENT = bytes(range(251)) * (20 * (1 << 20) // 251)

Opener = Callable[..., SftpStorage]


# --- connections -----------------------------------------------------------------------------------------------------


def test_a_range_is_asked_for_once(open_sftp: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range takes one request for each 32 KiB, even if each answer arrives before the next request."""
    storage = open_sftp()
    put_file(storage, NAME, CONTENT[:200_000])
    channel = storage.client.call(lambda channel: channel)
    ask, sent = channel._async_request, []

    def ask_and_read(taker: Any, kind: int, *arguments: Any) -> int:
        sent.append(kind)
        number: int = ask(taker, kind, *arguments)
        if kind == CMD_READ:
            channel._read_response()
        return number

    monkeypatch.setattr(channel, "_async_request", ask_and_read)
    buffer = bytearray(150_000)
    storage.open(NAME).read_into([memoryview(buffer)], 1000)
    assert bytes(buffer) == CONTENT[1000:151_000]
    assert sent == [CMD_OPEN, *[CMD_READ] * 5, CMD_CLOSE]
    assert storage.read(NAME) == CONTENT[:200_000]
    assert sent[7:] == [CMD_OPEN, CMD_FSTAT, *[CMD_READ] * 7, CMD_CLOSE]


def test_a_server_that_gives_less(open_sftp: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a server answers with fewer bytes, the rest is requested."""
    storage = open_sftp()
    put_file(storage, NAME, CONTENT[:100_000])
    channel = storage.client.call(lambda channel: channel)
    ask = channel._async_request

    def ask_for_less(taker: Any, kind: int, *arguments: Any) -> int:
        if kind == CMD_READ:
            arguments = (*arguments[:-1], min(arguments[-1], 10_000))
        return ask(taker, kind, *arguments)  # type: ignore[no-any-return]

    monkeypatch.setattr(channel, "_async_request", ask_for_less)
    assert storage.read(NAME) == CONTENT[:100_000]
    with pytest.raises(EOFError, match="500 bytes are missing"):
        storage.open(NAME).read_into([memoryview(bytearray(1000))], 99_500)


def test_whether_metadata_may_appear_after_all(open_sftp: Opener, tcp: TcpProxy) -> None:
    """A refused first attempt is `Refused`. After a lost answer the outcome is unknown."""
    storage = open_sftp()
    storage.child(".metadata").make_directory()
    with pytest.raises(Refused, match=r"cannot write .*\.metadata"):
        storage.put(".metadata", b"x", sync=True)
    tcp.cut_after = tcp.forwarded + 300_000
    with pytest.raises(WriteError) as caught:
        storage.put(".metadata", CONTENT[:1_000_000], sync=True)
    assert tcp.connections == 2
    assert not isinstance(caught.value, Refused)


def test_wrong_requests_are_not_repeated(open_sftp: Opener, tcp: TcpProxy) -> None:
    """Missing files, short files and directories raise errors, and keep the connection."""
    storage = open_sftp()
    put_file(storage, NAME, b"short")
    storage.child("directory").make_directory()
    assert storage.head("missing") is None
    with pytest.raises(FileNotFoundError):
        storage.open("missing").read_into([memoryview(bytearray(1))], 0)
    with pytest.raises(EOFError):
        storage.open(NAME).read_into([memoryview(bytearray(9))], 0)
    with pytest.raises(ReadError):
        storage.read("directory")
    sink = storage.create(NAME, 3, sync=True)
    sink.put_part(0, on_a_page(b"ab"))
    with pytest.raises(OSError, match="2 bytes on the server, expected 3"):
        sink.complete()
    assert tcp.connections == 1


def test_a_connection_that_is_lost_while_it_is_made(open_sftp: Opener, tcp: TcpProxy) -> None:
    """A connection that is lost during the handshake is made again."""
    tcp.cut_after = 500
    open_sftp()
    assert tcp.connections == 2


def test_systems_without_a_timeout_for_what_is_sent(open_sftp: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection works without TCP_USER_TIMEOUT, as on macOS."""
    monkeypatch.delattr(socket, "TCP_USER_TIMEOUT")
    storage = open_sftp()
    put_file(storage, NAME, b"123")
    assert storage.read(NAME) == b"123"


def test_more_threads_than_a_server_allows_channels(open_sftp: Opener) -> None:
    """Threads wait for one of the channels that the server allows."""
    storage = open_sftp()
    put_file(storage, NAME, b"x" * 100)
    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(lambda n: storage.head(NAME), range(200))) == [100] * 200
    assert 1 <= len(storage.client.idle) <= 8


def test_connections_end_with_their_storage(open_sftp: Opener) -> None:
    """Connections and threads end when their storage is freed."""
    before = set(threading.enumerate())
    storage = open_sftp()
    put_file(storage, NAME, CONTENT)
    assert set(threading.enumerate()) - before
    del storage
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert {thread for thread in set(threading.enumerate()) - before if thread.name != "proxy"} == set()


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"host_key_policy": "reject"}, "not found in known_hosts"),
        ({"host_key_policy": "sometimes"}, "is not one of auto_add, warning, reject"),
        ({"password": None, "allow_agent": False}, "No authentication methods available"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_wrong_options(open_sftp: Opener, tcp: TcpProxy, options: dict[str, Any], said: str) -> None:
    """The error names the invalid option, after at most one attempt."""
    with pytest.raises(WriteError, match=said):
        open_sftp(**options)
    assert tcp.connections <= 1


def test_address_in_the_url(sftp: SftpServer) -> None:
    """The URL may have a quoted user, password and port; its path is literal, and messages do not show the password."""
    secret = urllib.parse.quote(PASSWORD, safe="").replace("-", "%2D")
    url = f"ssh://{USER}:{secret}@127.0.0.1:{sftp.port}/{uuid.uuid4().hex}/a#b?c"
    storage = open_storage(url, {"look_for_keys": False})
    storage.make_directory()
    assert (sftp.folder / url.rpartition(f"{sftp.port}/")[2]).is_dir()
    assert secret not in storage.path


@pytest.mark.parametrize("secret", ["hunter2/secret", "hunter2#secret", "hunter2 secret"])
def test_a_password_that_is_not_quoted(secret: str) -> None:
    """The error shows no part of the password, and explains how to encode it."""
    with pytest.raises(WriteError) as caught:
        open_storage(f"sftp://trainer:{secret}@127.0.0.1:1/ckpt", {"look_for_keys": False}, 1.0).make_directory()
    assert not [part for part in ("trainer", "hunter2", "secret") if part in str(caught.value)]
    assert ("Percent-encode" in str(caught.value)) == (" " not in secret)


# --- directories -----------------------------------------------------------------------------------------------------


def test_several_ranks_make_one_directory(sftp: SftpServer) -> None:
    """Several ranks create the same directories at the same time."""
    top = uuid.uuid4().hex
    storages = [open_storage(f"sftp://127.0.0.1/{top}", sftp.options()) for _ in range(4)]
    for number in range(5):
        gate = threading.Barrier(len(storages), timeout=60)

        def make(storage: Storage, number: int = number, gate: threading.Barrier = gate) -> None:
            gate.wait()
            storage.child(f"{number}/a/b/c/d").make_directory()

        with ThreadPoolExecutor(len(storages)) as pool:
            list(pool.map(make, storages))
        assert (sftp.folder / top / f"{number}/a/b/c/d").is_dir()


def test_no_directory_below_a_file(open_sftp: Opener) -> None:
    """A directory below a file is an error with the path, and only an empty directory is removed."""
    storage = open_sftp()
    put_file(storage, "file", b"x")
    with pytest.raises(WriteError, match=r"cannot create .*/file/below"):
        storage.child("file/below").make_directory()
    assert not storage.remove_directory()
    storage.remove("file")
    assert storage.remove_directory()
    assert storage.remove_directory()


def test_links_in_a_listing(open_sftp: Opener, sftp: SftpServer) -> None:
    """Links to files count as files of their size, and other links are left out."""
    storage = open_sftp()
    folder = sftp.folder / storage.path.rpartition("/")[2]
    storage.child("directory").make_directory()
    put_file(storage, "file", b"12345")
    for name, target in (("to-file", "file"), ("to-directory", "directory"), ("to-nothing", "missing")):
        (folder / name).symlink_to(target)
    files, folders = storage.listing()
    assert sorted((file.name, file.nbytes) for file in files) == [("file", 5), ("to-file", 5)]
    assert folders == ["directory"]


def test_files_are_made_durable(open_sftp: Opener, sftp: SftpServer) -> None:
    """With sync=True the server syncs each file once, and metadata before they get their name."""
    storage = open_sftp()
    before = len(sftp.synced())
    put_file(storage, NAME, CONTENT)
    storage.put(".metadata", b"m", sync=True)
    data, metadata = sftp.synced()[before:]
    assert data == NAME
    assert metadata.startswith(".metadata") and metadata != ".metadata"
    put_file(storage, NAME, CONTENT, sync=False)
    storage.put(".metadata", b"m", sync=False)
    assert len(sftp.synced()) == before + 2


# --- silence ---------------------------------------------------------------------------------------------------------

TIMEOUT = 3.0
"""A timeout for connections that exist: a tenth of it is too short for a slow machine to connect."""


def test_many_threads_at_a_server_that_hangs(open_sftp: Opener, tcp: TcpProxy) -> None:
    """Threads share the attempts to connect."""
    storage = open_sftp()
    shorten(storage, TIMEOUT)
    tcp.silent_until = math.inf
    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(storage.head, NAME) for _ in range(20)]
    assert {type(answer.exception()) for answer in answers} == {ReadError}
    assert tcp.connections < 20


def test_connecting_to_a_server_that_hangs(sftp: SftpServer, tcp: TcpProxy) -> None:
    """Connecting to a silent server raises an error at the timeout."""
    tcp.silent_until = math.inf
    with pytest.raises(WriteError, match="cannot create"):
        open_storage("sftp://127.0.0.1/x", sftp.options(tcp.port), 0.3).make_directory()


def test_a_server_that_is_down_from_the_start(sftp: SftpServer, tcp: TcpProxy) -> None:
    """Reads and listings raise ReadError, and saves WriteError, with the path and the reason, and no other advice."""
    tcp.close()
    options = sftp.options(tcp.port)
    storage = open_storage("sftp://127.0.0.1/x", options, 1.0)
    manager = CheckpointManager("sftp://127.0.0.1/x", storage_options=options, limits=SaveLimits(timeout=1.0))
    reason = f"ConnectionRefusedError: .* port {tcp.port} on 127.0.0.1$"
    for kind, doing, call in (
        (ReadError, "read .*/x/a", lambda: storage.read("a")),
        (ReadError, "list .*/x", lambda: list_checkpoints("sftp://127.0.0.1/x", storage_options=options)),
        (ReadError, "list .*/x", lambda: manager.restore({})),
        (WriteError, "write .*/x/a", lambda: storage.put("a", b"x", sync=True)),
        (WriteError, "create .*/x", storage.make_directory),
    ):
        with pytest.raises(kind, match=f"^cannot {doing}: {reason}"):
            call()


@pytest.mark.parametrize("fresh", [False, True], ids=["channel in use", "channel being opened"])
def test_a_connection_that_falls_silent(open_sftp: Opener, tcp: TcpProxy, fresh: bool) -> None:
    """A connection that is silent for a tenth of the timeout is replaced."""
    storage = open_sftp(10.0)
    put_file(storage, NAME, b"x" * 10)
    if fresh:
        storage.client.idle.clear()
    tcp.silent_until = tcp.connections
    assert storage.head(NAME) == 10
    assert tcp.connections == 2
