"""The process context of a save: the environment, the working directory and the umask of the trainer.

The trainer sends it with each save, and the writer process applies it: jobs rotate the credentials in environment
variables, and may change their umask after the first save.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

_STATUS = "/proc/thread-self/status"
_OF_OWNER = 0o600  # a umask with these bits makes files that their owner cannot open


@dataclass(frozen=True, slots=True, repr=False)  # the environment holds secrets
class ProcessContext:
    """The properties of a process that affect its saves. None means unknown, or a removed working directory."""

    pid: int
    environment: Mapping[str, str]
    umask: int | None
    directory: str | None

    @classmethod
    def here(cls) -> ProcessContext:
        return cls(os.getpid(), environment(), current_umask(), _directory())

    def apply(self, excluded: Collection[str] = ()) -> None:
        """Applies the environment, the umask and the working directory to this process.

        If the working directory is unknown, or this process cannot enter it, changes to ``/``. Does nothing in the
        process whose context this is. Does not change the environment variables in ``excluded``.
        """
        if self.pid == os.getpid():
            return
        for name in {*os.environ, *self.environment}.difference(excluded):
            value = self.environment.get(name)
            if value is None:
                os.environ.pop(name, None)
            elif os.environ.get(name) != value:
                os.environ[name] = value
        if self.umask is not None:
            os.umask(self.umask)
        if self.directory is not None and self.directory == _directory():
            return  # chdir could hang if the directory is on a network file system that hangs
        try:
            os.chdir(self.directory or "/")
        except OSError:  # removed since, or not accessible to this process
            os.chdir("/")


def _directory() -> str | None:
    with suppress(OSError):
        return os.getcwd()
    return None


def environment() -> dict[str, str]:
    """Returns the environment variables of this process, which other threads may change concurrently.

    Omits entries that are not str: a program may replace ``os.environ`` with a plain dict, as tests do.
    """
    found = {name: os.environ.get(name) for name in list(os.environ)}
    return {name: value for name, value in found.items() if isinstance(name, str) and isinstance(value, str)}


def current_umask() -> int | None:
    """Reads the umask without setting it. Returns None if the system does not show it.

    Also returns None for a umask that locks out the owner of new files: a library has then set it for a moment, to read
    the umask.
    """
    with suppress(OSError, ValueError), open(_STATUS, "rb") as status:
        for line in status:
            if line.startswith(b"Umask:"):
                umask = int(line.split()[1], 8)
                return None if umask & _OF_OWNER else umask
    return None
