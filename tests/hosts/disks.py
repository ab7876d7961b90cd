"""Disks that tests fill, make read-only, break and freeze."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

__all__ = ["Disk", "command"]

_SHUTDOWN = 0x8004587D
"""The request to ext4 and xfs that makes all that is asked of them fail: EXT4_IOC_SHUTDOWN."""
_NO_LOG_FLUSH = 2

# Thaws a disk when the process that froze it closes the pipe, or is killed: else its writers would hang for ever. If it
# hangs there itself, its end of the pipe stays open: then time decides.
_THAW = """
import select, subprocess, sys
select.select([sys.stdin], [], [], 100)
subprocess.run(["fsfreeze", "--unfreeze", sys.argv[1]])
"""


def command(*words: object) -> str:
    """Runs a command, and returns what it prints; an error has what it says."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, words))}: {done.stderr.strip() or done.returncode}")
    return done.stdout


class Disk:
    """A small file system, mounted at `path`.

    Args:
        path: An empty directory, which is made.
        nbytes: The size.
        kind: "tmpfs"; "ext4" in a file, which can also be frozen and broken; or another kind in a file.
    """

    def __init__(self, path: Path, nbytes: int, kind: str = "tmpfs") -> None:
        self.path, self.kind = path, kind
        self._thawing: subprocess.Popen[bytes] | None = None
        path.mkdir()
        if kind == "tmpfs":
            command("mount", "-n", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", path)
            return
        image = path.with_suffix(".image")
        with open(image, "wb") as file:
            file.truncate(nbytes)
        command(f"mkfs.{kind}", "-q", image)
        command("mount", "-n", "-o", "loop", image, path)

    def fill(self, leave: int = 0) -> Path:
        """Fills it with one file, up to so many bytes; returns that."""
        filler, block = self.path / "filler", bytes(1 << 16)
        with open(filler, "ab", buffering=0) as file, suppress(OSError):  # it is full
            while not leave or self.free > leave:
                file.write(block[: self.free - leave] if leave else block)
                os.fsync(file.fileno())  # ext4 counts what it has written
        return filler

    @property
    def free(self) -> int:
        """Bytes that are free."""
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def read_only(self, value: bool = True) -> None:
        """Mounts it anew, read-only or not. No file may be open for writing: see `fail` for an error in the middle."""
        command("mount", "-n", "-o", f"remount,{'ro' if value else 'rw'}", self.path)

    def fail(self) -> None:
        """Breaks an ext4: all that is asked of it is an I/O error, also of files that are open."""
        directory = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(directory, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(directory)

    def freeze(self) -> None:
        """Freezes an ext4: whoever writes hangs in the kernel, and cannot be killed, until `thaw`."""
        thawing = [sys.executable, "-S", "-E", "-c", _THAW, str(self.path)]
        self._thawing = subprocess.Popen(thawing, stdin=subprocess.PIPE, start_new_session=True)
        command("fsfreeze", "--freeze", self.path)

    def thaw(self) -> None:
        """Lets those go on that hang; nothing if it is not frozen."""
        if self._thawing is not None:
            self._thawing.communicate()
            self._thawing = None

    def unmount(self) -> None:
        """Unmounts it, thawed, whoever uses it."""
        self.thaw()
        while os.path.ismount(self.path):  # there may be another one upon it
            command("umount", "--lazy", self.path)
