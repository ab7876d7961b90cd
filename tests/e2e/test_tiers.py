"""Nodes with disks of their own: each rank here has a local folder that no other rank can see."""

import logging
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dcp_tensorizer import CheckpointManager, SaveLimits, TensorizerStorageWriter, WriteError

from ..lab.ranks import run_ranks
from ..lab.states import directories_in

ROWS = 24


def _state(world_size, value=0):
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.full((ROWS, 4096), float(value))
    shards = distribute_tensor(whole, mesh, [Shard(0)])
    return {"w": shards, "same": distribute_tensor(whole[:1].clone(), mesh, [Replicate()]), "step": value}


def _manager(folder, node):
    limits = SaveLimits(timeout=60.0)
    return CheckpointManager(folder / "remote", local=folder / f"node-{node}", stop_signals=(), limits=limits)


def _restore(rank, folder, nodes):
    """Returns the restored step and values."""
    state = _state(rank.world_size)
    with _manager(folder, nodes[rank.index]) as manager:
        step = manager.restore(state)
    return step, state["step"], state["w"].full_tensor().unique().tolist(), state["same"].to_local().unique().tolist()


@pytest.fixture
def cut_off(tmp_path):
    """Returns a folder with step 1 on the remote, and step 2 in the local folders of two nodes alone."""
    run_ranks(2, _save, tmp_path)
    (tmp_path / "remote").unlink()
    shutil.move(tmp_path / "away", tmp_path / "remote")
    return tmp_path


def _save(rank, folder):
    """Saves step 1, and step 2 while the remote cannot be reached."""
    remote = folder / "remote"
    writer = TensorizerStorageWriter(remote, local=folder / f"node-{rank.index}")
    for step in (1, 2):
        state, path = _state(rank.world_size, step), remote / f"step-{step}"
        dcp.async_save(state, storage_writer=writer, checkpoint_id=path, process_group=rank.saves).result()
        if step == 1:
            assert writer.wait_remote(60)
            dist.barrier(rank.saves)
            if rank.index == 0:
                shutil.move(remote, folder / "away")
                remote.touch()
            dist.barrier(rank.saves)
    writer.close(0.5)


@pytest.mark.parametrize("nodes", [(0, 1), (1, 0)], ids=["same-ranks", "other-ranks"])
def test_what_lies_on_several_nodes_is_brought_together(cut_off, nodes):
    """The next job waits until the remote has the step, and restores it, whichever node each rank is on."""
    assert run_ranks(2, _restore, cut_off, nodes) == [(2, 2, [2.0], [2.0])] * 2
    assert directories_in(cut_off / "remote") == ["step-1", "step-2"]


@pytest.mark.parametrize("node", [0, 1], ids=["of-the-coordinator", "of-another-rank"])
def test_a_step_of_a_lost_node_is_given_up(cut_off, node):
    """The step of a lost node is an error on each rank, and the remote keeps only the step before."""
    (cut_off / "remote" / "step-2").mkdir()
    for file in (cut_off / "node-0" / "step-2").iterdir():  # it was sent
        shutil.copy(file, cut_off / "remote" / "step-2")
    shutil.rmtree(cut_off / f"node-{node}")
    restored = run_ranks(2, _restore_after_a_loss, cut_off)
    words = f"{cut_off}/remote/step-2 is given up, and will not be on the remote: no node of this job has"
    for result, errors, raised in restored:
        assert result == (1, 1, [1.0], [1.0])
        assert [error.startswith(words) for error in errors] == [True]
        assert raised == errors[0]
    assert directories_in(cut_off / "remote") == ["step-1"]
    assert not list((cut_off / f"node-{1 - node}").glob("step-2"))


def _restore_after_a_loss(rank, folder):
    """Returns the restored values, the logged errors, and the error of `wait_remote`."""
    handler, errors, state = logging.Handler(logging.ERROR), [], _state(rank.world_size)
    handler.emit = lambda record: errors.append(record.getMessage())
    logging.getLogger("dcp_tensorizer").addHandler(handler)
    with _manager(folder, rank.index) as manager:
        step = manager.restore(state)
        with pytest.raises(WriteError) as caught:
            manager.wait_remote(60)
        assert manager.wait_remote(60)
    result = step, state["step"], state["w"].full_tensor().unique().tolist(), state["same"].to_local().unique().tolist()
    return result, errors, str(caught.value)
