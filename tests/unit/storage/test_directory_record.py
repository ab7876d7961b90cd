"""Records are known again where they were written, and nowhere else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dcp_tensorizer._storage import local
from dcp_tensorizer._storage.local import is_record, put_record


@pytest.fixture
def record(tmp_path: Path) -> Path:
    (tmp_path / "checkpoint").mkdir()
    put_record(tmp_path / "checkpoint" / "record")
    return tmp_path / "checkpoint" / "record"


def test_it_is_known_again(record: Path) -> None:
    """Every process recognises a record, through any link to its directory, and after the directory was renamed."""
    assert is_record(record)
    (record.parent.parent / "link").symlink_to("checkpoint")
    assert is_record(record.parent.parent / "link" / "record")
    record.parent.rename(record.parent.parent / "moved")
    assert is_record(record.parent.parent / "moved" / "record")


def _copy(record: Path) -> Path:
    return Path(shutil.copy2(record, record.parent / "copy"))


def _copy_directory(record: Path) -> Path:
    return Path(shutil.copytree(record.parent, record.parent.parent / "copy")) / "record"


def _move_elsewhere(record: Path) -> Path:
    (record.parent.parent / "other").mkdir()
    return record.rename(record.parent.parent / "other" / "record")


def _touch(record: Path) -> Path:
    """A copy with restored times is not a record, even if it gets both inodes of the removed original."""
    while record.stat().st_ctime < float(record.read_text().split()[0]) + 0.1:
        os.utime(record, (0, 0))
    return record


def _cut(record: Path) -> Path:
    record.write_bytes(record.read_bytes()[:-3])
    return record


@pytest.mark.parametrize("change", [_copy, _copy_directory, _move_elsewhere, _touch, _cut])
def test_what_is_no_record(record: Path, change: Callable[[Path], Path]) -> None:
    """A record that was copied, moved, cut or whose times were set is not valid."""
    assert not is_record(change(record))


def test_what_cannot_be_read_is_none(tmp_path: Path) -> None:
    """A missing file, a directory, a FIFO, any bytes and a link to a record are not records."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff\n\n")
    put_record(tmp_path / "record")
    (tmp_path / "link").symlink_to("record")
    names = ["missing", "folder", "pipe", "bytes", "link", "record"]
    assert [is_record(tmp_path / name) for name in names] == [False] * 5 + [True]


def test_after_another_boot_it_proves_nothing(record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the boot id is unknown, no file is a record and none can be written."""
    (tmp_path / "boot").write_text("another\n")
    monkeypatch.setattr(local, "_BOOT_ID", tmp_path / "boot")
    assert not is_record(record)
    monkeypatch.setattr(local, "_BOOT_ID", tmp_path / "nowhere")
    assert not is_record(record)
    with pytest.raises(FileNotFoundError):
        put_record(tmp_path / "another")
    assert not (tmp_path / "another").exists()
