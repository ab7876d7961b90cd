"""A progress line on a terminal for loads and saves: `ProgressLine`."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from ._runtime.ranks import rank_of_job

__all__ = ["ProgressLine"]

_EVERY = 0.1  # seconds between updates of the line: people cannot read faster
_CLEAR = "\r\033[K"


class ProgressLine:
    """A line with the finished bytes of a load or a save, the rate, and the time left.

    Pass a line as ``on_progress`` to a writer or a reader, or two lines to a manager::

        CheckpointManager(
            "run", on_progress=ProgressLine("saving"), reader_options={"on_progress": ProgressLine("loading")}
        )

    The line appears before the first byte is read or written, and is cleared at the end. Only rank 0 writes it, and
    only to a terminal. One object serves any number of loads or saves, one after the other.

    Args:
        doing: The beginning of the line.
        stream: The stream to write to; None for the standard error stream.
    """

    def __init__(self, doing: str = "loading", stream: TextIO | None = None) -> None:
        self._doing = doing
        self._stream = stream
        self._began: float | None = None
        self._shown = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Updates the line with the bytes done and the total bytes."""
        now = time.monotonic()
        if self._began is None or not done:
            self._began, self._shown = now, 0.0
        is_over = done >= total
        out = self._stream or sys.stderr
        if (is_over or now - self._shown >= _EVERY) and rank_of_job() == 0 and out is not None and out.isatty():
            rate = done / max(now - self._began, 1e-9)
            left = f", {(total - done) / rate:.0f} s left" if done else ""
            line = "" if is_over else f"{self._doing}: {size(done)} of {size(total)}, {size(rate)}/s{left}"
            out.write(_CLEAR + line)
            out.flush()
            self._shown = now
        if is_over:
            self._began = None


def size(nbytes: float) -> str:
    """Returns a number of bytes in decimal units: ``1.5 GB``."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    value, units = nbytes / 1000, ["kB", "MB", "GB", "TB", "PB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {units[0]}"
