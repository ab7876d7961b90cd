"""Rows of docs/failures.md that one process can show whole: the error, what is on storage then, and the next save."""

from __future__ import annotations

import errno
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer import (
    CheckpointManager,
    ReadError,
    SaveLimits,
    StagingError,
    TensorizerStorageReader,
    TensorizerStorageWriter,
    WriteError,
    WriterProcessDied,
    unwrap,
)
from dcp_tensorizer._runtime import memory_limit
from dcp_tensorizer._storage.local import LocalStorage

from ..lab.processes import file_size_limit, writer_process
from ..lab.waiting import WAIT, Gate, in_thread

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state_of(step: int, count: int = 2000) -> dict[str, torch.Tensor]:
    return {"w": torch.full((count,), float(step)), "small": torch.tensor([step])}


def save(writer: TensorizerStorageWriter, step: int, count: int = 2000) -> None:
    dcp.async_save(state_of(step, count), storage_writer=writer).result()


def loaded(path: Path, count: int = 2000) -> float:
    """The step whose state a checkpoint holds."""
    state = state_of(0, count)
    dcp.load(state, storage_reader=TensorizerStorageReader(path))
    (step,) = {*state["w"].tolist(), *state["small"].tolist()}
    return float(step)


def error_of(act: Callable[[], object]) -> Exception:
    """The package's own error, which DCP has wrapped."""
    with pytest.raises(CheckpointException) as caught:
        act()
    error = unwrap(caught.value)
    assert isinstance(error, Exception)
    return error


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users can enter, and whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextmanager
def as_a_user() -> Iterator[None]:
    """Root may write everywhere, and is another user in the block."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(1234)
    try:
        yield
    finally:
        os.seteuid(user)


# --- the trainer's host -----------------------------------------------------------------------------------------------


@pytest.mark.promise("no-progress")
def test_a_writer_process_that_makes_no_progress(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The error has the time, the save is not written once more, and the next one has a process of its own."""
    with TensorizerStorageWriter(tmp_path, limits=SaveLimits(timeout=3.0)) as writer:
        save(writer, 1)
        hung = writer_process()
        hung.suspend()
        error = error_of(lambda: save(writer, 2))
        assert isinstance(error, WriterProcessDied)
        assert "made no progress for 3 s" in str(error)
        assert "once more" not in caplog.text
        assert loaded(tmp_path) == 1
        save(writer, 3)
        assert writer_process() != hung
    assert loaded(tmp_path) == 3


REFUSALS: dict[str, tuple[Callable[[], AbstractContextManager[object]], str]] = {
    "memfd_create": (
        lambda: mock.patch("os.memfd_create", side_effect=PermissionError(errno.EPERM, os.strerror(errno.EPERM))),
        r"Operation not permitted: .*refuses memfd_create.*seccomp",
    ),
    "ulimit -f": (lambda: file_size_limit(1 << 20), r"8,[\d,]+ bytes.*File too large.*ulimit -f"),
    "memory": (
        lambda: mock.patch.object(memory_limit, "available_memory", return_value=1 << 20),
        r"needs 8,[\d,]+ bytes, but only 1,048,576 bytes of memory are available",
    ),
}


@pytest.mark.promise("shared-memory-refused")
@pytest.mark.promise("staging-memory", reason="the bytes that are available, before the system refuses them")
@pytest.mark.parametrize("case", REFUSALS)
def test_memory_that_the_system_does_not_give(tmp_path: Path, case: str) -> None:
    """The error has what was refused and what to do, the old checkpoint stays, and the next save tries again."""
    refusal, words = REFUSALS[case]
    with TensorizerStorageWriter(tmp_path) as writer:
        save(writer, 1)
        with refusal():
            error = error_of(lambda: save(writer, 2, 2 << 20))
        assert type(error) is StagingError
        assert re.search(words, str(error))
        assert loaded(tmp_path) == 1
        save(writer, 3, 2 << 20)
    assert loaded(tmp_path, 2 << 20) == 3


# --- the path ---------------------------------------------------------------------------------------------------------


@pytest.mark.promise("disk-hangs", reason="a synchronous save, which waits as long as the disk hangs")
def test_a_synchronous_save_waits_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beyond its timeout; it is committed when the disk answers again."""
    gate, put = Gate(), LocalStorage.put

    def put_late(storage: LocalStorage, *arguments: object, **options: object) -> None:
        gate.pass_through()
        put(storage, *arguments, **options)  # type: ignore[arg-type]

    with TensorizerStorageWriter(tmp_path, limits=SaveLimits(timeout=0.3)) as writer:
        dcp.save(state_of(1), storage_writer=writer)
        monkeypatch.setattr(LocalStorage, "put", put_late)
        saving = in_thread(lambda: dcp.save(state_of(2), storage_writer=writer))
        gate.wait_reached()
        saving.join(0.9)
        assert saving.is_alive()
        assert loaded(tmp_path) == 1
        gate.open()
        saving.join(WAIT)
    assert loaded(tmp_path) == 2


@pytest.mark.promise("folder-of-another-user")
def test_a_folder_of_another_user(folder: Path) -> None:
    """The error has its owner, its mode and the user who saves; what is there stays, and its owner can save."""
    with TensorizerStorageWriter(folder / "checkpoint") as writer:
        dcp.save(state_of(1), storage_writer=writer)
        (folder / "checkpoint").chmod(0o555)
        with as_a_user():
            error = error_of(lambda: dcp.save(state_of(2), storage_writer=writer))
        assert type(error) is WriteError
        for words in (f"{folder}/checkpoint belongs to user ", "(mode 555), and this process runs as user "):
            assert words in str(error)
        assert loaded(folder / "checkpoint") == 1
        (folder / "checkpoint").chmod(0o755)
        dcp.save(state_of(3), storage_writer=writer)
    assert loaded(folder / "checkpoint") == 3


@pytest.mark.promise("user-changes")
def test_a_trainer_that_changes_its_user(folder: Path) -> None:
    """The writer process writes the next save as the user with which it was started; the trainer commits it."""
    folder.chmod(0o777)
    owner = os.geteuid()
    with TensorizerStorageWriter(folder / "first") as writer:
        save(writer, 1)
        with as_a_user():
            dcp.async_save(state_of(2), checkpoint_id=folder / "second", storage_writer=writer).result()
            data = [file.stat().st_uid for file in (folder / "second").iterdir() if file.suffix == ".tensors"]
    assert data == [owner]
    assert loaded(folder / "second") == 2


@pytest.mark.promise("path-refused")
@pytest.mark.promise("load-no-file", reason="a directory that cannot be entered")
def test_a_directory_that_cannot_be_entered(folder: Path) -> None:
    """Errors of a save and of a load have the cause and the path; what is there stays, and the next save works."""
    path, target = folder / "locked" / "checkpoint", state_of(7)
    with TensorizerStorageWriter(path) as writer:
        dcp.save(state_of(1), storage_writer=writer)
        (folder / "locked").chmod(0)
        with as_a_user():
            errors = [
                error_of(lambda: dcp.save(state_of(2), storage_writer=writer)),
                error_of(lambda: dcp.load(target, storage_reader=TensorizerStorageReader(path))),
            ]
        (folder / "locked").chmod(0o700)
        assert [type(error) for error in errors] == [WriteError, ReadError]
        assert all(str(path) in str(error) and "Permission denied" in str(error) for error in errors)
        assert target["w"].unique().tolist() == [7.0]
        assert loaded(path) == 1
        dcp.save(state_of(3), storage_writer=writer)
    assert loaded(path) == 3


@pytest.mark.promise("path-refused", reason="a name that is too long")
def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    """The error has the cause and the path, nothing is made, and the next save works."""
    path = tmp_path / ("x" * 300) / "checkpoint"
    with TensorizerStorageWriter() as writer:
        error = error_of(lambda: dcp.save(state_of(1), storage_writer=writer, checkpoint_id=path))
        assert type(error) is WriteError
        assert str(path) in str(error) and "File name too long" in str(error)
        assert list(tmp_path.iterdir()) == []
        dcp.save(state_of(2), storage_writer=writer, checkpoint_id=tmp_path / "checkpoint")
    assert loaded(tmp_path / "checkpoint") == 2


@pytest.mark.promise("path-not-shared", reason="a directory that is moved")
def test_a_directory_that_is_moved_during_the_save(tmp_path: Path) -> None:
    """The error names the rank whose data is not there, the old checkpoint is where it went, the next save works."""
    path = tmp_path / "checkpoint"

    class Moving(TensorizerStorageWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            written = super().write_data(plan, planner)
            if (path / ".metadata").exists() and not (tmp_path / "moved").exists():
                path.rename(tmp_path / "moved")
            return written

    with Moving(path) as writer:
        save(writer, 1)
        error = error_of(lambda: save(writer, 2))
        assert isinstance(error, WriteError)
        assert re.search(r"that rank 0 just wrote .*the ranks do not share this path", str(error))
        assert loaded(tmp_path / "moved") == 1
        save(writer, 3)
    assert loaded(path) == 3


# --- what is no file --------------------------------------------------------------------------------------------------


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "FIFO": (os.mkfifo, "it is a FIFO, not a regular file"),
    "socket": (make_socket, "it is a socket, not a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a regular file"),
    "directory": (Path.mkdir, "Is a directory"),
}


@pytest.mark.promise("metadata-no-file")
@pytest.mark.parametrize("kind", KINDS)
def test_an_index_that_is_no_file(folder: Path, kind: str) -> None:
    """A save names what it is, and leaves everything as it was; the next one works when it is gone."""
    make, words = KINDS[kind]
    with TensorizerStorageWriter(folder) as writer:
        save(writer, 1)
        path = folder / ".metadata"
        path.unlink()
        make(path)
        before, names = os.lstat(path), sorted(os.listdir(folder))
        error = error_of(lambda: save(writer, 2))
        assert isinstance(error, WriteError)
        assert f"cannot write {path}: " in str(error) and words in str(error)
        assert sorted(os.listdir(folder)) == names
        assert os.path.samestat(os.lstat(path), before)
        path.rmdir() if kind == "directory" else path.unlink()
        save(writer, 3)
    assert loaded(folder) == 3


@pytest.mark.promise("metadata-no-file", reason="a save of a manager")
@pytest.mark.parametrize("kind", KINDS)
def test_an_index_of_a_step_that_is_no_file(folder: Path, kind: str) -> None:
    """A manager's save of this step names what it is, and leaves everything as it was; other steps are saved."""
    make, words = KINDS[kind]
    path = folder / "step-2" / ".metadata"
    path.parent.mkdir()
    make(path)
    before = os.lstat(path)
    with CheckpointManager(folder, stop_signals=()) as manager:
        manager.save(1, state_of(1), wait=True)
        with pytest.raises(WriteError, match=rf"cannot write {path}: .*{words}"):
            manager.save(2, state_of(2), wait=True)
        assert os.listdir(path.parent) == [".metadata"]
        assert os.path.samestat(os.lstat(path), before)
        manager.save(3, state_of(3), wait=True)
        assert manager.steps() == [1, 3]
    assert loaded(folder / "step-1") == 1
    assert loaded(folder / "step-3") == 3


@pytest.mark.promise("load-no-file")
@pytest.mark.parametrize("name", [".metadata", "*.tensors"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "directory"])
def test_a_load_of_what_is_no_file(folder: Path, kind: str, name: str) -> None:
    """It does not hang: the error has the path and what is there, and no target has changed."""
    make, words = KINDS[kind]
    with TensorizerStorageWriter(folder) as writer:
        save(writer, 1)
    (path,) = folder.glob(name)
    path.unlink()
    make(path)
    target = state_of(7)
    error = error_of(lambda: dcp.load(target, storage_reader=TensorizerStorageReader(folder)))
    assert isinstance(error, ReadError)
    assert f"cannot read {path}: {words}" in str(error)
    assert [set(tensor.tolist()) for tensor in target.values()] == [{7.0}, {7}]
