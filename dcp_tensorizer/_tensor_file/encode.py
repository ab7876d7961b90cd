"""Encodes tensors as the parts of a tensorizer file, and hashes them, usually in one pass over memory.

On a fast disk, hashing limits the speed of a save. A core hashes data in its own cache up to twice as fast as data in
main memory. So each thread takes a tensor, and processes it in pieces that fit in that cache. For each piece it
computes the digests, CRC-32, and SHA-256 if requested, and copies the piece into its part of the file. Other threads
write complete parts to the sink at the same time.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import numpy as np
import xxhash
from isal.isal_zlib import crc32

from .._runtime.direct_memory import direct_memory
from .._runtime.forks import free_in_child
from .._runtime.threads import Workers
from .digests import Digester, TensorHashes, digests_of
from .layout import END, Entry, FileLayout, T
from .names import NONCE_BYTES, StoredItem, block_size

if TYPE_CHECKING:
    from .._storage.base import Sink
    from .encryption import Cipher


BUFFER_BYTES = 256 << 20

# The bytes that a thread hashes at a time: a half or a quarter of a core's second-level cache. On data in this cache,
# CRC-32 and XXH3 run twice as fast as on data in main memory.
_PIECE = 512 << 10

_SMALL = _PIECE  # the largest tensor, in bytes, that is hashed in a single call

_Pair = tuple[int, bytes, memoryview]
"""An offset in a file, and two consecutive runs of bytes that start there: a header and its data."""

_MIN_PARTS = 6  # five that one thread fills, and one that the sink writes


def encode(
    layout: FileLayout[T],
    contents: Callable[[T], memoryview],
    sink: Sink,
    threads: int,
    buffer_bytes: int = BUFFER_BYTES,
    *,
    file: str = "",
    piece_bytes: int = _PIECE,
) -> list[StoredItem]:
    """Writes a whole tensorizer file, completes the sink, and returns the file's items; see `encode_ahead`."""
    items, parts = encode_ahead(layout, contents, sink, threads, buffer_bytes, file=file, piece_bytes=piece_bytes)
    try:
        parts.finish()
        sink.complete()
    except BaseException as error:
        parts.abandon(error)  # a KeyboardInterrupt may arrive while other threads write
        sink.abort()
        raise
    return items


def encode_ahead(
    layout: FileLayout[T],
    contents: Callable[[T], memoryview],
    sink: Sink,
    threads: int,
    buffer_bytes: int = BUFFER_BYTES,
    memory: PartMemory | None = None,
    *,
    file: str = "",
    piece_bytes: int = _PIECE,
) -> tuple[list[StoredItem], FileParts]:
    """Encodes a tensorizer file, and returns while the sink still writes its last parts.

    Returns the stored items in file order, and the parts. Call `FileParts.finish` before completing the sink. If
    `FileParts.finish` raises an error, abort the sink.

    ``contents`` returns a tensor's bytes. ``file`` is the file's name in the items. If this call raises an error, it
    has aborted the sink. A failure of the sink raises `OSError`, here or in `FileParts.finish`. At most ``threads``
    threads hash, ``piece_bytes`` at a time. ``buffer_bytes`` bounds the memory for parts, with a minimum of six parts:
    if it is small, fewer threads hash, and fewer parts are written at once. ``memory`` may be shared with the next
    file.

    Memory holds at most ``3 * threads + sink.concurrency + 2`` parts, a block per encrypting thread, and one result of
    ``contents`` per thread, including the calling thread. A sink that takes parts only in order costs another pass over
    memory, because a tensor's hashes precede its bytes in the file. With such a sink, an encrypted file's tensors are
    encrypted twice, because their MACs precede the encrypted bytes.
    """
    part_count = max(_MIN_PARTS, buffer_bytes // sink.part_bytes)
    threads = max(1, min(threads, (part_count - 3) // 3))
    filling = 3 * threads + 2
    try:
        writing = min(sink.concurrency, part_count - filling)
        parts = FileParts(layout.nbytes, sink, filling=filling, writing=writing, memory=memory)
        try:
            encoding = _Encoding(layout, contents, parts, threads, file, piece_bytes)
            return encoding.run_in_order() if sink.in_order else encoding.run(), parts
        except BaseException as error:
            parts.abandon(error)
            raise
    except BaseException:
        sink.abort()
        raise


class _Encoding(Generic[T]):
    def __init__(
        self,
        layout: FileLayout[T],
        contents: Callable[[T], memoryview],
        parts: FileParts,
        threads: int,
        file: str,
        piece_bytes: int,
    ) -> None:
        self._layout = layout
        self._contents = contents
        self._parts = parts
        self._threads = threads
        self._file = file
        self._piece_bytes = piece_bytes
        self._items: list[StoredItem | None] = [None] * len(layout.entries)
        # If there are fewer tensors than threads, idle threads compute SHA-256, the slowest hash, or encrypt blocks of
        # the other threads' tensors.
        self._helpers: Workers | None = None

    def run(self) -> list[StoredItem]:
        entries = self._layout.entries
        self._parts.fill(0, np.frombuffer(self._layout.head, dtype=np.uint8))
        numbers = iter(range(len(entries)))
        # One thread for all small tensors: their calls are short, and threads would wait for the GIL between them. For
        # 5,000 tensors of 215 kB, two threads took as long as one, and 1.5 times the CPU time.
        at_once = sum(not self._is_small(entry) for entry in entries) + 1
        with Workers(self._threads, thread_name_prefix="hash") as pool:
            if len(entries) < self._threads:
                self._helpers = pool
            # Each worker takes the next tensor in file order, so that few parts are incomplete.
            workers = [pool.submit(self._work, numbers) for _ in range(min(self._threads, at_once, len(entries)))]
            for worker in workers:
                worker.result()
        return self._end()

    def run_in_order(self) -> list[StoredItem]:
        """Hashes or encrypts the tensors with all threads, while this thread fills the parts in file order."""
        entries = self._layout.entries
        self._parts.fill(0, np.frombuffer(self._layout.head, dtype=np.uint8))
        with Workers(self._threads, thread_name_prefix="hash") as pool:
            if len(entries) < self._threads:
                self._helpers = pool
            headers = [pool.submit(self._encode, number, fill=False) for number in range(len(entries))]
            try:
                for number, entry in enumerate(entries):
                    self._parts.fill(entry.header_offset, headers[number].result())
                    self._fill_data(number)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return self._end()

    def _end(self) -> list[StoredItem]:
        self._parts.fill(self._layout.nbytes - len(END), np.frombuffer(END, dtype=np.uint8))
        return [item for item in self._items if item is not None]

    def _work(self, numbers: Iterator[int]) -> None:
        try:
            taken: list[int] = []  # the number of a large tensor that ended a run of small ones
            while (number := taken.pop() if taken else next(numbers, None)) is not None:
                entry = self._layout.entries[number]
                if self._is_small(entry):
                    self._parts.fill_pairs(self._encode_small(itertools.chain((number,), numbers), taken))
                else:
                    header = self._encode(number, fill=True)
                    self._parts.fill(entry.header_offset, header)
        except BaseException as error:
            self._parts.fail(error)
            raise

    def _is_small(self, entry: Entry[T]) -> bool:
        return entry.length <= _SMALL and not entry.has_sha256 and self._layout.cipher is None

    def _encode_small(self, numbers: Iterable[int], taken: list[int]) -> Iterator[_Pair]:
        """Hashes each small tensor as a whole, not in pieces: with thousands of tensors, calls take most of the time.

        Yields the header's offset, the header and the data of each tensor. Stops at a larger tensor, and appends its
        number to ``taken``.
        """
        for number in numbers:
            entry = self._layout.entries[number]
            if not self._is_small(entry):
                taken.append(number)
                return
            data = self._contents(entry.tensor)
            assert data.nbytes == entry.length
            self._items[number] = self._item(entry, digests_of(data))
            yield entry.header_offset, entry.with_crc32(crc32(data, crc32(entry.header))), data

    def _encode(self, number: int, *, fill: bool) -> np.ndarray:
        """Hashes or encrypts a tensor, and returns its header. With ``fill``, also copies the data to parts."""
        entry = self._layout.entries[number]
        data = self._contents(entry.tensor)
        assert data.nbytes == entry.length
        cipher = self._layout.cipher
        if cipher is None:
            header = self._hash(number, data, fill=fill)
        else:
            header = self._encrypt(number, _Encryption.of(cipher, entry, data, cipher.new_nonce(), fill=fill))
        return np.frombuffer(header, dtype=np.uint8)

    def _fill_data(self, number: int) -> None:
        entry, item = self._layout.entries[number], self._items[number]
        data = self._contents(entry.tensor)
        if self._layout.cipher is None:
            self._parts.fill(entry.offset, np.frombuffer(data, dtype=np.uint8))
        else:
            # With the same nonce, the second encryption produces the same bytes.
            assert item is not None
            nonce = item.nonce_and_macs[:NONCE_BYTES]
            self._encrypt_blocks(_Encryption.of(self._layout.cipher, entry, data, nonce, fill=True))

    def _hash(self, number: int, data: memoryview, *, fill: bool) -> bytes:
        entry = self._layout.entries[number]
        digester = Digester(block_size(data.nbytes))
        hashes = TensorHashes(entry.header, digester, sha256=entry.has_sha256)
        sha256 = None
        if hashes.sha256 is not None and self._helpers is not None:
            sha256 = self._helpers.submit(hashes.sha256.update, data)
        array = np.frombuffer(data, dtype=np.uint8)
        for start in range(0, data.nbytes, self._piece_bytes):
            stop = start + self._piece_bytes
            hashes.update(data[start:stop], sha256=sha256 is None)
            if fill:
                self._parts.fill(entry.offset + start, array[start:stop])
        if sha256 is not None:
            sha256.result()
        self._items[number] = self._item(entry, digester.digests())
        return entry.with_hashes(*hashes.values())

    def _encrypt(self, number: int, job: _Encryption) -> bytes:
        others = []
        if self._helpers is not None:
            others = [self._helpers.submit(self._encrypt_blocks, job) for _ in job.macs[1 : self._threads]]
        self._encrypt_blocks(job)
        for other in others:
            other.result()
        nonce_and_macs = job.nonce + b"".join(job.macs)
        self._items[number] = self._item(job.entry, b"".join(job.digests), nonce_and_macs)
        return job.entry.with_macs(nonce_and_macs)

    def _encrypt_blocks(self, job: _Encryption) -> None:
        """Encrypts the remaining blocks of a tensor in order. Several threads may share them."""
        size = job.entry.block
        buffer = np.empty(min(size, job.entry.length), dtype=np.uint8)
        try:
            for number in job.numbers:
                source = job.data[number * size : (number + 1) * size]
                block = buffer[: source.nbytes]
                job.macs[number] = job.cipher.encrypt(source, block.data, job.nonce, number)
                job.digests[number] = xxhash.xxh3_64_digest(block.data)
                if job.fill:
                    self._parts.fill(job.entry.offset + number * size, block)
        except BaseException as error:
            self._parts.fail(error)
            raise

    def _item(self, entry: Entry[T], digests: bytes, nonce_and_macs: bytes = b"") -> StoredItem:
        tensor = entry.tensor
        location = self._file, tensor.name, entry.offset, entry.length
        return StoredItem(*location, tensor.dtype, tensor.kind, digests, nonce_and_macs)


class _Encryption(NamedTuple):
    """A tensor that is being encrypted. Threads share ``numbers``, the numbers of its remaining blocks."""

    cipher: Cipher
    entry: Entry[Any]
    data: memoryview
    nonce: bytes
    numbers: Iterator[int]
    macs: list[bytes]
    digests: list[bytes]
    fill: bool

    @classmethod
    def of(cls, cipher: Cipher, entry: Entry[Any], data: memoryview, nonce: bytes, *, fill: bool) -> _Encryption:
        count = -(-entry.length // entry.block)
        return cls(cipher, entry, data, nonce, iter(range(count)), [b""] * count, [b""] * count, fill)


# --- the parts of a file, which several threads fill and others write -------------------------------------------------


class PartMemory:
    """A pool of memory for the parts of one file after another. The memory of a written part returns to the pool.

    The first use of new memory takes as long as copying as many bytes, and several times as long if a hypervisor must
    provide the memory. So `clear` retains up to ``kept_bytes`` for the next file. Callers of `take` hold ``changed``,
    which `release` notifies.
    """

    def __init__(self, kept_bytes: int = 0) -> None:
        self._kept_bytes = kept_bytes
        self.changed = free_in_child(threading.Condition())
        self._free: list[np.ndarray] = []
        self._part_bytes = 0
        self._allowed = 0
        self._made = 0

    def allow(self, part_bytes: int, count: int) -> None:
        """Sets the size and the maximum number of parts. Frees unused parts of other sizes, or beyond that number."""
        with self.changed:
            self._part_bytes, self._allowed = part_bytes, part_bytes * count
            free, self._free = self._free, []
            for buffer in free:
                self._keep(buffer)

    def clear(self) -> None:
        """Frees parts beyond ``kept_bytes``: unused ones now, the others when they are released."""
        self.allow(self._part_bytes, self._kept_bytes // max(1, self._part_bytes))

    def take(self) -> np.ndarray | None:
        """Returns memory for a part, or None if all of it is in use. The caller holds ``changed``."""
        if self._free:
            return self._free.pop()
        if self._made + self._part_bytes > self._allowed:
            return None
        buffer = np.frombuffer(direct_memory(self._part_bytes), dtype=np.uint8)
        self._made += buffer.nbytes
        return buffer

    def release(self, buffer: np.ndarray) -> None:
        with self.changed:
            self._keep(buffer)
            self.changed.notify_all()

    def _keep(self, buffer: np.ndarray) -> None:
        if buffer.nbytes == self._part_bytes and self._made <= self._allowed:
            self._free.append(buffer)
        else:
            self._made -= buffer.nbytes


class FileParts:
    """The parts of a file, which several threads fill in any order.

    Memory is bounded: `fill` waits for free memory. This wait cannot deadlock if threads start tensors in file order,
    because then every incomplete part belongs to a tensor in progress or to the last one that was started. There is
    memory for ``filling + writing`` parts, of which at most ``writing`` are written at once. The next file may share
    ``memory``.
    """

    def __init__(
        self, nbytes: int, sink: Sink, *, filling: int, writing: int, memory: PartMemory | None = None
    ) -> None:
        self._nbytes = nbytes
        self._sink = sink
        self._io = Workers(writing, thread_name_prefix="parts")
        self._memory = memory or PartMemory()
        self._memory.allow(sink.part_bytes, filling + writing)
        self._filling: dict[int, np.ndarray] = {}
        self._missing: dict[int, int] = {}
        self._left = -(-nbytes // sink.part_bytes)
        self._error: BaseException | None = None
        self._changed = self._memory.changed

    def fill(self, offset: int, data: np.ndarray) -> None:
        """Copies bytes to their offset in the file. Sends each part that they complete to the sink."""
        size = self._sink.part_bytes
        while data.nbytes:
            number, begin = divmod(offset, size)
            count = min(data.nbytes, size - begin)
            self._part(number)[begin : begin + count] = data[:count]
            self._filled(number, count)
            offset += count
            data = data[count:]

    def fill_pairs(self, pairs: Iterable[_Pair]) -> None:
        """Copies pairs of small runs, in order. The second run of a pair follows the first in the file.

        Counts the bytes of several pairs in one update, before it waits for the memory of another part.
        """
        size = self._sink.part_bytes
        part, number, filled = memoryview(b""), -1, 0
        for offset, head, data in pairs:
            own, begin = divmod(offset, size)
            middle = begin + len(head)
            end = middle + len(data)
            if own != number or end > size:
                if filled:
                    self._filled(number, filled)
                number, filled = -1, 0
                if end > size:
                    self.fill(offset, np.frombuffer(head, dtype=np.uint8))
                    self.fill(offset + len(head), np.frombuffer(data, dtype=np.uint8))
                    continue
                part, number = self._part(own).data, own
            part[begin:middle] = head
            part[middle:end] = data
            filled += end - begin
        if filled:
            self._filled(number, filled)

    def _filled(self, number: int, count: int) -> None:
        with self._changed:
            self._missing[number] -= count
            if self._missing[number]:
                return
            del self._missing[number]
        # Not under the lock: if no thread can be started, `submit` writes the part itself, which takes the lock.
        self._io.submit(self._put, number)
        with self._changed:
            self._left -= 1
            if not self._left:
                self._io.shutdown(wait=False)  # the threads end after the last part

    def finish(self) -> None:
        """Waits until the sink has every part. Raises the first error of a fill or a write."""
        self._io.shutdown()
        if self._error is not None:
            raise self._error
        assert not self._filling, "a part was never completed"

    def abandon(self, error: BaseException) -> None:
        """Gives up the file, and waits for running writes. The caller must not fill parts afterwards."""
        self.fail(error)
        self._io.shutdown()
        while self._filling:
            self._memory.release(self._filling.popitem()[1])

    def fail(self, error: BaseException) -> None:
        """Records that the file cannot be completed. A thread that needs a new part raises the first recorded error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _part(self, number: int) -> np.ndarray:
        part = self._filling.get(number)
        if part is not None and self._error is None:
            return part
        with self._changed:
            while number not in self._filling:
                if self._error is not None:
                    raise self._error
                buffer = self._memory.take()
                if buffer is None:
                    self._changed.wait()
                else:
                    self._filling[number] = buffer
                    start = number * self._sink.part_bytes
                    self._missing[number] = min(self._sink.part_bytes, self._nbytes - start)
            return self._filling[number]

    def _put(self, number: int) -> None:
        buffer = self._filling.pop(number)
        try:
            if self._error is None:
                count = min(self._sink.part_bytes, self._nbytes - number * self._sink.part_bytes)
                self._sink.put_part(number, buffer[:count].data)
        except BaseException as error:
            self.fail(error)
        finally:
            self._memory.release(buffer)  # also after a failure: the next file may wait for memory
