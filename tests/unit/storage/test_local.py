"""Directories on local file systems: their locks, and small files put in place."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dcp_tensorizer import ReadError, WriteError
from dcp_tensorizer._storage import local_io
from dcp_tensorizer._storage.base import Refused
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer.testing import put_file

from ...lab.processes import open_descriptors

NAME = f"__0_0_{'a' * 32}.tensors"


def network_mount(path: Path) -> LocalStorage:
    """Returns a directory on a network file system."""
    return LocalStorage(path, local_types=())


def test_the_first_lock_is_exclusive(tmp_path: Path) -> None:
    """The lock is exclusive until it is shared."""
    lock = LocalStorage(tmp_path).lock_directory()
    assert lock.is_exclusive
    lock.share(1.0)
    assert not lock.is_exclusive
    lock.release()


def test_a_second_lock_is_not(tmp_path: Path) -> None:
    """While another save is in progress, the lock is not exclusive, so no file counts as a leftover."""
    first = LocalStorage(tmp_path).lock_directory()
    first.share(1.0)
    second = LocalStorage(tmp_path).lock_directory()
    assert not second.is_exclusive
    second.share(1.0)
    first.release()
    first.release()
    second.release()
    third = LocalStorage(tmp_path).lock_directory()
    assert third.is_exclusive
    third.release()


def test_a_lock_ends_with_its_block(tmp_path: Path) -> None:
    """The lock is released at the end of the block, also after an exception."""
    with suppress(ValueError), LocalStorage(tmp_path).lock_directory():
        raise ValueError
    with LocalStorage(tmp_path).lock_directory() as again:
        assert again.is_exclusive


def test_the_wait_for_a_save_that_cleans_up_is_bounded(tmp_path: Path) -> None:
    """If a stopped process holds the lock, the error names the directory, and no descriptor stays open."""
    before = open_descriptors()
    holder = LocalStorage(tmp_path).lock_directory()
    other = LocalStorage(tmp_path).lock_directory()
    with pytest.raises(WriteError, match=str(tmp_path)):
        other.share(0.05)
    holder.release()
    assert open_descriptors() == before


@pytest.mark.parametrize("case", ["no locks", "a network mount"])
def test_without_locks_that_all_can_see_nothing_is_left_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """A save continues on network file systems, which refuse locks on directories or hide them from other machines."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(9, "Bad file descriptor")

    if case == "no locks":
        monkeypatch.setattr(fcntl, "flock", refuse)
    storage = LocalStorage(tmp_path) if case == "no locks" else network_mount(tmp_path)
    assert storage.child("x").locks_are_visible == (case == "no locks")
    lock = storage.lock_directory()
    assert not lock.is_exclusive
    lock.share(1.0)
    lock.release()


def test_a_missing_directory_cannot_be_locked(tmp_path: Path) -> None:
    """If the directory and its parent are removed right after they were created, the lock creates them again."""
    with pytest.raises(WriteError, match="nowhere"):
        LocalStorage(tmp_path / "nowhere" / "checkpoint").lock_directory()


def test_a_directory_that_another_save_removed(tmp_path: Path) -> None:
    """A save that waited creates the removed directory again, and locks the new one."""
    storage = LocalStorage(tmp_path / "checkpoint")
    storage.make_directory()
    cleaner = storage.lock_directory()
    save = storage.lock_directory()
    assert storage.remove_directory()
    cleaner.release()
    save.share(10)
    assert (tmp_path / "checkpoint").is_dir()
    other = storage.lock_directory()
    assert not other.is_exclusive
    other.release()
    save.release()
    late = storage.lock_directory()
    assert late.is_exclusive
    late.release()


def test_locking_makes_a_directory_again(tmp_path: Path) -> None:
    """A directory that was removed after it was created is created again."""
    storage = LocalStorage(tmp_path / "checkpoint")
    lock = storage.lock_directory()
    assert lock.is_exclusive
    lock.share(10)
    assert (tmp_path / "checkpoint").is_dir()
    lock.release()


def test_a_listing_follows_no_links_to_directories(tmp_path: Path) -> None:
    """A listing has no links to directories, no broken or circular links, and no FIFOs."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "latest").symlink_to("folder")
    (tmp_path / "up").symlink_to(".")
    (tmp_path / "alias").symlink_to("file")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "nowhere").symlink_to("gone")
    os.mkfifo(tmp_path / "pipe")
    files, folders = LocalStorage(tmp_path).listing()
    assert {(file.name, file.nbytes) for file in files} == {("file", 5), ("alias", 5)}
    assert folders == ["folder"]


def test_a_lock_ends_with_its_object(tmp_path: Path) -> None:
    """The lock of a failed save is released when the save is freed."""
    lock = LocalStorage(tmp_path).lock_directory()
    lock.share(1.0)
    del lock
    again = LocalStorage(tmp_path).lock_directory()
    assert again.is_exclusive
    again.release()


# --- small files put in place ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_umask_is_respected(tmp_path: Path, mask: int, mode: int) -> None:
    """Files and directories have the usual modes under the umask of the process."""
    before = os.umask(mask)
    try:
        storage = LocalStorage(tmp_path / "new" / "checkpoint")
        storage.make_directory()
        storage.create(NAME, 0, sync=False).complete()
        storage.put(".metadata", b"x", sync=False)
    finally:
        os.umask(before)
    folder = tmp_path / "new" / "checkpoint"
    assert [(folder / name).stat().st_mode & 0o777 for name in (NAME, ".metadata")] == [mode, mode]
    assert folder.stat().st_mode & 0o777 == 0o777 & ~mask


def test_the_umask_of_a_save_is_respected(tmp_path: Path) -> None:
    """The umask of the save applies even if that of the process has changed. Inherited special bits stay."""
    tmp_path.chmod(0o2755)
    before = os.umask(0o077)
    try:
        storage = LocalStorage(tmp_path).child("checkpoint")
        storage.umask = 0o002
        storage.make_directory()
        storage.create(NAME, 0, sync=False).complete()
        storage.put(".metadata", b"x", sync=False)
    finally:
        os.umask(before)
    folder = tmp_path / "checkpoint"
    assert [(folder / name).stat().st_mode & 0o777 for name in (NAME, ".metadata")] == [0o664, 0o664]
    assert folder.stat().st_mode & 0o7777 == 0o2775


def test_a_directory_may_decide_on_modes(tmp_path: Path) -> None:
    """In a directory with a default ACL the umask has no effect."""
    entries = [(0x01, 7), (0x04, 7), (0x20, 0)]  # user, group, others, as in <linux/posix_acl.h>
    default = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry, 0xFFFFFFFF) for entry in entries)
    try:
        os.setxattr(tmp_path, "system.posix_acl_default", default)
    except OSError:
        pytest.skip("the file system has no access lists")
    before = os.umask(0o022)
    try:
        storage = LocalStorage(tmp_path)
        storage.umask = 0o022
        storage.put("file", b"x", sync=False)
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o660


def test_a_umask_that_was_set_for_a_moment_makes_no_file_of_mode_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file has the right mode even if a thread sets another umask for a moment to read it."""
    monkeypatch.setattr(local_io, "current_umask", lambda: 0o022)
    before = os.umask(0o777)
    try:
        LocalStorage(tmp_path).put("file", b"x", sync=False)
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


def test_put_replaces_the_file_not_its_contents(tmp_path: Path) -> None:
    """A reader that has opened the replaced file reads the old contents to their end."""
    storage = LocalStorage(tmp_path)
    storage.put("f", b"old" * 1000, sync=True)
    with open(tmp_path / "f", "rb") as file:
        assert file.read(3) == b"old"
        storage.put("f", b"new", sync=True)
        assert file.read() == (b"old" * 1000)[3:]
    assert storage.read("f") == b"new"
    assert os.listdir(tmp_path) == ["f"]


def test_a_file_in_the_place_of_a_directory(tmp_path: Path) -> None:
    """Below a file, nothing can be read or written."""
    (tmp_path / "file").write_bytes(b"x")
    storage = LocalStorage(tmp_path / "file")
    assert storage.read(".metadata") is None
    assert storage.head(".metadata") is None
    for folder in (storage, storage.child("step-1")):
        with pytest.raises(
            WriteError, match=rf"checkpoint directory {folder.path}: {tmp_path}/file is a file, not a dir"
        ):
            folder.make_directory()
    assert [place.file_in_place() for place in (storage, storage.child("a"), LocalStorage(tmp_path))] == [
        b"x",
        None,
        None,
    ]
    with pytest.raises(WriteError, match="file"):
        storage.put(".metadata", b"x", sync=True)


def test_a_directory_in_the_place_of_a_file(tmp_path: Path) -> None:
    """A directory in the place of a file is an error, not a missing file."""
    (tmp_path / ".metadata").mkdir()
    with pytest.raises(ReadError, match="metadata"):
        LocalStorage(tmp_path).read(".metadata")


def test_opening_a_missing_file_is_an_error(tmp_path: Path) -> None:
    """A failed operation leaves no descriptor open."""
    before = open_descriptors()
    with pytest.raises(FileNotFoundError):
        LocalStorage(tmp_path).open(NAME)
    assert open_descriptors() == before


@pytest.mark.promise("commit-unanswered", reason="on mounts")
@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("said", [errno.ENOENT, errno.ETIMEDOUT])
def test_a_rename_whose_answer_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: int, replace: bool
) -> None:
    """If a network mount reports the failure of its own retry although the file is in place, `put` succeeds."""
    rename = os.replace

    def lose(source: Path, target: Path) -> None:
        rename(source, target)
        raise OSError(said, os.strerror(said))

    monkeypatch.setattr(os, "replace", lose)
    LocalStorage(tmp_path).put("a", b"new", sync=True, replace=replace)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"new"}


@pytest.mark.parametrize(
    ("storage_of", "said", "kind"),
    [
        (LocalStorage, errno.EIO, Refused),
        (network_mount, errno.EIO, WriteError),
        (network_mount, errno.EDQUOT, Refused),
    ],
    ids=["a disk", "a mount", "a mount that is full"],
)
def test_whether_a_file_may_appear_later(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    storage_of: Callable[[Path], LocalStorage],
    said: int,
    kind: type[WriteError],
) -> None:
    """After an error of a network mount the outcome of a put is unknown, and on a local disk it is a refusal."""

    def fail(source: Path, target: Path) -> None:
        raise OSError(said, os.strerror(said))

    monkeypatch.setattr(os, "replace", fail)
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(WriteError, match=os.strerror(said)) as caught:
        storage_of(tmp_path).put("a", b"new", sync=True)
    assert type(caught.value) is kind
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"old"}


@pytest.mark.parametrize(("storage_of", "allocated"), [(LocalStorage, [5000]), (network_mount, [])])
def test_space_is_reserved_on_disks_only(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    storage_of: Callable[[Path], LocalStorage],
    allocated: list[int],
) -> None:
    """Space is not reserved on network mounts, where glibc would write zeros instead."""
    asked: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda descriptor, offset, nbytes: asked.append(nbytes))
    put_file(storage_of(tmp_path), "a", bytes(5000))
    assert asked == allocated
    assert (tmp_path / "a").read_bytes() == bytes(5000)


# --- what is there, and is no file, or cannot be reached --------------------------------------------------------------


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def make_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


KINDS = [
    (make_fifo, "it is a FIFO, not a regular file"),
    (make_socket, "it is a socket, not a regular file"),
    (make_link_to_a_device, "it is a device, not a regular file"),
    (Path.mkdir, "Is a directory"),
]


@pytest.mark.parametrize(("make", "said"), KINDS, ids=["FIFO", "socket", "device", "directory"])
def test_what_is_no_file_is_an_error(make: Callable[[Path], None], said: str) -> None:
    """A FIFO, a socket or a device is an error, and is neither opened nor replaced."""
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        path = Path(folder) / "file"
        make(path)
        before = os.lstat(path)
        storage = LocalStorage(path.parent)
        with pytest.raises(ReadError, match=f"cannot read {path}: .*{said}"):
            storage.read("file")
        for opening in (storage.open, storage.open_uncached):
            with pytest.raises(OSError, match=said):
                opening("file")
        with pytest.raises(Refused, match=f"cannot write {path}: .*{said}"):
            storage.put("file", b"data", sync=False)
        assert os.path.samestat(os.lstat(path), before)
        assert os.listdir(folder) == ["file"]
        if make is not Path.mkdir:
            with pytest.raises(ReadError, match=said):
                storage.head("file")


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    """A file in the place of a directory is an error that names the path, at each level."""
    storage = LocalStorage(tmp_path / ("x" * 300) / "below")
    with pytest.raises(WriteError, match=r"cannot create the checkpoint directory.*File name too long"):
        storage.make_directory()
    with pytest.raises(ReadError, match="File name too long"):
        storage.read("file")
    with pytest.raises(ReadError, match="File name too long"):
        storage.listing()
    assert not storage.remove_directory()


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """Yields a directory that this process may not enter. Root becomes another user for the block."""
    folder = tmp_path / "locked"
    (folder / "checkpoint").mkdir(parents=True)
    folder.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        os.seteuid(user)
        folder.chmod(0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a directory of another user's")
def test_a_directory_of_another_user() -> None:
    """The error of a missing permission names the folder, its owner and mode, and the user of this process."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # that of the tests lets nobody else in
        folder = Path(name)
        folder.chmod(0o755)
        os.chown(folder, 4321, 4321)
        said = rf"Permission denied: {folder} belongs to user 4321 \(mode 755\), and this process runs as user 1234"
        os.seteuid(1234)
        try:
            storage = LocalStorage(folder)
            storage.make_directory()
            with pytest.raises(Refused, match=f"cannot write {folder}/file: .*{said}"):
                storage.put("file", b"x", sync=False)
            with pytest.raises(PermissionError, match=said):
                storage.create("file", 0, sync=False)
            with pytest.raises(WriteError, match=f"cannot create the checkpoint directory {folder}/below: .*{said}"):
                LocalStorage(folder / "below").make_directory()
        finally:
            os.seteuid(0)


def test_a_directory_that_cannot_be_entered(locked: Path) -> None:
    """Each error is a class of this package and names the path."""
    storage = LocalStorage(locked / "checkpoint")
    with pytest.raises(
        WriteError, match=rf"cannot create the checkpoint directory {storage.path}: .*Permission denied"
    ):
        storage.make_directory()
    with pytest.raises(WriteError, match="Permission denied"):
        storage.lock_directory()
    with pytest.raises(Refused, match=f"cannot write {storage.path}/file: .*Permission denied"):
        storage.put("file", b"data", sync=True)
    for ask in (storage.read, storage.head):
        with pytest.raises(ReadError, match=f"cannot read {storage.path}/file: .*Permission denied"):
            ask("file")
    with pytest.raises(ReadError, match=f"cannot list {storage.path}: .*Permission denied"):
        storage.listing()
    assert not storage.remove_directory()


@pytest.mark.parametrize("storage_of", [LocalStorage, network_mount], ids=["local disk", "network mount"])
def test_files_are_removed_by_their_literal_names(tmp_path: Path, storage_of: Callable[[Path], LocalStorage]) -> None:
    """Files are removed in threads on a mount, and missing names are ignored."""
    names = [f"f{number}[*]" for number in range(40)]
    for name in [*names, "f1"]:
        (tmp_path / name).touch()
    storage_of(tmp_path).remove(*names, "not there")
    assert [path.name for path in tmp_path.iterdir()] == ["f1"]


class Remembers:
    """A mount that shows a new directory and its files only after its directories are opened, as NFS does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *hidden: Path) -> None:
        self._hidden = set(map(str, hidden))
        self._stat, self._scandir, self._open = os.stat, os.scandir, os.open
        monkeypatch.setattr(os, "stat", self.stat)
        monkeypatch.setattr(os, "scandir", self.scandir)
        monkeypatch.setattr(os, "open", self.open)

    def _check(self, path: Any) -> None:
        if not isinstance(path, int) and os.fspath(path) in self._hidden:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def stat(self, path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        self._check(path)
        return self._stat(path, *args, **kwargs)

    def scandir(self, path: Any) -> Any:
        self._check(path)
        return self._scandir(path)

    def open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        self._check(path)
        if flags & os.O_DIRECTORY:
            self._hidden = {hidden for hidden in self._hidden if os.path.dirname(hidden) != os.fspath(path)}
        return self._open(path, flags, *args, **kwargs)


@pytest.mark.parametrize("look", ["read", "head", "open", "open_uncached", "listing"])
def test_a_name_that_a_mount_remembers_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: str) -> None:
    """A missing file on a mount is found after its directory and the parent are opened."""
    step = tmp_path / "step-4"
    step.mkdir()
    (step / ".metadata").write_bytes(b"index")
    storage = LocalStorage(step, local_types=())
    Remembers(monkeypatch, step, step / ".metadata")
    found = getattr(storage, look)(*([] if look == "listing" else [".metadata"]))
    if look == "read":
        assert found == b"index"
    elif look == "head":
        assert found == 5
    elif look == "listing":
        assert [file.name for file in found[0]] == [".metadata"]
    else:
        found.close()
