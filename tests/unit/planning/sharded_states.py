"""State dicts with sharded tensors of many layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.device_mesh import DeviceMesh

RANK, RANKS = 2, 4


def dtensor(mesh: DeviceMesh, placements: list[Placement], local: torch.Tensor, shape: tuple[int, ...]) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def state_of(mesh: DeviceMesh) -> dict[str, Any]:
    """Returns a state dict of repeated layouts, with values of all other kinds in between."""
    state: dict[str, Any] = {}
    alone = DeviceMesh("cpu", [RANK])
    for layer in range(3):
        state |= {
            f"{layer}.rows": dtensor(mesh, [Replicate(), Shard(0)], torch.rand(3, 5), (6, 5)),
            f"{layer}.uneven": dtensor(mesh, [Shard(0), Replicate()], torch.rand(3, 5), (7, 5)),
            f"{layer}.both": dtensor(mesh, [Shard(0), Shard(1)], torch.rand(3, 3), (6, 5)),
            f"{layer}.twice": dtensor(mesh, [Shard(0), Shard(0)], torch.rand(2, 5), (8, 5)),
            f"{layer}.replicated": dtensor(mesh, [Replicate(), Replicate()], torch.rand(6, 5), (6, 5)),
            f"{layer}.alone": dtensor(alone, [Shard(0)], torch.rand(6, 5), (6, 5)),
            f"{layer}.half": dtensor(mesh, [Replicate(), Shard(0)], torch.rand(3, 5).half(), (6, 5)),
            f"{layer}.gradient": dtensor(mesh, [Replicate(), Shard(0)], torch.rand(3, 5).requires_grad_(), (6, 5)),
            f"{layer}.plain": torch.rand(2, 2),
            f"{layer}.object": {"step", layer},
            f"{layer}.elsewhere": dtensor(DeviceMesh("cpu", [0]), [Shard(0)], torch.rand(0), (6, 5)),
        }
    return state


class Shardless(ShardedTensor):
    """Returns a ShardedTensor without a process group, and without a shard on this rank."""

    device = torch.device("cpu")

    def __new__(cls) -> Shardless:
        """Makes it of nothing: torch only looks at its shards."""
        return torch.Tensor._make_subclass(cls, torch.empty(0))  # type: ignore[no-any-return]

    def __init__(self) -> None:
        """Has nothing to set up."""

    def local_shards(self) -> list[Any]:
        return []
