"""Saves with `reuse_unchanged`, on a real disk and on S3."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tensorizer import TensorDeserializer
from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer import CheckpointManager, SaveLimits, TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._cli.views import show_listing
from dcp_tensorizer._saving import writer_client
from dcp_tensorizer._saving.engine import engine_of_process
from dcp_tensorizer._saving.reuse import KnownFiles
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer._writer_process.client import WriterProcess
from dcp_tensorizer._writer_process.options import Staging
from dcp_tensorizer._writer_process.protocol import DigestRequest
from dcp_tensorizer.tools import collect, list_checkpoints, verify

from ..lab.faults import Fault, Request, s3_proxy
from ..lab.processes import kill, writer_process
from ..lab.servers import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

BASE_BYTES = 2_000_000


def state_of(step: int) -> dict[str, Any]:
    """Returns a frozen base, a trained adapter, and a step."""
    generator = torch.Generator().manual_seed(0)
    base = {f"base.{n}": torch.rand(BASE_BYTES // 8, generator=generator) for n in range(2)}
    return {**base, "adapter": torch.full((1000,), float(step)), "step": step}


def check(path: Path | str, step: int, **options: Any) -> None:
    """Loads a checkpoint, and compares it bit for bit."""
    expected = state_of(step)
    loaded = {key: torch.zeros_like(value) if key != "step" else None for key, value in expected.items()}
    dcp.load(loaded, storage_reader=TensorizerStorageReader(path, **options))
    assert loaded.pop("step") == expected.pop("step")
    assert all(torch.equal(loaded[key], value) for key, value in expected.items())


@pytest.fixture(autouse=True)
def _nothing_is_known() -> None:
    """Forgets the files of other tests."""
    engine_of_process(devices=False).files = KnownFiles()


@pytest.fixture
def writer() -> Iterator[TensorizerStorageWriter]:
    with TensorizerStorageWriter(reuse_unchanged=True) as writer:
        yield writer


def save(writer: TensorizerStorageWriter, path: Path | str, step: int, *, sync: bool = True) -> int:
    """Saves, and returns the bytes that were reused."""
    if sync:
        dcp.save(state_of(step), storage_writer=writer, checkpoint_id=path)
    else:
        dcp.async_save(state_of(step), storage_writer=writer, checkpoint_id=path).result()
    assert writer.last_report is not None
    return writer.last_report.reused_nbytes


def largest(path: Path) -> Path:
    """Returns the data file that contains the base."""
    return max(path.glob("*.tensors"), key=lambda file: file.stat().st_size)


@pytest.mark.parametrize("sync", [True, False])
def test_each_checkpoint_is_whole_by_itself(writer: TensorizerStorageWriter, tmp_path: Path, sync: bool) -> None:
    """Checkpoints share the base's file by hard links. Each can be deleted, and stock tensorizer reads them."""
    reused = [save(writer, tmp_path / f"step-{step}", step, sync=sync) for step in range(5)]
    assert reused == [0, 0, BASE_BYTES, BASE_BYTES, BASE_BYTES]
    bases = [largest(tmp_path / f"step-{step}") for step in range(5)]
    assert len({base.name for base in bases}) == 5
    assert len({base.stat().st_ino for base in bases[1:]}) == 1
    assert stat.S_IMODE(bases[4].stat().st_mode) & 0o222 == 0
    shutil.rmtree(tmp_path / "step-1")
    shutil.rmtree(tmp_path / "step-4")
    for step in (0, 2, 3):
        check(tmp_path / f"step-{step}", step)
        assert not verify(tmp_path / f"step-{step}", full=True).damages
    with TensorDeserializer(largest(tmp_path / "step-3"), device="cpu", verify_hash=True) as stock:
        assert torch.equal(stock["base.1"], state_of(3)["base.1"])


def test_a_checkpoint_that_is_overwritten_keeps_the_data(writer: TensorizerStorageWriter, tmp_path: Path) -> None:
    """An overwriting save gives the reused file a new name, and the commit removes the old name."""
    for step in range(2):
        save(writer, tmp_path / "c", step)
    inode = largest(tmp_path / "c").stat().st_ino
    assert save(writer, tmp_path / "c", 2) == BASE_BYTES
    assert (largest(tmp_path / "c").stat().st_ino, largest(tmp_path / "c").stat().st_nlink) == (inode, 1)
    assert len(list(tmp_path.glob("c/*"))) == 3
    check(tmp_path / "c", 2)


def test_a_save_that_is_not_committed_takes_nothing_away(writer: TensorizerStorageWriter, tmp_path: Path) -> None:
    """A failed save leaves the checkpoint at its path, and the next save adopts the file under an older name."""
    for step in range(3):
        save(writer, tmp_path / "c", step)
    before = {path.name for path in tmp_path.glob("c/*")}
    full = mock.patch.object(LocalStorage, "put", side_effect=OSError("no space"))
    with full, suppress(CheckpointException, OSError):
        save(writer, tmp_path / "c", 3)
    for name in {path.name for path in tmp_path.glob("c/*")} - before:
        (tmp_path / "c" / name).unlink()
    check(tmp_path / "c", 2)
    assert save(writer, tmp_path / "c", 4) == BASE_BYTES
    check(tmp_path / "c", 4)


def _touch(file: Path) -> None:
    os.utime(file)


def _flip(file: Path) -> None:
    with open(file, "r+b") as content:
        content.seek(1_000_000)
        content.write(bytes(content.read(1)[0] ^ 1 for _ in range(1)))


def _replace(file: Path) -> None:
    state = file.stat()
    shutil.copy(file, file.with_suffix(".copy"))
    os.utime(file.with_suffix(".copy"), ns=(state.st_atime_ns, state.st_mtime_ns))
    file.with_suffix(".copy").rename(file)


@pytest.mark.promise("file-not-linked")
@pytest.mark.parametrize("change", [_touch, _flip, _replace, Path.unlink, None])
def test_a_file_that_somebody_has_touched_is_written_again(
    writer: TensorizerStorageWriter,
    tmp_path: Path,
    change: Callable[[Path], object] | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A file with another inode, size or time, or one that the system does not link (None), is written again.

    The trainer sees no warning, and the next save reuses the new file.
    """
    for step in range(2):
        save(writer, tmp_path / f"step-{step}", step)
    if change is not None:
        change(largest(tmp_path / "step-1"))
    refused = mock.patch("os.link", side_effect=OSError(errno.EMLINK, os.strerror(errno.EMLINK)))
    with refused if change is None else nullcontext():
        assert save(writer, tmp_path / "step-2", 2) == 0
    assert save(writer, tmp_path / "step-3", 3) == BASE_BYTES
    check(tmp_path / "step-2", 2)
    check(tmp_path / "step-3", 3)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_damage_to_a_shared_file_is_found_in_each_checkpoint(writer: TensorizerStorageWriter, tmp_path: Path) -> None:
    """`verify` finds damage to a shared file in each checkpoint, and reports that others share the file."""
    for step in range(4):
        save(writer, tmp_path / f"step-{step}", step)
    _flip(largest(tmp_path / "step-3"))
    for step in (1, 2, 3):
        (damage,) = verify(tmp_path / f"step-{step}").damages
        assert damage.key in ("base.0", "base.1")
        assert "has 2 other names (hard links): all checkpoints that share the file are damaged" in damage.what
    assert not verify(tmp_path / "step-0").damages


def test_everything_is_written_anew_after_some_reuses(tmp_path: Path) -> None:
    """After ``max_reuses`` saves the base is written again, so that not all checkpoints depend on one file."""
    with TensorizerStorageWriter(reuse_unchanged=True, limits=SaveLimits(max_reuses=2)) as writer:
        reused = [save(writer, tmp_path / f"step-{step}", step) > 0 for step in range(8)]
    assert reused == [False, False, True, True, False, True, True, False]
    assert len({largest(tmp_path / f"step-{step}").stat().st_ino for step in range(8)}) == 4


def test_a_writer_process_that_died_changes_nothing(writer: TensorizerStorageWriter, tmp_path: Path) -> None:
    """The trainer remembers the files, so the next save reuses them after a death of the writer process."""
    for step in range(3):
        save(writer, tmp_path / f"step-{step}", step, sync=False)
    kill(writer_process())
    assert save(writer, tmp_path / "step-3", 3, sync=False) == BASE_BYTES
    check(tmp_path / "step-3", 3)


def test_another_writer_reuses_what_the_first_has_written(tmp_path: Path) -> None:
    """A new writer reuses files of a closed one; a writer without the option writes everything."""
    reused = []
    for step in range(5):
        with TensorizerStorageWriter(reuse_unchanged=step != 3) as other:
            reused.append(save(other, tmp_path / f"step-{step}", step, sync=False))
    assert reused == [0, 0, BASE_BYTES, 0, BASE_BYTES]


def test_files_with_hashes_are_not_taken_for_files_without(tmp_path: Path) -> None:
    """Files with and without SHA-256 are never adopted for each other, even if one of their checkpoints is deleted."""
    refused = mock.patch("os.link", side_effect=OSError(errno.EXDEV, os.strerror(errno.EXDEV)))
    for name, sha256, links in (
        ("hashes", True, nullcontext()),
        ("none", False, refused),
        ("last", False, nullcontext()),
    ):
        with TensorizerStorageWriter(reuse_unchanged=True, sha256=sha256) as writer, links:
            assert save(writer, tmp_path / name, 0) == 0
        check(tmp_path / name, 0)
        if name == "none":
            shutil.rmtree(tmp_path / name)
    assert not verify(tmp_path / "last", full=True).damages


@pytest.mark.parametrize("staging", ["buffer", "shared"])
def test_a_tensor_that_changed_under_a_save_spoils_no_later_one(tmp_path: Path, staging: Staging) -> None:
    """A tensor that changes during its save, and changes back before the next, is not reused with wrong values."""
    state = {"counter": torch.zeros(200_000).share_memory_()}
    target, name = (writer_client, "take_digests") if staging == "buffer" else (WriterProcess, "ask")
    sync, taken = staging == "buffer", getattr(target, name)

    def count(*arguments: Any) -> Any:
        digests = taken(*arguments)
        if not sync and not isinstance(arguments[1], DigestRequest):
            return digests
        state["counter"] += 1
        return digests

    method = mock.patch.object(target, name, count)
    with TensorizerStorageWriter(reuse_unchanged=True, staging=staging) as writer:
        for name, changes in (("during", method), ("after", nullcontext())):
            with changes:
                if sync:
                    dcp.save(state, storage_writer=writer, checkpoint_id=tmp_path / name)
                else:
                    dcp.async_save(state, storage_writer=writer, checkpoint_id=tmp_path / name).result()
            state["counter"].zero_()
    loaded = {"counter": torch.ones(200_000)}
    dcp.load(loaded, storage_reader=TensorizerStorageReader(tmp_path / "after"))
    assert torch.equal(loaded["counter"], torch.zeros(200_000))


def test_the_tools_know_what_is_shared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`ls` shows the shared bytes, and `gc` counts only bytes whose last name it removes."""
    with TensorizerStorageWriter(reuse_unchanged=True) as writer:
        for step in range(5):
            save(writer, tmp_path / f"step-{step}", step)
    shared = largest(tmp_path / "step-1").stat().st_size
    assert [info.shared_nbytes for info in list_checkpoints(tmp_path)] == [shared, shared, shared, shared, 0]
    show_listing(list_checkpoints(tmp_path), str(tmp_path))
    header, first, *_, last_line = capsys.readouterr().out.splitlines()
    assert header.split() == ["checkpoint", "state", "saved", "size", "shared", "ranks", "tensors"]
    assert first.split()[-4:-2] == ["2.26", "MB"]
    assert last_line.split()[-4:-2] == ["0", "B"]
    planned, removed = (collect(tmp_path, keep_latest=2, dry_run=dry_run) for dry_run in (True, False))
    assert [os.path.basename(removal.path) for removal in removed] == ["step-2", "step-1", "step-0"]
    sizes = [removal.nbytes for removal in removed]
    assert [removal.nbytes for removal in planned] == sizes
    assert sizes[0] == sizes[1] < shared < sizes[2]
    (last,) = collect(tmp_path, keep_latest=1)
    assert last.nbytes == sizes[0]
    check(tmp_path / "step-4", 4)


def test_a_manager_passes_the_option_on(tmp_path: Path) -> None:
    """A manager's deletion of old checkpoints leaves the files that new ones share."""
    with CheckpointManager(tmp_path, keep_latest=2, reuse_unchanged=True) as manager:
        for step in range(1, 6):
            manager.save(step, state_of(step), wait=True)
        assert manager.steps() == [4, 5]
    assert largest(tmp_path / "step-5").stat().st_nlink == 2
    check(tmp_path / "step-5", 5)


def test_an_object_store_copies_what_is_reused(s3: S3Server, tmp_path: Path) -> None:
    """On an object store each checkpoint has its own copies; saves to a disk in between change nothing."""
    options = s3.options()
    with TensorizerStorageWriter(reuse_unchanged=True, storage_options=options) as remote:
        reused = [save(remote, f"s3://{s3.bucket}/reuse/step-{step}", step, sync=False) for step in range(4)]
        with TensorizerStorageWriter(reuse_unchanged=True) as local:
            save(local, tmp_path / "a", 4)
            reused.append(save(remote, f"s3://{s3.bucket}/reuse/step-5", 5))
            reused.append(save(local, tmp_path / "b", 6))
    assert reused == [0, 0, BASE_BYTES, BASE_BYTES, BASE_BYTES, BASE_BYTES]
    check(f"s3://{s3.bucket}/reuse/step-3", 3, storage_options=options)


def test_an_object_store_that_does_not_copy_in_time_is_written_to(s3: S3Server) -> None:
    """A store that does not copy in time gets the data written, before the writer process's timeout."""
    with s3_proxy(s3.endpoint) as proxy:
        # Three attempts at a copy end long before the limit, on a busy machine too.
        options, limits = (
            s3.options(proxy.endpoint, config_kwargs={"retries": {"max_attempts": 2}}),
            SaveLimits(timeout=8),
        )
        with TensorizerStorageWriter(reuse_unchanged=True, storage_options=options, limits=limits) as writer:
            reused = [save(writer, f"s3://{s3.bucket}/slow/step-{step}", step, sync=False) for step in range(5)]
            proxy.rule = lambda request: Fault(hang=True) if _is_copy(request) else None
            reused.append(save(writer, f"s3://{s3.bucket}/slow/step-5", 5, sync=False))
            assert writer.last_report is not None
            assert writer.last_report.attempts == 1
    assert reused == [0, 0, BASE_BYTES, BASE_BYTES, BASE_BYTES, 0]
    check(f"s3://{s3.bucket}/slow/step-5", 5, storage_options=s3.options())


def _is_copy(request: Request) -> bool:
    return request.method == "PUT" and request.key.endswith(".tensors") and not request.nbytes
