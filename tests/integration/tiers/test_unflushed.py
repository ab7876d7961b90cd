"""What the ranks of a job settle of the job before, where one of them has trouble with its disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dcp_tensorizer import WriteError
from dcp_tensorizer._job.ranks import Agreement
from dcp_tensorizer._job.unflushed import LocalSaves, finish_unflushed
from dcp_tensorizer._saving.flushing import Flushing
from dcp_tensorizer._tiers.queue import SENT, Commit, FlushRecord

from .support import Run, unlistable

FILE = f"__7_0_{'a' * 32}.tensors"


class _Client:
    """A client of a writer process that does nothing."""

    is_running = True

    def ensure_process(self) -> _Client:
        return self

    def ask(self, *request: object) -> None:
        """Ignores a request."""


class _Ranks(Agreement):
    """This rank, and one without saves, which may be unable to list its folder."""

    def __init__(self, *, can_list: bool = True) -> None:
        super().__init__(None)
        self.other = LocalSaves(set(), [], can_list)
        self.told: list[Any] = []

    def gathered(self, own: Any) -> list[Any]:
        self.told.append(own)
        return [own, self.other]

    def largest(self, *numbers: int) -> list[int]:
        self.told.append(numbers)
        return [0]


def _flushing(run: Run) -> Flushing:
    """Returns the flush of a folder with a save that lacks a file of rank 7."""
    writing = run.queue.begin(FlushRecord(run.target.name, "step-1", 0, "a" * 32))
    writing.written({}, sync=False, commit=Commit(".metadata", {FILE: 4}, True))
    client: Any = _Client()
    return Flushing(client, run.target)


def test_a_rank_that_cannot_list_its_folder_has_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that cannot list its folder takes part in every agreement, and reports that."""
    run, ranks = Run(tmp_path), _Ranks()
    flushing = _flushing(run)
    with monkeypatch.context() as patch:
        unlistable(patch, run)
        finish_unflushed(flushing, ranks)
    assert ranks.told == [LocalSaves(set(), [], can_list=False), (0,)]
    assert run.states() == ["unflushed"]


@pytest.mark.parametrize(("can_list", "states"), [(True, []), (False, ["unflushed"])])
def test_what_may_lie_in_a_folder_that_cannot_be_listed_is_not_given_up(
    tmp_path: Path, can_list: bool, states: list[str]
) -> None:
    """A save is not given up if a rank that cannot list its folder may have the missing file."""
    run, ranks = Run(tmp_path), _Ranks(can_list=can_list)
    finish_unflushed(_flushing(run), ranks)
    assert run.states() == states
    for entry in run.queue.entries():
        run.queue.remove(entry)  # ends the thread that looks for it
    left, must_wait = ranks.told
    (part,) = left.parts
    assert (left.held, left.can_list, must_wait) == (set(), True, (1,))
    assert (part.record.subpath, part.record.rank, part.record.files, part.committed) == ("step-1", 0, {}, {FILE: 4})


class _OnOneNode(_Ranks):
    """Two ranks of one node, which list the same records."""

    def gathered(self, own: Any) -> list[Any]:
        return [own, own]


@pytest.mark.parametrize(
    ("has_commit", "reason"),
    [
        (True, f"no node of this job has {FILE}: the node that saved it is lost"),
        (False, r"no node of this job has its metadata, only data of rank\(s\) 0: the coordinator's node is lost"),
    ],
)
def test_a_save_that_several_ranks_list_is_one_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_commit: bool, reason: str
) -> None:
    """A lost save is reported once, and names each rank once, whichever part of it the node has."""
    run = Run(tmp_path)
    flushing = _flushing(run)
    if not has_commit:
        for entry in run.queue.entries():
            run.queue.remove(entry)
        writing = run.queue.begin(FlushRecord(run.target.name, "step-1", 0, "a" * 32))
        writing.written({f"__0_0_{'a' * 32}.tensors": 4}, sync=False)
        run.queue.confirm(writing.entry)
    finish_unflushed(flushing, _OnOneNode())
    words = f"{run.remote}/step-1 is given up, and will not be on the remote: {reason}"
    assert [message.startswith(f"{run.remote}/step-1 is given up") for message in caplog.messages].count(True) == 1
    with pytest.raises(WriteError, match=f"^{words}$"):
        flushing.check()


def test_a_save_that_was_deleted_from_the_remote_is_not_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a part was sent, and its files are no longer on the remote, a run without ``local`` has deleted the step."""
    run = Run(tmp_path)
    flushing = _flushing(run)
    for entry in run.queue.entries():
        run.queue.remove(entry)
    writing = run.queue.begin(FlushRecord(run.target.name, "step-1", 0, "a" * 32))
    writing.written({f"__0_0_{'a' * 32}.tensors": 4}, sync=False)
    run.queue.confirm(writing.entry)
    run.queue.move(run.queue.entries()[0], SENT)
    finish_unflushed(flushing, _OnOneNode())
    flushing.check()
    assert run.states() == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "its files were on the remote, and have been deleted there" in caplog.text
