"""The manager in one process: what it saves, retains and refuses, and its messages."""

from __future__ import annotations

import errno
import inspect
import logging
import math
import os
import re
import shutil
import signal
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer import (
    CheckpointManager,
    Export,
    MetadataError,
    NotCommitted,
    ReadError,
    SaveLimits,
    StagingError,
    StateMismatch,
    TensorizerStorageReader,
    TensorizerStorageWriter,
    WriteError,
    open_reader,
)
from dcp_tensorizer._index.container import committed
from dcp_tensorizer._index.schema import SaveRecord
from dcp_tensorizer._job.metrics import ASSUMED
from dcp_tensorizer._storage.local import LocalStorage

from ..lab.processes import forget, quietly, run_python
from ..lab.seams import cached
from ..lab.states import directories_in, same

pytestmark = pytest.mark.usefixtures("one_writer_process")

NUMBERS = 2048  # more than what stands in the index itself


def state_of(value: int) -> dict[str, Any]:
    weight, bias = (torch.full((count,), float(value)) for count in (NUMBERS, 4))
    return {"model": {"weight": weight, "bias": bias}, "step": value}


def manager_of(folder: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(folder, **{"stop_signals": ()} | options)


def saved(folder: Path, *steps: int, **options: Any) -> None:
    """Saves some steps, and closes the manager."""
    with manager_of(folder, **options) as manager:
        for step in steps:
            manager.save(step, state_of(step))


def said(caplog: pytest.LogCaptureFixture) -> str:
    """Returns the logged warnings and errors of this package."""
    records = [entry for entry in caplog.records if entry.name == "dcp_tensorizer" and entry.levelno >= logging.WARNING]
    return "\n".join(entry.getMessage() for entry in records)


def record_of(folder: Path, name: str) -> SaveRecord:
    head = committed(LocalStorage(folder / name)).head
    assert head.record is not None
    return head.record


def test_a_job_and_the_next_one(tmp_path: Path) -> None:
    """Due steps are saved, old ones are deleted, and the next job resumes from the newest."""
    rules: dict[str, Any] = {"save_every": 2, "keep_latest": 2, "keep_every": 6, "keep_best": "loss"}
    with manager_of(tmp_path, **rules) as manager:
        assert manager.restore(state_of(0)) is None
        futures = [manager.save(n, state_of(n), metrics={"loss": abs(n - 5)}) for n in range(1, 14)]
        assert [future is None for future in futures] == [number % 2 == 1 for number in range(1, 14)]
        manager.wait()
        assert (manager.steps(), manager.latest(), manager.best()) == ([6, 10, 12], 12, 6)
        assert futures[-2] is not None and futures[-2].result() == manager.path(12) == str(tmp_path / "step-12")
    assert directories_in(tmp_path) == ["step-10", "step-12", "step-6"]
    with manager_of(tmp_path, **rules) as manager:
        state = state_of(0)
        assert manager.restore(state) == 12
        assert (state["step"], state["model"]["weight"][7].item()) == (12, 12.0)
        assert manager.save(13, state) is None


def not_saved(folder: Path, step: int, last: str, advice: str = "pass save_at_end=True to the manager") -> str:
    return (
        f"{folder}: the job ends at step {step}, and {last}. To save the last step, {advice}, or pass force=True to "
        f"the last save"
    )


def test_options_of_other_types_of_numbers_and_text(tmp_path: Path) -> None:
    """Numbers of NumPy and subclasses of str are recorded in each save as the plain values."""

    class Text(str):
        """A subclass that the index cannot store."""

    options = {"keep_latest": np.int64(2), "keep_every": np.int16(2), "keep_best": Text("loss"), "name": Text("s-{}")}
    limits = SaveLimits(timeout=np.float32(60))  # type: ignore[arg-type]
    with manager_of(tmp_path, limits=limits, **options) as manager:
        for step in range(1, 6):
            manager.save(step, state_of(step), metrics={Text("loss"): np.float32(step)}, wait=True)
        assert manager.steps() == [1, 2, 4, 5]  # the best, the multiples of 2, and the newest
    record = record_of(tmp_path, "s-5")
    assert (record.keep_latest, record.keep_every, record.keep_best) == (2, 2, ("loss", "min"))
    assert record.metrics == {"loss": 5.0}


def test_a_schedule_in_small_numbers(tmp_path: Path) -> None:
    """A NumPy number of 8 bits as ``save_every`` works for steps that have more."""
    with manager_of(tmp_path, save_every=np.uint8(100)) as manager:
        futures = [manager.save(step, state_of(step)) for step in (99, 300, 301)]
    assert [future is not None for future in futures] == [False, True, False]


def test_a_metric_whose_name_cannot_be_stored(tmp_path: Path) -> None:
    """`save` refuses the name, and the next save works."""
    with manager_of(tmp_path) as manager:
        with pytest.raises(ValueError, match=r"^metrics: each name must be valid Unicode, got 'loss.ud800'"):
            manager.save(1, state_of(1), metrics={"loss\ud800": 1.0})
        manager.save(2, state_of(2), metrics={"loss": 1.0}, wait=True)
        assert manager.steps() == [2]


def test_the_end_of_training_that_is_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A warning names the step of the last call, and the last committed step of this run or an earlier one."""
    saved(tmp_path, *range(1, 32), save_every=500)
    assert said(caplog) == not_saved(tmp_path, 31, "no step is committed")
    caplog.clear()
    saved(tmp_path, *range(1, 32), save_every=10)
    assert said(caplog) == not_saved(tmp_path, 31, "the last committed step is 30")
    caplog.clear()
    with manager_of(tmp_path, save_every=500) as manager:
        assert manager.restore(state_of(0)) == 30
        manager.save(32, state_of(32))
        manager.close(timeout=60)
    assert said(caplog) == not_saved(tmp_path, 32, "the last committed step is 30")
    caplog.clear()
    with manager_of(tmp_path, save_every=500, save_at_end=True) as manager:
        manager.save(33, state_of(33))
        manager.close(timeout=60)
    assert said(caplog) == not_saved(tmp_path, 33, "no step is committed", "call close without a timeout")


def test_the_end_of_training_is_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With ``save_at_end``, `close` saves the objects of the last call with its metrics, unless its step is saved."""
    state = state_of(0)
    rules: dict[str, Any] = {"save_every": 10, "save_at_end": True, "keep_latest": 2}
    export = Export(tmp_path / "model", rename={"model.*": "*"})
    with manager_of(tmp_path / "run", **rules, export=export) as manager:
        for step in range(1, 32):
            state["model"]["weight"].fill_(step)
            manager.save(step, state, metrics={"loss": 1 / step}, exclude=["step"])
    assert manager.steps() == [30, 31]
    assert record_of(tmp_path / "run", "step-31").metrics == {"loss": 1 / 31}
    assert load_file(tmp_path / "model" / "model.safetensors")["weight"].unique().tolist() == [31.0]
    with manager_of(tmp_path / "run", **rules) as manager:
        assert manager.restore(loaded := state_of(0), strict=False) == 31
        assert loaded["model"]["weight"].unique().tolist() == [31.0]
        manager.save(40, state)
    with manager_of(tmp_path / "run", **rules) as manager:
        assert manager.restore(state_of(0), strict=False) == 40
        assert manager.save(40, state_of(1)) is None
    assert manager.steps() == [31, 40]
    assert record_of(tmp_path / "run", "step-40").serial == 5
    assert [text for text in said(caplog).splitlines() if "ends at step" in text] == []
    with pytest.raises(TypeError, match="save_at_end must be True or False"):
        manager_of(tmp_path, save_at_end=1)


@pytest.mark.parametrize("save_at_end", [False, True])
def test_what_is_no_end_of_training(tmp_path: Path, caplog: pytest.LogCaptureFixture, save_at_end: bool) -> None:
    """After an error, a signal or a restore, and in a forked child, `close` neither saves the last step nor warns."""
    options: dict[str, Any] = {"save_every": 10, "save_at_end": save_at_end}
    with suppress(KeyError), manager_of(tmp_path / "error", **options) as manager:
        manager.save(1, state_of(1))
        raise KeyError
    assert directories_in(tmp_path / "error") == []
    with manager_of(tmp_path / "signal", stop_signals=[signal.SIGUSR1], **options) as manager:
        manager.save(1, state_of(1))
        signal.raise_signal(signal.SIGUSR1)
        manager.save(2, state_of(2))
    assert directories_in(tmp_path / "signal") == ["step-2"]
    with manager_of(tmp_path / "fork", **options) as manager:
        manager.save(1, state_of(1))
        if not (child := os.fork()):
            manager.close()
            os._exit(len(said(caplog)))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert directories_in(tmp_path / "fork") == []
        manager.save(10, state_of(10))
    with manager_of(tmp_path / "none", **options) as manager:
        assert manager.restore(state_of(0)) is None
    with manager_of(tmp_path / "back", save_every=1, save_at_end=save_at_end) as manager:
        manager.save(1, state_of(1), wait=True)
    with manager_of(tmp_path / "back", **options) as manager:
        manager.save(2, state := state_of(2))
        assert manager.restore(state) == 1
    assert directories_in(tmp_path / "back") == ["step-1"]
    assert said(caplog) == ""


def test_what_the_index_says(tmp_path: Path) -> None:
    """The index of a checkpoint has its step, parent, branch and metrics."""
    with manager_of(tmp_path) as manager:
        manager.save(1, state_of(1))
        manager.save(2, state_of(2), metrics={"loss": torch.tensor(0.5)})
    first, second = record_of(tmp_path, "step-1"), record_of(tmp_path, "step-2")
    head = committed(LocalStorage(tmp_path / "step-1")).head
    assert (first.step, first.parent, first.metrics) == (1, None, {})
    assert (second.step, second.parent, second.metrics) == (2, head.save_id, {"loss": 0.5})
    assert second.branch == first.branch


def test_a_job_records_how_long_it_has_run_and_how_often_it_failed(tmp_path: Path) -> None:
    """A run that a signal stopped has not failed. The records continue those of the restored checkpoint."""
    with manager_of(tmp_path, save_interval="auto") as manager:
        manager.save(1, state_of(1), wait=True)
    with manager_of(tmp_path, save_interval=(0, 0.001), stop_signals=[signal.SIGUSR1]) as manager:
        assert manager.restore(state_of(0)) == 1
        signal.raise_signal(signal.SIGUSR1)
        manager.save(2, state_of(2))
        assert manager.report().restarts == 1
    with manager_of(tmp_path) as manager:
        assert manager.restore(state_of(0)) == 2
        manager.save(3, state_of(3), wait=True)
        assert manager.report().mean_time_between_failures < ASSUMED
    first, second, third = (record_of(tmp_path, f"step-{step}") for step in (1, 2, 3))
    assert [record.restarts for record in (first, second, third)] == [0, 1, 1]
    assert [record.is_end for record in (first, second, third)] == [False, True, False]
    assert 0 < first.lived < second.lived < third.lived


def test_going_back_begins_a_branch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Later checkpoints are neither counted nor deleted, also by the next job, and a warning names them."""
    saved(tmp_path, 5, 10, 15, 20)
    with manager_of(tmp_path, keep_latest=1) as manager:
        assert manager.restore(state_of(0), 10) == 10
        assert "this job neither counts nor deletes 'step-15', 'step-20'. Such a checkpoint is on" in said(caplog)
        manager.save(12, state_of(12), wait=True)
        assert manager.steps() == [12]
    assert directories_in(tmp_path) == ["step-12", "step-15", "step-20"]
    with manager_of(tmp_path) as manager:
        assert (manager.latest(), manager.restore(state_of(0))) == (12, 12)
        manager.save(17, state_of(17), wait=True)
        assert manager.steps() == [12, 17]


def test_a_job_resumes_from_what_torch_has_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The warning says that the job neither counts nor deletes torch's checkpoints, and denies no resume from one."""
    for step in (10, 20):
        dcp.save(state_of(step), checkpoint_id=tmp_path / f"step-{step}")
    state = state_of(0)
    with manager_of(tmp_path, keep_latest=1) as manager:
        assert (manager.restore(state), state["step"]) == (20, 20)
        assert said(caplog) == (
            f"{tmp_path}: this job neither counts nor deletes 'step-10', 'step-20'. Such a checkpoint is on another "
            f"branch, or this package did not save it, or cannot read it. It is replaced if this job saves its step."
        )
        for step in (30, 40):
            manager.save(step, state_of(step), wait=True)
        assert manager.steps() == [40]
    assert directories_in(tmp_path) == ["step-10", "step-20", "step-40"]


def test_the_same_step_after_going_back(tmp_path: Path) -> None:
    """The existing checkpoint is on the old branch, so the step is saved again with another parent."""
    with manager_of(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step), wait=True)
        manager.restore(state_of(0), 1)
        manager.save(3, state_of(7), wait=True)
        assert manager.steps() == [1, 3]
        manager.restore(state := state_of(0))
        assert state["step"] == 7
    head = committed(LocalStorage(tmp_path / "step-1")).head
    assert record_of(tmp_path, "step-3").parent == head.save_id


def test_a_job_that_loads_by_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A job that saves a later step resumes from the newest checkpoint. With an earlier step it is a new job."""
    saved(tmp_path, 10)
    with manager_of(tmp_path) as manager:
        manager.save(11, state_of(11), wait=True)
        assert manager.steps() == [10, 11]
    assert said(caplog) == ""
    with manager_of(tmp_path) as manager:
        manager.save(1, state_of(1), wait=True)
        assert manager.steps() == [1]
    assert "'step-10', 'step-11'" in said(caplog)


def test_a_job_that_goes_back_by_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A warning is logged, and the saves form a branch: the next job resumes from it, and no new step is deleted."""
    with manager_of(tmp_path, keep_latest=2, save_every=5) as manager:
        for step in (5, 10, 15):
            manager.save(step, state_of(step), wait=True)
        assert "gone back" not in said(caplog)
        assert manager.save(6, state_of(60)) is None
        assert f"{tmp_path}: the job has gone back from step 15 to step 6 without restore()" in said(caplog)
        for step in range(7, 11):
            manager.save(step, state_of(step * 10), wait=True)
        assert manager.steps() == [10]
    with manager_of(tmp_path) as manager:
        assert (manager.restore(state := state_of(0)), state["step"]) == (10, 100)


def test_a_step_that_was_moved_and_linked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A linked step is restored and counted, but not saved again, and not deleted through the link."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    saved(run, 1, 2)
    shutil.move(run / "step-2", elsewhere)
    (run / "step-2").symlink_to(elsewhere)
    (run / "step-0001").symlink_to("step-1")  # another name of a step that is there
    with manager_of(run, keep_latest=1) as manager:
        assert (manager.restore(state := state_of(0)), state["step"]) == (2, 2)
        assert manager.steps() == [1, 2]
        manager.save(3, state_of(3), wait=True)
        assert manager.steps() == [2, 3]
    assert f"{run}/step-2 is not deleted: it is a link" in said(caplog)
    assert TensorizerStorageReader(elsewhere).stored_metadata().state_dict_metadata


def test_a_checkpoint_that_cannot_be_read_stands_in_nobodys_way(tmp_path: Path) -> None:
    """Other checkpoints are listed, restored and deleted. If the newest is unreadable, only ``fallback`` restores."""
    saved(tmp_path, 1, 2, 3)
    for step in (1, 3):
        (tmp_path / f"step-{step}" / ".metadata").unlink()
        (tmp_path / f"step-{step}" / ".metadata").mkdir()
    with manager_of(tmp_path, keep_latest=1) as manager:
        assert manager.steps() == [2]
        with quietly(), pytest.raises(ReadError, match="step-3"):
            manager.restore(state_of(0))
        assert (manager.restore(state := state_of(0), fallback=True), state["step"]) == (2, 2)
        manager.save(4, state_of(4), wait=True)
        assert manager.steps() == [4]


@pytest.mark.promise("other-names")
def test_no_silent_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The error names checkpoints under other names, but not logs and leftovers.

    A warning names data without metadata, which may be a checkpoint that was copied without its hidden files.
    """
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events.log").write_text("")
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / f"__0_0_{'a' * 32}.tensors").write_bytes(b"half")
    with manager_of(tmp_path) as manager:
        assert manager.restore(state_of(0)) is None
        assert "has no committed checkpoint, but there is data without .metadata in 'step-7'" in caplog.text
        saved(tmp_path / "elsewhere", 3, name="{}")
        shutil.move(tmp_path / "elsewhere" / "3", tmp_path / "checkpoint-20")
        shutil.rmtree(tmp_path / "elsewhere")
        words = f"{tmp_path} has no checkpoint named 'step-{{}}', but has 'checkpoint-20'. Pass a matching name="
        with pytest.raises(MetadataError, match=re.escape(words)):
            manager.restore(state_of(0))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "step-7").mkdir()
    (tmp_path / "model" / "step-7" / "model.safetensors").write_bytes(b"")
    with manager_of(tmp_path / "model") as manager, pytest.raises(MetadataError, match="but has 'step-7'"):
        manager.restore(state_of(0))
    with manager_of(tmp_path, name="checkpoint-{}") as manager:
        assert manager.restore(state := state_of(0)) == 20
        assert state["step"] == 3


def test_a_checkpoint_of_torch(tmp_path: Path) -> None:
    """A checkpoint of torch's own storage under a step's name is restored, and never deleted."""
    with quietly():
        dcp.save(state_of(4), storage_writer=FileSystemWriter(tmp_path / "step-4"))
    with manager_of(tmp_path, keep_latest=1) as manager:
        assert manager.restore(state := state_of(0)) == 4
        assert (state["step"], state["model"]["weight"][0].item()) == (4, 4.0)
        manager.save(5, state_of(5), wait=True)
        manager.save(6, state_of(6), wait=True)
    assert directories_in(tmp_path) == ["step-4", "step-6"]


def test_a_folder_that_is_a_checkpoint(tmp_path: Path) -> None:
    """The error asks for the parent folder."""
    saved(tmp_path, 1)
    with manager_of(tmp_path / "step-1") as manager:
        words = f"{tmp_path}/step-1 is a checkpoint, not a folder of checkpoints. Pass its parent folder to the manager"
        with pytest.raises(MetadataError, match=re.escape(words)):
            manager.restore(state_of(0))


def test_keys_that_no_load_can_sort(tmp_path: Path) -> None:
    """Such keys are refused before the save. Keys of one type are accepted, and so are those of inner dicts."""
    with manager_of(tmp_path) as manager:
        words = r"state has keys that cannot be sorted, such as 1 \(int\) and 'd' \(str\), so a load"
        with pytest.raises(TypeError, match=words):
            manager.save(1, {1: torch.ones(2), "d": torch.ones(2)})  # type: ignore[dict-item]
        for step, state in enumerate([{1: torch.ones(2), 2: 5}, {"a": {1: torch.ones(2), "d": 5}}]):
            manager.save(step, state, wait=True)  # type: ignore[arg-type]
            assert manager.restore(dict(state), step) == step  # type: ignore[arg-type]


def test_an_exclude_that_matches_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A warning names the pattern once. Patterns that match in any save are not named."""
    with manager_of(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step), exclude=["modle.*", "model", "model.bias", "s*p"], wait=True)
    assert said(caplog) == (
        "exclude: no key of the state on the first rank matches 'model', 'modle.*'. Keys of nested dicts "
        "are joined by dots, as in 'model.weight'. A list has one key; its elements have none"
    )


@pytest.mark.parametrize("options", [{}, {"overlap_staging": True}], ids=["plain", "overlap"])
@pytest.mark.parametrize("fails", ["staging", "writing"])
def test_one_error_for_one_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], fails: str
) -> None:
    """The error is logged once, with the checkpoint's path and the cause, and raised by `close`."""
    state: dict[str, Any] = state_of(1)
    if fails == "staging":
        state["model"]["weight"] = torch.ones(2, device="meta")
    else:
        (tmp_path / "step-1").write_text("in the way")
    manager = manager_of(tmp_path, **options)
    manager.save(1, state)
    with pytest.raises(WriteError if fails == "writing" else StagingError):
        manager.close()
    errors = [line for line in said(caplog).splitlines() if "step-1" in line]
    assert len(errors) == 1, errors
    assert errors[0].startswith(f"the save to {tmp_path}/step-1 failed: ")


@pytest.mark.promise("no-threads", reason="torch starts the thread of the save, and a manager explains its error")
def test_no_thread_for_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch cannot start the thread of a save, the call raises `WriteError` with advice, and the next one saves."""
    with manager_of(tmp_path) as manager:
        manager.save(1, state_of(1), wait=True)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse_to_start)
            with pytest.raises(WriteError, match=r"step-2 was not saved: can't start new thread. Raise the limit of"):
                manager.save(2, state_of(2))
        manager.save(3, state_of(3), wait=True)
        assert manager.steps() == [1, 3]


def refuse_to_start(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


AT_EXIT = """
import atexit, sys
import torch
from dcp_tensorizer import CheckpointManager, WriteError

def close():
    try:
        manager.close()
    except WriteError as error:
        print(error)
    print(manager.steps())

manager = CheckpointManager(sys.argv[1], save_every=5, save_at_end=True)
atexit.register(close)
for step in range(1, 8):
    manager.save(step, {"w": torch.ones(3)})
"""


def test_a_manager_that_is_closed_at_exit(tmp_path: Path) -> None:
    """When the interpreter exits, torch starts no save of the last step: `close` says what to do, and ends the rest."""
    why = "cannot schedule new futures after interpreter shutdown. Close the manager before the interpreter exits."
    output = run_python(AT_EXIT, tmp_path, fresh=True).stdout
    assert output == f"{tmp_path}/step-7 was not saved: {why}\n[5]\n"


@pytest.mark.parametrize("name", ["on_report", "on_progress"])
@pytest.mark.parametrize("call", ["save", "restore", "wait", "close"])
def test_callbacks_of_a_save_cannot_wait_for_it(tmp_path: Path, name: str, call: str) -> None:
    """A call that would wait for the save that makes the call raises `WriteError` at once, and has no effect."""
    errors: list[str] = []

    def callback(*arguments: object) -> None:
        calls = {
            "save": lambda: manager.save(2, state_of(2)),
            "restore": lambda: manager.restore(state_of(0)),
            "wait": manager.wait,
            "close": manager.close,
        }
        with pytest.raises(WriteError) as caught:
            calls[call]()
        errors.append(str(caught.value))

    with manager_of(tmp_path, **{name: callback}) as manager:
        manager.save(1, state_of(1), wait=True)
        assert errors
        assert all("on_report and on_progress cannot save, restore, wait, or close" in text for text in errors)
        assert manager.steps() == [1]


def test_two_directories_of_one_step(tmp_path: Path) -> None:
    """Two checkpoints of one step are an error. A directory without a checkpoint does not count."""
    saved(tmp_path, 12)
    (tmp_path / "step-0012").mkdir()
    with manager_of(tmp_path) as manager:
        assert manager.steps() == [12]
    shutil.copytree(tmp_path / "step-12", tmp_path / "step-000012")
    with manager_of(tmp_path) as manager:
        for call in (manager.steps, lambda: manager.restore(state_of(0)), lambda: manager.save(13, state_of(13))):
            with pytest.raises(MetadataError, match="step-000012 and step-12 are both step 12"):
                call()


def test_a_directory_that_is_spelled_otherwise(tmp_path: Path) -> None:
    """A directory with other padding is the same step, in numeric order, and no second directory is made."""
    saved(tmp_path, 9, 10, name="step-{:06}")
    with manager_of(tmp_path) as manager:
        assert manager.restore(state_of(0)) == 10
        assert manager.path(10) == str(tmp_path / "step-000010")
        assert manager.restore(state_of(0), 9) == 9
        manager.save(10, state_of(77), wait=True)
    assert directories_in(tmp_path) == ["step-000009", "step-000010"]


def test_a_step_whose_index_says_another(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A copy under another name is restored as the step of its name, and a warning names the recorded step."""
    saved(tmp_path, 1)
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-10")
    with manager_of(tmp_path) as manager:
        assert manager.restore(state_of(0), 1) == 1
        assert "records step" not in said(caplog)
        assert manager.restore(state_of(0), 10) == 10
    assert f"{tmp_path}/step-10 records step 1: it was renamed or copied. Restoring it as step 10" in said(caplog)


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    """The error names the file and its format, so that no job silently begins anew."""
    torch.save({}, tmp_path / "run.pt")
    with manager_of(tmp_path / "run.pt") as manager:
        with pytest.raises(MetadataError, match=r"run\.pt is a file like those that torch\.save writes: load it with"):
            manager.restore(state_of(0))
        with pytest.raises(TypeError, match=r"as \{\"model\": model\}, got Linear"):
            manager.restore(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"as \{\"model\": model\}, got Linear"):
            manager.save(1, torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_flags_of_calls_are_booleans(tmp_path: Path) -> None:
    """Strings such as "no" would count as true."""
    with manager_of(tmp_path) as manager:
        for call, given in ((manager.save, (1, state_of(0))), (manager.restore, (state_of(0),))):
            flags = [name for name, p in inspect.signature(call).parameters.items() if p.annotation == "bool"]
            assert len(flags) == 3
            for name in flags:
                with pytest.raises(TypeError, match=rf"^{name} must be True or False, got 'no'\.$"):
                    call(*given, **{name: "no"})  # type: ignore[operator]


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    """The error lists the existing steps."""
    saved(tmp_path, 1, 2)
    with manager_of(tmp_path) as manager, pytest.raises(NotCommitted, match=r"of step 3\. The folder has: 1, 2$"):
        manager.restore(state_of(0), 3)


@pytest.mark.promise("newest-damaged")
def test_falling_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged checkpoint is an error. With ``fallback`` the previous one is loaded, and an error is logged."""
    saved(tmp_path, 1, 2, 3)
    for damaged in (2, 3):
        (file,) = (tmp_path / f"step-{damaged}").glob("*.tensors")
        content = bytearray(file.read_bytes())
        content[content.rindex(struct.pack("<f", damaged) * NUMBERS)] ^= 1
        file.write_bytes(content)
    with manager_of(tmp_path) as manager:
        state = state_of(0)
        with quietly(), pytest.raises(ReadError, match=r"'model\.weight'.*step-3"):
            manager.restore(state)
        caplog.clear()
        assert manager.restore(state, fallback=True) == 1
        assert (state["step"], state["model"]["weight"][0].item()) == (1, 1.0)
        for step in (3, 2):
            assert f"{tmp_path}/step-{step} cannot be restored; trying the previous checkpoint: " in said(caplog)
        levels = {entry.levelno for entry in caplog.records if "cannot be restored" in entry.getMessage()}
        assert levels == {logging.ERROR}
        assert manager.steps() == [1]


def test_falling_back_is_for_damage(tmp_path: Path) -> None:
    """A missing key or another shape is an error of the state, and no earlier checkpoint is loaded."""
    saved(tmp_path, 1, 2)
    with manager_of(tmp_path) as manager, quietly():
        with pytest.raises(MetadataError, match=r"step-2.*head"):
            manager.restore(state_of(0) | {"head": torch.zeros(3)}, fallback=True)
        state = state_of(0)
        state["model"]["weight"] = torch.zeros(7)
        with pytest.raises(MetadataError, match="step-2"):
            manager.restore(state, fallback=True)
        assert manager.steps() == [1, 2]


def test_nothing_of_a_damaged_checkpoint_stays(tmp_path: Path) -> None:
    """If the previous checkpoint lacks a key that the damaged one may have changed, the restore fails."""
    with manager_of(tmp_path) as manager:
        manager.save(1, state_of(1), exclude=["model.bias"], wait=True)
        manager.save(2, state_of(2), wait=True)
    (file,) = (tmp_path / "step-2").glob("*.tensors")
    content = bytearray(file.read_bytes())
    content[content.rindex(struct.pack("<f", 2) * NUMBERS)] ^= 1
    file.write_bytes(content)
    with manager_of(tmp_path) as manager, quietly():
        with pytest.raises(MetadataError, match=r"step-1.*model\.bias"):
            manager.restore(state_of(0), fallback=True, strict=False)
        assert manager.restore(state_of(0), 1, strict=False) == 1


def test_only_some_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Patterns select the loaded keys, so keys of another shape and missing keys can be left out."""
    saved(tmp_path, 5)
    with manager_of(tmp_path) as manager:
        state = state_of(0)
        manager.restore(state, include=["model.*"], exclude=["*.bias"])
        assert (state["model"]["weight"][0].item(), state["model"]["bias"][0].item(), state["step"]) == (5.0, 0.0, 0)
        state = state_of(0) | {"head": torch.zeros(3)}
        state["model"]["weight"] = torch.zeros(7)
        manager.restore(state, exclude=["model.weight", "head"])
        assert (state["model"]["bias"][0].item(), state["step"]) == (5.0, 5)
        state = state_of(0) | {"head": torch.zeros(3)}
        with pytest.raises(StateMismatch, match=r"it has no 'head'\. With strict=False such keys stay as they are"):
            manager.restore(state)
        manager.restore(state, strict=False)
        assert (state["step"], state["head"].tolist()) == (5, [0.0, 0.0, 0.0])
        assert "has no 'head'. Such keys stay as they are" in said(caplog)
        with pytest.raises(MetadataError, match=r"no key of the state matches 'modle\.\*'"):
            manager.restore(state, include=["modle.*"])
        part = {"step": 0}  # as a stage of a pipeline has it: the weights are of another one
        manager.restore(part, exclude=["model.*"])
        assert part["step"] == 5


class HistoryOptimizer(torch.optim.Optimizer):
    """Optimizer with lists, dicts and an object in its state, which ignores its learning rate."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": torch.tensor(0.5)})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("past", []).append(parameter.grad.clone())
            state["counts"] = {"steps": len(state["past"]), "norm": {"sum": parameter.grad.sum()}}
            parameter.data -= 0.01 * parameter.grad
        self.state["scale"] = {"growth": torch.arange(3.0)}


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5, amsgrad=True),
    "tensor_lr": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1)),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "factors": lambda parameters: torch.optim.Adafactor(parameters),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters),
    "own": HistoryOptimizer,
}


def trainer(kind: str, rows: int = 5) -> dict[str, Any]:
    torch.manual_seed(rows)
    model = torch.nn.Sequential(torch.nn.Linear(3, rows), torch.nn.Linear(rows, 2))
    return {"model": model, "optimizer": OPTIMIZERS[kind](model.parameters())}


def train(state: dict[str, Any], steps: int = 3, dtype: torch.dtype = torch.float32) -> None:
    model, optimizer = state["model"], state["optimizer"]

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        result: torch.Tensor = model(torch.ones(4, 3, dtype=dtype)).square().sum()
        result.backward()
        return result

    for _ in range(steps):
        optimizer.step(loss)


def assert_same(state: dict[str, Any], expected: dict[str, Any]) -> None:
    for part, value in expected.items():
        torch.testing.assert_close(state[part].state_dict(), value.state_dict(), rtol=0, atol=0)


def test_a_new_optimizer_gets_its_state(tmp_path: Path) -> None:
    """A new optimizer gets the saved state, bit for bit, and continues like the saved one."""
    with manager_of(tmp_path) as manager:
        for step, kind in enumerate(OPTIMIZERS):
            train(state := trainer(kind))
            manager.save(step, state, wait=True)
            new = trainer(kind)
            assert manager.restore(new) == step
            assert_same(new, state)
            train(state)
            train(new)
            assert_same(new, state)


class MasterOptimizer(torch.optim.Optimizer):
    """Optimizer with a master copy, moments in a list and counts in a dict, in other dtypes than its parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["master"] = parameter.detach().double() / 3
                state["moments"] = [torch.zeros_like(state["master"], dtype=torch.float32)]
                state["counts"] = {"all": torch.tensor(2**40 + 1), "is_new": torch.tensor(True)}
            state["step"] += 1
            state["moments"][0].lerp_(parameter.grad.float(), 0.3)
            state["master"] -= 0.1 * state["moments"][0]
            parameter.data.copy_(state["master"])


LOW: dict[str, Any] = {
    "own": MasterOptimizer,
    "scalars": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),  # mu_product is in float32
    "averages": lambda parameters: torch.optim.ASGD(parameters, lr=0.001),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
}


def low(kind: str) -> dict[str, Any]:
    """Makes a model in bfloat16."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)).bfloat16()
    return {"model": model, "optimizer": LOW[kind](model.parameters())}


@pytest.mark.parametrize("kind", LOW)
@pytest.mark.parametrize("is_new", [True, False], ids=["new", "used"])
def test_an_optimizers_state_keeps_its_dtypes(tmp_path: Path, kind: str, is_new: bool) -> None:
    """The state keeps its dtypes, which torch's ``load_state_dict`` would cast, and the user's hooks see them."""
    state, new = low(kind), low(kind)
    train(state, dtype=torch.bfloat16)
    if not is_new:
        train(new, 1, dtype=torch.bfloat16)
    seen: list[Any] = []
    new["optimizer"].register_load_state_dict_post_hook(lambda optimizer: seen.append(optimizer.state_dict()["state"]))
    with manager_of(tmp_path) as manager:
        manager.save(1, state, wait=True)
        for selection in ({}, {"include": ["optimizer.*"]}, {"exclude": ["model.*"]}):
            assert manager.restore(new, **selection) == 1
            assert_same(new, state)
    assert len(seen) == 3
    torch.testing.assert_close(seen[0], state["optimizer"].state_dict()["state"], rtol=0, atol=0)
    assert len(new["optimizer"]._optimizer_load_state_dict_post_hooks) == 1
    train(state, dtype=torch.bfloat16)
    train(new, dtype=torch.bfloat16)
    assert_same(new, state)


@pytest.mark.parametrize("names", [True, False], ids=["module", "state dict"])
def test_an_optimizers_state_follows_parameters_of_another_dtype(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: bool
) -> None:
    """State that was saved in the dtype of its parameter gets the new dtype, which torch's own optimizers need."""
    train(state := trainer("adamw"))
    with manager_of(tmp_path) as manager:
        manager.save(1, state, wait=True)
        new = low("adamw")
        target = new if names else {"model": new["model"].state_dict(), "optimizer": new["optimizer"]}
        assert manager.restore(target) == 1
    for number, of_parameter in state["optimizer"].state_dict()["state"].items():
        found = new["optimizer"].state_dict()["state"][number]
        assert same(found["exp_avg"], of_parameter["exp_avg"].bfloat16())
        assert found["step"].dtype == torch.float32
    assert "converted to the torch.bfloat16 of the target: " in said(caplog)
    assert "'optimizer.state.0.exp_avg'" in said(caplog)
    train(new, dtype=torch.bfloat16)


def test_an_optimizer_of_an_older_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch before 2.4 saved a list without tensors as one object. A new optimizer gets it as well."""
    train(state := trainer("adamw"))
    with monkeypatch.context() as older:
        older.setattr("torch.distributed.checkpoint._version._derived_version", "2_3")
        dcp.save(state, checkpoint_id=tmp_path / "step-1", storage_writer=FileSystemWriter(tmp_path / "step-1"))
    keys = FileSystemReader(tmp_path / "step-1").read_metadata().state_dict_metadata
    assert "optimizer.param_groups" in keys
    with manager_of(tmp_path) as manager:
        new = trainer("adamw")
        new["optimizer"].param_groups[0]["lr"] = 0.7
        assert manager.restore(new) == 1
        assert_same(new, state)


def test_an_optimizer_that_does_not_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The optimizer does not change. The error, or with ``strict=False`` a warning, names the other values."""
    train(state := trainer("tensor_lr"))
    with manager_of(tmp_path) as manager:
        manager.save(1, state, wait=True)
        new = trainer("tensor_lr")
        fewer = torch.optim.Adam([*new["model"].parameters()][:3], lr=torch.tensor(0.7))
        with pytest.raises(StateMismatch, match=r"group 0 of 'optimizer' has 4 parameters in the checkpoint and 3 in"):
            manager.restore({"model": new["model"], "optimizer": fewer})
        assert (fewer.state_dict()["state"], fewer.param_groups[0]["lr"].item()) == ({}, pytest.approx(0.7))
        assert_same({"model": new["model"]}, {"model": trainer("tensor_lr")["model"]})
        manager.restore({"optimizer": fewer}, exclude=["optimizer.*"])
        assert fewer.state_dict()["state"] == {}
        assert said(caplog) == ""
        new["optimizer"].add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.2})
        with pytest.raises(StateMismatch, match=r"it has no 'optimizer\.param_groups\.1\.lr'"):
            manager.restore(new)
        assert new["optimizer"].state_dict()["state"] == {}


@pytest.mark.parametrize("writer", ["manager", "torch", "older"])
@pytest.mark.parametrize("has_stepped", [False, True])
@pytest.mark.parametrize(("saved", "now"), [([1], [2]), ([2], [1]), ([2], [1, 1]), ([1, 1], [2])])
def test_another_number_of_parameters(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    saved: list[int],
    now: list[int],
    has_stepped: bool,
    writer: str,
) -> None:
    """The error names the optimizer, the group and both counts, also with ``strict=False``. Nothing has changed."""

    def job(value: float, groups: list[int], *, steps: bool) -> dict[str, Any]:
        model = torch.nn.ParameterList(torch.full((2,), value) for _ in range(2))
        rest = list(model)[-sum(groups) :]
        optimizer = torch.optim.Adam({"params": [rest.pop(0) for _ in range(size)]} for size in groups)
        if steps:
            sum(parameter.sum() for parameter in model).backward()  # type: ignore[union-attr]
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    state = job(1.0, saved, steps=True)
    with manager_of(tmp_path) as manager, monkeypatch.context() as older:
        if writer == "manager":
            manager.save(1, state, wait=True)
        else:
            if writer == "older":
                older.setattr("torch.distributed.checkpoint._version._derived_version", "2_3")
            dcp.save(state, checkpoint_id=tmp_path / "step-1", storage_writer=FileSystemWriter(tmp_path / "step-1"))
    target, same_as = (job(3.0, now, steps=has_stepped) for _ in range(2))
    with manager_of(tmp_path) as manager:
        words = rf"/step-1 cannot be .*group 0 of 'optimizer' has {saved[0]} parameters? in the .* and {now[0]} in the"
        for options in ({}, {"strict": False}, {"fallback": True}):
            with pytest.raises(StateMismatch, match=words):
                manager.restore(target, **options)
            assert_same(target, same_as)
        assert manager.restore(target, exclude=["optimizer.*"]) == 1
    assert_same({"model": target["model"]}, {"model": state["model"]})
    assert_same({"optimizer": target["optimizer"]}, {"optimizer": same_as["optimizer"]})


def test_groups_that_are_added_after_the_restore(tmp_path: Path) -> None:
    """An optimizer with the saved groups gets its state. With ``strict=False`` it may already have another group."""
    train(state := trainer("adamw"))
    added = {"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.2}
    with manager_of(tmp_path) as manager:
        manager.save(1, state, wait=True)
        new = trainer("adamw")
        new["optimizer"].add_param_group(added)
        assert manager.restore(new, strict=False) == 1
    found, expected = (s["optimizer"].state_dict() for s in (new, state))
    torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=0)
    assert [group["lr"] for group in found["param_groups"]] == [expected["param_groups"][0]["lr"], 0.2]


def test_a_setting_that_only_a_scheduler_adds(tmp_path: Path) -> None:
    """The error names the setting, and asks for the scheduler first. With a scheduler the state fits."""

    def with_scheduler(state: dict[str, Any]) -> dict[str, Any]:
        torch.optim.lr_scheduler.StepLR(state["optimizer"], 1)
        return state

    with manager_of(tmp_path) as manager:
        manager.save(1, with_scheduler(trainer("momentum")), wait=True)
        words = r"'optimizer\.param_groups\.0\.initial_lr', .* have no such setting.*Make the scheduler before restore"
        with pytest.raises(StateMismatch, match=words):
            manager.restore(trainer("momentum"))
        assert manager.restore(with_scheduler(trainer("momentum"))) == 1


def test_an_empty_dict_does_not_swallow_what_was_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Stored keys below a dict that is empty here are an error or a warning, of the manager and of ``dcp.load``."""
    train(state := trainer("momentum"))
    lost = "'optimizer.state.0.momentum_buffer', 'optimizer.state.1.momentum_buffer', "
    with manager_of(tmp_path) as manager:
        manager.save(1, state | {"losses": {1: 0.5, 2: 0.25}}, wait=True)
        new = trainer("momentum")
        with pytest.raises(StateMismatch, match=rf"{lost}.*pass the optimizer itself"):
            manager.restore({"optimizer": new["optimizer"].state_dict(), "losses": {1: 0.0, 2: 0.0}})
        with pytest.raises(
            StateMismatch, match=r"'losses\.1', 'losses\.2', and the target state dict has an empty dict in"
        ):
            manager.restore(new | {"losses": {}})
        assert said(caplog) == ""
        manager.restore(new | {"losses": {}}, strict=False)
        assert_same(new, state)
        assert re.findall(r"has ('losses.*'), and the target state dict has an", said(caplog)) == [
            "'losses.1', 'losses.2'"
        ]
        losses = {1: 0.0}  # less than there is, on purpose
        with caplog.at_level(logging.INFO, "dcp_tensorizer"):
            manager.restore({"losses": losses})
        assert "step-1 also has 'losses.2', which the state does not have" in caplog.text
        assert losses == {1: 0.5}
    caplog.clear()
    new = trainer("momentum")
    dcp.load(new | {"losses": losses}, storage_reader=TensorizerStorageReader(tmp_path / "step-1"))
    assert f"has {lost}" in said(caplog)
    assert "losses" not in said(caplog)
    dcp.save(state, checkpoint_id=tmp_path / "torch", storage_writer=FileSystemWriter(tmp_path / "torch"))
    caplog.clear()
    dcp.load(trainer("momentum"), storage_reader=open_reader(tmp_path / "torch"))
    assert f"/torch has {lost}" in said(caplog)
    with manager_of(tmp_path, name="{}") as manager:
        (tmp_path / "torch").rename(tmp_path / "7")
        manager.restore(new := trainer("momentum"), 7)
        assert_same(new, state)


def test_tensors_of_another_shape(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The error names all such tensors with both shapes. If allowed, they and their optimizer state stay unchanged."""
    train(state := trainer("adamw"))
    with manager_of(tmp_path) as manager:
        manager.save(1, state, wait=True)
        new = trainer("adamw", rows=7)
        shapes = (
            r"'model\.0\.weight' is \(5, 3\) in the checkpoint and \(7, 3\) in the state; 'model\.0\.bias' is .*; "
            r"'model\.1\.weight' is"
        )
        with pytest.raises(StateMismatch, match=shapes):
            manager.restore(new)
        manager.restore(new, allow_shape_mismatch=True)
        assert "'model.0.weight' is (5, 3) in the checkpoint and (7, 3) in the state; " in said(caplog)
        assert said(caplog).count("\n") == 0
        kept = trainer("adamw", rows=7)["model"].state_dict() | {"1.bias": state["model"].state_dict()["1.bias"]}
        torch.testing.assert_close(new["model"].state_dict(), kept, rtol=0, atol=0)
        moments = state["optimizer"].state_dict()["state"]
        torch.testing.assert_close(new["optimizer"].state_dict()["state"], {3: moments[3]}, rtol=0, atol=0)
        train(new)


def test_what_a_save_leaves_out_a_restore_leaves_out(tmp_path: Path) -> None:
    """The same patterns work for both, also for a list, which is one value in a save and many keys in a checkpoint."""

    def optimizer(lr: float) -> dict[str, Any]:
        return {"model": {"w": torch.full((4,), lr)}, "opt": {"groups": [{"lr": lr}, {"lr": lr}], "step": lr}}

    with manager_of(tmp_path) as manager:
        manager.save(1, optimizer(1.0), exclude=["opt.groups"], wait=True)
        manager.save(2, optimizer(2.0), wait=True)
        for step in (1, 2):
            state = optimizer(0.0)
            manager.restore(state, step, exclude=["opt.groups"])
            assert (state["model"]["w"].tolist(), state["opt"]["step"]) == ([float(step)] * 4, float(step))
            assert state["opt"]["groups"] == [{"lr": 0.0}, {"lr": 0.0}]
        manager.restore(state, 2, include=["opt.groups"])
        assert state["opt"]["groups"] == [{"lr": 2.0}, {"lr": 2.0}]


def test_a_state_that_does_not_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A warning is logged if a save equals the previous one, or if no key of ``must_change`` has changed."""
    frozen = state_of(1)
    with manager_of(tmp_path) as manager:
        manager.save(1, frozen, wait=True)
        manager.save(2, frozen | {"step": 2}, wait=True)
        assert "step 2 holds the same values as the previous save" in said(caplog)
        assert "'model.weight'" in said(caplog)
        caplog.clear()
        manager.save(3, state_of(3), wait=True)
        manager.save(4, state_of(3) | {"extra": torch.zeros(1)}, wait=True)
    assert said(caplog) == ""
    with manager_of(tmp_path / "other", must_change=["model.bias"]) as manager:
        for step in (1, 2):
            state = state_of(step)
            state["model"]["bias"].zero_()
            manager.save(step, state, wait=True)
    assert "('model.bias')" in said(caplog)


@pytest.mark.promise("manager-save-fails")
def test_a_save_that_fails(tmp_path: Path) -> None:
    """The future, `wait` and `close` raise an error of this package. After three failures a save is refused."""
    (tmp_path / "step-1").write_text("in the way")
    manager = manager_of(tmp_path)
    with quietly():
        future = manager.save(1, state_of(1))
        assert future is not None and type(future.exception()) is WriteError
        with pytest.raises(WriteError, match="cannot create the checkpoint directory"):
            manager.close()
    with quietly(), manager_of(tmp_path) as manager:
        for _ in range(3):
            with pytest.raises(WriteError, match="cannot create the checkpoint directory"):
                manager.save(1, state_of(1), wait=True)
        with pytest.raises(
            WriteError, match=r"3 saves in a row were not committed\. The last error was: cannot create"
        ):
            manager.save(2, state_of(2))
        assert manager.save(3, state_of(3), wait=True) is not None
    assert directories_in(tmp_path) == ["step-3"]


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    """A step that is being saved, was saved or was restored is not saved again."""
    with manager_of(tmp_path) as manager:
        first = manager.save(1, state_of(1))
        assert manager.save(1, state_of(9), force=True) is first
        manager.save(2, state_of(2), wait=True)
        assert manager.save(2, state_of(9), force=True).result() == str(tmp_path / "step-2")  # type: ignore[union-attr]
    with manager_of(tmp_path) as manager:
        manager.restore(state_of(0))
        assert manager.save(2, state_of(9), force=True).result() == str(tmp_path / "step-2")  # type: ignore[union-attr]
        manager.restore(state := state_of(0), 1)
        assert state["step"] == 1


@pytest.mark.promise("step-deleted")
@pytest.mark.parametrize("survive", [0, 60])
def test_a_step_that_somebody_has_deleted_is_saved_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, survive: float
) -> None:
    """A deleted step of this or an earlier job is saved again. The storage is asked only for such a step."""
    saved(tmp_path, 1, 2)
    with manager_of(tmp_path, survive=survive) as manager:
        assert manager.restore(state_of(0)) == 2
        shutil.rmtree(tmp_path / "step-2")
        manager.save(2, state_of(2), force=True, wait=True)
        manager.save(3, state_of(3), wait=True)
        assert said(caplog) == f"{tmp_path}: step 2 was saved, then deleted: saving it again"
        assert (record_of(tmp_path, "step-3").parent, record_of(tmp_path, "step-2").parent) == tuple(
            committed(LocalStorage(tmp_path / f"step-{step}")).head.save_id
            for step in (2, 1)  # type: ignore[union-attr]
        )
        shutil.rmtree(tmp_path / "step-3")
        assert manager.steps() == [1, 2]
        future = manager.save(3, state_of(4), force=True, wait=True)
        assert future is not None and future.result() == str(tmp_path / "step-3")
        assert manager.steps() == [1, 2, 3]
        shutil.rmtree(tmp_path)
        manager.save(3, state_of(5), force=True, wait=True)
        manager.save(4, state_of(6), wait=True)
        assert manager.steps() == [3, 4]
    with manager_of(tmp_path) as manager:
        state = state_of(0)
        assert manager.restore(state, step=3) == 3
        assert state["step"] == 5
        assert manager.restore(state) == 4


def test_nothing_is_deleted_while_the_best_is_not_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning names the missing metric of ``keep_best``. Once a checkpoint has it, the rules apply."""
    with manager_of(tmp_path, keep_latest=1, keep_best="loss") as manager:
        manager.save(1, state_of(1), wait=True)
        assert "step 1 was saved without the metric 'loss', which keep_best needs: pass metrics" in said(caplog)
        for step in (2, 3):
            manager.save(step, state_of(step), metrics={"val_loss": 1.0}, wait=True)
        assert (manager.steps(), said(caplog).count("\n")) == ([1, 2, 3], 0)
        manager.save(4, state_of(4), metrics={"loss": 0.5}, wait=True)
        manager.save(5, state_of(5), metrics={"loss": 0.75}, wait=True)
        assert manager.steps() == [4, 5]
    caplog.clear()
    with manager_of(tmp_path, keep_latest=1, keep_best="loss") as manager:
        manager.save(6, state_of(6), metrics={"val_loss": 1.0}, wait=True)
        assert manager.steps() == [4, 6]
    assert "step 6 was saved without the metric 'loss', which keep_best needs (step 6 has 'val_loss')" in said(caplog)


def test_nothing_is_deleted_while_the_metric_is_nan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the loss is always NaN, all checkpoints stay, and one warning is logged."""
    with manager_of(tmp_path, keep_latest=1, keep_best="loss") as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step), metrics={"loss": math.nan}, wait=True)
        assert (manager.steps(), manager.best()) == ([1, 2, 3], None)
        assert said(caplog) == (
            f"{tmp_path}: the metric 'loss' of step 1 is NaN, but keep_best needs a number. While no checkpoint has a "
            f"value of this metric, none is deleted"
        )
        manager.save(4, state_of(4), metrics={"loss": 0.5}, wait=True)
        assert manager.steps() == [4]


def test_clocks_that_are_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`latest` names the last save, and the next job resumes from the last branch, whatever clocks show."""
    now, hours = time.time_ns, 0
    monkeypatch.setattr(time, "time_ns", lambda: now() - hours * 3600 * 10**9)
    saved(tmp_path, 5)
    for step in (6, 7):
        with manager_of(tmp_path) as manager:
            assert manager.restore(state_of(0), 5) == 5
            hours += 1
            manager.save(step, state_of(step), wait=True)
            assert (tmp_path / "latest").read_text() == f"step-{step}\n"
    with manager_of(tmp_path) as manager:
        assert (manager.restore(state_of(0)), manager.steps()) == (7, [5, 7])
        manager.save(8, state_of(8), wait=True)
        for step in (7, 8):
            shutil.rmtree(tmp_path / f"step-{step}")
        manager.restore(state_of(0), 5)
        hours += 1
        manager.save(6, state_of(6), wait=True)
        assert (tmp_path / "latest").read_text() == "step-6\n"
    assert [record_of(tmp_path, name).serial for name in ("step-5", "step-6")] == [1, 5]


def test_what_is_never_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint that is being loaded, or has files that no save wrote, stays, and the log has the reason."""
    saved(tmp_path, 1, 2, 3)
    (tmp_path / "step-1" / "notes.txt").write_text("the good one")
    lock = LocalStorage(tmp_path / "step-2").lock_directory()
    lock.share(5)
    with manager_of(tmp_path, keep_latest=1) as manager:
        manager.restore(state_of(0))
        manager.save(4, state_of(4), wait=True)
        assert manager.steps() == [1, 2, 4]
        words = f"{tmp_path}/step-1 is not deleted: it contains files or directories that no save wrote: notes.txt"
        assert words in said(caplog)
        assert f"{tmp_path}/step-2 is not deleted: it is being saved or loaded" in said(caplog)
        lock.release()
        manager.save(5, state_of(5), wait=True)
        assert manager.steps() == [1, 5]


@pytest.mark.promise("deletion-fails")
def test_a_checkpoint_that_cannot_be_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning names it with the cause, saves go on and delete others, and it goes when it can be deleted."""
    remove = LocalStorage.remove

    def refuse(storage: LocalStorage, *names: str) -> None:
        if storage.path.endswith("step-1"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        remove(storage, *names)

    monkeypatch.setattr(LocalStorage, "remove", refuse)
    with manager_of(tmp_path, keep_latest=1) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step), wait=True)
        assert manager.steps() == [1, 3]
        assert said(caplog).count(f"{tmp_path}/step-1 is not deleted: PermissionError: ") == 2
        assert (manager.restore(state := state_of(0), 1), state["step"]) == (1, 1)
        monkeypatch.undo()
        manager.restore(state_of(0), 3)
        manager.save(4, state_of(4), wait=True)
        assert manager.steps() == [4]


def test_other_files_are_deleted_if_the_manager_is_told_to(tmp_path: Path) -> None:
    """With ``delete_other_files``, files in inner folders are deleted as well. Other checkpoints stay."""
    saved(tmp_path, 1, 2)
    for step in (1, 2):
        (tmp_path / f"step-{step}" / "logs" / "deep").mkdir(parents=True)
        (tmp_path / f"step-{step}" / "logs" / "deep" / "events").write_text("")
        (tmp_path / f"step-{step}" / "notes.txt").write_text("")
    with manager_of(tmp_path, keep_latest=2, delete_other_files=True) as manager:
        manager.restore(state_of(0))
        manager.save(3, state_of(3), wait=True)
        assert manager.steps() == [2, 3]
    assert directories_in(tmp_path) == ["step-2", "step-3"]
    assert (tmp_path / "step-2" / "logs" / "deep" / "events").exists()
    with pytest.raises(TypeError, match="delete_other_files"):
        manager_of(tmp_path, delete_other_files="yes")


def test_storage_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On storage without locks a checkpoint is deleted when it is older than ``delete_after``."""
    monkeypatch.setattr(LocalStorage, "locks_are_visible", False)
    for seconds, left in ((3600.0, [1, 2]), (0.0, [2])):
        folder = tmp_path / str(seconds)
        with manager_of(folder, keep_latest=1, delete_after=seconds) as manager:
            for step in (1, 2):
                manager.save(step, state_of(step), wait=True)
            assert manager.steps() == left


@pytest.mark.promise("manager-job-killed")
def test_what_a_killed_job_has_left(tmp_path: Path) -> None:
    """The next job removes files that are proven to be of a dead save."""
    saved(tmp_path, 1, 2)
    storage = LocalStorage(tmp_path / "step-2")
    save_id = committed(storage).head.save_id  # type: ignore[union-attr]
    storage.put_record(f"__{save_id}.saving")
    (tmp_path / "step-2" / ".metadata").unlink()
    with manager_of(tmp_path) as manager:
        assert manager.restore(state_of(0)) == 1
    assert directories_in(tmp_path) == ["step-1"]


def test_signals(tmp_path: Path) -> None:
    """After a real signal the next call saves at once, and only that call changes `stopping`."""
    before = signal.getsignal(signal.SIGUSR1)
    with manager_of(tmp_path, save_every=100, stop_signals=[signal.SIGUSR1]) as manager:
        assert manager.save(1, state_of(1)) is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not manager.stopping
        future = manager.save(2, state_of(2))
        assert manager.stopping
        assert future is not None and future.done()
        assert manager.steps() == [2]
    assert signal.getsignal(signal.SIGUSR1) is before


class Interrupted:
    """Value of a state whose staging is interrupted by a signal."""

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        os.kill(os.getpid(), signal.SIGUSR1)
        return "staged"


def test_a_signal_in_the_middle_of_staging(tmp_path: Path) -> None:
    """The interrupted save is completed, and the next call stops the job."""
    with manager_of(tmp_path, save_every=5, stop_signals=[signal.SIGUSR1]) as manager:
        manager.save(5, state_of(5) | {"interrupted": Interrupted()})
        assert not manager.stopping
        manager.save(6, state_of(6))
        assert manager.stopping
        assert manager.steps() == [5, 6]


def test_checkpoints_of_the_writer(tmp_path: Path) -> None:
    """Checkpoints that were saved without a manager are restored by the number of their directory, and count."""
    with quietly(), TensorizerStorageWriter() as writer:
        for step in (8, 16):
            dcp.async_save(state_of(step), storage_writer=writer, checkpoint_id=tmp_path / f"step-{step}").result()
    with manager_of(tmp_path, keep_latest=2) as manager:
        assert manager.restore(state_of(0)) == 16
        manager.save(24, state_of(24), wait=True)
        assert manager.steps() == [16, 24]
    with quietly():
        dcp.load(state := state_of(0), storage_reader=TensorizerStorageReader(tmp_path / "step-24"))
    assert state["step"] == 24


def test_memory_urls(tmp_path: Path) -> None:
    """The folder may be any URL, and the report has the costs of all saves."""
    with CheckpointManager(f"memory://{tmp_path.name}", keep_latest=1, stop_signals=()) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step), wait=True)
        assert manager.steps() == [2]
        assert manager.path(2) == f"memory://{tmp_path.name}/step-2"
        assert manager.restore(state_of(0)) == 2
        report = manager.report()
    assert (report.saves, report.failures) == (2, 0)
    assert 0 < report.stall_seconds < report.seconds


def test_after_close(tmp_path: Path) -> None:
    """After `close` no save is possible, and a second `close` does nothing."""
    manager = manager_of(tmp_path)
    manager.close()
    manager.close()
    for call in (lambda: manager.save(1, state_of(1)), lambda: manager.restore(state_of(1))):
        with pytest.raises(WriteError, match="the manager is closed"):
            call()


def test_overlapping_staging(tmp_path: Path) -> None:
    """Inside `lock` the state may change, and saves have the old values."""
    with manager_of(tmp_path, overlap_staging=True, sha256=True) as manager:
        state = state_of(1)
        for step in (1, 2):
            with manager.lock():
                state["model"]["weight"].fill_(step)
            manager.save(step, state)
        with manager.lock():
            state["model"]["weight"].zero_()
        for step in (1, 2):
            assert manager.restore(state, step) == step
            assert state["model"]["weight"].unique().tolist() == [step]


def test_best_needs_a_rule(tmp_path: Path) -> None:
    """Without ``keep_best``, `best` raises an error."""
    with manager_of(tmp_path) as manager, pytest.raises(ValueError, match="keep_best="):
        manager.best()


def test_a_part_of_the_state_is_saved(tmp_path: Path) -> None:
    """Keys that are left out are not in the checkpoint, and a restore does not change them."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False))
    model[0].requires_grad_(False)
    with manager_of(tmp_path) as manager:
        manager.save(1, {"model": model, "data": torch.ones(3)}, trainable_only=True, exclude=["data"], wait=True)
        stored = TensorizerStorageReader(manager.path(1)).read_metadata().state_dict_metadata
        assert list(stored) == ["model.1.weight"]
        before = model[0].weight.clone(), model[1].weight.clone()
        with torch.no_grad():
            model[0].weight.add_(1)
            model[1].weight.add_(1)
        assert manager.restore({"model": model}, strict=False) == 1
        assert torch.equal(model[0].weight, before[0] + 1)
        assert torch.equal(model[1].weight, before[1])
        with pytest.raises(StagingError, match="the state has no module or parameter"):
            manager.save(2, {"model": model.state_dict()}, trainable_only=True)
        with pytest.raises(TypeError, match="exclude must be a list of patterns"):
            manager.save(2, {"model": model}, exclude="data")
        with pytest.raises(StagingError):
            manager.wait()


def test_a_close_that_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second `close` after an interruption does the rest."""
    manager = manager_of(tmp_path)
    manager.save(1, state_of(1))

    def interrupted(timeout: float | None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(manager._writer, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            manager.close()
    with pytest.raises(WriteError, match="the manager is closed"):
        manager.save(2, state_of(2))
    manager.close()
    assert manager._writer._saver.closed
    assert manager.steps() == [1]


def test_callbacks_that_load_and_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The error of DCP, which is not an `Exception`, is logged, and old checkpoints are deleted nevertheless."""

    def fail(future: Any) -> None:
        raise CheckpointException("a load in it", {})

    with manager_of(tmp_path, keep_latest=1) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step)).add_done_callback(fail)
            manager.wait()
        assert manager.steps() == [2]
    caplog.clear()


def test_nobody_cancels_a_save(tmp_path: Path) -> None:
    """The future cannot be cancelled, because the other ranks save regardless."""
    with manager_of(tmp_path) as manager:
        future = manager.save(1, state_of(1))
        assert future is not None
        assert not future.cancel()
        manager.save(2, state_of(2), wait=True)
        assert manager.steps() == [1, 2]
        assert future.result() == manager.path(1)


def test_a_callback_that_waits(tmp_path: Path) -> None:
    """In a callback, `wait` waits only for the save, because the work after it waits for the callback."""
    waited: list[int | None] = []

    def wait(future: Any) -> None:
        manager.wait()
        waited.append(manager.latest())

    with manager_of(tmp_path, keep_latest=1) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step)).add_done_callback(wait)
            manager.wait()
        assert (waited, manager.steps()) == ([1, 2], [2])


def test_states_that_cannot_be_collected_for_a_load_that_failed(tmp_path: Path) -> None:
    """A load that fails inside ``state_dict`` fails the save like any other error, and the next save works."""

    class Model:
        fails = True

        def state_dict(self) -> dict[str, Any]:
            if self.fails:
                raise CheckpointException("a load in it", {})
            return {"w": torch.ones(4)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            """Not called."""

    model = Model()
    with manager_of(tmp_path) as manager:
        with pytest.raises(CheckpointException):
            manager.save(1, {"model": model}, wait=True)
        model.fails = False
        manager.save(2, {"model": model}, wait=True)
        assert manager.steps() == [2]


def test_a_restore_reads_past_the_page_cache_what_it_does_not_hold(tmp_path: Path) -> None:
    """Cached pages are read and stay cached. `reader_options` may choose otherwise."""
    state = {"x": torch.arange(4 << 20, dtype=torch.int32)}
    with CheckpointManager(tmp_path, save_every=1) as manager:
        manager.save(1, state, wait=True)
    (data,) = (tmp_path / "step-1").glob("*.tensors")
    cases: list[tuple[bool, dict[str, bool]]] = [(False, {}), (True, {}), (True, {"page_cache": True})]
    for is_there, options in cases:
        forget(data)
        if is_there and not options:
            data.read_bytes()
        found = {"x": torch.zeros_like(state["x"])}
        with CheckpointManager(tmp_path, reader_options=options) as manager:
            assert manager.restore(found) == 1
        assert torch.equal(found["x"], state["x"])
        assert cached(data, 8 << 20) == is_there
