"""`.metadata`: what is written, what is refused, what a commit replaces."""

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
from dcp_tensorizer._saving.commit import begin, commit, dead_files, put_records, remove_with_records, replaced_files
from dcp_tensorizer._storage.base import Refused, temporary_file_name
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._tensor_file.names import data_file_name, record_file_name
from dcp_tensorizer.errors import WriteError

from ...lab.checkpoints import index_and_files, item_in, metadata_of, parts_of
from ...lab.processes import file_size_limit

W = ("w", (0,))


def commit_file(storage, name, save_id="s", **options):
    """Commits a checkpoint of one data file, which it makes, and removes what that replaces."""
    with open(os.path.join(storage.path, name), "wb") as file:
        file.write(b"data")
    options = {"rank": None, "sync": True} | options
    replaced = replaced_files(storage, options["rank"])
    index = encode(metadata_of(save_id), parts_of({name: 4}, {W: item_in(name)}), rank=options["rank"])
    commit(storage, index, {name: 4}, replaced, save_id=save_id, **options)
    remove_with_records(storage, replaced)


@pytest.fixture
def storage(tmp_path):
    return open_storage(tmp_path)


def test_a_storage_that_fails_to_tell_what_is_replaced_does_not_fail_a_save(storage, monkeypatch):
    """Whatever it raises: by then the save is committed, and files that stay only cost space."""
    commit_file(storage, data_file_name(0, 0, "a" * 32))
    assert replaced_files(storage, None) == {data_file_name(0, 0, "a" * 32)}

    def fail(storage, name, most):
        raise RuntimeError("the filesystem of a plugin")

    monkeypatch.setattr(type(storage), "read", fail)
    assert replaced_files(storage, None) == set()


def test_what_is_committed_can_be_read(storage):
    """Entries, planner data, files and places come back as they were."""
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
    """The files that the old metadata names go, after the new one is in place; others stay."""
    first, second = (data_file_name(0, 0, letter * 32) for letter in "ab")
    foreign = [data_file_name(7, 0, "c" * 32), "notes.txt"]
    for name in foreign:
        (tmp_path / name).write_text("keep")
    commit_file(storage, first)
    commit_file(storage, second)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([".metadata", second, *foreign])


def test_each_rank_commits_its_own_without_collectives(storage, tmp_path):
    """A rank's own metadata has its own name, and replaces only that rank's."""
    names = [data_file_name(rank, 0, letter * 32) for rank, letter in ((0, "a"), (1, "b"))]
    for rank, name in enumerate(names):
        commit_file(storage, name, rank=rank)
    assert read_metadata(storage) is None
    assert list(read_metadata(storage, 1).storage_data["files"]) == [names[1]]
    assert {path.name for path in tmp_path.iterdir()} == {"__0.metadata", "__1.metadata", *names}


def test_a_failed_commit_leaves_the_old_checkpoint(storage, tmp_path):
    """When `.metadata` cannot be written, the old one is as it was, and nothing is left of the new save."""
    old, new = data_file_name(0, 0, "a" * 32), data_file_name(0, 0, "b" * 32)
    commit_file(storage, old, save_id="a" * 32)
    before = (tmp_path / ".metadata").read_bytes()
    with file_size_limit(16), pytest.raises(WriteError, match=r"\.metadata.*File too large"):
        commit_file(storage, new, save_id="b" * 32)
    assert set(os.listdir(tmp_path)) == {".metadata", old}
    assert (tmp_path / ".metadata").read_bytes() == before


def test_metadata_that_is_not_on_the_disk_is_not_committed(storage, tmp_path, monkeypatch):
    """A quota that is full when `.metadata` is made durable: the old checkpoint stays, and nothing else."""
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
    """The rename has happened, making it durable fails: the save is an error, and the checkpoint is whole."""
    name = data_file_name(0, 0, "a" * 32)

    def fail():
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(storage, "sync_directory", fail)
    with pytest.raises(WriteError, match=r"\.metadata was written, but its name may not be durable.*Input/output"):
        commit_file(storage, name)
    assert set(os.listdir(tmp_path)) == {".metadata", name}
    assert read_metadata(storage).storage_data["files"] == {name: 4}


def test_a_commit_whose_answer_was_lost_removes_nothing(storage, tmp_path, monkeypatch):
    """It may be carried out later, by a server that has all of it: then both checkpoints' files must be there."""
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
    """What a record names and no metadata does, and metadata that was never put in place; nothing of anybody else's."""
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
    """What looks left over may be that save's; once it is over, it is removed."""
    other = begin(storage, 1.0)
    put_records(storage, ["b" * 32])
    (tmp_path / data_file_name(0, 0, "b" * 32)).touch()
    begin(storage, 1.0).release()
    assert len(os.listdir(tmp_path)) == 2
    other.release()
    begin(storage, 1.0).release()
    assert os.listdir(tmp_path) == []


def test_beside_metadata_that_cannot_be_read_nothing_is_removed(storage, tmp_path):
    """Whatever it names might be what looks left over."""
    (tmp_path / ".metadata").write_bytes(b"damaged")
    put_records(storage, ["b" * 32])
    (tmp_path / data_file_name(0, 0, "b" * 32)).touch()
    begin(storage, 1.0).release()
    assert len(os.listdir(tmp_path)) == 3


@pytest.mark.parametrize("copied", ["the files", "the record too", "into the same directory"])
def test_what_is_being_copied_in_stays(storage, tmp_path, copied):
    """Data comes first and metadata last, and a copy of a record proves nothing, wherever it is."""
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
    """They are there before it is replaced, so that whatever happens then, what is left can be removed."""
    commit_file(storage, data_file_name(0, 0, "a" * 32))
    put_records(storage, ["a" * 32])
    assert storage.is_record(record_file_name("a" * 32))
    begin(storage, 1.0).release()
    assert set(os.listdir(tmp_path)) == {".metadata", data_file_name(0, 0, "a" * 32)}


@pytest.mark.parametrize("harm", ["missing", "short"])
def test_data_that_is_not_where_the_metadata_will_say_is_no_checkpoint(storage, tmp_path, harm):
    """Of ranks that do not share the path, say: the ranks are named, and what was committed before stays."""
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
    with pytest.raises(WriteError, match=rf"of {ranks} \(__1_0_b.*the ranks do not share this path"):
        commit(storage, *index_and_files(metadata_of("new"), parts), save_id="new", sync=True)
    assert read_metadata(storage).storage_data["files"] == {old: 4}
    assert {path.name for path in tmp_path.iterdir()} == {".metadata", old}


def test_a_save_that_is_given_up_at_the_last_moment(storage, tmp_path):
    """What is checked last is asked when all else is done: the old checkpoint stays, and nothing of the new save."""
    old, new = data_file_name(0, 0, "a" * 32), data_file_name(0, 0, "b" * 32)
    commit_file(storage, old, save_id="a" * 32)

    def refuse():
        assert (tmp_path / new).exists()
        raise Refused("it was given up")

    with pytest.raises(WriteError, match="it was given up"):
        commit_file(storage, new, save_id="b" * 32, check=refuse)
    assert set(os.listdir(tmp_path)) == {".metadata", old}
    assert read_metadata(storage).storage_meta.save_id == "a" * 32
