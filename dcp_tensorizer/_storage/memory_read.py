"""Files, and ranges of files, that are in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .base import RangeReader

__all__ = ["MemoryReader"]


class MemoryReader(RangeReader):
    """A file, or a range of one, that is in memory.

    Args:
        data: Its bytes.
        offset: Of the first of them in the file.
    """

    def __init__(self, data: memoryview | bytes, offset: int = 0) -> None:
        self._data = np.frombuffer(data, dtype=np.uint8)
        self._offset = offset

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        position = offset - self._offset
        for buffer in buffers:
            # NumPy copies without the interpreter lock.
            np.frombuffer(buffer, dtype=np.uint8)[:] = self._data[position : position + buffer.nbytes]
            position += buffer.nbytes
