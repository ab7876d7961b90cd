"""Saves of several process groups, which no order ties to each other, and the groups that managers make."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer import (
    CheckpointManager,
    Export,
    TensorizerStorageReader,
    TensorizerStorageWriter,
    WriteError,
    unwrap,
)

from ..lab.processes import quietly
from ..lab.ranks import eventually, run_ranks

WORLD = 2
SAVES = 2


def _start_in_another_order(rank, folder):
    """Starts a save of each group, on each rank with another one first; returns what the checkpoints hold."""
    groups = [dist.new_group(backend="gloo", timeout=timedelta(seconds=30)) for _ in range(SAVES)]
    order = range(SAVES) if rank.index == 0 else reversed(range(SAVES))
    with TensorizerStorageWriter() as writer:
        futures = [
            dcp.async_save(
                {"w": torch.full((1000,), float(number)), f"rank{rank.index}": torch.tensor(number)},
                checkpoint_id=folder / str(number),
                storage_writer=writer,
                process_group=groups[number],
            )
            for number in order
        ]
        for future in futures:
            future.result()
    found = []
    for number in range(SAVES):
        state = {"w": torch.zeros(1000), **{f"rank{index}": torch.tensor(-1) for index in range(WORLD)}}
        dcp.load(state, storage_reader=TensorizerStorageReader(folder / str(number)), no_dist=True)
        found.append([float(state["w"].min()), *(int(state[f"rank{index}"]) for index in range(WORLD))])
    return found


@pytest.mark.promise("saved-when-done", reason="on each rank, the data of all")
def test_ranks_may_start_saves_of_two_groups_in_another_order(tmp_path):
    """None waits for a save that the other rank starts later, though one thread and one writer start them."""
    for found in run_ranks(WORLD, _start_in_another_order, tmp_path):
        assert found == [[0.0, 0, 0], [1.0, 1, 1]]


def _fails_too_often(rank, folder):
    """Saves of two groups, of which one's always fail; returns what each rank gets of the save after three."""
    failing, other = rank.saves, dist.new_group(backend="gloo")
    (folder / "file").touch()
    state = {"w": torch.ones(10)}
    with quietly(), TensorizerStorageWriter() as writer:

        def fail(step):
            where = folder / "file" / f"step-{step}"
            return dcp.async_save(state, checkpoint_id=where, storage_writer=writer, process_group=failing)

        for step in range(3):
            with pytest.raises(CheckpointException, match="cannot create"):
                fail(step).result()
        good = {"checkpoint_id": folder / "good", "storage_writer": writer, "process_group": other}
        dcp.async_save(state, **good).result()
        since = time.monotonic()
        with pytest.raises((WriteError, CheckpointException), match="3 saves in a row were not committed") as caught:
            fail(3).result()
        seconds = time.monotonic() - since
        dcp.async_save(state, **good).result()
        dist.barrier(failing)
        (folder / "file").unlink(missing_ok=True)
        dist.barrier(failing)
        fail(4).result()  # the cause is gone, so it succeeds
    step = {"w": torch.zeros(10)}
    dcp.load(step, storage_reader=TensorizerStorageReader(folder / "file" / "step-4"), no_dist=True)
    return type(caught.value).__name__, type(unwrap(caught.value)).__name__, seconds, step["w"].tolist()


def test_failures_in_a_row_end_the_saves_of_their_group_on_all_ranks(tmp_path):
    """The coordinator's `async_save` raises, the other rank gets the error at once; the next save is tried again."""
    first, second = run_ranks(WORLD, _fails_too_often, tmp_path)
    assert first[3] == second[3] == [1.0] * 10
    assert first[:2] == ("WriteError", "WriteError")
    assert second[:2] == ("CheckpointException", "WriteError")
    assert max(first[2], second[2]) < 30


def _several_managers(rank, folder, members):
    """Uses four managers, the last rank of each long after the others; returns the numbers of threads after them."""
    group = None if members is None else dist.new_group(members)
    if members is not None and rank.index not in members:
        return None
    members = members or range(rank.world_size)
    threads = []
    for number in range(4):
        export = Export(folder / f"{number}-{{}}", every=1)
        manager = CheckpointManager(folder / str(number), save_every=1, export=export, process_group=group)
        manager.save(1, {"model": {"w": torch.ones(10)}}, wait=True)
        are_closed = folder / f"{number}-closed"
        if rank.index == max(members):
            eventually(are_closed.exists)
        manager.close()
        are_closed.touch()
        manager.wait()  # after the end, there is nothing to wait for
        threads.append(len(os.listdir("/proc/self/task")))
    return threads


@pytest.mark.parametrize(("world", "members"), [(2, None), (3, [0, 2])])
def test_a_closed_manager_leaves_no_threads(tmp_path, world, members):
    """Its process groups are destroyed, also where other ranks close later, and new ones never meet old addresses."""
    for threads in run_ranks(world, _several_managers, tmp_path, members):
        assert threads is None or threads == threads[:1] * 4


def _interrupt(number, frame):
    raise KeyboardInterrupt


def _interrupted(rank, folder):
    """Rank 0 is interrupted while it waits for rank 1 in vain; returns the seconds of its close."""
    group = dist.new_group(timeout=timedelta(seconds=40))
    manager = CheckpointManager(folder / "run", save_every=2, process_group=group)
    manager.save(1, {"w": torch.ones(10)})
    is_closed, seconds = folder / "closed", 0.0
    if rank.index == 0:
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            manager.save(2, {"w": torch.ones(10)})
        since = time.monotonic()
        manager.close()
        seconds = time.monotonic() - since
        is_closed.touch()
    eventually(is_closed.exists)
    manager.close()
    return seconds


def test_close_does_not_wait_for_a_collective_that_was_interrupted(tmp_path):
    """The interrupted rank returns at once, and the other one closes after it."""
    assert max(run_ranks(2, _interrupted, tmp_path)) < 20


def _world_destroyed_first(rank, folder):
    manager = CheckpointManager(folder / "run", save_every=1)
    manager.save(1, {"w": torch.ones(10)}, wait=True)
    dist.barrier()
    dist.destroy_process_group()
    manager.close()
    return manager.steps()


def test_a_manager_is_closed_after_the_end_of_all_groups(tmp_path):
    """There is nothing to destroy, and nothing is raised."""
    assert run_ranks(2, _world_destroyed_first, tmp_path) == [[1], [1]]
