"""The ranks of the job: those of the default process group, or this process alone."""

from __future__ import annotations

import torch.distributed as dist


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank_of_job() -> int:
    """Returns the rank of this process, 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def world_size_of_job() -> int:
    """Returns the number of ranks, 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1
