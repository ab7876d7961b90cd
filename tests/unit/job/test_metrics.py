"""The report of the cost of checkpoints."""

from __future__ import annotations

import pytest

from dcp_tensorizer._job.metrics import GoodputClock


def test_the_report_adds_up() -> None:
    """Stalls and restores reduce the goodput, and the durable seconds are an average."""
    moments = iter([0.0, 12.0, 21.0, 22.0, 23.0, 26.0, 100.0])
    clock = GoodputClock(lambda: next(moments))
    clock.restored(since=2.0)
    clock.stalled(since=20.0, saves=True)
    clock.stalled(since=21.0, saves=True)
    clock.saved(since=20.0)
    clock.saved(since=21.0)
    clock.failed()
    report = clock.report()
    assert (report.seconds, report.saves, report.failures) == (100.0, 2, 1)
    assert (report.restore_seconds, report.stall_seconds, report.durable_seconds) == (10.0, 2.0, 4.0)
    assert report.goodput == pytest.approx(0.88)
    assert report.stall_per_save == pytest.approx(2 / 3)
    assert str(report).startswith(
        "goodput 88.00% of 100.0 s; saves: 2 committed, 1 failed; seconds: stall 2.000 (0.667 a save)"
    )


def test_youngs_interval() -> None:
    """The interval is the square root of 2 x stall x MTBF, and at least the time until a save is durable."""
    moments = iter([0.0, 2.0, 60.0, 60.0])
    clock = GoodputClock(lambda: next(moments))
    clock.stalled(since=0.0, saves=True)
    clock.saved(since=0.0)
    report = clock.report()
    assert report.young_interval(10_000.0) == pytest.approx(200.0)
    assert report.young_interval(100.0) == 60.0


def test_a_job_without_saves() -> None:
    """The report of a job without saves divides nothing by zero."""
    report = GoodputClock(lambda: 5.0).report()
    assert (report.goodput, report.stall_per_save, report.young_interval(3600.0)) == (1.0, 0.0, 0.0)
