"""The commit: `.metadata`, the checks before it, and the files that it replaces."""

import errno
import os
import shutil
import time

import pytest
from torch.distributed.checkpoint.metadata import (
    MetadataIndex,
)

from dcp_tensorizer._formats.own import read_metadata
from dcp_tensorizer._index.schema import item_key
from dcp_tensorizer._index.write import encode
from dcp_tensorizer._saving.commit import (
    begin,
    commit,
    dead_files,
    drop_record,
    put_records,
    remove_with_records,
    replaced_files,
)
from dcp_tensorizer._storage.base import Refused, temporary_file_name
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._tensor_file.names import data_file_name, record_file_name
from dcp_tensorizer.errors import ReadError, WriteError

from ...lab.checkpoints import index_and_files, item_in, metadata_of, parts_of
from ...lab.processes import file_size_limit

W = ("w", (0,))


def commit_file(storage, name, save_id="s", **options):
    """Writes and commits a checkpoint of one data file, and removes the replaced files."""
    with open(os.path.join(storage.path, name), "wb") as file:
        file.write(b"data")
    options = {"rank": None, "sync": True} | options
    index = encode(metadata_of(save_id), parts_of({name: 4}, {W: item_in(name)}), rank=options["rank"])
    remove_with_records(storage, commit(storage, index, {name: 4}, save_id=save_id, **options))


@pytest.fixture
def storage(tmp_path):
    return open_storage(tmp_path)


def test_a_storage_that_fails_to_tell_what_is_replaced_does_not_fail_a_save(storage, monkeypatch):
    """`replaced_files` raises nothing, because leftovers only cost space."""
    commit_file(storage, data_file_name(0, 0, "a" * 32))
    assert replaced_files(storage, None) == {data_file_name(0, 0, "a" * 32)}

    def fail(storage, name, most):
        raise RuntimeError("the filesystem of a plugin")

    monkeypatch.setattr(type(storage), "read", fail)
    assert replaced_files(storage, None) == set()


def test_what_is_committed_can_be_read(storage):
    """A reader finds the entries, planner data, files and locations that were committed."""
    name = data_file_name(0, 0, "a" * 32)
    commit_file(storage, name)
    metadata = read_metadata(storage)
    assert metadata.state_dict_metadata == metadata_of().state_dict_metadata
    assert metadata.planner_data == {"w": ("w",)}
    assert metadata.storage_meta == metadata_of().storage_meta
    assert metadata.storage_data["files"] == {name: 4}
    assert metadata.storage_data["items"] == {W: item_in(name)}
    assert item_key(MetadataIndex("obj")) == ("obj", None)


def test_only_what_is_replaced_is_removed(storage, tmp_path):
    """The files that the old metadata names are removed after the commit, and other files stay."""
    first, second = (data_file_name(0, 0, letter * 32) for letter in "ab")
    foreign = [data_file_name(7, 0, "c" * 32), "notes.txt"]
    for name in foreign:
        (tmp_path / name).write_text("keep")
    commit_file(storage, first)
    commit_file(storage, second)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([".metadata", second, *foreign])


def test_each_rank_commits_its_own_without_collectives(storage, tmp_path):
    """Without collectives, each rank has its own metadata file, and replaces only that."""
    names = [data_file_name(rank, 0, letter * 32) for rank, letter in ((0, "a"), (1, "b"))]
    for rank, name in enumerate(names):
        commit_file(storage, name, rank=rank)
    assert read_metadata(storage) is None
    assert list(read_metadata(storage, 1).storage_data["files"]) == [names[1]]
    assert {path.name for path in tmp_path.iterdir()} == {"__0.metadata", "__1.metadata", *names}


def test_a_failed_commit_leaves_the_old_checkpoint(storage, tmp_path):
    """If `.metadata` cannot be written, the old one stays, and no file of the new save is left."""
    old, new = data_file_name(0, 0, "a" * 32), data_file_name(0, 0, "b" * 32)
    commit_file(storage, old, save_id="a" * 32)
    before = (tmp_path / ".metadata").read_bytes()
    with file_size_limit(16), pytest.raises(WriteError, match=r"\.metadata.*File too large"):
        commit_file(storage, new, save_id="b" * 32)
    assert set(os.listdir(tmp_path)) == {".metadata", old}
    assert (tmp_path / ".metadata").read_bytes() == before


def test_metadata_that_is_not_on_the_disk_is_not_committed(storage, tmp_path, monkeypatch):
    """If fsync of `.metadata` fails on a full quota, only the old checkpoint stays."""
    old, new = data_file_name(0, 0, "a" * 32), data_file_name(0, 0, "b" * 32)
    commit_file(storage, old, save_id="a" * 32)

    def fail(descriptor):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(WriteError, match=r"\.metadata.*Disk quota exceeded"):
        commit_file(storage, new, save_id="b" * 32)
    assert set(os.listdir(tmp_path)) == {".metadata", old}
    assert read_metadata(storage).storage_meta.save_id == "a" * 32


def test_a_commit_that_fails_when_it_is_in_place_keeps_its_files(storage, tmp_path, monkeypatch):
    """If the directory's fsync fails after the rename, the save is an error, and the new checkpoint is whole."""
    name = data_file_name(0, 0, "a" * 32)

    def fail():
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(storage, "sync_directory", fail)
    with pytest.raises(WriteError, match=r"\.metadata was written, but its name may not be durable.*Input/output"):
        commit_file(storage, name)
    assert set(os.listdir(tmp_path)) == {".metadata", name}
    assert read_metadata(storage).storage_data["files"] == {name: 4}


def test_a_commit_whose_answer_was_lost_removes_nothing(storage, tmp_path, monkeypatch):
    """A server may still perform a put without a response, so the files of both checkpoints stay."""
    old, new = data_file_name(0, 0, "a" * 32), data_file_name(0, 0, "b" * 32)
    commit_file(storage, old, save_id="a" * 32)
    late = []

    def lose(name, data, **options):
        late.append(data)
        raise WriteError("timed out")

    monkeypatch.setattr(storage, "put", lose)
    with pytest.raises(WriteError, match="timed out"):
        commit_file(storage, new, save_id="b" * 32)
    assert set(os.listdir(tmp_path)) == {".metadata", old, new}
    (tmp_path / ".metadata").write_bytes(*late)
    assert read_metadata(storage).storage_data["files"] == {new: 4}


@pytest.mark.parametrize("rank", [None, 3])
def test_what_dead_saves_left_is_removed(storage, tmp_path, rank):
    """Files of recorded saves that no metadata names are removed, and so is their temporary metadata; others stay."""
    kept = data_file_name(0, 0, "a" * 32)
    commit_file(storage, kept, rank=rank)
    for name in ("model.tensors", "notes.txt"):
        (tmp_path / name).touch()
    before = set(os.listdir(tmp_path))
    dead = "b" * 32
    put_records(storage, [dead, "a" * 32])  # of the save that died, and of one that died after its commit
    for name in (data_file_name(0, 0, dead), data_file_name(7, 2, dead), temporary_file_name(".metadata", dead)):
        (tmp_path / name).write_bytes(b"left over")
    begin(storage, 1.0).release()
    assert set(os.listdir(tmp_path)) == before
    assert kept in before


def test_beside_a_save_in_progress_nothing_is_removed(storage, tmp_path):
    """Recorded files stay while a save is in progress, and are removed after it."""
    other = begin(storage, 1.0)
    put_records(storage, ["b" * 32])
    (tmp_path / data_file_name(0, 0, "b" * 32)).touch()
    begin(storage, 1.0).release()
    assert len(os.listdir(tmp_path)) == 2
    other.release()
    begin(storage, 1.0).release()
    assert os.listdir(tmp_path) == []


def test_beside_metadata_that_cannot_be_read_nothing_is_removed(storage, tmp_path):
    """If `.metadata` is unreadable, nothing is removed, because it may name any file."""
    (tmp_path / ".metadata").write_bytes(b"damaged")
    put_records(storage, ["b" * 32])
    (tmp_path / data_file_name(0, 0, "b" * 32)).touch()
    begin(storage, 1.0).release()
    assert len(os.listdir(tmp_path)) == 3


@pytest.mark.parametrize("copied", ["the files", "the record too", "into the same directory"])
def test_what_is_being_copied_in_stays(storage, tmp_path, copied):
    """Files of a copy in progress stay: a copied record proves nothing, not even in the same directory."""
    source = open_storage(tmp_path / "source")
    source.make_directory()
    put_records(source, ["b" * 32])
    files = {record_file_name("b" * 32), data_file_name(0, 0, "b" * 32), temporary_file_name(".metadata", "b" * 32)}
    for name in files - {record_file_name("b" * 32)}:
        (tmp_path / "source" / name).write_bytes(b"data")
    if copied == "the files":
        files.remove(record_file_name("b" * 32))
    target = tmp_path / "target"
    target.mkdir()
    for name in files:
        shutil.copy2(tmp_path / "source" / name, target / name)
    if copied == "into the same directory":
        moment = (tmp_path / "source" / record_file_name("b" * 32)).stat().st_ctime
        while time.time() < moment + 0.1:  # inodes may be used again at once, but no moment is
            pass
        shutil.rmtree(tmp_path / "source")
        shutil.copytree(target, tmp_path / "source")
        target = tmp_path / "source"
    begin(open_storage(target), 1.0).release()
    assert set(os.listdir(target)) == files
    assert dead_files(open_storage(target), sorted(files)) == []


def test_the_records_of_what_a_commit_replaces(storage, tmp_path):
    """The record of a replaced save allows the removal of its leftovers, but not of the current checkpoint."""
    commit_file(storage, data_file_name(0, 0, "a" * 32))
    put_records(storage, ["a" * 32])
    assert storage.is_record(record_file_name("a" * 32))
    begin(storage, 1.0).release()
    assert set(os.listdir(tmp_path)) == {".metadata", data_file_name(0, 0, "a" * 32)}


@pytest.mark.parametrize("harm", ["missing", "short"])
def test_data_that_is_not_where_the_metadata_will_say_is_no_checkpoint(storage, tmp_path, harm):
    """If data files are missing or short, the error names the ranks, and the old checkpoint stays."""
    old = data_file_name(0, 0, "a" * 32)
    commit_file(storage, old)
    names = [data_file_name(rank, 0, "b" * 32) for rank in range(3)]
    for name in names:
        (tmp_path / name).write_bytes(b"data")
    if harm == "missing":
        (tmp_path / names[1]).unlink()
        (tmp_path / names[2]).unlink()
    else:
        os.truncate(tmp_path / names[1], 3)
    parts = parts_of(dict.fromkeys(names, 4), {("w", (rank,)): item_in(name) for rank, name in enumerate(names)})
    ranks = "ranks 1, 2" if harm == "missing" else "rank 1"
    with pytest.raises(WriteError, match=rf"that {ranks} just wrote \(__1_0_b.*the ranks do not share this path"):
        commit(storage, *index_and_files(metadata_of("new"), parts), save_id="new", sync=True)
    assert read_metadata(storage).storage_data["files"] == {old: 4}
    assert {path.name for path in tmp_path.iterdir()} == {".metadata", old}


def test_a_save_that_is_given_up_at_the_last_moment(storage, tmp_path):
    """``check`` runs after all data is written. If it refuses, the old checkpoint stays and the new files go."""
    old, new = data_file_name(0, 0, "a" * 32), data_file_name(0, 0, "b" * 32)
    commit_file(storage, old, save_id="a" * 32)

    def refuse():
        assert (tmp_path / new).exists()
        raise Refused("it was given up")

    with pytest.raises(WriteError, match="it was given up"):
        commit_file(storage, new, save_id="b" * 32, check=refuse)
    assert set(os.listdir(tmp_path)) == {".metadata", old}
    assert read_metadata(storage).storage_meta.save_id == "a" * 32


@pytest.mark.parametrize(
    ("left", "stays"),
    [
        (data_file_name(0, 0, "b" * 32), True),
        (temporary_file_name(".metadata", "b" * 32), True),
        (data_file_name(0, 0, "a" * 32), False),
        ("notes.txt", False),
    ],
)
def test_the_record_of_a_failed_save_stays_beside_its_files(storage, tmp_path, left, stays):
    """If a file of the failed save could not be removed, its record stays, so that the next save removes both."""
    put_records(storage, ["b" * 32])
    (tmp_path / left).write_bytes(b"data")
    drop_record(storage, "b" * 32)
    assert (tmp_path / record_file_name("b" * 32)).exists() is stays
    begin(storage, 1.0).release()
    assert os.listdir(tmp_path) == ([] if stays else [left])


def test_a_commit_of_a_manager_that_cannot_read_what_it_replaces(storage, tmp_path, monkeypatch):
    """The save fails as one that cannot be written, its files are removed, and the old checkpoint stays."""
    old, new = data_file_name(0, 0, "a" * 32), data_file_name(0, 0, "b" * 32)
    commit_file(storage, old, save_id="a" * 32)

    def fail(*arguments):
        raise ReadError("no response")

    with monkeypatch.context() as broken:
        broken.setattr(storage, "read", fail)
        with pytest.raises(WriteError, match=rf"cannot write {tmp_path}/\.metadata: no response"):
            commit_file(storage, new, save_id="b" * 32, is_owned=True)
    assert set(os.listdir(tmp_path)) == {".metadata", old}
    assert read_metadata(storage).storage_meta.save_id == "a" * 32
