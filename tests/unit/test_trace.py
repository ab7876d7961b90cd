"""`TraceFile`."""

from __future__ import annotations

from pathlib import Path

from dcp_tensorizer._loading.report import LoadReport
from dcp_tensorizer._runtime.spans import Span
from dcp_tensorizer.tools import trace
from dcp_tensorizer.trace import TraceFile


def report(number: int) -> LoadReport:
    return LoadReport(
        path="/c",
        save_id="s",
        load_id=f"l{number}",
        rank=0,
        nbytes=1,
        items=1,
        started_at=0.0,
        seconds=1.0,
        plan_seconds=0.0,
        read_seconds=1.0,
        spans=(Span("load", number, number + 1.0),),
    )


def test_an_incomplete_last_line_is_replaced(tmp_path: Path) -> None:
    """After a full disk or the kill of a process of the same pid, the next report replaces the incomplete line."""
    receive = TraceFile(tmp_path / "spans")
    for number in range(4):
        receive(report(number))
        (file,) = (tmp_path / "spans").iterdir()
        if number in (0, 2):
            file.write_bytes(file.read_bytes()[:-20])
    traced = trace([tmp_path / "spans"], tmp_path / "trace.json")
    assert (traced.loads, traced.seconds) == (2, 3.0)
