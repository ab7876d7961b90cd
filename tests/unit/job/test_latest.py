"""The file `latest`: its content, and a checkpoint that is found by it because the listing is outdated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dcp_tensorizer import CheckpointManager
from dcp_tensorizer._job.steps import StepNames, read_steps
from dcp_tensorizer._storage.base import FileInfo
from dcp_tensorizer._storage.local import LocalStorage

NAMES = StepNames("step-{}")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a folder with steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved")
    with CheckpointManager(folder, stop_signals=()) as manager:
        for step in (2, 4):
            manager.save(step, {"w": torch.zeros(4)}, wait=True)
    return folder


class Stale(LocalStorage):
    """Folder whose listing comes from a cache that is older than step 4."""

    def listing(self) -> tuple[list[FileInfo], list[str]]:
        return [], ["step-2"]

    def linked_directories(self) -> list[str]:
        return []


def numbers(folder: LocalStorage) -> list[int]:
    return [step.number for step in read_steps(folder, NAMES)]


def test_a_checkpoint_that_no_listing_shows_yet(saved: Path) -> None:
    """A checkpoint that the file names counts if its metadata exists."""
    assert (saved / "latest").read_text() == "step-4\n"
    assert numbers(Stale(saved)) == [2, 4]
    assert numbers(LocalStorage(saved)) == [2, 4]


@pytest.mark.parametrize(
    "text", [b"step-9\n", b"step-4", b"../saved/step-4\n", b"ema-4\n", b"\xff\n", b"", b"x" * 5000]
)
def test_what_names_no_checkpoint_is_ignored(saved: Path, tmp_path: Path, text: bytes) -> None:
    """The file may name a missing checkpoint or one of another job, be cut off by a cache, or be empty."""
    (tmp_path / "step-2").symlink_to(saved / "step-2")
    (tmp_path / "step-4").symlink_to(saved / "step-4")
    (tmp_path / "latest").write_bytes(text)
    assert numbers(Stale(tmp_path)) == [2]


def test_one_that_cannot_be_read_is_ignored(saved: Path, tmp_path: Path) -> None:
    """An unreadable checkpoint that only the file names does not count: only the listing can report damage."""
    (tmp_path / "step-2").symlink_to(saved / "step-2")
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-4" / ".metadata").write_bytes(b"damaged")
    (tmp_path / "latest").write_text("step-4\n")
    assert numbers(Stale(tmp_path)) == [2]
