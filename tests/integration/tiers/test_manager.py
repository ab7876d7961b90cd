"""A manager with a local folder: what it keeps on both sides, what it restores, and what it says of lost nodes."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import (
    CheckpointManager,
    ChecksumMismatch,
    ReadError,
    SaveLimits,
    TensorizerStorageWriter,
    WriteError,
)
from dcp_tensorizer._saving.engine import engine_of_process
from dcp_tensorizer._tiers.queue import AliveMark, FlushEntry

from ...lab.faults import flip
from ...lab.servers import S3Server
from ...lab.states import directories_in
from .support import Run, state_of


def manager_of(run: Run, **options: Any) -> CheckpointManager:
    return CheckpointManager(run.remote, local=run.local, stop_signals=(), **options)


def test_the_rules_count_what_is_on_the_remote(tmp_path: Path) -> None:
    """Old checkpoints are deleted on the remote when newer ones have arrived. Locally only the newest stays."""
    run = Run(tmp_path)
    with manager_of(run, keep_latest=2) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, state_of(step))
        manager.wait()
        assert manager.wait_remote(60)
    assert directories_in(run.remote) == ["step-3", "step-4"]
    assert directories_in(run.local) == [".flush", "step-4"]


@pytest.mark.parametrize("protocol", ["file", "local"])
def test_the_remote_may_be_the_url_of_a_directory(tmp_path: Path, protocol: str) -> None:
    """A ``file:`` URL names the same folder as its path, for the local copy too."""
    run, state = Run(tmp_path), state_of(0)
    with CheckpointManager(f"{protocol}://{run.remote}", local=run.local, stop_signals=()) as manager:
        manager.save(1, state_of(1), wait=True)
        assert manager.wait_remote(60)
    assert run.load("step-1") == 1
    with manager_of(run) as manager:
        assert manager.restore(state) == 1
    assert state["step"] == 1


def test_nothing_is_deleted_before_newer_ones_have_arrived(tmp_path: Path) -> None:
    """Without the remote all saves stay in the local folder, and the next job restores the newest."""
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
    """On another node only checkpoints on the remote are restored."""
    run = Run(tmp_path)
    with manager_of(run) as manager:
        manager.save(1, state_of(1))
    shutil.rmtree(run.local)
    state = state_of(0)
    with manager_of(run) as manager:
        assert (manager.restore(state), state["step"]) == (1, 1)


def test_a_damaged_local_copy_is_named(tmp_path: Path) -> None:
    """The error names the file that was read. Without that copy, the checkpoint loads from the remote."""
    run = Run(tmp_path)
    with manager_of(run) as manager:
        manager.save(1, state_of(1))
    (copied,) = (run.local / "step-1").glob("*.tensors")
    flip(copied, copied.stat().st_size // 2)
    with manager_of(run) as manager:
        with pytest.raises(ChecksumMismatch, match=re.escape(f"'w' in {copied}: bytes ")):
            manager.restore(state_of(0))
        copied.unlink()
        assert manager.restore(state_of(0)) == 1


def test_a_step_of_a_lost_node_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint that neither a node nor the remote has is logged at ERROR, and the earlier step is restored."""
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
    words = f"{run.remote}/step-2 is given up, and will not be on the remote: no node of this job has {lost}"
    assert [words in entry.getMessage() for entry in caplog.records if entry.levelno == logging.ERROR].count(True) == 1
    assert directories_in(run.remote) == ["step-1", "step-3"]


def _without_its_commit(run: Run) -> tuple[FlushEntry, str]:
    """Removes the commit of an unflushed checkpoint; returns its record and its only file."""
    (entry,) = run.queue.entries()
    record = run.queue.record(entry)
    assert record is not None
    (run.queue.folder / entry.name).write_bytes(msgspec.json.encode(msgspec.structs.replace(record, commit=None)))
    (run.queue.folder / f"{entry.stem}.index").unlink()
    engine_of_process(devices=False)._flushings.clear()  # which knows the record as it was
    return entry, *record.files


@pytest.mark.parametrize("is_confirmed", [True, False])
def test_a_step_whose_commit_was_on_a_lost_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_confirmed: bool
) -> None:
    """If the commit was confirmed, its loss is an error, otherwise a warning. Its files on the remote are removed."""
    run = Run(tmp_path)
    run.save_unflushed(2)
    entry, name = _without_its_commit(run)
    (run.remote / "step-2").mkdir(parents=True)
    for file in (name, name.replace("__0_", "__7_")):
        (run.remote / "step-2" / file).write_bytes(b"sent")
    other = run.remote / "step-2" / f"__0_0_{'a' * 32}.tensors"
    other.write_bytes(b"of another save")
    if is_confirmed:
        run.queue.confirm(entry)
    caplog.clear()
    with manager_of(run) as manager:
        assert manager.restore(state_of(0)) is None
        words = f"{run.remote}/step-2 is given up, and will not be on the remote: no node of this job has its metadata"
        errors = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.ERROR]
        # The job before, which is in this process, may say of its own that it has not seen it arrive.
        assert [error.startswith(words) for error in errors if not error.startswith("rank 0 cannot confirm")] == [
            True
        ] * is_confirmed
        if is_confirmed:
            with pytest.raises(WriteError, match=r"no node of this job has its metadata, only data of rank\(s\) 0"):
                manager.wait_remote(60)
        else:
            assert f"{run.remote}/step-2: no node of this job has its metadata" in caplog.text
        assert manager.wait_remote(60)
    assert [*run.remote.rglob("*.tensors"), *run.local.rglob("*.*")] == [other, run.queue.folder]


def test_what_a_job_that_goes_on_has_saved_is_not_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A job does not give up a save of another, living job whose commit it does not see."""
    run = Run(tmp_path)
    run.save_unflushed(2)
    entry, name = _without_its_commit(run)
    record = run.queue.record(entry)
    assert record is not None
    life = AliveMark(run.queue, record.writer)
    with manager_of(run, limits=SaveLimits(timeout=1.0)) as manager:
        assert manager.restore(state_of(0)) is None
    assert (run.local / "step-2" / name).exists()
    assert run.states() in (["sent"], ["unflushed"])
    life.end()


def test_a_part_that_has_arrived_is_not_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A part whose save is on the remote is not lost, even if this node has not recorded that."""
    run = Run(tmp_path)
    with manager_of(run) as manager:
        manager.save(2, state_of(2))
    entry = run.queue.entries()[0]
    run.queue.confirm(entry)
    (run.queue.folder / entry.name).rename(run.queue.folder / f"{entry.stem}.sent")
    record = run.queue.record(entry._replace(state="sent"))
    assert record is not None
    (run.queue.folder / f"{entry.stem}.sent").write_bytes(
        msgspec.json.encode(msgspec.structs.replace(record, commit=None))
    )
    engine_of_process(devices=False)._flushings.clear()
    with manager_of(run) as manager:
        assert manager.restore(state_of(0)) == 2
        assert manager.wait_remote(60)
    assert run.states() == ["remote"]
    said = [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert [words for words in said if str(tmp_path) in words] == []


def test_the_next_job_may_spell_the_remote_in_another_way(tmp_path: Path, s3: S3Server, prefix: str) -> None:
    """A job with s3a:// restores and flushes what a job with s3:// has left in the same local folder."""
    remote, nowhere = f"://{s3.bucket}/{prefix}", s3.options("http://127.0.0.1:9")
    writer = TensorizerStorageWriter(f"s3{remote}", local=tmp_path / "local", storage_options=nowhere)
    dcp.async_save(state_of(1), storage_writer=writer, checkpoint_id=f"s3{remote}/step-1").result()
    writer.close(0.5)
    state = state_of(0)
    options = {"local": tmp_path / "local", "storage_options": s3.options(), "stop_signals": ()}
    with CheckpointManager(f"s3a{remote}", **options) as manager:
        assert manager.restore(state) == 1
        assert manager.wait_remote(60)
        assert manager.steps() == [1]
    assert (state["step"], state["w"].unique().tolist()) == (1, [1.0])
    assert "step-1/.metadata" in s3.objects(prefix)


def test_a_manager_needs_the_remote_to_begin(tmp_path: Path, s3: S3Server) -> None:
    """Before its first save, a manager must list the remote. If that fails, it saves nothing."""
    nowhere = s3.options("http://127.0.0.1:9", config_kwargs={"retries": {"total_max_attempts": 1}})
    run, remote = Run(tmp_path), f"s3://{s3.bucket}/run"
    with CheckpointManager(remote, local=run.local, storage_options=nowhere, stop_signals=()) as manager:
        for begin in (lambda: manager.save(1, state_of(1)), lambda: manager.restore(state_of(0))):
            with pytest.raises(ReadError, match=f"cannot list {remote}: EndpointConnectionError"):
                begin()
        assert run.states() == []
