"""Chunk layouts: how tensors of one shape are cut into chunks, and which chunks a region touches."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from .._tensor_file.regions import Region, covers
from .schema import Layout, Run, encode_rows

MAX_NUMBERS = 1 << 26
"""The maximum count of numbers in a list of runs."""


def runs_of(numbers: np.ndarray) -> list[Run]:
    steps = np.diff(numbers)
    turns = [*(np.flatnonzero(steps[1:] != steps[:-1]) + 1).tolist(), len(steps)]
    runs: list[Run] = []
    start = 0
    for turn in turns:  # all steps from `start` to `turn` are equal
        if turn > start:
            runs.append((int(numbers[start]), int(steps[start]), turn - start + 1))
            start = turn + 1
    if start < len(numbers):
        runs.append((int(numbers[start]), 0, 1))
    return runs


def expand(runs: Sequence[Run]) -> np.ndarray:
    """Returns the numbers that runs encode. Raises `ValueError` if there are too many, or one is too large."""
    count = sum(run[2] for run in runs)
    if count > MAX_NUMBERS or any(abs(step) * times >= 2**62 or first >= 2**62 for first, step, times in runs):
        raise ValueError(
            f"the runs expand to {count:,} numbers (the limit is {MAX_NUMBERS:,}), or a number needs more than 62 bits"
        )
    return np.concatenate([first + step * np.arange(times, dtype="i8") for first, step, times in runs] or [_NONE])


_NONE = np.zeros(0, dtype="i8")


class ChunkLayout:
    """The chunks of tensors of one shape.

    ``starts`` and ``sizes`` have a row for each chunk and a column for each dimension. If they are None, the only chunk
    is the whole tensor.
    """

    def __init__(self, shape: tuple[int, ...], starts: np.ndarray | None, sizes: np.ndarray | None) -> None:
        self.shape = shape
        self.is_one = starts is None or sizes is None
        self.starts = np.zeros((1, len(shape)), dtype="i8") if starts is None else starts
        self.sizes = _rows([shape], len(shape)) if sizes is None else sizes
        self._found: dict[Region, list[int]] = {}

    @classmethod
    def of(cls, shape: Sequence[int], chunks: Iterable[tuple[Sequence[int], Sequence[int]]]) -> ChunkLayout:
        """Makes a layout from the offset and size of each chunk. Raises `ValueError` for invalid ones."""
        dims = tuple(shape)
        pairs = list(chunks)
        for offsets, extents in pairs:
            if not len(offsets) == len(extents) == len(dims):
                raise ValueError(
                    f"a chunk of shape {tuple(extents)} at {tuple(offsets)} does not have as many dimensions "
                    f"as its tensor, whose shape is {dims}"
                )
        starts, sizes = (_rows([pair[side] for pair in pairs], len(dims)) for side in (0, 1))
        if starts.size and min(starts.min(), sizes.min()) < 0:
            raise ValueError(f"chunk offsets and sizes must not be negative, in a tensor of shape {dims}")
        return cls.of_rows(dims, starts, sizes)

    @classmethod
    def of_rows(cls, shape: tuple[int, ...], starts: np.ndarray, sizes: np.ndarray) -> ChunkLayout:
        is_one = len(starts) == 1 and tuple(sizes[0].tolist()) == shape and not starts.any()
        return cls(shape, None, None) if is_one else cls(shape, starts, sizes)

    @classmethod
    def from_row(cls, row: Layout) -> ChunkLayout:
        """Makes a layout from its row in an index. Raises `ValueError` if the row is invalid."""
        dims = len(row.shape)
        if row.offsets is None or row.sizes is None:
            return cls(row.shape, None, None)
        columns = [[expand(runs) for runs in side] for side in (row.offsets, row.sizes)]
        if any(len(column) != row.count for side in columns for column in side):
            raise ValueError("there are more or fewer offsets and sizes than chunks")
        if any(len(side) != dims for side in columns):
            raise ValueError("the chunks of a tensor have more or fewer dimensions than the tensor")
        starts, sizes = (np.stack(side, axis=1) if dims else np.zeros((row.count, 0), dtype="i8") for side in columns)
        if starts.size and (starts.min() < 0 or sizes.min() < 0):
            raise ValueError("the offsets and sizes of chunks must not be negative")
        return cls(row.shape, starts, sizes)

    def to_row(self) -> Layout:
        if self.is_one:
            return Layout(self.shape, 1, None, None)
        dims = range(len(self.shape))
        offsets, sizes = ([runs_of(side[:, dim]) for dim in dims] for side in (self.starts, self.sizes))
        return Layout(self.shape, len(self), offsets, sizes)

    def __len__(self) -> int:
        return len(self.starts)

    @functools.cached_property
    def regions(self) -> list[Region]:
        pairs = zip(self.starts.tolist(), self.sizes.tolist(), strict=True)
        return [Region(tuple(start), tuple(size)) for start, size in pairs]

    @functools.cached_property
    def identity(self) -> bytes:
        """Bytes that are equal for equal layouts."""
        numbers = None if self.is_one else self.starts.tobytes() + self.sizes.tobytes()
        return encode_rows((self.shape, numbers))

    def chunks(self) -> list[ChunkStorageMetadata]:
        pairs = zip(self.starts.tolist(), self.sizes.tolist(), strict=True)
        return [ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in pairs]

    @functools.cached_property
    def packed_offsets(self) -> list[bytes]:
        return [encode_rows(region.start) for region in self.regions]

    @functools.cached_property
    def is_covered(self) -> bool:
        return self.is_one or covers(self.shape, self.regions)

    def touched_by(self, region: Region) -> list[int]:
        """Finds the chunks that have elements of a region, by bisection. Returns their indices."""
        if region not in self._found:  # tensors that share a layout are usually read in the same regions
            self._found[region] = self._touched_by(region)
        return self._found[region]

    def _touched_by(self, region: Region) -> list[int]:
        if self.is_one or not self.shape:
            return list(range(len(self)))
        dim, order, starts, stops = self._sorted
        first = int(np.searchsorted(stops, region.start[dim], side="right"))
        last = int(np.searchsorted(starts, region.start[dim] + region.size[dim], side="left"))
        near = order[first:last]
        start, size = np.array(region.start), np.array(region.size)
        within = (self.starts[near] < start + size) & (self.starts[near] + self.sizes[near] > start)
        return sorted(near[within.all(axis=1)].tolist())

    @functools.cached_property
    def _sorted(self) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """The dimension in which the chunks have the most distinct starts, and three arrays, sorted by these starts.

        The arrays have the chunks' indices, their starts, and the running maxima of their stops.
        """
        dim = max(range(len(self.shape)), key=lambda d: len(set(self.starts[:, d].tolist())))
        order = np.argsort(self.starts[:, dim], kind="stable")
        starts = self.starts[order, dim]
        return dim, order, starts, np.maximum.accumulate(starts + self.sizes[order, dim])


def _rows(numbers: Sequence[Sequence[int]], dims: int) -> np.ndarray:
    flat = np.fromiter(itertools.chain.from_iterable(numbers), "i8", len(numbers) * dims)
    return flat.reshape(len(numbers), dims)
