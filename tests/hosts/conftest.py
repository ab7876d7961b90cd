"""Tests that need root: disks of their own, and hosts made of namespaces. ``make hosts`` runs them.

All of it is in a mount namespace of this process, and hangs on processes that end with it: nothing outlives the tests,
even if they are killed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..lab.leak_check import nothing_left_behind
from .disks import Disk
from .lab import Lab
from .requirements import missing

__all__ = ["nothing_left_behind"]


def pytest_configure(config: pytest.Config) -> None:
    """Refuses to begin where the tests cannot run: nothing is skipped."""
    if (reason := missing()) is not None:
        raise pytest.UsageError(reason)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    """Mounts disks: ``small_disk(nbytes)`` or ``small_disk(nbytes, "ext4")``. They go when the test is over."""
    disks: list[Disk] = []

    def mount(nbytes: int = 16 << 20, kind: str = "tmpfs") -> Disk:
        disks.append(Disk(tmp_path / f"disk-{len(disks)}", nbytes, kind))
        return disks[-1]

    yield mount
    for disk in disks:
        disk.unmount()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """A network without hosts: ``lab.host()`` adds one. All end when the test is over."""
    with Lab(tmp_path / "lab") as network:
        yield network
