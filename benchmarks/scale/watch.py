"""Measures what a step reads, opens and allocates, and ends a step that exceeds its limits."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MOST_SECONDS = 120
MOST_BYTES = 12_000_000_000
_DATA = (".tensors", ".distcp")


class Stopped(BaseException):
    """A step exceeded its time or memory. Not an `Exception`, because the interrupted code could catch that."""


@contextmanager
def limits(seconds: float = MOST_SECONDS, nbytes: int = MOST_BYTES) -> Iterator[None]:
    """Raises `Stopped` in the block, which must run on the main thread."""

    def stop(number: int, frame: Any) -> None:
        raise Stopped(f"more than {seconds:g} s")

    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + nbytes, before[1]))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except MemoryError:
        raise Stopped(f"more than {nbytes / 1e9:g} GB of memory") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


class _FirstByteError(Exception):
    """Ends a load at its first data file, because only the work before it is measured."""


class Opens:
    """Counts the files of a folder that this process opens. The first data file ends the load that opens it.

    A process needs only one instance, because an audit hook stays until the process ends.

    Attributes:
        count: The number of opened files, without data files.
        first_byte_at: When the first data file was opened.
    """

    def __init__(self) -> None:
        self._folder = ""
        self.count = 0
        self.first_byte_at: float | None = None
        sys.addaudithook(self._see)

    @contextmanager
    def of(self, folder: Path) -> Iterator[None]:
        """Watches a folder. The block ends without an error when it opens the first data file."""
        self._folder, self.count, self.first_byte_at = f"{folder}/", 0, None
        try:
            yield
        except Exception:
            if self.first_byte_at is None:
                raise
        finally:
            self._folder = ""

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not self._folder or not isinstance(arguments[0], str | os.PathLike):
            return
        path = os.fspath(arguments[0])
        if not isinstance(path, str) or not path.startswith(self._folder):
            return
        if path.endswith(_DATA):
            self.first_byte_at = self.first_byte_at or time.perf_counter()
            raise _FirstByteError
        self.count += 1


def reset_peak() -> int:
    """Resets the peak of `peak`; returns the resident memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak() -> int:
    """Returns the peak of the resident memory in bytes since `reset_peak`."""
    return status("VmHWM")


def bytes_read() -> int:
    """Returns the number of bytes that this process has got from ``read`` and similar calls."""
    return _field(Path("/proc/self/io"), "rchar")


def status(field: str) -> int:
    return _field(Path("/proc/self/status"), field) * 1024


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise KeyError(name)
