"""The manager on several ranks: all of them do the same, whatever each of them sees."""

import os
import signal
import time
from contextlib import nullcontext, suppress

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_tensorizer import CheckpointManager, CopyOptions, SaveLimits, StagingError, WriteError
from dcp_tensorizer._saving import save as saving
from dcp_tensorizer._staging.stager import Stager
from dcp_tensorizer._storage import local

from .. import warm
from ..lab.preempted_job import Preempted, losses
from ..lab.processes import quietly
from ..lab.ranks import kill_self, run_ranks
from ..lab.states import directories_in

ROWS = 24
STEPS = 30


def _state(world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    return {"w": distribute_tensor(torch.zeros(ROWS, 256), mesh, [Shard(0)]), "step": 0}


def _train(rank, folder, stop_at):
    """Trains until it is told to stop, which one rank is, or to the last step. The optimizer is new at first."""
    heard = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    state = _state(rank.world_size)
    weight = torch.nn.Parameter(_state(rank.world_size)["w"])
    state["adam"] = adam = torch.optim.AdamW([weight], lr=0.0)
    with CheckpointManager(folder, save_every=10, keep_latest=2, stop_signals=[signal.SIGUSR1]) as manager:
        start = manager.restore(state) or 0
        assert (state["step"], state["w"].full_tensor().unique().tolist()) == (start, [float(start)])
        if start:
            moment = adam.state[weight]["exp_avg"]
            assert (adam.state[weight]["step"].item(), moment.placements) == (start, weight.placements)
            torch.testing.assert_close(moment.full_tensor(), torch.full((ROWS, 256), 1 - 0.9**start))
        for step in range(start + 1, STEPS + 1):
            weight.grad = torch.ones_like(weight)
            adam.step()
            state["w"] += 1
            state["step"] = step
            if step == stop_at and rank.index == rank.world_size - 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            manager.save(step, state)
            if manager.stopping:
                break
        manager.wait()
        return start, step, manager.latest(), heard


@pytest.mark.promise("stop-signal")
def test_a_signal_on_one_rank_stops_all(tmp_path):
    """All save the same step and stop; other numbers of ranks resume from there, and no step is lost."""
    folder = tmp_path / "run"
    first = run_ranks(3, _train, folder, 17)
    assert [result[:3] for result in first] == [(0, 17, 17)] * 3
    assert [result[3] for result in first] == [[], [], [signal.SIGUSR1]]
    assert [result[:3] for result in run_ranks(2, _train, folder, None)] == [(17, 30, 30)] * 2
    assert directories_in(folder) == ["step-20", "step-30"]


def _misuse(rank, folder):
    """What a save of different steps raises, and one that cannot be written, on each rank."""
    state = _state(rank.world_size)
    said = []
    limits = SaveLimits(max_consecutive_failures=1)
    with quietly(), CheckpointManager(folder, limits=limits) as manager:
        with pytest.raises(ValueError, match="the ranks save different steps, from 1 to 2"):
            manager.save(1 + rank.index, state)
        started = time.monotonic()
        for step in (7, 8):
            with pytest.raises(WriteError) as caught:
                manager.save(step, state, wait=True)
            said.append(str(caught.value))
        manager.save(9, state, wait=True)  # is tried again
        return said, time.monotonic() - started


@pytest.mark.promise("manager-save-fails", reason="on every rank")
def test_an_error_is_raised_on_every_rank(tmp_path):
    """It is the package's own, with the same words, within seconds; after too many failures a save is refused."""
    (tmp_path / "step-7").write_text("in the way")
    first, second = run_ranks(2, _misuse, tmp_path)
    assert first[0] == second[0]
    assert "cannot create the checkpoint directory" in first[0][0]
    assert first[0][1].startswith("the last save was not committed. The last error was: cannot create")
    assert max(first[1], second[1]) < 20
    assert directories_in(tmp_path) == ["step-9"]


def _differs(rank, folder, options):
    """Returns the error of a manager whose options are those of this rank."""
    try:
        with CheckpointManager(**{"folder": folder} | options[rank.index]) as manager:
            manager.save(1, _state(rank.world_size), wait=True)
    except ValueError as error:
        return str(error)
    return None


_COPIES = {"survive": 60.0, "copies": 2}


@pytest.mark.promise("managers-differ")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ({"folder": "/run/a"}, {"folder": "/run/b"}, {"folder": "/run/b"}),
            "folder is '/run/a' on rank 0, '/run/b' on ranks 1, 2",
        ),
        (
            ({"save_every": 1}, {"save_every": 2}, {"save_every": 3}),
            "save_every is 1 on rank 0, 2 on rank 1, 3 on rank 2",
        ),
        (({}, {}, {"survive": 60.0}), "survive is 0.0 on ranks 0, 1, 60.0 on rank 2"),
        (
            ({"keep_best": "loss"}, {"keep_best": ("loss", "max")}, {}),
            "keep_best is ('loss', 'min') on rank 0, ('loss', 'max') on rank 1, None on rank 2",
        ),
        (
            (
                {"save_interval": 60, "keep_latest": 2, "keep_best": "loss", "survive": 0},
                {"save_interval": 60.0, "keep_latest": np.int64(2), "keep_best": ("loss", "min")},
                {"save_interval": np.float32(60), "keep_latest": np.uint8(2), "keep_best": "loss"},
            ),
            None,
        ),
        (({"save_interval": (60, 3600)}, {"save_interval": [60.0, 3600]}, {"save_interval": (60, 3600.0)}), None),
        (
            tuple(
                _COPIES | {"copy_options": CopyOptions(**option)}
                for option in ({"interface": "lo"}, {"interface": "127.0.0.1"}, {"failure_domain": "a"})
            ),
            None,
        ),
    ],
    ids=["folder", "save_every", "survive", "keep_best", "equal", "equal-bounds", "may-differ"],
)
def test_ranks_whose_managers_differ(tmp_path, options, words):
    """No rank gets a manager, and the error names the values and their ranks.

    Options of one host may differ, and equal values of other types are the same.
    """
    words = words and f"the managers of the ranks differ: {words}. Pass the same value on every rank."
    assert run_ranks(3, _differs, tmp_path / "run", options) == [words] * 3


def _ends(rank, folder, steps):
    """Ends at a step at which no save is due; returns the error of a rank, and the steps that are saved then."""
    state = _state(rank.world_size)
    manager = CheckpointManager(folder, save_every=10, save_at_end=True)
    error = None
    try:
        for step in range(1, steps[rank.index] + 1):
            state["w"] += 1
            manager.save(step, state)
        manager.close()
    except ValueError as different:
        error = str(different)
    manager.close(timeout=30)
    return error, manager.steps()


@pytest.mark.parametrize(
    ("steps", "saved", "error"),
    [
        ((12, 12), [10, 12], None),
        ((0, 0), [], None),
        ((12, 11), [10], "the ranks save different steps, from 11 to 12. Save the same step on every rank."),
    ],
)
def test_the_last_step_of_all_ranks_is_saved(tmp_path, steps, saved, error):
    """All ranks save it when they close, if they were given the same one; otherwise all raise an error."""
    assert run_ranks(2, _ends, tmp_path / "run", steps) == [(error, saved)] * 2


class _Broken:
    """Its state cannot be collected on one rank."""

    def __init__(self, rank):
        self.rank = rank

    def state_dict(self):
        if self.rank.index == 1:
            raise KeyError("moments")
        return {"x": 1}

    def load_state_dict(self, state):
        pass


def _collects(rank, folder):
    state = _state(rank.world_size)
    with quietly(), CheckpointManager(folder) as manager:
        with pytest.raises((KeyError, StagingError)) as caught:
            manager.save(1, state | {"app": _Broken(rank)}, wait=True)
        with pytest.raises(StagingError) if rank.index else nullcontext():
            manager.wait()
        manager.save(2, state, wait=True)
        return repr(caught.value), manager.steps()


@pytest.mark.promise("state-dict-raises")
def test_a_state_that_one_rank_cannot_collect(tmp_path):
    """It raises what went wrong, the others learn of it at once, and the next save is as usual."""
    first, second = run_ranks(2, _collects, tmp_path)
    assert first == ("""StagingError("the state could not be collected: KeyError: 'moments'")""", [2])
    assert second == ("KeyError('moments')", [2])


def _loses_a_rank(rank, folder):
    state = _state(rank.world_size)
    manager = CheckpointManager(folder, stop_signals=())
    manager.save(1, state, wait=True)
    if rank.index:
        kill_self()
    with quietly(), pytest.raises(WriteError) as caught:
        manager.save(2, state, wait=True)
    with quietly(), suppress(WriteError):
        manager.close(5.0)
    return str(caught.value)


@pytest.mark.promise("manager-rank-killed")
def test_a_rank_that_is_killed_fails_the_next_save_of_the_others(tmp_path):
    """Within seconds, and the checkpoint before it stays."""
    started = time.monotonic()
    told, _ = run_ranks(2, _loses_a_rank, tmp_path / "run", killed={1})
    assert "rank" in told
    assert time.monotonic() - started < 60
    assert [path.parent.name for path in (tmp_path / "run").glob("*/.metadata")] == ["step-1"]


def _some_ranks(rank, folder):
    """The manager of two of three ranks; the third does something else."""
    group = dist.new_group([0, 2])
    if rank.index == 1:
        return None
    state = {"w": torch.zeros(8), "rank": rank.index, "step": 0}
    with CheckpointManager(folder, process_group=group, keep_latest=1) as manager:
        for step in (1, 2):
            state["w"] += 1
            state["step"] = step
            manager.save(step, state)
        manager.wait()
        dist.barrier(group)
        state = {"w": torch.zeros(8), "step": 0}
        return manager.restore(state), state["step"], state["w"].sum().item()


def test_only_some_ranks_have_a_manager(tmp_path):
    """Its groups are made by those alone, and the first of them decides."""
    assert run_ranks(3, _some_ranks, tmp_path / "run") == [(2, 2, 16.0), None, (2, 2, 16.0)]


def test_a_job_of_torchrun_is_preempted(tmp_path):
    """SIGTERM at a step that no save is due at: it goes on, on more ranks, as if nothing had happened."""
    job = Preempted(tmp_path, 100, warm.python())
    job.run(2, stop_at=23)
    stopped = job.logged[-1][0]
    assert 23 <= stopped < 100
    assert (job.checkpoints / f"step-{stopped}" / ".metadata").is_file()
    job.run(3)
    assert job.logged == list(losses(100))


def _save_replicas(rank, folder):
    """Saves a model that all ranks hold and an optimizer that is sharded; returns what each save staged."""
    mesh = init_device_mesh("cpu", (rank.world_size,))
    shard = distribute_tensor(torch.zeros(ROWS, 256), mesh, [Shard(0)])
    state = {"model": {f"layer{n}": torch.zeros(50_000) for n in range(8)}, "adam": shard, "notes": {"step": 0}}
    staged_bytes = []
    stage = Stager.stage

    def counted(self, *args, **options):
        staged = stage(self, *args, **options)
        tensors = [*staged["model"].values(), staged["adam"].to_local()]
        staged_bytes.append(sum(tensor.nbytes for tensor in tensors if not tensor.is_meta))
        return staged

    def save(step):
        for tensor in [*state["model"].values(), shard]:
            tensor.fill_(step)
        state["notes"]["step"] = step
        manager.save(step, state)
        state["model"]["layer0"].fill_(-1)  # training goes on

    Stager.stage = counted
    with CheckpointManager(folder) as manager:
        for step in (1, 2, 3):
            save(step)
        state["model"]["more"] = torch.zeros(1000)
        save(4)
        if rank.index == 0:
            state["model"]["of rank 0"] = torch.zeros(1000)
        save(5)
        manager.wait()
        # One of the ranks has to write it.
        manager._saves.planner.written_elsewhere = frozenset({"model.layer1"})
        with pytest.raises(WriteError) as caught:
            manager.save(6, state, wait=True)
        save(7)
    return staged_bytes, str(caught.value)


def test_replicas_are_staged_by_the_rank_that_writes_them(tmp_path):
    """From the second save on; everything after a change on any rank. What was not staged is never written."""
    state = {"model": {f"layer{n}": torch.zeros(50_000) for n in range(8)}, "notes": {"step": 0}}
    results = run_ranks(2, _save_replicas, tmp_path)
    everything = 8 * 200_000 + ROWS // 2 * 1024
    for staged, said in results:
        assert staged[0] == everything
        assert staged[3] == everything + 4000
        assert staged[4] == staged[6] >= everything + 4000
        assert "'model.layer1' is to be written by this rank, which has not staged it" in said
    for number in (1, 2):
        shares = [staged[number] for staged, _ in results]
        assert sum(shares) == everything + ROWS // 2 * 1024  # each replica once, and each rank its own shard
        assert max(shares) < 0.6 * everything
    with CheckpointManager(tmp_path) as manager:
        for step in (2, 3, 4, 7):
            assert manager.restore(state, step) == step
            assert all(tensor.unique().tolist() == [step] for tensor in state["model"].values())
            assert state["notes"] == {"step": step}


def _goes_back(rank, folder):
    with CheckpointManager(folder, stop_signals=()) as manager:
        for step in (1, 2, 3, 2):
            manager.save(step, {"w": torch.full((4,), step)}, wait=True)
        with pytest.raises(ValueError, match="the ranks save different steps, from 1 to 3"):
            manager.save(1 if rank.index else 3, {"w": torch.zeros(4)})
        return manager.steps(), manager._position.branch


def test_ranks_that_go_back_by_themselves(tmp_path):
    """All are on one new branch; where only one goes back, all are told so."""
    (steps, branch), other = run_ranks(2, _goes_back, tmp_path)
    assert (steps, len(branch)) == ([2], 1)
    assert other == (steps, branch)


def _fails_on_one(rank, folder, broken):
    """Saves on a mount that others may share, where one rank cannot write; returns what is left, and what was said."""
    local.file_system = lambda path: "nfs"
    results = saving.write_results

    def write_results(*arguments):
        if rank.index == broken:
            raise WriteError("the disk is gone")
        return results(*arguments)

    saving.write_results = write_results
    with quietly(), CheckpointManager(folder) as manager:
        with pytest.raises(WriteError, match=f"rank {broken}: the disk is gone"):
            manager.save(1, _state(rank.world_size), wait=True)
        dist.barrier()
        left = sorted(os.listdir(folder / "step-1"))
        dist.barrier()
        saving.write_results = results
        manager.save(2, _state(rank.world_size), wait=True)
        return left, manager.steps()


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_cannot_write_leaves_nothing_of_the_others(tmp_path, broken):
    """They remove what they have written, also where nobody else can prove whose it is; the next save is as usual."""
    assert run_ranks(2, _fails_on_one, tmp_path, broken) == [([], [2])] * 2
