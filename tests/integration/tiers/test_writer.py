"""A writer with a local folder: what it guarantees, what it says, and where it is read from."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer import (
    NotCommitted,
    ReadError,
    SaveLimits,
    TensorizerStorageReader,
    TensorizerStorageWriter,
    WriteError,
)
from dcp_tensorizer._saving import tiered_save
from dcp_tensorizer._storage.base import Refused
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer._tiers.queue import Queue
from dcp_tensorizer.errors import unwrap
from dcp_tensorizer.writer import SaveReport

from ... import warm
from ...lab.processes import quietly
from ...lab.servers import S3Server
from .support import Run, begun, files_below, read_only, state_of, unlistable


def said(caplog: pytest.LogCaptureFixture) -> str:
    """Returns the warnings and errors of this package."""
    records = [entry for entry in caplog.records if entry.name == "dcp_tensorizer" and entry.levelno >= logging.WARNING]
    return "\n".join(entry.getMessage() for entry in records)


@pytest.mark.promise("saved-when-done", reason="with a local disk")
def test_a_save_is_durable_locally_and_then_on_the_remote(tmp_path: Path) -> None:
    """A save is reported twice: the second report has the time when the remote had the checkpoint."""
    run, reports = Run(tmp_path), list[SaveReport]()
    with run.writer(on_report=reports.append) as writer:
        dcp.async_save(state_of(1), storage_writer=writer, checkpoint_id=run.remote / "step-1").result()
        assert run.load("step-1", local=run.local) == 1
        assert writer.wait_remote(60)
        assert writer.last_report == reports[1]
    assert [report.remote_durable_at is None for report in reports] == [True, False]
    assert reports[1].remote_durable_at >= reports[0].durable_at  # type: ignore[operator]
    assert reports[0].path == str(run.remote / "step-1")
    assert run.load("step-1") == 1


def test_a_synchronous_save_is_flushed_too(tmp_path: Path) -> None:
    """After ``dcp.save`` the writer process flushes, and `close` waits for it."""
    run = Run(tmp_path)
    with run.writer() as writer:
        dcp.save(state_of(1), storage_writer=writer, checkpoint_id=run.remote / "step-1")
    assert run.load("step-1") == 1


def test_large_states_are_flushed_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large state is sent in several files, whose arrival shows other nodes that this one is alive."""
    monkeypatch.setattr(tiered_save, "_MAX_FILE_BYTES", 4096)
    run, state = Run(tmp_path), {f"w{n}": torch.full((900,), float(n)) for n in range(3)}
    with run.writer() as writer:
        dcp.save(state, storage_writer=writer, checkpoint_id=run.remote / "step-1")
    assert len(list(run.remote.rglob("*.tensors"))) == 3
    loaded = {key: torch.zeros(900) for key in state}
    dcp.load(loaded, storage_reader=TensorizerStorageReader(run.remote / "step-1"))
    assert [float(tensor[-1]) for tensor in loaded.values()] == [0.0, 1.0, 2.0]


_SAVE_AND_DIE = """
import os, signal, sys
from pathlib import Path
import torch.distributed.checkpoint as dcp
from tests.integration.tiers.support import Run, state_of
run = Run(Path(sys.argv[1]))
run.cut()
dcp.async_save(state_of(1), storage_writer=run.writer(), checkpoint_id=run.remote / "step-1").result()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_job_brings_what_a_killed_one_has_left(tmp_path: Path) -> None:
    """A killed job's checkpoint is loaded from the local folder, and from the remote after the flush."""
    run = Run(tmp_path)
    done = subprocess.run([warm.python(), "-W", "ignore", "-c", _SAVE_AND_DIE, str(tmp_path)], check=False)
    assert done.returncode == -9
    run.mend()
    assert run.states() == ["unflushed"]
    assert run.load("step-1", local=run.local) == 1
    with run.writer() as writer:
        assert writer.wait_remote(60)
    assert run.load("step-1") == 1


def test_training_waits_when_too_much_is_unflushed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A save fails if the remote stays unreachable, and `close` logs the number of checkpoints left."""
    run = Run(tmp_path)
    run.cut()
    limits = SaveLimits(timeout=1.0, max_consecutive_failures=None)
    with run.writer(max_unflushed=2, limits=limits) as writer:
        for step in (1, 2):
            dcp.async_save(state_of(step), storage_writer=writer, checkpoint_id=run.remote / f"step-{step}").result()
        with pytest.raises(CheckpointException) as caught:
            dcp.async_save(state_of(3), storage_writer=writer, checkpoint_id=run.remote / "step-3").result()
    words = f"2 checkpoints are only in {run.local}, and nothing has arrived at {run.remote} for 1 s"
    assert words in str(unwrap(caught.value))
    assert f"checkpoints in {run.local} that have not reached {run.remote}: 2." in said(caplog)
    assert run.states() == ["unflushed"] * 2


def test_a_writer_that_does_nothing_waits_for_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The `close` of an unused writer does not wait for saves of a dead job."""
    run = Run(tmp_path)
    run.save_unflushed(1)
    caplog.clear()
    run.writer(limits=SaveLimits(timeout=1.0)).close()
    assert said(caplog) == ""
    assert run.states() == ["unflushed"]


def test_a_writer_goes_on_when_the_remote_is_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A failed flush is retried with a warning, in the same order."""
    run = Run(tmp_path)
    run.cut()
    with run.writer() as writer:
        for step in (1, 2):
            dcp.async_save(state_of(step), storage_writer=writer, checkpoint_id=run.remote / f"step-{step}").result()
        assert not writer.wait_remote(1.0)
        run.mend()
        assert writer.wait_remote(60)
    assert "a flush has failed, retrying: cannot create the checkpoint directory" in said(caplog)
    assert [run.load(f"step-{step}") for step in (1, 2)] == [1, 2]


def test_a_full_local_disk_is_passed_by(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the local disk is full, the save goes directly to the remote, with a warning."""
    run = Run(tmp_path)
    create = LocalStorage.create

    def full(self: LocalStorage, name: str, nbytes: int, *, sync: bool) -> Any:
        if self.location.startswith(str(run.local)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create(self, name, nbytes, sync=sync)

    monkeypatch.setattr(LocalStorage, "create", full)
    with run.writer() as writer:
        dcp.save(state_of(1), storage_writer=writer, checkpoint_id=run.remote / "step-1")
    assert f"rank 0: cannot save to {run.local / 'step-1'}; saving to {run.remote / 'step-1'}" in said(caplog)
    assert "No space left on device" in said(caplog)
    assert run.load("step-1") == 1
    assert files_below(run.local) == set()


def test_a_local_folder_that_cannot_be_made_is_passed_by(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the local folder cannot be created, the save goes directly to the remote."""
    run = Run(tmp_path)
    run.local.write_bytes(b"")
    with run.writer() as writer:
        dcp.async_save(state_of(1), storage_writer=writer, checkpoint_id=run.remote / "step-1").result()
        assert writer.last_report.remote_durable_at is not None  # type: ignore[union-attr]
    assert run.load("step-1") == 1
    assert "saving to" in said(caplog)


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_local_folder_that_cannot_be_listed_is_passed_by(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    """A rank whose folder cannot be listed saves like the others, and logs the error once."""
    run = Run(tmp_path)
    unlistable(monkeypatch, run)
    with run.writer(overwrite=overwrite) as writer:
        dcp.async_save(state_of(1), storage_writer=writer, checkpoint_id=run.remote / "step-1").result()
        assert writer.last_report.remote_durable_at is not None  # type: ignore[union-attr]
        with pytest.raises(ReadError, match="Input/output error"):
            writer.wait_remote(1.0)  # nobody can tell
    assert run.load("step-1") == 1
    words = f"cannot list {run.queue.folder}: [Errno 5] Input/output error. Until that changes, this rank does not wait"
    assert said(caplog).count(words) == 1
    assert f"saving to {run.remote / 'step-1'} directly" in said(caplog)


def test_a_checkpoint_is_below_the_writers_path(tmp_path: Path) -> None:
    """A save outside the writer's path is an error."""
    run = Run(tmp_path)
    with quietly(), run.writer() as writer, pytest.raises(CheckpointException) as caught:
        dcp.save(state_of(1), storage_writer=writer, checkpoint_id=tmp_path / "elsewhere")
    assert isinstance(unwrap(caught.value), WriteError)
    assert f"{tmp_path}/elsewhere is not below {run.remote}" in str(unwrap(caught.value))


def test_nothing_is_overwritten_on_the_remote(tmp_path: Path) -> None:
    """With overwrite=False a save fails if the remote has a checkpoint at the path."""
    run = Run(tmp_path)
    with quietly(), run.writer(overwrite=False) as writer:
        dcp.save(state_of(1), storage_writer=writer, checkpoint_id=run.remote / "a")
        assert writer.wait_remote(60)
        with pytest.raises(CheckpointException) as caught:
            dcp.save(state_of(2), storage_writer=writer, checkpoint_id=run.remote / "a")
    assert "Checkpoint already exists and overwrite=False" in str(unwrap(caught.value))
    assert run.load("a") == 1


def test_missing_local_files_come_from_the_remote(tmp_path: Path) -> None:
    """A load reads each file from the local folder if it is complete there, otherwise from the remote."""
    run = Run(tmp_path)
    with run.writer() as writer:
        dcp.save(state_of(1), storage_writer=writer, checkpoint_id=run.remote / "step-1")
    (local,), (remote,) = run.local.rglob("*.tensors"), run.remote.rglob("*.tensors")
    content = remote.read_bytes()
    remote.write_bytes(b"x" * len(content))
    assert run.load("step-1", local=run.local) == 1
    remote.write_bytes(content)
    local.write_bytes(content[:-1])
    assert run.load("step-1", local=run.local) == 1


def test_on_an_object_store(tmp_path: Path, s3: S3Server) -> None:
    """A flush to an object store uploads parts, and leaves no upload."""
    url = f"s3://{s3.bucket}/{uuid.uuid4().hex}"
    state = state_of(5) | {"large": state_of(5)["w"].repeat(10)}
    with TensorizerStorageWriter(url, local=tmp_path, storage_options=s3.options()) as writer:
        for _ in range(2):
            dcp.async_save(state, storage_writer=writer, checkpoint_id=f"{url}/latest").result()
        assert writer.wait_remote(60)
    loaded = {name: value * 0 for name, value in state.items()}
    dcp.load(loaded, storage_reader=TensorizerStorageReader(f"{url}/latest", storage_options=s3.options()))
    assert loaded["large"].unique().tolist() == [5.0]
    prefix = url.partition(f"{s3.bucket}/")[2]
    assert [name.split("_")[0] for name in s3.objects(prefix)] == ["latest/.metadata", "latest/"]
    assert s3.uploads(prefix) == []
    assert all(s3.options()["secret"].encode() not in path.read_bytes() for path in (tmp_path / ".flush").iterdir())


def test_a_remote_in_memory_is_refused(tmp_path: Path) -> None:
    """A remote in memory is refused, because the writer process cannot reach it."""
    with pytest.raises(ValueError, match=r"memory://a is in the memory of one process, .* Omit local="):
        TensorizerStorageWriter("memory://a", local=tmp_path)


def test_nothing_on_its_way_is_overwritten(tmp_path: Path) -> None:
    """With overwrite=False a save fails if the local folder has an unflushed checkpoint for the path."""
    run = Run(tmp_path)
    run.save_unflushed(1, place="a")
    run.cut()
    limits = SaveLimits(timeout=1.0, max_consecutive_failures=None)
    with quietly(), run.writer(overwrite=False, limits=limits) as writer, pytest.raises(CheckpointException) as caught:
        dcp.save(state_of(2), storage_writer=writer, checkpoint_id=run.remote / "a")
    assert "Checkpoint already exists and overwrite=False. It is in " in str(unwrap(caught.value))
    assert run.states() == ["unflushed"]


def test_a_local_copy_of_the_wrong_size_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local file of the wrong size is removed, and the save goes directly to the remote."""
    run = Run(tmp_path)
    head = LocalStorage.head

    def short(self: LocalStorage, name: str) -> int | None:
        return 3 if self.location.startswith(str(run.local)) else head(self, name)

    monkeypatch.setattr(LocalStorage, "head", short)
    with run.writer() as writer:
        dcp.save(state_of(1), storage_writer=writer, checkpoint_id=run.remote / "step-1")
    assert run.load("step-1") == 1
    assert files_below(run.local) == set()


def test_what_cannot_be_written_down_is_brought_to_the_remote(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the local disk takes no record, the rank copies its files to the remote."""
    run, put = Run(tmp_path), LocalStorage.put

    def full(storage: LocalStorage, name: str, *args: Any, **options: Any) -> None:
        if name.endswith(".unflushed"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        put(storage, name, *args, **options)

    monkeypatch.setattr(LocalStorage, "put", full)
    with run.writer() as writer:
        dcp.async_save(state_of(1), storage_writer=writer, checkpoint_id=run.remote / "step-1").result()
        assert writer.last_report.remote_durable_at is not None  # type: ignore[union-attr]
    assert "Read-only file system" in said(caplog)
    assert run.load("step-1") == 1
    assert files_below(run.local) == set()


def test_what_cannot_be_brought_either_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the files can neither be recorded nor copied, the save fails and removes them."""
    run = Run(tmp_path)

    def fails(*args: Any, **options: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with quietly(), run.writer() as writer, monkeypatch.context() as patch:
        destination, written = begun(run, writer, rank=1)
        patch.setattr(LocalStorage, "put", fails)
        patch.setattr(LocalStorage, "open_uncached", fails)
        with pytest.raises(
            WriteError,
            match=r"cannot write to .*Input/output error.*; the copy .* then failed: cannot open .*Input",
        ):
            destination.wrote(written)
    assert files_below(run.folder) == set()


def test_a_save_that_waits_in_vain_for_the_one_before_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A direct save that waits too long for an earlier checkpoint fails with the folder of that checkpoint."""
    run = Run(tmp_path)
    run.save_unflushed(1)
    (run.remote / "step-1").mkdir(parents=True)
    (run.remote / "step-1" / ".metadata").mkdir()  # nothing can be committed there
    monkeypatch.setattr(Queue, "begin", lambda *args: (_ for _ in ()).throw(Refused("No space left on device")))
    limits = SaveLimits(timeout=2.0, max_consecutive_failures=None)
    with quietly(), run.writer(limits=limits) as writer, pytest.raises(CheckpointException) as caught:
        dcp.async_save(state_of(2), storage_writer=writer, checkpoint_id=run.remote / "step-2").result()
    words = str(unwrap(caught.value))
    reason = "is missing on the remote, and nothing has arrived there for 2 s: cannot "
    assert f"the earlier checkpoint in {run.local / 'step-1'} {reason}" in words
    assert list((run.remote / "step-2").iterdir()) == []
    assert run.states() == ["sent"]


def test_a_local_checkpoint_without_its_metadata_is_none(tmp_path: Path) -> None:
    """A load raises `NotCommitted` for a local checkpoint without metadata."""
    run = Run(tmp_path)
    run.save_unflushed(1)
    next(run.queue.folder.glob("*.index")).unlink()
    with quietly(), pytest.raises(CheckpointException) as caught:
        run.load("step-1", local=run.local)
    assert isinstance(unwrap(caught.value), NotCommitted)


def test_what_a_read_only_disk_still_calls_unflushed_does_not_hide_what_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unflushed record on a read-only disk does not hide a later checkpoint on the remote."""
    run = Run(tmp_path)
    run.save_unflushed(1, place="latest")
    dcp.save(state_of(2), storage_writer=TensorizerStorageWriter(run.remote / "latest"))
    read_only(monkeypatch, run.local)
    assert run.load("latest", local=run.local) == 2
