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

from dcp_tensorizer import CheckpointError
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
    """`receive` separates messages that lie in the socket together."""
    for number in range(100):
        channels[0].send(Progress(number))
    assert [channels[1].receive()[0] for _ in range(100)] == [Progress(number) for number in range(100)]


def test_descriptors_travel_with_their_message(channels: tuple[Channel, Channel], tmp_path: Path) -> None:
    """The receiver gets its own descriptors of the same files, in order, with the right message."""
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
    """A request with 20,000 long names is sent while the other end reads."""
    sources = tuple(TensorSource(f"{n:0200}", "float32", (n,), 4 * n, "tensor", 1, 64 * n) for n in range(20_000))
    request = WriteRequest("/p", OPTIONS, (FileRequest("f", sources),))
    sending = threading.Thread(target=channels[0].send, args=(request,), daemon=True)
    sending.start()
    message, _ = channels[1].receive()
    sending.join(10)
    assert message == request


def test_a_closed_end_is_an_eof(channels: tuple[Channel, Channel]) -> None:
    """`receive` and `send` raise `EOFError` if the other end is closed."""
    channels[0].close()
    with pytest.raises(EOFError):
        channels[1].receive()
    with pytest.raises(EOFError):
        channels[1].send(REQUEST)


def test_an_end_that_closes_in_the_middle_of_a_message_is_an_eof() -> None:
    """`receive` raises `EOFError` if the other end closes within a message."""
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
    """`close` shuts the socket down, so the other end gets EOF even if a forked child holds a copy."""
    ours, theirs = socket.socketpair()
    copy = ours.dup()
    left, right = Channel(ours), Channel(theirs)
    left.close()
    with pytest.raises(EOFError):
        right.receive()
    copy.close()
    right.close()


def test_hanging_up_waits_for_the_other_end(channels: tuple[Channel, Channel]) -> None:
    """`hang_up` returns when the other end has read all messages and closed; an unread answer does not end the wait."""
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
    """`hang_up` returns after its timeout. On a closed channel it returns at once."""
    channels[0].hang_up(0.01)
    with pytest.raises(EOFError):
        channels[1].receive()
    channels[0].close()
    channels[0].hang_up(WAIT)


def test_too_few_descriptors_are_an_error_and_the_next_message_arrives(channels: tuple[Channel, Channel]) -> None:
    """At the descriptor limit one message fails and leaks no descriptor, and the next message arrives."""
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
    """An object that cannot be unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


def test_a_message_that_cannot_be_unpickled_leaves_no_descriptor(
    channels: tuple[Channel, Channel], tmp_path: Path
) -> None:
    """`receive` closes the descriptors of such a message, and receives the next one."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    before = open_descriptors()
    channels[0].send(Strange(), [fd, fd])
    channels[0].send(Progress(1))
    with pytest.raises(CheckpointError, match=r"^storage_options cannot be sent .*no number"):
        channels[1].receive()
    assert open_descriptors() == before
    assert channels[1].receive() == (Progress(1), [])
    os.close(fd)


def test_the_other_end_may_stop_in_the_middle_of_a_message() -> None:
    """A wait with a timeout also ends after the first byte of a message."""
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
    """`wait_readable` raises the error of its check, such as the death of the process."""

    def check() -> None:
        raise EOFError

    with pytest.raises(EOFError):
        channels[1].wait_readable(ProgressTimeout(0.001, 1.0), check)


def test_repeated_reports_without_progress_time_out(channels: tuple[Channel, Channel]) -> None:
    """Reports of the same number of bytes do not renew the timeout, however often they arrive."""
    ours, theirs = channels

    def report() -> None:
        with suppress(EOFError):
            while True:
                theirs.send(Progress(7), timeout=WAIT)

    reporting = in_background(report)
    with pytest.raises(TimeoutError, match=r"no answer in 0\.05 s"):
        ours.answer(0.05)
    ours.close()
    reporting.result(WAIT)


def test_a_request_and_its_answer(channels: tuple[Channel, Channel]) -> None:
    """`ask` skips `Ready`, passes progress on, and returns the answer. Errors of `serve` arrive as `Failed`."""
    ours, theirs = channels

    def answer(request: object, fds: list[int]) -> tuple[object, list[int]]:
        theirs.send(Progress(1))
        if request == Progress(0):
            raise ValueError("nothing to do")
        return Done(), []

    theirs.send(Ready())
    serving = in_background(lambda: theirs.serve(answer))
    reported: list[int] = []
    assert ours.ask(REQUEST, timeout=WAIT, progress=reported.append) == (Done(), [])
    assert reported == [1]
    failed, _ = ours.ask(Progress(0), timeout=WAIT)
    assert isinstance(failed, Failed)
    assert "nothing to do" in failed.message and "Traceback" in failed.details
    strange, _ = ours.ask(Strange(), timeout=WAIT)
    assert isinstance(strange, Failed) and "no number" in strange.message
    ours.close()
    serving.result(WAIT)


def test_an_answer_that_does_not_come(channels: tuple[Channel, Channel]) -> None:
    """`ask` raises `TimeoutError` if the other end only repeats its progress."""
    channels[1].send(Progress(7))
    channels[1].send(Progress(7))
    with pytest.raises(TimeoutError, match=r"no answer in 0.05 s"):
        channels[0].ask(REQUEST, timeout=0.05)
