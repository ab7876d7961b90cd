"""Whether a checkpoint's files hold what was saved, at the disk's speed and in little memory.

A file is cut into spans, each with the bytes it should have (see `_spans`). Threads read runs of spans in pieces, past
the page cache, and hash each piece while it is in the core's own.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import Metadata

from .._storage.base import RangeReader, Storage
from .._threads import cores
from ..errors import CheckpointError
from .file_sections import AT_ONCE, Section, block_sections, file_sections, keyless, stored_items

__all__ = ["Damage", "Verified", "verify"]

_PIECE = 512 << 10  # see `_encoder`: hashing data that is in the core's own cache
_READ = 8 << 20
_MOST_READERS = 16  # each with a buffer of that size
_PAGE = 4096


class Damage(NamedTuple):
    """Something that is not as it was saved."""

    file: str
    key: str | None
    """None if it is the file as a whole, or bytes that belong to no tensor."""
    offset: int
    """The first damaged byte of the file, as far as that is known."""
    what: str


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found.

    Attributes:
        nbytes: Bytes read.
        damages: In the order of files and offsets.
    """

    files: int
    items: int
    nbytes: int
    seconds: float
    damages: tuple[Damage, ...]


def verify(
    storage: Storage,
    parts: Mapping[int | None, Metadata],
    *,
    full: bool = False,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Verified:
    """Compares a checkpoint's files with what its metadata says of them.

    Memory: a few MiB a thread, whatever the size of the tensors.

    Args:
        storage: The checkpoint's directory.
        parts: Its metadata, of all ranks or rank by rank.
        full: Check every byte of the files and tensorizer's own hashes, and not only the digests of the data.
        progress: Called with the bytes that are done and the bytes in all, by one thread at a time.
    """
    started = time.monotonic()
    files = {name: size for part in parts.values() for name, size in part.storage_data["files"].items()}
    encrypted = {name: keyless(part) for part in parts.values() for name in part.storage_data["files"]}
    items = stored_items(parts)
    damages: list[Damage] = []
    runs: list[_Run] = []
    for name, nbytes in sorted(files.items()):
        size = _size(storage, name)
        if isinstance(size, str):
            damages.append(Damage(name, None, 0, size))
            damages += [Damage(name, stored.key, stored.item.offset, "is gone with it") for stored in items[name]]
            continue
        if size != nbytes:
            damages.append(Damage(name, None, min(size, nbytes), f"has {size:,} bytes instead of {nbytes:,}"))
        spans = file_sections(items[name], nbytes, encrypted[name]) if full else block_sections(items[name])
        runs += _runs(name, size, spans)
    job = _Job(storage, progress, sum(run.stop - run.start for run in runs))
    damages += job.run(runs, _threads(storage, full))
    return Verified(
        len(files),
        sum(map(len, items.values())),
        job.done,
        time.monotonic() - started,
        tuple(sorted(damages, key=_place)),
    )


def _place(damage: Damage) -> tuple[str, bool, int]:
    return damage.file, damage.key is not None, damage.offset


def _size(storage: Storage, name: str) -> int | str:
    try:
        size = storage.head(name)
    except CheckpointError as error:
        return str(error)
    return "is missing" if size is None else size


def _threads(storage: Storage, full: bool) -> int:
    """Twice as many as read at full speed, for each hashes what it has read; in full, that keeps more of them busy."""
    threads = min(_MOST_READERS, 2 * storage.max_threads)
    return threads + cores() if full else threads


@dataclass(frozen=True, slots=True)
class _Run:
    """Spans of a file that one thread reads, with the gaps between them."""

    file: str
    file_nbytes: int
    spans: list[Section]

    @property
    def start(self) -> int:
        return self.spans[0].start

    @property
    def stop(self) -> int:
        return self.spans[-1].stop


def _runs(file: str, file_nbytes: int, spans: Iterator[Section]) -> Iterator[_Run]:
    run: list[Section] = []
    for span in spans:
        if run and span.stop - run[0].start > AT_ONCE:
            yield _Run(file, file_nbytes, run)
            run = []
        run.append(span)
    if run:
        yield _Run(file, file_nbytes, run)


# --- reading -------------------------------------------------------------------------------------------------------


class _Job:
    def __init__(self, storage: Storage, progress: Callable[[int, int], object], total: int) -> None:
        self.done = 0
        self._storage = storage
        self._progress = progress
        self._total = total
        self._counting = threading.Lock()
        self._buffers = threading.local()

    def run(self, runs: Sequence[_Run], threads: int) -> list[Damage]:
        with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
            futures = [pool.submit(self._run, run) for run in runs]
            try:
                return [damage for future in futures for damage in future.result()]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _run(self, run: _Run) -> list[Damage]:
        """Reads a run of spans; what cannot be read is damaged, like what is not as it should be."""
        try:
            reader = self._storage.open_uncached(run.file)
        except OSError as error:
            return [Damage(run.file, None, 0, self._storage.scrub(f"cannot be opened: {error}"))]
        try:
            unread = self._read(reader, run)
        finally:
            reader.close()
        return unread + [Damage(run.file, *damage) for span in run.spans for damage in span.damages()]

    def _read(self, reader: RangeReader, run: _Run) -> list[Damage]:
        """Reads a run in pieces and hands them to its spans; returns those it could not read, and gave as zeros."""
        unread = []
        pending = iter(run.spans)
        span = next(pending)
        position, stop = run.start, min(run.stop, run.file_nbytes)
        while position < stop:
            begin = position // _PAGE * _PAGE  # as reads past the page cache want it
            end = min(begin + _READ, stop)
            buffer = self._buffer()[: end - begin]
            try:
                reader.read_into([buffer], begin)
            except Exception as error:
                what = self._storage.scrub(f"{buffer.nbytes:,} bytes cannot be read: {type(error).__name__}: {error}")
                unread.append(Damage(run.file, None, begin, what))
                buffer[:] = bytes(buffer.nbytes)
            self._count(end - position)
            while position < end:
                while position >= span.stop:
                    span = next(pending)
                first = max(position, span.start)
                position = min(first + _PIECE, span.stop, end)
                if first < position:
                    span.update(buffer[first - begin : position - begin])
        return unread

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self.done += nbytes
            self._progress(self.done, self._total)

    def _buffer(self) -> memoryview:
        if not hasattr(self._buffers, "memory"):
            self._buffers.memory = memoryview(mmap.mmap(-1, _READ))
        return self._buffers.memory  # type: ignore[no-any-return]
