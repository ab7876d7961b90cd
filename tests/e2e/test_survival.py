"""Restarts from memory: ranks that are really killed, and what a later run of the job finds of them."""

import logging
import os
from pathlib import Path

import pytest
import torch

from dcp_tensorizer import CheckpointManager, WriteError

from ..lab.processes import keepers_below, kill, quietly
from ..lab.ranks import eventually, kill_self, run_ranks
from ..lab.seams import leave_no_memory, wait_held, wait_until_digested
from .kept_state import SECONDS, sharded_state, values_at, values_of


def _saves_and_dies(rank, folder, last, **options):
    """Commits step 1, saves until ``last``, makes sure that this is kept, and is killed."""
    manager = CheckpointManager(folder, save_every=1, survive=SECONDS, **options)
    manager.save(1, sharded_state(rank, 1), wait=True)
    for step in range(2, last + 1):
        manager.save(step, sharded_state(rank, step))
    wait_held(manager)
    torch.distributed.barrier()
    kill_self()


def _resumes(rank, folder, step=None, survive=SECONDS):
    """What a later run restores, and what its log says."""
    said = _Said()
    logging.getLogger("dcp_tensorizer").addHandler(said)
    logging.getLogger("dcp_tensorizer").setLevel(logging.INFO)
    with CheckpointManager(folder, save_every=1, survive=survive) as manager:
        state = sharded_state(rank, 0)
        number = manager.restore(state, step)
        found = values_of(state)
        if number is not None:
            manager.save(number + 1, sharded_state(rank, number + 1), wait=True)
    return number, found, [line for line in said.lines if "memory" in line], manager.steps()


class _Said(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.mark.promise("trainer-dies", reason="with survive")
@pytest.mark.parametrize("world_size", [2, 3, 1])
def test_a_later_run_goes_on_from_memory(tmp_path, keepers, world_size):
    """On as many ranks, on more and on fewer: the newest step, bit for bit, whether or not it was written."""
    run_ranks(2, _saves_and_dies, tmp_path / "run", 4, killed=(0, 1))
    for number, found, said, steps in run_ranks(world_size, _resumes, tmp_path / "run"):
        assert (number, found) == (4, values_at(4))
        assert any("step 4 is restored from memory" in line for line in said)
        assert steps[-1] == 5


def test_a_step_that_is_asked_for_comes_from_storage(tmp_path, keepers):
    """And what is in memory is given back."""
    run_ranks(2, _saves_and_dies, tmp_path / "run", 3, killed=(0, 1))
    for number, found, said, _ in run_ranks(2, _resumes, tmp_path / "run", 1):
        assert (number, found, said) == (1, values_at(1), [])


def _saves(rank, folder, step):
    with CheckpointManager(folder) as manager:
        manager.restore(sharded_state(rank, 0))
        manager.save(step, sharded_state(rank, step), wait=True)


def test_what_another_job_has_saved_since_counts(tmp_path, keepers):
    """A state in memory that does not resume from the newest checkpoint is not used, and the log says so."""
    run_ranks(2, _saves_and_dies, tmp_path / "run", 3, killed=(0, 1))
    run_ranks(2, _saves, tmp_path / "run", 9)
    results = run_ranks(2, _resumes, tmp_path / "run")
    assert [(number, found) for number, found, _, _ in results] == [(9, values_at(9))] * 2
    assert [line for line in results[0][2] if "another run has saved step 9 since" in line]


def test_checkpoints_that_were_removed_take_the_memory_with_them(tmp_path, keepers):
    """Somebody has removed the newest steps because they were bad: memory is newer still, and is not used."""
    run_ranks(2, _saves_and_waits, tmp_path / "run", killed=(0, 1))
    for name in ("step-2/.metadata", "step-3/.metadata"):
        (tmp_path / "run" / name).unlink()
    for number, found, _, _ in run_ranks(2, _resumes, tmp_path / "run"):
        assert (number, found) == (1, values_at(1))


def _saves_and_waits(rank, folder):
    """As `_saves_and_dies`, and each step but the last is committed."""
    manager = CheckpointManager(folder, save_every=1, survive=SECONDS)
    for step in (1, 2, 3):
        manager.save(step, sharded_state(rank, step), wait=True)
    manager.save(4, sharded_state(rank, 4))
    wait_held(manager)
    torch.distributed.barrier()
    kill_self()


def test_memory_that_has_changed_is_not_loaded(tmp_path, keepers):
    """The digests of the copy are not those that were taken: the run resumes from storage."""
    run_ranks(2, _saves_and_dies, tmp_path / "run", 2, killed=(0, 1))
    wait_until_digested(keepers)
    changed = 0
    for process in keepers_below(keepers):
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            if os.readlink(link).startswith("/memfd:dcp_tensorizer"):
                with open(link, "r+b") as memory:
                    memory.write(b"\xff" * 64)
                changed += 1
    assert changed >= 2
    for number, found, said, _ in run_ranks(2, _resumes, tmp_path / "run"):
        assert number in (1, 2)  # the last save may have been committed
        assert found == values_at(number)
        assert any("cannot be loaded" in line for line in said)


def test_a_keeper_ends_when_nobody_comes(tmp_path, keepers):
    """And with it go its memory and its socket."""
    run_ranks(2, _dies_soon, tmp_path / "run", killed=(0, 1))
    assert eventually(lambda: not keepers_below(keepers))


def _dies_soon(rank, folder):
    manager = CheckpointManager(folder, survive=1.0)
    manager.save(1, sharded_state(rank, 1), wait=True)
    kill_self()


def _fails(rank, folder):
    with CheckpointManager(folder, save_every=1, survive=SECONDS) as manager:
        manager.save(1, sharded_state(rank, 1), wait=True)
        manager.save(2, sharded_state(rank, 2))
        raise ZeroDivisionError


def _fails_on_all(rank, folder):
    with pytest.raises(ZeroDivisionError):
        _fails(rank, folder)


def test_a_run_that_ends_with_an_error_leaves_its_memory(tmp_path, keepers):
    """As one that is killed does; a run that ends well leaves nothing."""
    run_ranks(2, _fails_on_all, tmp_path / "run")
    for number, found, said, _ in run_ranks(2, _resumes, tmp_path / "run"):
        assert (number, found) == (2, values_at(2))
        assert any("step 2 is restored from memory" in line for line in said)
    assert not keepers_below(keepers)


def _refuses(rank, folder):
    with CheckpointManager(folder, survive=SECONDS) as manager:
        for step in (1, 2):  # the second save waits until the first state is kept: the keeper listens by then
            manager.save(step, sharded_state(rank, step), wait=True)
        with quietly(), CheckpointManager(folder, survive=SECONDS) as other, pytest.raises(WriteError) as caught:
            other.restore(sharded_state(rank, 0))
        assert "another run of this job is alive" in str(caught.value)
        manager.save(3, sharded_state(rank, 3), wait=True)
        return manager.steps()


def test_a_second_run_of_a_job_that_lives_is_refused(tmp_path, keepers):
    """On all ranks; the first one goes on."""
    assert run_ranks(2, _refuses, tmp_path / "run") == [[1, 2, 3]] * 2


def _holds(rank, folder):
    """Saves a large state, and small steps while that is written; closes."""
    with CheckpointManager(folder, save_every=1, survive=SECONDS) as manager:
        big = torch.arange(32 << 20, dtype=torch.int32)
        futures = [manager.save(step, {"big": big, "step": step}) for step in range(1, 6)]
    return [future is not None for future in futures], manager.steps()


def test_the_last_step_is_written_when_the_manager_is_closed(tmp_path, keepers):
    """Steps that come while a save runs are in memory alone; of these the last one is saved in the end."""
    for written, steps in run_ranks(2, _holds, tmp_path / "run"):
        assert written[0]
        assert steps == [step for step, was_written in enumerate(written, 1) if was_written or step == 5]


def _goes_back(rank, folder):
    with CheckpointManager(folder, save_every=1, survive=SECONDS) as manager:
        for step in (1, 2):
            manager.save(step, sharded_state(rank, step), wait=True)
        state = sharded_state(rank, 0)
        number = manager.restore(state, 1)
        manager.save(2, sharded_state(rank, 20), wait=True)
        return number, values_of(state)


def _stops_holding(rank, folder, sockets, kind):
    """Rank 1 loses its keeper, or has no memory for another buffer; returns what is logged, what is saved and held."""
    said = _Said()
    said.setLevel(logging.WARNING)
    logging.getLogger("dcp_tensorizer").addHandler(said)
    with CheckpointManager(folder, save_every=1, survive=SECONDS) as manager:
        manager.save(1, sharded_state(rank, 1), wait=True)
        wait_held(manager)
        torch.distributed.barrier()
        held = len(keepers_below(sockets))
        torch.distributed.barrier()
        if rank.index and kind == "no memory":
            leave_no_memory()
        elif rank.index:
            (keeper,) = [process for process in keepers_below(sockets) if process.ppid() == os.getpid()]
            kill(keeper)
        for step in (2, 3):
            manager.save(step, sharded_state(rank, step), wait=True)
        torch.distributed.barrier()
        return said.lines, manager.steps(), held, len(keepers_below(sockets))


@pytest.mark.promise("keeper-killed")
@pytest.mark.promise("buffer-memory")
@pytest.mark.parametrize("kind", ["keeper killed", "no memory"])
def test_a_rank_that_can_hold_no_state_any_more(tmp_path, keepers, kind):
    """Each rank warns once, and none holds later states; they are saved as ever."""
    why = "the keeper (pid" if kind == "keeper killed" else "another staging buffer takes "
    words = ["another rank has stopped holding them", why]
    for index, (said, steps, held, left) in enumerate(run_ranks(2, _stops_holding, tmp_path / "run", keepers, kind)):
        (line,) = said
        assert line.startswith(
            f"states are not held in memory from now on, and survive={SECONDS} is off: {words[index]}"
        )
        assert (steps, held, left) == ([1, 2, 3], 2, 0)


def test_a_run_that_goes_back(tmp_path, keepers):
    """It loads from storage what it asks for, and keeps what comes then."""
    assert run_ranks(2, _goes_back, tmp_path / "run") == [(1, values_at(1))] * 2


def _dies_after_resuming(rank, folder):
    manager = CheckpointManager(folder, save_every=1, survive=SECONDS)
    state = sharded_state(rank, 0)
    assert manager.restore(state) == 3
    torch.distributed.barrier()
    kill_self()


def test_a_run_that_dies_in_the_take_over(tmp_path, keepers):
    """What it has taken is still there for the next one."""
    run_ranks(2, _saves_and_dies, tmp_path / "run", 3, killed=(0, 1))
    run_ranks(2, _dies_after_resuming, tmp_path / "run", killed=(0, 1))
    for number, found, said, _ in run_ranks(2, _resumes, tmp_path / "run"):
        assert (number, found) == (3, values_at(3))
        assert any("restored from memory" in line for line in said)


@pytest.fixture
def machines(tmp_path):
    """Two machines, as far as memory goes: the ranks of each see their own keepers alone."""
    bases = [tmp_path / f"machine-{number}" for number in (0, 1)]
    for base in bases:
        base.mkdir(mode=0o700)
    yield bases
    assert eventually(lambda: not any((base / "dcp_tensorizer").exists() for base in bases))


def _on_machines(rank, bases, order, function, *args):
    """Runs something on a rank of the machine that it is on: two ranks each, in an order."""
    os.environ["XDG_RUNTIME_DIR"] = str(bases[order[rank.index] // 2])
    return function(rank, *args)


@pytest.mark.parametrize(
    ("order", "reached"),
    [
        ([0, 1, 2, 3], True),
        ([2, 3, 0, 1], False),
        ([0, 2], False),
    ],
    ids=["as before", "machines exchanged", "one rank of each"],
)
def test_two_machines(tmp_path, machines, order, reached):
    """A rank needs its own state alone, where that is. If one does not find it, all load from storage."""
    folder = tmp_path / "run"
    run_ranks(4, _on_machines, machines, range(4), _saves_and_dies, folder, 3, killed=range(4))
    results = run_ranks(len(order), _on_machines, machines, order, _resumes, folder)
    for number, found, said, _ in results:
        assert found == values_at(number)
        assert any("restored from memory" in line for line in said) == reached
        assert number == 3 if reached else number < 4
    if not reached:
        assert any("no state in memory can be loaded by all ranks" in line for line in results[0][2])
