"""The flush as a trainer sees it: who is told of what, and by whom."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcp_tensorizer import ReadError, WriteError
from dcp_tensorizer._runtime.threads import Deadline, in_background
from dcp_tensorizer._saving.flushing import Flushing
from dcp_tensorizer._tiers.queue import LOST, OPEN, REMOTE, SENT, AliveMark, FlushEntry, FlushRecord
from dcp_tensorizer._tiers.target import FlushTarget
from dcp_tensorizer.writer import SaveReport

from ...lab.waiting import WAIT
from .support import Run, read_only

REPORT = SaveReport(
    path="remote/step-1",
    save_id="a" * 32,
    rank=0,
    nbytes=4,
    reused_nbytes=0,
    files=1,
    attempts=1,
    started_at=0.0,
    seconds=1.0,
    stage_seconds=0.0,
    plan_seconds=0.0,
    resolve_seconds=0.0,
    hash_seconds=0.0,
    write_seconds=0.0,
    commit_seconds=0.0,
    durable_at=1.0,
)


class _Client:
    """A client of a writer process that does nothing."""

    is_running = True

    def ensure_process(self) -> _Client:
        return self

    def ask(self, *request: object) -> None:
        """Ignores a request."""


def _flushing(run: Run) -> Flushing:
    client: Any = _Client()
    return Flushing(client, run.target)


def _begun(run: Run, save_id: str) -> FlushEntry:
    writing = run.queue.begin(FlushRecord(run.target.name, "step-1", 0, save_id))
    writing.written({}, sync=False)
    return writing.entry


@pytest.mark.parametrize("commits", [True, False])
def test_a_record_that_is_gone_is_no_arrival(tmp_path: Path, commits: bool) -> None:
    """A removed record is not reported as an arrival, and is an error on the coordinator."""
    run, told = Run(tmp_path), list[float]()
    flushing, entry = _flushing(run), _begun(run, "a" * 32)
    report = replace(REPORT, commit_seconds=0.0 if commits else None)
    flushing.follow(entry, report, lambda report, moment: told.append(moment))
    run.queue.remove(entry)
    assert flushing.wait()
    assert told == []
    assert flushing.future("a" * 32).exception() is not None  # type: ignore[union-attr]
    if commits:
        with pytest.raises(WriteError, match="cannot confirm that remote/step-1 is on the remote"):
            flushing.check()
    flushing.check()


def test_a_given_up_save_whose_record_is_damaged(tmp_path: Path) -> None:
    """The error names the record, because the record alone names the checkpoint."""
    run = Run(tmp_path)
    flushing, lost = _flushing(run), run.queue.move(_begun(run, "a" * 32), LOST)
    (run.queue.folder / lost.name).write_bytes(b"{")
    assert flushing.wait()
    record = f"its record {lost.stem} in {run.queue.folder} was removed or cannot be read"
    with pytest.raises(WriteError, match=f"rank 0's part of a checkpoint of {run.remote} is given up.*: {record}"):
        flushing.check()
    flushing.check()


def test_what_arrived_just_before_the_end_is_told(tmp_path: Path) -> None:
    """Closing a writer reports a save that has just arrived."""
    run, told = Run(tmp_path), list[float]()
    flushing, entry = _flushing(run), _begun(run, "a" * 32)
    flushing.follow(entry, REPORT, lambda report, moment: told.append(moment))
    moved = run.queue.move(run.queue.move(entry, SENT), REMOTE)
    flushing.end(Deadline(10.0))
    assert told == [pytest.approx(moved.changed, abs=1.0)]


def test_a_flush_that_was_stopped_can_be_resumed(tmp_path: Path) -> None:
    """A save that arrives after the engine has ended is reported by another thread, for which no exit waits."""
    run, told = Run(tmp_path), Future[float]()
    flushing, entry = _flushing(run), _begun(run, "a" * 32)
    flushing.stop()
    flushing.follow(entry, REPORT, lambda report, moment: told.set_result(moment))
    flushing.resume()
    assert {thread.daemon for thread in threading.enumerate() if thread.name == "flush-watch"} == {True}
    moved = run.queue.move(entry, REMOTE)
    assert told.result(WAIT) == pytest.approx(moved.changed, abs=1.0)


def test_who_is_told_may_wait_for_the_rest(tmp_path: Path) -> None:
    """`on_report` may resume the flush and wait for it."""
    run, told = Run(tmp_path), list[bool]()
    flushing, entry, rest = _flushing(run), _begun(run, "a" * 32), _begun(run, "b" * 32)

    def tell(report: SaveReport, moment: float) -> None:
        flushing.resume()
        told.append(flushing.wait(until=lambda: True))

    flushing.follow(entry, REPORT, tell)
    run.queue.move(entry, REMOTE)
    waiting = in_background(lambda: flushing.wait(until=lambda: True), name="waiting", daemon=True)
    assert waiting.result(timeout=600)
    assert told == [True]
    run.queue.remove(rest)


def test_the_saves_of_a_read_only_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing waits for saves of a read-only disk or reports them as arrived. Each is an error."""
    run, told = Run(tmp_path), list[float]()
    flushing, entry = _flushing(run), _begun(run, "a" * 32)
    flushing.follow(entry, REPORT, lambda report, moment: told.append(moment))
    words = f"{run.queue.folder} cannot be written to, so it is unknown which of its checkpoints {run.remote} has"
    with monkeypatch.context() as patch:
        read_only(patch, run.local)
        assert [flushing.unflushed() for _ in range(2)] == [0, 0]
        assert len(flushing.open_records()) == 1
        flushing.end(Deadline(600.0))
        with pytest.raises(ReadError, match=f"{words}. Fix the disk"):
            flushing.wait()
    future = flushing.future("a" * 32)
    assert future is not None and words in str(future.exception())
    with pytest.raises(WriteError, match=f"cannot confirm that remote/step-1 is on the remote: {words}"):
        flushing.check()
    assert caplog.text.count(f"{words}. Until that changes, this rank does not wait for the flush") == 1
    assert told == []
    assert flushing.unflushed() == 1


@pytest.mark.parametrize("recorded", ["s3://bucket/run", "s3a://bucket/run"])
@pytest.mark.parametrize("spelled", ["s3://bucket/run", "s3a://bucket/run/"])
def test_a_remote_has_one_name(tmp_path: Path, recorded: str, spelled: str) -> None:
    """A record belongs to its remote, whichever name of the protocol the record and the job use."""
    run, target = Run(tmp_path), FlushTarget(str(tmp_path / "local"), spelled, {})
    run.queue.begin(FlushRecord(recorded, "step-1", 0, "a" * 32)).written({}, sync=False)
    assert target.name == "s3://bucket/run"
    assert [record.remote for _, record in run.queue.records(OPEN, target.name)] == [recorded]


def test_checkpoints_of_another_remote_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A flush names, once, the checkpoints that dead jobs left for another remote, and not those of a living job."""
    run = Run(tmp_path)
    for number, (step, writer) in enumerate([("step-2", "dead"), ("step-3", "dead"), ("step-4", "alive")]):
        record = FlushRecord("s3://bucket/other", step, 0, str(number) * 32, writer)
        run.queue.begin(record).written({}, sync=False)
    mark, flushing = AliveMark(run.queue, "alive"), _flushing(run)
    with caplog.at_level(logging.WARNING, logger="dcp_tensorizer"):
        for _ in range(2):
            flushing.resume()
    mark.end()
    flushing.stop()
    for entry in run.queue.entries():
        run.queue.remove(entry)  # ends the thread that watches it
    assert [record.getMessage() for record in caplog.records] == [
        f"{run.local} holds checkpoints that have not reached s3://bucket/other: 'step-2', 'step-3'. This run saves to "
        f"{run.remote}, so it neither loads nor flushes them. To flush them, start a job that saves to "
        f"s3://bucket/other with the same local folder."
    ]
