"""Lists what lies below a path, and never collects what a job still needs."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from dcp_tensorizer import CheckpointManager
from dcp_tensorizer._index.schema import SaveRecord
from dcp_tensorizer._saving.commit import begin, put_records
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._tensor_file.names import data_file_name, metadata_file_name, save_id_in
from dcp_tensorizer.errors import NotCommitted
from dcp_tensorizer.testing import on_a_page
from dcp_tensorizer.tools import CheckpointInfo, Collected, collect, list_checkpoints
from dcp_tensorizer.tools._find import Folder, walk
from dcp_tensorizer.tools._gc import plan_collection, remove

from ...lab.checkpoints import make_checkpoint
from ...lab.faults import Fault, always, s3_proxy
from ...lab.index_edits import edit_index
from ...lab.servers import S3Server

LEFTOVER = data_file_name(0, 0, "f" * 32)
NOW = 0.0


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for all that a test makes, and of when it runs, not of when it was collected."""
    monkeypatch.setitem(globals(), "NOW", time.time())


def make(path: Path, age: float, key: str = "x") -> Path:
    """A checkpoint that was committed ``age`` seconds ago, by its record and by its files."""
    make_checkpoint(path, {key: torch.ones(3)}, {"step": 1})
    edit_index(path / ".metadata", "head", lambda head: setattr(head, "saved_at", int((NOW - age) * 1e9)))
    for file in path.iterdir():
        os.utime(file, (NOW - age, NOW - age))
    return path


def leave(folder: Path, age: float = 0, *, recorded: bool = True) -> Path:
    """What a save that died has left: its file of 100 bytes, and its record."""
    folder.mkdir(exist_ok=True)
    if recorded:
        put_records(open_storage(folder), ["f" * 32])
    (folder / LEFTOVER).write_bytes(b"x" * 100)
    os.utime(folder / LEFTOVER, (NOW - age, NOW - age))
    return folder / LEFTOVER


def run(
    path: Path | str, keep: int | None = None, older_than: float | None = None, options: dict[str, Any] | None = None
) -> tuple[Collected, ...]:
    return collect(path, keep_latest=keep, older_than=older_than, storage_options=options)


def find(path: Path | str, options: dict[str, Any] | None = None) -> tuple[CheckpointInfo, ...]:
    return list_checkpoints(path, storage_options=options)


def listed_in(path: Path | str, options: dict[str, Any] | None = None) -> list[Folder]:
    return walk(open_storage(path, options)).checkpoints


def name_of(removed: Collected) -> str:
    return removed.path.rpartition("/")[2]


def names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def test_what_is_found(tmp_path: Path) -> None:
    """The highest step first, with their records' times; those that are not committed, and damaged ones, as such."""
    make(tmp_path / "run" / "step-20", 10)
    make(tmp_path / "run" / "step-10", 20)
    leave(tmp_path / "run" / "step-30", 5)
    (make(tmp_path / "run" / "step-5", 30) / ".metadata").write_bytes(b"damaged")
    os.utime(tmp_path / "run" / "step-5" / ".metadata", (NOW - 30, NOW - 30))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "file").touch()
    found = find(tmp_path)
    assert [(listed.step, listed.state) for listed in found] == [
        (30, "unfinished"),
        (20, "committed"),
        (10, "committed"),
        (5, "unreadable"),
    ]
    assert [round(NOW - one.saved.timestamp()) for one in found[1:3] if one.saved] == [10, 20]
    assert (found[1].ranks, found[1].tensors, found[1].objects) == (1, 1, 1)
    assert found[1].nbytes == sum(path.stat().st_size for path in (tmp_path / "run" / "step-20").iterdir())
    with pytest.raises(NotCommitted, match="nowhere"):
        find(tmp_path / "nowhere")


def test_each_rank_by_itself_is_committed(tmp_path: Path) -> None:
    """Saved without collectives, a checkpoint has a metadata file for each rank."""
    make_checkpoint(tmp_path / "a", {"x": torch.ones(3)}, rank=0)
    make_checkpoint(tmp_path / "a", {"y": torch.ones(3)}, rank=1)
    (found,) = find(tmp_path)
    assert (found.state, found.tensors) == ("committed", 2)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    """As many as asked, in each directory; what is not committed does not count."""
    for run_name in ("one", "two"):
        for step in range(1, 5):
            make(tmp_path / run_name / f"step-{step}", 100 - step)
    leave(tmp_path / "one" / "step-9")
    removals = run(tmp_path, keep=2)
    assert names(tmp_path / "one") == names(tmp_path / "two") == {"step-3", "step-4"}
    assert sum(removal.whole for removal in removals) == 4


def test_the_newest_one_always_stays(tmp_path: Path) -> None:
    """However old it is; and so does the one with the highest step, from which a job would resume."""
    make(tmp_path / "step-100", 2000)
    make(tmp_path / "step-50", 1000)
    make(tmp_path / "step-10", 3000)
    run(tmp_path, older_than=0)
    assert names(tmp_path) == {"step-100", "step-50"}


def test_both_conditions_must_hold(tmp_path: Path) -> None:
    """Beyond the number and beyond the age."""
    for step, age in ((1, 400), (2, 300), (3, 200), (4, 100)):
        make(tmp_path / f"step-{step}", age)
    run(tmp_path, keep=1, older_than=250)
    assert names(tmp_path) == {"step-3", "step-4"}


def test_without_conditions_only_leftovers_go(tmp_path: Path) -> None:
    """Of saves that never committed, also beside a checkpoint; what is not ours stays, and so does its directory."""
    make(tmp_path / "step-1", 10)
    leave(tmp_path / "step-1")
    leave(tmp_path / "step-2")
    leave(tmp_path / "step-3")
    (tmp_path / "step-3" / "mine.txt").touch()
    removals = run(tmp_path)
    assert sum(removal.nbytes for removal in removals if LEFTOVER in removal.files) >= 300
    assert names(tmp_path) == {"step-1", "step-3"}
    assert names(tmp_path / "step-3") == {"mine.txt"}
    assert LEFTOVER not in names(tmp_path / "step-1")
    assert find(tmp_path)[0].state == "committed"


def test_a_save_in_progress_is_left_alone(tmp_path: Path) -> None:
    """Whoever has claimed a directory keeps what is in it: a first save, and one that overwrites."""
    old, new = make(tmp_path / "step-1", 100), make(tmp_path / "step-2", 50)
    fresh = tmp_path / "step-3"
    fresh.mkdir()
    locks = [begin(open_storage(path), 1.0) for path in (old, fresh)]
    leave(fresh)
    leave(old)
    removals = run(tmp_path, keep=1, older_than=0)
    assert {removal.kept for removal in removals} == {"a save is in progress there"}
    assert names(tmp_path) == {"step-1", "step-2", "step-3"}
    assert LEFTOVER in names(old) & names(fresh)
    for lock in locks:
        lock.release()
    run(tmp_path, keep=1)
    assert names(tmp_path) == {new.name}


def test_a_save_that_came_in_between_is_left_alone(tmp_path: Path) -> None:
    """Between looking and removing, a job has saved there."""
    make(tmp_path / "step-1", 100)
    make(tmp_path / "step-2", 50)
    plan = plan_collection(open_storage(tmp_path), 1, None)
    make(tmp_path / "step-1", 0)
    assert [remove(removal).kept for removal in plan] == ["something has been saved or changed there in the meantime"]
    assert find(tmp_path / "step-1")[0].state == "committed"


def test_unreadable_checkpoints_are_nobodys_leftovers(tmp_path: Path) -> None:
    """Nothing of them is removed: they may be of a newer release."""
    (make(tmp_path / "step-1", 100) / ".metadata").write_bytes(b"of a later version")
    leave(tmp_path / "step-1")
    make(tmp_path / "step-2", 50)
    assert run(tmp_path, keep=1, older_than=0) == ()


def test_an_interrupted_removal_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metadata goes first; the rest is what the next collection removes."""
    make(tmp_path / "step-1", 100)
    make(tmp_path / "step-2", 50)
    storage_type = type(open_storage(tmp_path))
    remove = storage_type.remove

    def fail(storage: object, name: str) -> None:
        if name.endswith(".tensors"):
            raise PermissionError(name)
        remove(storage, name)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(storage_type, "remove", fail)
        (removal,) = run(tmp_path, keep=1)
    assert (removal.failed, removal.files, "PermissionError" in str(removal.kept)) == (True, (), True)
    assert find(tmp_path / "step-1")[0].state == "unfinished"
    run(tmp_path)
    assert names(tmp_path) == {"step-2"}


def test_off_local_disks_leftovers_go_only_by_age() -> None:
    """Locks of a save in progress are not visible there."""
    memory = fsspec.filesystem("memory")
    url = "memory://collected"
    make_checkpoint(f"{url}/step-1", {"x": torch.ones(3)})
    memory.pipe_file(f"/collected/step-1/{LEFTOVER}", b"x" * 100)
    memory.pipe_file(f"/collected/step-2/{LEFTOVER}", b"x" * 100)
    try:
        for older_than in (None, 3600.0):
            assert all("--older-than" in str(removal.kept) for removal in run(url, older_than=older_than))
        assert memory.exists(f"/collected/step-2/{LEFTOVER}")
        assert [removal.kept for removal in run(url, older_than=0)] == [None, None]
        assert [listed.state for listed in find(url)] == ["committed"]
        assert not memory.exists(f"/collected/step-1/{LEFTOVER}")
    finally:
        memory.rm("/collected", recursive=True)


def test_the_newest_and_the_highest_are_kept(tmp_path: Path) -> None:
    """A job that went back has newer checkpoints of lower steps."""
    for step, age in ((10, 1), (20, 3), (30, 2), (40, 4), (5, 9)):
        make(tmp_path / f"step-{step}", age)
    run(tmp_path, keep=2)
    assert names(tmp_path) == {"step-10", "step-30", "step-40"}


def test_copies_are_as_old_as_what_they_are_of(tmp_path: Path) -> None:
    """``cp -r`` gives files the times at which it was run, in any order: the checkpoints' own records count."""
    for step in (9, 10, 11, 12):
        make(tmp_path / f"step-{step}", 1000 - step)
    for seconds, name in enumerate(("step-12", "step-10", "step-11", "step-9")):
        for file in (tmp_path / name).iterdir():
            os.utime(file, (NOW + seconds, NOW + seconds))
    assert [listed.step for listed in find(tmp_path)] == [12, 11, 10, 9]
    run(tmp_path, keep=2)
    assert names(tmp_path) == {"step-11", "step-12"}


def test_links_to_checkpoints_are_not_counted(tmp_path: Path) -> None:
    """The newest one stays, whatever points to it."""
    for step in (1, 2, 3):
        make(tmp_path / f"step-{step}", 100 - step)
    (tmp_path / "latest").symlink_to("step-3")
    run(tmp_path, keep=1)
    assert names(tmp_path) == {"step-3", "latest"}
    assert find(tmp_path / "step-3")[0].state == "committed"


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_what_is_being_copied_neither_counts_nor_goes(tmp_path: Path, damage: str) -> None:
    """Its metadata came first, and its data has not arrived."""
    make(tmp_path / "step-1", 100)
    (data,) = make(tmp_path / "step-2", 50).glob("*.tensors")
    if damage == "missing":
        data.unlink()
    else:
        os.truncate(data, 100)
    leave(tmp_path / "step-2", 50)
    assert {listed.step: listed.state for listed in find(tmp_path)} == {1: "committed", 2: "incomplete"}
    assert run(tmp_path, keep=1, older_than=0) == ()
    assert names(tmp_path) == {"step-1", "step-2"}
    assert LEFTOVER in names(tmp_path / "step-2")


def test_ranks_that_have_not_all_committed(tmp_path: Path) -> None:
    """Where each saves for itself, a checkpoint with fewer ranks than others does not make these old."""
    for step, ranks in ((1, 2), (2, 2), (3, 1)):
        for rank in range(ranks):
            make_checkpoint(tmp_path / f"step-{step}", {f"x{rank}": torch.ones(3)}, rank=rank)
    assert {listed.step: listed.parts for listed in listed_in(tmp_path)} == {1: 2, 2: 2, 3: 1}
    run(tmp_path, keep=1)
    assert names(tmp_path) == {"step-2", "step-3"}


def test_one_that_cannot_be_removed_does_not_keep_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is shown with the reason, and what was removed as well."""
    for step in (1, 2, 3, 4):
        make(tmp_path / f"step-{step}", 100 - step)
    storage_type = type(open_storage(tmp_path))
    remove = storage_type.remove

    def fail(storage: LocalStorage, *names: str) -> None:
        if storage.path.endswith("step-2"):
            raise PermissionError("not yours")
        remove(storage, *names)

    monkeypatch.setattr(storage_type, "remove", fail)
    removals = {name_of(removal): removal for removal in run(tmp_path, keep=1)}
    assert {name: (removal.failed, removal.nbytes > 0) for name, removal in removals.items()} == {
        "step-1": (False, True),
        "step-2": (True, False),
        "step-3": (False, True),
    }
    assert "not yours" in str(removals["step-2"].kept)
    assert names(tmp_path) == {"step-2", "step-4"}


def test_uploads_of_dead_saves_are_aborted(s3: S3Server) -> None:
    """They are in no listing, and are paid for; those that may be of a save in progress stay."""
    url = f"s3://{s3.bucket}/{uuid.uuid4().hex}"
    make_checkpoint(f"{url}/step-1", {"w": torch.ones(3)}, options=s3.options())
    storage = open_storage(f"{url}/step-1", s3.options())
    sink = storage.create(data_file_name(3, 0, "a" * 32), 100 << 20, sync=True)
    sink.put_part(0, on_a_page(bytes(sink.part_bytes)))  # which waits until the upload is in progress
    (listed,) = listed_in(url, s3.options())
    assert [file.name for file in listed.leftovers] == [data_file_name(3, 0, "a" * 32)]
    (removal,) = plan_collection(storage, None, 3600.0)
    assert "a save or a copy may be in progress" in str(remove(removal).kept)
    (removal,) = plan_collection(storage, None, 0.0)
    assert remove(removal).kept is None
    assert storage.uploads() == []
    assert find(url, s3.options())[0].state == "committed"


@pytest.mark.parametrize("top", ["", "/run", "/run/step-1"])
def test_a_first_save_that_was_killed(s3: S3Server, top: str) -> None:
    """It has left uploads and no object, so that no listing shows its directory: it is found from each one above."""
    url = f"s3://{s3.bucket}/{uuid.uuid4().hex}"
    storage = open_storage(f"{url}/run/step-1", s3.options())
    other = open_storage(f"{url}/run", s3.options())
    begun = (storage, LEFTOVER), (other, "of-somebody-else")
    sinks = [where.create(name, 100 << 20, sync=True) for where, name in begun]
    for sink in sinks:
        sink.put_part(0, on_a_page(bytes(sink.part_bytes)))
    with s3_proxy(s3.endpoint) as proxy:
        (listed,) = listed_in(f"{url}{top}", s3.options(proxy.endpoint))
        assert proxy.counts()["ListMultipartUploads"] == 1
    (info,) = listed.infos
    assert (info.path, info.state, info.step) == (f"{url}/run/step-1", "unfinished", 1)
    assert ([file.name for file in listed.leftovers], info.nbytes, listed.unknown) == ([LEFTOVER], 0, "")
    assert info.saved is not None and abs(info.saved.timestamp() - time.time()) < 60
    (removal,) = run(f"{url}{top}", older_than=3600.0, options=s3.options())
    assert "a save or a copy may be in progress" in str(removal.kept)
    (removal,) = run(f"{url}{top}", older_than=0.0, options=s3.options())
    assert (removal.files, removal.kept) == ((LEFTOVER,), None)
    assert [file.name for file in other.uploads()] == ["of-somebody-else"]
    sinks[1].abort()
    with pytest.raises(NotCommitted, match=f"{url}{top} does not exist"):
        find(f"{url}{top}", s3.options())


def test_an_upload_to_a_committed_file(s3: S3Server) -> None:
    """A lost answer has left it: to collect it would take the file with it."""
    url = f"s3://{s3.bucket}/{uuid.uuid4().hex}"
    make_checkpoint(f"{url}/step-1", {"w": torch.ones(3)}, options=s3.options())
    storage = open_storage(f"{url}/step-1", s3.options())
    (name,) = (file.name for file in storage.listing()[0] if file.name != metadata_file_name())
    sink = storage.create(name, 100 << 20, sync=True)
    sink.put_part(0, on_a_page(bytes(sink.part_bytes)))
    assert run(url, older_than=0.0, options=s3.options()) == ()
    assert [(one.infos[0].state, one.leftovers) for one in listed_in(url, s3.options())] == [("committed", ())]
    sink.abort()


def test_uploads_that_cannot_be_listed(s3: S3Server) -> None:
    """What a listing shows is removed. A checkpoint stays that may be saved again unseen, and that is a failure."""
    url = f"s3://{s3.bucket}/{uuid.uuid4().hex}"
    for step in (1, 2):
        make_checkpoint(f"{url}/step-{step}", {"w": torch.ones(3)}, options=s3.options())
    storage = open_storage(f"{url}/step-3", s3.options())
    storage.put(data_file_name(0, 0, "a" * 32), b"x", sync=True)
    in_progress = open_storage(f"{url}/step-1", s3.options()).create(LEFTOVER, 100 << 20, sync=True)
    in_progress.put_part(0, on_a_page(bytes(in_progress.part_bytes)))
    with s3_proxy(s3.endpoint) as proxy:
        proxy.rule = always("ListMultipartUploads", Fault(status=403, code="AccessDenied"))
        removals = run(url, 1, 0.0, s3.options(proxy.endpoint))
    told = [(name_of(removal), removal.whole, len(removal.files), removal.failed) for removal in removals]
    assert told == [
        ("step-1", True, 2, True),
        ("step-2", False, 0, True),
        ("step-3", False, 1, False),
        ("step-3", False, 0, True),
    ]
    for removal in removals:
        kept = str(removal.kept)
        assert removal.failed == ("cannot be recognised" in kept and "cannot list the uploads" in kept)
    found = find(url, s3.options())
    assert [(listed.step, listed.state) for listed in found] == [(2, "committed"), (1, "committed")]
    in_progress.abort()


# --- what is not provably of a dead save ------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["alone", "beside a checkpoint"])
def test_what_nobody_recorded_goes_by_age_alone(tmp_path: Path, state: str) -> None:
    """It may be on its way into the directory, or of a save whose lock is not to be seen; times are easily restored."""
    make(tmp_path / "step-2", 50)
    if state == "beside a checkpoint":
        make(tmp_path / "step-1", 100)
    leave(tmp_path / "step-1", age=10_000, recorded=False)
    for older_than in (None, 3600.0):
        assert {removal.kept for removal in run(tmp_path, keep=1, older_than=older_than)} <= {
            "a save or a copy may be in progress there. Pass an age with --older-than that no save or copy exceeds."
        }
        assert LEFTOVER in names(tmp_path / "step-1")
    run(tmp_path, older_than=0)
    assert names(tmp_path) == {"step-2"}


@pytest.mark.parametrize("state", ["alone", "beside a checkpoint"])
def test_old_leftovers_go_with_proven_ones(tmp_path: Path, state: str) -> None:
    """In one directory, in one run: what is recorded as of a dead save, and what is old enough."""
    if state == "beside a checkpoint":
        make(tmp_path / "step-1", 100)
    proven = leave(tmp_path / "step-1")
    old = tmp_path / "step-1" / data_file_name(0, 0, "e" * 32)
    old.write_bytes(b"x" * 10)
    (kept,) = [one for one in collect(tmp_path, older_than=3600.0, dry_run=True) if one.kept]
    assert kept.files == (old.name,)
    (removal,) = run(tmp_path, older_than=0)
    assert (removal.kept, removal.nbytes >= 110, {proven.name, old.name} <= {*removal.files}) == (None, True, True)
    assert names(tmp_path) == (set() if state == "alone" else {"step-1"})
    assert not old.exists() and not proven.exists()


def test_a_move_from_another_disk_arrives(tmp_path: Path) -> None:
    """``mv`` brings the data first and the metadata last; a collection at any moment leaves all of it."""
    source = make(tmp_path / "source", 100)
    (source / "config.json").write_text("{}")
    put_records(open_storage(source), ["f" * 32, source_id(source)])
    target = tmp_path / "run" / "step-1"
    target.mkdir(parents=True)
    make(tmp_path / "run" / "step-2", 50)
    for name in sorted(names(source), key=lambda name: name == metadata_file_name()):
        shutil.copy2(source / name, target / name)
        run(tmp_path / "run", keep=3)
    assert names(target) == names(source)
    assert [listed.state for listed in find(tmp_path / "run")] == ["committed", "committed"]


def source_id(folder: Path) -> str:
    """The id of the save of a checkpoint."""
    (data,) = folder.glob("*.tensors")
    return save_id_in(data.name)


# --- the parts of one checkpoint --------------------------------------------------------------------------------------


def make_parts(folder: Path, age: float, **parts: str) -> Path:
    """A checkpoint of several parts, by the keys in them, with something of a framework's beside them."""
    for name, key in parts.items():
        make(folder / name, age, key)
    (folder / "rng_state.pth").write_bytes(b"x")
    (folder / "pretrained").mkdir(exist_ok=True)
    (folder / "pretrained" / "config.json").write_text("{}")
    return folder


def test_parts_are_kept_and_removed_together(tmp_path: Path) -> None:
    """As Accelerate and the HF Trainer save: the model in one directory, its optimizer in another."""
    for step in (10, 20, 30):
        folder = tmp_path / f"checkpoint-{step}"
        make_parts(folder, 100 - step, pytorch_model_fsdp_0="model", optimizer_0="optimizer")
    removals = run(tmp_path, keep=2)
    assert [(name_of(removal), removal.whole, removal.kept) for removal in removals] == [("checkpoint-10", True, None)]
    assert names(tmp_path) == {"checkpoint-20", "checkpoint-30"}
    assert len(find(tmp_path)) == 4
    assert names(tmp_path / "checkpoint-20" / "pretrained") == {"config.json"}


def test_parts_are_not_taken_for_steps(tmp_path: Path) -> None:
    """Whoever names a checkpoint's own directory loses none of its parts."""
    folder = make_parts(tmp_path / "checkpoint-10", 50, pytorch_model_fsdp_0="model", optimizer_0="optimizer")
    kept = "may hold the parts of one checkpoint"
    assert [removal.kept for removal in run(folder, keep=1, older_than=0)] == [f"{folder} {kept}"]
    two = {"pytorch_model_fsdp_0": "a", "pytorch_model_fsdp_1": "b", "optimizer_0": "c", "optimizer_1": "d"}
    folder = make_parts(tmp_path / "checkpoint-20", 50, **two)
    assert {removal.kept for removal in run(folder, keep=1)} == {f"{folder} {kept}"}
    assert len(find(tmp_path)) == 6


def test_what_may_be_steps_or_parts_stays(tmp_path: Path) -> None:
    """Two models of one shape, say, with their averages; the runs that lie beside each other are not touched."""
    for step in (10, 20):
        make_parts(tmp_path / f"checkpoint-{step}", 100 - step, model_0="m", average_0="m", model_1="n", average_1="n")
    removals = run(tmp_path, keep=1)
    assert all("may hold the parts of one checkpoint" in str(removal.kept) for removal in removals)
    assert len(find(tmp_path)) == 8


def make_numbered(folder: Path, *names: str, age: float = 50) -> None:
    """Checkpoints of the same keys whose names differ by a number, the first one the oldest."""
    for number, name in enumerate(names):
        make(folder / name, age - number / 100)


def all_below(folder: Path) -> set[str]:
    """The directories of all checkpoints below a directory."""
    return {str(path.parent.relative_to(folder)) for path in folder.rglob(".metadata")}


RANKS = tuple(f"rank-{rank}" for rank in range(4))


@pytest.mark.parametrize("named", ["run", "run/step-10", "run/step-20"])
@pytest.mark.parametrize("parts", [RANKS, ("0", "1", "2"), ("model-0", "model-1")], ids=lambda parts: parts[0])
def test_ranks_of_the_same_keys_are_no_steps(tmp_path: Path, parts: tuple[str, ...], named: str) -> None:
    """Each rank or model in a directory of its own: all stay, whichever directory is named."""
    for step in (10, 20):
        make_numbered(tmp_path / f"run/step-{step}", *parts, age=100 - step)
    there = all_below(tmp_path)
    removals = run(tmp_path / named, keep=1, older_than=0)
    assert [str(removal.kept).partition(" may hold ")[2] for removal in removals] == [
        "the parts of one checkpoint"
    ] * len(removals)
    assert len(removals) == (len(parts) - 1) * (2 if named == "run" else 1)
    assert all_below(tmp_path) == there


def test_ranks_of_one_checkpoint_alone(tmp_path: Path) -> None:
    """A job has saved once, or overwrites: its ranks are no steps, also where no directory is named like a step."""
    make_numbered(tmp_path / "one" / "step-10", *RANKS)
    make_numbered(tmp_path / "two" / "final", *RANKS)
    make_numbered(tmp_path / "flat", *(f"step-10-{name}" for name in RANKS))
    for folder in (tmp_path, tmp_path / "two" / "final", tmp_path / "flat"):
        assert {removal.kept is None for removal in run(folder, keep=1)} == {False}
    assert len(all_below(tmp_path)) == 12


def test_fewer_ranks_than_before(tmp_path: Path) -> None:
    """The job was started again on half of its ranks: directories that hold other names are not runs for that."""
    make_numbered(tmp_path / "step-10", *RANKS)
    make_numbered(tmp_path / "step-20", *RANKS[:2])
    run(tmp_path, keep=1)
    assert len(all_below(tmp_path)) == 6


def test_steps_in_runs_with_numbers(tmp_path: Path) -> None:
    """Each run is counted for itself: ``step-10`` is named like a step, and ``run-1`` is not."""
    for name in ("run-1", "run-2", "42"):
        make_numbered(tmp_path / name, "step-10", "step-20", "step-30")
    make_numbered(tmp_path / "run-3" / "checkpoints", "10", "20", "30")
    run(tmp_path, keep=1)
    assert all_below(tmp_path) == {"run-1/step-30", "run-2/step-30", "42/step-30", "run-3/checkpoints/30"}


@pytest.mark.parametrize(
    "name",
    ["step-{}", "checkpoint_{}", "epoch={0}-step={0}00.ckpt", "iter_{:07}", "global_step{}", "{:06}", "Model-{}"],
)
def test_names_of_steps(tmp_path: Path, name: str) -> None:
    """As frameworks and people have them: two of three go."""
    make_numbered(tmp_path / "run", *map(name.format, range(3)))
    assert [removal.kept for removal in run(tmp_path, keep=1)] == [None, None]
    assert all_below(tmp_path) == {f"run/{name.format(2)}"}


def test_who_names_a_directory_says_that_it_holds_steps(tmp_path: Path) -> None:
    """From above, ``model-1`` in ``run-1`` may be a part of it; so may a step in a step."""
    make_numbered(tmp_path / "run-1", "model-100", "model-200")
    make_numbered(tmp_path / "epoch-1", "step-100", "step-200")
    assert {removal.kept is None for removal in run(tmp_path, keep=1)} == {False}
    for name in ("run-1", "epoch-1"):
        run(tmp_path / name, keep=1)
    assert all_below(tmp_path) == {"run-1/model-200", "epoch-1/step-200"}


@pytest.mark.parametrize("steps", [(10,), (10, 20, 30)], ids=["one step", "three steps"])
def test_a_run_is_no_checkpoint(tmp_path: Path, steps: tuple[int, ...]) -> None:
    """Two kinds of steps in a directory are not the parts of one checkpoint: no run goes as an old one."""
    for name in ("run-1", "run-2"):
        for step in steps:
            make_parts(tmp_path / name, 100 - step, **{f"model-{step}": "model", f"optim-{step}": "optimizer"})
    there = all_below(tmp_path)
    for folder in (tmp_path, tmp_path / "run-1"):
        assert {removal.kept is None for removal in run(folder, keep=1)} <= {False}
    assert all_below(tmp_path) == there


def test_a_kind_that_lacks_a_step(tmp_path: Path) -> None:
    """The job died between the model and the optimizer of a step: the two are not counted as one kind."""
    for step in (10, 20):
        make(tmp_path / f"model-{step}", 100 - step, "model")
    make(tmp_path / "optim-10", 89, "optimizer")
    run(tmp_path, keep=1)
    assert names(tmp_path) == {"model-10", "model-20", "optim-10"}


def test_a_part_that_is_not_committed(tmp_path: Path) -> None:
    """The job died between the model and the optimizer: that is no checkpoint, and does not make others old."""
    make_parts(tmp_path / "checkpoint-10", 90, pytorch_model_fsdp_0="model", optimizer_0="optimizer")
    make(tmp_path / "checkpoint-20" / "pytorch_model_fsdp_0", 80, "model")
    leave(tmp_path / "checkpoint-20" / "optimizer_0")
    run(tmp_path, keep=1)
    assert names(tmp_path / "checkpoint-10") >= {"pytorch_model_fsdp_0", "optimizer_0"}
    assert names(tmp_path / "checkpoint-20") == {"pytorch_model_fsdp_0"}


def make_recorded(folder: Path, step: int, age: float) -> Path:
    """A checkpoint that a manager has saved."""
    make(folder, age)
    record = SaveRecord(step, None, (("run", 0),), {})
    edit_index(folder / ".metadata", "head", lambda head: setattr(head, "record", record))
    return folder


def test_recorded_steps_need_no_guess(tmp_path: Path) -> None:
    """A manager's steps count under any name, each job's by themselves; a copy under another name stays."""
    for step in (10, 20, 30):
        for name in (f"run-1/model-{step}", f"run-1/optim-{step}-v2", f"epoch-1/step-{step}"):
            make_recorded(tmp_path / name, step, 100 - step)
    make_recorded(tmp_path / "run-1/best-7", 10, 90)
    make_recorded(tmp_path / "run-1/model-10-copy", 10, 90)
    make(tmp_path / "run-1/model-5", 95)
    found = {listed.path.rpartition("/")[2]: listed.step for listed in find(tmp_path)}
    assert (found["optim-20-v2"], found["model-20"], found["best-7"]) == (20, 20, 7)
    assert {removal.kept for removal in run(tmp_path, keep=1)} == {None}
    kept = {"model-30", "optim-30-v2", "best-7", "model-10-copy"}
    assert all_below(tmp_path) == {f"run-1/{name}" for name in kept} | {"epoch-1/step-30"}


def job(path: Path, losses: dict[int, float], **rules: Any) -> None:
    """A manager saves some steps, with their losses, and resumes from the newest."""
    with CheckpointManager(path, stop_signals=(), **rules) as manager:
        manager.restore({"w": torch.zeros(4)})
        for step, loss in losses.items():
            manager.save(step, {"w": torch.full((4,), float(step))}, metrics={"loss": loss}, wait=True)


LOSSES = {1: 0.5, 2: 0.25, 3: 0.75, 4: 1.0, 5: 1.5, 6: 2.0}


@pytest.mark.parametrize(
    ("keep", "older_than", "rules", "left"),
    [
        (1, None, {"keep_latest": 9, "keep_best": "loss"}, {2, 6}),
        (1, None, {"keep_latest": 9, "keep_best": ("loss", "max")}, {6}),
        (2, None, {"keep_latest": 9, "keep_every": 3}, {3, 5, 6}),
        (None, 0.0, {"keep_latest": 9, "keep_best": "loss"}, {1, 2, 3, 4, 5, 6}),
        (1, None, {"keep_latest": 9, "keep_best": "accuracy"}, {1, 2, 3, 4, 5, 6}),
        (1, None, {}, {6}),
    ],
    ids=["best", "newest-is-best", "every", "age-alone", "best-unknown", "no-rules"],
)
def test_the_rules_of_a_manager_hold(
    tmp_path: Path, keep: int | None, older_than: float | None, rules: dict[str, Any], left: set[int]
) -> None:
    """What its last manager retains by its rules stays; ``keep_latest`` of the call replaces that of the manager."""
    job(tmp_path, LOSSES, **rules)
    results = run(tmp_path, keep, older_than)
    assert {int(name.removeprefix("step-")) for name in names(tmp_path) if name.startswith("step-")} == left
    stayed = {name_of(one): one.kept for one in results if one.kept is not None}
    newest = keep or 9
    assert set(stayed) == {f"step-{step}" for step in left if step <= 6 - newest}
    assert all("its manager retains it by keep_every or keep_best" in str(reason) for reason in stayed.values())


def test_the_last_manager_of_a_folder_has_the_rules(tmp_path: Path) -> None:
    """Its branch alone has a best checkpoint: earlier rules, and branches that the job has left, do not count."""
    job(tmp_path, {1: 0.5, 2: 0.75, 3: 0.25}, keep_best="loss", keep_every=1)
    with CheckpointManager(tmp_path, stop_signals=(), keep_best=("loss", "max")) as manager:
        manager.restore({"w": torch.zeros(4)}, 2)
        for step in (4, 5):
            manager.save(step, {"w": torch.ones(4)}, metrics={"loss": 0.125}, wait=True)
    found = find(tmp_path)
    assert [(one.step, one.best, one.metrics) for one in found] == [
        (5, None, {"loss": 0.125}),
        (3, None, {"loss": 0.25}),
        (2, "loss", {"loss": 0.75}),
    ]
    run(tmp_path, 1)
    assert [(one.step, one.best) for one in find(tmp_path)] == [(5, None), (2, "loss")]


def test_a_clock_that_was_set_back(tmp_path: Path) -> None:
    """The checkpoint that the job would resume from is the newest, also if its time and its step are lower."""
    job(tmp_path, {1: 1.0, 8: 1.0, 9: 1.0})
    with CheckpointManager(tmp_path, stop_signals=()) as manager:
        manager.restore({"w": torch.zeros(4)}, 1)
        manager.save(2, {"w": torch.ones(4)}, wait=True)
    edit_index(tmp_path / "step-2" / ".metadata", "head", lambda head: setattr(head, "saved_at", 1))
    run(tmp_path, 1)
    assert {one.step for one in find(tmp_path)} == {2, 9}


def test_names_without_steps_stay(tmp_path: Path) -> None:
    """The best one and the last one, beside the steps, are not old steps."""
    for step in (1, 2, 3):
        make(tmp_path / f"step-{step}", 100 - step)
    make(tmp_path / "best", 1000)
    run(tmp_path, keep=1)
    assert names(tmp_path) == {"step-3", "best"}


def test_what_lies_beside_goes_with_its_checkpoint(tmp_path: Path) -> None:
    """Lightning's ``meta.pt`` and a tokenizer's directory."""
    for step in (1, 2):
        make(tmp_path / f"step={step}.ckpt", 100 - step)
        (tmp_path / f"step={step}.ckpt" / "meta.pt").write_bytes(b"x")
        (tmp_path / f"step={step}.ckpt" / "tokenizer").mkdir()
        (tmp_path / f"step={step}.ckpt" / "tokenizer" / "vocabulary").write_bytes(b"x")
    (removal,) = run(tmp_path, keep=1)
    assert {*removal.files} >= {".metadata", "meta.pt", "tokenizer/vocabulary"}
    assert names(tmp_path) == {"step=2.ckpt"}
    assert names(tmp_path / "step=2.ckpt") >= {"meta.pt", "tokenizer"}


def test_only_data_goes_if_that_is_asked(tmp_path: Path) -> None:
    """What others have put there stays, and so does the directory; what is empty then goes."""
    for step in (1, 2, 3):
        make(tmp_path / f"step-{step}", 100 - step)
    (tmp_path / "step-1" / "tokenizer").mkdir()
    (tmp_path / "step-1" / "tokenizer" / "vocabulary").write_bytes(b"x")
    assert [removal.kept for removal in collect(tmp_path, keep_latest=1, only_data=True)] == [None, None]
    assert names(tmp_path) == {"step-1", "step-3"}
    assert names(tmp_path / "step-1") == {"tokenizer"}
    assert names(tmp_path / "step-1" / "tokenizer") == {"vocabulary"}


@pytest.mark.parametrize("state", ["torch", "newer", "damaged"])
def test_what_is_not_ours_to_read(tmp_path: Path, state: str) -> None:
    """Torch's own checkpoints are shown as such, and collected no more than others that cannot be read."""
    for step in (2, 3):
        make(tmp_path / f"step-{step}", 100 - step)
    if state == "torch":
        dcp.save({"x": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path / "step-1"), no_dist=True)
    else:
        content = bytearray((make(tmp_path / "step-1", 99) / ".metadata").read_bytes())
        content[8 if state == "newer" else 200] ^= 0x40
        (tmp_path / "step-1" / ".metadata").write_bytes(content)
    found = {listed.step: listed.state for listed in find(tmp_path)}
    assert found == {1: "torch" if state == "torch" else "unreadable", 2: "committed", 3: "committed"}
    run(tmp_path, keep=1, older_than=0)
    assert names(tmp_path) == {"step-1", "step-3"}


@pytest.mark.parametrize("target", ["step-1", "step-1/pytorch_model_fsdp_0"])
def test_what_a_link_leads_to_stays(tmp_path: Path, target: str) -> None:
    """``best -> step-1``, or to a part of it, also from a directory below."""
    for step in (1, 2, 3):
        make_parts(tmp_path / f"step-{step}", 100 - step, pytorch_model_fsdp_0="model", optimizer_0="optimizer")
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "best").symlink_to(f"../{target}")
    assert {name_of(removal): removal.kept for removal in run(tmp_path, keep=1)} == {
        "step-1": "a link leads to it",
        "step-2": None,
    }
    assert names(tmp_path) == {"exported", "step-1", "step-3"}


def test_leftovers_in_an_old_checkpoint_that_stays_are_removed(tmp_path: Path) -> None:
    """A link keeps the checkpoint and each of its parts, and not what a dead save has left in one of them."""
    for step in (1, 2):
        make_parts(tmp_path / f"step-{step}", 100 - step, pytorch_model_fsdp_0="model", optimizer_0="optimizer")
    (tmp_path / "best").symlink_to("step-1")
    part = tmp_path / "step-1" / "optimizer_0"
    whole = {path.name for path in part.iterdir()}
    leftover = leave(part, 90, recorded=False)
    kept, removed = run(tmp_path, keep=1, older_than=0)
    assert (name_of(kept), kept.whole, kept.kept) == ("step-1", True, "a link leads to it")
    assert (name_of(removed), removed.files, removed.kept) == ("optimizer_0", (leftover.name,), None)
    assert {path.name for path in part.iterdir()} == whole


def test_what_a_killed_job_leaves_beside_its_checkpoints(tmp_path: Path) -> None:
    """Its half-written `latest` and claim go when they are old enough; what has other names stays."""
    make(tmp_path / "step-1", 500.0)
    (tmp_path / "latest").write_text("step-1\n")
    strays = [tmp_path / f"{name}.{'a' * 32}.tmp" for name in ("latest", ".step-N.claim")]
    others = [tmp_path / name for name in (f"notes.{'a' * 32}.tmp", "latest.tmp")]
    for path in (*strays, *others):
        path.write_text("s")
        os.utime(path, (NOW - 100, NOW - 100))
    (removal,) = collect(tmp_path, older_than=1000.0, dry_run=True)
    assert "may be in progress" in str(removal.kept)
    (removal,) = run(tmp_path, older_than=0.0)
    assert (removal.kept, {*removal.files}) == (None, {path.name for path in strays})
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*(p.name for p in others), "latest", "step-1"])
