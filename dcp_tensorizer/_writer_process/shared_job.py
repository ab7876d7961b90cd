"""One process's part of files that several processes write: the process writes pieces of tensors to their offsets."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .._runtime.direct_memory import direct_memory
from .._runtime.forks import free_in_child
from .._runtime.threads import Workers
from .._storage.base import SharedFile, Sink, Storage
from .._tensor_file.regions import Integers
from ..errors import WriteError, describe
from .options import SaveOptions
from .protocol import FileResult, WriteDone

_PART = 4 << 20  # the same as for local files that one process writes
_MIN_PARTS = 2

Fill = Callable[[int, int, np.ndarray], None]
"""Takes the number of a source, an offset in it, and memory to fill with the source's bytes from that offset."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Runs of bytes by file and offset, as columns of equal length."""

    file: Integers  # number of the file
    offset: Integers  # in the file
    nbytes: Integers
    source: Integers  # number of the source
    start: Integers  # offset in the source

    def __len__(self) -> int:
        return len(self.file)

    def select(self, rows: Any) -> Pieces:
        """Selects pieces by their numbers or a mask."""
        columns = (self.file, self.offset, self.nbytes, self.source, self.start)
        return Pieces(*(column[rows] for column in columns))

    def sorted(self) -> Pieces:
        return self.select(np.lexsort((self.offset, self.file)))

    @classmethod
    def joined(cls, parts: Sequence[Pieces]) -> Pieces:
        columns = [[part.file, part.offset, part.nbytes, part.source, part.start] for part in parts]
        none = [np.zeros(0, dtype=np.int64)] * 5
        return cls(*(np.concatenate(column) for column in zip(none, *columns, strict=True)))

    def cut(self, sizes: Integers) -> Pieces:
        """Cuts each piece at the offsets in its file that are multiples of the piece's element of ``sizes``."""
        first, last = self.offset // sizes, (self.offset + self.nbytes - 1) // sizes
        counts = np.maximum(0, last - first + 1)
        rows = np.repeat(np.arange(len(self)), counts)
        number = first[rows] + np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        step = sizes[rows]
        begin = np.maximum(self.offset[rows], number * step)
        end = np.minimum(self.offset[rows] + self.nbytes[rows], (number + 1) * step)
        start = self.start[rows] + begin - self.offset[rows]
        return Pieces(self.file[rows], begin, end - begin, self.source[rows], start)


class SharedFilePart(NamedTuple):
    file: SharedFile
    granule: int
    """See `Storage.granule_of`."""


class SharedWriteJob:
    """A job that writes pieces into shared files, and makes them durable.

    If a file has granules (see `SharedFilePart`), the pieces cover each granule as a whole or not at all. ``fill``
    reads the bytes of the sources.
    """

    def __init__(
        self,
        storage: Storage,
        files: Sequence[SharedFilePart],
        pieces: Pieces,
        fill: Fill,
        options: SaveOptions,
    ) -> None:
        self._storage = storage
        self._files = files
        self._pieces = pieces
        self._fill = fill
        self._options = options
        self._sinks: dict[int, Sink] = {}
        self._opening = free_in_child(threading.Lock())

    @property
    def bytes_written(self) -> int:
        """A number that grows while the job makes progress. May be read from another thread."""
        return sum(sink.bytes_written for sink in list(self._sinks.values()))

    def run(self) -> WriteDone:
        """Writes all pieces. On failure, raises `WriteError`, naming path and cause. The files stay."""
        started = time.perf_counter()
        try:
            sizes = np.array([part.granule if part.granule > 1 else _PART for part in self._files], dtype=np.int64)
            pieces = self._pieces.select(self._pieces.nbytes > 0).sorted()
            pieces = pieces.cut(sizes[pieces.file])
            block_of = pieces.offset // sizes[pieces.file]  # no piece is in two blocks
            changes = np.flatnonzero((np.diff(block_of) != 0) | (np.diff(pieces.file) != 0)) + 1
            bounds = itertools.pairwise([0, *changes.tolist(), len(pieces)] if len(pieces) else [])
            blocks = itertools.starmap(range, bounds)
            taking = free_in_child(threading.Lock())

            def work() -> None:
                memory = memoryview(b"")
                while True:
                    with taking:
                        block = next(blocks, None)
                    if block is None:
                        return
                    size = int(sizes[pieces.file[block.start]])
                    if memory.nbytes < size:
                        memory = direct_memory(size)
                    self._write(pieces, block, size, memory)

            count = self._threads(sizes, pieces)
            with Workers(count, thread_name_prefix="write") as pool:
                for worker in [pool.submit(work) for _ in range(count)]:
                    worker.result()
            copied = time.perf_counter()
            for sink in self._sinks.values():
                sink.complete()
            parts = {number: sink.parts for number, sink in self._sinks.items()}
            writing = sum(sink.write_seconds + sink.complete_seconds for sink in self._sinks.values())
            files = (self._files[number].file for number in sorted(parts))
            return WriteDone(
                tuple(FileResult(file.name, file.nbytes, ()) for file in files),
                seconds=time.perf_counter() - started,
                hash_seconds=copied - started,
                write_seconds=writing,
                nbytes=int(pieces.nbytes.sum()),
                parts=parts,
            )
        except Exception as error:
            if isinstance(error, WriteError):
                raise
            message = f"cannot write to {self._storage.path}: {describe(error)}"
            raise WriteError(self._storage.scrub(message)) from self._storage.cause(error)
        finally:
            for sink in self._sinks.values():
                sink.abort()  # closes the file of an incomplete part

    def _threads(self, sizes: Integers, pieces: Pieces) -> int:
        if not len(pieces):
            return 1
        wanted = max(self._sink(int(number)).concurrency for number in np.unique(pieces.file)[:1])
        wanted = max(wanted, self._options.thread_count)
        return int(max(1, min(wanted, max(_MIN_PARTS, self._options.limits.buffer_bytes // int(sizes.max())))))

    def _sink(self, number: int) -> Sink:
        with self._opening:
            if number not in self._sinks:
                file = self._files[number].file
                try:
                    self._sinks[number] = self._storage.open_shared(file, sync=self._options.sync_files)
                except FileNotFoundError as error:
                    raise WriteError(
                        f"{self._storage.path}/{file.token}, which the coordinator has created, does not exist: the "
                        f"ranks do not share this path (for example, it is on each machine's local disk), or the file "
                        f"was removed during the save. Pass a path that all ranks share."
                    ) from error
            return self._sinks[number]

    def _write(self, pieces: Pieces, block: range, size: int, memory: memoryview) -> None:
        """Copies the pieces of one block of a file into memory, and writes each contiguous run with one call."""
        number = int(pieces.file[block.start])
        base = int(pieces.offset[block.start]) // size * size
        sink = self._sink(number)
        begin = end = 0
        buffer = np.frombuffer(memory, dtype=np.uint8)
        with self._storage.writing(f"write {self._storage.path}/{self._files[number].file.name}"):
            for row in block:
                at, nbytes = int(pieces.offset[row]) - base, int(pieces.nbytes[row])
                if at != end:
                    if end > begin:
                        sink.put(base + begin, memory[begin:end])
                    begin = at
                self._fill(int(pieces.source[row]), int(pieces.start[row]), buffer[at : at + nbytes])
                end = at + nbytes
            if end > begin:
                sink.put(base + begin, memory[begin:end])
