"""The records of a local folder, while several processes use them."""

from __future__ import annotations

import fcntl
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from dcp_tensorizer._tiers.flush import clean_up
from dcp_tensorizer._tiers.queue import LOST, REMOTE, SENT, FlushRecord, Queue

from .support import read_only


def test_a_record_that_is_renamed_while_it_is_listed_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for the remote would take a save that is missing in the list for one that has arrived."""
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
    """What is in it is the same under each of its names."""
    queue = Queue(tmp_path)
    writing = queue.begin(FlushRecord("remote", "step-1", 0, "a" * 32))
    writing.written({"file": 3}, sync=False)
    queue.move(queue.move(writing.entry, SENT), REMOTE)
    record = queue.record(writing.entry)
    assert record is not None and record.files == {"file": 3}


def test_a_record_is_not_cleaned_up_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clean-up of another rank may see it in between, unlocked, and remove it: then there is another one."""
    queue, flock = Queue(tmp_path), fcntl.flock
    cleaned: list[str] = []

    def lock(descriptor: int, operation: int) -> None:
        if not cleaned and operation == fcntl.LOCK_EX:
            cleaned.extend(entry.name for entry in queue.entries())
            clean_up(queue)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock)
    writing = queue.begin(FlushRecord("remote", "step-1", 0, "a" * 32))
    assert cleaned == [writing.entry.name]
    assert [entry.name for entry in queue.entries()] == [writing.entry.name]
    clean_up(queue)
    assert [entry.name for entry in queue.entries()] == [writing.entry.name]
    writing.abort()


def test_a_folder_that_takes_no_changes_is_gone_on_with_aside(
    tmp_path: Path, aside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process sees how far a record has come, one at a time works on it, and it comes back to the folder."""
    queue, entries = Queue(tmp_path), []
    for name in "ab":
        writing = queue.begin(FlushRecord("remote", "step-1", 0, name * 32))
        writing.written({"file": 3}, sync=False)
        entries.append(writing.entry)
    with monkeypatch.context() as patch:
        read_only(patch, tmp_path)
        queue.set_trouble(entries[0], "no room")
        queue.confirm(entries[0])
        queue.progress(entries[0])
        assert (Queue(tmp_path).trouble(entries[0]), queue.is_writable) == ("no room", False)
        sent = queue.move(entries[0], SENT)
        record = queue.record(entries[1])
        assert record is not None
        queue.give_up(entries[1], record, "no reason")
        assert [entry.state for entry in Queue(tmp_path).entries()] == [SENT, LOST]
        with queue.claimed(sent) as is_free, Queue(tmp_path).claimed(sent) as is_free_too:
            assert (is_free, is_free_too) == (True, False)
        with queue.claimed(entries[0]) as is_free:
            assert not is_free  # it is in another state since
        lost = Queue(tmp_path).record(entries[1]._replace(state=LOST))
        assert lost is not None and lost.reason == "no reason"
        Queue(tmp_path).remove(queue.move(sent, REMOTE))
        assert [entry.state for entry in queue.entries()] == [REMOTE, LOST]  # and not again in an earlier one
    Queue(tmp_path).sweep()
    assert list(aside.iterdir()) == []
    assert {path.suffix for path in queue.folder.iterdir()} == {".remote", ".lost", ".trouble", ".committed"}
    assert queue.is_confirmed(entries[0])
    for entry in queue.entries():
        queue.remove(entry)
    assert list(queue.folder.iterdir()) == []
