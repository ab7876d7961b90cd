"""The process context of a save: the environment, the working directory, the umask and the groups of the trainer.

The trainer sends it with each save, and the writer process applies it: jobs rotate the credentials in environment
variables, and may change their umask or group after the first save.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

_STATUS = "/proc/thread-self/status"
_OF_OWNER = 0o600  # a umask with these bits makes files that their owner cannot open
_MORE_SAMPLES = 7
_SAMPLE_SECONDS = 0.001

Identity = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, repr=False)  # the environment holds secrets
class ProcessContext:
    """The properties of a process that affect its saves. None means unknown, or a removed working directory."""

    pid: int
    environment: Mapping[str, str]
    umask: int | None
    directory: str | None
    identity: Identity

    @classmethod
    def here(cls) -> ProcessContext:
        """Returns the current context of this process."""
        return cls(os.getpid(), environment(), current_umask(), _directory(), identity_of_process())

    def take_on(self, kept: Collection[str] = ()) -> None:
        """Applies the environment, the umask and the working directory to this process, unless it is their origin.

        Does not change the environment variables in ``kept``.
        """
        if self.pid == os.getpid():
            return
        for name in {*os.environ, *self.environment}.difference(kept):
            value = self.environment.get(name)
            if value is None:
                os.environ.pop(name, None)
            elif os.environ.get(name) != value:
                os.environ[name] = value
        if self.umask is not None:
            os.umask(self.umask)
        if self.directory is not None and self.directory == _directory():
            return  # chdir could hang if the server of the directory hangs
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

    Omits entries that are not str: a program may replace ``os.environ`` by a plain dict, as tests do.
    """
    found = {name: os.environ.get(name) for name in list(os.environ)}
    return {name: value for name, value in found.items() if isinstance(name, str) and isinstance(value, str)}


def identity_of_process() -> Identity:
    """Returns the user ids, group ids and supplementary groups of this process."""
    if not hasattr(os, "getresuid"):
        return (os.getuid(), os.geteuid()), (os.getgid(), os.getegid()), tuple(os.getgroups())
    return os.getresuid(), os.getresgid(), tuple(os.getgroups())


def current_umask() -> int | None:
    """Reads the umask without setting it. Returns None if the system does not show it.

    Libraries read the umask by setting another one and restoring it. If another thread does that concurrently, readings
    differ, or show a umask with which the owner cannot open files. Then more readings are taken, and the most frequent
    one is returned.
    """
    readings = [_read_umask(), _read_umask()]
    if readings[0] is None or (readings[0] == readings[1] and not readings[0] & _OF_OWNER):
        return readings[0]
    for _ in range(_MORE_SAMPLES):
        time.sleep(_SAMPLE_SECONDS)
        readings.append(_read_umask())
    seen = [umask for umask in readings if umask is not None]
    return Counter([umask for umask in seen if not umask & _OF_OWNER] or seen).most_common(1)[0][0]


def _read_umask() -> int | None:
    with suppress(OSError, ValueError), open(_STATUS, "rb") as status:
        for line in status:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    return None
