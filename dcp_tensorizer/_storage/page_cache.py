"""Asks Linux's page cache what it holds of a file, without making it hold anything."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

__all__ = ["Residency"]

_RUN = 64 << 20  # what is in the cache comes and goes in long runs, and to ask takes time
_PROBES = 8  # a few pages go at any time, and what is then read past the cache does not come back to it


class Residency:
    """What the page cache holds of an open file.

    By mincore: a read with RWF_NOWAIT would ask, too, but what it does not find it has the kernel read ahead, and then
    that comes from the disk twice. Who could not write to the file is told that all of it is there.

    Raises:
        OSError: the file cannot be mapped.
        ValueError: it is empty.
    """

    def __init__(self, descriptor: int) -> None:
        self._mapping = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        self._address = np.frombuffer(self._mapping, dtype=np.uint8).ctypes.data
        # As PyDLL, for it takes less time than to let go of the interpreter lock, and to get it back, as CDLL does.
        self._mincore = ctypes.PyDLL(None).mincore
        self._mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        self._found: dict[int, bool] = {}

    def holds(self, offset: int) -> bool:
        """Whether the cache held most of what is around a byte, when that was first asked."""
        run = offset // _RUN
        found = self._found.get(run)
        if found is None:
            start, stop = run * _RUN, min(run * _RUN + _RUN, len(self._mapping))
            probes = [start + (2 * n + 1) * (stop - start) // (2 * _PROBES) for n in range(_PROBES)]
            found = self._found[run] = 2 * sum(map(self._ask, probes)) >= _PROBES
        return found

    def close(self) -> None:
        self._mapping.close()

    def _ask(self, offset: int) -> bool:
        """Whether the cache holds a byte."""
        answer = ctypes.c_ubyte(1)
        failed = self._mincore(self._address + offset // mmap.PAGESIZE * mmap.PAGESIZE, 1, ctypes.byref(answer))
        return bool(failed or answer.value & 1)
