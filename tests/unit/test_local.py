"""A directory is claimed by the saves under way in it, and only who is alone there may say what is left over."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dcp_tensorizer import WriteError
from dcp_tensorizer._storage import local
from dcp_tensorizer._storage.base import Refused
from dcp_tensorizer._storage.local import LocalStorage

from .support import open_descriptors, put_file


def test_the_first_claim_sees_what_is_there(tmp_path: Path) -> None:
    """Until it shares the directory, nobody else can be writing there."""
    (tmp_path / "file").touch()
    lock = LocalStorage(tmp_path).lock_directory()
    assert lock.leftovers() == ["file"]
    lock.share(1.0)
    assert lock.leftovers() is None
    lock.release()


def test_a_second_claim_knows_nothing(tmp_path: Path) -> None:
    """Where another save is under way, no file can be told to be left over; when it is over, they can."""
    first = LocalStorage(tmp_path).lock_directory()
    first.share(1.0)
    second = LocalStorage(tmp_path).lock_directory()
    assert second.leftovers() is None
    second.share(1.0)
    first.release()
    first.release()
    second.release()
    third = LocalStorage(tmp_path).lock_directory()
    assert third.leftovers() == []
    third.release()


def test_a_claim_ends_with_its_process(tmp_path: Path) -> None:
    """However it ends: the kernel drops the lock."""
    script = """
import sys
from pathlib import Path
from dcp_tensorizer._storage.local import LocalStorage
lock = LocalStorage(Path(sys.argv[1])).lock_directory()
lock.share(1.0)
print("claimed", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"claimed\n"
        lock = LocalStorage(tmp_path).lock_directory()
        assert lock.leftovers() is None
        lock.release()
        other.kill()
    lock = LocalStorage(tmp_path).lock_directory()
    assert lock.leftovers() == []
    lock.release()


def test_a_save_that_cleans_up_for_ever_is_not_waited_for(tmp_path: Path) -> None:
    """A stopped process may hold the directory: the error names it, and no descriptor stays open."""
    before = open_descriptors()
    holder = LocalStorage(tmp_path).lock_directory()
    other = LocalStorage(tmp_path).lock_directory()
    with pytest.raises(WriteError, match=str(tmp_path)):
        other.share(0.05)
    holder.release()
    assert open_descriptors() == before


@pytest.mark.parametrize("case", ["no locks", "a network mount"])
def test_where_locks_say_nothing_nothing_is_left_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Network file systems refuse locks on directories, or keep them to one machine; a save goes on without."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(9, "Bad file descriptor")

    if case == "no locks":
        monkeypatch.setattr(fcntl, "flock", refuse)
    else:
        monkeypatch.setattr(local, "_LOCAL_TYPES", {"something"})
    lock = LocalStorage(tmp_path).lock_directory()
    assert lock.leftovers() is None
    lock.share(1.0)
    lock.release()


def test_a_forked_child_does_not_keep_the_claim(tmp_path: Path) -> None:
    """A data loader that outlives the save holds a copy of the descriptor, and no lock."""
    lock = LocalStorage(tmp_path).lock_directory()
    lock.share(1.0)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    lock.release()
    again = LocalStorage(tmp_path).lock_directory()
    assert again.leftovers() == []
    again.release()
    os.close(writing)
    os.waitpid(child, 0)
    os.close(reading)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    """It was made a moment ago, and somebody removed it with all that was around it."""
    with pytest.raises(WriteError, match="nowhere"):
        LocalStorage(tmp_path / "nowhere" / "checkpoint").lock_directory()


def test_a_directory_that_was_removed_by_who_cleaned_up(tmp_path: Path) -> None:
    """A save that waited meanwhile makes it again, and claims the new one: nobody can remove that."""
    storage = LocalStorage(tmp_path / "checkpoint")
    storage.make_directory()
    cleaner = storage.lock_directory()
    save = storage.lock_directory()
    assert storage.remove_directory()
    cleaner.release()
    save.share(10)
    assert (tmp_path / "checkpoint").is_dir()
    other = storage.lock_directory()
    assert other.leftovers() is None
    other.release()
    save.release()
    late = storage.lock_directory()
    assert late.leftovers() == []
    late.release()


def test_a_directory_that_goes_away_before_it_is_locked(tmp_path: Path) -> None:
    """Between making it and claiming it, too."""
    storage = LocalStorage(tmp_path / "checkpoint")
    lock = storage.lock_directory()
    assert lock.leftovers() == []
    lock.share(10)
    assert (tmp_path / "checkpoint").is_dir()
    lock.release()


def test_a_listing_follows_no_links_to_directories(tmp_path: Path) -> None:
    """What a link leads to is listed where it is; links to nowhere or in circles, and pipes, are nobody's files."""
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


def test_a_claim_ends_with_its_object(tmp_path: Path) -> None:
    """A save that failed somewhere else, of which nothing is left, keeps nobody from cleaning up."""
    lock = LocalStorage(tmp_path).lock_directory()
    lock.share(1.0)
    del lock
    again = LocalStorage(tmp_path).lock_directory()
    assert again.leftovers() == []
    again.release()


# --- small files put in place ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("said", [errno.ENOENT, errno.ETIMEDOUT])
def test_a_rename_whose_answer_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: int, replace: bool
) -> None:
    """A network mount says that there is no such file, since a retry met its own: the file is in place."""
    rename = os.replace

    def lose(source: Path, target: Path) -> None:
        rename(source, target)
        raise OSError(said, os.strerror(said))

    monkeypatch.setattr(os, "replace", lose)
    LocalStorage(tmp_path).put("a", b"new", sync=True, replace=replace)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"new"}


@pytest.mark.parametrize(
    ("types", "said", "kind"),
    [
        (local._LOCAL_TYPES, errno.EIO, Refused),
        ({"something"}, errno.EIO, WriteError),
        ({"something"}, errno.EDQUOT, Refused),
    ],
    ids=["a disk", "a mount", "a mount that is full"],
)
def test_whether_a_file_may_be_in_place_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, types: set[str], said: int, kind: type[WriteError]
) -> None:
    """On a network mount, where an error says nothing of the server: then what it names must not be removed."""

    def fail(source: Path, target: Path) -> None:
        raise OSError(said, os.strerror(said))

    monkeypatch.setattr(local, "_LOCAL_TYPES", types)
    monkeypatch.setattr(os, "replace", fail)
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(WriteError, match=os.strerror(said)) as caught:
        LocalStorage(tmp_path).put("a", b"new", sync=True)
    assert type(caught.value) is kind
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"old"}


@pytest.mark.parametrize(("types", "allocated"), [(local._LOCAL_TYPES, [5000]), ({"something"}, [])])
def test_only_disks_are_asked_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, types: set[str], allocated: list[int]
) -> None:
    """Many network mounts have no fallocate, which glibc imitates by writing zeros, all of them, one page at a time."""
    asked: list[int] = []
    monkeypatch.setattr(local, "_LOCAL_TYPES", types)
    monkeypatch.setattr(os, "posix_fallocate", lambda descriptor, offset, nbytes: asked.append(nbytes))
    put_file(LocalStorage(tmp_path), "a", bytes(5000))
    assert asked == allocated
    assert (tmp_path / "a").read_bytes() == bytes(5000)
