"""A checkpoint's directory on a file system."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
import weakref
from contextlib import suppress
from pathlib import Path

from .._threads import cores
from ..errors import NotCommitted, ReadError, WriteError
from .base import TAKEN, DirectoryLock, FileInfo, RangeReader, Refused, Sink, Storage, temporary_file_name
from .local_read import LocalFile, UncachedFile
from .local_write import LocalSink

__all__ = ["LocalStorage"]

# Where a lock that one process holds is seen by every other that can reach the directory. On network file systems it
# may be this machine's alone.
_LOCAL_TYPES = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}
# Errors of a mount whose server has not said what has become of a request.
_UNANSWERED = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.ENOTCONN, errno.EHOSTUNREACH}


class LocalStorage(Storage):
    slice_bytes = 1 << 20  # a second-level cache

    def __init__(self, root: Path) -> None:
        self._root = root
        self.path = self.location = str(root)
        self.max_threads = min(8, 4 * cores())
        self.min_threads = min(8, cores())  # what is in the page cache needs no more, and more share fewer caches

    @property
    def locks_are_visible(self) -> bool:  # type: ignore[override]
        return _is_local(self._root)

    def child(self, name: str) -> Storage:
        return LocalStorage(self._root / name)

    def listing(self) -> tuple[list[FileInfo], list[str]]:
        files, folders = [], []
        try:
            with os.scandir(self._root) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):  # a link would show what it leads to twice
                        folders.append(entry.name)
                        continue
                    with suppress(OSError):  # removed since, or a link to nowhere, or in a circle
                        state = entry.stat()
                        if stat.S_ISREG(state.st_mode):
                            files.append(FileInfo(entry.name, state.st_size, state.st_mtime))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotCommitted(f"there is no directory {self.path}") from error
        except OSError as error:
            raise ReadError(f"cannot list {self.path}: {error}") from error
        return files, folders

    def make_directory(self) -> None:
        created = [folder for folder in (self._root, *self._root.parents) if not folder.exists()]
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            for folder in created:
                _sync_directory(folder.parent)
        except OSError as error:
            raise WriteError(f"cannot create the checkpoint directory {self.path}: {error}") from error

    def create(self, name: str, nbytes: int, *, sync: bool) -> Sink:
        return LocalSink(self._root / name, nbytes, sync=sync, preallocate=_is_local(self._root))

    def sync_directory(self) -> None:
        _sync_directory(self._root)

    def put(self, name: str, data: bytes, *, sync: bool, replace: bool = True) -> None:
        temporary = self._root / temporary_file_name(name)
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
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
                raise WriteError(f"{self._root / name} is in place, but may not stay there: {error}") from error

    def _rename(self, temporary: Path, name: str, data: bytes, replace: bool) -> None:
        """Gives a file its name.

        A network mount may say that it could not when it has: if an answer was lost, and a retry met its own file.
        """
        try:
            if not replace:
                _link(temporary, self._root / name)
            os.replace(temporary, self._root / name)  # for a link to the same file this does nothing
        except OSError as error:
            with suppress(ReadError):
                if self.read(name) == data:
                    return
            if error.errno in _UNANSWERED and not _is_local(self._root):
                raise WriteError(f"{self._root / name} may be in place, now or later: {error}") from error
            raise

    def read(self, name: str) -> bytes | None:
        try:
            return (self._root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ReadError(f"cannot read {self._root / name}: {error}") from error

    def head(self, name: str) -> int | None:
        try:
            return (self._root / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ReadError(f"cannot read {self._root / name}: {error}") from error

    def open(self, name: str) -> RangeReader:
        return LocalFile(self._root / name)

    def open_uncached(self, name: str) -> RangeReader:
        return UncachedFile(self._root / name)

    def lock_directory(self) -> DirectoryLock:
        return _FileLock(self._root)

    def remove(self, *names: str) -> None:
        for name in names:
            (self._root / name).unlink(missing_ok=True)

    def remove_directory(self) -> bool:
        with suppress(OSError):
            self._root.rmdir()
        return not self._root.exists()


class _FileLock(DirectoryLock):
    """A lock on the directory: exclusive for whoever finds nobody else there, then shared while the save lasts.

    The kernel drops it when the process ends, however it ends; it ends with this object, too.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._open()
        self._alone = _is_local(root) and self._lock(fcntl.LOCK_EX)

    def leftovers(self) -> list[str] | None:
        return os.listdir(self._fd) if self._alone else None

    def share(self, timeout: float) -> None:
        self._alone = False
        deadline = time.monotonic() + timeout
        self._wait(deadline, timeout)
        while not self._is_current():  # whoever cleaned up removed the directory as well
            self.release()
            self._open()
            self._wait(deadline, timeout)

    def release(self) -> None:
        self._release()

    def _open(self) -> None:
        """Opens the directory, made again if somebody has removed it since the save made it."""
        try:
            with suppress(FileExistsError):
                self._root.mkdir()
            self._fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise WriteError(f"cannot open the checkpoint directory {self._root}: {error}") from error
        self._release = weakref.finalize(self, _unlock, self._fd, os.getpid())

    def _is_current(self) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._fd), os.stat(self._root))
        return False

    def _wait(self, deadline: float, timeout: float) -> None:
        while not self._lock(fcntl.LOCK_SH):  # another save is cleaning up: milliseconds, unless it was stopped there
            if time.monotonic() > deadline:
                self.release()
                raise WriteError(
                    f"another save has been cleaning up {self._root} for {timeout:g} s: is its process stopped?"
                )
            time.sleep(0.01)

    def _lock(self, operation: int) -> bool:
        """Whether the lock was got, or is none on this file system (and then shared ones are as good)."""
        try:
            fcntl.flock(self._fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return operation != fcntl.LOCK_EX
        return True


def _unlock(fd: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child must not end what its parent holds
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # or else the lock lasts as long as such a child has its descriptor
        os.close(fd)


def _is_local(path: Path) -> bool:
    """Whether a path is on a file system of this machine's own."""
    real = os.path.realpath(path)
    found = ("", "")
    with suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8") as mounts:
        for line in mounts:
            fields, _, rest = line.partition(" - ")
            mount = fields.split()[4].encode().decode("unicode_escape")
            inside = real == mount or real.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(found[0]):
                found = mount, rest.split()[0]
    return found[1] in _LOCAL_TYPES


def _link(source: Path, target: Path) -> None:
    """Gives a file a second name, which must not be taken; on mounts without links only checks that it is not."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise FileExistsError(TAKEN) from None
    except OSError:
        if target.exists():
            raise FileExistsError(TAKEN) from None


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
