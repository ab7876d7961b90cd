"""Whether a checkpoint's files hold what was saved, at the disk's speed and in little memory.

A file is cut into spans, each with the bytes it should have: the blocks of its tensors, which have digests; or, for
everything that tensorizer would check, the whole file, whose every byte follows from the metadata and the hashes of
the data. Threads read runs of spans in pieces, past the page cache, and hash each piece while it is in the core's own.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from isal.isal_zlib import crc32 as crc32_of
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ._crypt import Cipher
from ._layout import Derivation, StoredItem
from ._storage import RangeReader, Storage
from ._tensorfile import END, Digester, Entry, lay_out
from .errors import CheckpointError

__all__ = ["Damage", "Verified", "verify"]

_PIECE = 512 << 10  # see `_encoder`: hashing data that is in the core's own cache
_READ = 4 << 20
_AT_ONCE = (
    64 << 20
)  # what one thread does at once: enough to read on, small enough to spread a large tensor over threads
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


class _Stored(NamedTuple):
    """A write item, with what a tensorizer file says of it."""

    key: str
    item: StoredItem
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.item.name

    @property
    def dtype(self) -> str:
        return self.item.dtype

    @property
    def nbytes(self) -> int:
        return self.item.length

    @property
    def kind(self) -> str:
        return self.item.kind


class _Span(Protocol):
    """Bytes of a file that are checked together."""

    start: int
    stop: int

    def update(self, piece: memoryview) -> None:
        """Takes the bytes, in order."""

    def damages(self) -> Iterator[tuple[str | None, int, str]]:
        """Key, offset and kind of what is wrong, after all bytes; also if some could not be read."""


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
    encrypted = {name: _keyless(part) for part in parts.values() for name in part.storage_data["files"]}
    items = _items(parts)
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
        spans = _file_spans(items[name], nbytes, encrypted[name]) if full else _block_spans(items[name])
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
        size = storage.size(name)
    except CheckpointError as error:
        return str(error)
    return "is missing" if size is None else size


def _threads(storage: Storage, full: bool) -> int:
    """Hashing in full takes the cores, and more threads than those keep them busy while some wait for the disk."""
    return max(2 * (os.cpu_count() or 1), storage.read_threads) if full else storage.read_threads


def _items(parts: Mapping[int | None, Metadata]) -> dict[str, list[_Stored]]:
    """The items in each file, in its order."""
    files: dict[str, list[_Stored]] = defaultdict(list)
    for part in parts.values():
        shapes = {
            (key, tuple(chunk.offsets)): tuple(chunk.sizes)
            for key, entry in part.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks
        }
        for (key, offset), place in part.storage_data["items"].items():
            item = StoredItem(*place)
            if item.length:
                shape = shapes[key, offset] if item.kind == "tensor" else (item.length,)
                files[item.file].append(_Stored(key, item, shape))
    for stored in files.values():
        stored.sort(key=lambda one: one.item.offset)
    return files


# --- spans ---------------------------------------------------------------------------------------------------------


class _Blocks:
    """Some blocks of an item, compared with their digests."""

    def __init__(self, stored: _Stored, start: int, stop: int) -> None:
        item = stored.item
        self.start, self.stop = item.offset + start, item.offset + stop
        self._key = stored.key
        self._step = item.block
        first = start // self._step
        self._expected = item.digests[8 * first : 8 * -(-stop // self._step)]
        self._digester = Digester(item.block)

    def update(self, piece: memoryview) -> None:
        self._digester.update(piece)

    def damages(self) -> Iterator[tuple[str | None, int, str]]:
        found = self._digester.digests()
        for number in range(-(-(self.stop - self.start) // self._step)):
            place = slice(8 * number, 8 * number + 8)
            if found[place] != self._expected[place]:
                first = self.start + number * self._step
                stop = min(first + self._step, self.stop)
                yield self._key, first, f"bytes {first:,} to {stop:,} are not what was saved"


class _Sealed:
    """A tensor with its header, which holds tensorizer's hashes of both; of an encrypted one, nonce and MACs."""

    def __init__(self, stored: _Stored, entry: Entry) -> None:
        self.start, self.stop = entry.header_offset, entry.offset + entry.length
        self._stored = stored
        self._entry = entry
        self._header = b""
        self._crc32 = crc32_of(entry.header)
        self._sha256 = hashlib.sha256(entry.header)
        self._blocks = _Blocks(stored, 0, entry.length)

    def update(self, piece: memoryview) -> None:
        missing = len(self._entry.header) - len(self._header)
        self._header += bytes(piece[:missing])
        data = piece[missing:]
        if not self._stored.item.seal:
            self._crc32 = crc32_of(data, self._crc32)
            self._sha256.update(data)
        self._blocks.update(data)

    def damages(self) -> Iterator[tuple[str | None, int, str]]:
        found = list(self._blocks.damages())
        yield from found
        seal = self._stored.item.seal
        expected = self._entry.with_seal(seal) if seal else self._entry.sealed(self._crc32, self._sha256.digest())
        if not found and self._header != expected:
            what = "nonce and MACs" if seal else "the CRC-32 and SHA-256"
            yield self._stored.key, self.start, f"its header, with {what} of the data, is damaged"


class _Fixed:
    """Bytes that are known."""

    def __init__(self, start: int, expected: bytes, name: str) -> None:
        self.start, self.stop = start, start + len(expected)
        self._expected = expected
        self._name = name
        self._found = b""

    def update(self, piece: memoryview) -> None:
        self._found += bytes(piece)

    def damages(self) -> Iterator[tuple[str | None, int, str]]:
        if self._found != self._expected:
            yield None, self.start, f"{self._name} is damaged"


def _block_spans(items: Sequence[_Stored]) -> Iterator[_Span]:
    for stored in items:
        step = stored.item.block
        step *= max(1, _AT_ONCE // step)
        for start in range(0, stored.item.length, step):
            yield _Blocks(stored, start, min(start + step, stored.item.length))


def _keyless(part: Metadata) -> Cipher | None:
    """What the layout of encrypted files depends on; the key it does not."""
    record = part.storage_data.get("encryption")
    if record is None:
        return None
    return Cipher(b"", None if record["derivation"] is None else Derivation(*record["derivation"]))


def _file_spans(items: Sequence[_Stored], nbytes: int, cipher: Cipher | None) -> Iterator[_Span]:
    layout = lay_out(items, cipher)
    yield _Fixed(0, layout.head, "the index of its tensors")
    for stored, entry in zip(items, layout.entries, strict=True):
        yield _Sealed(stored, entry)
    yield _Fixed(nbytes - len(END), END, "its end")


@dataclass(frozen=True, slots=True)
class _Run:
    """Spans of a file that one thread reads, with the gaps between them."""

    file: str
    file_nbytes: int
    spans: list[_Span]

    @property
    def start(self) -> int:
        return self.spans[0].start

    @property
    def stop(self) -> int:
        return self.spans[-1].stop


def _runs(file: str, file_nbytes: int, spans: Iterator[_Span]) -> Iterator[_Run]:
    run: list[_Span] = []
    for span in spans:
        if run and span.stop - run[0].start > _AT_ONCE:
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
