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
from dcp_tensorizer._tiers.queue import Queue, Writing
from dcp_tensorizer.errors import unwrap
from dcp_tensorizer.writer import SaveReport

from ... import warm
from ...lab.processes import quietly
from ...lab.servers import S3Server
from .support import Run, begun, files_below, state_of, unlistable


def said(caplog: pytest.LogCaptureFixture) -> str:
    """The warnings and errors of this package."""
    records = [entry for entry in caplog.records if entry.name == "dcp_tensorizer" and entry.levelno >= logging.WARNING]
    return "\n".join(entry.getMessage() for entry in records)


@pytest.mark.promise("saved-when-done", reason="with a local disk")
def test_a_save_is_durable_locally_and_then_on_the_remote(tmp_path: Path) -> None:
    """The report comes twice: the second time it says when the remote had the checkpoint."""
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
    """``dcp.save`` leaves the flush to the writer process, which `close` waits for."""
    run = Run(tmp_path)
    with run.writer() as writer:
        dcp.save(state_of(1), storage_writer=writer, checkpoint_id=run.remote / "step-1")
    assert run.load("step-1") == 1


def test_large_states_are_flushed_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrives on the remote tells other nodes that this one is alive: one file for all would say nothing."""
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
    """It is loaded from the local folder before that, and from the remote alone afterwards."""
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
    """The save fails when the remote does not come back in time, and `close` says what has not arrived."""
    run = Run(tmp_path)
    run.cut()
    limits = SaveLimits(timeout=1.0, max_consecutive_failures=None)
    with run.writer(max_unflushed=2, limits=limits) as writer:
        for step in (1, 2):
            dcp.async_save(state_of(step), storage_writer=writer, checkpoint_id=run.remote / f"step-{step}").result()
        with pytest.raises(CheckpointException) as caught:
            dcp.async_save(state_of(3), storage_writer=writer, checkpoint_id=run.remote / "step-3").result()
    words = f"2 checkpoints lie in {run.local}, and nothing has come to {run.remote} for 1 s"
    assert words in str(unwrap(caught.value))
    assert f"2 checkpoint(s) have not reached {run.remote}. They are in {run.local}" in said(caplog)
    assert run.states() == ["unflushed"] * 2


def test_a_writer_that_does_nothing_waits_for_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What a dead job has left is nothing that its `close` would wait for: nobody flushes it."""
    run = Run(tmp_path)
    run.save_unflushed(1)
    caplog.clear()
    run.writer(limits=SaveLimits(timeout=1.0)).close()
    assert said(caplog) == ""
    assert run.states() == ["unflushed"]


def test_a_writer_goes_on_when_the_remote_is_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What failed is tried again, with a warning, and the order stays."""
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
    """The save goes to the remote directly, with a warning, and is committed there after those before it."""
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
    """A disk that is not there does no more harm than a full one."""
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
    """A rank with a dead disk stages and saves as the others do, and says once what it cannot read."""
    run = Run(tmp_path)
    unlistable(monkeypatch, run)
    with run.writer(overwrite=overwrite) as writer:
        dcp.async_save(state_of(1), storage_writer=writer, checkpoint_id=run.remote / "step-1").result()
        assert writer.last_report.remote_durable_at is not None  # type: ignore[union-attr]
        with pytest.raises(ReadError, match="Input/output error"):
            writer.wait_remote(1.0)  # nobody can tell
    assert run.load("step-1") == 1
    words = f"cannot list {run.queue.folder}: [Errno 5] Input/output error: gave up waiting for its saves"
    assert said(caplog).count(words) == 1
    assert f"saving to {run.remote / 'step-1'} directly" in said(caplog)


def test_a_checkpoint_is_below_the_writers_path(tmp_path: Path) -> None:
    """Elsewhere it would have no place in the local folder."""
    run = Run(tmp_path)
    with quietly(), run.writer() as writer, pytest.raises(CheckpointException) as caught:
        dcp.save(state_of(1), storage_writer=writer, checkpoint_id=tmp_path / "elsewhere")
    assert isinstance(unwrap(caught.value), WriteError)
    assert f"{tmp_path}/elsewhere is not below {run.remote}" in str(unwrap(caught.value))


def test_nothing_is_overwritten_on_the_remote(tmp_path: Path) -> None:
    """With overwrite=False the remote is asked before anything is written."""
    run = Run(tmp_path)
    with quietly(), run.writer(overwrite=False) as writer:
        dcp.save(state_of(1), storage_writer=writer, checkpoint_id=run.remote / "a")
        assert writer.wait_remote(60)
        with pytest.raises(CheckpointException) as caught:
            dcp.save(state_of(2), storage_writer=writer, checkpoint_id=run.remote / "a")
    assert "Checkpoint already exists and overwrite=False" in str(unwrap(caught.value))
    assert run.load("a") == 1


def test_missing_local_files_come_from_the_remote(tmp_path: Path) -> None:
    """A load takes each file from the local folder if it is whole there, and else from the remote."""
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
    """The same there: with parts, and with nothing left open."""
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
    """The writer process, which flushes, cannot reach it."""
    with pytest.raises(ValueError, match=r"memory://a is in the memory of one process, .* Save without local="):
        TensorizerStorageWriter("memory://a", local=tmp_path)


def test_nothing_on_its_way_is_overwritten(tmp_path: Path) -> None:
    """With overwrite=False a checkpoint that is not on the remote yet counts as well."""
    run = Run(tmp_path)
    run.save_unflushed(1, place="a")
    run.cut()
    limits = SaveLimits(timeout=1.0, max_consecutive_failures=None)
    with quietly(), run.writer(overwrite=False, limits=limits) as writer, pytest.raises(CheckpointException) as caught:
        dcp.save(state_of(2), storage_writer=writer, checkpoint_id=run.remote / "a")
    assert "Checkpoint already exists and overwrite=False. It is in " in str(unwrap(caught.value))
    assert run.states() == ["unflushed"]


def test_a_local_copy_of_the_wrong_size_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save goes to the remote directly, and no file stays that no record names."""
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
    """A rank whose local disk takes the data, and no record of it any more, has saved nevertheless."""
    run = Run(tmp_path)

    def full(writing: Writing, *args: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Writing, "written", full)
    with run.writer() as writer:
        dcp.async_save(state_of(1), storage_writer=writer, checkpoint_id=run.remote / "step-1").result()
        assert writer.last_report.remote_durable_at is not None  # type: ignore[union-attr]
    assert "Read-only file system" in said(caplog)
    assert run.load("step-1") == 1
    assert files_below(run.local) == set()


def test_what_cannot_be_brought_either_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that can neither write down what it has, nor read it, keeps nothing of it anywhere."""
    run = Run(tmp_path)

    def fails(*args: Any, **options: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with quietly(), run.writer() as writer, monkeypatch.context() as patch:
        destination, written = begun(run, writer, rank=1)
        patch.setattr(Writing, "written", fails)
        patch.setattr(LocalStorage, "open_uncached", fails)
        with pytest.raises(
            WriteError, match=r"cannot write to .*Input/output error.*; then cannot open .*Input/output"
        ):
            destination.wrote(written)
    assert files_below(run.folder) == set()


def test_a_save_that_waits_in_vain_for_the_one_before_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local disk is full, and the remote has no room for what lies there: the error says so, and where."""
    run = Run(tmp_path)
    run.save_unflushed(1)
    (run.remote / "step-1").mkdir(parents=True)
    (run.remote / "step-1" / ".metadata").mkdir()  # nothing can be committed there
    monkeypatch.setattr(Queue, "begin", lambda *args: (_ for _ in ()).throw(Refused("No space left on device")))
    limits = SaveLimits(timeout=2.0, max_consecutive_failures=None)
    with quietly(), run.writer(limits=limits) as writer, pytest.raises(CheckpointException) as caught:
        dcp.async_save(state_of(2), storage_writer=writer, checkpoint_id=run.remote / "step-2").result()
    words = str(unwrap(caught.value))
    assert f"step-1 was saved before, lies in {run.local / 'step-1'}, and cannot be flushed (cannot " in words
    assert "has not arrived for 2 s" in words
    assert list((run.remote / "step-2").iterdir()) == []
    assert run.states() == ["sent"]


def test_a_local_checkpoint_without_its_metadata_is_none(tmp_path: Path) -> None:
    """A load says that nothing is committed there, as after the flush has given it up."""
    run = Run(tmp_path)
    run.save_unflushed(1)
    next(run.queue.folder.glob("*.index")).unlink()
    with quietly(), pytest.raises(CheckpointException) as caught:
        run.load("step-1", local=run.local)
    assert isinstance(unwrap(caught.value), NotCommitted)


def test_what_a_read_only_disk_still_calls_unflushed_does_not_hide_what_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remote has a later checkpoint at that place, and the records of the disk could not be changed."""
    run = Run(tmp_path)
    run.save_unflushed(1, place="latest")
    dcp.save(state_of(2), storage_writer=TensorizerStorageWriter(run.remote / "latest"))
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != run.queue.folder and access(path, mode))
    assert run.load("latest", local=run.local) == 2
