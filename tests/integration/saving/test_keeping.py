"""States that saves keep in memory: which of them are kept, until when, and what is told of those that are not."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_tensorizer import SavePlanner, StagingError, TensorizerStorageWriter, WriteError, open_reader, tools
from dcp_tensorizer._memory import client, find, runtime_directory
from dcp_tensorizer._memory.client import KeeperProcess
from dcp_tensorizer._runtime.channel import Channel
from dcp_tensorizer._saving import keeping
from dcp_tensorizer._saving.engine import engine_of_process
from dcp_tensorizer._saving.keeping import Keeping
from dcp_tensorizer._saving.save import Save
from dcp_tensorizer._staging.buffer_pool import StagedSaves
from dcp_tensorizer._staging.shared_memory import SharedBuffer

from ...support import end_keepers, keepers_below, run_python
from ...waiting import WAIT


def keeping_of_process() -> Keeping:
    return engine_of_process(devices=False).keeping


def kept_buffers() -> list[SharedBuffer]:
    """Those of the states that the keeper of this process has."""
    return list(keeping_of_process().keeper(WAIT, WAIT).kept.values())


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def writer(sockets: Path) -> Iterator[TensorizerStorageWriter]:
    with TensorizerStorageWriter(survive=WAIT) as writer:
        yield writer


def state(value: float = 0.0) -> dict[str, Any]:
    return {"w": torch.full((1000,), value), "nested": {"step": int(value), "empty": torch.empty(0)}}


def save(writer: TensorizerStorageWriter, path: Path, value: float, planner: DefaultSavePlanner | None = None) -> None:
    dcp.async_save(state(value), checkpoint_id=path, storage_writer=writer, planner=planner).result()


def cut_off(
    writer: TensorizerStorageWriter, path: Path, value: float, planner: DefaultSavePlanner | None = None
) -> None:
    """A save that never comes to its end, and the death of its process: as far as the keeper sees it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Save, "write_items", _dies)
        with pytest.raises(CheckpointException):
            save(writer, path, value, planner)
    keeping_of_process().end(is_abandoned=True)


def _dies(save: Save, items: object) -> None:
    raise WriteError("it died here")


def loaded(path: Path, **options: Any) -> float:
    target = state()
    dcp.load(target, storage_reader=open_reader(path, **options))
    assert target["w"].unique().tolist() == [float(target["nested"]["step"])]
    return float(target["nested"]["step"])


def test_a_save_that_was_cut_off(tmp_path: Path, sockets: Path, writer: TensorizerStorageWriter) -> None:
    """It is loaded from memory, and listed; the one that is committed is loaded from its own path."""
    save(writer, tmp_path / "a", 1)
    cut_off(writer, tmp_path / "b", 2)
    (kept,) = tools.list_kept(tmp_path)
    assert (kept.path, kept.ranks, kept.world_size) == (str(tmp_path / "b"), (0,), 1)
    assert (loaded(tmp_path / "a"), loaded(tmp_path / "b")) == (1, 2)


def test_nothing_is_read_of_a_trainer_that_lives(tmp_path: Path, writer: TensorizerStorageWriter) -> None:
    """What it keeps is its own: it may write to that memory at any moment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Save, "write_items", _dies)
        with pytest.raises(CheckpointException):
            save(writer, tmp_path / "a", 1)
    assert tools.list_kept(tmp_path) == ()
    with pytest.raises(CheckpointException, match="holds no checkpoint"):
        loaded(tmp_path / "a")


def test_no_more_than_a_state_is_kept_and_it_takes_no_memory_of_its_own(
    tmp_path: Path, writer: TensorizerStorageWriter
) -> None:
    """The staging buffer is the one that the next save uses."""
    buffers = []
    for value in range(1, 5):
        save(writer, tmp_path / str(value), value)
        (buffer,) = kept_buffers()
        buffers.append(buffer)
        assert buffer.is_kept
    assert len(set(map(id, buffers))) == 1
    assert [loaded(tmp_path / str(value)) for value in range(1, 5)] == [1, 2, 3, 4]


def test_closing_the_writer_gives_everything_back(tmp_path: Path, sockets: Path) -> None:
    """The keeper ends, and its socket is gone."""
    with TensorizerStorageWriter(survive=WAIT) as writer:
        save(writer, tmp_path / "a", 1)
        assert len(list(sockets.iterdir())) == 1
    assert not sockets.exists()


class Renaming(DefaultSavePlanner):
    """Saves a state dict under other keys."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        renamed = {f"renamed.{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


@pytest.mark.parametrize("make", [SavePlanner, lambda: DefaultSavePlanner(flatten_state_dict=False), Renaming])
def test_what_is_kept_is_what_the_planner_saves(
    tmp_path: Path, sockets: Path, writer: TensorizerStorageWriter, make: Callable[[], DefaultSavePlanner]
) -> None:
    """Under its keys; also where it refers to the plan of a save before."""
    planner = make()
    save(writer, tmp_path / "a", 1, planner)
    cut_off(writer, tmp_path / "b", 2, planner)
    there, here = (open_reader(tmp_path / name).read_metadata() for name in "ab")
    assert set(here.state_dict_metadata) == set(there.state_dict_metadata)
    assert here.planner_data == there.planner_data


def test_a_planner_that_hides_its_plan(
    tmp_path: Path, writer: TensorizerStorageWriter, caplog: pytest.LogCaptureFixture
) -> None:
    """torch's plan caching: the first save is kept, repeated ones are not, and the log says so."""
    with caplog.at_level(logging.WARNING, "dcp_tensorizer"):
        for value in (1, 2):
            save(writer, tmp_path / str(value), value, DefaultSavePlanner(enable_plan_caching=True))
    assert [loaded(tmp_path / str(value)) for value in (1, 2)] == [1, 2]
    assert [m for m in caplog.messages if "use dcp_tensorizer.SavePlanner, or no plan caching" in m]
    assert kept_buffers() == []


def test_a_keeper_that_is_killed(
    tmp_path: Path, sockets: Path, writer: TensorizerStorageWriter, caplog: pytest.LogCaptureFixture
) -> None:
    """The save in progress goes on without it, and the next one starts another; its socket is removed."""
    save(writer, tmp_path / "a", 1)
    end_keepers(sockets)
    with caplog.at_level(logging.WARNING, "dcp_tensorizer"):
        for value in (2, 3, 4):
            save(writer, tmp_path / str(value), value)
    assert [loaded(tmp_path / str(value)) for value in (2, 3, 4)] == [2, 3, 4]
    assert len([m for m in caplog.messages if "what was kept in memory is lost" in m]) == 1
    assert len(kept_buffers()) == len(list(sockets.iterdir())) == 1


def test_the_thread_that_tells_digests_meets_a_dead_keeper(
    tmp_path: Path, sockets: Path, writer: TensorizerStorageWriter, caplog: pytest.LogCaptureFixture
) -> None:
    """The loss is logged once, also if no other request was the first to fail."""
    save(writer, tmp_path / "a", 1)
    keeper = keeping_of_process().keeper(WAIT, WAIT)
    (state_id,) = keeper.kept
    end_keepers(sockets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "in_background", lambda operation, **options: operation())
        keeper.written(state_id, {})
    assert "the keeper" in keeper.loss
    with caplog.at_level(logging.WARNING, "dcp_tensorizer"):
        for value in (2, 3):
            save(writer, tmp_path / str(value), value)
    assert [m for m in caplog.messages if "is lost" in m] == [f"what was kept in memory is lost: {keeper.loss}"]
    assert len(kept_buffers()) == 1


def test_a_save_that_is_interrupted_while_the_keeper_answers(
    tmp_path: Path, sockets: Path, writer: TensorizerStorageWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper ends, so that nobody takes its answer for another one; the buffer is used again."""
    save(writer, tmp_path / "a", 1)
    (buffer,) = kept_buffers()
    (keeper,) = keepers_below(sockets)
    with monkeypatch.context() as patch:
        patch.setattr(Channel, "answer", _interrupts)
        with pytest.raises(KeyboardInterrupt):
            save(writer, tmp_path / "b", 2)
    assert (buffer.is_kept, keeper.is_running()) == (False, False)
    save(writer, tmp_path / "c", 3)
    assert kept_buffers() == [buffer]
    assert loaded(tmp_path / "c") == 3


def _interrupts(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_a_save_that_is_interrupted_before_the_keeper_is_asked(
    tmp_path: Path, sockets: Path, writer: TensorizerStorageWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with what it may have got, and the buffer is free."""
    buffers: list[SharedBuffer] = []

    def interrupts(keeper: KeeperProcess, *arguments: object) -> None:
        buffers.extend(keeper.kept.values())
        raise KeyboardInterrupt

    monkeypatch.setattr(KeeperProcess, "_ask", interrupts)
    with pytest.raises(BaseException, match="KeyboardInterrupt"):
        save(writer, tmp_path / "a", 1)
    assert [buffer.is_kept for buffer in buffers] == [False]
    assert keepers_below(sockets) == []


def test_a_keeper_that_cannot_be_asked_to_forget(
    tmp_path: Path,
    sockets: Path,
    writer: TensorizerStorageWriter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in a signal's handler that interrupts a request: staging goes on, and another one gets the next state."""
    save(writer, tmp_path / "a", 1)
    writer.saver.engine.saves.wait_turn(
        writer.saver.stager
    )  # as each staging does first: the save ends a little after its future
    (first,) = keepers_below(sockets)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "dcp_tensorizer"):
        patch.setattr(client, "_ANSWER_SECONDS", 0.1)
        with keeping_of_process().keeper(WAIT, WAIT)._lock:
            keeping_of_process().begin_staging(StagedSaves())
    assert [m for m in caplog.messages if "what was kept in memory is lost" in m and "is busy" in m]
    assert (first.is_running(), keepers_below(sockets)) == (False, [])
    save(writer, tmp_path / "b", 2)
    assert (len(kept_buffers()), loaded(tmp_path / "b")) == (1, 2)


def test_a_state_that_cannot_be_staged(tmp_path: Path, writer: TensorizerStorageWriter) -> None:
    """The save fails as it always does, and the next one is kept."""
    with pytest.raises(CheckpointException) as caught:
        dcp.async_save({"w": torch.empty(3, device="meta")}, checkpoint_id=tmp_path, storage_writer=writer).result()
    assert any(isinstance(cause, StagingError) for cause, _ in caught.value.failures.values())
    save(writer, tmp_path / "a", 1)
    assert len(kept_buffers()) == 1


def test_a_folder_that_is_another_one_now(
    tmp_path: Path, sockets: Path, writer: TensorizerStorageWriter, caplog: pytest.LogCaptureFixture
) -> None:
    """The run was removed and begun anew: what is in memory is of the past."""
    (tmp_path / "run").mkdir()
    cut_off(writer, tmp_path / "run" / "a", 1)
    (tmp_path / "run").rename(tmp_path / "old")
    (tmp_path / "run").mkdir()
    with pytest.raises(CheckpointException), caplog.at_level(logging.WARNING, "dcp_tensorizer"):
        loaded(tmp_path / "run" / "a")
    assert [m for m in caplog.messages if "its folder is another one now" in m]


_SCRIPT = """
import sys, torch, torch.distributed.checkpoint as dcp
from dcp_tensorizer import TensorizerStorageWriter, WriteError
from dcp_tensorizer._saving.save import Save
from dcp_tensorizer._memory import runtime_directory
def dies(save, items):
    raise WriteError("it died here")
if sys.argv[2] == "fails":
    Save.write_items = dies
writer = TensorizerStorageWriter(survive=600.0)
dcp.async_save({"w": torch.ones(3)}, checkpoint_id=sys.argv[1], storage_writer=writer).exception()
"""


@pytest.mark.parametrize("end", ["well", "fails"])
def test_a_process_that_ends_without_closing(tmp_path: Path, sockets: Path, end: str) -> None:
    """Frameworks never close: what is on storage is not kept any more, and what is not waits for the next run."""
    run_python(_SCRIPT, tmp_path / "a", end, fresh=True)
    assert [kept.path for kept in tools.list_kept(tmp_path)] == [str(tmp_path / "a")] * (end == "fails")


def test_keepers_that_are_stopped(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All are waited for at once, for a moment: the others are found, and the log names them."""
    for value in (1, 2, 3):
        with TensorizerStorageWriter(survive=WAIT) as writer:
            cut_off(writer, tmp_path / str(value), value)
            if value < 3:
                for keeper in keepers_below(sockets):
                    keeper.send_signal(signal.SIGSTOP)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "dcp_tensorizer"):
        patch.setattr(find, "_LOOK_SECONDS", 0.1)
        assert [kept.path for kept in tools.list_kept(tmp_path)] == [str(tmp_path / "3")]
    assert len([m for m in caplog.messages if "does not answer, because it is stopped" in m]) == 2
    for keeper in keepers_below(sockets):
        keeper.send_signal(signal.SIGCONT)
    assert [loaded(tmp_path / str(value)) for value in (1, 2, 3)] == [1, 2, 3]


def test_the_keepers_of_another_machine(tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where machines share a directory for temporary files: nobody listens here at their sockets, and they stay."""
    with TensorizerStorageWriter(survive=WAIT) as writer:
        cut_off(writer, tmp_path / "a", 1)
    (socket,) = sockets.iterdir()
    end_keepers(sockets)
    with monkeypatch.context() as patch:
        patch.setattr(runtime_directory, "boot_id", lambda: "of another machine")
        assert tools.list_kept(tmp_path) == ()
    assert list(sockets.iterdir()) == [socket]
    assert (tools.list_kept(tmp_path), list(sockets.iterdir())) == ((), [])


def test_a_block_that_fails(tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its save has failed as well: closing the writer leaves what is in memory."""
    monkeypatch.setattr(Save, "write_items", _dies)
    with pytest.raises(CheckpointException), TensorizerStorageWriter(survive=WAIT) as writer:
        save(writer, tmp_path / "a", 1)
    assert loaded(tmp_path / "a") == 1


def test_what_was_loaded_is_given_back_when_the_job_has_saved(tmp_path: Path, sockets: Path) -> None:
    """And not when its first save has failed: then it is all that there is."""
    with TensorizerStorageWriter(survive=WAIT) as writer:
        cut_off(writer, tmp_path / "a", 1)
    with TensorizerStorageWriter(survive=WAIT) as writer:
        assert loaded(tmp_path / "a") == 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Save, "write_items", _dies)
            with pytest.raises(CheckpointException):
                save(writer, tmp_path / "b", 2)
        save(writer, tmp_path / "c", 3)
        assert [kept.path for kept in tools.list_kept(tmp_path)] == [str(tmp_path / "a")]
        save(writer, tmp_path / "d", 4)
        assert tools.list_kept(tmp_path) == ()


def test_a_clock_that_was_set_back(tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that resumes from what was loaded is newer than that."""
    with TensorizerStorageWriter(survive=WAIT) as writer:
        cut_off(writer, tmp_path / "a", 1)
    assert loaded(tmp_path / "a") == 1
    monkeypatch.setattr(keeping.time, "time_ns", lambda: 10**18)  # 2001
    with TensorizerStorageWriter(survive=WAIT) as writer:
        cut_off(writer, tmp_path / "a", 2)
    assert len(tools.list_kept(tmp_path)) == 2
    assert loaded(tmp_path / "a") == 2


def test_several_paths_at_once(tmp_path: Path, sockets: Path) -> None:
    """A model and its optimizer, each in a folder of the step: one keeper has both."""
    with TensorizerStorageWriter(survive=WAIT) as writer:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Save, "write_items", _dies)
            patch.setattr(Keeping, "begin_staging", lambda self, saves: None)  # as where they run side by side
            for number, name in enumerate(("model", "optimizer"), 1):
                with pytest.raises(CheckpointException):
                    save(writer, tmp_path / "step-1" / name, number)
        assert len(list(sockets.iterdir())) == 1
        keeping_of_process().end(is_abandoned=True)
    assert [loaded(tmp_path / "step-1" / name) for name in ("model", "optimizer")] == [1, 2]
    assert {Path(kept.path).name for kept in tools.list_kept(tmp_path)} == {"model", "optimizer"}


def test_a_machine_without_any_directory_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads look in no memory there."""
    dcp.save(state(1), storage_writer=TensorizerStorageWriter(tmp_path / "a"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(runtime_directory.tempfile, "gettempdir", _no_directory)
    assert (loaded(tmp_path / "a"), tools.list_kept(tmp_path)) == (1, ())


def _no_directory() -> str:
    raise FileNotFoundError("No usable temporary directory found")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"survive": -1}, "survive=-1"),
        ({"survive": 5, "staging": "shared"}, "survive and staging='shared' cannot be combined"),
        ({"survive": 5, "local": "/tmp/a", "path": "/tmp/b"}, "survive and local cannot be combined in a writer"),
        (
            {"survive": 5, "cache_staged_state_dict": False},
            "survive and cache_staged_state_dict=False cannot be combined",
        ),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    """The error names them."""
    with pytest.raises(ValueError, match=message):
        TensorizerStorageWriter(**options)
