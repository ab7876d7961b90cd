"""Computes statistics of a tensor's elements in one pass, by blocks and by pieces of blocks.

The range of a histogram is known only at the end. To avoid a second pass, elements are counted in fine bins that fit
any range. The bin of an element is given by its first 14 bits as a float32 (sign, exponent, and 5 bits of the
fraction), so a bin is at most about 3% wide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

BINS = 40  # of a shown histogram

_PIECE = 1 << 15  # elements: 256 KiB as float64, which fit into the core's own cache
_SHIFT = 18
_FINE = 1 << (32 - _SHIFT)
_FINITE = 255 << (23 - _SHIFT)  # fine bins of one sign below infinity
_LARGEST = float(np.finfo(np.float32).max)
_DEVIATIONS = 4.0  # a histogram covers this many standard deviations on both sides of the mean

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Statistics:
    """The statistics of a tensor's elements. The real and imaginary parts of a complex number are two elements.

    Attributes:
        elements, zeros, nans, infinities: The number of each.
        smallest, largest, mean, deviation, norm: Of the finite elements; None without finite elements. ``deviation`` is
            the standard deviation, ``norm`` the Euclidean norm. Both are infinite or NaN if their squares overflow
            float64.
        low, high: The range of the histogram.
        histogram: The number of finite elements in each of `BINS` equal parts of that range. Elements outside the range
            count in the first or the last part.
        distance: The norm of the finite differences from the tensor in the previous checkpoint; None if there is no
            previous checkpoint, or if it has no tensor with this key and shape.
    """

    elements: int
    zeros: int
    nans: int
    infinities: int
    smallest: float | None
    largest: float | None
    mean: float | None
    deviation: float | None
    norm: float | None
    low: float | None
    high: float | None
    histogram: tuple[int, ...]
    distance: float | None


def _wide(elements: torch.Tensor) -> _Floats:
    if elements.dtype.is_complex:
        elements = torch.view_as_real(elements.to(torch.complex128))
    return elements.to(torch.float64).reshape(-1).numpy()


class Running:
    def __init__(self) -> None:
        self._elements = self._zeros = self._nans = self._infinities = self._finite = 0
        self._mean = self._squares = self._distance = 0.0  # squares: the sum of squared differences from the mean
        self._smallest, self._largest = math.inf, -math.inf
        self._fine: NDArray[Any] = np.zeros(_FINE, np.int64)

    def add(self, block: torch.Tensor, before: torch.Tensor | None = None) -> None:
        """Adds elements; ``before`` holds the same elements in the previous checkpoint.

        Raises `RuntimeError`, `NotImplementedError` or `TypeError` if the dtype has no arithmetic.
        """
        block, before = block.reshape(-1), None if before is None else before.reshape(-1)
        with np.errstate(all="ignore"):  # squares may overflow
            for start in range(0, block.numel(), _PIECE):
                piece = _wide(block[start : start + _PIECE])
                if before is not None:
                    difference = piece - _wide(before[start : start + _PIECE])
                    self._distance += _sum_of_squares(difference[np.isfinite(difference)])
                self._add_piece(piece)

    def _add_piece(self, piece: _Floats) -> None:
        nans = int(np.count_nonzero(np.isnan(piece)))
        infinities = int(np.count_nonzero(np.isinf(piece)))
        finite = piece[np.isfinite(piece)] if nans or infinities else piece
        self._elements += piece.size
        self._nans += nans
        self._infinities += infinities
        if not finite.size:
            return
        self._zeros += finite.size - int(np.count_nonzero(finite))
        mean = float(finite.mean())
        centred = finite - mean
        self._combine(finite.size, mean, _sum_of_squares(centred))
        self._smallest = min(self._smallest, float(finite.min()))
        self._largest = max(self._largest, float(finite.max()))
        bits = np.clip(finite, -_LARGEST, _LARGEST).astype(np.float32).view(np.uint32) >> _SHIFT
        self._fine += np.bincount(bits, minlength=_FINE)

    def take(self, other: Running) -> None:
        self._elements += other._elements
        self._zeros += other._zeros
        self._nans += other._nans
        self._infinities += other._infinities
        self._distance += other._distance
        self._combine(other._finite, other._mean, other._squares)
        self._smallest = min(self._smallest, other._smallest)
        self._largest = max(self._largest, other._largest)
        self._fine += other._fine

    def _combine(self, count: int, mean: float, squares: float) -> None:
        """Merges moments by Chan's formula, which avoids cancellation if the deviation is small beside the mean."""
        total = self._finite + count
        if total:
            apart = mean - self._mean
            self._squares += squares + apart * apart * self._finite * count / total
            self._mean += apart * count / total
            self._finite = total

    def result(self, *, has_distance: bool) -> Statistics:
        """Returns the statistics. ``has_distance`` requires that each `add` got ``before``."""
        counts = self._elements, self._zeros, self._nans, self._infinities
        if not self._finite:
            return Statistics(*counts, None, None, None, None, None, None, None, (), 0.0 if has_distance else None)
        deviation = math.sqrt(self._squares / self._finite)
        reach = _DEVIATIONS * deviation if math.isfinite(deviation) else math.inf
        low = max(self._smallest, self._mean - reach, -_LARGEST)
        high = min(self._largest, self._mean + reach, _LARGEST)
        if low < high:
            negative = self._fine[_FINE // 2 : _FINE // 2 + _FINITE][::-1]
            below = np.concatenate([[0], np.cumsum(np.concatenate([negative, self._fine[:_FINITE]]))])
            edges = np.clip(_FINE_EDGES, self._smallest, self._largest)
            shares = np.interp(np.linspace(low, high, BINS + 1)[1:-1], edges, below)
            bins = np.diff(np.rint(np.concatenate([[0], shares, [self._finite]]))).astype(np.int64).tolist()
        else:  # all are equal
            bins = [self._finite if number == BINS // 2 else 0 for number in range(BINS)]
        return Statistics(
            *counts,
            self._smallest,
            self._largest,
            self._mean,
            deviation,
            math.sqrt(self._squares + self._finite * self._mean * self._mean),
            low,
            high,
            tuple(bins),
            math.sqrt(self._distance) if has_distance else None,
        )


def _sum_of_squares(values: _Floats) -> float:
    return float(np.square(values).sum())  # not np.dot: BLAS threads of several callers would wait for each other


_BITS = np.arange(_FINITE + 1, dtype=np.uint32) << _SHIFT
_POSITIVE_EDGES = np.minimum(_BITS.view(np.float32), np.float32(_LARGEST)).astype(np.float64)
_FINE_EDGES: _Floats = np.concatenate([-_POSITIVE_EDGES[:0:-1], _POSITIVE_EDGES])
"""The edges of the fine bins, in ascending order."""
