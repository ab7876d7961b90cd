"""A model that is quantised by blocks, loaded by ranks whose shards begin and end in the middle of blocks."""

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_tensorizer import open_reader

from ..integration.test_quantised import SHAPES, model, targets
from ..lab.ranks import run_ranks


def _load(rank, folder):
    """Loads each weight by rows and by columns; returns both as wholes."""
    mesh, loaded = init_device_mesh("cpu", (rank.world_size,)), []
    for dim in (0, 1):
        state = {name: distribute_tensor(torch.zeros(shape), mesh, [Shard(dim)]) for name, shape in SHAPES.items()}
        dcp.load(state, storage_reader=open_reader(folder))
        loaded.append({name: tensor.full_tensor() for name, tensor in state.items()})
    return loaded


def test_shards_are_multiplied_by_their_own_blocks(tmp_path):
    """Three ranks load what one loads, by rows and by columns."""
    model(tmp_path)
    expected = targets()
    dcp.load(expected, storage_reader=open_reader(tmp_path))
    for loaded in run_ranks(3, _load, tmp_path)[0]:
        assert all(torch.equal(loaded[name], expected[name]) for name in SHAPES)
