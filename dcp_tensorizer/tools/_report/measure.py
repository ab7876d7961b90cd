"""Computes statistics of all tensors of several checkpoints, reading each block once, from all checkpoints together.

Memory does not grow with the size of the checkpoints: threads read only a few blocks ahead, and the module retains
only statistics.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from ..._runtime.threads import cores
from ..._tensor_file.regions import Region
from .._diff import proved_same
from .._view import CheckpointView, StoredTensor, blocks_of
from .statistics import Running, Statistics

_BLOCK = 8 << 20  # bytes that a thread reads at once, from all checkpoints together
_MAX_THREADS = 4


class _Series(NamedTuple):
    """A tensor in consecutive checkpoints in which it has the same shape."""

    key: str
    tensors: list[StoredTensor]  # without those whose digests equal the previous checkpoint's
    numbers: list[list[int]]  # for each of `tensors`, the numbers of the checkpoints with these values

    @property
    def blocks(self) -> list[Region]:
        return list(blocks_of(self.tensors[0], max(1, _BLOCK // len(self.tensors))))


def measure(
    views: Sequence[CheckpointView], on_progress: Callable[[int, int], object] = lambda done, total: None
) -> Iterator[tuple[StoredTensor, list[Statistics | None]]]:
    """Yields each tensor, as in the last checkpoint that has it, with its statistics in each checkpoint.

    For a checkpoint that lacks the tensor, or a dtype without arithmetic, the statistics are None. ``on_progress`` is
    called with the bytes done and the total.
    """
    keys = dict.fromkeys(key for view in reversed(views) for key in view.tensors)
    runs = {key: list(_runs(key, [view.tensors.get(key) for view in views])) for key in keys}
    total = sum(tensor.nbytes for of_key in runs.values() for run in of_key for tensor in run.tensors)
    done = 0
    threads = min(_MAX_THREADS, cores() + 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="report") as pool:
        blocks = ((run, region) for of_key in runs.values() for run in of_key for region in run.blocks)
        results = _in_order(pool, _measure_block, blocks, 2 * threads)
        for key, of_key in runs.items():
            statistics: list[Statistics | None] = [None] * len(views)
            for run in of_key:
                measured = [Running() for _ in run.tensors]
                known = True
                for region in run.blocks:
                    block = next(results)
                    known = known and block is not None
                    for running, part in zip(measured, block or (), strict=False):
                        running.take(part)
                    done += math.prod(region.size) * sum(tensor.dtype.itemsize for tensor in run.tensors)
                    on_progress(done, total)
                for number, (running, numbers) in enumerate(zip(measured, run.numbers, strict=True)) if known else ():
                    result = running.result(has_distance=number > 0)
                    statistics[numbers[0]] = result
                    for unchanged in numbers[1:]:
                        statistics[unchanged] = replace(result, distance=0.0)
            newest = max(number for run in of_key for numbers in run.numbers for number in numbers)
            yield views[newest].tensors[key], statistics


def _runs(key: str, tensors: Sequence[StoredTensor | None]) -> Iterator[_Series]:
    for _, group in itertools.groupby(enumerate(tensors), lambda numbered: numbered[1] and numbered[1].shape):
        run = _Series(key, [], [])
        for number, tensor in group:
            if tensor is None:
                continue
            if run.tensors and proved_same(run.tensors[-1], tensor):
                run.numbers[-1].append(number)
            else:
                run.tensors.append(tensor)
                run.numbers.append([number])
        if run.tensors:
            yield run


def _measure_block(task: tuple[_Series, Region]) -> list[Running] | None:
    """Measures a block in all checkpoints of a series. If the dtype has no arithmetic, returns None."""
    run, region = task
    measured: list[Running] = []
    before = None
    for tensor in run.tensors:
        block = tensor.read(region)
        measured.append(Running())
        try:
            measured[-1].add(block, before)
        except (RuntimeError, NotImplementedError, TypeError):
            return None
        before = block
    return measured


def _in_order(
    pool: ThreadPoolExecutor,
    function: Callable[[tuple[_Series, Region]], list[Running] | None],
    tasks: Iterable[tuple[_Series, Region]],
    most: int,
) -> Iterator[list[Running] | None]:
    """Yields the results of tasks in order, with at most ``most`` tasks submitted ahead."""
    begun: deque[Future[list[Running] | None]] = deque()
    try:
        for task in tasks:
            if len(begun) == most:
                yield begun.popleft().result()
            begun.append(pool.submit(function, task))
        while begun:
            yield begun.popleft().result()
    finally:
        for future in begun:
            future.cancel()
