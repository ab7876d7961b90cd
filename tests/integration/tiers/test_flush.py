"""The flush: what is on the remote after each step, whatever it dies in, and what is given up."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer import NotCommitted, TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._storage.base import Refused, Sink, Storage
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer._tiers import flush
from dcp_tensorizer._tiers import flush as flusher_module
from dcp_tensorizer._tiers.flush import Flusher
from dcp_tensorizer._tiers.queue import REMOTE, SENT, UNFLUSHED, Commit, FlushEntry, FlushRecord, Queue
from dcp_tensorizer._tiers.target import FlushTarget
from dcp_tensorizer.errors import unwrap

from ...lab.processes import quietly
from ...lab.servers import SftpServer
from .support import Run, files_below, read_only, state_of


class _Killed(BaseException):
    """Ends a flush like a signal: no later operation runs."""


def _dying(monkeypatch: pytest.MonkeyPatch, at: int) -> Callable[[], None]:
    """Ends a flush after its ``at``-th operation; returns its gate."""
    left = at

    def count() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise _Killed

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            count()
            return function(*args, **kwargs)

        return call

    for owner, name in ((Queue, "move"), (Queue, "set_trouble"), (LocalStorage, "put"), (LocalStorage, "rename")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    monkeypatch.setattr(LocalStorage, "remove", counted(LocalStorage.remove))
    return count


def test_a_flush_that_dies_anywhere_is_finished_by_the_next(tmp_path: Path) -> None:
    """After each operation the remote has one complete checkpoint or none. The next flush finishes the work."""
    saved = Run(tmp_path / "saved")
    saved.folder.mkdir()
    saved.save_unflushed(1, 2, place="latest")
    found, at = set(), 0
    while True:
        run = Run(tmp_path / "run")
        shutil.rmtree(run.folder, ignore_errors=True)
        shutil.copytree(saved.folder, run.folder)
        target = _retargeted(run, saved)
        with pytest.MonkeyPatch.context() as patch:
            flusher = Flusher(target, _dying(patch, at))
            try:
                died = False
                while flusher.step() is not None:
                    pass
            except _Killed:
                died = True
        found.add(_loaded(run, "latest"))
        again = Flusher(target)
        while again.step() is not None:
            pass
        assert run.load("latest") == 2
        assert sorted(path.suffix for path in run.remote.rglob("*.*")) == ["", ".tensors"]
        at += 1
        if not died:
            break
    assert (found, at > 15) == ({None, 1, 2}, True)


def _retargeted(run: Run, saved: Run) -> Any:
    """Returns the target of a copied run, after a change of the remote in its records."""
    for path in (run.local / ".flush").iterdir():
        if path.suffix == ".unflushed":
            path.write_bytes(path.read_bytes().replace(str(saved.remote).encode(), str(run.remote).encode()))
    return run.target


def _loaded(run: Run, place: str) -> int | None:
    try:
        with quietly():
            return run.load(place)
    except BaseException as error:
        if not isinstance(unwrap(error), NotCommitted):
            raise
        return None


def test_checkpoints_arrive_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each checkpoint is committed before the next one, and only the newest keeps its local copy."""
    run = Run(tmp_path)
    run.save_unflushed(1, 2, 3)
    order = []
    publish = flusher_module.publish
    monkeypatch.setattr(
        flusher_module, "publish", lambda remote, *rest: order.append(remote.path[-6:]) or publish(remote, *rest)
    )
    assert Flusher(run.target).step() is None
    assert order == ["step-1", "step-2", "step-3"]
    assert [run.load(f"step-{n}") for n in (1, 2, 3)] == [1, 2, 3]
    assert {path.name for path in run.local.iterdir()} == {".flush", "step-3"}
    assert run.states() == ["remote"] * 3


def _full_for(monkeypatch: pytest.MonkeyPatch, remote: Path) -> None:
    """Makes a folder on the remote full."""
    create = LocalStorage.create

    def full(self: LocalStorage, name: str, nbytes: int, *, sync: bool) -> Any:
        if self.location == str(remote):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create(self, name, nbytes, sync=sync)

    monkeypatch.setattr(LocalStorage, "create", full)


def test_nothing_is_sent_ahead_of_what_finds_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later, smaller save is not sent, because it would take the space that the earlier one needs."""
    run = Run(tmp_path)
    run.save_unflushed(1, 2)
    with monkeypatch.context() as patch:
        _full_for(patch, run.remote / "step-1")
        flusher = Flusher(run.target)
        assert flusher.step() is not None
        assert (run.states(), files_below(run.remote)) == (["unflushed"] * 2, set())
    assert flusher.step() is None
    assert [run.load(f"step-{step}") for step in (1, 2)] == [1, 2]


def test_a_read_only_disk_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoints arrive once, the next process sends nothing again, and a writable disk gets their states."""
    run = Run(tmp_path)
    run.save_unflushed(1, 2)
    flusher, again = Flusher(run.target), Flusher(run.target)
    with monkeypatch.context() as patch:
        read_only(patch, run.local)
        assert flusher.step() is not None
        assert run.states() == ["unflushed"] * 2
        assert [run.load(f"step-{step}") for step in (1, 2)] == [1, 2]
        patch.setattr(flusher_module, "copy_file", None)
        assert again.step() is not None
        assert [entry.state for entry in again._queue.entries()] == ["remote"] * 2
    assert flusher.step() is None
    assert run.states() == ["remote"] * 2


def test_unreadable_files_on_a_read_only_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flush gives them up after the timeout, and records that when the disk is writable."""
    run = Run(tmp_path)
    run.save_unflushed(1)
    flusher, deadline = Flusher(replace(run.target, timeout=0.01)), time.monotonic() + 30
    with monkeypatch.context() as patch:
        read_only(patch, run.local)

        def damaged(self: LocalStorage, name: str) -> Any:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr(LocalStorage, "open_uncached", damaged)
        while flusher._queue.entries()[0].state != "lost":
            flusher.step()
            assert time.monotonic() < deadline
        assert (run.states(), list(run.remote.rglob("*.*"))) == (["unflushed"], [])
    assert flusher.step() is None
    assert run.states() == ["lost"]
    assert "Input/output error" in run.queue.record(run.queue.entries()[0]).reason  # type: ignore[union-attr]


def test_a_record_that_the_disk_does_not_give_is_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save whose record cannot be read is given up after the timeout, and later saves are sent."""
    run = Run(tmp_path)
    run.save_unflushed(1, 2)
    first, read = run.queue.entries()[0], Path.read_bytes

    def damaged(path: Path) -> bytes:
        if path == run.queue.folder / first.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", damaged)
    flusher = Flusher(replace(run.target, timeout=0.01))
    deadline = time.monotonic() + 30
    while flusher.step() is not None:
        assert time.monotonic() < deadline
    assert run.states()[0] in ("lost", "told")
    record = run.queue.record(run.queue.entries()[0])
    assert record is not None and f"its record {run.queue.folder / first.name} cannot be read" in record.reason
    assert run.load("step-2") == 2


def _written(run: Run, step: int, rank: int, *, commits: bool = False) -> FlushEntry:
    """Writes a rank's part of a save. With ``commits``, the commit also names the file of rank 1."""
    names = [f"__{other}_0_{10 * step + other:032}.tensors" for other in (0, 1)]
    folder = run.local / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[rank]).write_bytes(b"data")
    writing = run.queue.begin(FlushRecord(run.target.name, folder.name, rank, f"{10 * step + rank:032}", "a"))
    commit = Commit(".metadata", dict.fromkeys(names, 4), True) if commits else None
    writing.written({names[rank]: 4}, sync=False, commit=commit, index=b"")
    return writing.entry


def test_a_rank_does_not_send_ahead_of_another_one_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is no space for rank 1's part of the first save, no part of the second save is sent."""
    run = Run(tmp_path)
    for step in (1, 2):
        _written(run, step, 0, commits=True)
        _written(run, step, 1)
    copy = flusher_module.copy_file

    def no_room(source: Storage, target: Storage, name: str, *rest: Any) -> None:
        if name.startswith("__1_") and target.location.endswith("step-1"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        copy(source, target, name, *rest)

    monkeypatch.setattr(flusher_module, "copy_file", no_room)
    Flusher(run.target).step()
    assert run.states() == ["sent", "unflushed", "unflushed", "unflushed"]
    assert {path.parent.name for path in run.remote.rglob("*.tensors")} == {"step-1"}


@pytest.mark.parametrize(("confirmed", "age", "states"), [(True, 0, "su"), (True, 7200, "ss"), (False, 0, "ss")])
def test_a_part_of_another_nodes_commit_goes_first_for_a_while(
    tmp_path: Path, confirmed: bool, age: float, states: str
) -> None:
    """Only a confirmed part of another node's save holds back later parts, until the timeout."""
    run = Run(tmp_path)
    first, _ = _written(run, 1, 1), _written(run, 2, 1)
    if confirmed:
        run.queue.confirm(first)
    changed = time.time() - age
    sent = run.queue.move(first, SENT)
    os.utime(run.queue.folder / sent.name, (changed, changed))
    (run.remote / "step-1").mkdir(parents=True)
    Flusher(run.target).step()
    assert "".join(state[0] for state in run.states()) == states


def test_a_file_that_was_not_sent_completely_is_sent_again(
    tmp_path: Path, sftp: SftpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush over SFTP dies after the last part of a file, but before an earlier part: the next flush sends both."""
    url, local, state = f"sftp://127.0.0.1/{uuid.uuid4().hex}", tmp_path / "local", {"w": torch.rand(5_000_000)}
    with TensorizerStorageWriter(url, local=local, storage_options=sftp.options() | {"port": 1}) as writer:
        dcp.save(state, storage_writer=writer, checkpoint_id=f"{url}/step-1")
        writer.close(0)
    target, sent, put = FlushTarget(str(local), url, sftp.options(), 60.0), threading.Event(), Sink.put_part

    def die_before_the_second(sink: Sink, number: int, data: memoryview) -> None:
        if number == 1:
            assert sent.wait(60)
            raise _Killed
        put(sink, number, data)
        if number == 2:
            sent.set()

    with monkeypatch.context() as patch:
        patch.setattr(Sink, "put_part", die_before_the_second)
        patch.setattr(Sink, "abort", lambda sink: None)
        with pytest.raises(_Killed):
            Flusher(target).step()
    assert sent.is_set()
    assert Flusher(target).step() is None
    loaded = {"w": torch.zeros(5_000_000)}
    dcp.load(loaded, storage_reader=TensorizerStorageReader(f"{url}/step-1", storage_options=sftp.options()))
    assert loaded["w"].equal(state["w"])
    assert [file for file in target.open("step-1").listing()[0] if file.name.endswith(".tmp")] == []


def test_a_part_that_finds_no_room_ends_with_its_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part for which there is no space is given up with its save."""
    run = Run(tmp_path)
    commit, part = _written(run, 1, 0, commits=True), _written(run, 1, 1)
    with monkeypatch.context() as patch:
        _full_for(patch, run.remote / "step-1")
        Flusher(run.target).step()
    record = run.queue.record(commit)
    assert record is not None
    run.queue.give_up(commit, record, "no reason")
    assert Flusher(run.target).step() is None
    assert run.queue.record(part).reason == "no reason"  # type: ignore[union-attr]
    assert list(tmp_path.rglob("*.tensors")) == [run.local / "step-1" / f"__0_0_{10:032}.tensors"]


@pytest.mark.parametrize(("seconds", "shown"), [(6.0, [True, False, True, True]), (1.0, [True, False, False, False])])
def test_a_slow_flush_shows_that_it_makes_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, shown: list[bool]
) -> None:
    """While a save's files are sent, the time of its record changes about every 5 s, so that no trainer gives up."""
    run = Run(tmp_path)
    names = [f"__0_{number}_{'a' * 32}.tensors" for number in range(3)]
    (run.local / "step-1").mkdir(parents=True)
    for name in names:
        (run.local / "step-1" / name).write_bytes(b"data")
    writing = run.queue.begin(FlushRecord(run.target.name, "step-1", 0, "a" * 32))
    writing.written(dict.fromkeys(names, 4), sync=False)
    record = run.queue.folder / writing.entry.name
    now, passed, found = time.monotonic, 0.0, list[bool]()
    monkeypatch.setattr(time, "monotonic", lambda: now() + passed)

    def gate() -> None:
        nonlocal passed
        found.append(record.stat().st_mtime > 0)
        os.utime(record, (0, 0))
        passed += seconds

    Flusher(run.target, gate).step()
    assert found == shown  # once before the first file, and before each file


def _awaiting(run: Run, *others: str) -> list[str]:
    """Adds files of other ranks, of 4 bytes each, to a commit; returns the names of the save's own files."""
    (entry,) = run.queue.entries()
    record = run.queue.record(entry)
    assert record is not None and record.commit is not None
    commit = msgspec.structs.replace(record.commit, files=record.commit.files | dict.fromkeys(others, 4))
    (run.queue.folder / entry.name).write_bytes(msgspec.json.encode(msgspec.structs.replace(record, commit=commit)))
    return list(record.files)


def test_metadata_waits_for_the_files_of_all_ranks(tmp_path: Path) -> None:
    """Without a rank's file nothing is committed. At the timeout the save is given up, naming that rank."""
    run = Run(tmp_path)
    run.save_unflushed(1)
    (name,) = _awaiting(run, f"__3_0_{'a' * 32}.tensors")
    target = run.target.__class__(str(run.local), str(run.remote), {}, 0.2)
    flusher = Flusher(target)
    assert flusher.step() is not None
    assert (run.states(), os.listdir(run.remote / "step-1")) == (["sent"], [name])
    deadline = time.monotonic() + 30
    while flusher.step() is not None:
        assert time.monotonic() < deadline
    assert run.states() in (["lost"], ["told"])  # by the thread of the writer that has saved
    assert (
        "is missing on the remote, and nothing has arrived there for 0.2 s"
        in run.queue.record(run.queue.entries()[0]).reason
    )  # type: ignore[union-attr]
    assert files_below(run.remote) == set()


def test_what_another_job_has_saved_since_stays(tmp_path: Path) -> None:
    """A checkpoint that is older than the one on the remote is given up."""
    run = Run(tmp_path)
    run.save_unflushed(1, place="latest")
    dcp.save({"step": 7}, storage_writer=TensorizerStorageWriter(run.remote / "latest"))
    assert Flusher(run.target).step() is None
    assert run.states() in (["lost"], ["told"])
    state = {"step": 0}
    dcp.load(state, checkpoint_id=run.remote / "latest", storage_reader=TensorizerStorageReader(run.remote / "latest"))
    assert state == {"step": 7}
    assert {path.parent.name for path in run.local.rglob("*") if path.is_file()} == {".flush"}


def test_what_a_dead_save_has_left_is_removed(tmp_path: Path) -> None:
    """The files of a dead save's record are removed, and those of a living save stay."""
    run = Run(tmp_path)
    (run.local / "step-1").mkdir(parents=True)
    ids = ["a" * 32, "b" * 32]
    for name in ids:
        (run.local / "step-1" / f"__0_0_{name}.tensors").write_bytes(b"half")
    dead, living = (run.queue.begin(FlushRecord(run.target.name, "step-1", 0, name)) for name in ids)
    dead._unlock()
    assert Flusher(run.target).step() is None
    assert os.listdir(run.local / "step-1") == [f"__0_0_{ids[1]}.tensors"]
    assert run.states() == ["writing"]
    living.abort()
    assert run.states() == []


def test_a_save_that_dies_before_it_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save creates its record before its directory, and a record without a directory is removed."""
    run = Run(tmp_path)

    def die(*args: object) -> None:
        raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr(Queue, "begin", die)
        with quietly(), pytest.raises(CheckpointException):
            run.save_unflushed(1)
    assert not (run.local / "step-1").exists()
    run.queue.begin(FlushRecord(run.target.name, "step-1", 0, "a" * 32))._unlock()
    assert Flusher(run.target).step() is None
    assert (run.states(), (run.local / "step-1").exists()) == ([], False)


def test_a_remote_that_is_full_at_the_commit_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused commit is retried, and both copies of the data stay."""
    run = Run(tmp_path)
    run.save_unflushed(1)
    put = LocalStorage.put

    def full(self: LocalStorage, name: str, *args: Any, **options: Any) -> None:
        if name == ".metadata":
            raise Refused("No space left on device")
        put(self, name, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "put", full)
        assert Flusher(run.target).step() is not None
    assert run.states() == ["sent"]
    assert Flusher(run.target).step() is None
    assert run.load("step-1") == 1


def test_a_commit_that_is_refused_though_it_was_carried_out_is_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a refused commit was carried out, its metadata counts as its own, and both copies of the data stay."""
    run = Run(tmp_path)
    run.save_unflushed(1, overwrite=False)
    put = LocalStorage.put

    def put_and_refuse(self: LocalStorage, name: str, *args: Any, **options: Any) -> None:
        put(self, name, *args, **options)
        if name == ".metadata":
            raise Refused("403")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "put", put_and_refuse)
        assert Flusher(run.target).step() is None
    assert run.load("step-1") == 1
    assert (run.remote / "step-1" / ".metadata").exists()


def test_an_outage_does_not_count_as_a_wait_for_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an outage of hours, the other ranks get the whole timeout to send their files."""
    run = Run(tmp_path)
    run.save_unflushed(1)
    missing_files, other = flusher_module.missing_files, {f"__3_0_{'a' * 32}.tensors"}

    def missing(remote: Storage, names: set[str], sizes: dict[str, int]) -> set[str]:
        return missing_files(remote, names - other, sizes) or other

    monkeypatch.setattr(flusher_module, "missing_files", lambda remote, names, sizes: missing(remote, {*names}, sizes))
    flusher = Flusher(run.target)
    assert flusher.step() is not None
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 7200)
    assert flusher.step() is not None
    assert run.states() == ["sent"]


def test_all_files_are_there_when_they_are_committed(tmp_path: Path) -> None:
    """A file that disappears before the last file arrives prevents the commit."""
    run = Run(tmp_path)
    run.save_unflushed(1)
    first, last = (f"__{rank}_0_{'a' * 32}.tensors" for rank in (3, 4))
    _awaiting(run, first, last)
    remote = run.remote / "step-1"
    remote.mkdir(parents=True)
    (remote / first).write_bytes(b"data")
    flusher = Flusher(run.target)
    assert flusher.step() is not None
    (remote / first).rename(remote / last)
    assert flusher.step() is not None
    assert (run.states(), (remote / ".metadata").exists()) == (["sent"], False)
    (remote / first).write_bytes(b"data")
    assert flusher.step() is None
    assert (remote / ".metadata").exists()


def _sent(run: Run, *writers: str) -> list[FlushEntry]:
    """Returns parts of rank 1's saves that were sent long ago."""
    entries = []
    for number, writer in enumerate(writers):
        name, place = f"__1_0_{number:032}.tensors", f"step-{number}"
        for folder in (run.local, run.remote):
            (folder / place).mkdir(parents=True)
            (folder / place / name).write_bytes(b"data")
        writing = run.queue.begin(FlushRecord(run.target.name, place, 1, f"{number:032}", writer))
        writing.written({name: 4}, sync=False)
        entries.append(run.queue.move(writing.entry, SENT))
        os.utime(run.queue.folder / entries[-1].name, (0, 0))
    return entries


@pytest.mark.parametrize(("later", "left"), [("a", {"step-1"}), ("b", {"step-0", "step-1"})], ids=["same", "other"])
def test_what_another_writer_may_commit_stays_on_the_remote(tmp_path: Path, later: str, left: set[str]) -> None:
    """A later save of the same writer proves that the files are not needed. One of another writer does not."""
    run = Run(tmp_path)
    run.queue.move(_sent(run, "a", later)[1], REMOTE)
    assert Flusher(run.target).step() is None
    assert {path.parent.name for path in run.remote.rglob("*.tensors")} == left
    assert {path.parent.name for path in run.local.rglob("*.tensors")} == {"step-1"}
    assert run.states() == ["remote"]


def test_what_a_rank_has_left_that_is_not_there_any_more(tmp_path: Path) -> None:
    """If the job continues with fewer ranks, a later save of another rank is proof."""
    run = Run(tmp_path)
    _sent(run, "a")
    writing = run.queue.begin(FlushRecord(run.target.name, "step-9", 0, "e" * 32, "b"))
    writing.written({}, sync=False)
    run.queue.move(writing.entry, REMOTE)
    assert Flusher(run.target).step() is None
    assert run.states() == ["remote"]
    assert {path.parent.name for path in run.local.rglob("*.tensors")} == set()


def test_a_save_that_arrives_during_the_look_is_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later save that arrives during the check is no proof, because the metadata was read before."""
    run = Run(tmp_path)
    later = _sent(run, "a", "a")[1:]

    def named(remote: Storage, name: str) -> set[str]:
        while later:
            run.queue.move(later.pop(), REMOTE)
        return set()

    monkeypatch.setattr(flusher_module, "named_files", named)
    Flusher(run.target).step()
    assert run.states() == ["sent", "remote"]


@pytest.mark.parametrize("look", range(1, 9))
def test_a_save_that_is_committed_during_a_look_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: int
) -> None:
    """The coordinator may commit on this node after the flush has listed the records, each time that it lists them."""
    run = Run(tmp_path)
    names = {rank: f"__{rank}_0_{str(rank) * 32}.tensors" for rank in (0, 1)}
    for name in names.values():
        run.target.folder("step-1").mkdir(parents=True, exist_ok=True)
        (run.target.folder("step-1") / name).write_bytes(b"data")
    first, second = (run.queue.begin(FlushRecord(run.target.name, "step-1", r, str(r) * 32)) for r in (0, 1))
    second.written({names[1]: 4}, sync=False)
    looks, entries = itertools.count(1), Queue.entries

    def listed(queue: Queue) -> list[FlushEntry]:
        found = entries(queue)
        if next(looks) == look:
            first.written({names[0]: 4}, sync=False, commit=Commit(".metadata", dict.fromkeys(names.values(), 4), True))
        return found

    monkeypatch.setattr(Queue, "entries", listed)
    Flusher(run.target).step()
    monkeypatch.undo()
    reasons = [record.reason for entry, record in run.queue.records() if entry.state not in (UNFLUSHED, SENT)]
    assert all(reason.endswith(".index is missing or damaged") for reason in reasons)  # the commit has no index


def test_a_part_of_a_save_that_is_given_up_is_given_up(tmp_path: Path) -> None:
    """On the coordinator's node, the parts of other ranks are given up with the coordinator's reason."""
    run = Run(tmp_path)
    (entry,) = _sent(run, "a")
    files = {f"__1_0_{0:032}.tensors": 4}
    writing = run.queue.begin(FlushRecord(run.target.name, "step-0", 0, "c" * 32, "a"))
    writing.written({}, sync=False, commit=Commit(".metadata", files, True))
    record = run.queue.record(writing.entry)
    assert record is not None
    run.queue.give_up(writing.entry, record, "no reason")
    assert Flusher(run.target).step() is None
    assert "lost" in run.states()
    assert run.queue.record(entry).reason == "no reason"  # type: ignore[union-attr]
    assert list(run.local.rglob("*.tensors")) == []


def test_room_is_made_without_forgetting_what_has_just_arrived(tmp_path: Path) -> None:
    """Freeing space removes local copies and keeps their records, and a second call frees nothing."""
    run = Run(tmp_path)
    run.queue.move(_sent(run, "a")[0], REMOTE)
    assert [run.queue.free(), run.queue.free()] == [True, False]
    assert run.states() == ["remote"]
    assert list(run.local.rglob("*.tensors")) == []


def test_room_is_not_made_by_copies_that_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk refuses to remove the local copies, nothing is freed, so the save does not try that disk again."""
    run = Run(tmp_path)
    run.queue.move(_sent(run, "a")[0], REMOTE)

    def refuse(storage: LocalStorage, *names: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(LocalStorage, "remove", refuse)
    assert not run.queue.free()
    assert (run.states(), len(list(run.local.rglob("*.tensors")))) == (["remote"], 1)


def test_local_copies_go_before_an_arrival_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local copies, except of the newest checkpoint, are removed before the arrival is recorded."""
    run = Run(tmp_path)
    run.save_unflushed(1, 2)
    move, found = Queue.move, []

    def moved(queue: Queue, entry: FlushEntry, state: str) -> FlushEntry:
        if state == REMOTE:
            found.append({path.name for path in run.local.glob("step-*")})
        return move(queue, entry, state)

    monkeypatch.setattr(Queue, "move", moved)
    assert Flusher(run.target).step() is None
    assert found == [{"step-1", "step-2"}, {"step-2"}]


@pytest.mark.parametrize("suffix", ["tensors", "index"])
def test_what_is_gone_here_holds_nothing_up(tmp_path: Path, suffix: str) -> None:
    """A checkpoint without its local data or metadata is given up at once, and the next one arrives."""
    run = Run(tmp_path)
    run.save_unflushed(1, 2)
    first = run.queue.entries()[0]
    if suffix == "index":
        (run.queue.folder / f"{first.stem}.index").unlink()
    else:
        next((run.local / "step-1").iterdir()).write_bytes(b"short")
    assert Flusher(run.target).step() is None
    assert f".{suffix} is missing" in run.queue.record(first).reason  # type: ignore[union-attr]
    assert run.load("step-2") == 2
    assert files_below(run.remote / "step-1") == set()


def test_a_damaged_local_disk_is_given_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unreadable files are retried, and given up after the timeout, which a suspended job does not use up."""
    run = Run(tmp_path)
    run.save_unflushed(1)

    def damaged(storage: LocalStorage, name: str) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(LocalStorage, "open_uncached", damaged)
    flusher = Flusher(run.target)
    assert flusher.step() is not None
    assert run.states() == ["unflushed"]
    now, passed = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now() + passed)
    passed = 7200.0  # the job was suspended: nothing was tried meanwhile
    assert flusher.step() is not None
    assert run.states() == ["unflushed"]
    for _ in range(60):  # 10 s each: the longest time between two tries
        passed += 10.0
        flusher.step()
    assert run.states() in (["lost"], ["told"])


def test_a_clock_that_was_set_back_costs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that this queue has sent is replaced, whatever its time."""
    run = Run(tmp_path)
    run.save_unflushed(1, 2, place="latest")
    is_later = flush._is_later

    def ahead(there: Any, own: Any, earlier: Any) -> bool:
        return is_later(msgspec.structs.replace(there, saved_at=there.saved_at + 7200 * 10**9), own, earlier)

    monkeypatch.setattr(flush, "_is_later", ahead)
    assert Flusher(run.target).step() is None
    assert run.load("latest") == 2


def _saved_by_ranks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves twice to one path by two ranks of a node, each with its own metadata, without the remote."""
    run.cut()
    set_up, writer = TensorizerStorageWriter.set_up_storage_writer, run.writer(max_unflushed=9)
    for value, rank in itertools.product((1, 2), (0, 1)):
        with monkeypatch.context() as patch:
            options = {"rank": rank, "use_collectives": False}
            patch.setattr(
                TensorizerStorageWriter,
                "set_up_storage_writer",
                lambda self, *_, o=options, **__: set_up(self, True, **o),
            )
            dcp.save(state_of(value), storage_writer=writer, checkpoint_id=run.remote / "a", use_collectives=False)
    writer.close(0.5)
    run.mend()


@pytest.mark.parametrize("dies", [False, True], ids=["lives", "dies"])
def test_ranks_that_commit_alone_keep_each_others_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """At one path each rank's save replaces only its own earlier save, also in a repeated flush."""
    run = Run(tmp_path)
    _saved_by_ranks(run, monkeypatch)
    newest = [name for _, record in run.queue.records()[2:] for name in record.files]
    move, dead = Queue.move, set[str]()

    def moved(queue: Queue, entry: FlushEntry, state: str) -> FlushEntry:
        if dies and state == REMOTE and entry.stem not in dead:
            dead.add(entry.stem)
            raise _Killed
        return move(queue, entry, state)

    monkeypatch.setattr(Queue, "move", moved)
    for _ in range(4 if dies else 0):
        with pytest.raises(_Killed):
            Flusher(run.target).step()
    assert Flusher(run.target).step() is None
    assert sorted(os.listdir(run.remote / "a")) == sorted(["__0.metadata", "__1.metadata", *newest])
    assert sorted(os.listdir(run.local / "a")) == sorted(newest)
