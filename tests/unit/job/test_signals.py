"""Signals that ask a job to stop, and the earlier handlers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from dcp_tensorizer._job import policy as module
from dcp_tensorizer._job.policy import StopSignals


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Sets an earlier handler, and yields the signals that it receives."""
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    yield heard
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_is_noted_and_passed_on(heard: list[int]) -> None:
    """The earlier handler is called as well, and is restored afterwards."""
    before = signal.getsignal(signal.SIGUSR1)
    stop = StopSignals([signal.SIGUSR1])
    stop.install()
    assert not stop.seen
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (stop.seen, heard) == (True, [signal.SIGUSR1])
    os.kill(os.getpid(), signal.SIGUSR1)  # the launcher's copy of the same signal
    assert heard == [signal.SIGUSR1] * 2
    stop.uninstall()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_later_signal_does_what_it_would_have_done(heard: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A later signal goes to the earlier handler, which is restored."""
    before = signal.getsignal(signal.SIGUSR1)
    stop = StopSignals([signal.SIGUSR1])
    stop.install()
    os.kill(os.getpid(), signal.SIGUSR1)
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 60)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1] * 2
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_handler_that_came_later_stays(heard: list[int]) -> None:
    """A later handler may call this one, which still calls the earlier one."""
    stop = StopSignals([signal.SIGUSR1])
    stop.install()
    ours = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda number, frame: ours(number, frame))  # type: ignore[operator,misc]
    stop.uninstall()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]


def test_a_forked_child_ends_when_it_is_told_to() -> None:
    """A stop signal ends the worker of a data loader, as without a manager."""
    stop = StopSignals([signal.SIGTERM])
    stop.install()
    reading, writing = os.pipe()
    try:
        pid = os.fork()
        if pid == 0:
            os.write(writing, b"x")
            signal.pause()
            os._exit(7)
        os.read(reading, 1)
        os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
    finally:
        stop.uninstall()
        os.close(reading)
        os.close(writing)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM


def test_handlers_go_back_from_another_thread(heard: list[int]) -> None:
    """Another thread cannot set handlers, so each is restored when its signal arrives, and is called once."""
    before = signal.getsignal(signal.SIGUSR1)
    stop = StopSignals([signal.SIGUSR1])
    stop.install()
    thread = threading.Thread(target=stop.uninstall)
    thread.start()
    thread.join()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (heard, stop.seen, signal.getsignal(signal.SIGUSR1)) == ([signal.SIGUSR1], False, before)


def test_only_the_main_thread_has_handlers() -> None:
    """The error asks for the main thread. Without signals any thread may make the manager."""
    errors: list[str] = []

    def make() -> None:
        StopSignals([])
        try:
            StopSignals([signal.SIGTERM])
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert errors == ["only the main thread can handle signals. Make the manager there, or pass stop_signals=()"]


@pytest.mark.parametrize("signals", [7.5, ["TERM"], [9999]])
def test_what_is_no_signal(signals: object) -> None:
    """The error shows the value that was passed."""
    with pytest.raises(TypeError, match="stop_signals must be signals"):
        StopSignals(signals)  # type: ignore[arg-type]


def test_signals_that_nobody_can_handle(heard: list[int]) -> None:
    """The error names the signals, and no other handler has changed."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="must not contain SIGKILL"):
        StopSignals([signal.SIGTERM, signal.SIGKILL])
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")
def test_a_signal_waits_while_a_child_is_forked() -> None:
    """Python drops signals that a child receives before it has restored the handlers, so a child would not end."""
    stop = StopSignals([signal.SIGUSR1])
    stop.install()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    module._block_signals()
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
    was_seen = stop.seen
    module._unblock_signals()
    assert (was_seen, stop.seen) == (False, True)
    child = os.fork()
    if child == 0:
        is_free = signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
        os._exit(0 if is_free and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    stop.uninstall()
