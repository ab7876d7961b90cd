"""The states that a rank holds in memory, and whether they are outdated by the checkpoints on storage."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_tensorizer import MetadataError, ReadError, TensorizerStorageWriter
from dcp_tensorizer._index.schema import SaveRecord
from dcp_tensorizer._job.ranks import Agreement
from dcp_tensorizer._job.restore import Problem, Selection, joint_problem, load_from_memory
from dcp_tensorizer._job.steps import Position, Step
from dcp_tensorizer._memory import survival as survival_module
from dcp_tensorizer._memory.client import KeeperConnection
from dcp_tensorizer._memory.copies import CopyOptions, MemoryVote
from dcp_tensorizer._memory.protocol import Found, StateHead, StatePart
from dcp_tensorizer._memory.replicas import RESERVE
from dcp_tensorizer._memory.survival import AllMemory, Predecessors, Survival, outdated
from dcp_tensorizer._runtime.forks import Descriptor
from dcp_tensorizer._runtime.threads import Deadline
from dcp_tensorizer._storage.open import open_storage

from ...lab.processes import open_descriptors, quietly

BRANCH = (("b", 0),)
FOLDER = (1, 2)


def head(step: int, parent: str | None, parent_step: int | None) -> StateHead:
    record = SaveRecord(step, parent, BRANCH, {}, "run")
    return StateHead("0" * 32, 1, "run", 0, 1, record, parent_step, folder=FOLDER)


def saved(step: int, save_id: str, job: str = "run", branch: tuple[tuple[str, int], ...] = BRANCH) -> Step:
    return Step(step, f"step-{step}", save_id, 0, SaveRecord(step, None, branch, {}, job))


@pytest.mark.parametrize(
    ("kept", "tip"),
    [
        (head(5, None, None), None),
        (head(5, "four", 4), saved(4, "four")),
        (head(5, "four", 4), saved(4, "four", job="")),
        (head(7, "four", 4), saved(6, "six")),
        (head(5, "four", 4), saved(5, "five")),
    ],
    ids=["nothing saved", "its parent", "its parent, of another run", "a later save of its run", "itself"],
)
def test_what_goes_on_from_the_newest_checkpoint(kept: StateHead, tip: Step | None) -> None:
    """A state that resumes from the newest checkpoint is used."""
    assert outdated(kept, tip, FOLDER) == ""


@pytest.mark.parametrize(
    ("kept", "tip", "words"),
    [
        (head(5, "four", 4), None, "the checkpoint that preceded it no longer exists"),
        (head(5, "four", 4), saved(4, "other", job="another"), "another run has saved step 4 since"),
        (head(5, "four", 4), saved(9, "nine", job="another"), "another run has saved step 9 since"),
        (head(5, "four", 4), saved(3, "three"), "or checkpoints were removed"),
        (head(5, "four", 4), saved(6, "six"), "step 6 is on storage"),
        (head(5, "four", 4), saved(5, "five", branch=(("c", 0),)), "another run has saved step 5 since"),
        (head(5, None, None), saved(4, "other", job=""), "another run has saved step 4 since"),
    ],
    ids=["all removed", "replaced", "gone on", "newest removed", "newer", "another branch", "begun by another"],
)
def test_what_does_not(kept: StateHead, tip: Step | None, words: str) -> None:
    """Any other state is not used, and the log has the reason."""
    assert words in outdated(kept, tip, FOLDER)


def test_another_folder() -> None:
    """A state of a removed and recreated folder is not used. A folder that did not exist yet has no identity."""
    kept = head(5, None, None)
    assert "folder was replaced" in outdated(kept, None, (1, 3))
    assert "folder was replaced" in outdated(kept, None, None)
    assert outdated(kept._replace(folder=None), None, (1, 3)) == ""


class _Keeper(KeeperConnection):
    """Keeper of a rank, which holds a state or has just ended."""

    def __init__(self, rank: int, has_ended: bool) -> None:
        kept = head(5, None, None)._replace(rank=rank, world_size=2, folder=None)
        self.found = Found("run", 7, (kept,))
        self.has_ended = has_ended
        self.end_is = ""

    def end(self) -> None:
        self.end_is = "ended"

    def close(self) -> None:
        self.end_is = "closed"

    def part(self, state_id: str, rank: int) -> tuple[StatePart, Descriptor]:
        if self.has_ended:
            raise ReadError("a keeper has ended")
        return StatePart(self.found.heads[0], 0, (), b"", b""), Descriptor(os.open("/dev/null", os.O_RDONLY))


def test_a_keeper_that_ends_while_others_give_their_states() -> None:
    """The descriptors of the other parts are closed, and the problem lets the job load from storage."""
    keepers = [_Keeper(1, has_ended=False), _Keeper(0, has_ended=True)]
    before = open_descriptors()
    with quietly():
        found = Predecessors(keepers)
        state = keepers[0].found.heads[0]
        problem = load_from_memory(found, state, AllMemory([found.found]), "run", Agreement(None), {}, Selection(), {})
    assert isinstance(problem, Problem)
    assert (problem.is_damage, problem.has_touched) == (True, False)
    assert "a keeper has ended" in str(problem.error)
    assert open_descriptors() == before


class _OwnKeeper:
    """Keeper of this process, which the test plays."""

    is_ours = True

    def __init__(self, job: str, run: str, seconds: float, timeout: float) -> None:
        self.held = dict[str, Any]()
        self.is_left = False

    def hold(self, part: StatePart, buffer: Any) -> None:
        self.held[part.head.id], buffer.is_kept = buffer, True

    def forget(self, ids: Sequence[str], *, but_copied: bool) -> None:
        for state_id in ids:
            self.held.pop(state_id).is_kept = False

    def leave(self, deadline: Deadline) -> None:
        self.is_left = True

    def end(self, deadline: Deadline) -> None:
        self.forget(list(self.held), but_copied=False)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[TensorizerStorageWriter]:
    with TensorizerStorageWriter(tmp_path) as writer:
        yield writer


@pytest.fixture
def holding(writer: TensorizerStorageWriter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Survival]:
    """Yields the states of a rank, which is alone and has found no earlier run."""
    monkeypatch.setattr(survival_module, "KeeperProcess", _OwnKeeper)
    monkeypatch.setattr(survival_module, "connect_to_keepers", lambda job, timeout: ([], []))
    holding = Survival(
        writer.saver,
        open_storage(tmp_path),
        "step-{}",
        Agreement(None),
        seconds=60.0,
        buffers=3,
        copies=1,
        copy_options=CopyOptions(),
    )
    holding.find_predecessors()
    holding.start_keeper()
    holding.find_partners()
    yield holding
    holding.end()


def hold(holding: Survival, writer: TensorizerStorageWriter, step: int) -> _OwnKeeper:
    """Holds the state of a step that no save writes. Returns the keeper."""
    on_staged = holding.next_state(SaveRecord(step, None, BRANCH, {}, "run"), Position.at(BRANCH, None, []))
    assert on_staged is not None
    writer.saver.hold({"w": torch.full((1000,), float(step))}, on_staged)
    holding.wait_held()
    keeper: Any = holding._keeper
    return keeper


def test_a_run_leaves_its_states_only_when_it_fails(holding: Survival, writer: TensorizerStorageWriter) -> None:
    """Until `leave`, the states are those of a run that continues. Afterwards, they are in its keeper."""
    keeper = hold(holding, writer, 1)
    assert (holding.vote(), holding.has_left, keeper.is_left) == (MemoryVote(), False, False)
    holding.leave()
    assert (holding.has_left, keeper.is_left, len(keeper.held)) == (True, True, 1)
    keeper.end(Deadline(None))


@pytest.mark.parametrize(("options", "expected"), [({}, "closed"), ({"has_saved": True}, "ended")])
def test_what_earlier_runs_left_at_the_end(holding: Survival, options: dict[str, bool], expected: str) -> None:
    """States of earlier runs stay for the next run, unless this run has saved a step."""
    earlier = _Keeper(0, has_ended=False)
    holding.predecessors = Predecessors([earlier])
    holding.end(**options)
    assert earlier.end_is == expected


def test_no_memory_for_the_next_state(
    holding: Survival,
    writer: TensorizerStorageWriter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If another buffer does not fit into memory, the rank frees its states, and votes to hold no more."""
    keeper = hold(holding, writer, 1)
    monkeypatch.setattr(survival_module, "available_memory", lambda: 4096 + RESERVE)
    assert holding.vote() == MemoryVote()
    monkeypatch.setattr(survival_module, "available_memory", lambda: 4095 + RESERVE)
    with caplog.at_level(logging.WARNING):
        assert holding.vote() == MemoryVote(has_failed=True, ends=True)
    assert keeper.held == {}
    why = (
        "another staging buffer takes 4,096 bytes, 268,439,551 bytes of memory are available, and 268,435,456 must "
        "remain"
    )
    assert caplog.messages == [f"states are not held in memory from now on, and survive=60 is off: {why}"]


def test_a_job_that_had_gone_back() -> None:
    """The state is used if the checkpoint that the job left is the newest, and the one it went back to exists."""
    left = head(5, "four", 4)._replace(left="nine")
    nine = saved(9, "nine", branch=(("a", 0),))
    assert outdated(left, nine, FOLDER, {"four", "nine"}) == ""
    assert "or checkpoints were removed" in outdated(left, nine, FOLDER, {"nine"})
    ten = saved(10, "ten", job="another")
    assert "another run has saved step 10 since" in outdated(left, ten, FOLDER, {"four", "nine", "ten"})
    assert outdated(left, saved(4, "four"), FOLDER, {"four"}) == ""


def test_what_has_come_of_all_ranks_loads() -> None:
    """A complete state that does not fit raises its error. If any rank has loaded, targets have changed."""
    misfit = Problem(MetadataError("no such key"), is_damage=False, is_whole=True, has_touched=False)
    damage = Problem(ReadError("it is gone"), is_damage=True, is_whole=False, has_touched=False)
    with pytest.raises(MetadataError, match="no such key"):
        joint_problem([None, damage, misfit])
    part = misfit._replace(is_whole=False)
    assert joint_problem([part, part]) == part
    assert joint_problem([part, damage]) == part._replace(is_damage=True)
    assert joint_problem([None, damage]) == damage._replace(has_touched=True)
    assert joint_problem([None, None]) is None


def test_checkpoints_that_were_lost_with_a_node() -> None:
    """Lost checkpoints count as never saved, so a state that resumes from the newest existing one is used."""
    kept = head(9, "eight", 8)._replace(line=("eight", "six", "four"))
    assert "or checkpoints were removed" in outdated(kept, saved(4, "four"), FOLDER, {"four"})
    assert outdated(kept, saved(4, "four"), FOLDER, {"four"}, {"eight", "six"}) == ""
    assert outdated(kept, saved(6, "six"), FOLDER, {"four", "six"}, {"eight"}) == ""
    assert "or checkpoints were removed" in outdated(kept, saved(4, "four"), FOLDER, {"four"}, {"eight"})
    other = saved(5, "five", job="another")
    assert "another run has saved step 5 since" in outdated(kept, other, FOLDER, {"five"}, {"eight", "six"})
    first = head(5, "four", 4)._replace(line=("four",))
    assert outdated(first, None, FOLDER, (), {"four"}) == ""
