"""Saves of one process: paths, lifetime, order, failures."""

import functools
import gc
import logging
import os
import pickle
import re
import resource
import shutil
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tensorizer import EncryptionParams
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.utils._python_dispatch import TorchDispatchMode

from dcp_tensorizer import SaveLimits, StagingError, TensorizerStorageReader, TensorizerStorageWriter, WriteError
from dcp_tensorizer._saving.save import SaveDescription
from dcp_tensorizer._saving.writer_client import WriterClient
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer.writer import DescribedStager

from ..lab.processes import kill, memory_files, open_descriptors, writer_process
from ..lab.waiting import WAIT, Gate, HeldPlanner, save_thread

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state_of(value):
    return {"w": torch.full((2000,), float(value)), "step": value}


def loaded(path):
    state = {"w": torch.zeros(2000), "step": None}
    dcp.load(state, storage_reader=TensorizerStorageReader(path))
    assert len(set(state["w"].tolist())) == 1
    return state["w"][0].item(), state["step"]


def cause(caught):
    return caught.value.failures[0][0]


def test_checkpoint_id_holds_for_its_save_only(tmp_path):
    """A save's checkpoint_id overrides the writer's path for that save only."""
    with TensorizerStorageWriter(tmp_path / "path") as writer:
        dcp.async_save(state_of(1), storage_writer=writer).result()
        dcp.async_save(state_of(2), storage_writer=writer, checkpoint_id=tmp_path / "other").result()
        assert loaded(tmp_path / "path") == (1.0, 1)
        dcp.async_save(state_of(3), storage_writer=writer).result()
    assert loaded(tmp_path / "path") == (3.0, 3)
    assert loaded(tmp_path / "other") == (2.0, 2)


def test_what_is_said_of_a_save_is_said_of_no_other(tmp_path):
    """An error in a save's description fails that save only, and an unused description has no effect."""
    refused = SaveDescription(error=StagingError("the state could not be collected"))
    with TensorizerStorageWriter(tmp_path) as writer:
        stager = DescribedStager(writer, refused)
        dcp.async_save(state_of(1), storage_writer=writer).result()
        with pytest.raises(CheckpointException) as caught:
            dcp.async_save(state_of(2), storage_writer=writer, async_stager=stager).result()
        assert "the state could not be collected" in str(cause(caught))
        assert loaded(tmp_path) == (1.0, 1)
        stager.close()
        dcp.async_save(state_of(3), storage_writer=writer).result()
    assert loaded(tmp_path) == (3.0, 3)


def test_what_torchs_storage_says_of_itself(tmp_path):
    """The version of DCP's metadata, and the ids of saves, loads and checkpoints, are those of torch's storage."""
    theirs, their_reader = FileSystemWriter(tmp_path / "theirs"), FileSystemReader(tmp_path / "theirs")
    dcp.save(state_of(1), storage_writer=theirs)
    expected = their_reader.read_metadata()
    with TensorizerStorageWriter(tmp_path / "ours") as ours:
        first = ours.save_id
        dcp.save(state_of(1), storage_writer=ours)
        assert ours.save_id == first
        reader = TensorizerStorageReader(tmp_path / "ours")
        metadata = reader.read_metadata()
        dcp.async_save(state_of(2), storage_writer=ours, checkpoint_id=tmp_path / "second").result()
        assert ours.save_id not in ("", first)
        assert ours.save_id == ours.last_report.save_id
        assert TensorizerStorageReader(tmp_path / "second").read_metadata().storage_meta.save_id == ours.save_id
    assert metadata.version == expected.version is not None
    assert (expected.storage_meta.save_id, expected.storage_meta.load_id) == (theirs.save_id, their_reader.load_id)
    assert (metadata.storage_meta.save_id, metadata.storage_meta.load_id) == (first, reader.load_id)
    for each in (reader, their_reader):
        loads = [each.load_id]
        for path in (None, tmp_path / "second"):
            each.reset(path)
            loads.append(each.load_id)
        assert len(set(loads)) == 3


class AskingPlanner(DefaultSavePlanner):
    """A planner that calls `storage_meta` again, after DCP has called it."""

    def __init__(self, writer):
        super().__init__()
        self.writer, self.told, self.asked = writer, [], []

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        self.told.append(storage_meta)
        self.asked.append(self.writer.storage_meta())
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self):
        self.writer.storage_meta()
        return super().create_local_plan()


def test_to_ask_where_a_save_goes_begins_none(tmp_path, caplog):
    """Calls of `storage_meta` alone return the save's path and id, and begin no save."""
    with TensorizerStorageWriter(tmp_path / "a") as writer:
        planner = AskingPlanner(writer)
        metas, ids = [], []
        for step, save in enumerate((dcp.save, dcp.async_save, dcp.save)):
            metas += [writer.storage_meta() for _ in range(3)]
            assert metas[-3:] == [metas[-1]] * 3
            assert step or not (tmp_path / "a").exists()
            done = save(state_of(step), storage_writer=writer, planner=planner)
            ids.append((done if step != 1 else done.result()).storage_meta.save_id)
            assert loaded(tmp_path / "a") == (float(step), step)
        assert planner.told == planner.asked == metas[::3]
        assert [meta.save_id for meta in metas[::3]] == ids
        assert len(set(ids)) == 3
        assert {meta.checkpoint_id for meta in metas} == {str(tmp_path / "a")}
        writer.reset("memory://place")
        assert writer.storage_meta().checkpoint_id == "memory://place"
    assert TensorizerStorageWriter().storage_meta().checkpoint_id is None
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_save_goes_on_to_its_own_path_after_one_whose_planner_has_failed(tmp_path):
    """After a planner failed before `set_up_storage_writer`, the next save has its own path and state."""

    class Failing(DefaultSavePlanner):
        def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
            raise RuntimeError("no plan")

    with TensorizerStorageWriter() as writer:
        for state in (state_of(1), writer.stage(state_of(1))):
            with pytest.raises(CheckpointException, match="no plan"):
                dcp.save(state, storage_writer=writer, checkpoint_id=tmp_path / "a", planner=Failing())
        del state
        dcp.save(state_of(2), storage_writer=writer, checkpoint_id=tmp_path / "b")
    assert loaded(tmp_path / "b") == (2.0, 2)
    assert not (tmp_path / "a").exists()


def test_overlapping_saves_keep_their_own_values(tmp_path):
    """Saves of a state that changes in place, with dropped futures, each have their own values."""
    state = state_of(0)
    with TensorizerStorageWriter() as writer:
        for step in range(8):
            state["w"].fill_(step)
            state["step"] = step
            dcp.async_save(state, storage_writer=writer, checkpoint_id=tmp_path / str(step))
    assert [loaded(tmp_path / str(step)) for step in range(8)] == [(float(s), s) for s in range(8)]


class NotingPlanner(HeldPlanner):
    """A planner that records Python's switch interval, and fails on request."""

    def __init__(self, gate, fails=False):
        super().__init__(gate)
        self.fails = fails
        self.noted = []

    def create_local_plan(self):
        self.noted.append(sys.getswitchinterval())
        plan = super().create_local_plan()
        if self.fails:
            raise RuntimeError("no plan")
        return plan


@pytest.mark.parametrize("fails", [False, True])
def test_threads_take_turns_more_often_while_a_save_runs(tmp_path, fails):
    """The switch interval is restored after a failed save, and is not changed by a synchronous save."""
    before, threads, gate = sys.getswitchinterval(), set(threading.enumerate()), Gate()
    planner, synchronous = NotingPlanner(gate, fails), NotingPlanner(gate)
    with TensorizerStorageWriter(tmp_path) as writer:
        future = dcp.async_save(state_of(1), storage_writer=writer, planner=planner)
        thread = save_thread(threads)
        gate.open()
        error = future.exception()
        thread.join(WAIT)
        assert (type(error), planner.noted) == (CheckpointException if fails else type(None), [0.0005])
        assert sys.getswitchinterval() == before
        dcp.save(state_of(2), storage_writer=writer, planner=synchronous)
        assert synchronous.noted == [before]


def test_an_overwrite_removes_what_it_replaced(tmp_path):
    """After three saves to one path, only the last data file and its metadata are left."""
    with TensorizerStorageWriter(tmp_path) as writer:
        for step in range(3):
            dcp.async_save(state_of(step), storage_writer=writer).result()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".tensors"]
    assert loaded(tmp_path) == (2.0, 2)


def test_overwrite_can_be_forbidden(tmp_path):
    """overwrite=False refuses a path that holds a checkpoint, which stays unchanged."""
    with TensorizerStorageWriter(tmp_path, overwrite=False) as writer:
        dcp.save(state_of(1), storage_writer=writer)
        with pytest.raises(CheckpointException) as caught:
            dcp.save(state_of(2), storage_writer=writer)
    assert isinstance(cause(caught), WriteError)
    assert str(tmp_path) in str(cause(caught))
    assert loaded(tmp_path) == (1.0, 1)


class Halving(DefaultSavePlanner):
    """A planner that replaces some tensors by others."""

    def transform_object(self, write_item, value):
        key = write_item.index.fqn
        if key == "w":
            return (value / 2).to(torch.float16)
        return value.conj() if key == "z" else super().transform_object(write_item, value)


def test_what_the_planner_makes_is_saved(tmp_path):
    """Tensors outside the staging buffer, and lazy views of it, are saved with their values."""
    with TensorizerStorageWriter(tmp_path) as writer:
        for value in (8.0, 6.0):  # the second save uses the memory of the first
            state = {"w": torch.full((1000,), value), "z": torch.full((5,), 1 + 2j), "plain": torch.ones(3)}
            dcp.async_save(state, storage_writer=writer, planner=Halving()).result()
            target = {"w": torch.zeros(1000, dtype=torch.float16), "z": torch.zeros(5, dtype=torch.complex64)}
            target["plain"] = torch.zeros(3)
            dcp.load(target, storage_reader=TensorizerStorageReader(tmp_path))
            assert target["w"].tolist() == [value / 2] * 1000
            assert target["z"].tolist() == [1 - 2j] * 5
            assert target["plain"].tolist() == [1.0] * 3


def test_use_after_close(tmp_path):
    """A closed writer refuses asynchronous and synchronous saves with an error, and can be closed again."""
    writer = TensorizerStorageWriter(tmp_path)
    writer.close()
    writer.close()
    with pytest.raises(CheckpointException) as caught:
        dcp.async_save(state_of(1), storage_writer=writer).result()
    assert isinstance(cause(caught), StagingError)
    assert "closed" in str(cause(caught))
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state_of(1), storage_writer=writer)
    assert "closed" in str(cause(caught))
    assert list(tmp_path.iterdir()) == []


def test_closing_gives_up_a_save_that_hangs(tmp_path):
    """At the timeout of `close`, the save in progress fails with the reason, and no process is started again."""
    others = set(psutil.Process().children())  # what multiprocessing keeps for the tests before this one
    writer = TensorizerStorageWriter(tmp_path)
    dcp.async_save(state_of(1), storage_writer=writer).result()
    writer_process().suspend()
    future = dcp.async_save(state_of(2), storage_writer=writer)
    started = time.monotonic()
    writer.close(timeout=0.2)
    assert time.monotonic() - started < 2.0  # of 0.2; a process in the middle of a write gets 5 s otherwise
    with pytest.raises(CheckpointException) as caught:
        future.result(30)
    assert isinstance(cause(caught), WriteError)
    assert str(tmp_path) in str(cause(caught))
    assert set(psutil.Process().children()) == others
    assert loaded(tmp_path) == (1.0, 1)


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), -1, "3"])
def test_closing_with_a_timeout_that_is_none(tmp_path, timeout):
    """An invalid timeout raises an error with the allowed values, and the writer stays open."""
    with TensorizerStorageWriter(tmp_path) as writer:
        with pytest.raises((TypeError, ValueError), match=r"^timeout.*(at least 0 seconds|a number of seconds)"):
            writer.close(timeout=timeout)
        dcp.async_save(state_of(1), storage_writer=writer).result()
    assert loaded(tmp_path) == (1.0, 1)


@pytest.mark.parametrize("name", [".metadata", "data"])
def test_a_fifo_in_the_place_of_a_file(tmp_path, name):
    """A FIFO fails saves and loads with an error that names it, except in place of a replaced data file."""
    with TensorizerStorageWriter(tmp_path) as writer:
        dcp.async_save(state_of(1), storage_writer=writer).result()
        path = tmp_path / name if name == ".metadata" else next(tmp_path.glob("*.tensors"))
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(CheckpointException) as caught:
            loaded(tmp_path)
        assert f"cannot read {path}: it is a FIFO, not a regular file" in str(cause(caught))
        future = dcp.async_save(state_of(2), storage_writer=writer)
        if name == "data":
            future.result()
            assert loaded(tmp_path) == (2.0, 2)
            return
        with pytest.raises(CheckpointException) as caught:
            future.result()
        assert f"cannot write {path}: it is a FIFO, not a regular file. Remove it" in str(cause(caught))


class There(os.PathLike):
    def __fspath__(self):
        return "path-like"


@pytest.mark.promise("working-directory", reason="a path of a writer, and a checkpoint_id that is staged earlier")
@pytest.mark.parametrize("path", ["text", Path("path"), There(), "~/home", "file://url"])
def test_relative_paths_are_of_the_directory_where_they_were_given(tmp_path, monkeypatch, path):
    """Paths are relative to the directory at construction, and a checkpoint_id to that at staging."""
    for name in "abc":
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    monkeypatch.setenv("HOME", str(tmp_path / "a"))
    name = os.fspath(path).removeprefix("file://").removeprefix("~/")
    with TensorizerStorageWriter(path) as writer:
        monkeypatch.chdir(tmp_path / "b")
        dcp.async_save(state_of(1), storage_writer=writer).result()
        writer_process().suspend()
        first = dcp.async_save(state_of(2), storage_writer=writer, checkpoint_id="ids")
        monkeypatch.chdir(tmp_path / "c")
        writer_process().resume()
        first.result()
        dcp.save(state_of(3), storage_writer=writer, checkpoint_id="ids")
        monkeypatch.chdir(tmp_path / "a")
        reader = TensorizerStorageReader(path)
        monkeypatch.chdir(tmp_path)
        state = state_of(0)
        dcp.load(state, storage_reader=reader)
    assert state["step"] == 1
    assert [loaded(tmp_path / place) for place in (f"a/{name}", "b/ids", "c/ids")] == [(1.0, 1), (2.0, 2), (3.0, 3)]
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]


@pytest.mark.promise("working-directory")
def test_the_working_directory_may_change_before_the_save_begins(tmp_path, monkeypatch):
    """A relative checkpoint_id, which DCP passes on the save's thread, belongs to the directory at staging.

    The save works even if the working directory has been removed since.
    """
    gate, reset = Gate(), TensorizerStorageWriter.reset

    def late(writer, checkpoint_id=None):
        gate.pass_through()
        reset(writer, checkpoint_id)

    monkeypatch.setattr(TensorizerStorageWriter, "reset", late)
    for name in "ab":
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with TensorizerStorageWriter() as writer:
        future = dcp.async_save(state_of(1), storage_writer=writer, checkpoint_id="x")
        gate.wait_reached()
        monkeypatch.chdir(tmp_path / "b")
        (tmp_path / "b").rmdir()
        gate.open()
        future.result()
        dcp.async_save(state_of(2), storage_writer=writer, checkpoint_id=tmp_path / "y").result()
    monkeypatch.chdir(tmp_path)
    assert loaded(tmp_path / "y") == (2.0, 2)
    assert loaded(tmp_path / "a" / "x") == (1.0, 1)


def modes(folder):
    """Returns the modes and groups of the files of a checkpoint."""
    return {(oct(file.stat().st_mode & 0o777), file.stat().st_gid) for file in os.scandir(folder)}


def test_umask_and_directory_are_those_of_the_save(tmp_path, monkeypatch):
    """The writer process, also after a restart, has the umask and directory of the moment of staging."""
    before = os.umask(0o077)
    try:
        with TensorizerStorageWriter() as writer:
            dcp.async_save(state_of(1), storage_writer=writer, checkpoint_id=tmp_path / "1").result()
            os.umask(0o027)
            monkeypatch.chdir(tmp_path)
            dcp.async_save(state_of(2), storage_writer=writer, checkpoint_id=tmp_path / "2").result()
            assert writer_process().cwd() == str(tmp_path)
            first = writer_process()
            kill(first)
            os.umask(0o022)
            dcp.async_save(state_of(3), storage_writer=writer, checkpoint_id=tmp_path / "3").result()
            assert writer_process() != first
    finally:
        os.umask(before)
    found = [{mode for mode, _group in modes(tmp_path / name)} for name in "123"]
    assert found == [{"0o600"}, {"0o640"}, {"0o644"}]


def test_all_files_have_the_umask_of_the_moment_that_asked(tmp_path):
    """Files that the trainer writes also have the umask of the moment of staging."""
    before = os.umask(0o027)
    try:
        with TensorizerStorageWriter() as writer:
            dcp.async_save(state_of(1), storage_writer=writer, checkpoint_id=tmp_path / "0").result()
            process = writer_process()
            process.suspend()
            saving = dcp.async_save(state_of(1), storage_writer=writer, checkpoint_id=tmp_path / "1")
            os.umask(0o077)
            process.resume()
            saving.result()
    finally:
        os.umask(before)
    assert {mode for mode, _group in modes(tmp_path / "1")} == {"0o640"}
    assert stat.S_IMODE((tmp_path / "1").stat().st_mode) == 0o750


def test_nowhere_to_save():
    """Without a path and a checkpoint_id, the error names both."""
    with TensorizerStorageWriter() as writer, pytest.raises(CheckpointException) as caught:
        dcp.async_save(state_of(1), storage_writer=writer).result()
    assert isinstance(cause(caught), WriteError)
    assert "checkpoint_id" in str(cause(caught))


def test_an_error_in_staging_names_the_key(tmp_path):
    """A value that cannot be staged fails the save, not `async_save`, and the next save succeeds."""
    with TensorizerStorageWriter(tmp_path) as writer:
        future = dcp.async_save({"bad": {"lock": threading.Lock()}}, storage_writer=writer)
        with pytest.raises(CheckpointException) as caught:
            future.result()
        assert isinstance(cause(caught), StagingError)
        assert "'bad.lock'" in str(cause(caught))
        dcp.async_save(state_of(2), storage_writer=writer).result()
    assert loaded(tmp_path) == (2.0, 2)


@pytest.mark.parametrize("limit", [3, None])
def test_failures_in_a_row_end_a_job_that_drops_its_futures(tmp_path, limit):
    """After three failed saves `async_save` raises, and the next one saves again; without a limit it never raises."""
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with TensorizerStorageWriter(blocked / "checkpoint", limits=SaveLimits(max_consecutive_failures=limit)) as writer:
        for _ in range(3):
            future = dcp.async_save(state_of(1), storage_writer=writer)
            with pytest.raises(CheckpointException):
                future.result()
        if limit is None:
            with pytest.raises(CheckpointException):
                dcp.async_save(state_of(1), storage_writer=writer).result()
        else:
            with pytest.raises(WriteError, match="3 saves in a row"):
                dcp.async_save(state_of(1), storage_writer=writer)
            with pytest.raises(CheckpointException) as caught:  # the next one is tried again, and fails
                dcp.async_save(state_of(1), storage_writer=writer).result()
            assert "cannot create" in str(cause(caught))
            with pytest.raises(WriteError, match="4 saves in a row"):
                dcp.async_save(state_of(1), storage_writer=writer)
            blocked.unlink()
            dcp.async_save(state_of(2), storage_writer=writer).result()
            assert loaded(blocked / "checkpoint") == (2.0, 2)
    gc.collect()


class Zeros(TorchDispatchMode):
    """A mode whose results are zeros, as those of `FakeTensorMode` become when they are written."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return torch.zeros_like(result) if isinstance(result, torch.Tensor) else result


@pytest.mark.parametrize("mode", [lambda: FakeTensorMode(allow_non_fake_inputs=True), FakeTensorMode, Zeros])
@pytest.mark.parametrize("options", [None, {}, {"overlap_staging": True, "staging": "shared"}], ids=str)
def test_a_save_inside_a_dispatch_mode_stores_the_values(tmp_path, mode, options):
    """Tensors have their values in the checkpoint, not what the mode makes of them, also in objects and parameters."""
    state = {"view": torch.rand(6, 8)[:, ::2], "shared": torch.rand(9).share_memory_(), "pair": (torch.rand(3), 4)}
    state["parameter"] = torch.nn.Parameter(torch.rand(5).bfloat16())
    with TensorizerStorageWriter(tmp_path, **(options or {})) as writer:
        if options is None and mode is FakeTensorMode:  # without `allow_non_fake_inputs`, DCP's planner itself fails
            with mode(), pytest.raises(CheckpointException, match="Please convert all Tensors to FakeTensors"):
                dcp.save(state, storage_writer=writer)
            return
        with mode():
            saving = (dcp.save if options is None else dcp.async_save)(state, storage_writer=writer)
        if options is not None:
            getattr(saving, "upload_completion", saving).result()
    target = {key: torch.zeros_like(value) if key != "pair" else None for key, value in state.items()}
    dcp.load(target, storage_reader=TensorizerStorageReader(tmp_path))
    assert target.pop("pair")[0].tolist() == state.pop("pair")[0].tolist()
    assert {key: value.tolist() for key, value in target.items()} == {key: v.tolist() for key, v in state.items()}


def test_a_copy_is_a_writer_of_its_own(tmp_path):
    """A pickled writer, as `mp.spawn` sends one to each rank, saves like the original."""
    with TensorizerStorageWriter(tmp_path) as writer:
        copied = pickle.loads(pickle.dumps(writer))
    with copied:
        dcp.async_save(state_of(4), storage_writer=copied).result()
    assert loaded(tmp_path) == (4.0, 4)


def test_a_copy_of_a_closed_writer_is_closed(tmp_path):
    """A copy of a closed writer refuses saves."""
    writer = TensorizerStorageWriter(tmp_path)
    writer.close()
    copied = pickle.loads(pickle.dumps(writer))
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state_of(4), storage_writer=copied)
    assert "closed" in str(cause(caught))


def test_the_repr_shows_path_and_options_but_no_secrets():
    """The ``repr`` has no credentials of the URL, no values of storage options, and no key."""
    secret = "correct-horse-battery"
    with TensorizerStorageWriter(
        f"s3://user:hunter2@bucket/run?sig={secret}",
        storage_options={"secret": secret, "anon": False},
        encryption=EncryptionParams(b"0123456789abcdef" * 2),
        on_report=functools.partial(print, "a token of the user's"),
    ) as writer:
        shown = repr(writer)
    assert shown.startswith("TensorizerStorageWriter('s3://bucket/run?sig=***', storage_options=['anon', 'secret'], ")
    assert "cache_staged_state_dict=True, " in shown
    assert "encryption=True, limits=SaveLimits(" in shown
    assert not [word for word in (secret, "hunter2", "token", "abcdef") if word in shown]
    with TensorizerStorageWriter() as writer:
        assert repr(writer).startswith("TensorizerStorageWriter(None, ")


def test_prewarm_makes_the_buffer_that_the_first_save_uses(tmp_path):
    """After `prewarm`, the first save and another `prewarm` allocate no memory."""
    before, state = memory_files(), {"w": torch.ones(1000)}
    with TensorizerStorageWriter(tmp_path) as writer:
        writer.prewarm(state)
        wait_prewarmed()
        (buffer,) = memory_files() - before
        dcp.async_save(state, storage_writer=writer).result()
        assert memory_files() - before == {buffer}
        writer.saver.engine.saves.wait_turn(writer.saver.stager)
        writer.prewarm(state)  # takes back the buffer of the save, which is over
        wait_prewarmed()
        assert memory_files() - before == {buffer}


def test_prewarm_asks_stateful_values(tmp_path):
    """`prewarm` replaces a Stateful value by its state, as `async_save` does."""

    class App:
        def state_dict(self):
            return {"w": torch.ones(1_000_000)}

        def load_state_dict(self, state_dict):
            raise AssertionError("nothing is loaded")

    before = memory_files()
    with TensorizerStorageWriter(tmp_path) as writer:
        writer.prewarm({"app": App()})
        wait_prewarmed()
        (buffer,) = memory_files() - before
        dcp.async_save({"w": torch.ones(1_000_000)}, storage_writer=writer).result()
        assert memory_files() - before == {buffer}


def wait_prewarmed():
    """Waits until `prewarm` has allocated its memory in the background."""
    for thread in threading.enumerate():
        if thread.name == "prewarm":
            thread.join()


def test_memory_urls_are_written_in_this_process():
    """The process that saved a checkpoint to `memory://` can load it."""
    with TensorizerStorageWriter("memory://unit/checkpoint") as writer:
        dcp.async_save(state_of(6), storage_writer=writer).result()
    assert loaded("memory://unit/checkpoint") == (6.0, 6)


def test_memory_of_this_process_behind_a_cache():
    """Also behind a cache, `memory://` is this process's memory, so this process writes the staged state."""
    url = "simplecache::memory://unit/cached"
    with TensorizerStorageWriter(url) as writer:
        dcp.async_save(state_of(7), storage_writer=writer).result()
    assert loaded(url) == (7.0, 7)


def test_a_url_that_is_only_read():
    """A read-only URL fails the constructor; as a checkpoint_id, it fails its save."""
    with pytest.raises(WriteError, match="cannot write to http://host/run: http URLs are read-only"):
        TensorizerStorageWriter("http://host/run")
    with TensorizerStorageWriter() as writer, pytest.raises(CheckpointException) as caught:
        dcp.async_save(state_of(1), storage_writer=writer, checkpoint_id="https://host/run").result()
    assert str(cause(caught)).startswith("cannot write to https://host/run: https URLs are read-only")


def test_without_a_cache_a_save_keeps_no_memory(tmp_path):
    """Without the cache, trainer and writer process free the buffer at the end of its save."""
    before = memory_files()
    with TensorizerStorageWriter(tmp_path, cache_staged_state_dict=False) as writer:
        for value in (1, 2):
            future = dcp.async_save(state_of(value), storage_writer=writer)
            future.result()
            writer.saver.engine.saves.wait_turn(writer.saver.stager)
            assert memory_files() == before
            maps = Path(f"/proc/{writer_process().pid}/maps").read_text()
            assert "memfd:dcp_tensorizer" not in maps
            assert loaded(tmp_path) == (float(value), value)


def test_saves_that_nobody_staged_do_not_clean_up_after_each_other(tmp_path, monkeypatch):
    """A synchronous save removes no files of another one that writes to the same path on another thread."""
    writing, go_on = threading.Event(), threading.Event()
    write = WriterClient.write

    def wait(*args):
        written = write(*args)
        if threading.current_thread().name == "first":
            writing.set()
            assert go_on.wait(30)
        return written

    monkeypatch.setattr(WriterClient, "write", wait)
    with TensorizerStorageWriter(tmp_path) as writer:
        first = threading.Thread(target=dcp.save, args=(state_of(1),), kwargs={"storage_writer": writer}, name="first")
        first.start()
        assert writing.wait(30)
        dcp.save(state_of(2), storage_writer=writer)
        assert loaded(tmp_path) == (2.0, 2)
        go_on.set()
        first.join()
        assert loaded(tmp_path) == (1.0, 1)
        dcp.save(state_of(3), storage_writer=writer)
    assert loaded(tmp_path) == (3.0, 3)
    assert len(list(tmp_path.iterdir())) == 2


def test_without_collectives_not_over_a_checkpoint_of_all_ranks(tmp_path):
    """A save without collectives is refused beside a checkpoint of all ranks, which loads would prefer."""
    with TensorizerStorageWriter(tmp_path) as writer:
        dcp.save(state_of(1), storage_writer=writer)
        with pytest.raises(WriteError, match=r"holds a checkpoint of all ranks.*or save to another path"):
            dcp.save(state_of(2), storage_writer=writer, use_collectives=False)
    assert loaded(tmp_path) == (1.0, 1)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.promise("no-writer-process")
def test_a_writer_process_that_cannot_be_started_again(tmp_path, monkeypatch, caplog):
    """If the process cannot be started again, the trainer writes the save, logs why, and later starts a process."""
    with TensorizerStorageWriter(tmp_path) as writer:
        dcp.async_save(state_of(1), storage_writer=writer).result()
        kill(writer_process())
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", refuse_to_start)
            dcp.async_save(state_of(2), storage_writer=writer).result()
        assert loaded(tmp_path) == (2.0, 2)
        assert "the writer process cannot be started: [Errno 11] Resource" in caplog.text
        assert "the trainer writes this save itself" in caplog.text
        dcp.async_save(state_of(3), storage_writer=writer).result()
        assert writer_process().is_running()
    assert loaded(tmp_path) == (3.0, 3)


@pytest.mark.promise("no-writer-process", reason="there is no interpreter, at the first save")
@pytest.mark.parametrize("executable", [None, "", "/nowhere/python", shutil.which("true"), "an application"])
def test_no_interpreter(tmp_path, monkeypatch, caplog, executable):
    """If sys.executable is no Python interpreter, each save logs that, and the trainer writes it."""
    if executable == "an application":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    else:
        monkeypatch.setattr(sys, "executable", executable)
    with TensorizerStorageWriter(tmp_path) as writer:
        for step in (1, 2):
            dcp.async_save(state_of(step), storage_writer=writer).result()
            assert loaded(tmp_path) == (step, step)
            assert writer.last_report.attempts == 1
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    begins = "rank 0: the trainer writes this save itself, because the writer process "
    assert all(text.startswith(begins) for text in warnings), warnings


# The program runs whatever its arguments are, and notes that it has begun.
APPLICATION = """
import os, stat, sys, warnings
sys.executable = sys.argv[1] + "/application"
with open(sys.argv[1] + "/starts", "a") as starts:
    starts.write("started\\n")
import torch
import torch.distributed.checkpoint as dcp
from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter
with TensorizerStorageWriter(sys.argv[1] + "/saved") as writer:
    dcp.async_save({"w": torch.ones(3000)}, storage_writer=writer).result()
target = {"w": torch.zeros(3000)}
dcp.load(target, storage_reader=TensorizerStorageReader(sys.argv[1] + "/saved"))
assert target["w"].unique().tolist() == [1.0]
"""


def test_an_application_in_place_of_the_interpreter(tmp_path):
    """A program that is its own sys.executable starts itself once; the copy writes nothing, and the program saves."""
    program, application = tmp_path / "program.py", tmp_path / "application"
    program.write_text(APPLICATION)
    application.write_text(f"#!/bin/sh\nexec {sys.executable} {program} {tmp_path}\n")
    application.chmod(0o755)
    done = subprocess.run([application], capture_output=True, text=True, check=False, timeout=10 * WAIT)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "starts").read_text() == "started\nstarted\n"
    assert "this process was started to be a child process of the program, but runs the program again" in done.stderr
    assert "the trainer writes this save itself" in done.stderr
    assert len(list((tmp_path / "saved").iterdir())) == 2


@pytest.mark.promise("no-threads")
def test_a_save_that_can_start_no_thread(tmp_path, monkeypatch):
    """If the thread limit is reached once torch has started the save's thread, the trainer writes the save in it."""
    start = threading.Thread.start

    def refuse(thread):
        if not thread.name.startswith(("AsyncCheckpointExecutor", "ThreadPoolExecutor")):  # torch's own
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(subprocess, "Popen", refuse_to_start)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with TensorizerStorageWriter(tmp_path) as writer:
        dcp.async_save(state_of(1), storage_writer=writer).result()
        assert loaded(tmp_path) == (1.0, 1)
    with TensorizerStorageWriter(tmp_path, overlap_staging=True) as writer:
        future = dcp.async_save(state_of(2), storage_writer=writer)
        response = getattr(future, "upload_completion", future)
        with pytest.raises(CheckpointException) as caught:
            response.result()
    assert isinstance(cause(caught), StagingError)
    assert "can't start new thread. Raise the limit of this user's processes and threads" in str(cause(caught))
    assert loaded(tmp_path) == (1.0, 1)


def refuse_to_start(*args, **options):
    raise OSError(11, "Resource temporarily unavailable")


def test_a_synchronous_save_that_failed_lets_go_of_its_directory(tmp_path):
    """The next save releases the directory of a failed one, because DCP calls no hook when another rank fails."""

    class Planner(DefaultSavePlanner):
        def create_global_plan(self, plans):
            raise ValueError("no plan")

    def is_locked():
        lock = LocalStorage(tmp_path).lock_directory()
        try:
            return not lock.is_exclusive
        finally:
            lock.release()

    with TensorizerStorageWriter(tmp_path) as writer:
        dcp.save(state_of(1), storage_writer=writer)
        with pytest.raises(CheckpointException):
            dcp.save(state_of(2), storage_writer=writer, planner=Planner())
        assert is_locked()
        writer.stage(state_of(3))
        assert not is_locked()


@pytest.fixture
def free_descriptors():
    """Returns a function that leaves the process a number of free descriptors."""
    taken, limits = [], resource.getrlimit(resource.RLIMIT_NOFILE)

    def leave(count):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(open_descriptors()) + 20, limits[1]))
        with suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(count):
            os.close(taken.pop())

    def give_back():
        while taken:
            os.close(taken.pop())
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    leave.give_back = give_back
    yield leave
    give_back()


@pytest.mark.parametrize("free", [3, 6])
def test_few_descriptors_are_enough(tmp_path, free_descriptors, free):
    """Three free descriptors are enough: without a writer process, with one, and after its death."""
    with TensorizerStorageWriter(tmp_path) as writer:
        for step, before in enumerate((lambda: None, lambda: None, lambda: kill(writer_process()))):
            before()
            free_descriptors(free)
            dcp.async_save(state_of(step), storage_writer=writer).result()
            free_descriptors.give_back()
            assert loaded(tmp_path) == (float(step), step)
            dcp.async_save(state_of(9), storage_writer=writer).result()
            assert writer_process().is_running()


@pytest.mark.promise("descriptors")
def test_fewer_descriptors_are_an_error_that_says_so(tmp_path, free_descriptors):
    """With fewer, saves and staging fail with the limit, the number that is needed, and the way to raise it."""
    with TensorizerStorageWriter(tmp_path, limits=SaveLimits(max_consecutive_failures=None)) as writer:
        for save, free in ((dcp.save, 1), (dcp.save, 0), (dcp.async_save, 0)):
            free_descriptors(free)
            with pytest.raises(CheckpointException) as caught:
                getattr(save(state_of(1), storage_writer=writer), "result", bool)()
            free_descriptors.give_back()
            assert re.search(r"Too many open files.* Raise the descriptor limit .*\(ulimit -n\)", str(cause(caught)))
        dcp.async_save(state_of(2), storage_writer=writer).result()
    assert loaded(tmp_path) == (2.0, 2)
