"""The sections of a data file, each with what it should hold: the blocks of tensors, or everything in the file.

Each block has a digest in the metadata. The rest of a file follows from the metadata and the hashes of the data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from .._format.checksums import Digester, TensorHashes
from .._format.encryption import Cipher
from .._format.layout import Derivation, StoredItem
from .._format.tensorizer_file import END, Entry, lay_out
from .._writer_process.messages import TensorSource

__all__ = ["SECTION_BYTES", "KeyedItem", "Problem", "Section", "block_sections", "file_sections", "items_by_file"]

SECTION_BYTES = 64 << 20
"""Bytes that one thread checks: enough to read on, small enough to spread a large tensor over threads."""

Problem = tuple[str | None, int, str]
"""Key, offset in the file, and what is wrong there."""


class KeyedItem(NamedTuple):
    """A write item with bytes, its key and its shape."""

    key: str
    item: StoredItem
    shape: tuple[int, ...]


class Section(Protocol):
    """Bytes of a file that are checked together."""

    start: int
    stop: int

    def update(self, piece: memoryview) -> None:
        """Takes the bytes, in order."""

    def problems(self) -> Iterator[Problem]:
        """What is wrong, after all bytes; also if some could not be read."""


def items_by_file(parts: Mapping[int | None, Metadata]) -> dict[str, list[KeyedItem]]:
    """The items in each file, in its order."""
    files: dict[str, list[KeyedItem]] = defaultdict(list)
    for part in parts.values():
        shapes = {
            (key, tuple(chunk.offsets)): tuple(chunk.sizes)
            for key, entry in part.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks
        }
        for (key, offset), item in part.storage_data["items"].items():
            if item.length:
                shape = shapes[key, offset] if item.kind == "tensor" else (item.length,)
                files[item.file].append(KeyedItem(str(key), item, shape))
    for items in files.values():
        items.sort(key=lambda keyed: keyed.item.offset)
    return files


def block_sections(items: Sequence[KeyedItem]) -> Iterator[Section]:
    """The data of items, without what is between them."""
    for key, item, _ in items:
        step = item.block * max(1, SECTION_BYTES // item.block)
        for start in range(0, item.length, step):
            yield _Blocks(key, item, start, min(start + step, item.length))


def file_sections(items: Sequence[KeyedItem], nbytes: int, part: Metadata) -> Iterator[Section]:
    """Every byte of a file.

    Args:
        items: In the file.
        nbytes: In the file, when it was saved.
        part: The metadata that names the file.
    """
    record = part.storage_data.get("encryption")
    cipher = None
    if record is not None:  # the layout does not depend on the key
        cipher = Cipher(b"", None if record["derivation"] is None else Derivation(*record["derivation"]))
    tensors = [TensorSource(i.name, i.dtype, shape, i.length, i.kind) for _, i, shape in items]
    layout = lay_out(tensors, cipher)
    yield _Constant(0, layout.head, "the index of its tensors")
    for (key, item, _), entry in zip(items, layout.entries, strict=True):
        yield _TensorWithHeader(key, item, entry)
    yield _Constant(nbytes - len(END), END, "its end")


class _Blocks:
    """Some blocks of an item, compared with their digests."""

    def __init__(self, key: str, item: StoredItem, start: int, stop: int) -> None:
        self.start, self.stop = item.offset + start, item.offset + stop
        self._key = key
        self._step = item.block
        first = start // self._step
        self._expected = item.digests[8 * first : 8 * -(-stop // self._step)]
        self.digester = Digester(self._step)
        self.update = self.digester.update

    def problems(self) -> Iterator[Problem]:
        actual = self.digester.digests()
        for number, start in enumerate(range(self.start, self.stop, self._step)):
            digest = slice(8 * number, 8 * number + 8)
            if actual[digest] != self._expected[digest]:
                stop = min(start + self._step, self.stop)
                yield self._key, start, f"bytes {start:,} to {stop:,} are not what was saved"


class _TensorWithHeader:
    """A tensor with its header, which holds tensorizer's hashes of both; of an encrypted one, nonce and MACs."""

    def __init__(self, key: str, item: StoredItem, entry: Entry[TensorSource]) -> None:
        self.start, self.stop = entry.header_offset, entry.offset + entry.length
        self._key = key
        self._nonce_and_macs = item.nonce_and_macs
        self._entry = entry
        self._header = b""
        self._blocks = _Blocks(key, item, 0, entry.length)
        self._hashes = TensorHashes(entry.header, self._blocks.digester)

    def update(self, piece: memoryview) -> None:
        missing = len(self._entry.header) - len(self._header)
        self._header += bytes(piece[:missing])
        (self._blocks if self._nonce_and_macs else self._hashes).update(piece[missing:])

    def problems(self) -> Iterator[Problem]:
        damaged_blocks = list(self._blocks.problems())
        yield from damaged_blocks
        if damaged_blocks:
            return
        if self._nonce_and_macs:
            what, expected = "nonce and MACs", self._entry.with_macs(self._nonce_and_macs)
        else:
            what = "the CRC-32 and SHA-256"
            expected = self._entry.with_hashes(self._hashes.crc32, self._hashes.sha256.digest())
        if self._header != expected:
            yield self._key, self.start, f"its header, with {what} of the data, is damaged"


class _Constant:
    """Bytes that are known."""

    def __init__(self, start: int, expected: bytes, name: str) -> None:
        self.start, self.stop = start, start + len(expected)
        self._expected = expected
        self._name = name
        self._actual = b""

    def update(self, piece: memoryview) -> None:
        self._actual += bytes(piece)

    def problems(self) -> Iterator[Problem]:
        if self._actual != self._expected:
            yield None, self.start, f"{self._name} is damaged"
