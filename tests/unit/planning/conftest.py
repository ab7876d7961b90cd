"""A device mesh of which only one rank exists."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from .sharded_states import RANK, RANKS


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Yields a mesh of two by two ranks, of which this process is the third."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    yield DeviceMesh("cpu", torch.arange(RANKS).view(2, 2))
    dist.destroy_process_group()
