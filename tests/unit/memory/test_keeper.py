"""The answers of a keeper, which runs in this process."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dcp_tensorizer._index.schema import SaveRecord
from dcp_tensorizer._memory import keeper as keeper_module
from dcp_tensorizer._memory.keeper import Keeper
from dcp_tensorizer._memory.protocol import (
    ClaimRequest,
    Extent,
    Forget,
    Found,
    GetPart,
    Plain,
    StateHead,
    StatePart,
    WrittenDigests,
)
from dcp_tensorizer._memory.runtime_directory import listen
from dcp_tensorizer._runtime.channel import Channel, Done, Failed
from dcp_tensorizer._runtime.forks import anonymous_file
from dcp_tensorizer._tensor_file.digests import digests_of

SIZE = 4096
NOWHERE = Path("/nonexistent/socket")


def state(number: str) -> StatePart:
    head = StateHead(number, 1, "run", 0, 1, SaveRecord(1, None, (), {}))
    extents = (Extent(is_inline=False, offset=64, nbytes=100), Extent(is_inline=True, offset=0, nbytes=3))
    return StatePart(head, SIZE, extents, b"what is where", b"abc")


@contextmanager
def connected(keeper: Keeper, *, is_trainer: bool = False) -> Iterator[Channel]:
    """Connects to a keeper, which answers on a thread."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    serving = threading.Thread(target=keeper.serve, args=(Channel(theirs),), kwargs={"is_trainer": is_trainer})
    serving.start()
    try:
        yield channel
    finally:
        channel.close()
        serving.join()


def ask(channel: Channel, request: object, fds: tuple[int, ...] = ()) -> object:
    channel.send(request, fds)
    answer, received = channel.receive()
    for fd in received:
        os.close(fd)
    return answer


@pytest.fixture
def buffer() -> Iterator[int]:
    fd = anonymous_file("test")
    os.ftruncate(fd, SIZE)
    os.pwrite(fd, b"x" * 100, 64)
    yield fd
    os.close(fd)


def test_what_a_save_has_digested_is_not_digested_again(buffer: int) -> None:
    """The trainer sends the digests that the writer process has computed, and the keeper computes the others."""
    keeper, awaited = Keeper("run", 7, 60.0), replace(state("a"), digests_follow=True)
    with connected(keeper, is_trainer=True) as trainer, connected(keeper) as visitor:
        assert ask(trainer, awaited, (buffer,)) == Done()
        assert ask(trainer, WrittenDigests("a", {(64, 100): b"of a save"})) == Done()
        assert ask(trainer, WrittenDigests("a", {(64, 100): b"too late"})) == Done()
        assert ask(trainer, WrittenDigests("gone", {})) == Done()
        assert ask(visitor, GetPart("a", 0)) == replace(awaited, digests=(b"of a save", digests_of(b"abc")))


@pytest.mark.parametrize("dies", ["before it is told", "afterwards"])
def test_what_no_save_has_written_is_digested_when_the_trainer_is_gone(buffer: int, dies: str) -> None:
    """If the trainer is gone before it has sent the digests, the keeper computes them."""
    keeper, awaited = Keeper("run", 7, 60.0), replace(state("a"), digests_follow=True)
    with connected(keeper, is_trainer=True) as trainer, connected(keeper) as visitor:
        if dies == "before it is told":
            keeper.orphan()
        assert ask(trainer, awaited, (buffer,)) == Done()
        keeper.orphan()
        assert ask(trainer, WrittenDigests("a", {(64, 100): b"too late"})) == Done()
        assert ask(visitor, GetPart("a", 0)) == replace(awaited, digests=(digests_of(b"x" * 100), digests_of(b"abc")))


def test_a_state_is_given_with_its_digests(buffer: int) -> None:
    """The part has the digests of the buffer and of the inline bytes."""
    keeper = Keeper("run", 7, 60.0)
    with connected(keeper, is_trainer=True) as trainer, connected(keeper) as visitor:
        assert ask(trainer, state("a"), (buffer,)) == Done()
        assert ask(visitor, Plain.LIST) == Found("run", 7, (state("a").head,))
        content = ask(visitor, GetPart("a", 0))
        assert isinstance(content, StatePart)
        assert replace(content, digests=()) == state("a")
        assert [len(digest) for digest in content.digests] == [8, 8]
        os.pwrite(buffer, b"y", 64)
        assert ask(trainer, state("b"), (buffer,)) == Done()
        other = ask(visitor, GetPart("b", 0))
        assert isinstance(other, StatePart)
        assert other.digests[0] != content.digests[0]
        assert other.digests[1] == content.digests[1]
        assert isinstance(ask(visitor, GetPart("c", 0)), Failed)


def test_what_is_forgotten_is_gone(buffer: int) -> None:
    """A state that is not named stays, also one that arrived later than the request was made."""
    keeper = Keeper("run", 7, 60.0)
    with connected(keeper, is_trainer=True) as trainer:
        for number in "abc":
            ask(trainer, state(number), (buffer,))
        assert ask(trainer, Forget(("a", "unknown"))) == ("a", "unknown")
        found = ask(trainer, Plain.LIST)
        assert isinstance(found, Found)
        assert [head.id for head in found.heads] == ["b", "c"]


def test_a_buffer_that_is_too_short(buffer: int) -> None:
    """The keeper refuses the buffer, because a read past its end would kill the keeper."""
    keeper = Keeper("run", 7, 60.0)
    os.ftruncate(buffer, SIZE // 2)
    with connected(keeper, is_trainer=True) as trainer:
        assert isinstance(ask(trainer, state("a"), (buffer,)), Failed)


def test_a_claim() -> None:
    """A claim needs a keeper without a trainer, is for one run, and ends with its connection."""
    keeper = Keeper("run", 7, 60.0)
    with connected(keeper) as first, connected(keeper) as second:
        with connected(keeper, is_trainer=True):
            assert isinstance(ask(first, ClaimRequest("next")), Failed)
        assert ask(first, ClaimRequest("next")) == Done()
        assert isinstance(ask(second, ClaimRequest("another")), Failed)
        with connected(keeper) as other_rank:
            assert ask(other_rank, ClaimRequest("next")) == Done()
        assert isinstance(ask(second, ClaimRequest("another")), Failed)
    with connected(keeper) as third:
        assert ask(third, ClaimRequest("another")) == Done()


def test_it_ends_when_it_is_told_to() -> None:
    """Any process of this user may end the keeper."""
    keeper = Keeper("run", 7, 60.0)
    with connected(keeper) as visitor:
        assert ask(visitor, Plain.END) == Done()
        keeper.wait_for_end(NOWHERE)


def test_how_long_it_waits(buffer: int) -> None:
    """The keeper waits for its time from the end of the trainer on, and anew when a successor is gone."""
    keeper = Keeper("run", 7, 600.0)
    waiting = threading.Thread(target=keeper.wait_for_end, args=(NOWHERE,))
    waiting.start()
    with connected(keeper) as visitor:
        with connected(keeper, is_trainer=True) as trainer:
            ask(trainer, state("a"), (buffer,))
        assert isinstance(ask(visitor, GetPart("a", 0)), StatePart)
        with connected(keeper) as successor:
            assert ask(successor, ClaimRequest("next")) == Done()
            assert waiting.is_alive()
            keeper._seconds = 0.01
        waiting.join()


def test_it_ends_when_nobody_comes() -> None:
    """The keeper ends some seconds after the trainer, unless a successor has claimed it."""
    keeper = Keeper("run", 7, 0.01)
    waiting = threading.Thread(target=keeper.wait_for_end, args=(NOWHERE,))
    waiting.start()
    with connected(keeper, is_trainer=True), connected(keeper) as visitor:
        assert isinstance(ask(visitor, ClaimRequest("next")), Failed)
        assert waiting.is_alive()
    waiting.join()


@pytest.mark.parametrize("is_own", [True, False])
def test_whose_connections_are_served(monkeypatch: pytest.MonkeyPatch, is_own: bool) -> None:
    """A process of this user gets answers. The connection of another user is closed."""
    ours, theirs = socket.socketpair()
    connections = [(theirs, "")]
    listener: Any = SimpleNamespace(accept=connections.pop)
    monkeypatch.setattr(keeper_module, "is_own_peer", lambda connection: is_own)
    with pytest.raises(IndexError):  # no further connection
        keeper_module._accept(listener, Keeper("run", 7, 60.0))
    with closing(Channel(ours)) as channel:
        if is_own:
            assert ask(channel, Plain.LIST) == Found("run", 7, ())
        else:
            with pytest.raises(EOFError):
                channel.receive()


def test_its_socket_does_not_grow_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper updates the times of its socket, because systemd removes old files from /tmp."""
    path = tmp_path / "directory" / "socket"
    listen(path).close()
    for old in (path, path.parent):
        os.utime(old, (0, 0))
    monkeypatch.setattr(keeper_module, "_TOUCH_SECONDS", 0.001)
    keeper = Keeper("run", 7, 0.01)
    keeper.orphan()
    keeper.wait_for_end(path)
    assert min(touched.stat().st_mtime for touched in (path, path.parent)) > 0
