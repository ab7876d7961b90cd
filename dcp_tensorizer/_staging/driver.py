"""NVIDIA's driver through ctypes: batches of copies, and streams outside torch's pool.

torch has no API for either. Both are optional: with a driver that is too old for batches, or in a ROCm build, torch
makes the copies. Without NVIDIA's driver, torch also provides the streams. The device's context must be current in the
calling thread, which any torch call on that device ensures.
"""

from __future__ import annotations

import ctypes
import functools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

_LIBRARY = "libcuda.so.1"
_BATCHES_SINCE = 12_080  # CUDA 12.8, as `cuDriverGetVersion` counts
_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read in stream order
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no synchronisation with the legacy default stream

Numbers = npt.NDArray[np.uint64]


class Batch(NamedTuple):
    """Copies of bytes by address, grouped into driver calls. Holds no reference to a tensor."""

    targets: Numbers
    sources: Numbers
    sizes: Numbers
    bounds: list[int]  # the index of each call's first copy, then the count of all copies


def batch_of(
    targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], borders: Sequence[int], most: int
) -> Batch:
    """Makes a batch of copies to host memory, each of at most ``most`` bytes.

    The copies of one driver call together may exceed ``most``, by less than the size of one copy.

    ``borders`` are the sorted addresses at which registrations of host memory begin. No copy may cross one.
    """
    into, out, nbytes = (np.array(numbers, dtype=np.uint64) for numbers in (targets, sources, sizes))
    edges = np.array(borders, dtype=np.uint64)
    is_crossing = np.searchsorted(edges, into, side="right") < np.searchsorted(edges, into + nbytes, side="left")
    if (is_cut := is_crossing | (nbytes > most)).any():
        rows = [
            (target + start, source + start, stop - start)
            for target, source, size, is_long in zip(targets, sources, sizes, is_cut.tolist(), strict=True)
            for start, stop in (pieces_of(target, size, borders, most) if is_long else ((0, size),))
        ]
        into, out, nbytes = np.array(rows, dtype=np.uint64).T.copy()
    calls = (np.cumsum(nbytes) - 1) // most
    return Batch(into, out, nbytes, [0, *(np.flatnonzero(np.diff(calls)) + 1).tolist(), len(nbytes)])


def pieces_of(address: int, nbytes: int, borders: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Cuts host memory into pieces of at most ``most`` bytes, one per copy. Returns their starts and ends, relative to
    ``address``.

    ``borders`` are the sorted addresses at which registrations begin. No copy may cross one.
    """
    inside = borders[bisect_right(borders, address) : bisect_left(borders, address + nbytes)]
    ends = [*(border - address for border in inside), nbytes]
    return [
        (first, min(first + most, end))
        for start, end in zip([0, *ends], ends, strict=False)
        for first in range(start, end, most)
    ]


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes. The location hints matter only for managed and pageable memory."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


@functools.cache
def copier() -> Callable[[Batch, int], int] | None:
    """Returns a function that queues a batch on the stream with a given handle; None if the driver takes no batches.

    That function returns the driver's status, 0 for success.
    """
    library = _library()
    version = ctypes.c_int()
    if library is None or library.cuDriverGetVersion(ctypes.byref(version)) or version.value < _BATCHES_SINCE:
        return None
    try:
        # In CUDA 13, `cuMemcpyBatchAsync_v2` has no argument `failIdx`. Newer drivers still export the older symbol.
        call = library.cuMemcpyBatchAsync
    except AttributeError:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    call.restype = ctypes.c_int
    call.argtypes = [pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer]
    attributes, first, failed = _Attributes(source_order=_IN_STREAM_ORDER), size(0), size(0)

    def copy(batch: Batch, stream: int) -> int:
        arrays = batch.targets, batch.sources, batch.sizes
        for start, stop in zip(batch.bounds, batch.bounds[1:], strict=False):
            addresses = (array.ctypes.data + start * array.itemsize for array in arrays)
            options = ctypes.byref(attributes), ctypes.byref(first), 1, ctypes.byref(failed)
            if status := call(*addresses, stop - start, *options, stream):
                return int(status)
        return 0

    return copy


def new_stream() -> int | None:
    """Returns the handle of a new stream of the lowest priority on the current context's device; None on failure.

    Nothing destroys the stream before the process ends.
    """
    library = _library()
    if library is None:
        return None
    least, greatest, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    if library.cuCtxGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(greatest)):
        return None
    status = library.cuStreamCreateWithPriority(ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING), least)
    return None if status else stream.value


def _library() -> ctypes.CDLL | None:
    if torch.version.hip is not None:
        return None
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
