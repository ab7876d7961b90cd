"""Records that are valid in one directory alone: a copy of one, wherever it is, is none.

Programs that copy a directory bring a checkpoint's data first and its metadata last, and restore the times of files. So
neither what is missing nor how old a file is tells whether a save has died there. A record does: it names the boot of
the machine, and the directory and itself as the process that wrote it saw them. Inodes are used again, so it also names
the moment, which must be that of its last change: nobody can set that.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["boot_id", "is_record", "put_record"]

_MAX_BYTES = 4096
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# A file system's clock may be a tick of the kernel behind: at most 10 ms.
_TOLERANCE = 0.05
_ATTEMPTS = 20  # the process may lose its core between two lines


def boot_id() -> str:
    """Of this machine since it was started; raises `OSError` where that is unknown."""
    return _BOOT_ID.read_text()


def put_record(path: Path) -> None:
    """Writes a record; raises `OSError`, also where the boot is unknown.

    It need not be durable: after another boot it proves nothing.
    """
    boot = boot_id()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for _ in range(_ATTEMPTS):
            os.pwrite(descriptor, f"{time.time():020.6f}\n{boot}{_places(path, descriptor)}".encode(), 0)
            if _is_valid(path, descriptor):
                return
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def is_record(path: Path) -> bool:
    """Whether a file is a record that was written at this place since the machine was booted."""
    with suppress(OSError, ValueError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return _is_valid(path, descriptor)
        finally:
            os.close(descriptor)
    return False


def _is_valid(path: Path, descriptor: int) -> bool:
    moment, _, places = os.pread(descriptor, _MAX_BYTES, 0).decode().partition("\n")
    is_original = abs(os.fstat(descriptor).st_ctime - float(moment)) < _TOLERANCE
    return is_original and places == boot_id() + _places(path, descriptor)


def _places(path: Path, descriptor: int) -> str:
    """The inodes that a record names: the directory's, and its own."""
    return "".join(f"{state.st_dev} {state.st_ino}\n" for state in (os.stat(path.parent), os.fstat(descriptor)))
