"""Whether a state in memory is outdated, by the checkpoints on storage."""

from __future__ import annotations

import os

import pytest

from dcp_tensorizer import MetadataError, ReadError
from dcp_tensorizer._index.schema import SaveRecord
from dcp_tensorizer._job.ranks import Agreement
from dcp_tensorizer._job.restore import Problem, Selection, joint_problem, load_from_memory
from dcp_tensorizer._job.steps import Step
from dcp_tensorizer._memory.client import KeeperConnection
from dcp_tensorizer._memory.protocol import Found, StateHead, StatePart
from dcp_tensorizer._memory.survival import AllMemory, Predecessors, outdated
from dcp_tensorizer._runtime.forks import Descriptor

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
        (head(5, "four", 4), None, "the checkpoint that it resumes from is gone"),
        (head(5, "four", 4), saved(4, "other", job="another"), "another job has saved step 4 since"),
        (head(5, "four", 4), saved(9, "nine", job="another"), "another job has saved step 9 since"),
        (head(5, "four", 4), saved(3, "three"), "or removed checkpoints"),
        (head(5, "four", 4), saved(6, "six"), "step 6 is on storage"),
        (head(5, "four", 4), saved(5, "five", branch=(("c", 0),)), "another job has saved step 5 since"),
        (head(5, None, None), saved(4, "other", job=""), "another job has saved step 4 since"),
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
        self.found = Found("run", 7, True, (kept,))
        self.has_ended = has_ended

    def part(self, state_id: str, rank: int) -> tuple[StatePart, Descriptor]:
        if self.has_ended:
            raise ReadError("a keeper has ended")
        return StatePart(self.found.heads[0], 0, (), b"", b"", 60.0), Descriptor(os.open("/dev/null", os.O_RDONLY))


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


def test_a_job_that_had_gone_back() -> None:
    """The state is used if the checkpoint that the job left is the newest, and the one it went back to exists."""
    left = head(5, "four", 4)._replace(left="nine")
    nine = saved(9, "nine", branch=(("a", 0),))
    assert outdated(left, nine, FOLDER, {"four", "nine"}) == ""
    assert "or removed checkpoints" in outdated(left, nine, FOLDER, {"nine"})
    ten = saved(10, "ten", job="another")
    assert "another job has saved step 10 since" in outdated(left, ten, FOLDER, {"four", "nine", "ten"})
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
    assert "or removed checkpoints" in outdated(kept, saved(4, "four"), FOLDER, {"four"})
    assert outdated(kept, saved(4, "four"), FOLDER, {"four"}, {"eight", "six"}) == ""
    assert outdated(kept, saved(6, "six"), FOLDER, {"four", "six"}, {"eight"}) == ""
    assert "or removed checkpoints" in outdated(kept, saved(4, "four"), FOLDER, {"four"}, {"eight"})
    other = saved(5, "five", job="another")
    assert "another job has saved step 5 since" in outdated(kept, other, FOLDER, {"five"}, {"eight", "six"})
    first = head(5, "four", 4)._replace(line=("four",))
    assert outdated(first, None, FOLDER, (), {"four"}) == ""
