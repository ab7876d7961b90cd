"""Reads and writes local files, through the page cache or bypassing it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import pwd
import stat
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np

from .._runtime.direct_memory import direct_memory
from .._runtime.forks import free_in_child, limit_advice
from .._runtime.process_context import current_umask
from .base import MemoryReader, RangeReader, Sink, rest_of

_IOV_MAX = 1024  # Linux's limit on the buffers of one preadv
_LEAST_UNCACHED = 1 << 20  # for smaller reads, querying the cache costs more than it saves


class LocalFile(RangeReader):
    def __init__(self, path: Path) -> None:
        self._fds = [os.open(path, os.O_RDONLY | os.O_CLOEXEC)]
        self._own = threading.local()
        self._own.fd = self._fds[0]
        self._lock = free_in_child(threading.Lock())
        self._uncached: _Uncached | None = None

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        # On a shared descriptor, the kernel takes the reads of several threads for random ones and reads ahead less:
        # 0.85 instead of 1.4 GB/s from a cold disk. So each thread has its own descriptor. The file is reopened through
        # /proc, because another file may have its name by now.
        fd = getattr(self._own, "fd", None)
        if fd is None:
            fd = self._fds[0]
            with suppress(OSError):  # without /proc, threads share one descriptor
                fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
                self._fds.append(fd)
            self._own.fd = fd
        read_into(fd, buffers, offset)

    def once(self, offset: int, nbytes: int) -> RangeReader:
        """Reads a long range with O_DIRECT into this thread's bounce buffer, if `_Uncached.read` can."""
        if nbytes < _LEAST_UNCACHED:
            return self
        if self._uncached is None:
            with self._lock:
                self._uncached = self._uncached or _Uncached(self._fds[0])
        return self._uncached.read(offset, nbytes) or self

    def close(self) -> None:
        if self._uncached is not None:
            self._uncached.close()
        for fd in self._fds:
            os.close(fd)


class _Uncached:
    """Reader that uses O_DIRECT, for ranges that are not in the page cache.

    To read 2.1 GB into the cache, the kernel takes 0.8 s of CPU time, or 3.3 s if a hypervisor has to provide the pages
    first. An O_DIRECT read takes 0.2 s, and the copy from the bounce buffer 0.3 s, but the next reader does not find
    the file in the cache.
    """

    def __init__(self, fd: int) -> None:
        self._residency: Residency | None = None
        self._fd = open_direct(Path(f"/proc/self/fd/{fd}"), os.O_RDONLY)  # another file may have the name by now
        if self._fd is not None:
            with suppress(OSError, ValueError):
                self._residency = Residency(fd)

    def read(self, offset: int, nbytes: int) -> RangeReader | None:
        """Reads a range; raises `OSError`.

        If the range is in the page cache or that is unknown, the file system refuses O_DIRECT, or the file is too
        short, returns None.
        """
        if self._fd is None or self._residency is None or self._residency.holds(offset + nbytes // 2):
            return None
        start = offset // BLOCK * BLOCK
        size = -(-(offset + nbytes - start) // BLOCK) * BLOCK
        if len(getattr(_bounce, "buffer", b"")) < size:
            _bounce.buffer = direct_memory(size)
        buffer = _bounce.buffer[:size]
        try:
            count = os.preadv(self._fd, [buffer], start)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return None  # the file system opens files with O_DIRECT, but refuses to read them
        return MemoryReader(buffer[:count], start) if start + count >= offset + nbytes else None

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        if self._residency is not None:
            self._residency.close()


_bounce = threading.local()


class UncachedFile(LocalFile):
    """Reader of a local file with O_DIRECT where possible, to verify what is on the disk.

    O_DIRECT needs whole blocks with aligned offset and memory, so `read_into` reads only the whole blocks of the first
    buffer with it. The rest of a read goes through the page cache. If the offset or the memory is not aligned, or
    the file system refuses O_DIRECT, the whole read does.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._direct_fd = open_direct(path, os.O_RDONLY)

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        first, *others = buffers
        count = self._read_direct(first, offset)
        super().read_into([first[count:], *others], offset + count)

    def _read_direct(self, buffer: memoryview, offset: int) -> int:
        whole = buffer.nbytes // BLOCK * BLOCK
        if self._direct_fd is None or offset % BLOCK or not whole:
            return 0
        try:
            read_into(self._direct_fd, [buffer[:whole]], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return 0  # the memory is not aligned to a block, or the file system has its own rules
        return whole

    def close(self) -> None:
        super().close()
        if self._direct_fd is not None:
            os.close(self._direct_fd)


def read_into(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Fills ``buffers`` in order with the bytes at ``offset``; raises `EOFError` or `OSError`."""
    if len(buffers) <= _IOV_MAX and os.preadv(fd, buffers, offset) == sum(map(len, buffers)):
        return
    pending = [buffer for buffer in buffers if buffer.nbytes]
    while pending:
        count = os.preadv(fd, pending[:_IOV_MAX], offset)
        if count == 0:
            raise EOFError(
                f"the file ends too early, before byte {offset:,}: {sum(b.nbytes for b in pending):,} bytes are missing"
            )
        offset += count
        pending = rest_of(pending, count)


# --- writes that bypass the page cache --------------------------------------------------------------------------------
#
# O_DIRECT takes a tenth of the CPU time of a buffered write, and leaves the page cache to the training data. On file
# systems that refuse O_DIRECT (tmpfs before Linux 6.6, some network mounts), parts go through the page cache. With
# ``sync``, `_complete` then drops them from the cache.

BLOCK = 4096
"""The alignment of O_DIRECT. No common file system needs a larger one."""

_MAX_EDGES = 1024  # incomplete blocks in memory: 4 MiB at most

_OF_OWNER = 0o600


class LocalSink(Sink):
    """Sink of a local file, which it writes with O_DIRECT where possible; raises `OSError`.

    Incomplete blocks, at the edges of written ranges, go through the page cache. The kernel serializes such a write
    with all other writes to the file, across processes. So `_complete` writes the edges last: with 60 tensors in a file
    that two processes write, threads then wait 726 times instead of 984.

    Args:
        nbytes: The size of a new file, which must not exist. None opens a file that `make_shared` has created, for
            the parts of this process.
        sync: Make the data durable.
        preallocate: Reserve the space of a new file first, so that a full disk raises an error before the first write.
            Pass False on network mounts: many cannot reserve space, and glibc then writes zeros instead.
        umask: The umask of the save, for the mode of a new file.
    """

    part_bytes = 4 << 20  # 1 to 8 MiB are equally fast; larger parts take less Python time per byte, and more memory
    concurrency = 6  # 4,000 tensors of 215 kB in one file: 10% faster than with 2; 8 gain no more

    def __init__(
        self, path: Path, nbytes: int | None, *, sync: bool, preallocate: bool = True, umask: int | None = None
    ) -> None:
        super().__init__()
        self.path = path
        self._sync = sync
        self._is_shared = nbytes is None
        self._edges: list[tuple[int, bytes]] = []
        self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC) if nbytes is None else new_file(path, umask)
        self._direct_fd = open_direct(path, os.O_WRONLY)
        self._to_close = [self._fd] if self._direct_fd is None else [self._fd, self._direct_fd]
        try:
            if preallocate and self._direct_fd is not None and hasattr(os, "posix_fallocate") and nbytes:
                os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            self.abort()
            raise explained(error) from error

    def _put_part(self, number: int, data: memoryview) -> None:
        self._put(number * self.part_bytes, data)

    def _put(self, offset: int, data: memoryview) -> None:
        head = min(data.nbytes, -offset % BLOCK)
        whole = (data.nbytes - head) // BLOCK * BLOCK
        try:
            middle = data[head : head + whole]
            if self._direct_fd is None or not whole or not _put_direct(self._direct_fd, middle, offset + head):
                _put(self._fd, data, offset)
                return
            for start, edge in (offset, data[:head]), (offset + head + whole, data[head + whole :]):
                if not edge.nbytes:
                    continue
                if len(self._edges) < _MAX_EDGES:
                    self._edges.append((start, bytes(edge)))
                else:
                    _put(self._fd, edge, start)
        except OSError as error:
            raise explained(error) from error

    def _complete(self) -> None:
        try:
            for start, edge in self._edges:
                _put(self._fd, memoryview(edge), start)
        except OSError as error:
            raise explained(error) from error
        if self._sync:
            os.fsync(self._fd)
            if hasattr(os, "posix_fadvise"):  # drop buffered writes from the page cache
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._close_descriptors()

    def _abort(self) -> None:
        try:
            self._close_descriptors()
        finally:
            if not self._is_shared:
                self.path.unlink(missing_ok=True)

    def _close_descriptors(self) -> None:
        """Closes each descriptor once, even after an error: the number may already belong to another file."""
        numbers, self._to_close = self._to_close, []
        with ExitStack() as closing:
            for number in numbers:
                closing.callback(os.close, number)


def make_shared(path: Path, nbytes: int, *, preallocate: bool, umask: int | None) -> None:
    """Creates a file, which must not exist, for several processes to write. After an error, leaves no new file."""
    fd = new_file(path, umask)
    try:
        try:
            if preallocate and nbytes and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, nbytes)
            else:
                os.ftruncate(fd, nbytes)
        finally:
            os.close(fd)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise explained(error) from error


def new_file(path: Path, umask: int | None = None) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        words = explained(error)
        raise words from (None if words is error else error)
    give_mode(fd, 0o666, umask)
    return fd


def explained(error: OSError) -> OSError:
    """Returns an error with advice if it was caused by a permission or a limit, otherwise the error itself."""
    if advice := limit_advice(error):
        return OSError(error.errno, f"{os.strerror(error.errno or 0)}{advice}")
    if not isinstance(error, PermissionError) or not error.filename:
        return error
    path = Path(os.fsdecode(error.filename))
    for folder in (path, *path.parents):  # the first path that stat succeeds on has refused the access
        with suppress(OSError):
            status = folder.stat()
            whose = f"{folder} belongs to {_name(status.st_uid)} (mode {stat.S_IMODE(status.st_mode):o})"
            own = f"this process runs as {_name(os.geteuid())}"
            words = f"{error.strerror}: {whose}, and {own}: give this process write permission, or save elsewhere"
            return PermissionError(error.errno, words)
    return error


def _name(user: int) -> str:
    with suppress(KeyError):
        return f"user {pwd.getpwuid(user).pw_name} ({user})"
    return f"user {user}"


def give_mode(made: int | Path, full: int, umask: int | None) -> None:
    """Sets the mode of a new file or directory to ``full & ~umask``, by default with the umask of the process.

    The process may have changed its umask since the save began. Also, a thread that reads the umask sets another one
    for a moment, and the file may have been created with that one. Also corrects a mode that locks out the owner.
    In a directory with default ACLs, umasks have no effect, and this function changes nothing.
    """
    with suppress(OSError):  # the file system does not support modes
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
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        return os.open(path, access | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None  # tmpfs before Linux 6.6, some network mounts


def _put_direct(fd: int, data: memoryview, offset: int) -> bool:
    """Writes whole blocks with O_DIRECT. If the file system refuses the write, returns False."""
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


# --- which pages of a file are cached ---------------------------------------------------------------------------------

_RUN = 64 << 20  # bytes to query as one: pages are cached and dropped in long runs, and each query takes time
_PROBES = 8  # pages of a run to query: the kernel may drop single pages at any time


class Residency:
    """The parts of an open file that are in the page cache, as mincore reports them.

    A read with RWF_NOWAIT would also show them, but makes the kernel read missing pages ahead, so that they are read
    from the disk twice. If this process neither owns the file nor may write to it, the kernel reports all pages as
    cached.
    """

    def __init__(self, descriptor: int) -> None:
        self._mapping = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        self._address = np.frombuffer(self._mapping, dtype=np.uint8).ctypes.data
        # PyDLL holds the GIL. The call takes less time than CDLL takes to release and reacquire it.
        self._mincore = ctypes.PyDLL(None).mincore
        self._mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        self._runs: dict[int, bool] = {}

    def holds(self, offset: int) -> bool:
        """Returns whether the run around an offset was in the cache at the first query of that run."""
        run = offset // _RUN
        if run not in self._runs:
            start, stop = run * _RUN, min(run * _RUN + _RUN, len(self._mapping))
            probes = [start + (2 * n + 1) * (stop - start) // (2 * _PROBES) for n in range(_PROBES)]
            self._runs[run] = 2 * sum(map(self.holds_page, probes)) >= _PROBES
        return self._runs[run]

    def holds_page(self, offset: int) -> bool:
        """Returns whether the page at an offset is in the cache now."""
        answer = ctypes.c_ubyte(1)
        failed = self._mincore(self._address + offset // mmap.PAGESIZE * mmap.PAGESIZE, 1, ctypes.byref(answer))
        return bool(failed or answer.value & 1)

    def close(self) -> None:
        self._mapping.close()
