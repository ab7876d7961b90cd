"""Local files: a sink that writes aligned parts past the page cache with O_DIRECT, and range reads.

O_DIRECT costs a tenth of the CPU of a buffered write and leaves the page cache to the training data. Where it is
refused (tmpfs before Linux 6.6, some network mounts), parts are written through the page cache, and dropped from it.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ._storage import rest_of

__all__ = ["LocalFile", "LocalSink", "UncachedFile", "read_into"]

_BLOCK = 4096  # O_DIRECT's unit: no file system in use asks for more
_PART = 4 << 20  # 1 to 8 MiB are equally fast; a larger one costs less Python a byte, and more memory
_WRITERS = 2
_IOV_MAX = 1024  # Linux's limit on the buffers of one preadv


class LocalSink:
    """A new local file of known size, written in parts, in any order and by several threads.

    Args:
        path: Where to create it; it must not exist.
        nbytes: Its size. It is preallocated, so that a full disk is known before the work begins.
        sync: Make the data durable in `close`.

    Raises:
        OSError: the file cannot be created or written.
    """

    part_bytes = _PART
    concurrency = _WRITERS
    in_order = False

    def __init__(self, path: Path, nbytes: int, *, sync: bool) -> None:
        self.path = path
        self.bytes_written = 0
        self.write_seconds = 0.0
        self.close_seconds = 0.0
        self._sync = sync
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._direct_fd = _open_direct(path, os.O_WRONLY)
        try:
            # Without O_DIRECT the file system may be one where glibc imitates fallocate by writing zeros.
            if self._direct_fd is not None and hasattr(os, "posix_fallocate") and nbytes:
                os.posix_fallocate(self._fd, 0, nbytes)
        except OSError:
            self.abort()
            raise

    def put(self, number: int, data: memoryview) -> None:
        """Writes part ``number``; ``data`` begins on a page, and is not kept."""
        started = time.perf_counter()
        offset = number * _PART
        whole = data.nbytes // _BLOCK * _BLOCK
        if self._direct_fd is None or not self._put_direct(data[:whole], offset):
            whole = 0
        _put(self._fd, data[whole:], offset + whole)
        with self._lock:
            self.bytes_written += data.nbytes
            self.write_seconds += time.perf_counter() - started

    def close(self) -> None:
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
            self.close_seconds += time.perf_counter() - started

    def abort(self) -> None:
        """Removes the file, when no thread writes to it any more. Idempotent; does nothing after `close`."""
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


class LocalFile:
    """A local file that is read by ranges, from any number of threads.

    Through the page cache: asking it first and going past it for the rest (RWF_NOWAIT, then O_DIRECT through a bounce
    buffer) read 0.5-0.9 GB/s cold where this reads 1.2-2.0.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._fds = [os.open(path, os.O_RDONLY | os.O_CLOEXEC)]
        self._own = threading.local()
        self._own.fd = self._fds[0]

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fills ``buffers``, one after the other, from ``offset`` on; raises `EOFError` or `OSError`."""
        read_into(self._descriptor(), buffers, offset)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)

    def _descriptor(self) -> int:
        """This thread's own: reads of threads that share one look random to the kernel, which then reads less ahead.

        That makes 1.4 of 0.85 GB/s, cold. It is the same file, even if its name has been given to another, or to none.
        """
        if not hasattr(self._own, "fd"):
            self._own.fd = self._fds[0]
            with suppress(OSError):  # without /proc they do share one
                self._own.fd = os.open(f"/proc/self/fd/{self._fds[0]}", os.O_RDONLY | os.O_CLOEXEC)
                self._fds.append(self._own.fd)
        return self._own.fd  # type: ignore[no-any-return]


class UncachedFile(LocalFile):
    """A local file that is read past the page cache, so that what comes back is what the disk holds.

    Only where offset and memory lie on blocks; the rest of a read goes through the cache. So does all of it where
    O_DIRECT is refused.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._direct_fd = _open_direct(path, os.O_RDONLY)

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fills ``buffers``; raises `EOFError` or `OSError`."""
        first, *others = buffers
        whole = 0 if self._direct_fd is None or offset % _BLOCK else first.nbytes // _BLOCK * _BLOCK
        if whole:
            assert self._direct_fd is not None
            try:
                read_into(self._direct_fd, [first[:whole]], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:  # memory that does not begin on a block, or a file system's whim
                    raise
                whole = 0
        super().read_into([first[whole:], *others], offset + whole)

    def close(self) -> None:
        super().close()
        if self._direct_fd is not None:
            os.close(self._direct_fd)


def read_into(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Fills ``buffers``, one after the other, from ``offset`` on.

    Raises:
        EOFError: the file ends before that.
        OSError: it cannot be read.
    """
    if len(buffers) <= _IOV_MAX and os.preadv(fd, buffers, offset) == sum(map(len, buffers)):
        return
    pending = [buffer for buffer in buffers if buffer.nbytes]
    while pending:
        count = os.preadv(fd, pending[:_IOV_MAX], offset)
        if count == 0:
            raise EOFError(f"the file ends at byte {offset:,}, {sum(b.nbytes for b in pending):,} bytes too early")
        offset += count
        pending = rest_of(pending, count)


def _open_direct(path: Path, access: int) -> int | None:
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        return os.open(path, access | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None  # tmpfs before Linux 6.6, some network mounts
