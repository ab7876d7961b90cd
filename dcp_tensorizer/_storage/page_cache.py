"""Asks Linux what the page cache holds of a file, without changing it."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

__all__ = ["Residency"]

_RUN = 64 << 20  # pages come and go in long runs, and each question takes time
_PROBES = 8  # single pages go at any time, and a run that is read past the cache does not come back to it


class Residency:
    """What the page cache holds of an open file.

    It calls mincore. A read with RWF_NOWAIT would tell as well, but then the kernel reads missing pages ahead, and
    they come from the disk twice. If this process may not write to the file, the kernel says that all of it is cached.

    Raises:
        OSError: the file cannot be mapped.
        ValueError: it is empty.
    """

    def __init__(self, descriptor: int) -> None:
        self._mapping = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        self._address = np.frombuffer(self._mapping, dtype=np.uint8).ctypes.data
        # PyDLL keeps the interpreter lock. The call takes less time than CDLL takes to release it and get it back.
        self._mincore = ctypes.PyDLL(None).mincore
        self._mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        self._runs: dict[int, bool] = {}

    def holds(self, offset: int) -> bool:
        """Whether the cache held most of the run around a byte when this was first asked."""
        run = offset // _RUN
        if run not in self._runs:
            start, stop = run * _RUN, min(run * _RUN + _RUN, len(self._mapping))
            probes = [start + (2 * n + 1) * (stop - start) // (2 * _PROBES) for n in range(_PROBES)]
            self._runs[run] = 2 * sum(map(self.holds_page, probes)) >= _PROBES
        return self._runs[run]

    def holds_page(self, offset: int) -> bool:
        """Whether the cache holds the page of a byte now."""
        answer = ctypes.c_ubyte(1)
        failed = self._mincore(self._address + offset // mmap.PAGESIZE * mmap.PAGESIZE, 1, ctypes.byref(answer))
        return bool(failed or answer.value & 1)

    def close(self) -> None:
        self._mapping.close()
