"""Two runs on one remote folder, each with a local folder of its own: whose steps are flushed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_tensorizer import CheckpointManager, WriteError
from dcp_tensorizer._runtime.threads import Deadline
from dcp_tensorizer._storage.lease import Lease, read_lease
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer._tiers.flush import Flusher

from ...lab.states import directories_in
from ...lab.waiting import WAIT
from .support import Run, read_only, state_of

NAME = ".step-N.claim"


def claimed(run: Run) -> str:
    """Takes the lease of the remote folder; returns the id of the run."""
    owner = Lease(LocalStorage(run.remote), NAME)
    owner.check()
    return owner.id


def test_what_a_run_has_left_is_flushed_by_the_next_one_there(tmp_path: Path) -> None:
    """Saves are flushed if a run with the same local folder has the lease."""
    run = Run(tmp_path)
    run.save_unflushed(1)
    for _ in range(2):
        run.queue.admit(NAME, "a" * 32)
    run.queue.admit(NAME, claimed(run))
    assert Flusher(run.target).step() is None
    assert (run.states(), run.load("step-1")) == (["remote"], 1)


def test_what_another_run_has_not_seen_is_given_up(tmp_path: Path) -> None:
    """Saves are given up if a run with another local folder has the lease."""
    run = Run(tmp_path)
    run.save_unflushed(1)
    run.queue.admit(NAME, "a" * 32)
    claimed(run)
    assert Flusher(run.target).step() is None
    (entry,) = run.queue.entries()
    record = run.queue.record(entry)
    assert entry.state in ("lost", "told")  # the second when a process has said so
    assert record is not None
    assert f"{run.remote} now belongs to another run, which does not save to {run.local}: process " in record.reason
    assert list(run.remote.rglob("*.tensors")) == []


def test_a_run_that_a_read_only_disk_cannot_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run may save to this local folder, so its lease is no reason to give up a save."""
    run = Run(tmp_path)
    run.save_unflushed(1)
    run.queue.admit(NAME, "a" * 32)
    flusher = Flusher(run.target)
    with monkeypatch.context() as patch:
        read_only(patch, run.local)
        run.queue.admit(NAME, claimed(run))
        assert flusher.step() is not None
        assert [entry.state for entry in flusher._queue.entries()] == ["sent"]
    assert not (run.remote / "step-1" / ".metadata").exists()
    assert list(run.local.rglob("*.tensors")) != []


def test_an_older_run_is_told_by_its_flush(tmp_path: Path) -> None:
    """An older run's local saves are not flushed, and its next save raises."""
    old, new = Run(tmp_path), Run(tmp_path)
    with (
        CheckpointManager(old.remote, local=tmp_path / "older", stop_signals=()) as older,
        CheckpointManager(new.remote, local=new.local, stop_signals=()) as newer,
    ):
        older.save(1, state_of(1), wait=True)
        assert older.wait_remote(60)
        assert newer.restore(state_of(0)) == 1
        newer.save(2, state_of(2), wait=True)
        assert newer.wait_remote(60)
        older.save(2, state_of(20), wait=True)
        with pytest.raises(WriteError, match="now belongs to another run, which does not save to"):
            older.wait_remote(60)
        older._retaining.wait(Deadline(WAIT))
        with pytest.raises(WriteError, match="as run 2; this is run 1"):
            older.save(3, state_of(30))
        newer.save(3, state_of(3), wait=True)
    assert [new.load(f"step-{step}") for step in (1, 2, 3)] == [1, 2, 3]
    assert directories_in(new.remote) == ["step-1", "step-2", "step-3"]
    claim = read_lease(LocalStorage(new.remote), NAME)
    assert claim is not None
    assert claim.epoch == 2
