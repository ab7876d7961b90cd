"""Errors of all kinds in a save are logged, and counted by the failure counter."""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from dcp_tensorizer import (
    SaveLimits,
    TensorizerStorageReader,
    TensorizerStorageWriter,
    UntrustedObject,
    WriteError,
    unwrap,
)
from dcp_tensorizer._saving.save import Save
from dcp_tensorizer.writer import WriterOptions

from ...lab.processes import writer_process

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {"w": torch.ones(1000)}


def save(writer: TensorizerStorageWriter) -> None:
    dcp.async_save(STATE, storage_writer=writer).result()


@pytest.mark.parametrize("step", ["open", "write_items", "commit"])
def test_an_unforeseen_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    """An unexpected exception is raised unchanged, logged and counted, and not attributed to another rank."""

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


class Unstorable:
    """A type that no reader loads."""


class OddPlanner(DefaultSavePlanner):
    """A planner that adds an object to DCP's metadata that no reader loads."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, dataclasses.replace(metadata, planner_data={"w": Unstorable()})


@pytest.mark.parametrize("local", [False, True])
def test_metadata_that_cannot_be_stored(tmp_path: Path, local: bool) -> None:
    """If the metadata cannot be stored, the error names path and type, and no file of the save is left."""
    path = tmp_path / "a"
    options: WriterOptions = {"local": tmp_path / "local"} if local else {}
    with (
        TensorizerStorageWriter(path, **options) as writer,
        pytest.raises(CheckpointException, match=rf"{tmp_path}.* is not committed: .*Unstorable"),
    ):
        dcp.save(STATE, storage_writer=writer, planner=OddPlanner())
    assert [file for file in tmp_path.rglob("*") if file.suffix in (".tensors", ".metadata")] == []


def test_metadata_whose_type_is_no_longer_trusted(tmp_path: Path) -> None:
    """The error of a load whose planner's data needs an untrusted type names path and type, and what to do."""
    with torch.serialization.safe_globals([Unstorable]):
        with TensorizerStorageWriter(tmp_path) as writer:
            dcp.save(STATE, storage_writer=writer, planner=OddPlanner())
        dcp.load({"w": torch.zeros(1000)}, storage_reader=TensorizerStorageReader(tmp_path))
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": torch.zeros(1000)}, storage_reader=TensorizerStorageReader(tmp_path))
    error = unwrap(caught.value)
    words = rf"the planner's data in {tmp_path}/\.metadata could run code when loaded: it needs .*\.Unstorable\. If you"
    assert isinstance(error, UntrustedObject)
    assert re.match(words, str(error))


def test_storage_options_that_cannot_be_sent_to_the_writer_process(tmp_path: Path) -> None:
    """The error names path and rank, no file is left, and the writer process serves the next save."""
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
