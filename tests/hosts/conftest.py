"""Tests that need root: disks of their own, and hosts made of namespaces. ``make hosts`` runs them.

All of it is in a mount namespace of this process, and hangs on processes that end with it: nothing outlives the tests,
even if they are killed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..leak_check import nothing_left_behind, temporary_directory
from .disks import Disk
from .lab import Lab

__all__ = ["nothing_left_behind", "temporary_directory"]

_TOOLS = {  # by Debian's and Ubuntu's package
    "iproute2": ("ip",),
    "util-linux": ("fsfreeze", "nsenter", "setpriv", "unshare"),
    "mount": ("losetup", "mount", "umount"),
    "e2fsprogs": ("mkfs.ext4",),
}
_CLONE_NEWNS = 0x20000


def missing() -> str | None:
    """What these tests lack on this machine, and what to do about it; None if nothing."""
    if os.geteuid():
        return "tests/hosts mount disks and make network namespaces: run `make hosts` as root, in a container or VM"
    absent = [package for package, names in _TOOLS.items() if not all(map(shutil.which, names))]
    if absent:
        return f"tests/hosts need programs that are not here: apt-get install -y {' '.join(absent)}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        reason = os.strerror(ctypes.get_errno())
        return f"tests/hosts cannot mount here ({reason}): a container needs --privileged, or CAP_SYS_ADMIN"
    return None


_MS_REC, _MS_PRIVATE = 0x4000, 0x40000


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
