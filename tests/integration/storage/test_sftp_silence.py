"""SFTP storage when its server, or the connection to it, falls silent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from dcp_tensorizer import ReadError, WriteError
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._storage.sftp import SftpStorage
from dcp_tensorizer._tensor_file.names import data_file_name
from dcp_tensorizer.testing import on_a_page, put_file

from ...lab.faults import TcpProxy
from ...lab.servers import SftpServer

NAME = data_file_name(0, 0, "a" * 32)
CONTENT = bytes(range(251)) * (20 * (1 << 20) // 251)

Opener = Callable[..., SftpStorage]

LIMIT = 10.0
"""A timeout whose tenth is enough for a slow machine to connect."""
LONG = 120.0
"""Seconds that no operation takes, also on a busy machine, unless it ignores its timeout."""


def test_a_server_that_hangs(open_sftp: Opener, tcp: TcpProxy) -> None:
    """Every operation ends in an error when the timeout is over, also if it must open a channel first."""
    calls = {
        (what, fresh): _operation(open_sftp(LIMIT), what, fresh)
        for what, fresh in [("write", False), ("read", True), ("read", False), ("metadata", False), ("head", True)]
    }
    tcp.silent_until = math.inf
    with ThreadPoolExecutor(len(calls)) as pool:  # each has a connection of its own, and waits as long as the others
        answers = {name: pool.submit(_failure, call) for name, call in calls.items()}
    for name, answer in answers.items():
        error, seconds = answer.result()
        assert isinstance(error, OSError | ReadError | WriteError), name
        assert "NoneType" not in str(error), name
        assert seconds < LONG, name


def _operation(storage: SftpStorage, what: str, fresh: bool) -> Callable[[], object]:
    """A call of a storage that has a file; ``fresh``: for which it must open a channel."""
    put_file(storage, NAME, CONTENT[:10_000])
    sink = storage.create(NAME, len(CONTENT), sync=True)
    reader = storage.open(NAME)
    part = on_a_page(CONTENT[: sink.part_bytes])
    calls: dict[str, Callable[[], object]] = {
        "write": lambda: sink.put_part(0, part),
        "read": lambda: reader.read_into([memoryview(bytearray(1000))], 0),
        "metadata": lambda: storage.put(".metadata", b"x", sync=True),
        "head": lambda: storage.head(NAME),
    }
    if fresh:
        storage.client.idle.clear()
    return calls[what]


def _failure(call: Callable[[], object]) -> tuple[Exception | None, float]:
    """What a call raised, and how long it took."""
    started, error = time.monotonic(), None
    try:
        call()
    except Exception as raised:
        error = raised
    return error, time.monotonic() - started


def test_many_threads_at_a_server_that_hangs(open_sftp: Opener, tcp: TcpProxy) -> None:
    """They share the attempts to connect, and do not each make their own."""
    storage = open_sftp(LIMIT)
    tcp.silent_until = math.inf
    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(storage.head, NAME) for _ in range(20)]
    assert {type(answer.exception()) for answer in answers} == {ReadError}
    assert tcp.connections < 20


def test_connecting_to_a_server_that_hangs(sftp: SftpServer, tcp: TcpProxy) -> None:
    """It is an error when the timeout is over."""
    tcp.silent_until = math.inf
    started = time.monotonic()
    with pytest.raises(WriteError, match="cannot open"):
        open_storage("sftp://127.0.0.1/x", sftp.options(tcp.port), 2.0)
    assert time.monotonic() - started < LONG


@pytest.mark.parametrize("fresh", [False, True], ids=["channel in use", "channel being opened"])
def test_a_connection_that_falls_silent(open_sftp: Opener, tcp: TcpProxy, fresh: bool) -> None:
    """After a tenth of the timeout another connection is made."""
    storage = open_sftp(30.0)
    put_file(storage, NAME, b"x" * 10)
    if fresh:
        storage.client.idle.clear()
    tcp.silent_until = tcp.connections
    assert storage.head(NAME) == 10
    assert tcp.connections == 2
