"""Local files are written in aligned parts past the page cache, with O_DIRECT.

O_DIRECT costs a tenth of the CPU of a buffered write and leaves the page cache to the training data. Where it is
refused (tmpfs before Linux 6.6, some network mounts), parts are written through the page cache, and dropped from it.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

__all__ = ["BLOCK", "LocalSink", "open_direct"]

BLOCK = 4096
"""O_DIRECT's unit: no file system in use asks for more."""
_PART = 4 << 20  # 1 to 8 MiB are equally fast; a larger one costs less Python a byte, and more memory
_WRITERS = 2


class LocalSink:
    """A new local file of known size, written in parts, in any order and by several threads.

    Args:
        path: Where to create it; it must not exist.
        nbytes: Its size.
        sync: Make the data durable in `complete`.
        preallocate: Take the room for it first, so that a full disk is known before the work begins. Where the file
            system has nothing for that, as many network mounts, glibc would imitate it by writing zeros.

    Raises:
        OSError: the file cannot be created or written.
    """

    part_bytes = _PART
    concurrency = _WRITERS
    in_order = False

    def __init__(self, path: Path, nbytes: int, *, sync: bool, preallocate: bool = True) -> None:
        self.path = path
        self.bytes_written = 0
        self.write_seconds = 0.0
        self.complete_seconds = 0.0
        self._sync = sync
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._direct_fd = open_direct(path, os.O_WRONLY)
        try:
            if preallocate and self._direct_fd is not None and hasattr(os, "posix_fallocate") and nbytes:
                os.posix_fallocate(self._fd, 0, nbytes)
        except OSError:
            self.abort()
            raise

    def put_part(self, number: int, data: memoryview) -> None:
        """Writes part ``number``; ``data`` begins on a page, and is not kept."""
        started = time.perf_counter()
        offset = number * _PART
        whole = data.nbytes // BLOCK * BLOCK
        if self._direct_fd is None or not self._put_direct(data[:whole], offset):
            whole = 0
        _put(self._fd, data[whole:], offset + whole)
        with self._lock:
            self.bytes_written += data.nbytes
            self.write_seconds += time.perf_counter() - started

    def complete(self) -> None:
        """Makes what was written durable; removes the file if that fails. Idempotent."""
        if self._fd < 0:
            return
        started = time.perf_counter()
        try:
            if self._sync:
                os.fsync(self._fd)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        finally:
            self._close_descriptors()
            self.complete_seconds += time.perf_counter() - started

    def abort(self) -> None:
        """Removes the file, when no thread writes to it any more. Idempotent; does nothing after `complete`."""
        if self._fd >= 0:
            self._close_descriptors()
            self.path.unlink(missing_ok=True)

    def _put_direct(self, data: memoryview, offset: int) -> bool:
        """Writes whole blocks past the page cache; False if the file system does not take them after all."""
        assert self._direct_fd is not None
        try:
            _put(self._direct_fd, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return True

    def _close_descriptors(self) -> None:
        os.close(self._fd)
        if self._direct_fd is not None:
            os.close(self._direct_fd)
        self._fd, self._direct_fd = -1, None


def _put(fd: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        count = os.pwrite(fd, data, offset)
        offset += count
        data = data[count:]


def open_direct(path: Path, access: int) -> int | None:
    """A descriptor for reads or writes past the page cache; None where the file system has none."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        return os.open(path, access | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None  # tmpfs before Linux 6.6, some network mounts
