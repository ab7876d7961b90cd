"""The records of a local folder, while several processes use them."""

from __future__ import annotations

import fcntl
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from dcp_tensorizer._tiers.queue import LOST, REMOTE, SENT, UNFLUSHED, WRITING, Commit, FlushRecord, Queue

from .support import read_only


def test_a_record_that_is_renamed_while_it_is_listed_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that is renamed during a listing is listed, because a missing record counts as arrived."""
    queue = Queue(tmp_path)
    writing = queue.begin(FlushRecord("remote", "step-1", 0, "a" * 32))
    writing.written({}, sync=False)
    moved = [writing.entry]
    listdir, scandir = os.listdir, os.scandir

    def listed(folder: Any, function: Any) -> Any:
        found = list(function(folder))
        while moved:
            queue.move(moved.pop(), SENT)
        return found

    monkeypatch.setattr(os, "listdir", lambda folder: listed(folder, listdir))
    monkeypatch.setattr(os, "scandir", lambda folder: nullcontext(listed(folder, scandir)))
    assert [entry.state for entry in queue.entries()] == [SENT]
    assert moved == []


def test_a_record_that_is_renamed_before_it_is_read_is_read(tmp_path: Path) -> None:
    """A record can be read under the name of an earlier state."""
    queue = Queue(tmp_path)
    writing = queue.begin(FlushRecord("remote", "step-1", 0, "a" * 32))
    writing.written({"file": 3}, sync=False)
    queue.move(queue.move(writing.entry, SENT), REMOTE)
    record = queue.record(writing.entry)
    assert record is not None and record.files == {"file": 3}


def test_a_record_that_is_written_after_it_is_listed_has_its_later_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entry and record belong together: a record with a commit is never of a save that is still being written."""
    queue = Queue(tmp_path)
    writing = queue.begin(FlushRecord("remote", "step-1", 0, "a" * 32))
    listed = queue.entries()
    writing.written({"file": 3}, sync=False, commit=Commit(".metadata", {"file": 3}, True))
    monkeypatch.setattr(queue, "entries", lambda: listed)
    assert [(entry.state, record.commit is None) for entry, record in queue.records()] == [(UNFLUSHED, False)]
    assert queue.records({WRITING}) == []


def test_a_record_is_not_cleaned_up_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a clean-up removes a record before it is locked, `begin` writes another one."""
    queue, flock = Queue(tmp_path), fcntl.flock
    cleaned: list[str] = []

    def lock(descriptor: int, operation: int) -> None:
        if not cleaned and operation == fcntl.LOCK_EX:
            cleaned.extend(entry.name for entry in queue.entries())
            queue.clean_up()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock)
    writing = queue.begin(FlushRecord("remote", "step-1", 0, "a" * 32))
    assert cleaned == [writing.entry.name]
    assert [entry.name for entry in queue.entries()] == [writing.entry.name]
    queue.clean_up()
    assert [entry.name for entry in queue.entries()] == [writing.entry.name]
    writing.abort()


def test_a_state_that_the_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process alone knows the state until the disk takes it. Other processes see the state before it."""
    queue, entries = Queue(tmp_path), []
    for name in "ab":
        writing = queue.begin(FlushRecord("remote", "step-1", 0, name * 32))
        writing.written({"file": 3}, sync=False)
        entries.append(writing.entry)
    with monkeypatch.context() as patch:
        read_only(patch, tmp_path)
        assert not queue.is_writable
        assert not queue.set_trouble(entries[0], "the remote is full")
        queue.confirm(entries[0])
        queue.progress(entries[0])
        sent, record = queue.move(entries[0], SENT), queue.record(entries[1])
        assert record is not None
        queue.give_up(entries[1], record, "no reason")
        assert [entry.state for entry in queue.entries()] == [SENT, LOST]
        assert [entry.state for entry in Queue(tmp_path).entries()] == [UNFLUSHED, UNFLUSHED]
        assert [record.reason for _, record in queue.records()] == ["", "no reason"]
        with queue.claimed(sent) as is_free, Queue(tmp_path).claimed(entries[0]) as is_free_too:
            assert (is_free, is_free_too) == (True, False)
        with queue.claimed(entries[0]) as is_free:
            assert not is_free  # it is in another state
        queue.remove(queue.move(sent, REMOTE))
        assert [entry.state for entry in queue.entries()] == [REMOTE, LOST]
        assert not queue.retry()
    assert queue.retry()
    assert [(entry.state, record.reason) for entry, record in Queue(tmp_path).records()] == [
        (REMOTE, ""),
        (LOST, "no reason"),
    ]
    for entry in queue.entries():
        queue.remove(entry)
    assert list(queue.folder.iterdir()) == []


def test_a_refused_state_of_a_record_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another process has removed the record, the refused state is dropped with it."""
    queue = Queue(tmp_path)
    writing = queue.begin(FlushRecord("remote", "step-1", 0, "a" * 32))
    writing.written({"file": 3}, sync=False)
    with monkeypatch.context() as patch:
        read_only(patch, tmp_path)
        queue.move(writing.entry, SENT)
    Queue(tmp_path).remove(writing.entry)
    assert not queue.retry()
    assert queue.entries() == []
    assert queue.retry()
