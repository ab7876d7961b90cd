"""Tests of the report of a load: its fields, its spans and its log record."""

from __future__ import annotations

import dataclasses
import logging
import time

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer._loading.report import LoadClock, publish
from dcp_tensorizer._runtime.spans import Span
from dcp_tensorizer.reader import LoadReport

REPORT = LoadReport(
    path="/ckpt",
    save_id="0" * 32,
    load_id="1" * 32,
    rank=3,
    items=1234,
    nbytes=5_000_000_000,
    started_at=1e9,
    seconds=2.5,
    plan_seconds=0.5,
    read_seconds=2.0,
)


def test_a_report_says_its_rate() -> None:
    """The rate counts all seconds; a report without seconds has the rate 0."""
    assert REPORT.gigabytes_per_second == 2.0
    assert dataclasses.replace(REPORT, seconds=0.0).gigabytes_per_second == 0.0


def test_a_report_as_a_line_of_a_log() -> None:
    """A report as text has the path, the rank, the amounts, the times and the rate."""
    assert str(REPORT) == (
        "/ckpt: rank 3 loaded 1,234 item(s), 5,000.0 MB in 2.500 s, 2.00 GB/s (seconds: plan 0.500, read 2.000)"
    )


def test_a_report_cannot_be_changed() -> None:
    """A report is frozen."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        REPORT.nbytes = 1  # type: ignore[misc]


def test_the_times_of_a_report_add_up() -> None:
    """The parts of the load add up to its duration, which is within what the test measures."""
    before, begin = time.time(), time.perf_counter()
    clock = LoadClock()
    clock.begin_reading()
    report = clock.report(path="/ckpt", save_id="save", load_id="load", rank=1, items=2, nbytes=3)
    assert (report.path, report.save_id, report.load_id) == ("/ckpt", "save", "load")
    assert (report.rank, report.items, report.nbytes) == (1, 2, 3)
    assert before <= report.started_at <= time.time()
    assert report.seconds == pytest.approx(report.plan_seconds + report.read_seconds)
    assert 0 <= report.plan_seconds <= report.seconds <= time.perf_counter() - begin


def test_the_spans_of_a_load_are_its_times() -> None:
    """The reads of a file become one span, from the first to the last, with all of their bytes."""
    clock = LoadClock()
    clock.has_metadata()
    clock.begin_reading()
    began = time.perf_counter()
    clock.reads += [
        Span("read file", began + 1, began + 3, "a", 10, 0.5),
        Span("read file", began, began + 1, "b", 5, 0.25),
        Span("read file", began, began + 2, "a", 20, 0.125),
    ]
    report = clock.report(path="/ckpt", save_id="save", load_id="load", rank=1, items=2, nbytes=35)
    whole, metadata, prepare, read, *files = report.spans
    assert [span.name for span in (whole, metadata, prepare, read)] == ["load", "metadata", "prepare", "read"]
    assert whole.seconds == report.seconds
    assert (whole.began, whole.ended) == (metadata.began, read.ended)
    assert metadata.seconds + prepare.seconds == pytest.approx(report.plan_seconds)
    assert (metadata.ended, prepare.ended) == (prepare.began, read.began)
    assert read.seconds == report.read_seconds
    assert (read.nbytes, read.verify_seconds, report.verify_seconds) == (35, 0.875, 0.875)
    assert files == [
        Span("read file", began, began + 3, "a", 30, 0.625),
        Span("read file", began, began + 1, "b", 5, 0.25),
    ]
    assert clock.reads == []


def test_a_report_is_logged_and_handed_to_the_user(caplog: pytest.LogCaptureFixture) -> None:
    """A report is logged in one line at INFO, and passed to the callback, if any."""
    reports: list[LoadReport] = []
    with caplog.at_level(logging.INFO, "dcp_tensorizer"):
        publish(REPORT, reports.append)
        publish(REPORT, None)
    assert reports == [REPORT]
    assert [(record.levelname, record.message) for record in caplog.records] == [("INFO", str(REPORT))] * 2


@pytest.mark.parametrize("error", [RuntimeError("no dashboard"), CheckpointException("no dashboard", {})])
def test_an_error_of_the_users_callback_is_logged(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """The callback's error, also one of DCP, is logged with its traceback, and not raised."""

    def fail(report: LoadReport) -> None:
        raise error

    publish(REPORT, fail)
    (record,) = caplog.records
    assert (record.levelname, record.message) == ("ERROR", "on_report failed; the load did not")
    assert type(error).__name__ in caplog.text
