"""What a save leaves in the local folder that fails somewhere else: nothing, however it ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer import TensorizerStorageWriter, WriteError
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer._tiers.queue import FlushRecord, Queue

from ...lab.processes import quietly
from .support import ID, Run, begun, files_below, state_of

FILE = f"__0_0_{ID}.tensors"


def _save(run: Run, writer: TensorizerStorageWriter, value: int) -> None:
    dcp.save(state_of(value), storage_writer=writer, checkpoint_id=run.remote / "a")


def _fail_after(monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    """Makes another rank fail after a hook of this rank. DCP then calls no further hook."""
    original = getattr(TensorizerStorageWriter, hook)

    def fails(*args: Any) -> None:
        original(*args)
        raise RuntimeError("another rank has failed")

    monkeypatch.setattr(TensorizerStorageWriter, hook, fails)


@pytest.mark.parametrize("hook", ["prepare_local_plan", "write_data"])
def test_what_another_rank_has_failed_goes_with_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    """The next save removes the files and the record of the failed save, and arrives on the remote."""
    run = Run(tmp_path)
    with run.writer() as writer:
        with quietly(), monkeypatch.context() as patch:
            _fail_after(patch, hook)
            with pytest.raises(CheckpointException):
                _save(run, writer, 1)
        assert run.states() == (["writing"] if hook == "write_data" else [])
        _save(run, writer, 2)
        assert len(list(run.local.rglob("*.tensors"))) == 1
        assert len(run.states()) == 1
    assert (run.states(), run.load("a")) == (["remote"], 2)


@pytest.mark.parametrize("hook", ["prepare_local_plan", "write_data"])
def test_what_another_rank_has_failed_goes_with_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    """Closing the writer removes the files and the record of a failed save."""
    run = Run(tmp_path)
    with quietly(), run.writer() as writer:
        _fail_after(monkeypatch, hook)
        with pytest.raises(CheckpointException):
            _save(run, writer, 1)
    assert (run.states(), files_below(run.local)) == ([], set())


def test_a_save_that_nobody_knows_any_more_is_removed(tmp_path: Path) -> None:
    """A failed asynchronous save is removed when its thread ends."""
    run = Run(tmp_path)
    with run.writer() as writer:
        destination, _ = begun(run, writer)
        assert run.states() == ["writing"]
        del destination
        assert (run.states(), files_below(run.local), (run.local / "a").exists()) == ([], {".flush/.writer"}, False)
    assert files_below(run.local) == set()


def test_what_the_flush_has_stays(tmp_path: Path) -> None:
    """Ending a save that was handed over removes none of its files."""
    run = Run(tmp_path)
    run.cut()
    with run.writer() as writer:
        destination, written = begun(run, writer)
        destination.wrote(written)
        destination.end()
        del destination
        assert (run.states(), os.listdir(run.local / "a")) == (["unflushed"], [FILE])
        run.queue.remove(run.queue.entries()[0])


def test_a_save_that_was_ended_is_not_handed_over(tmp_path: Path) -> None:
    """If a signal handler closes the writer between two hooks, the save fails and its files are removed."""
    run = Run(tmp_path)
    with run.writer() as writer:
        destination, written = begun(run, writer)
        destination.end()
        with pytest.raises(WriteError, match="the save was interrupted"):
            destination.wrote(written)
    assert (run.states(), files_below(run.local)) == ([], set())


def test_an_interrupted_hand_over_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the write of a record is interrupted after the record exists, its files stay."""
    queue, put = Queue(tmp_path), LocalStorage.put
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / FILE).write_bytes(b"data")
    writing = queue.begin(FlushRecord("remote", "a", 0, ID))

    def interrupted(*args: Any, **options: Any) -> None:
        put(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStorage, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writing.written({FILE: 4}, sync=False)
    writing.abort()
    assert ([entry.state for entry in queue.entries()], os.listdir(tmp_path / "a")) == (["unflushed"], [FILE])


def test_a_forked_child_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked child that frees its copies of saves removes none of the parent's files."""
    queue = Queue(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / FILE).write_bytes(b"data")
    writing = queue.begin(FlushRecord("remote", "a", 0, ID))
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        writing.abort()
    assert ([entry.state for entry in queue.entries()], os.listdir(tmp_path / "a")) == (["writing"], [FILE])
    writing.abort()
    assert (queue.entries(), (tmp_path / "a").exists()) == ([], False)


def test_the_folder_of_another_save_stays(tmp_path: Path) -> None:
    """A failed save does not remove a directory in which another rank of the node has begun a save."""
    run = Run(tmp_path)
    (run.local / "a").mkdir(parents=True)
    with run.writer() as writer:
        destination, _ = begun(run, writer)
        lock = destination.storage.lock_directory()
        lock.share(10.0)
        destination.end()
        assert os.listdir(run.local / "a") == []
        lock.release()
