"""A local folder as ``ls`` and ``gc`` see it: what is not on the remote yet is nobody's leftover."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._tensor_file.names import data_file_name
from dcp_tensorizer._tiers.flush import Flusher
from dcp_tensorizer.errors import NotCommitted, ReadError
from dcp_tensorizer.tools import Collected, collect, convert, inspect, list_checkpoints, verify
from dcp_tensorizer.tools._gc import plan_collection, remove

from .support import Run, unlistable


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def flush(run: Run) -> None:
    """Flushes all saves."""
    flusher = Flusher(run.target)
    while flusher.step() is not None:
        pass


def gc(folder: Path) -> tuple[Collected, ...]:
    """``gc --older-than 0``."""
    return collect(folder, older_than=0.0)


def states(folder: Path) -> dict[int | None, str]:
    return {listed.step: listed.state for listed in list_checkpoints(folder)}


@pytest.mark.parametrize("named", [".", "local", "local/step-5"])
def test_what_is_not_flushed_stays(run: Run, named: str) -> None:
    """`gc` keeps an unflushed checkpoint of any age, in any named directory, and the next flush sends it."""
    run.save_unflushed(4, 5)
    found = states(run.folder / named)
    assert gc(run.folder / named) == ()
    assert found == ({5: "unflushed"} if named.endswith("5") else {4: "unflushed", 5: "unflushed"})
    flush(run)
    assert (run.load("step-4"), run.load("step-5")) == (4, 5)


def test_a_copy_of_what_is_flushed_stays(run: Run) -> None:
    """`ls` shows the newest local copy as a checkpoint."""
    run.save_unflushed(4, 5)
    flush(run)
    assert states(run.local) == {5: "flushed"}
    assert gc(run.local) == ()
    assert len(list((run.local / "step-5").iterdir())) == 1


def test_a_copy_of_what_is_flushed_is_not_taken_for_a_dead_save(run: Run, tmp_path: Path) -> None:
    """The error of each command that reads a local copy says that the checkpoint is on the remote."""
    run.save_unflushed(5)
    flush(run)
    read: list[Callable[[Path], object]] = [verify, inspect, lambda path: convert(path, tmp_path / "m", "torch")]
    for tool in read:
        with pytest.raises(
            NotCommitted,
            match=r"The directory is a local copy \(local=\) of a checkpoint that is, or will be, on the re",
        ):
            tool(run.local / "step-5")
        tool(run.remote / "step-5")


def test_what_no_record_is_of_goes(run: Run) -> None:
    """Leftovers beside an unflushed checkpoint are removed by their age."""
    run.save_unflushed(5)
    other = run.local / "step-5" / data_file_name(0, 0, "f" * 32)
    other.write_bytes(b"x")
    (removal,) = gc(run.local)
    assert (removal.files, removal.kept) == ((other.name,), None)
    flush(run)
    assert run.load("step-5") == 5


def test_a_save_whose_record_comes_after_a_look(run: Run) -> None:
    """Files of a save that is handed over while `gc` runs are not removed."""
    run.save_unflushed(5)
    copied = Run(run.folder / "copied")
    shutil.copytree(run.local / "step-5", copied.local / "step-5")
    (removal,) = plan_collection(open_storage(copied.local), None, 0.0)
    shutil.copytree(run.queue.folder, copied.queue.folder)
    assert removal[1].kept is None
    assert remove(removal).kept == "its files have changed since they were listed. Run the command again."
    assert states(copied.local) == {5: "unflushed"}


def test_records_that_cannot_be_listed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the records cannot be read, `gc` removes nothing and raises an error."""
    run.save_unflushed(5)
    unlistable(monkeypatch, run)
    for folder in (run.local, run.local / "step-5"):
        with pytest.raises(ReadError, match="cannot list"):
            gc(folder)
    assert len(list((run.local / "step-5").iterdir())) == 1
