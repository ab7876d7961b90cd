"""A manager with a local folder: what it keeps on both sides, what it restores, and what it says of lost nodes."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dcp_tensorizer import CheckpointManager, SaveLimits
from dcp_tensorizer._saving.engine import engine_of_process

from ...support import directories_in
from .support import Run, state_of


def manager_of(run: Run, **options: Any) -> CheckpointManager:
    return CheckpointManager(run.remote, local=run.local, stop_signals=(), **options)


def test_the_rules_count_what_is_on_the_remote(tmp_path: Path) -> None:
    """Old checkpoints are deleted there when newer ones have arrived; locally only the newest stays."""
    run = Run(tmp_path)
    with manager_of(run, keep_latest=2) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, state_of(step))
        manager.wait()
        assert manager.wait_remote(60)
    assert directories_in(run.remote) == ["step-3", "step-4"]
    assert directories_in(run.local) == [".flush", "step-4"]


def test_nothing_is_deleted_before_newer_ones_have_arrived(tmp_path: Path) -> None:
    """With the remote out of reach all saves stay in the local folder, and the next job restores the newest there."""
    run = Run(tmp_path)
    run.cut()
    manager = manager_of(run, keep_latest=1, limits=SaveLimits(timeout=5.0))
    run.mend()
    manager.save(1, state_of(1), wait=True)
    assert manager.wait_remote(60)
    shutil.move(run.remote, tmp_path / "away")
    run.cut()
    manager.save(2, state_of(2), wait=True)
    manager.close(0.5)
    run.mend()
    shutil.move(tmp_path / "away", run.remote)
    assert directories_in(run.remote) == ["step-1"]
    state = state_of(0)
    with manager_of(run, keep_latest=1) as manager:
        assert manager.restore(state) == 2
        assert manager.steps() in ([1, 2], [2])  # step 2 may have arrived, and then the first manager deletes step 1
        assert manager.wait_remote(60)
    assert (state["step"], state["w"].unique().tolist()) == (2, [2.0])
    assert run.load("step-2") == 2


def test_without_the_local_disk_the_newest_on_the_remote_is_restored(tmp_path: Path) -> None:
    """On another node only what has arrived is there."""
    run = Run(tmp_path)
    with manager_of(run) as manager:
        manager.save(1, state_of(1))
    shutil.rmtree(run.local)
    state = state_of(0)
    with manager_of(run) as manager:
        assert (manager.restore(state), state["step"]) == (1, 1)


def test_a_step_of_a_lost_node_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What no node of the job has, nor the remote, is named at ERROR, and the step before is restored."""
    run = Run(tmp_path)
    with manager_of(run) as manager:
        manager.save(1, state_of(1))
    run.queue.remove(run.queue.entries()[0])
    shutil.move(run.remote, tmp_path / "away")
    run.save_unflushed(2)
    shutil.rmtree(run.remote, ignore_errors=True)
    shutil.move(tmp_path / "away", run.remote)
    (entry,) = run.queue.entries()
    record = run.queue.record(entry)
    assert record is not None and record.commit is not None
    lost = f"__7_0_{'a' * 32}.tensors"
    commit = msgspec.structs.replace(record.commit, files=record.commit.files | {lost: 4})
    (run.queue.folder / entry.name).write_bytes(msgspec.json.encode(msgspec.structs.replace(record, commit=commit)))
    engine_of_process(devices=False)._flushings.clear()  # which knows the record as it was
    state = state_of(0)
    with manager_of(run) as manager:
        assert manager.restore(state) == 1
        manager.save(3, state_of(3))
    words = f"{run.remote}/step-2 of rank 0 is given up, and will not be on the remote: no node of this job has {lost}"
    assert [words in entry.getMessage() for entry in caplog.records if entry.levelno == logging.ERROR].count(True) == 1
    assert directories_in(run.remote) == ["step-1", "step-3"]
