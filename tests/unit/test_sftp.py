"""SFTP when connections are lost, and what is left of them. The server is a real one, with a proxy in front of it."""

from __future__ import annotations

import gc
import math
import socket
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dcp_tensorizer import ReadError, WriteError
from dcp_tensorizer._format.layout import data_file_name
from dcp_tensorizer._storage import retry
from dcp_tensorizer._storage import sftp as sftp_module
from dcp_tensorizer._storage.base import TIMEOUT, Refused, Storage
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._storage.sftp import SftpStorage

from ..proxy import TcpProxy, tcp_proxy
from ..servers import PASSWORD, USER, SftpServer
from .support import on_a_page, put_file

NAME = data_file_name(0, 0, "a" * 32)
CONTENT = bytes(range(251)) * (20 * (1 << 20) // 251)


@pytest.fixture
def proxy(sftp: SftpServer) -> Iterator[TcpProxy]:
    with tcp_proxy(sftp.port) as proxy:
        yield proxy


Opener = Callable[..., SftpStorage]


@pytest.fixture
def opened(sftp: SftpServer, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch) -> Opener:
    """Opens a fresh directory by way of the proxy."""
    monkeypatch.setattr(retry, "_FIRST_WAIT", 0.01)

    def opened(timeout: float = TIMEOUT, **options: Any) -> SftpStorage:
        url = f"sftp://127.0.0.1/{uuid.uuid4().hex}"
        storage = open_storage(url, sftp.options(proxy.port) | options, timeout)
        assert isinstance(storage, SftpStorage)
        storage.make_directory()
        return storage

    return opened


def test_a_write_survives_a_lost_connection(opened: Opener, proxy: TcpProxy) -> None:
    """In the middle of a part: it is written again over a fresh connection, to its place."""
    storage = opened()
    sink = storage.create(NAME, len(CONTENT), sync=True)
    sink.put_part(2, on_a_page(CONTENT[2 * sink.part_bytes :]))
    proxy.cut_after = proxy.forwarded + (3 << 20)
    for number in (0, 1):
        sink.put_part(number, on_a_page(CONTENT[number * sink.part_bytes : (number + 1) * sink.part_bytes]))
    sink.complete()
    assert proxy.connections == 2
    assert storage.read(NAME) == CONTENT


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_read_survives_a_lost_connection(opened: Opener, proxy: TcpProxy) -> None:
    """The range is read again. A thread of paramiko's meets the loss, too, and nobody is there to catch that."""
    storage = opened()
    put_file(storage, NAME, CONTENT)
    proxy.cut_after = proxy.forwarded + (1 << 20)
    buffer = bytearray(8 << 20)
    storage.open(NAME).read_into([memoryview(buffer)], 1000)
    assert bytes(buffer) == CONTENT[1000 : 1000 + len(buffer)]
    assert proxy.connections == 2


@pytest.mark.parametrize("after", [0, 300_000])
def test_metadata_survives_a_lost_connection(opened: Opener, proxy: TcpProxy, after: int) -> None:
    """It is put in place as a whole, and nothing else is left."""
    storage = opened()
    storage.put(".metadata", b"old", sync=True)
    proxy.cut_after = proxy.forwarded + after
    storage.put(".metadata", CONTENT[:1_000_000], sync=True)
    assert storage.read(".metadata") == CONTENT[:1_000_000]
    assert [file.name for file in storage.listing()[0]] == [".metadata"]


def test_whether_metadata_may_be_there_after_all(
    opened: Opener, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not if the server refuses them at first; but if an answer was lost, another one's failure proves nothing."""
    storage = opened()
    storage.child(".metadata").make_directory()
    with pytest.raises(Refused, match=r"cannot write .*\.metadata"):
        storage.put(".metadata", b"x", sync=True)
    write_all = sftp_module.write_all
    cuts = iter([True])

    def write_and_lose(file: Any, data: memoryview) -> None:
        if next(cuts, False):
            proxy.cut()
        write_all(file, data)

    monkeypatch.setattr(sftp_module, "write_all", write_and_lose)
    with pytest.raises(WriteError) as caught:
        storage.put(".metadata", b"x", sync=True)
    assert proxy.connections == 2
    assert not isinstance(caught.value, Refused)


def test_a_server_that_goes_away_is_an_error(opened: Opener, proxy: TcpProxy) -> None:
    """After a bounded number of tries, naming the path and no password."""
    storage = opened()
    sink = storage.create(NAME, 10, sync=True)
    proxy.close()
    with pytest.raises(ReadError, match=rf"cannot read {storage.path}/\.metadata.*Unable to connect") as caught:
        storage.read(".metadata")
    assert PASSWORD not in str(caught.value)
    with pytest.raises(WriteError, match=rf"cannot write {storage.path}/\.metadata"):
        storage.put(".metadata", b"x", sync=True)
    sink.abort()


def test_what_is_asked_wrongly_is_not_tried_again(opened: Opener, proxy: TcpProxy) -> None:
    """A file that is not there, one that ends, a directory in its place: one connection all the while."""
    storage = opened()
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
    with pytest.raises(OSError, match="2 of the file's 3 bytes"):
        sink.complete()
    assert proxy.connections == 1


def test_a_wrong_password(opened: Opener, proxy: TcpProxy) -> None:
    """The error says so, and hides it; it is not tried again."""
    with pytest.raises(WriteError, match="Authentication failed") as caught:
        opened(password="wrong-password-42")
    assert "wrong-password-42" not in str(caught.value)
    assert proxy.connections == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"host_key_policy": "reject"}, "not found in known_hosts"),
        ({"host_key_policy": "sometimes"}, "is not one of auto_add, warning, reject"),
        ({"password": None, "allow_agent": False}, "No authentication methods available"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_options_that_do_not_serve(opened: Opener, proxy: TcpProxy, options: dict[str, Any], said: str) -> None:
    """Unknown host keys where they are refused, and options that do not exist: the error says so, at once."""
    with pytest.raises(WriteError, match=said):
        opened(**options)
    assert proxy.connections <= 1


def test_a_connection_that_is_lost_while_it_is_made(opened: Opener, proxy: TcpProxy) -> None:
    """It is made again."""
    proxy.cut_after = 500
    opened()
    assert proxy.connections == 2


def test_address_in_the_url(sftp: SftpServer) -> None:
    """User, password and port may be in the URL, quoted as there; the path is literal, and no message has the user."""
    secret = urllib.parse.quote(PASSWORD, safe="").replace("-", "%2D")
    url = f"ssh://{USER}:{secret}@127.0.0.1:{sftp.port}/{uuid.uuid4().hex}/a#b?c"
    storage = open_storage(url, {"look_for_keys": False})
    storage.make_directory()
    assert (sftp.folder / url.rpartition(f"{sftp.port}/")[2]).is_dir()
    assert secret not in storage.path


@pytest.mark.parametrize("secret", ["hunter2/secret", "hunter2#secret", "hunter2 secret"])
def test_a_password_that_is_not_quoted(secret: str) -> None:
    """The error shows nothing of it, and says what to do where the URL cannot be taken apart."""
    with pytest.raises(WriteError) as caught:
        open_storage(f"sftp://trainer:{secret}@127.0.0.1:1/ckpt", {"look_for_keys": False}, 0.01)
    assert not [part for part in ("trainer", "hunter2", "secret") if part in str(caught.value)]
    assert ("percent-encoded" in str(caught.value)) == (" " not in secret)


def test_systems_without_a_timeout_for_what_is_sent(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as macOS: there is a connection."""
    monkeypatch.delattr(socket, "TCP_USER_TIMEOUT")
    storage = opened()
    put_file(storage, NAME, b"123")
    assert storage.read(NAME) == b"123"


# --- several at once -------------------------------------------------------------------------------------------------


def test_several_ranks_make_one_directory(sftp: SftpServer) -> None:
    """Whoever comes second finds it there, at each level."""
    top = uuid.uuid4().hex
    storages = [open_storage(f"sftp://127.0.0.1/{top}", sftp.options()) for _ in range(4)]
    for number in range(5):
        gate = threading.Barrier(len(storages), timeout=30)

        def make(storage: Storage, number: int = number, gate: threading.Barrier = gate) -> None:
            gate.wait()
            storage.child(f"{number}/a/b/c/d").make_directory()

        with ThreadPoolExecutor(len(storages)) as pool:
            list(pool.map(make, storages))
        assert (sftp.folder / top / f"{number}/a/b/c/d").is_dir()


def test_no_directory_below_a_file(opened: Opener) -> None:
    """That is an error which names it; so is a directory that still has something in it, to whoever removes it."""
    storage = opened()
    put_file(storage, "file", b"x")
    with pytest.raises(WriteError, match=r"cannot create .*/file/below"):
        storage.child("file/below").make_directory()
    assert not storage.remove_directory()
    storage.remove("file")
    assert storage.remove_directory()
    assert storage.remove_directory()


def test_links_in_a_listing(opened: Opener, sftp: SftpServer) -> None:
    """Those to files are files, with the size of what they lead to; others are left out."""
    storage = opened()
    folder = sftp.folder / storage.path.rpartition("/")[2]
    storage.child("directory").make_directory()
    put_file(storage, "file", b"12345")
    for name, target in (("to-file", "file"), ("to-directory", "directory"), ("to-nothing", "missing")):
        (folder / name).symlink_to(target)
    files, folders = storage.listing()
    assert sorted((file.name, file.nbytes) for file in files) == [("file", 5), ("to-file", 5)]
    assert folders == ["directory"]


def test_more_threads_than_a_server_allows_channels(opened: Opener) -> None:
    """They wait for one."""
    storage = opened()
    put_file(storage, NAME, b"x" * 100)
    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(lambda n: storage.head(NAME), range(200))) == [100] * 200
    assert 1 <= len(storage._client._idle) <= 8


# --- durability ------------------------------------------------------------------------------------------------------


def test_files_are_made_durable(opened: Opener, sftp: SftpServer) -> None:
    """The server is asked to, once a file, where that is wanted: of metadata before they are in place."""
    storage = opened()
    before = len(sftp.synced())
    put_file(storage, NAME, CONTENT)
    storage.put(".metadata", b"m", sync=True)
    data, metadata = sftp.synced()[before:]
    assert data == NAME
    assert metadata.startswith(".metadata") and metadata != ".metadata"
    put_file(storage, NAME, CONTENT, sync=False)
    storage.put(".metadata", b"m", sync=False)
    assert len(sftp.synced()) == before + 2


# --- servers that hang -----------------------------------------------------------------------------------------------

LIMIT = 2.0


@pytest.mark.parametrize(
    ("what", "fresh"), [("write", False), ("read", True), ("read", False), ("metadata", False), ("size", True)]
)
def test_a_server_that_hangs(opened: Opener, proxy: TcpProxy, what: str, fresh: bool) -> None:
    """Whatever is asked of it ends in an error within the timeout, also where a channel has to be opened first."""
    storage = opened(LIMIT)
    put_file(storage, NAME, CONTENT[:10_000])
    sink = storage.create(NAME, len(CONTENT), sync=True)
    reader = storage.open(NAME)
    part = on_a_page(CONTENT[: sink.part_bytes])
    calls: dict[str, Callable[[], object]] = {
        "write": lambda: sink.put_part(0, part),
        "read": lambda: reader.read_into([memoryview(bytearray(1000))], 0),
        "metadata": lambda: storage.put(".metadata", b"x", sync=True),
        "size": lambda: storage.head(NAME),
    }
    if fresh:
        storage._client._idle.clear()
    proxy.silent_until = math.inf
    started = time.monotonic()
    with pytest.raises((OSError, ReadError, WriteError)) as caught:
        calls[what]()
    assert time.monotonic() - started < LIMIT + 0.5  # for one try to remove what could not be put
    assert "NoneType" not in str(caught.value)


def test_many_threads_at_a_server_that_hangs(opened: Opener, proxy: TcpProxy) -> None:
    """They do not wait for one another's attempts."""
    storage = opened(LIMIT)
    proxy.silent_until = math.inf
    started = time.monotonic()
    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(storage.head, NAME) for _ in range(20)]
    assert {type(one.exception()) for one in asked} == {ReadError}
    assert time.monotonic() - started < 2 * LIMIT


def test_connecting_to_a_server_that_hangs(opened: Opener, proxy: TcpProxy) -> None:
    """It is an error, too."""
    proxy.silent_until = math.inf
    started = time.monotonic()
    with pytest.raises(WriteError, match="cannot open"):
        opened(LIMIT)
    assert time.monotonic() - started < LIMIT


@pytest.mark.parametrize("fresh", [False, True], ids=["channel in use", "channel being opened"])
def test_a_connection_that_falls_silent(opened: Opener, proxy: TcpProxy, fresh: bool) -> None:
    """After a tenth of the timeout another one is made."""
    storage = opened(10.0)
    put_file(storage, NAME, b"x" * 10)
    if fresh:
        storage._client._idle.clear()
    proxy.silent_until = proxy.connections
    assert storage.head(NAME) == 10
    assert proxy.connections == 2


def test_metadata_whose_answer_is_lost_are_published(
    opened: Opener, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With overwrite=False the second rename meets the file of the first, and knows it; nothing else is left."""
    storage = opened()
    rename = sftp_module._rename_to_new
    cuts = iter([True])

    def rename_and_lose(channel: Any, source: str, target: str) -> None:
        rename(channel, source, target)
        if next(cuts, False):
            proxy.cut()
            channel.stat(target)

    monkeypatch.setattr(sftp_module, "_rename_to_new", rename_and_lose)
    storage.put(".metadata", b"ours", sync=True, replace=False)
    assert proxy.connections == 2
    assert [(file.name, file.nbytes) for file in storage.listing()[0]] == [(".metadata", 4)]
    with pytest.raises(WriteError, match="must not be replaced"):
        storage.put(".metadata", b"theirs", sync=True, replace=False)


def test_connections_end_with_their_storage(opened: Opener) -> None:
    """A storage is opened for each save: what it opened goes with it."""
    before = set(threading.enumerate())
    storage = opened()
    put_file(storage, NAME, CONTENT)
    assert set(threading.enumerate()) - before
    del storage
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert {thread for thread in set(threading.enumerate()) - before if thread.name != "proxy"} == set()
