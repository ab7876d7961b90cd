"""Finds out whether the tests for hosts can run here: ``python -m tests.hosts.requirements`` says why not."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys

__all__ = ["missing"]

_TOOLS = {  # by Debian's and Ubuntu's package
    "iproute2": ("ip",),
    "util-linux": ("fsfreeze", "nsenter", "setpriv", "unshare"),
    "mount": ("losetup", "mount", "umount"),
    "e2fsprogs": ("mkfs.ext4",),
    "gcc": ("cc",),  # for clocks that differ
}
_CLONE_NEWNS = 0x20000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000


def missing() -> str | None:
    """Returns what these tests lack here, and what to do about it; None if nothing.

    If nothing, this process has from now on a mount namespace of its own, and in it a /dev/shm of its own.
    """
    if os.geteuid():
        return "tests/hosts mount disks and make network namespaces: run `make hosts` as root, in a container or VM"
    absent = [package for package, names in _TOOLS.items() if not all(map(shutil.which, names))]
    if absent:
        return f"tests/hosts need programs that are not here: apt-get install -y {' '.join(absent)}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        reason = os.strerror(ctypes.get_errno())
        return f"tests/hosts cannot mount here ({reason}): a container needs --privileged, or CAP_SYS_ADMIN"
    for command in (
        ["mount", "-n", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm"],
        ["losetup", "--find"],
        ["unshare", "--net", "--pid", "--fork", "--mount-proc", "true"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return (
                f"tests/hosts need mounts, loop devices and namespaces: {' '.join(command)} says: {done.stderr.strip()}"
            )
    return None


if __name__ == "__main__":
    sys.exit(missing())
