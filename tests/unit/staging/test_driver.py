"""The driver's calls, with a stand-in of CUDA 12.8's interface: their arguments, and how batches are cut."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dcp_tensorizer._staging import driver
from dcp_tensorizer._staging.driver import Batch, batch_of, copier, new_stream, pieces_of


@pytest.mark.parametrize(
    ("address", "nbytes", "borders", "expected"),
    [
        (0, 0, [], []),
        (100, 10, [], [(0, 10)]),
        (100, 70, [], [(0, 32), (32, 64), (64, 70)]),
        (100, 20, [110], [(0, 10), (10, 20)]),
        (100, 20, [100, 120], [(0, 20)]),
        (100, 100, [90, 150, 190, 300], [(0, 32), (32, 50), (50, 82), (82, 90), (90, 100)]),
    ],
)
def test_no_piece_crosses_a_border(
    address: int, nbytes: int, borders: list[int], expected: list[tuple[int, int]]
) -> None:
    """A copy across two registrations fails, and a copy of gigabytes delays training's own transfers."""
    assert pieces_of(address, nbytes, borders, 32) == expected


def rows(batch: Batch) -> list[tuple[int, int, int]]:
    return list(zip(*(array.tolist() for array in batch[:3]), strict=True))


def test_batches_are_cut_at_borders_and_by_size() -> None:
    """Copies are cut at borders and at the limit, calls at multiples of the limit. No byte is lost."""
    batch = batch_of([100, 140, 200], [1100, 1140, 1200], [40, 20, 32], [150, 200, 232], 32)
    assert rows(batch) == [(100, 1100, 32), (132, 1132, 8), (140, 1140, 10), (150, 1150, 10), (200, 1200, 32)]
    assert batch.bounds == [0, 1, 4, 5]
    whole = batch_of([100, 140], [1100, 1140], [10, 20], [], 32)
    assert (rows(whole), whole.bounds) == ([(100, 1100, 10), (140, 1140, 20)], [0, 2])


class Driver(types.SimpleNamespace):
    """A driver that copies host memory at once, and records its other arguments."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.calls: list[tuple[int, list[int], int, int]] = []
        self.status = 0
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        kind = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
        self.cuMemcpyBatchAsync = kind(self._copy)
        self.version = version
        self.streams: list[tuple[int, int]] = []

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = self.version
        return 0

    def cuCtxGetStreamPriorityRange(self, least: Any, greatest: Any) -> int:  # noqa: N802
        least._obj.value, greatest._obj.value = 0, -5
        return 0

    def cuStreamCreateWithPriority(self, stream: Any, flags: Any, priority: Any) -> int:  # noqa: N802
        self.streams.append((flags.value, priority.value))
        stream._obj.value = 77
        return self.status

    def _copy(self, into: int, out: int, sizes: int, count: int, *options: int) -> int:
        attributes, first, kinds, _, stream = options
        arrays = [(ctypes.c_uint64 * count).from_address(address) for address in (into, out, sizes)]
        given = list((ctypes.c_int * 6).from_address(attributes))
        assert ctypes.c_size_t.from_address(first).value == 0
        self.calls.append((count, given, kinds, stream))
        for row in zip(*arrays, strict=True):
            ctypes.memmove(*row)
        return self.status


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    library = Driver(13_000)
    monkeypatch.setattr(driver, "_library", lambda: library)
    copier.cache_clear()
    yield library
    copier.cache_clear()


def test_a_batch_is_given_to_the_driver_call_by_call(library: Driver) -> None:
    """Each call gets addresses, sizes, one attribute (stream order, no hints) and the stream. Returns its status."""
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, dtype=np.uint8)
    offsets, sizes = [0, 40, 50], [30, 10, 20]
    at = (target.ctypes.data, source.ctypes.data)
    batch = batch_of([at[0] + n for n in offsets], [at[1] + n for n in offsets], sizes, [], 32)
    copy = copier()
    assert copy is not None
    assert copy(batch, 5) == 0
    assert target.tolist() == [n if n < 30 or 40 <= n < 70 else 0 for n in range(100)]
    assert library.calls == [(1, [1, 0, 0, 0, 0, 0], 1, 5), (2, [1, 0, 0, 0, 0, 0], 1, 5)]
    library.status = 801
    assert copy(batch, 5) == 801
    assert len(library.calls) == 3  # nothing after an error


@pytest.mark.parametrize("why", ["old", "no function", "no driver"])
def test_without_the_drivers_call_there_are_no_batches(
    why: str, library: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drivers before CUDA 12.8 lack the call."""
    if why == "old":
        library.version = 12_070
    elif why == "no function":
        del library.cuMemcpyBatchAsync
    else:
        monkeypatch.setattr(driver, "_library", lambda: None)
    assert copier() is None


def test_streams_of_the_lowest_priority(library: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams do not wait for the default stream. Without a driver, or if it refuses, the result is None."""
    assert new_stream() == 77
    assert library.streams == [(1, 0)]
    library.status = 2
    assert new_stream() is None
    monkeypatch.setattr(driver, "_library", lambda: None)
    assert new_stream() is None


def test_this_machine_has_a_driver_or_none() -> None:
    """Looking up the driver raises on no machine."""
    copier.cache_clear()
    assert copier() is None or callable(copier())
