"""The bytes of a part of a tensor, as runs of the whole tensor's bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Integers: TypeAlias = NDArray[np.int64]


def runs_of_region(
    shape: Sequence[int], start: Sequence[int], size: Sequence[int], itemsize: int
) -> tuple[Integers, int]:
    """The offset of each run of a region in its tensor, and the size of a run.

    The region's bytes in C order are its runs, one after the other. ``itemsize`` is that of an element.
    """
    if not math.prod(size):
        return np.zeros(0, dtype=np.int64), 0
    inner = len(shape)  # dimensions from here on are whole
    while inner and size[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(0, inner - 1)  # dimensions before this one are iterated over
    strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    firsts = np.zeros(1, dtype=np.int64)
    for dim in range(outer):
        firsts = (firsts[:, None] + (start[dim] + np.arange(size[dim], dtype=np.int64)) * strides[dim]).reshape(-1)
    nbytes = math.prod(size[outer:]) * itemsize
    return firsts + sum(start[dim] * strides[dim] for dim in range(outer, len(shape))), nbytes
