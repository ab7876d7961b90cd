"""Messages and descriptors across a socket pair."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dcp_tensorizer._runtime.channel import Channel, Done, Failed, Progress, Ready
from dcp_tensorizer._runtime.threads import ProgressTimeout, in_background
from dcp_tensorizer._writer_process.options import SaveOptions
from dcp_tensorizer._writer_process.protocol import FileRequest, TensorSource, WriteRequest

from ...lab.processes import open_descriptors
from ...lab.waiting import WAIT

SOURCE = TensorSource("layer.0", "bfloat16", (3, 4), 24, memory=7, offset=4096)
OPTIONS = SaveOptions(storage_options={"key": "secret", "nested": {"a": [1]}}, thread_count=2)
REQUEST = WriteRequest("/checkpoint", OPTIONS, (FileRequest("__0_0_x.tensors", (SOURCE,)),))


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    left, right = (Channel(end) for end in socket.socketpair())
    yield left, right
    left.close()
    right.close()


def test_messages_keep_their_order(channels: tuple[Channel, Channel]) -> None:
    """Several at once in the socket are taken apart again."""
    for number in range(100):
        channels[0].send(Progress(number))
    assert [channels[1].receive()[0] for _ in range(100)] == [Progress(number) for number in range(100)]


def test_descriptors_travel_with_their_message(channels: tuple[Channel, Channel], tmp_path: Path) -> None:
    """The receiver gets descriptors of its own for the same files, in order, and with the right message."""
    paths = [tmp_path / name for name in "abc"]
    fds = [os.open(path, os.O_RDWR | os.O_CREAT) for path in paths]
    channels[0].send(Progress(1))
    channels[0].send(REQUEST, fds[:2])
    channels[0].send(Progress(2), fds[2:])
    assert channels[1].receive() == (Progress(1), [])
    message, two = channels[1].receive()
    assert message == REQUEST
    _, one = channels[1].receive()
    received = two + one
    assert not set(received) & set(fds)
    assert [os.fstat(fd).st_ino for fd in received] == [path.stat().st_ino for path in paths]
    for fd in fds + received:
        os.close(fd)


def test_a_message_larger_than_the_socket_buffer_arrives(channels: tuple[Channel, Channel]) -> None:
    """20,000 tensors with long names: sent while the other end reads."""
    sources = tuple(TensorSource(f"{n:0200}", "float32", (n,), 4 * n, "tensor", 1, 64 * n) for n in range(20_000))
    request = WriteRequest("/p", OPTIONS, (FileRequest("f", sources),))
    sending = threading.Thread(target=channels[0].send, args=(request,), daemon=True)
    sending.start()
    message, _ = channels[1].receive()
    sending.join(10)
    assert message == request


def test_a_closed_end_is_an_eof(channels: tuple[Channel, Channel]) -> None:
    """Receiving from, and sending to, an end that is gone."""
    channels[0].close()
    with pytest.raises(EOFError):
        channels[1].receive()
    with pytest.raises(EOFError):
        channels[1].send(REQUEST)


def test_an_end_that_closes_in_the_middle_of_a_message_is_an_eof() -> None:
    """Half a message is none."""
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    whole, copy = socket.socketpair()
    Channel(whole).send(REQUEST)
    content = copy.recv(1 << 20)
    for cut in (1, 5, 12, 20, len(content) - 1):
        ours.sendall(content[:cut])
        ours.close()
        with pytest.raises(EOFError):
            channel.receive()
        channel.close()
        ours, theirs = socket.socketpair()
        channel = Channel(theirs)
    for end in (ours, theirs, whole, copy):
        end.close()


def test_closing_is_seen_though_another_process_holds_a_copy() -> None:
    """A forked child that inherited the descriptor does not keep the other end waiting."""
    ours, theirs = socket.socketpair()
    copy = ours.dup()
    left, right = Channel(ours), Channel(theirs)
    left.close()
    with pytest.raises(EOFError):
        right.receive()
    copy.close()
    right.close()


def test_hanging_up_waits_for_the_other_end(channels: tuple[Channel, Channel]) -> None:
    """It has read what was sent and has closed by then; what it said meanwhile ends no wait."""
    left, right = channels
    left.send(Progress(1))
    right.send(Progress(2))
    hanging_up = in_background(lambda: left.hang_up(WAIT))
    assert right.receive() == (Progress(1), [])
    with pytest.raises(EOFError):
        right.receive()
    assert not hanging_up.done()
    right.close()
    hanging_up.result(WAIT)


def test_hanging_up_on_an_end_that_does_nothing(channels: tuple[Channel, Channel]) -> None:
    """It is waited for as long as was said; and again after a close, not at all."""
    channels[0].hang_up(0.01)
    with pytest.raises(EOFError):
        channels[1].receive()
    channels[0].close()
    channels[0].hang_up(WAIT)


def test_too_few_descriptors_are_an_error_and_the_next_message_arrives(channels: tuple[Channel, Channel]) -> None:
    """At the descriptor limit a message fails by itself: nothing leaks, and the channel stays in step."""
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
    channels[0].send(REQUEST, fds)
    channels[0].send(Progress(5))
    before = open_descriptors()
    _only, second = [fd for fd in range(max(before) + 3) if fd not in before][:2]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (second, hard))
    try:
        with pytest.raises(OSError, match="descriptor limit"):
            channels[1].receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert open_descriptors() == before
    assert channels[1].receive() == (Progress(5), [])
    for fd in fds:
        os.close(fd)


class Strange:
    """What cannot be made again where it arrives."""

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


def test_a_message_that_cannot_be_understood_leaves_no_descriptor(
    channels: tuple[Channel, Channel], tmp_path: Path
) -> None:
    """Those that came with it are closed, and the next message is received."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    before = open_descriptors()
    channels[0].send(Strange(), [fd, fd])
    channels[0].send(Progress(1))
    with pytest.raises(ValueError, match="no number"):
        channels[1].receive()
    assert open_descriptors() == before
    assert channels[1].receive() == (Progress(1), [])
    os.close(fd)


def test_the_other_end_may_stop_in_the_middle_of_a_message() -> None:
    """Whoever waits with a limit hears of it, and not only before the first byte."""
    copied, sent = socket.socketpair()
    with copied, sent:
        Channel(sent).send(REQUEST)
        message = copied.recv(1 << 20)
    end, other = socket.socketpair()
    channel, patience = Channel(other), ProgressTimeout(0.05, 1.0)
    with end, other:
        end.sendall(message[:-1])
        with pytest.raises(TimeoutError):
            channel.receive(lambda: channel.wait_readable(patience))


def test_a_wait_ends_when_a_check_fails(channels: tuple[Channel, Channel]) -> None:
    """What the check raises comes out: that the process is gone, say, while a child of its own holds the socket."""

    def check() -> None:
        raise EOFError

    with pytest.raises(EOFError):
        channels[1].wait_readable(ProgressTimeout(0.001, 1.0), check)


def test_the_same_progress_again_and_again_is_none(channels: tuple[Channel, Channel]) -> None:
    """However often it is told: the time without progress goes on, though no wait for a message is long."""
    ours, theirs = channels

    def tell() -> None:
        with suppress(EOFError):
            while True:
                theirs.send(Progress(7), timeout=WAIT)

    telling = in_background(tell)
    with pytest.raises(TimeoutError, match=r"no answer in 0\.05 s"):
        ours.answer(0.05)
    ours.close()
    telling.result(WAIT)


def test_a_request_and_its_answer(channels: tuple[Channel, Channel]) -> None:
    """The first message of a process and its progress are no answers; what fails, or cannot be understood, is said."""
    ours, theirs = channels

    def answer(request: object, fds: list[int]) -> tuple[object, list[int]]:
        theirs.send(Progress(1))
        if request == Progress(0):
            raise ValueError("nothing to do")
        return Done(), []

    theirs.send(Ready())
    serving = in_background(lambda: theirs.serve(answer))
    told: list[int] = []
    assert ours.ask(REQUEST, timeout=WAIT, progress=told.append) == (Done(), [])
    assert told == [1]
    failed, _ = ours.ask(Progress(0), timeout=WAIT)
    assert isinstance(failed, Failed)
    assert "nothing to do" in failed.message and "Traceback" in failed.details
    strange, _ = ours.ask(Strange(), timeout=WAIT)
    assert isinstance(strange, Failed) and "no number" in strange.message
    ours.close()
    serving.result(WAIT)


def test_an_answer_that_does_not_come(channels: tuple[Channel, Channel]) -> None:
    """It is waited for as long as was said, and the same progress again is none."""
    channels[1].send(Progress(7))
    channels[1].send(Progress(7))
    with pytest.raises(TimeoutError, match=r"no answer in 0.05 s"):
        channels[0].ask(REQUEST, timeout=0.05)
