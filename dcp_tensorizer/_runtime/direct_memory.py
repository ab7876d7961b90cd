"""Allocates memory for reads and writes with O_DIRECT, which bypass the page cache."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

_HUGE_PAGE = 2 << 20


def direct_memory(nbytes: int) -> memoryview:
    """Allocates page-aligned memory. Uses huge pages if ``nbytes`` is at least a huge page and the system has them.

    A disk request has a limited number of segments (254 for virtio), each contiguous in physical memory. With small
    pages a request carries 1 MiB, with huge pages more. Measured alternately, 8 MiB at a time: writes of 2.1-3.3 GB/s
    with small pages and 3.5-4.2 GB/s with huge ones, reads of 1.2-1.6 GB/s and 2.2-3.0 GB/s. The kernel's CPU time
    falls to a third.
    """
    if nbytes < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return memoryview(_private(nbytes))
    memory = _private(nbytes + _HUGE_PAGE)  # untouched pages take no memory
    start = -np.frombuffer(memory, dtype=np.uint8).ctypes.data % _HUGE_PAGE
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, start, nbytes)
    return memoryview(memory)[start : start + nbytes]


def _private(nbytes: int) -> mmap.mmap:
    """Maps private memory: the default of `mmap`, shared memory, has small pages on most systems."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
