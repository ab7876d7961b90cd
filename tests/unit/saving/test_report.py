"""Reports of saves: what they count, and whom they reach."""

from __future__ import annotations

import dataclasses
import logging
import time

import pytest

from dcp_tensorizer import SaveReport, WriteError
from dcp_tensorizer._runtime.spans import Span
from dcp_tensorizer._saving.report import Reports, SaveCallbacks, SaveTimes
from dcp_tensorizer._staging.staged_save import StageTimes
from dcp_tensorizer._writer_process.protocol import FileResult, WriteDone

DONE = WriteDone((FileResult("f0", 5, ()), FileResult("f1", 6, ())), 4.0, 1.5, 2.5, attempts=2)


def report(times: SaveTimes) -> SaveReport:
    return times.written(path="/c", save_id="s", rank=3, nbytes=4_000_000_000, done=DONE)


def test_a_staged_save_is_timed_from_its_staging() -> None:
    """The seconds of staging are in the whole, on the clock that the user reads."""
    started = time.time() - 100
    times = SaveTimes(StageTimes(started, 0.5, 2.0))
    times.planned()
    made = report(times)
    assert (made.path, made.save_id, made.rank, made.files, made.attempts) == ("/c", "s", 3, 2, 2)
    assert (made.started_at, made.wait_seconds, made.stage_seconds, made.stall_seconds) == (started, 0.5, 2.0, 2.5)
    assert "(seconds: wait 0.500, stage 2.000, plan" in str(made)
    assert (made.hash_seconds, made.write_seconds, made.commit_seconds) == (1.5, 2.5, None)
    assert made.seconds == made.durable_at - started >= 100
    assert made.plan_seconds >= 0
    assert made.resolve_seconds == 0  # the writer process says that it took four seconds
    assert made.gigabytes_per_second == 4.0 / made.seconds


def test_a_save_that_stages_nothing_is_timed_from_its_first_hook() -> None:
    """It begins when its times are first taken."""
    before = time.time()
    made = report(SaveTimes())
    assert before <= made.started_at <= made.durable_at <= time.time()
    assert made.stage_seconds == 0


def test_a_commit_takes_its_own_time_and_ends_the_save() -> None:
    """Everything else stays as it was when the data was durable."""
    times = SaveTimes(StageTimes(time.time() - 10, 0.0, 1.0))
    data = report(times)
    times.commit_begins()
    made = times.committed(data)
    assert made.commit_seconds is not None
    assert made.commit_seconds >= 0
    assert made.durable_at >= data.durable_at
    assert made.seconds == made.durable_at - made.started_at >= 10
    same = {"commit_seconds": None, "durable_at": data.durable_at, "seconds": data.seconds, "spans": data.spans}
    assert dataclasses.replace(made, **same) == data  # type: ignore[arg-type]


def test_the_spans_of_a_save_are_its_times() -> None:
    """Staging, the plan, the write with what the writer process did in it, the wait for other ranks, and the commit."""
    began = time.perf_counter() - 10
    times = SaveTimes(StageTimes(time.time() - 10, 0.5, 2.0, began))
    times.planned()
    files = (Span("files", began + 3, began + 4),)
    done = WriteDone((), 1.0, 0.5, 0.5, files)
    data = times.written(path="/c", save_id="s", rank=3, nbytes=5, done=done)
    times.commit_begins()
    made = times.committed(data)
    spans = {span.name: span for span in made.spans}
    assert [span.name for span in data.spans] == ["save", "wait", "stage", "plan", "write", "files"]
    assert list(spans) == ["save", "wait", "stage", "plan", "write", "files", "agree", "commit"]
    assert (spans["wait"].began, spans["wait"].ended) == (began - 0.5, spans["stage"].began)
    assert spans["stage"].ended == began + 2.0
    assert spans["plan"].seconds == made.plan_seconds
    assert spans["plan"].ended == spans["write"].began
    assert spans["files"] is files[0]
    assert spans["agree"].began == spans["write"].ended == data.spans[0].ended
    assert (spans["agree"].ended, spans["commit"].ended) == (spans["commit"].began, spans["save"].ended)
    assert spans["commit"].seconds == made.commit_seconds
    assert spans["save"].began + made.clock_offset == pytest.approx(made.started_at, abs=1)


def test_a_flush_is_a_span_of_its_own() -> None:
    """From the moment when the save was durable to the one when the remote had it."""
    received: list[SaveReport] = []
    made = report(SaveTimes())
    Reports(received.append).arrived(made, made.durable_at + 2)
    *before, flush = received[0].spans
    assert tuple(before) == made.spans
    assert (flush.name, flush.seconds) == ("flush", pytest.approx(2))
    assert flush.began + made.clock_offset == pytest.approx(made.durable_at)


def test_a_clock_that_was_set_back_gives_no_negative_time() -> None:
    """Nor a speed that makes no sense."""
    made = report(SaveTimes(StageTimes(time.time() + 1000)))
    assert made.seconds == 0
    assert made.gigabytes_per_second == 0


def test_a_report_reaches_log_and_user(caplog: pytest.LogCaptureFixture) -> None:
    """And the last one is kept."""
    received: list[SaveReport] = []
    reports = Reports(received.append)
    assert reports.last is None
    made = report(SaveTimes())
    with caplog.at_level(logging.INFO, "dcp_tensorizer"):
        reports.publish(made)
    assert received == [made] == [reports.last]
    assert caplog.messages == [str(made)]
    assert str(made).startswith("/c: rank 3 wrote 4,000.0 MB in 2 file(s), 2 attempts (seconds: stage 0.000, plan ")


def test_a_user_who_fails_fails_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The exception is logged."""

    def fail(report: SaveReport) -> None:
        raise RuntimeError("metrics are down")

    reports = Reports(fail)
    reports.publish(report(SaveTimes()))
    assert reports.last is not None
    assert "metrics are down" in caplog.text


def test_the_progress_of_a_save_has_a_beginning_and_an_end() -> None:
    """Headers of files are written, too, and count as nothing. A save that fails has no end."""
    calls: list[tuple[int, int]] = []
    callbacks = SaveCallbacks(on_progress=lambda done, total: calls.append((done, total)))
    with callbacks.progress("/ckpt", lambda: 100) as progress:
        progress(40)
        progress(104)
    assert calls == [(0, 100), (40, 100), (100, 100), (100, 100)]
    del calls[:]
    with pytest.raises(WriteError), callbacks.progress("/ckpt", lambda: 100) as progress:
        raise WriteError("full")
    assert calls == [(0, 100)]


def test_a_rank_that_writes_nothing_shows_nothing() -> None:
    """And without a callback nobody asks how much there is."""
    calls: list[tuple[int, int]] = []
    with SaveCallbacks(on_progress=lambda *both: calls.append(both)).progress("/ckpt", lambda: 0):
        pass
    assert calls == []
    with SaveCallbacks().progress("/ckpt", lambda: pytest.fail("asked")):
        pass
