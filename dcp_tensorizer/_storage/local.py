"""A checkpoint's directory on a file system."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from .._runtime.forks import Descriptor, Finalizer
from .._runtime.threads import cores, in_threads
from ..errors import NotCommitted, ReadError, WriteError
from .base import (
    TAKEN,
    UNLIMITED,
    DirectoryLock,
    FileIdentity,
    FileInfo,
    HardLinks,
    ReadTuning,
    Refused,
    SharedFile,
    Storage,
    temporary_file_name,
)
from .local_io import (
    LocalFile,
    LocalSink,
    UncachedFile,
    explained,
    give_mode,
    make_shared,
    new_file,
)

_T = TypeVar("_T")

# The file systems of one machine, on which every process sees the locks of all others. A lock on a network file system
# may be visible to one machine only.
_LOCAL_TYPES = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
_LOCK_SECONDS = 10.0  # timeout for the lock of a small file, which is held for milliseconds
# Errors of network mounts that leave the outcome of a request unknown.
_UNANSWERED = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.ENOTCONN, errno.EHOSTUNREACH}

_GRANULE = 1 << 20  # `granule_of` network mounts: at least a page of the mount's cache, and a block of its server


_HEAD_BYTES = 64  # enough of a file to recognise its format
_FEW_CORES = 4


class LocalStorage(Storage):
    adopts = True
    may_hang = True
    renames = True

    def __init__(self, root: Path, *, local_types: Collection[str] = _LOCAL_TYPES) -> None:
        self._root = root
        self._local_types = local_types
        self._is_local_known: bool | None = None
        self._is_given_up = False
        self.path = self.location = str(root)
        self.reads = ReadTuning(
            max_threads=min(8, 4 * cores()),
            min_threads=min(8, cores()),  # more would share the processor's caches, and gain nothing for cached files
            # On few cores, slices of the size of the L2 cache are 5% faster, because the hash finds them there. On 16
            # cores, eight threads wait for the GIL after each slice: 6.2 GB/s to a GPU, and 8.0 without slices.
            slice_bytes=1 << 20 if cores() <= _FEW_CORES else UNLIMITED,
        )

    @property
    def locks_are_visible(self) -> bool:  # type: ignore[override]
        return self._is_local

    def child(self, name: str) -> Storage:
        child = LocalStorage(self._root / name, local_types=self._local_types)
        child.umask = self.umask
        return child

    def listing(self) -> tuple[list[FileInfo], list[str]]:
        files: list[FileInfo] = []
        folders: list[str] = []
        for entry in self._found(lambda: _entries(self._root)):
            if entry.is_dir(follow_symlinks=False):  # a link would show its directory twice
                folders.append(entry.name)
                continue
            with suppress(OSError):  # removed since the listing, or a broken or circular link
                state = entry.stat()
                if stat.S_ISREG(state.st_mode):
                    shared = HardLinks(state.st_dev, state.st_ino, state.st_nlink) if state.st_nlink > 1 else None
                    files.append(FileInfo(entry.name, state.st_size, state.st_mtime, state.st_ctime, shared))
        return files, folders

    def file_in_place(self) -> bytes | None:
        with suppress(OSError):
            return _read(_HEAD_BYTES, self._root)
        return None

    def linked_directories(self) -> list[str]:
        here = self.real_path
        linked = [entry.path for entry in _entries(self._root) if entry.is_symlink() and os.path.isdir(entry.path)]
        return [os.path.basename(path) for path in linked if os.path.dirname(os.path.realpath(path)) != here]

    def make_directory(self) -> None:
        try:
            created = [folder for folder in (self._root, *self._root.parents) if not folder.exists()]
            self._root.mkdir(parents=True, exist_ok=True)
            for folder in created:
                give_mode(folder, 0o777, self.umask)
                _sync_directory(folder.parent)
        except (FileExistsError, NotADirectoryError) as error:
            files = [folder for folder in (self._root, *self._root.parents) if folder.exists() and not folder.is_dir()]
            why = f"{files[0]} is a file, not a directory" if files else error
            raise WriteError(f"cannot create the checkpoint directory {self.path}: {why}") from error
        except OSError as error:
            words = f"cannot create the checkpoint directory {self.path}: {explained(error)}"
            raise WriteError(words) from error

    def create(self, name: str, nbytes: int, *, sync: bool) -> LocalSink:
        return LocalSink(self._root / name, nbytes, sync=sync, preallocate=self._is_local, umask=self.umask)

    def granule_of(self, nbytes: int) -> int:
        # All processes of one machine share the page cache. Two machines that mount a directory have separate caches
        # and write back whole pages: if both have changed a page, the later write overwrites the other machine's bytes.
        return 1 if self._is_local else _GRANULE

    def begin_shared(self, name: str, nbytes: int, *, save_id: str) -> SharedFile:
        token = temporary_file_name(name, save_id)
        make_shared(self._root / token, nbytes, preallocate=self._is_local, umask=self.umask)
        return SharedFile(name, token, nbytes, save_id)

    def open_shared(self, file: SharedFile, *, sync: bool) -> LocalSink:
        return self._found(lambda: LocalSink(self._root / file.token, None, sync=sync))

    def complete_shared(self, file: SharedFile, parts: Mapping[int, Mapping[str, str]], *, replace: bool) -> None:
        found = self._found(lambda: _check_kind(self._root / file.token)).st_size
        if found != file.nbytes:
            raise OSError(f"it has {found:,} bytes, expected {file.nbytes:,}")
        with suppress(FileNotFoundError):
            _check_kind(self._root / file.name)  # a rename would replace a FIFO or a device
        if self._is_given_up:
            raise TimeoutError(errno.ETIMEDOUT, "the save timed out")
        if replace or not _link(self._root / file.token, self._root / file.name):
            os.replace(self._root / file.token, self._root / file.name)

    def mark(self, save_id: str, *names: str) -> None:
        for name in names:
            with suppress(OSError):
                _link(self._root / name, self._root / temporary_file_name(name, save_id))

    def is_marked(self, name: str, temporary: str) -> bool:
        with suppress(OSError):
            return os.path.samestat(os.lstat(self._root / name), os.lstat(self._root / temporary))
        return False

    def unmark(self, save_id: str, *names: str) -> None:
        self.remove(*(temporary_file_name(name, save_id) for name in names))

    def abort_shared(self, file: SharedFile) -> None:
        self._unlink(file.token)

    def sync_directory(self) -> None:
        _sync_directory(self._root)

    def put(self, name: str, data: bytes, *, sync: bool, replace: bool = True, save_id: str = "") -> None:
        temporary = self._root / temporary_file_name(name, save_id)
        try:
            with open(new_file(temporary, self.umask), "wb") as file:
                file.write(data)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            with suppress(FileNotFoundError):
                _check_kind(self._root / name)  # a rename would replace a FIFO or a device
            if self._is_given_up:
                raise TimeoutError(errno.ETIMEDOUT, "the save timed out")
            self._rename(temporary, name, data, replace)
        except OSError as error:
            raise Refused(f"cannot write {self._root / name}: {error}") from error
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        if sync:
            try:
                self.sync_directory()
            except OSError as error:
                raise WriteError(
                    f"{self._root / name} was written, but its name may not be durable: {error}"
                ) from error

    def put_if(self, name: str, expected: bytes | None, data: bytes, *, sync: bool = True, save_id: str = "") -> bool:
        if expected is None:
            return super().put_if(
                name, None, data, sync=sync, save_id=save_id
            )  # atomic where the file system has hard links: link() fails if the name exists
        path = self._root / name
        try:
            _check_kind(path)
            try:
                file: BinaryIO = path.open("r+b")  # network mounts lock only files that are open for writing
            except PermissionError:  # the file belongs to another user of a shared folder
                file = path.open("rb")
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise ReadError(f"cannot read {path}: {error}") from error
        with file:
            _lock_file(file.fileno(), path)
            # Read by name, not from this descriptor: the previous holder of the lock may have replaced the file.
            return super().put_if(name, expected, data, sync=sync, save_id=save_id)

    def _rename(self, temporary: Path, name: str, data: bytes, replace: bool) -> None:
        """Renames a temporary file to its final name.

        A network mount may report a failure although the server has renamed the file: if the server's response was
        lost, and the mount's own retry failed.
        """
        try:
            if not replace:
                _link(temporary, self._root / name)
            os.replace(temporary, self._root / name)  # does nothing if both are names of one file
        except OSError as error:
            with suppress(ReadError):
                if self.read(name) == data:
                    return
            if error.errno in _UNANSWERED and not self._is_local:
                raise WriteError(f"it is unknown whether {self._root / name} was written: {error}") from error
            raise

    def read(self, name: str, most: int | None = None) -> bytes | None:
        return self._ask(name, functools.partial(_read, most))

    def head(self, name: str) -> int | None:
        return self._ask(name, lambda path: _check_kind(path, or_directory=True).st_size)

    def _ask(self, name: str, ask: Callable[[Path], _T]) -> _T | None:
        path = self._root / name
        try:
            return self._found(lambda: ask(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ReadError(f"cannot read {path}: {error}") from error

    def _found(self, find: Callable[[], _T]) -> _T:
        """Calls ``find``. If the file is missing on a network mount, calls ``find`` once more.

        NFS caches missing names for half a minute. Opening the directory makes the client ask the server again.
        """
        try:
            return find()
        except (FileNotFoundError, NotADirectoryError):
            if self._is_local:
                raise
        for folder in (self._root.parent, self._root):
            with suppress(OSError):
                os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        return find()

    def open(self, name: str) -> LocalFile:
        self._found(lambda: _check_kind(self._root / name))
        return LocalFile(self._root / name)

    def open_uncached(self, name: str) -> UncachedFile:
        self._found(lambda: _check_kind(self._root / name))
        return UncachedFile(self._root / name)

    def identity(self, name: str) -> FileIdentity | None:
        with suppress(OSError):
            return identity_of(os.lstat(self._root / name))
        return None

    def adopt(
        self, source: Storage, source_name: str, identity: FileIdentity, name: str, *, sync: bool
    ) -> FileIdentity | None:
        is_linked = isinstance(source, LocalStorage) and link_file(
            source._root / source_name, identity, self._root / name, sync=sync
        )
        return identity if is_linked else None

    def put_record(self, name: str) -> None:
        if self.locks_are_visible:
            with suppress(OSError):
                put_record(self._root / name)

    def is_record(self, name: str) -> bool:
        return is_record(self._root / name)

    def give_up(self) -> None:
        self._is_given_up = True

    def links(self) -> list[str]:
        with suppress(OSError), os.scandir(self._root) as entries:
            return [os.path.realpath(entry.path) for entry in entries if entry.is_symlink()]
        return []

    @property
    def real_path(self) -> str:
        return os.path.realpath(self._root)

    def rename(self, old: str, new: str) -> None:
        """Gives a file another name, durably; raises `OSError`."""
        os.replace(self._root / old, self._root / new)
        self.sync_directory()

    def lock_directory(self) -> DirectoryLock:
        return _FileLock(self._root, is_visible=self.locks_are_visible)

    def remove(self, *names: str) -> None:
        if self.locks_are_visible:  # threads are no faster: 10,000 files took 0.1 s either way
            for name in names:
                self._unlink(name)
        else:  # in threads, because each call waits for a server
            in_threads(self._unlink, names)

    def _unlink(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def remove_directory(self) -> bool:
        try:
            self._root.rmdir()
        except OSError as error:
            return isinstance(error, FileNotFoundError)
        return True

    @property
    def _is_local(self) -> bool:
        """Whether only this machine uses the file system. Cached, because a save needs it nine times.

        Not a ``cached_property``: up to Python 3.11 it holds a lock, and all threads would wait for a hung mount.
        """
        if self._is_local_known is None:
            self._is_local_known = file_system(self._root) in self._local_types
        return self._is_local_known


class _FileLock(DirectoryLock):
    """A kernel lock (``flock``) on the directory: exclusive if all jobs can see it and the directory is not locked yet.

    `share` takes a shared lock instead. Without the exclusive lock, nothing is locked before `share`. The lock is also
    released when this object is freed or the process ends.
    """

    def __init__(self, root: Path, *, is_visible: bool) -> None:
        self._root = root
        self._open()
        self._is_exclusive = is_visible and self._lock(fcntl.LOCK_EX)

    @property
    def is_exclusive(self) -> bool:
        return self._is_exclusive and self._is_current()

    def share(self, timeout: float) -> None:
        self._is_exclusive = False
        deadline = time.monotonic() + timeout
        self._wait(deadline, timeout)
        while not self._is_current():  # a holder of the exclusive lock has removed the directory
            self.release()
            self._open()
            self._wait(deadline, timeout)

    def release(self) -> None:
        self._release()

    def _open(self) -> None:
        try:
            with suppress(FileExistsError):
                self._root.mkdir()
            self._directory = Descriptor(os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError as error:
            words = f"cannot open the checkpoint directory {self._root}: {explained(error)}"
            raise WriteError(words) from error
        self._release = Finalizer(self, _unlock, self._directory)

    def _is_current(self) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._directory.number), os.stat(self._root))
        return False

    def _wait(self, deadline: float, timeout: float) -> None:
        while not self._lock(
            fcntl.LOCK_SH
        ):  # files are being removed, which takes milliseconds unless the process that does so is stopped
            if time.monotonic() > deadline:
                self.release()
                raise WriteError(
                    f"a process that removes files from {self._root} has held the lock on it for {timeout:g} s. Check "
                    f"whether that process is stopped."
                )
            time.sleep(0.01)

    def _lock(self, operation: int) -> bool:
        """Tries to lock; returns whether that succeeded.

        If the file system has no locks, does nothing, and returns True for a shared lock, False for an exclusive one.
        """
        try:
            fcntl.flock(self._directory.number, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return operation != fcntl.LOCK_EX
        return True


def _unlock(directory: Descriptor) -> None:
    with suppress(OSError):  # close is not enough: a child process may have inherited the descriptor
        fcntl.flock(directory.number, fcntl.LOCK_UN)
    directory.close()


def _read(most: int | None, path: Path) -> bytes:
    _check_kind(path)
    with path.open("rb") as file:
        return file.read(-1 if most is None else most)


def _check_kind(path: Path, *, or_directory: bool = False) -> os.stat_result:
    """Checks that a path names a regular file or, with ``or_directory``, a directory; raises `OSError`.

    Opening a FIFO would block until its other end is opened.
    """
    status = os.stat(path)
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFREG or (or_directory and kind == stat.S_IFDIR):
        return status
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    name = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}.get(kind, "a device")
    raise OSError(f"it is {name}, not a regular file. Remove it, or choose another path")


def _link(source: Path, target: Path) -> bool:
    """Links a file to a second name, which must not exist; returns whether the file is linked.

    On mounts without hard links, only checks that the name does not exist.
    """
    try:
        os.link(source, target)
        return True
    except FileExistsError:
        raise FileExistsError(TAKEN) from None
    except OSError:
        if target.exists():
            raise FileExistsError(TAKEN) from None
    return False


def _lock_file(descriptor: int, path: Path) -> None:
    """Locks a file until it is closed. On a file system without locks, does nothing.

    Raises `WriteError` after `_LOCK_SECONDS`.
    """
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise WriteError(
                    f"cannot write {path}: another process has been writing it for {_LOCK_SECONDS:g} s. Check "
                    f"whether that process is stopped."
                ) from None
            time.sleep(0.01)
        except OSError:
            return
        else:
            return


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- records of saves, valid in one directory only --------------------------------------------------------------------
#
# A directory without metadata may be a copy in progress: programs copy data first, metadata last, and restore mtimes.
# So neither a missing index nor the age of files proves that they are leftovers. The record of their save proves it, if
# no save holds a lock on the directory. The record contains the machine's boot id, the inode of the directory and its
# own inode. Because inodes are reused, it also contains the time of its own last change (ctime), which no program can
# set. A copy of a record has another ctime, and is invalid.

_MAX_BYTES = 4096
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# A file system's clock may be one tick of the kernel (10 ms at most) behind.
_TOLERANCE = 0.05
_ATTEMPTS = 20  # to write a record: the scheduler may preempt the process between taking the time and writing it


def boot_id() -> str:
    """Returns the id of this machine's boot; raises `OSError` if it is unknown."""
    return _BOOT_ID.read_text()


def put_record(path: Path) -> None:
    """Writes a record; raises `OSError`, for example if the boot id is unknown.

    Does not sync it, because a record proves nothing after the next boot.
    """
    boot = boot_id()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for _ in range(_ATTEMPTS):
            os.pwrite(descriptor, f"{time.time():020.6f}\n{boot}{_inodes(path, descriptor)}".encode(), 0)
            if _is_valid(path, descriptor):
                return
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def is_record(path: Path) -> bool:
    """Returns whether a file is a record that was written in this directory since the last boot."""
    with suppress(OSError, ValueError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return _is_valid(path, descriptor)
        finally:
            os.close(descriptor)
    return False


def _is_valid(path: Path, descriptor: int) -> bool:
    moment, _, inodes = os.pread(descriptor, _MAX_BYTES, 0).decode().partition("\n")
    is_original = abs(os.fstat(descriptor).st_ctime - float(moment)) < _TOLERANCE
    return is_original and inodes == boot_id() + _inodes(path, descriptor)


def _inodes(path: Path, descriptor: int) -> str:
    return "".join(f"{state.st_dev} {state.st_ino}\n" for state in (os.stat(path.parent), os.fstat(descriptor)))


# --- hard links: one file in several checkpoints ----------------------------------------------------------------------
#
# A linked file is part of several checkpoints, so linking removes its write permission. A file is linked only if it has
# not changed since it was written.

_WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


def identity_of(status: os.stat_result) -> FileIdentity | None:
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def link_file(source: Path, identity: FileIdentity, target: Path, *, sync: bool) -> bool:
    """Links a file to a second name if the file has the expected identity; returns whether the file is linked.

    The caller must fsync the directory of the new name. ``sync`` makes the data durable, because its writer may not
    have done so. Raises no errors, because many are ordinary: the file is missing (ENOENT), is on another file system
    (EXDEV), has too many names (EMLINK), belongs to another user or is on a file system without links (EPERM).
    """
    with suppress(OSError):
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if identity_of(os.fstat(descriptor)) != identity:
                return False
            with suppress(OSError):  # a network mount may report the failure of its own retry, so check the result
                os.link(source, target, follow_symlinks=False)
            # A file that cannot be linked is left as it is, and its data is not synced.
            return _is_linked(target, identity) and _made_read_only(descriptor, target, sync=sync)
        finally:
            os.close(descriptor)
    return False


def _made_read_only(descriptor: int, target: Path, *, sync: bool) -> bool:
    """Removes the write permission of a linked file and, with ``sync``, makes its data durable.

    Returns True on success. If either fails, removes the file's second name, and returns False.
    """
    try:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        if mode & _WRITABLE:
            os.fchmod(descriptor, mode & ~_WRITABLE)
        if sync:
            os.fsync(descriptor)
    except OSError:
        target.unlink()
        return False
    return True


def _is_linked(target: Path, identity: FileIdentity) -> bool:
    """Returns whether the new name is that of the expected file: the source may have been replaced in the meantime.

    If the name is that of another file, or stat fails, removes the name, so that the caller can write the file instead.
    """
    with suppress(OSError):
        if identity_of(os.lstat(target)) == identity:
            return True
    target.unlink(missing_ok=True)
    return False


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotCommitted(f"{folder} does not exist, or is not a directory") from error
    except OSError as error:
        raise ReadError(f"cannot list {folder}: {error}") from error


# --- file systems and mounts ------------------------------------------------------------------------------------------

_MOUNTS = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(rb"\\([0-7]{3})")


def file_system(path: Path, mounts: Path = _MOUNTS) -> str:
    """Returns the type of the file system that a path is on. If it is unknown, returns an empty string."""
    real = os.path.realpath(path)
    nearest, kind = "", ""
    with suppress(OSError), mounts.open("rb") as lines:
        for line in lines:
            fields, _, rest = line.partition(b" - ")
            # The kernel escapes characters that would end a field.
            escaped = fields.split(b" ")[4]
            mount = os.fsdecode(_ESCAPE.sub(lambda found: bytes([int(found[1], 8) & 0xFF]), escaped))
            is_inside = real == mount or real.startswith(mount.rstrip("/") + "/")
            if is_inside and len(mount) >= len(nearest):
                nearest, kind = mount, rest.split(b" ")[0].decode("ascii", "replace")
    return kind
