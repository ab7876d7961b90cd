"""`list_checkpoints` lists what is below a path, and `collect` never removes what a job still needs."""

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
    """Sets the time of the test's start, from which all ages count."""
    monkeypatch.setitem(globals(), "NOW", time.time())


def make(path: Path, age: float, key: str = "x") -> Path:
    """Makes a checkpoint that was committed ``age`` seconds ago, by its record and by its files."""
    make_checkpoint(path, {key: torch.ones(3)}, {"step": 1})
    edit_index(path / ".metadata", "head", lambda head: setattr(head, "saved_at", int((NOW - age) * 1e9)))
    for file in path.iterdir():
        os.utime(file, (NOW - age, NOW - age))
    return path


def leave(folder: Path, age: float = 0, *, recorded: bool = True) -> Path:
    """Leaves a file of 100 bytes of a dead save, and the save's record."""
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
    """A listing has the highest step first, with recorded times and the state of each checkpoint."""
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


def test_ranks_that_saved_for_themselves(tmp_path: Path) -> None:
    """A checkpoint whose ranks saved independently is committed, with the values of all ranks."""
    make_checkpoint(tmp_path / "a", {"x": torch.ones(3)}, rank=0)
    make_checkpoint(tmp_path / "a", {"y": torch.ones(3)}, rank=1)
    (found,) = find(tmp_path)
    assert (found.state, found.tensors) == ("committed", 2)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    """`keep_latest` counts the committed checkpoints of each directory separately."""
    for run_name in ("one", "two"):
        for step in range(1, 5):
            make(tmp_path / run_name / f"step-{step}", 100 - step)
    leave(tmp_path / "one" / "step-9")
    removals = run(tmp_path, keep=2)
    assert names(tmp_path / "one") == names(tmp_path / "two") == {"step-3", "step-4"}
    assert sum(removal.whole for removal in removals) == 4


def test_the_newest_one_always_stays(tmp_path: Path) -> None:
    """The newest checkpoint and the highest step stay, however old they are."""
    make(tmp_path / "step-100", 2000)
    make(tmp_path / "step-50", 1000)
    make(tmp_path / "step-10", 3000)
    run(tmp_path, older_than=0)
    assert names(tmp_path) == {"step-100", "step-50"}


def test_both_conditions_must_hold(tmp_path: Path) -> None:
    """With `keep_latest` and `older_than`, only checkpoints that exceed both are removed."""
    for step, age in ((1, 400), (2, 300), (3, 200), (4, 100)):
        make(tmp_path / f"step-{step}", age)
    run(tmp_path, keep=1, older_than=250)
    assert names(tmp_path) == {"step-3", "step-4"}


def test_without_conditions_only_leftovers_go(tmp_path: Path) -> None:
    """Without conditions, only leftovers are removed, and other files and their directories stay."""
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
    """Nothing is removed from a directory that a save has locked."""
    old, new = make(tmp_path / "step-1", 100), make(tmp_path / "step-2", 50)
    fresh = tmp_path / "step-3"
    fresh.mkdir()
    locks = [begin(open_storage(path), 1.0) for path in (old, fresh)]
    leave(fresh)
    leave(old)
    removals = run(tmp_path, keep=1, older_than=0)
    assert {removal.kept for removal in removals} == {"the directory is in use, for example by a save in progress"}
    assert names(tmp_path) == {"step-1", "step-2", "step-3"}
    assert LEFTOVER in names(old) & names(fresh)
    for lock in locks:
        lock.release()
    run(tmp_path, keep=1)
    assert names(tmp_path) == {new.name}


def test_a_save_after_the_plan_is_left_alone(tmp_path: Path) -> None:
    """A checkpoint that was saved again after the plan is not removed."""
    make(tmp_path / "step-1", 100)
    make(tmp_path / "step-2", 50)
    plan = plan_collection(open_storage(tmp_path), 1, None)
    make(tmp_path / "step-1", 0)
    assert [remove(removal).kept for removal in plan] == [
        "its files have changed since they were listed. Run the command again."
    ]
    assert find(tmp_path / "step-1")[0].state == "committed"


def test_unreadable_checkpoints_stay(tmp_path: Path) -> None:
    """Nothing of an unreadable checkpoint is removed, because a newer release may read it."""
    (make(tmp_path / "step-1", 100) / ".metadata").write_bytes(b"of a later version")
    leave(tmp_path / "step-1")
    make(tmp_path / "step-2", 50)
    assert run(tmp_path, keep=1, older_than=0) == ()


def test_an_interrupted_removal_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal begins with the metadata, and the next collection removes the rest."""
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
    """On a storage without visible locks, leftovers are removed only by their age."""
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
    """After a job went back, the newest checkpoints and the highest steps stay."""
    for step, age in ((10, 1), (20, 3), (30, 2), (40, 4), (5, 9)):
        make(tmp_path / f"step-{step}", age)
    run(tmp_path, keep=2)
    assert names(tmp_path) == {"step-10", "step-30", "step-40"}


def test_copies_have_the_age_of_their_record(tmp_path: Path) -> None:
    """The age of a copied checkpoint is that of its record, not of its files."""
    for step in (9, 10, 11, 12):
        make(tmp_path / f"step-{step}", 1000 - step)
    for seconds, name in enumerate(("step-12", "step-10", "step-11", "step-9")):
        for file in (tmp_path / name).iterdir():
            os.utime(file, (NOW + seconds, NOW + seconds))
    assert [listed.step for listed in find(tmp_path)] == [12, 11, 10, 9]
    run(tmp_path, keep=2)
    assert names(tmp_path) == {"step-11", "step-12"}


def test_links_to_checkpoints_are_not_counted(tmp_path: Path) -> None:
    """A link to a checkpoint does not count as a checkpoint."""
    for step in (1, 2, 3):
        make(tmp_path / f"step-{step}", 100 - step)
    (tmp_path / "latest").symlink_to("step-3")
    run(tmp_path, keep=1)
    assert names(tmp_path) == {"step-3", "latest"}
    assert find(tmp_path / "step-3")[0].state == "committed"


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_incomplete_copies_stay(tmp_path: Path, damage: str) -> None:
    """A checkpoint whose data is missing or short, as in a copy in progress, neither counts nor is removed."""
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
    """A checkpoint of fewer ranks than others neither counts nor is removed."""
    for step, ranks in ((1, 2), (2, 2), (3, 1)):
        for rank in range(ranks):
            make_checkpoint(tmp_path / f"step-{step}", {f"x{rank}": torch.ones(3)}, rank=rank)
    assert {listed.step: listed.parts for listed in listed_in(tmp_path)} == {1: 2, 2: 2, 3: 1}
    run(tmp_path, keep=1)
    assert names(tmp_path) == {"step-2", "step-3"}


def test_a_failed_removal_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a checkpoint cannot be removed, the result has the reason, and the others are removed."""
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
    """Old uploads of dead saves are aborted; newer ones may be of a save in progress, and stay."""
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
    """A directory with nothing but open uploads is found from each directory above it."""
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
    info = listed.info
    assert info is not None
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
    """An open upload to a committed file is not collected, because that would remove the file."""
    url = f"s3://{s3.bucket}/{uuid.uuid4().hex}"
    make_checkpoint(f"{url}/step-1", {"w": torch.ones(3)}, options=s3.options())
    storage = open_storage(f"{url}/step-1", s3.options())
    (name,) = (file.name for file in storage.listing()[0] if file.name != metadata_file_name())
    sink = storage.create(name, 100 << 20, sync=True)
    sink.put_part(0, on_a_page(bytes(sink.part_bytes)))
    assert run(url, older_than=0.0, options=s3.options()) == ()
    assert [(one.info and one.info.state, one.leftovers) for one in listed_in(url, s3.options())] == [("committed", ())]
    sink.abort()


def test_uploads_that_cannot_be_listed(s3: S3Server) -> None:
    """If uploads cannot be listed, checkpoints that might be saved again stay, and that is a failure."""
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
def test_unrecorded_leftovers_are_removed_by_age(tmp_path: Path, state: str) -> None:
    """A file without a record may belong to a copy in progress, and is removed only by its age."""
    make(tmp_path / "step-2", 50)
    if state == "beside a checkpoint":
        make(tmp_path / "step-1", 100)
    leave(tmp_path / "step-1", age=10_000, recorded=False)
    for older_than in (None, 3600.0):
        assert {removal.kept for removal in run(tmp_path, keep=1, older_than=older_than)} <= {
            "a save or a copy may be in progress there. To remove its files once they are old enough, pass "
            "--older-than with an age that no save or copy exceeds."
        }
        assert LEFTOVER in names(tmp_path / "step-1")
    run(tmp_path, older_than=0)
    assert names(tmp_path) == {"step-2"}


@pytest.mark.parametrize("state", ["alone", "beside a checkpoint"])
def test_old_leftovers_go_with_proven_ones(tmp_path: Path, state: str) -> None:
    """One run removes leftovers of a recorded dead save together with old ones."""
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
    """A collection at any moment of a move from another disk leaves all of its files."""
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
    """Returns the id of a checkpoint's save."""
    (data,) = folder.glob("*.tensors")
    return save_id_in(data.name)


# --- which checkpoints are the steps of one job -----------------------------------------------------------------------


def make_numbered(folder: Path, *names: str, age: float = 50) -> None:
    """Makes checkpoints with equal keys, the first one the oldest."""
    for number, name in enumerate(names):
        make(folder / name, age - number / 100)


def all_below(folder: Path) -> set[str]:
    """Returns the directories of all checkpoints below a directory."""
    return {str(path.parent.relative_to(folder)) for path in folder.rglob(".metadata")}


def refused(path: Path, keep: int | None = 1, older_than: float | None = None) -> set[tuple[str, str]]:
    """Collects below a path, which must remove nothing; returns the refused directories and the reasons."""
    there = all_below(path)
    removals = run(path, keep, older_than)
    assert all_below(path) == there
    assert {(removal.whole, removal.files, removal.failed) for removal in removals} <= {(True, (), False)}
    return {(os.path.relpath(removal.path, path), str(removal.kept)) for removal in removals}


NOT_STEPS = (
    "its checkpoints might not be steps of one job. Without a manager's records, steps must be named like step-10 and "
    "step-20 and have equal keys, and beside them, no other directory with a checkpoint may have a number in its name. "
    "Delete old checkpoints by hand."
)
IN_A_STEP = (
    "one of its parent directories is named like a step. To delete old checkpoints in this directory, pass its own "
    "path to gc."
)


@pytest.mark.parametrize("name", ["step-{}", "checkpoint_{}", "iter_{:07}", "global_step{}", "Epoch={}"])
def test_names_of_steps(tmp_path: Path, name: str) -> None:
    """Checkpoints with equal keys and names of one word for a step and a number are steps."""
    make_numbered(tmp_path / "run", *map(name.format, range(3)))
    make(tmp_path / "run" / "best", 1000)
    assert [removal.kept for removal in run(tmp_path, keep=1)] == [None, None]
    assert all_below(tmp_path) == {f"run/{name.format(2)}", "run/best"}


@pytest.mark.parametrize(
    "names",
    [
        ("rank-0", "rank-1", "rank-2"),
        ("0", "1", "2"),
        ("model-10", "model-20"),
        ("step-10-rank-0", "step-10-rank-1"),
        ("epoch=0-step=100", "epoch=1-step=200"),
        ("step-10", "step-20", "ckpt-30"),
        ("step-10", "step-20", "rank-0"),
        ("step-10", "step-20", "run-1/model_0"),
    ],
    ids=lambda names: " ".join(names),
)
def test_names_that_are_not_those_of_steps(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Checkpoints with other names, or beside other numbers, stay, and the result names their directory."""
    make_numbered(tmp_path / "run", *names)
    for path, directory in ((tmp_path, "run"), (tmp_path / "run", ".")):
        assert refused(path) == refused(path, None, 0.0) == {(directory, NOT_STEPS)}


def test_steps_of_different_keys(tmp_path: Path) -> None:
    """Checkpoints with different keys stay: they may be of several jobs, or parts of one checkpoint."""
    for step, key in ((10, "model"), (20, "model"), (30, "optimizer")):
        make(tmp_path / f"step-{step}", 100 - step, key)
    assert refused(tmp_path) == {(".", NOT_STEPS)}


def test_parts_of_a_checkpoint(tmp_path: Path) -> None:
    """The parts of a checkpoint, as Accelerate and the Hugging Face Trainer save them, stay."""
    for step in (10, 20, 30):
        for number, name in enumerate(("pytorch_model_fsdp_0", "optimizer_0")):
            make(tmp_path / f"checkpoint-{step}" / name, 100 - step, str(number))
    assert {directory for directory, _ in refused(tmp_path)} == {"checkpoint-10", "checkpoint-20", "checkpoint-30"}
    assert refused(tmp_path / "checkpoint-10") == {(".", NOT_STEPS)}


def test_steps_in_a_directory_that_is_named_like_a_step(tmp_path: Path) -> None:
    """Steps below a directory with the name of a step may be its parts, and are collected only by their own path."""
    make_numbered(tmp_path / "epoch-1" / "run", "step-100", "step-200")
    assert refused(tmp_path) == {("epoch-1/run", IN_A_STEP)}
    run(tmp_path / "epoch-1", keep=1)
    assert all_below(tmp_path) == {"epoch-1/run/step-200"}


def test_steps_in_runs_with_numbers(tmp_path: Path) -> None:
    """The steps of each run are counted separately, also if runs have numbers."""
    for name in ("run-1", "run-2", "42"):
        make_numbered(tmp_path / name, "step-10", "step-20", "step-30")
    run(tmp_path, keep=1)
    assert all_below(tmp_path) == {"run-1/step-30", "run-2/step-30", "42/step-30"}


def make_recorded(folder: Path, step: int, age: float) -> Path:
    """Makes a checkpoint with a manager's record."""
    make(folder, age)
    record = SaveRecord(step, None, (("run", 0),), {})
    edit_index(folder / ".metadata", "head", lambda head: setattr(head, "record", record))
    return folder


def test_recorded_steps(tmp_path: Path) -> None:
    """A manager's steps count under any name, for each job separately; a copy under another name stays."""
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
    """Saves steps with their losses by a manager that resumes from the newest."""
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
    """The rules of the last manager hold, except that `keep_latest` of the call replaces the manager's."""
    job(tmp_path, LOSSES, **rules)
    results = run(tmp_path, keep, older_than)
    assert {int(name.removeprefix("step-")) for name in names(tmp_path) if name.startswith("step-")} == left
    stayed = {name_of(one): one.kept for one in results if one.kept is not None}
    newest = keep or 9
    assert set(stayed) == {f"step-{step}" for step in left if step <= 6 - newest}
    assert all("a rule of its manager retains it" in str(reason) for reason in stayed.values())


def test_the_last_manager_of_a_folder_has_the_rules(tmp_path: Path) -> None:
    """Only the last manager's rules and branch decide which checkpoint is the best."""
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
    """The checkpoint that the job would resume from stays, even if its time and its step are lower."""
    job(tmp_path, {1: 1.0, 8: 1.0, 9: 1.0})
    with CheckpointManager(tmp_path, stop_signals=()) as manager:
        manager.restore({"w": torch.zeros(4)}, 1)
        manager.save(2, {"w": torch.ones(4)}, wait=True)
    edit_index(tmp_path / "step-2" / ".metadata", "head", lambda head: setattr(head, "saved_at", 1))
    run(tmp_path, 1)
    assert {one.step for one in find(tmp_path)} == {2, 9}


def test_names_without_steps_stay(tmp_path: Path) -> None:
    """A checkpoint without a number in its name, beside the steps, stays."""
    for step in (1, 2, 3):
        make(tmp_path / f"step-{step}", 100 - step)
    make(tmp_path / "best", 1000)
    run(tmp_path, keep=1)
    assert names(tmp_path) == {"step-3", "best"}


def test_other_files_are_removed_with_their_checkpoint(tmp_path: Path) -> None:
    """Other files and directories in a checkpoint's directory are removed with it."""
    for step in (1, 2):
        folder = make(tmp_path / f"step={step}", 100 - step)
        (folder / "meta.pt").write_bytes(b"x")
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "vocabulary").write_bytes(b"x")
    (removal,) = run(tmp_path, keep=1)
    assert {*removal.files} >= {".metadata", "meta.pt", "tokenizer/vocabulary"}
    assert names(tmp_path) == {"step=2"}
    assert names(tmp_path / "step=2") >= {"meta.pt", "tokenizer"}


def test_only_data(tmp_path: Path) -> None:
    """With `only_data`, other files and their directories stay."""
    for step in (1, 2, 3):
        make(tmp_path / f"step-{step}", 100 - step)
    (tmp_path / "step-1" / "tokenizer").mkdir()
    (tmp_path / "step-1" / "tokenizer" / "vocabulary").write_bytes(b"x")
    assert [removal.kept for removal in collect(tmp_path, keep_latest=1, only_data=True)] == [None, None]
    assert names(tmp_path) == {"step-1", "step-3"}
    assert names(tmp_path / "step-1") == {"tokenizer"}
    assert names(tmp_path / "step-1" / "tokenizer") == {"vocabulary"}


@pytest.mark.parametrize("state", ["torch", "newer", "damaged"])
def test_checkpoints_of_other_formats_stay(tmp_path: Path, state: str) -> None:
    """Checkpoints of torch, of a newer release and damaged ones are listed as such, and stay."""
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


@pytest.mark.parametrize("target", ["step-1", "step-1/pretrained"])
def test_targets_of_links_stay(tmp_path: Path, target: str) -> None:
    """The target of a link in any directory below stays, also if the link leads into it."""
    for step in (1, 2, 3):
        (make(tmp_path / f"step-{step}", 100 - step) / "pretrained").mkdir()
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "best").symlink_to(f"../{target}")
    assert {name_of(removal): removal.kept for removal in run(tmp_path, keep=1)} == {
        "step-1": "it is the target of a link",
        "step-2": None,
    }
    assert names(tmp_path) == {"exported", "step-1", "step-3"}


def test_leftovers_in_an_old_checkpoint_that_stays_are_removed(tmp_path: Path) -> None:
    """Leftovers are removed from an old checkpoint that a link retains."""
    for step in (1, 2):
        make(tmp_path / f"step-{step}", 100 - step)
    (tmp_path / "best").symlink_to("step-1")
    linked = tmp_path / "step-1"
    whole = {path.name for path in linked.iterdir()}
    leftover = leave(linked, 90, recorded=False)
    kept, removed = run(tmp_path, keep=1, older_than=0)
    assert (name_of(kept), kept.whole, kept.kept) == ("step-1", True, "it is the target of a link")
    assert (name_of(removed), removed.files, removed.kept) == ("step-1", (leftover.name,), None)
    assert {path.name for path in linked.iterdir()} == whole


def test_temporary_files_of_a_killed_job(tmp_path: Path) -> None:
    """Old temporary files of `latest` and of leases are removed, and files with other names stay."""
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
