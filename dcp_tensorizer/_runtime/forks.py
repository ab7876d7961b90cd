"""Prevents forked children from using resources of their parent.

A child has copies of its parent's objects, but the threads, processes and memory behind them are the parent's. If the
child released such a resource, the parent would lose it. Locks stay as they were at the fork, held by threads that do
not exist in the child. So each such object registers in its constructor what happens to it in a child:

- a lock becomes free (`free_in_child`);
- a finalizer does nothing (`Finalizer`);
- any other object registers a function (`in_child`), which closes a descriptor, for example.

An object can also check whether it is in the process that made it (`Home`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from .threads import is_thread_limit

_T = TypeVar("_T")

# Not a WeakKeyDictionary, which calls Python code when an owner is freed: the interpreter ignores an exception that a
# signal handler raises there, such as SystemExit. Each key is a number that is used once, because the `id` of a dead
# owner may belong to a new owner.
_numbers = itertools.count()
_owners: dict[int, tuple[weakref.ref[Any], Callable[[Any], object]]] = {}
_FEW = 64
_most = _FEW  # when there are this many entries, dead owners are removed


def in_child(owner: _T, release: Callable[[_T], object]) -> None:
    """Registers ``release(owner)`` to be called in each child that this process forks while the owner lives.

    ``release`` must not wait for a lock.
    """
    global _most
    if len(_owners) >= _most:
        for number, (reference, _) in _owners.copy().items():  # the copy is atomic: other threads may register owners
            if reference() is None:
                _owners.pop(number, None)
        _most = max(_FEW, 2 * len(_owners))
    _owners[next(_numbers)] = weakref.ref(owner), release


def keep_from_children(mapping: mmap.mmap) -> None:
    """Excludes the pages of a mapping from forked children. A child has a hole there, and never unmaps that range."""
    # The child leaks the Python object, because freeing it would unmap what the child has mapped at that address.
    in_child(mapping, lambda mapping: ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping)))
    if hasattr(mmap, "MADV_DONTFORK"):
        mapping.madvise(mmap.MADV_DONTFORK)


def free_in_child(lock: _T) -> _T:
    """Returns a lock, or a condition, that is free in a forked child unless the forking thread holds it."""
    in_child(lock, _free)
    return lock


def _free(lock: Any) -> None:
    is_owned = getattr(lock, "_is_owned", None)  # the forking thread continues in the child, and releases it there
    if is_owned is None or not is_owned():
        lock._at_fork_reinit()


class Finalizer(weakref.finalize):  # type: ignore[type-arg]
    """A `weakref.finalize` that does nothing in forked children: the resources are their parent's."""

    __slots__ = ("__weakref__", "_pid")

    def __init__(self, owner: object, end: Callable[..., object], /, *arguments: Any) -> None:
        self._pid = os.getpid()
        super().__init__(owner, end, *arguments)
        in_child(self, Finalizer.detach)

    def __call__(self, _: object = None) -> Any:
        """Calls the finalizer, except in a forked child.

        In a child the interpreter clears the parent's other threads before it calls the registered functions. So owners
        that only those threads referenced are freed while locks are still held.
        """
        if self._pid == os.getpid():
            return super().__call__(_)
        self.detach()
        return None


class Home:
    """The process that made an object."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        in_child(self, Home._leave)

    @property
    def is_here(self) -> bool:
        return self._pid == os.getpid()

    def _leave(self) -> None:
        self._pid = 0  # in a new PID namespace the child may have its parent's pid


def _release() -> None:
    # References to all owners are held until the last function has run: a function may free another owner, whose
    # finalizer would release a resource of the parent.
    owners = [(reference(), release) for reference, release in list(_owners.values())]
    for owner, release in owners:
        if owner is not None:
            with suppress(Exception):  # the functions of the other owners must run
                release(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release)


# --- long-lived descriptors -------------------------------------------------------------------------------------------
#
# A program that becomes a daemon may close all descriptors (``os.closerange``), and a file that is opened later may get
# the same number. So the file behind a descriptor is checked before each use.

_LAST_STANDARD_STREAM = 2
_ADVICE = {
    errno.EAGAIN: "Raise the limit of this user's processes and threads (ulimit -u), or of the container's (pids.max).",
    errno.EFBIG: "Raise the file size limit of this process (ulimit -f), or save to another file system.",
    errno.EMFILE: "Raise the descriptor limit of this process (ulimit -n), or open fewer files.",
    errno.ENFILE: "Raise the descriptor limit of this machine (fs.file-max).",
}


def identity(fd: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


class Descriptor:
    """An open descriptor. It is closed by `close`, when this object is freed, and in forked children."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._file = identity(fd)
        self._close = weakref.finalize(self, _close, fd, self._file)
        in_child(self, Descriptor.close)

    @property
    def is_ours(self) -> bool:
        """Returns whether the number still belongs to the file."""
        return self._close.alive and identity(self._fd) == self._file

    @property
    def number(self) -> int:
        """Returns the number. Raises `OSError` if it no longer belongs to the file."""
        if not self.is_ours:
            raise OSError(
                errno.EBADF, f"{os.strerror(errno.EBADF)}: it was closed, perhaps by other code (os.closerange)"
            )
        return self._fd

    def close(self) -> None:
        """Closes the file, unless other code has closed it. Idempotent."""
        self._close()


def _close(fd: int, file: tuple[int, int] | None) -> None:
    if file is not None and identity(fd) == file:
        os.close(fd)


def anonymous_file(name: str) -> int:
    """Makes an unnamed file in memory, or a temporary file on systems other than Linux.

    Raises `OSError` if the system refuses it, or if no descriptor is free.
    """
    if hasattr(os, "memfd_create"):
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOSYS):
                raise
            raise OSError(
                error.errno,
                f"{os.strerror(error.errno)}: the system refuses memfd_create. Allow that call in the sandbox's rules "
                f"(seccomp), and set vm.memfd_noexec to 0 or 1.",
            ) from error
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    return above_standard_streams(fd)


def above_standard_streams(fd: int) -> int:
    """Moves a file to a descriptor above those of the standard streams, and returns that descriptor.

    If the program has closed a standard stream, a new file gets its descriptor. Prints would then land in that file.
    """
    if fd > _LAST_STANDARD_STREAM:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _LAST_STANDARD_STREAM + 1)
    finally:
        os.close(fd)


def limit_advice(error: BaseException) -> str:
    """Returns the end of a message about a limit that was reached, or an empty string for other errors."""
    number = errno.EAGAIN if is_thread_limit(error) else getattr(error, "errno", None)
    advice = _ADVICE.get(number or 0)
    return "" if advice is None else f". {advice}"
