"""Keeps a forked child from having anything of its parent's.

A child has copies of its parent's objects, but not the threads, the processes and the memory that they stand for. To
end one of those in the child would end it for the parent. Locks stay as they were at that moment, held by threads that
are not there. So each object that stands for such a thing says here, when it is made, what becomes of it in a child:

- a lock is free there (`free_in_child`),
- what is to be ended with an object is not ended there (`Finalizer`),
- anything else has a function of its own for that (`in_child`): a descriptor is closed, a writer starts again,
- and an object that others ask may ask whether it is still in the process that made it (`Home`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

_T = TypeVar("_T")

# Not a WeakKeyDictionary, which calls Python code when an owner goes. What a signal's handler raises in the middle of
# that, a SystemExit say, is dropped by the interpreter.
_owners: dict[int, tuple[weakref.ref[Any], Callable[[Any], object]]] = {}
_FEW = 64
_most = _FEW  # so many may there be before those that are gone are looked for


def in_child(owner: _T, let_go: Callable[[_T], object]) -> None:
    """Registers ``let_go(owner)`` for each child that this process forks, as long as the owner lives.

    It must not wait for a lock. An owner has one such function.
    """
    global _most
    if len(_owners) >= _most:
        for number, (reference, _) in list(_owners.items()):
            if reference() is None:
                _owners.pop(number, None)
        _most = max(_FEW, 2 * len(_owners))
    _owners[id(owner)] = weakref.ref(owner), let_go


def free_in_child(lock: _T) -> _T:
    """Returns a lock, or a condition, that only the forking thread can still hold in a forked child."""
    in_child(lock, _free)
    return lock


def _free(lock: Any) -> None:
    is_owned = getattr(lock, "_is_owned", None)  # the forking thread goes on in the child, and gives it back there
    if is_owned is None or not is_owned():
        lock._at_fork_reinit()


class Finalizer(weakref.finalize):  # type: ignore[type-arg]
    """Does as `weakref.finalize` in this process alone: a forked child ends nothing that is its parent's."""

    __slots__ = ("__weakref__",)

    def __init__(self, owner: object, end: Callable[..., object], /, *arguments: Any) -> None:
        super().__init__(owner, end, *arguments)
        in_child(self, Finalizer.detach)


class Home:
    """The process that an object belongs to. A copy of the object in a forked child is not at home there."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        in_child(self, Home._leave)

    @property
    def is_here(self) -> bool:
        """Returns whether this is the process that made it."""
        return self._pid == os.getpid()

    def _leave(self) -> None:
        self._pid = 0  # in another namespace the child may have its parent's number


def _let_go() -> None:
    # All are kept until the last function has run: each may free other owners, whose finalizers would end things.
    owners = [(reference(), let_go) for reference, let_go in list(_owners.values())]
    for owner, let_go in owners:
        if owner is not None:
            with suppress(Exception):  # the others have their turn
                let_go(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


# --- long-lived descriptors -------------------------------------------------------------------------------------------
#
# A daemon may close all descriptors (``os.closerange``). The next file that is opened then gets the same number, and to
# use it would be to use a foreign file. So the file behind a number is checked before each use.

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
        """Returns whether the number still stands for the file."""
        return self._close.alive and identity(self._fd) == self._file

    @property
    def number(self) -> int:
        """The number; raises `OSError` if it does not stand for the file any more."""
        if not self.is_ours:
            raise OSError(errno.EBADF, f"{os.strerror(errno.EBADF)}: this process has closed it (os.closerange?)")
        return self._fd

    def close(self) -> None:
        """Closes the file, unless other code has closed it. Idempotent."""
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
        return "the file system does not allow a file of that size"
    return (
        f"this process may not make a file, on disk or in memory, of more than {limit:,} bytes: raise that limit "
        f"(ulimit -f)"
    )


def too_many(error: OSError) -> str | None:
    """Explains an error where descriptors are short, with what to do; None where it is another one."""
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
