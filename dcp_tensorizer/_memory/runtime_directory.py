"""The sockets of the keepers of a job, in a directory that belongs only to the user.

The name of a socket has a hash that identifies the job, and a random part, but no rank, because a launcher renumbers
ranks. The kernel reports the user at the other end of a socket. Both ends check that user before they read any data.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .._storage.local import boot_id
from ..errors import WriteError

_CONNECT_SECONDS = 5.0
_BACKLOG = 64
_ATTEMPTS = 20  # to make a socket: the last keeper to end removes the directory
_CREDENTIALS = struct.Struct("3i")  # process, user, group


def runtime_directory() -> Path:
    """Returns the directory of sockets, in ``XDG_RUNTIME_DIR`` or in the directory of temporary files.

    Raises `OSError` if this user can write to neither.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.path.isabs(base) and os.access(base, os.W_OK):
        return Path(base, "dcp_tensorizer")
    return Path(tempfile.gettempdir(), f"dcp_tensorizer-keepers-{os.getuid()}")


def job_name(location: str) -> str:
    """Returns the prefix of the names of a job's sockets. ``location`` identifies the job, such as its folder."""
    # The name includes the boot's id: machines may share the directory's disk, but a socket works only on one machine.
    boot = socket.gethostname()
    with suppress(OSError):
        boot = boot_id()
    named = f"{boot} {location}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(named, digest_size=8).hexdigest()


def identity(folder: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Returns the device and the inode of a folder, or None if it is not local or does not exist."""
    with suppress(OSError, ValueError):
        if os.path.isabs(folder):
            status = os.stat(folder)
            return status.st_dev, status.st_ino
    return None


def socket_path(directory: Path, job: str) -> Path:
    return directory / f"{job}-{secrets.token_hex(8)}"


def listen(path: Path) -> socket.socket:
    """Makes a listening socket at a path.

    Raises `WriteError` if the directory cannot be made or does not belong to this user alone, or if ``/proc`` is
    missing. Raises `OSError` if the socket cannot be made for another reason.
    """
    for attempt in range(_ATTEMPTS):
        _make(path.parent)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short_name(path.parent) as folder:
                listener.bind(f"{folder}/.{path.name}")
                listener.listen(_BACKLOG)
                # Renamed, so that no successor finds a socket that does not listen yet.
                os.rename(f"{folder}/.{path.name}", f"{folder}/{path.name}")
        except FileNotFoundError as error:
            listener.close()
            if attempt + 1 == _ATTEMPTS:
                raise WriteError(
                    f"a socket in {path.parent} cannot be made, perhaps because /proc is missing: {error}"
                ) from error
        except BaseException:
            listener.close()
            raise
        else:
            return listener
    raise AssertionError("unreachable")


def remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def touch(path: Path) -> None:
    """Marks a socket and its directory as in use, for programs that remove old temporary files."""
    with suppress(OSError):
        os.utime(path)
        os.utime(path.parent)


def sockets_of(directory: Path, job: str) -> list[Path]:
    """Lists the sockets of a job. Returns an empty list if the directory is missing, or is not the user's own."""
    with suppress(OSError, WriteError):
        _check(directory)
        return sorted(path for path in directory.iterdir() if path.name.startswith(f"{job}-"))
    return []


def connect(path: Path) -> socket.socket | None:
    """Connects to a keeper. Returns None if its process is gone, or belongs to another user.

    Raises `TimeoutError` if the keeper accepts no connection, for example because it is stopped.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_CONNECT_SECONDS)
        with _short_name(path.parent) as folder:
            connection.connect(f"{folder}/{path.name}")
        connection.settimeout(None)
        if is_own_peer(connection):
            return connection
    except ConnectionRefusedError:  # the keeper was killed, and could not remove its socket
        with suppress(OSError):
            path.unlink()
    except (BlockingIOError, TimeoutError) as error:
        connection.close()
        raise TimeoutError(f"{path} takes no more connections") from error
    except OSError:
        pass
    connection.close()
    return None


def is_own_peer(connection: socket.socket) -> bool:
    with suppress(OSError):
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())
    return False


@contextmanager
def _short_name(directory: Path) -> Iterator[str]:
    """Yields a short path of a directory, because the address of a socket is limited in length."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _make(directory: Path) -> None:
    try:
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        with suppress(FileNotFoundError):  # the last keeper has just removed it
            _check(directory)
    except OSError as error:
        raise WriteError(
            f"{directory}, for the sockets of keepers, cannot be made: {error}. Set XDG_RUNTIME_DIR to a directory "
            f"that this user can write to"
        ) from error


def _check(directory: Path) -> None:
    """Raises `WriteError` unless the directory belongs to this user alone, and `OSError` if it does not exist."""
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise WriteError(
            f"{directory} is not a directory that belongs to this user alone (mode 0700): remove it, or set "
            f"XDG_RUNTIME_DIR to another directory"
        )
