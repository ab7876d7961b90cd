"""Generated sharded states survive on any number of ranks: uneven, empty, replicated shards."""

import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter

from ..lab.ranks import run_ranks
from ..lab.states import assert_same
from .training import full, random_tensor


def _sharded(seed, mesh, zero=False):
    """A state of some tensors, each distributed in a way of its own: the same on any number of ranks."""
    chance = random.Random(seed)
    state = {}
    for number in range(chance.randint(1, 8)):
        dtype = chance.choice([torch.float32, torch.bfloat16, torch.int64, torch.float16, torch.uint8])
        shape = tuple(chance.randint(0, 9) for _ in range(chance.randint(1, 3)))
        placement = chance.choice([Replicate(), *(Shard(dim) for dim in range(len(shape)))])
        tensor = random_tensor(dtype, shape, seed * 100 + number)
        tensor = distribute_tensor(torch.zeros_like(tensor) if zero else tensor, mesh, [placement])
        state.setdefault(f"layer{number % 3}", {})[f"{chance.choice('abc')}{number}"] = tensor
    return state


SEEDS = range(30)


def _save_sharded(rank, folder):
    mesh = init_device_mesh("cpu", (rank.world_size,))
    with TensorizerStorageWriter(thread_count=1) as writer:
        for seed in SEEDS:
            state = _sharded(seed, mesh)
            dcp.async_save(
                state, checkpoint_id=folder / str(seed), storage_writer=writer, process_group=rank.saves
            ).result()


def _load_sharded(rank, folder):
    mesh = init_device_mesh("cpu", (rank.world_size,))
    for seed in SEEDS:
        loaded = _sharded(seed, mesh, zero=True)
        dcp.load(loaded, storage_reader=TensorizerStorageReader(folder / str(seed)))
        assert_same(full(loaded), full(_sharded(seed, mesh)), f"seed {seed}")
    dist.barrier()
    return len(SEEDS)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    run_ranks(3, _save_sharded, folder)
    return folder


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_generated_sharded_states_survive_on_any_number_of_ranks(sharded, world_size):
    """Uneven, empty and replicated shards of 30 states, saved by three ranks."""
    assert run_ranks(world_size, _load_sharded, sharded) == [len(SEEDS)] * world_size
