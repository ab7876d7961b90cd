"""Descriptors that this process keeps for long, and that code it knows nothing of may close.

A daemon closes all descriptors that it can think of (``os.closerange``). The next file that somebody opens has the
number then. To send, read or close it would be to send, read or close somebody else's file. So the file behind a number
is looked at before the number is used.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import tempfile
import weakref

from ._forks import in_child

__all__ = ["Descriptor", "above_standard_streams", "anonymous_file", "identity", "too_large", "too_many"]

_LAST_STANDARD_STREAM = 2
_OF_SAVE = 7  # at once, when the writer process is started: docs/failures.md counts them


def identity(fd: int) -> tuple[int, int] | None:
    """Tells one open file from another; None if the descriptor is closed."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


class Descriptor:
    """A descriptor that is closed with this object, with `close`, and in forked children.

    Args:
        fd: An open one, which belongs to this object from now on.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._file = identity(fd)
        self._close = weakref.finalize(self, _close, fd, self._file)
        in_child(self, Descriptor.close)

    @property
    def is_ours(self) -> bool:
        """Whether the number still stands for the file."""
        return self._close.alive and identity(self._fd) == self._file

    @property
    def number(self) -> int:
        """The number; raises `OSError` if it does not stand for the file any more."""
        if not self.is_ours:
            raise OSError(errno.EBADF, f"{os.strerror(errno.EBADF)}: this process has closed it (os.closerange?)")
        return self._fd

    def close(self) -> None:
        """Closes the file, unless somebody else has. Idempotent."""
        self._close()


def anonymous_file(name: str) -> int:
    """A new file in memory, which needs no directory; elsewhere than on Linux, a temporary file.

    Raises:
        OSError: it is refused, or there are no more descriptors; says what to do.
    """
    if hasattr(os, "memfd_create"):
        try:
            return above_standard_streams(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        except OSError as error:
            if (words := too_many(error)) is not None:
                raise OSError(error.errno, words) from error
            if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOSYS):
                raise
            raise OSError(
                error.errno,
                f"{os.strerror(error.errno)}: the system refuses memfd_create, by which processes share memory: allow "
                f"that call in the sandbox's rules (seccomp), and by vm.memfd_noexec=0 or 1",
            ) from error
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def too_large() -> str:
    """Why the system has called a file too large, and what to do."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == resource.RLIM_INFINITY:
        return "the file system takes no file of that size"
    return (
        f"this process may make no file, in memory either, of more than {limit:,} bytes: raise that limit (ulimit -f)"
    )


def too_many(error: OSError) -> str | None:
    """What an error says, and what to do, where descriptors are short; None where it is another one."""
    if error.errno == errno.EMFILE:
        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        allowed = "any number" if most == resource.RLIM_INFINITY else f"{most:,}"
        return (
            f"{os.strerror(errno.EMFILE)}: this process may have {limit:,} descriptors, and a save needs up to "
            f"{_OF_SAVE} at once: raise that limit (ulimit -n; {allowed} are allowed), or open fewer files"
        )
    if error.errno == errno.ENFILE:
        return f"{os.strerror(errno.ENFILE)}: the whole machine has no descriptors left: raise fs.file-max"
    return None


def above_standard_streams(fd: int) -> int:
    """Another number for an open file, whose own is closed, if that is one of 0 to 2.

    A daemon closes those. Whatever prints would then print into the file, and a child that is started has its own
    streams there.
    """
    if fd > _LAST_STANDARD_STREAM:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _LAST_STANDARD_STREAM + 1)
    finally:
        os.close(fd)


def _close(fd: int, file: tuple[int, int] | None) -> None:
    if file is not None and identity(fd) == file:
        os.close(fd)
