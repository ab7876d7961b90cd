"""The parts of a file: filled in memory by several threads, written by others as soon as they are complete."""

from __future__ import annotations

import mmap
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

import numpy as np

__all__ = ["PartSink", "Parts"]


class PartSink(Protocol):
    """What takes a file's parts; storages have sinks that know more (``_storage.base.Sink``)."""

    @property
    def part_bytes(self) -> int:
        """Size of every part but the last."""

    @property
    def concurrency(self) -> int:
        """Parts that are worth writing at once."""

    @property
    def in_order(self) -> bool:
        """It takes the parts in their order only, one at a time."""

    def put_part(self, number: int, data: memoryview) -> None:
        """Takes a part; ``data`` begins on a page. Raises `OSError`."""

    def complete(self) -> None:
        """Completes the file; raises `OSError`, and then there is no file."""

    def abort(self) -> None:
        """Drops the file."""


class Parts:
    """The parts of a file that are being filled, by several threads and in any order.

    The memory is bounded, and filling waits for it. It cannot wait for ever as long as tensors are begun in file
    order: a part that is incomplete is one that a tensor in hand begins, ends or has got to, or the last one begun.
    """

    def __init__(self, nbytes: int, sink: PartSink, io: ThreadPoolExecutor, buffers: int) -> None:
        self._nbytes = nbytes
        self._sink = sink
        self._io = io
        self._free: list[np.ndarray] = []
        self._unmade = buffers
        self._filling: dict[int, np.ndarray] = {}
        self._missing: dict[int, int] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def fill(self, offset: int, data: np.ndarray) -> None:
        """Copies bytes to their place in the file; whatever part they complete leaves for the sink."""
        size = self._sink.part_bytes
        while data.nbytes:
            number, begin = divmod(offset, size)
            count = min(data.nbytes, size - begin)
            self._part(number)[begin : begin + count] = data[:count]
            self._filled(number, count)
            offset += count
            data = data[count:]

    def fill_both(self, offset: int, head: np.ndarray, data: np.ndarray) -> None:
        """The same for two runs of bytes, one behind the other: small ones share a part, and cost little more."""
        middle = offset + head.nbytes
        number, begin = divmod(offset, self._sink.part_bytes)
        end = begin + head.nbytes + data.nbytes
        if end > self._sink.part_bytes:
            self.fill(offset, head)
            self.fill(middle, data)
            return
        part = self._part(number)
        part[begin : begin + head.nbytes] = head
        part[begin + head.nbytes : end] = data
        self._filled(number, end - begin)

    def _filled(self, number: int, count: int) -> None:
        with self._changed:
            self._missing[number] -= count
            if not self._missing[number]:
                del self._missing[number]
                self._io.submit(self._put, number, self._filling.pop(number))

    def finish(self) -> None:
        """Waits until the sink has every part; raises what kept it from getting one."""
        self._io.shutdown()
        if self._error is not None:
            raise self._error
        assert not self._filling, "a part was never completed"

    def fail(self, error: BaseException) -> None:
        """Stops every thread that fills: the file is lost."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _part(self, number: int) -> np.ndarray:
        """The memory of a part, which may be another thread's to begin. It stays there until all of it is filled."""
        part = self._filling.get(number)
        if part is not None and self._error is None:
            return part
        with self._changed:
            while number not in self._filling:
                if self._error is not None:
                    raise self._error
                if self._free or self._unmade:
                    self._filling[number] = self._buffer()
                    start = number * self._sink.part_bytes
                    self._missing[number] = min(self._sink.part_bytes, self._nbytes - start)
                else:
                    self._changed.wait()
            return self._filling[number]

    def _buffer(self) -> np.ndarray:
        if self._free:
            return self._free.pop()
        self._unmade -= 1
        return _new_buffer(self._sink.part_bytes)

    def _put(self, number: int, buffer: np.ndarray) -> None:
        if self._error is not None:
            return
        try:
            count = min(self._sink.part_bytes, self._nbytes - number * self._sink.part_bytes)
            self._sink.put_part(number, buffer[:count].data)
        except BaseException as error:
            self.fail(error)
            return
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()


def _new_buffer(nbytes: int) -> np.ndarray:
    """Memory that begins on a page, as O_DIRECT wants it."""
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)
