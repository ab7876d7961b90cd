"""Spans: the timed steps of a save or a load, in all of its threads and processes."""

from __future__ import annotations

import time
from typing import NamedTuple


class Span(NamedTuple):
    """A span of time, on the clock that all processes of a host share (``time.perf_counter()``)."""

    name: str
    """The step: a key of `PARENTS`."""
    began: float
    """Start, in seconds."""
    ended: float
    """End, in seconds."""
    file: str = ""
    """The data file that was written or read, or empty."""
    nbytes: int = 0
    """Bytes that were written or read."""
    verify_seconds: float = 0.0
    """In a read, the time to verify the data against its digests, summed over threads."""

    @property
    def seconds(self) -> float:
        """Returns the duration."""
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
"""The parent of each span, or empty for a root. The parent of `encode` and `finish` is the `file` span with the same
``file``.
"""


def clock_offset() -> float:
    """Measures the offset of ``time.time()`` from the clock of spans, in seconds."""
    return time.time() - time.perf_counter()
