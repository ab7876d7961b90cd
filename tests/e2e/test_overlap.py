"""Ranks that train on while their state is copied: in threads and processes, from private memory and shared."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter

from ..lab.ranks import run_ranks

WORLD = 2
STEPS = 4


def _train(rank, folder, staging, mode):
    """Steps under `lock`, each followed by a save; returns what each checkpoint holds, as far as it is this rank's."""
    mesh = init_device_mesh("cpu", (WORLD,))
    local = torch.zeros(200_000)
    state = {
        "sharded": DTensor.from_local(local.share_memory_() if staging == "shared" else local, mesh, [Shard(0)]),
        "plain": torch.zeros(1000),
        "counter": {"step": 0},
    }
    with TensorizerStorageWriter(staging=staging, overlap_staging=True) as writer:
        for step in range(STEPS):
            with writer.lock():
                local.fill_(10 * step + rank.index)
                state["plain"].fill_(step)
            state["counter"]["step"] = step
            response = dcp.async_save(
                state,
                checkpoint_id=folder / str(step),
                storage_writer=writer,
                process_group=rank.saves,
                async_checkpointer_type=mode,
            )
            state["counter"]["step"] = -1  # objects are copied by now
            if step == 0:
                response.upload_completion.result(80)  # else torch starts two processes
            if step == STEPS - 1:
                response.staging_completion.result(60)
                local.fill_(-1)
    dist.barrier()
    found = []
    for step in range(STEPS):
        loaded = {
            "sharded": DTensor.from_local(torch.zeros(200_000), mesh, [Shard(0)]),
            "plain": torch.zeros(1000),
            "counter": {"step": None},
        }
        dcp.load(loaded, storage_reader=TensorizerStorageReader(folder / str(step)), process_group=rank.saves)
        values = loaded["sharded"].to_local(), loaded["plain"]
        found.append((*(tuple(set(value.tolist())) for value in values), loaded["counter"]["step"]))
    return found


@pytest.mark.parametrize("mode", [AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS], ids=lambda m: m.value)
@pytest.mark.parametrize("staging", ["buffer", "shared"])
def test_every_checkpoint_has_the_step_it_was_asked_for(tmp_path, staging, mode):
    """Nothing of the step after, on any rank, by any way, though no later future is waited for."""
    results = run_ranks(WORLD, _train, tmp_path, staging, mode)
    for rank, found in enumerate(results):
        assert found == [((10.0 * step + rank,), (float(step),), step) for step in range(STEPS)]
