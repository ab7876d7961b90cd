"""A file gets a second name, or none: whatever happens to it before, and whatever the system says."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from dcp_tensorizer._storage.base import FileIdentity, HardLinks
from dcp_tensorizer._storage.local import LocalStorage, identity_of, link_file


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(b"content")
    path.chmod(0o640)
    return path


def identity(path: Path) -> FileIdentity:
    found = identity_of(path.lstat())
    assert found is not None
    return found


def test_a_linked_file_can_no_longer_be_written(source: Path, tmp_path: Path) -> None:
    """A linked file loses its write permission, gets no other permission, and keeps its identity."""
    known = identity(source)
    assert link_file(source, known, tmp_path / "target", sync=True)
    assert os.path.samefile(source, tmp_path / "target")
    assert stat.S_IMODE(source.stat().st_mode) == 0o440
    assert identity(tmp_path / "target") == known


def test_its_bytes_are_made_durable(source: Path, tmp_path: Path) -> None:
    """With ``sync`` a linked file is synced, because its writer may not have done so."""
    known = identity(source)
    with mock.patch("os.fsync") as fsync:
        assert link_file(source, known, tmp_path / "target", sync=True)
        assert fsync.call_count == 1
        assert link_file(source, known, tmp_path / "other", sync=False)
        assert fsync.call_count == 1


def test_a_file_that_cannot_be_linked_is_left_as_it_is(source: Path, tmp_path: Path) -> None:
    """A file that cannot be linked keeps its permissions and is not synced."""
    refused = mock.patch("os.link", side_effect=OSError(errno.EXDEV, os.strerror(errno.EXDEV)))
    with refused, mock.patch("os.fsync") as fsync:
        assert not link_file(source, identity(source), tmp_path / "target", sync=True)
    assert fsync.call_count == 0
    assert stat.S_IMODE(source.stat().st_mode) == 0o640


def _rewritten(source: Path) -> None:
    state = source.stat()
    source.write_bytes(b"CONTENT")
    os.utime(source, ns=(state.st_atime_ns, state.st_mtime_ns + 1))


def _replaced(source: Path) -> None:
    state = source.stat()
    (source.parent / "new").write_bytes(b"content")
    os.utime(source.parent / "new", ns=(state.st_atime_ns, state.st_mtime_ns))
    (source.parent / "new").rename(source)


def _cut(source: Path) -> None:
    state = source.stat()
    os.truncate(source, 3)
    os.utime(source, ns=(state.st_atime_ns, state.st_mtime_ns))


def _behind_a_link(source: Path) -> None:
    source.rename(source.parent / "moved")
    source.symlink_to("moved")


def _a_fifo(source: Path) -> None:
    source.unlink()
    os.mkfifo(source)


@pytest.mark.parametrize("change", [_rewritten, _replaced, _cut, _behind_a_link, _a_fifo, Path.unlink])
def test_a_file_that_is_not_what_it_was_is_not_linked(
    source: Path, tmp_path: Path, change: Callable[[Path], object]
) -> None:
    """A file with another time, inode or size is not linked, and neither is anything but a regular file."""
    known = identity(source)
    change(source)
    assert not link_file(source, known, tmp_path / "target", sync=True)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EMLINK, errno.EPERM, errno.ENOENT, errno.ENOSPC])
@pytest.mark.parametrize("call", ["os.link", "os.fchmod", "os.fsync", "os.open"])
def test_what_the_system_refuses_is_not_linked(source: Path, tmp_path: Path, call: str, number: int) -> None:
    """An ordinary failure of a link returns False and raises nothing."""
    known = identity(source)
    with mock.patch(call, side_effect=OSError(number, os.strerror(number))):
        assert not link_file(source, known, tmp_path / "target", sync=True)
    assert not (tmp_path / "target").exists()


def test_a_link_that_was_made_although_the_system_denies_it_counts(source: Path, tmp_path: Path) -> None:
    """A link succeeds if a network mount reports the failure of its own retry."""
    known = identity(source)

    def link(source: Path, target: Path, *, follow_symlinks: bool, link: Callable[..., None] = os.link) -> None:
        link(source, target, follow_symlinks=follow_symlinks)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    with mock.patch("os.link", link):
        assert link_file(source, known, tmp_path / "target", sync=True)
    assert os.path.samefile(source, tmp_path / "target")


def test_a_link_that_cannot_be_looked_at_is_taken_back(source: Path, tmp_path: Path) -> None:
    """If the permission or the sync fails, the new name is removed."""
    with mock.patch("os.lstat", side_effect=OSError(errno.EIO, os.strerror(errno.EIO))):
        assert not link_file(source, identity_of(source.stat()) or (), tmp_path / "target", sync=True)
    assert os.listdir(tmp_path) == ["source"]


def test_a_file_that_was_replaced_while_it_was_linked_is_released(source: Path, tmp_path: Path) -> None:
    """If the source was replaced in the meantime, the new name is removed."""
    known = identity(source)

    def link(source: Path, target: Path, *, follow_symlinks: bool, link: Callable[..., None] = os.link) -> None:
        _replaced(source)
        link(source, target, follow_symlinks=follow_symlinks)

    with mock.patch("os.link", link):
        assert not link_file(source, known, tmp_path / "target", sync=True)
    assert not (tmp_path / "target").exists()


def test_a_listing_says_which_files_have_other_names(source: Path, tmp_path: Path) -> None:
    """A listing shows files with several names by device, inode and number of names."""
    os.link(source, tmp_path / "other")
    (tmp_path / "single").touch()
    state = source.stat()
    files = {file.name: file.shared for file in LocalStorage(tmp_path).listing()[0]}
    shared = HardLinks(state.st_dev, state.st_ino, 2)
    assert files == {"source": shared, "other": shared, "single": None}
