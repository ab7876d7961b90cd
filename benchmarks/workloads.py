"""The states that are saved and loaded: deterministic values that no file system can compress away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

MIB = 1 << 20


def many_medium(scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Returns 300 tensors of 7 MB, as the layers of a medium model: 2.2 GB."""
    return _tensors(int(300 * scale), 7 * MIB)


def many_small(scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Returns 5,000 tensors of 215 kB, as an optimizer's states: 1.07 GB."""
    return _tensors(int(5000 * scale), 1024 * MIB // 5000 // 4 * 4)


def a_thousand(scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Returns 1,000 tensors of 107 kB: 0.1 GB, for which the work per tensor counts more than that per byte."""
    return _tensors(int(1000 * scale), 1024 * MIB // 10_000 // 4 * 4)


def very_many(scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Returns 20,000 tensors of 54 kB: 1.07 GB."""
    return _tensors(int(20_000 * scale), 1024 * MIB // 20_000 // 4 * 4)


def one_large(scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Returns one tensor of 2.1 GB, as a flat parameter."""
    return _tensors(1, int(2048 * MIB * scale) // 4 * 4)


MAIN = "300 x 7 MB"
WORKLOADS: dict[str, Callable[[float], dict[str, torch.Tensor]]] = {
    MAIN: many_medium,
    "5,000 small": many_small,
    "one 2 GB": one_large,
}

CEILING = WORKLOADS | {"20,000 small": very_many}
"""The workloads of saves without a disk."""


@dataclass(frozen=True)
class Setting:
    """A workload, and the training beside it.

    Attributes:
        title: The name on pages and pictures.
        make: Makes the state; its argument scales the number of tensors, or the size of the only one.
        loop: The training that runs meanwhile: a key of `save_case.LOOPS`.
    """

    title: str
    make: Callable[[float], dict[str, torch.Tensor]]
    loop: str = "products"


TITLES = {
    MAIN: "300 tensors of 7 MB each, 2.2 GB",
    "5,000 small": "5,000 small tensors, 1.1 GB",
    "one 2 GB": "one tensor of 2.1 GB",
}
"""The names of workloads on pages and pictures."""

SETTINGS = {name: Setting(TITLES[name], make) for name, make in WORKLOADS.items()} | {
    "tmpfs": Setting("300 tensors of 7 MB each to tmpfs, 2.2 GB", many_medium),
    "python": Setting("1,000 tensors of 107 kB beside a pure Python loop, 0.1 GB", a_thousand, loop="python"),
}
"""The settings of the save benchmark."""


def nbytes(state: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def sharded(state: dict[str, torch.Tensor], dim: int = 0, *, blank: bool = False) -> dict[str, Any]:
    """Replaces the whole tensors of a state by shards, one on each rank, or by zeros in the same shards."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor, zeros

    mesh, where = init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(dim)]
    if blank:
        return {key: zeros(state.pop(key).shape, device_mesh=mesh, placements=where) for key in list(state)}
    return {key: distribute_tensor(state.pop(key), mesh, where) for key in list(state)}


def _tensors(count: int, size: int) -> dict[str, torch.Tensor]:
    # Random bits are made once and rotated: making 2 GB of them would take longer than a save.
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randint(-(1 << 31), 1 << 31, (size // 4,), generator=generator, dtype=torch.int64).to(torch.int32)
    state = {}
    for number in range(count):
        tensor = torch.empty(size // 4, dtype=torch.float32)
        tensor.view(torch.int32).copy_(pattern).add_(number)
        state[f"model.layers.{number}.weight"] = tensor.view(-1, 256) if tensor.numel() % 256 == 0 else tensor
    return state
