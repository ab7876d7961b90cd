"""Whenever the machine crashes, a directory holds the old checkpoint, the new one, or none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter

from ..lab.crash_scenarios import SCENARIOS, enumerate_crashes
from ..lab.crash_states import Crash, crash_states, materialise, recorded


@pytest.mark.promise("whole-at-any-instant")
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_state_after_a_crash(name: str, tmp_path: Path) -> None:
    """All combinations of what was done before the crash and not made durable, with every file whole, cut or empty."""
    counts = enumerate_crashes(SCENARIOS[name], tmp_path)
    assert len(counts) >= max(map(len, SCENARIOS[name].allowed.values()))  # as before it, and as after it


def test_a_file_that_was_not_made_durable(tmp_path: Path) -> None:
    """What the enumeration knows of a file that appears by a rename without an fsync: there or not, whole or not."""
    with recorded(tmp_path) as recording:
        with open(tmp_path / "new", "xb") as file:
            file.write(b"data")
        os.replace(tmp_path / "new", tmp_path / "file")
    whole, half, empty = b"data", b"da\0\0", b""
    expected = {(("file", content),) for content in (whole, half, empty)}
    assert expected | {()} <= {state.files for state in crash_states(recording)}


def test_what_was_made_durable_is_there(tmp_path: Path) -> None:
    """After the fsyncs of a file and of its directory, no state is without it."""
    with recorded(tmp_path) as recording:
        with open(tmp_path / "file", "xb") as file:
            file.write(b"data")
            file.flush()
            os.fsync(file.fileno())
        descriptor = os.open(tmp_path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        before = len(recording.snapshots)
        (tmp_path / "file").unlink()
    assert before < len(recording.snapshots)
    recording.snapshots[:] = recording.snapshots[before:]
    recording.synced.clear()
    assert set(crash_states(recording)) == {Crash((("file", b"data"),)), Crash(())}


def state_of(step: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2000,), step), "small": torch.tensor([step])}


@pytest.mark.promise("saved-when-done")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_save_that_is_done_survives_any_crash(tmp_path: Path) -> None:
    """When the save is over, each state in which a crash may leave the directory holds the new checkpoint."""
    root, replayed = tmp_path / "root", tmp_path / "state"
    root.mkdir()
    with TensorizerStorageWriter(root / "c") as writer:
        dcp.save(state_of(1.0), storage_writer=writer)
        with recorded(root) as recording:
            dcp.save(state_of(2.0), storage_writer=writer)
            calls = len(recording.snapshots) - 1
    states = list(crash_states(recording, calls))
    assert len(recording.snapshots) > 10 and states
    for state in states:
        materialise(state, replayed)
        found = state_of(0.0)
        dcp.load(found, storage_reader=TensorizerStorageReader(replayed / "c"))
        assert {*found["w"].tolist(), *found["small"].tolist()} == {2.0}
        shutil.rmtree(replayed)
