"""The figures in reports of saves, and the calls of the user's callbacks."""

from __future__ import annotations

import logging
import math
import time

import pytest

from dcp_tensorizer import WriteError
from dcp_tensorizer._runtime.spans import Span
from dcp_tensorizer._saving.report import Reports, report_of
from dcp_tensorizer._writer_process.protocol import FileResult, WriteDone
from dcp_tensorizer.writer import SaveReport

DONE = WriteDone((FileResult("f0", 5, ()), FileResult("f1", 6, ())), 4.0, 1.5, 2.5, attempts=2)


def spans_of(*names: str, nbytes: int = 4_000_000_000) -> list[Span]:
    """Returns successive spans of one second each, the last of which ends about now."""
    now = math.floor(time.perf_counter())
    began = [now - count for count in range(len(names), 0, -1)]
    return [Span(n, t, t + 1, nbytes=nbytes * (n == "write")) for n, t in zip(names, began, strict=True)]


def report(*names: str, done: WriteDone = DONE) -> SaveReport:
    return report_of(spans_of(*(names or ("plan", "write"))), done, path="/c", save_id="s", rank=3)


def test_a_staged_save_is_timed_from_its_staging() -> None:
    """``seconds`` includes the copy, and not the wait before it; ``started_at`` is on the clock of ``time.time()``."""
    began = time.time() - 3
    made = report("wait", "stage", "plan", "write")
    assert (made.path, made.save_id, made.rank, made.files, made.attempts) == ("/c", "s", 3, 2, 2)
    assert (made.started_at, made.seconds) == (pytest.approx(began, abs=2), pytest.approx(3))
    assert (made.wait_seconds, made.stage_seconds, made.stall_seconds) == (1, 1, 2)
    assert "(seconds: wait 1.000, stage 1.000, plan 1.000, resolve 0.000, hash 1.500, write 2.500)" in str(made)
    assert (made.hash_seconds, made.write_seconds, made.commit_seconds) == (1.5, 2.5, None)
    assert (made.plan_seconds, made.resolve_seconds) == (1, 0)  # the writer process reports that it took four seconds
    assert made.seconds == made.durable_at - made.started_at
    assert made.gigabytes_per_second == 4.0 / made.seconds


def test_a_save_that_stages_nothing_is_timed_from_its_first_hook() -> None:
    """Without staging, the time begins with the plan."""
    made = report("plan", "write", done=WriteDone((), 0.25, 0.0, 0.0))
    assert (made.wait_seconds, made.stage_seconds, made.resolve_seconds) == (0, 0, 0.75)
    assert made.seconds == made.durable_at - made.started_at == pytest.approx(2)


def test_a_commit_takes_its_own_time_and_ends_the_save() -> None:
    """The commit is the last span. The report lists the whole save first, and then all spans."""
    names = ("stage", "plan", "write", "files", "agree", "commit")
    made = report(*names)
    assert (made.commit_seconds, made.seconds) == (1, pytest.approx(6))
    assert [span.name for span in made.spans] == ["save", *names]
    save, stage, *_, commit = made.spans
    assert (save.began, save.ended, save.nbytes) == (stage.began, commit.ended, made.nbytes)
    assert made.durable_at == commit.ended + made.clock_offset == pytest.approx(time.time(), abs=2)


def test_a_flush_is_a_span_of_its_own() -> None:
    """The span of the flush lasts from the durable save to its arrival on the remote."""
    received: list[SaveReport] = []
    made = report()
    Reports(received.append).arrived(made, made.durable_at + 2)
    *before, flush = received[0].spans
    assert tuple(before) == made.spans
    assert (flush.name, flush.seconds) == ("flush", pytest.approx(2))
    assert flush.began + made.clock_offset == pytest.approx(made.durable_at)


def test_a_report_reaches_log_and_user(caplog: pytest.LogCaptureFixture) -> None:
    """A report is logged, passed to ``on_report``, and retained as the last report."""
    received: list[SaveReport] = []
    reports = Reports(received.append)
    assert reports.last is None
    made = report()
    with caplog.at_level(logging.INFO, "dcp_tensorizer"):
        reports.publish(made)
    assert received == [made] == [reports.last]
    assert caplog.messages == [str(made)]
    assert str(made).startswith(
        "/c: rank 3 wrote 4,000.0 MB in 2 file(s), 2 attempts (seconds: stage 0.000, plan 1.000, "
    )


def test_a_user_who_fails_fails_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """An exception of ``on_report`` is logged, and does not propagate."""

    def fail(report: SaveReport) -> None:
        raise RuntimeError("metrics are down")

    reports = Reports(fail)
    reports.publish(report())
    assert reports.last is not None
    assert "metrics are down" in caplog.text


def test_the_progress_of_a_save_has_a_beginning_and_an_end() -> None:
    """``on_progress`` never gets more than the total, and gets the total only if the save succeeds."""
    calls: list[tuple[int, int]] = []
    reports = Reports(on_progress=lambda done, total: calls.append((done, total)))
    with reports.progress("/ckpt", lambda: 100) as progress:
        progress(40)
        progress(104)
    assert calls == [(0, 100), (40, 100), (100, 100), (100, 100)]
    del calls[:]
    with pytest.raises(WriteError), reports.progress("/ckpt", lambda: 100) as progress:
        raise WriteError("full")
    assert calls == [(0, 100)]


def test_a_rank_that_writes_nothing_shows_nothing() -> None:
    """``on_progress`` is not called for zero bytes. Without a callback, the total is not computed."""
    calls: list[tuple[int, int]] = []
    with Reports(on_progress=lambda *both: calls.append(both)).progress("/ckpt", lambda: 0):
        pass
    assert calls == []
    with Reports().progress("/ckpt", lambda: pytest.fail("asked")):
        pass
