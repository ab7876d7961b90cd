"""Inside a manager: its job, for tests that look at what no user sees."""

from __future__ import annotations

from dcp_tensorizer import CheckpointManager
from dcp_tensorizer._job.job import Job

__all__ = ["job_of", "wait_kept"]


def job_of(manager: CheckpointManager) -> Job:
    """The job of a manager."""
    return manager._job


def wait_kept(manager: CheckpointManager) -> None:
    """Waits until the newest state is kept in memory (``survive``)."""
    job_of(manager).survival.wait_kept()
