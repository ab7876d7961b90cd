"""The ranks of the job."""

from __future__ import annotations

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp_tensorizer._runtime.ranks import is_distributed, rank_of_job, world_size_of_job


def test_ranks_are_those_of_the_default_group() -> None:
    """Without a process group, this process is rank 0 of 1."""
    assert (is_distributed(), rank_of_job(), world_size_of_job()) == (False, 0, 1)
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    try:
        assert (is_distributed(), rank_of_job(), world_size_of_job()) == (True, 3, 8)
    finally:
        dist.destroy_process_group()
    assert (is_distributed(), rank_of_job(), world_size_of_job()) == (False, 0, 1)
