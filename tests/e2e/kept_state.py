"""A state that ranks keep in memory, and what is found of it."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

SECONDS = 120  # for which a state is kept; longer than any test: what is left then fails it
_SHAPE = (24, 8)


def sharded_state(rank, step):
    """A sharded tensor, one that all ranks have, an object, and a value of each rank's own."""
    mesh = init_device_mesh("cpu", (rank.world_size,))
    return {
        "w": distribute_tensor(_weights(step), mesh, [Shard(0)]),
        "same": torch.full((3,), step, dtype=torch.bfloat16),
        "step": step,
        "text": f"at {step}",
    }


def values_of(state):
    """What a state has, as Python's own values; a collective."""
    return state["w"].full_tensor().tolist(), state["same"].tolist(), state["step"], state["text"]


def values_at(step):
    """What `values_of` the state of a step are."""
    return _weights(step).tolist(), [float(step)] * 3, step, f"at {step}"


def _weights(step):
    return torch.arange(_SHAPE[0] * _SHAPE[1], dtype=torch.float32).view(_SHAPE) + step
