"""Spans: what a save or a load did, and when, in all of its threads and processes."""

from __future__ import annotations

import time
from typing import NamedTuple


class Span(NamedTuple):
    """A span of time, on the clock that all processes of a host share (``time.perf_counter()``)."""

    name: str
    """The kind of work: a name of `PARENTS`."""
    began: float
    """Seconds."""
    ended: float
    """Seconds."""
    file: str = ""
    """The data file that was written or read; empty if there is none."""
    nbytes: int = 0
    """Bytes that were written or read."""
    verify_seconds: float = 0.0
    """Of a read: time for comparing the data with its digests, added up over threads."""

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.ended - self.began


PARENTS = {
    "wait": "",
    "save": "",
    "stage": "save",
    "plan": "save",
    "write": "save",
    "files": "write",
    "file": "files",
    "encode": "file",
    "finish": "file",
    "agree": "save",
    "commit": "save",
    "flush": "",
    "load": "",
    "metadata": "load",
    "prepare": "load",
    "read": "load",
    "read file": "read",
}
"""The span that contains each span; empty for those that are in none. `encode` and `finish` belong to the file of the
same name.
"""


def clock_offset() -> float:
    """The seconds that turn a time of a span into one of ``time.time()``. It is measured now."""
    return time.time() - time.perf_counter()
