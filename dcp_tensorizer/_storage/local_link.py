"""Hard links: one file of two checkpoints, so that the second one costs no space and no time.

A linked file is a part of several checkpoints. So it loses the permission to be written when it gets its second name,
and it is linked only if nobody has touched it since it was written.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from .base import FileIdentity

__all__ = ["identity_of", "link_file"]

_WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


def identity_of(status: os.stat_result) -> FileIdentity | None:
    """Device, inode, size and time of the last write of a file; None of anything else."""
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def link_file(source: Path, identity: FileIdentity, target: Path, *, sync: bool) -> bool:
    """Gives a file a second name; the directory of that has to be fsynced.

    Nothing is raised: there may be no file, or another one (ENOENT), it may be on another file system (EXDEV), have too
    many names (EMLINK), belong to somebody else or be on a file system without links (EPERM), and more.

    Args:
        source: The file.
        identity: What it must be.
        target: Its second name, which must be free.
        sync: Make its data durable: who wrote it may not have.

    Returns:
        Whether it has its second name.
    """
    with suppress(OSError):
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if identity_of(os.fstat(descriptor)) != identity:
                return False
            with suppress(OSError):  # of a network mount that asks twice, although it was done: what is there counts
                os.link(source, target, follow_symlinks=False)
            # What cannot be linked stays as it is, and nobody waits for its disk.
            return _is_linked(target, identity) and _is_settled(descriptor, target, sync=sync)
        finally:
            os.close(descriptor)
    return False


def _is_settled(descriptor: int, target: Path, *, sync: bool) -> bool:
    """Takes the permission to write from a file that has its second name, and makes it durable; or takes that back."""
    try:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        if mode & _WRITABLE:
            os.fchmod(descriptor, mode & ~_WRITABLE)
        if sync:
            os.fsync(descriptor)
    except OSError:
        target.unlink()
        return False
    return True


def _is_linked(target: Path, identity: FileIdentity) -> bool:
    """Whether a name is of the file that was meant. Somebody may have put another one in its place meanwhile.

    If it is not, or cannot be seen to be, it is removed: the file that is written then must find it free.
    """
    with suppress(OSError):
        if identity_of(os.lstat(target)) == identity:
            return True
    target.unlink(missing_ok=True)
    return False
