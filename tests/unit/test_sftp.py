"""SFTP when connections are lost, and what is left of them. The server is a real one, with a proxy in front of it."""

from __future__ import annotations

import gc
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dcp_tensorizer import ReadError, WriteError, _retry
from dcp_tensorizer._destination import open_storage
from dcp_tensorizer._layout import data_file_name
from dcp_tensorizer._sftp import SftpStorage

from ..proxy import TcpProxy, tcp_proxy
from ..servers import PASSWORD, SftpServer
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
    monkeypatch.setattr(_retry, "_FIRST_WAIT", 0.01)

    def opened(**options: Any) -> SftpStorage:
        storage = open_storage(f"sftp://127.0.0.1/{uuid.uuid4().hex}", sftp.options(proxy.port) | options)
        assert isinstance(storage, SftpStorage)
        storage.make_directory()
        return storage

    return opened


def test_a_write_survives_a_lost_connection(opened: Opener, proxy: TcpProxy) -> None:
    """In the middle of a part: it is written again over a fresh connection, to its place."""
    storage = opened()
    sink = storage.create(NAME, len(CONTENT), sync=True)
    sink.put(2, on_a_page(CONTENT[2 * sink.part_bytes :]))
    proxy.cut_after = proxy.forwarded + (3 << 20)
    for number in (0, 1):
        sink.put(number, on_a_page(CONTENT[number * sink.part_bytes : (number + 1) * sink.part_bytes]))
    sink.close()
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
    storage.publish(".metadata", b"old", sync=True)
    proxy.cut_after = proxy.forwarded + after
    storage.publish(".metadata", CONTENT[:1_000_000], sync=True)
    assert storage.read(".metadata") == CONTENT[:1_000_000]
    assert [file.name for file in storage.listing()[0]] == [".metadata"]


def test_a_server_that_goes_away_is_an_error(opened: Opener, proxy: TcpProxy) -> None:
    """After a bounded number of tries, naming the path and no password."""
    storage = opened()
    sink = storage.create(NAME, 10, sync=True)
    proxy.close()
    with pytest.raises(ReadError, match=rf"cannot read {storage.path}/\.metadata") as caught:
        storage.read(".metadata")
    assert PASSWORD not in str(caught.value)
    with pytest.raises(WriteError, match=rf"cannot write {storage.path}/\.metadata"):
        storage.publish(".metadata", b"x", sync=True)
    sink.abort()


def test_what_is_asked_wrongly_is_not_tried_again(opened: Opener, proxy: TcpProxy) -> None:
    """A file that is not there, one that ends, a directory in its place: one connection all the while."""
    storage = opened()
    put_file(storage, NAME, b"short")
    storage.child("directory").make_directory()
    assert storage.size("missing") is None
    with pytest.raises(FileNotFoundError):
        storage.open("missing").read_into([memoryview(bytearray(1))], 0)
    with pytest.raises(EOFError):
        storage.open(NAME).read_into([memoryview(bytearray(9))], 0)
    with pytest.raises(ReadError):
        storage.read("directory")
    sink = storage.create(NAME, 3, sync=True)
    sink.put(0, on_a_page(b"ab"))
    with pytest.raises(OSError, match="2 of the file's 3 bytes"):
        sink.close()
    assert proxy.connections == 1


def test_a_wrong_password(opened: Opener) -> None:
    """The error says so, and hides it."""
    with pytest.raises(WriteError, match="Authentication failed") as caught:
        opened(password="wrong-password-42")
    assert "wrong-password-42" not in str(caught.value)


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
