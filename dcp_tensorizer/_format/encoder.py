"""Encoding: tensors become the parts of a tensorizer file, hashed on the way, in one pass over memory.

Hashing sets the pace of a save (SHA-256 alone runs at less than a fast disk's speed), and it runs up to twice as fast
on data that is in the core's own cache. So each thread takes a tensor, goes through it in pieces that stay in that
cache, and does everything to a piece at once: digest, CRC-32, SHA-256, and the copy into the part it belongs to.
Complete parts leave for the sink on threads of their own while hashing goes on.

Encrypted, a tensor goes through block by block instead: from where it is, encrypted, into a buffer of a block's size,
digested there, and copied into its part. Its own memory is only read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import xxhash

from .checksums import Digester, TensorHashes
from .encryption import Cipher, random_nonce
from .layout import NONCE_BYTES, block_size
from .part_buffer import Parts, PartSink
from .tensorizer_file import END, Entry, FileLayout

__all__ = ["BUFFER_BYTES", "Encoded", "encode"]

BUFFER_BYTES = 256 << 20

# Half or a quarter of a core's second-level cache. From there CRC-32 and XXH3 run at twice their speed from memory.
_PIECE = 512 << 10


_LEAST_PARTS = 6  # that one thread fills, and one more on its way


class Encoded(NamedTuple):
    """What became of a tensor: see `StoredItem`."""

    digests: bytes
    nonce_and_macs: bytes = b""


def encode(
    layout: FileLayout,
    contents: Sequence[Callable[[], memoryview]],
    sink: PartSink,
    threads: int,
    buffer_bytes: int = BUFFER_BYTES,
) -> list[Encoded]:
    """Writes a complete tensorizer file and closes the sink.

    Holds ``3 * threads + sink.concurrency + 2`` parts in memory at most, a block a thread if it encrypts, and what is
    asked of ``contents``: one tensor's bytes a thread. A sink that takes parts in their order costs another pass over
    memory, in which what is encrypted is encrypted once more: a tensor's hashes, or its MACs, precede its bytes in the
    file.

    Args:
        layout: Of the file.
        contents: Give the tensors' bytes, in the layout's order.
        sink: Where to; aborted when anything fails.
        threads: Hashing threads.
        buffer_bytes: Memory for parts, of which six are the least. Where more do not fit, fewer threads hash, and
            fewer parts are written at once.

    Returns:
        For each tensor its digests, and if it is encrypted its nonce_and_macs.

    Raises:
        OSError: the sink failed.
    """
    room = max(_LEAST_PARTS, buffer_bytes // sink.part_bytes)
    threads = max(1, min(threads, (room - 3) // 3))
    filling = 3 * threads + 2
    writing = min(sink.concurrency, room - filling)
    try:
        with ThreadPoolExecutor(writing, thread_name_prefix="parts") as io:
            parts = Parts(layout.nbytes, sink, io, filling + writing)
            encoding = _Encoding(layout, contents, parts, threads)
            encoded = encoding.run_in_order() if sink.in_order else encoding.run()
            parts.finish()
        sink.complete()
    except BaseException:
        sink.abort()
        raise
    return encoded


class _Encoding:
    def __init__(
        self, layout: FileLayout, contents: Sequence[Callable[[], memoryview]], parts: Parts, threads: int
    ) -> None:
        self._layout = layout
        self._contents = contents
        self._parts = parts
        self._threads = threads
        self._encoded = [Encoded(b"")] * len(contents)
        # With fewer tensors than threads, the slowest hash of a tensor gets a thread of its own, and the blocks of an
        # encrypted one are spread over all that are free.
        self._apart: ThreadPoolExecutor | None = None

    def run(self) -> list[Encoded]:
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
        return self._encoded

    def run_in_order(self) -> list[Encoded]:
        """Hashes or encrypts ahead, with all threads, and fills the parts from first to last, with this one."""
        entries = self._layout.entries
        self._parts.fill(0, np.frombuffer(self._layout.head, dtype=np.uint8))
        with ThreadPoolExecutor(self._threads, thread_name_prefix="hash") as pool:
            if len(entries) < self._threads:
                self._apart = pool
            ahead = [pool.submit(self._encode, number, fill=False) for number in range(len(entries))]
            try:
                for number, entry in enumerate(entries):
                    self._parts.fill(entry.header_offset, ahead[number].result())
                    self._fill_data(number)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        self._parts.fill(self._layout.nbytes - len(END), np.frombuffer(END, dtype=np.uint8))
        return self._encoded

    def _work(self, numbers: Iterator[int]) -> None:
        try:
            while (number := next(numbers, None)) is not None:
                header = self._encode(number, fill=True)
                self._parts.fill(self._layout.entries[number].header_offset, header)
        except BaseException as error:
            self._parts.fail(error)
            raise

    def _encode(self, number: int, *, fill: bool) -> np.ndarray:
        """Hashes or encrypts a tensor, into its parts if they are to be filled on the way; returns its header."""
        entry, data = self._layout.entries[number], self._contents[number]()
        assert data.nbytes == entry.length
        if self._layout.cipher is None:
            header, self._encoded[number] = self._hash(entry, data, fill=fill)
        else:
            job = _Encryption.of(self._layout.cipher, entry, data, random_nonce(), fill=fill)
            header, self._encoded[number] = self._encrypt(job)
        return np.frombuffer(header, dtype=np.uint8)

    def _fill_data(self, number: int) -> None:
        """Fills a tensor's parts from first to last, when it has been hashed, or encrypted, ahead."""
        entry, data = self._layout.entries[number], self._contents[number]()
        if self._layout.cipher is None:
            self._parts.fill(entry.offset, np.frombuffer(data, dtype=np.uint8))
        else:
            # The same bytes once more: the nonce makes them so.
            nonce = self._encoded[number].nonce_and_macs[:NONCE_BYTES]
            self._encrypt_blocks(_Encryption.of(self._layout.cipher, entry, data, nonce, fill=True))

    def _hash(self, entry: Entry, data: memoryview, *, fill: bool) -> tuple[bytes, Encoded]:
        """One tensor's header, and what becomes of it; its bytes go into their parts on the way, if they are to."""
        digester = Digester(block_size(data.nbytes))
        hashes = TensorHashes(entry.header, digester)
        apart = self._apart.submit(hashes.sha256.update, data) if self._apart is not None else None
        array = np.frombuffer(data, dtype=np.uint8)
        for start in range(0, data.nbytes, _PIECE):
            hashes.update(data[start : start + _PIECE], sha256=apart is None)
            if fill:
                self._parts.fill(entry.offset + start, array[start : start + _PIECE])
        if apart is not None:
            apart.result()
        return entry.with_hashes(hashes.crc32, hashes.sha256.digest()), Encoded(digester.digests())

    def _encrypt(self, job: _Encryption) -> tuple[bytes, Encoded]:
        """Encrypts one tensor; returns its header, and what becomes of it."""
        helpers = []
        if self._apart is not None:
            helpers = [self._apart.submit(self._encrypt_blocks, job) for _ in job.macs[1 : self._threads]]
        self._encrypt_blocks(job)
        for helper in helpers:
            helper.result()
        nonce_and_macs = job.nonce + b"".join(job.macs)
        return job.entry.with_macs(nonce_and_macs), Encoded(b"".join(job.digests), nonce_and_macs)

    def _encrypt_blocks(self, job: _Encryption) -> None:
        """Takes one block after the other, in order, until there are no more; several threads do so at once."""
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


class _Encryption(NamedTuple):
    """One tensor that is being encrypted: its blocks' numbers, which threads share, and what is known of them."""

    cipher: Cipher
    entry: Entry
    data: memoryview
    nonce: bytes
    numbers: Iterator[int]
    macs: list[bytes]
    digests: list[bytes]
    fill: bool

    @classmethod
    def of(cls, cipher: Cipher, entry: Entry, data: memoryview, nonce: bytes, *, fill: bool) -> _Encryption:
        count = -(-entry.length // entry.block)
        return cls(cipher, entry, data, nonce, iter(range(count)), [b""] * count, [b""] * count, fill)
