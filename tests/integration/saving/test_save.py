"""What fails a save is what the log and the failure counter say, whatever kind of error it is."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer import SaveLimits, TensorizerStorageWriter, WriteError, unwrap
from dcp_tensorizer._saving.save import Save

from ...lab.processes import writer_process

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {"w": torch.ones(1000)}


def save(writer: TensorizerStorageWriter) -> None:
    dcp.async_save(STATE, storage_writer=writer).result()


@pytest.mark.parametrize("step", ["open", "write_items", "commit"])
def test_an_error_that_nobody_has_foreseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    """It is raised as it is, logged and counted, and nobody says that another rank failed."""

    def fails(*arguments: object, **options: object) -> None:
        raise RuntimeError("a bug")

    path = tmp_path / "a"
    monkeypatch.setattr(Save, step, fails)
    with (
        TensorizerStorageWriter(path, limits=SaveLimits(max_consecutive_failures=1)) as writer,
        caplog.at_level(logging.ERROR, "dcp_tensorizer"),
    ):
        with pytest.raises(CheckpointException) as caught:
            save(writer)
        with pytest.raises(WriteError, match=r"The last error was: RuntimeError: a bug\. "):
            save(writer)
    error = unwrap(caught.value)
    assert (type(error), str(error)) == (RuntimeError, "a bug")
    logged = [record.message for record in caplog.records if record.name == "dcp_tensorizer"]
    words = "RuntimeError: a bug"
    assert logged == [f"the save to {path} failed: {words}"]


def test_storage_options_that_cannot_be_sent_to_the_writer_process(tmp_path: Path) -> None:
    """The error names path and rank, nothing is left behind, and the process goes on."""
    with TensorizerStorageWriter(tmp_path / "good") as good:
        save(good)
        process = writer_process()
        with TensorizerStorageWriter(tmp_path / "a", storage_options={"option": threading.Lock()}) as writer:
            with pytest.raises(CheckpointException) as caught:
                save(writer)
            dcp.save(STATE, storage_writer=writer, checkpoint_id=tmp_path / "b")
        save(good)
        assert writer_process() == process
    error = unwrap(caught.value)
    assert type(error) is WriteError
    assert str(error).startswith(f"rank 0: {tmp_path / 'a'}: storage_options cannot be sent to the writer process, ")
    assert list((tmp_path / "a").iterdir()) == []
    assert (tmp_path / "b" / ".metadata").is_file()
