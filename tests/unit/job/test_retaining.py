"""Deletion of old checkpoints on the branch of the job."""

from __future__ import annotations

import logging
from collections import defaultdict
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import CheckpointManager, ReadError, TensorizerStorageReader
from dcp_tensorizer._index.schema import SaveRecord
from dcp_tensorizer._job.retention import Retaining, Retention
from dcp_tensorizer._job.steps import Position, Step, StepNames, new_branch, read_steps
from dcp_tensorizer._runtime.threads import Deadline
from dcp_tensorizer._storage.lease import Lease
from dcp_tensorizer._storage.local import LocalStorage

from ...lab.waiting import WAIT

NAMES = StepNames("step-{}")
NEWEST = Retention.of(1, None, None)


def owner_of(folder: LocalStorage) -> Lease:
    """Returns the lease of a job that has just taken it."""
    owner = Lease(folder, ".step-N.claim")
    owner.check()
    return owner


def two_steps(path: Path) -> tuple[LocalStorage, Step, Step]:
    """Makes a folder in which a job has saved two steps."""
    with CheckpointManager(path, stop_signals=()) as manager:
        for step in (100, 200):
            manager.save(step, {"w": torch.zeros(4)}, wait=True)
    folder = LocalStorage(path)
    first, late = read_steps(folder, NAMES)
    return folder, first, late


def test_a_checkpoint_that_arrives_late_deletes_nothing(tmp_path: Path) -> None:
    """If the job has gone back since, the checkpoint that it went back to is on the branch that it has left."""
    folder, first, late = two_steps(tmp_path)
    place = Position.at(new_branch(first), first, [first, late])
    Retaining(folder, NAMES, NEWEST, owner_of(folder), None, lambda: place).after(late)
    assert [step.number for step in read_steps(folder, NAMES)] == [100, 200]
    state: dict[str, Any] = {"w": torch.ones(4)}
    dcp.load(state, storage_reader=TensorizerStorageReader(tmp_path / "step-100"), no_dist=True)
    assert state["w"].tolist() == [0.0] * 4


def test_on_the_same_branch_old_ones_go(tmp_path: Path) -> None:
    """Deleted checkpoints no longer count for the job."""
    folder, first, late = two_steps(tmp_path)
    place = Position.at(late.branch, late, [first, late])
    Retaining(folder, NAMES, NEWEST, owner_of(folder), None, lambda: place).after(late)
    assert [step.number for step in read_steps(folder, NAMES)] == [200]
    assert place.numbers == {200}


def test_a_folder_that_cannot_be_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the symbolic links in the folder are unknown, nothing is deleted, and the log says why."""

    def fails_later(folder: LocalStorage) -> list[str]:
        calls.append(folder.path)
        if len(calls) > 1:
            raise ReadError(f"cannot list {folder.path}")
        return []

    calls = list[str]()
    folder, first, late = two_steps(tmp_path)
    place = Position.at(late.branch, late, [first, late])
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "linked_directories", fails_later)
        retaining = Retaining(folder, NAMES, NEWEST, owner_of(folder), None, lambda: place)
        retaining.after(late)
        retaining.wait(Deadline(WAIT))
    assert calls == [str(tmp_path)] * 2
    assert [step.number for step in read_steps(folder, NAMES)] == [100, 200]
    assert caplog.messages[-1] == f"old checkpoints are not deleted: cannot list {tmp_path}"


class Arrivals:
    """Flush that reports for each save when it is on the remote."""

    def __init__(self) -> None:
        self.futures: dict[str, Future[float]] = defaultdict(Future)

    def future(self, save_id: str) -> Future[float]:
        return self.futures[save_id]


def test_a_step_that_was_deleted_before_its_arrival_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A later save that arrived first has deleted the step. Its own arrival then logs no warning."""
    folder, first, late = two_steps(tmp_path)
    caplog.clear()
    place, arrivals = Position.at(late.branch, late, [first, late]), Arrivals()
    retaining = Retaining(folder, NAMES, NEWEST, owner_of(folder), arrivals, lambda: place)  # type: ignore[arg-type]
    for step in (first, late):
        retaining.after(step)
    for step in (late, first):
        arrivals.futures[step.save_id].set_result(1.0)
        retaining.wait(Deadline(WAIT))
    assert [step.number for step in read_steps(folder, NAMES)] == [200]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def moving(folder: Path) -> Retaining:
    """Makes the retention of a job without rules, which only changes the file ``latest``."""
    storage = LocalStorage(folder)
    return Retaining(storage, NAMES, Retention(), owner_of(storage), None, lambda: None)


def saved_as(number: int, serial: int, saved_at: int = 0) -> Step:
    return Step(number, f"step-{number}", "", saved_at, SaveRecord(number, None, (), {}, serial=serial))


def test_latest_moves_forward(tmp_path: Path) -> None:
    """Only a save with a higher serial replaces the name, whatever its step and time are."""
    retaining = moving(tmp_path)
    for number, serial, saved_at, named in ((7, 2, 100, "step-7"), (9, 1, 200, "step-7"), (3, 3, 50, "step-3")):
        retaining.after(saved_as(number, serial, saved_at))
        assert (tmp_path / "latest").read_text() == f"{named}\n"


def test_a_directory_named_latest_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The directory is not replaced, and the log warns once."""
    (tmp_path / "latest").mkdir()
    retaining = moving(tmp_path)
    for number in (1, 2):
        retaining.after(saved_as(number, number))
    warned = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING]
    assert len(warned) == 1
    assert warned[0].startswith("the file 'latest' is not updated: ")
    assert (tmp_path / "latest").is_dir()
    assert read_steps(LocalStorage(tmp_path), NAMES) == []
