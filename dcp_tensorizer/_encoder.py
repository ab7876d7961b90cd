"""Encoding: tensors become the parts of a tensorizer file, hashed on the way, in one pass over memory.

Hashing sets the pace of a save (SHA-256 alone runs at less than a fast disk's speed), and it runs up to twice as fast
on data that is in the core's own cache. So each thread takes a tensor, goes through it in pieces that stay in that
cache, and does everything to a piece at once: digest, CRC-32, SHA-256, and the copy into the part it belongs to.
Complete parts leave for the sink on threads of their own while hashing goes on.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from ._storage import Sink
from ._tensorfile import END, BlockDigester, Entry, FileLayout

__all__ = ["Parts", "encode"]

# A quarter of a second-level cache of 2 MiB. Measured there, GB/s a core: CRC-32 5.5 against 2.4 from memory, SHA-256
# 1.96 against 1.3-1.7, XXH3 60 against 15.
_PIECE = 512 << 10


def encode(layout: FileLayout, contents: Sequence[Callable[[], memoryview]], sink: Sink, threads: int) -> list[bytes]:
    """Writes a complete tensorizer file and closes the sink.

    Holds ``3 * threads + sink.concurrency + 2`` parts in memory at most, and what is asked of ``contents``: one
    tensor's bytes a thread.

    Args:
        layout: Of the file.
        contents: Give the tensors' bytes, in the layout's order.
        sink: Where to; aborted when anything fails.
        threads: Hashing threads.

    Returns:
        The block digests of each tensor.

    Raises:
        OSError: the sink failed.
    """
    try:
        with ThreadPoolExecutor(sink.concurrency, thread_name_prefix="parts") as io:
            parts = Parts(layout.nbytes, sink, io, 3 * threads + sink.concurrency + 2)
            digests = _Encoding(layout, contents, parts, threads).run()
            parts.finish()
        sink.close()
    except BaseException:
        sink.abort()
        raise
    return digests


class _Encoding:
    def __init__(
        self, layout: FileLayout, contents: Sequence[Callable[[], memoryview]], parts: Parts, threads: int
    ) -> None:
        self._layout = layout
        self._contents = contents
        self._parts = parts
        self._threads = threads
        self._digests = [b""] * len(contents)
        # With fewer tensors than threads, the slowest hash of a tensor gets a thread of its own.
        self._apart: ThreadPoolExecutor | None = None

    def run(self) -> list[bytes]:
        entries = self._layout.entries
        self._parts.fill(0, np.frombuffer(self._layout.head, dtype=np.uint8))
        numbers = iter(range(len(entries)))
        with ThreadPoolExecutor(self._threads, thread_name_prefix="hash") as pool:
            if len(entries) < self._threads:
                self._apart = pool
            # Each takes the next tensor when it has done one: in file order, so that few parts are incomplete.
            workers = [pool.submit(self._work, numbers) for _ in range(min(self._threads, len(entries)))]
            for worker in workers:
                worker.result()
        self._parts.fill(self._layout.nbytes - len(END), np.frombuffer(END, dtype=np.uint8))
        return self._digests

    def _work(self, numbers: Iterator[int]) -> None:
        try:
            while (number := next(numbers, None)) is not None:
                self._digests[number] = self._encode(self._layout.entries[number], self._contents[number]())
        except BaseException as error:
            self._parts.fail(error)
            raise

    def _encode(self, entry: Entry, data: memoryview) -> bytes:
        """Hashes one tensor into its parts; returns its block digests."""
        assert data.nbytes == entry.length
        digester = BlockDigester(data.nbytes)
        crc32 = zlib.crc32(entry.header)
        sha256 = hashlib.sha256(entry.header)
        apart = self._apart.submit(sha256.update, data) if self._apart is not None else None
        array = np.frombuffer(data, dtype=np.uint8)
        for start in range(0, data.nbytes, _PIECE):
            piece = data[start : start + _PIECE]
            digester.update(piece)
            crc32 = zlib.crc32(piece, crc32)
            if apart is None:
                sha256.update(piece)
            self._parts.fill(entry.offset + start, array[start : start + _PIECE])
        if apart is not None:
            apart.result()
        self._parts.fill(entry.header_offset, np.frombuffer(entry.sealed(crc32, sha256.digest()), dtype=np.uint8))
        return digester.digests()


class Parts:
    """The parts of a file that are being filled, by several threads and in any order.

    The memory is bounded, and filling waits for it. It cannot wait for ever as long as tensors are begun in file
    order: a part that is incomplete is one that a tensor in hand begins, ends or has got to, or the last one begun.
    """

    def __init__(self, nbytes: int, sink: Sink, io: ThreadPoolExecutor, buffers: int) -> None:
        self._nbytes = nbytes
        self._sink = sink
        self._io = io
        self._free: list[np.ndarray] = []
        self._unmade = buffers
        self._filling: dict[int, np.ndarray] = {}
        self._missing: dict[int, int] = {}
        self._in_flight: list[Future[None]] = []
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def fill(self, offset: int, data: np.ndarray) -> None:
        """Copies bytes to their place in the file; whatever part they complete leaves for the sink."""
        size = self._sink.part_bytes
        while data.nbytes:
            number, begin = divmod(offset, size)
            count = min(data.nbytes, size - begin)
            self._part(number)[begin : begin + count] = data[:count]
            with self._changed:
                self._missing[number] -= count
                if not self._missing[number]:
                    self._in_flight.append(self._io.submit(self._put, number, self._filling.pop(number)))
            offset += count
            data = data[count:]

    def finish(self) -> None:
        """Waits until the sink has every part."""
        for future in self._in_flight:
            future.result()
        assert not self._filling, "a part was never completed"

    def fail(self, error: BaseException) -> None:
        """Stops every thread that fills: the file is lost."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _part(self, number: int) -> np.ndarray:
        """The memory of a part, which may be another thread's to begin."""
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
        try:
            count = min(self._sink.part_bytes, self._nbytes - number * self._sink.part_bytes)
            self._sink.put(number, buffer[:count].data)
        except BaseException as error:
            self.fail(error)
            raise
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
