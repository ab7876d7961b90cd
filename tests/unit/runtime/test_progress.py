"""The progress of loads and saves: what callbacks and the log are told."""

from __future__ import annotations

import logging
import threading

import pytest

from dcp_tensorizer._runtime import progress
from dcp_tensorizer._runtime.progress import TransferProgress, each_second

WAIT = 60.0


def test_a_long_load_is_logged_while_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    """Whenever the interval is over; the callback is told every time."""
    calls: list[tuple[int, int]] = []
    with caplog.at_level(logging.INFO, "dcp_tensorizer"):
        often = TransferProgress("loading", "/ckpt", lambda done, total: calls.append((done, total)), log_seconds=0.0)
        seldom = TransferProgress("loading", "/ckpt", None, log_seconds=3600.0)
        for done in (1_000_000_000, 4_000_000_000):
            often(done, 4_000_000_000)
            seldom(done, 4_000_000_000)
    assert calls == [(1_000_000_000, 4_000_000_000), (4_000_000_000, 4_000_000_000)]
    assert [record.message.rpartition(",")[0] for record in caplog.records] == [
        "loading /ckpt: 1.0 of 4.0 GB",
        "loading /ckpt: 4.0 of 4.0 GB",
    ]


def test_a_callback_that_fails_is_not_called_again(caplog: pytest.LogCaptureFixture) -> None:
    """The log has its error, once."""
    calls: list[int] = []

    def fail(done: int, total: int) -> None:
        calls.append(done)
        raise RuntimeError("no terminal")

    transfer = TransferProgress("saving", "/ckpt", fail)
    for done in (1, 2, 3):
        transfer(done, 3)
    assert calls == [1]
    (record,) = caplog.records
    assert (record.levelname, record.message) == ("ERROR", "on_progress failed while saving /ckpt, which continues")


def test_a_block_is_told_of_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it runs, and no longer."""
    monkeypatch.setattr(progress, "_SECONDS", 0.001)
    told, threads = threading.Semaphore(0), set[threading.Thread]()

    def tell() -> None:
        threads.add(threading.current_thread())
        told.release()

    with each_second(tell):
        assert all(told.acquire(timeout=WAIT) for _ in range(3))
    (thread,) = threads
    assert not thread.is_alive()


def test_where_no_thread_starts_the_block_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of the interpreter. Errors of the block come out."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(ValueError, match="full"), each_second(lambda: pytest.fail("told")):
        raise ValueError("full")
