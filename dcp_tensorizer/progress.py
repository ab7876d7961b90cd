"""A line on a terminal that tells how far a load or a save has come: `ProgressLine`."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from ._runtime.ranks import rank_of_job

__all__ = ["ProgressLine"]

_EVERY = 0.1  # seconds; people cannot read faster
_CLEAR = "\r\033[K"


class ProgressLine:
    """Tells how far a load or a save has come: bytes, their rate, and how long it still takes.

    Pass it as ``on_progress`` to a writer or a reader, or both to a manager::

        CheckpointManager(
            "run", on_progress=ProgressLine("saving"), reader_options={"on_progress": ProgressLine("loading")}
        )

    The line appears before the first byte is read or written, and is cleared at the end. It is written by rank 0, and
    only to a terminal. It serves any number of loads or saves, one after the other.

    Args:
        doing: The beginning of the line.
        stream: Where it is written; None for the standard error stream.
    """

    def __init__(self, doing: str = "loading", stream: TextIO | None = None) -> None:
        self._doing = doing
        self._stream = stream
        self._began: float | None = None
        self._shown = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Takes the bytes done and the bytes in all."""
        now = time.monotonic()
        if self._began is None or not done:
            self._began, self._shown = now, 0.0
        is_over = done >= total
        if (is_over or now - self._shown >= _EVERY) and self._is_shown():
            line = _CLEAR if is_over else _CLEAR + self._line(done, total, now - self._began)
            self._out.write(line)
            self._out.flush()
            self._shown = now
        if is_over:
            self._began = None

    def _line(self, done: int, total: int, seconds: float) -> str:
        rate = done / max(seconds, 1e-9)
        left = f", {(total - done) / rate:.0f} s left" if done else ""
        return f"{self._doing}: {size(done)} of {size(total)}, {size(rate)}/s{left}"

    @property
    def _out(self) -> TextIO:
        return self._stream or sys.stderr

    def _is_shown(self) -> bool:
        return rank_of_job() == 0 and self._out is not None and self._out.isatty()


def size(nbytes: float) -> str:
    """Bytes in decimal units: ``1.5 GB``."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    value, units = nbytes / 1000, ["kB", "MB", "GB", "TB", "PB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {units[0]}"
