"""Local files are written in aligned parts past the page cache, with O_DIRECT.

O_DIRECT takes a tenth of the CPU time of a buffered write, and leaves the page cache to the training data. Some file
systems refuse it (tmpfs before Linux 6.6, some network mounts). There, parts go through the page cache and are then
dropped from it.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from contextlib import ExitStack, suppress
from pathlib import Path

from .._descriptor import too_large, too_many
from .._process_context import current_umask
from .base import Sink

__all__ = ["BLOCK", "LocalSink", "explained", "give_mode", "new_file", "open_direct"]

BLOCK = 4096
"""O_DIRECT's unit. No file system in use needs a larger one."""

_OF_OWNER = 0o600


class LocalSink(Sink):
    """A new local file of known size.

    Args:
        path: Where to create it; it must not exist.
        nbytes: Its size.
        sync: Make the data durable in `complete`.
        preallocate: Reserve the space first, so that a full disk is an error before the work begins. Many network
            mounts cannot do that, and then glibc imitates it by writing zeros.
        umask: Of the file; None for the process's own.

    Raises:
        OSError: the file cannot be created or written.
    """

    part_bytes = 4 << 20  # 1 to 8 MiB are equally fast; a larger one costs less Python a byte, and more memory
    concurrency = 6  # 4,000 files of 215 kB in one: 10% faster than with 2, as with 8

    def __init__(
        self, path: Path, nbytes: int, *, sync: bool, preallocate: bool = True, umask: int | None = None
    ) -> None:
        super().__init__()
        self.path = path
        self._sync = sync
        self._fd = new_file(path, umask)
        self._direct_fd = open_direct(path, os.O_WRONLY)
        self._to_close = [self._fd] if self._direct_fd is None else [self._fd, self._direct_fd]
        try:
            if preallocate and self._direct_fd is not None and hasattr(os, "posix_fallocate") and nbytes:
                os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            self.abort()
            raise explained(error) from error

    def _put_part(self, number: int, data: memoryview) -> None:
        offset = number * self.part_bytes
        whole = data.nbytes // BLOCK * BLOCK
        try:
            if self._direct_fd is None or not _put_direct(self._direct_fd, data[:whole], offset):
                whole = 0
            _put(self._fd, data[whole:], offset + whole)
        except OSError as error:
            raise explained(error) from error

    def _complete(self) -> None:
        if self._sync:
            os.fsync(self._fd)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._close_descriptors()

    def _abort(self) -> None:
        try:
            self._close_descriptors()
        finally:
            self.path.unlink(missing_ok=True)

    def _close_descriptors(self) -> None:
        """Closes all, once: a number is free also where its close fails, and may be another thread's file by then."""
        numbers, self._to_close = self._to_close, []
        with ExitStack() as closing:
            for number in numbers:
                closing.callback(os.close, number)


def new_file(path: Path, umask: int | None = None) -> int:
    """A descriptor of a new file, with the mode that any program's would have: see `give_mode`."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        words = explained(error)
        raise words from (None if words is error else error)
    give_mode(fd, 0o666, umask)
    return fd


def explained(error: OSError) -> OSError:
    """An error of the system's, which says why, where that is to be seen, and what to do."""
    if error.errno == errno.EFBIG:
        return OSError(error.errno, f"{os.strerror(error.errno)}: {too_large()}")
    if (words := too_many(error)) is not None:
        return OSError(error.errno, words)
    if not isinstance(error, PermissionError) or not error.filename:
        return error
    path = Path(os.fsdecode(error.filename))
    for folder in (path, *path.parents):  # whatever can be looked at is where the way ends
        with suppress(OSError):
            status = folder.stat()
            whose = f"{folder} belongs to {_name(status.st_uid)} (mode {stat.S_IMODE(status.st_mode):o})"
            asks = f"this process is {_name(os.geteuid())}"
            words = f"{error.strerror}: {whose}, and {asks}: have it let this process write, or save elsewhere"
            return PermissionError(error.errno, words)
    return error


def _name(user: int) -> str:
    with suppress(KeyError):
        return f"user {pwd.getpwuid(user).pw_name} ({user})"
    return f"user {user}"


def give_mode(made: int | Path, full: int, umask: int | None) -> None:
    """Gives a file or directory that was just made the mode that it would have with a umask.

    The process may have set another umask since its save began. And a thread that reads it by setting another one, and
    that back, may have done so just now: what its own maker cannot open again is never meant. Where a directory has
    default access rights, no umask counts, and nothing is changed.

    Args:
        made: Its descriptor or path.
        full: The mode without a umask.
        umask: Of the save; None for the process's own.
    """
    with suppress(OSError):  # the file system has modes of its own
        mode = stat.S_IMODE(os.stat(made).st_mode)
        is_usable, permissions = mode & _OF_OWNER == _OF_OWNER, mode & 0o777
        if is_usable and (umask is None or permissions == full & ~umask):
            return
        own = current_umask()
        wanted = own if umask is None else umask
        if own is None or wanted is None or (is_usable and permissions != full & ~own):
            return
        os.chmod(made, mode & ~0o777 | full & ~wanted)


def open_direct(path: Path, access: int) -> int | None:
    """A descriptor for reads or writes past the page cache; None where the file system has none."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        return os.open(path, access | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None  # tmpfs before Linux 6.6, some network mounts


def _put_direct(fd: int, data: memoryview, offset: int) -> bool:
    """Writes whole blocks past the page cache; False if the file system turns out not to allow that."""
    try:
        _put(fd, data, offset)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _put(fd: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        count = os.pwrite(fd, data, offset)
        offset += count
        data = data[count:]
