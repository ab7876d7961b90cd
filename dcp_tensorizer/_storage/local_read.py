"""Ranges of local files are read through the page cache or past it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .._direct_memory import direct_memory
from .._forks import free_in_child
from .base import RangeReader, rest_of
from .local_write import BLOCK, open_direct
from .memory_read import MemoryReader
from .page_cache import Residency

__all__ = ["LocalFile", "UncachedFile", "read_into"]

_IOV_MAX = 1024  # Linux's limit on the buffers of one preadv
_LEAST_UNCACHED = 1 << 20  # smaller reads are not worth a look at the cache


class LocalFile(RangeReader):
    """A local file whose ranges any number of threads read: through the page cache, or past it with `once`.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._fds = [os.open(path, os.O_RDONLY | os.O_CLOEXEC)]
        self._own = threading.local()
        self._own.fd = self._fds[0]
        self._lock = free_in_child(threading.Lock())
        self._uncached: _Uncached | None = None

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        read_into(self._descriptor(), buffers, offset)

    def once(self, offset: int, nbytes: int) -> RangeReader:
        """A range that the page cache does not hold is read past it, into this thread's bounce buffer."""
        if nbytes < _LEAST_UNCACHED:
            return self
        return (self._uncached or self._look()).read(offset, nbytes) or self

    def close(self) -> None:
        if self._uncached is not None:
            self._uncached.close()
        for fd in self._fds:
            os.close(fd)

    def _look(self) -> _Uncached:
        with self._lock:
            self._uncached = self._uncached or _Uncached(self._fds[0])
            return self._uncached

    def _descriptor(self) -> int:
        """This thread's own descriptor of the same file, whatever has become of the file's name.

        If threads share one, their reads look random to the kernel, and it reads less ahead: 0.85 instead of 1.4 GB/s
        from a cold disk.
        """
        try:
            return self._own.fd  # type: ignore[no-any-return]
        except AttributeError:
            self._own.fd = self._fds[0]
            with suppress(OSError):  # without /proc, threads share one
                self._own.fd = os.open(f"/proc/self/fd/{self._fds[0]}", os.O_RDONLY | os.O_CLOEXEC)
                self._fds.append(self._own.fd)
            return self._own.fd  # type: ignore[no-any-return]


class _Uncached:
    """Reads past the page cache what the cache does not hold.

    The kernel takes 0.8 s of CPU time to bring 2.1 GB into the cache, and 3.3 s if a hypervisor must provide the pages
    first. A read past the cache takes 0.2 s, and the copy from the bounce buffer 0.3 s. But the next reader of the
    file does not find it in the cache.
    """

    def __init__(self, fd: int) -> None:
        self._residency: Residency | None = None
        self._fd = open_direct(Path(f"/proc/self/fd/{fd}"), os.O_RDONLY)  # its name may belong to another file by now
        if self._fd is not None:
            with suppress(OSError, ValueError):
                self._residency = Residency(fd)

    def read(self, offset: int, nbytes: int) -> RangeReader | None:
        """A range; None if the page cache holds it or it cannot be read past the cache. Raises `OSError`."""
        if self._fd is None or self._residency is None or self._residency.holds(offset + nbytes // 2):
            return None
        start = offset // BLOCK * BLOCK
        buffer = _bounce_buffer(-(-(offset + nbytes - start) // BLOCK) * BLOCK)
        try:
            count = os.preadv(self._fd, [buffer], start)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return None  # the file system opens files for O_DIRECT, but does not read them
        return MemoryReader(buffer[:count], start) if start + count >= offset + nbytes else None

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        if self._residency is not None:
            self._residency.close()


_bounce = threading.local()


def _bounce_buffer(nbytes: int) -> memoryview:
    """This thread's buffer. It is replaced when it is too small."""
    if len(getattr(_bounce, "buffer", b"")) < nbytes:
        _bounce.buffer = direct_memory(nbytes)
    return _bounce.buffer[:nbytes]  # type: ignore[no-any-return]


class UncachedFile(LocalFile):
    """A local file that is read past the page cache, to see what the disk holds.

    That works where offset and memory lie on blocks. The rest of a read goes through the cache, and so does all of it
    where O_DIRECT is refused.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._direct_fd = open_direct(path, os.O_RDONLY)

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        first, *others = buffers
        count = self._read_direct(first, offset)
        super().read_into([first[count:], *others], offset + count)

    def _read_direct(self, buffer: memoryview, offset: int) -> int:
        """Reads whole blocks past the page cache; returns how many bytes, perhaps none."""
        whole = buffer.nbytes // BLOCK * BLOCK
        if self._direct_fd is None or offset % BLOCK or not whole:
            return 0
        try:
            read_into(self._direct_fd, [buffer[:whole]], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return 0  # the memory does not begin on a block, or the file system has rules of its own
        return whole

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
