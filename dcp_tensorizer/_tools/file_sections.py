"""The spans of bytes that a data file is made of, and what each of them should hold.

Spans of one kind are the blocks of tensors, which have digests. Those of the other kind make up the whole file, whose
every byte follows from the metadata and the hashes of the data.
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

__all__ = ["AT_ONCE", "Section", "Stored", "block_sections", "file_sections", "keyless", "stored_items"]

AT_ONCE = 64 << 20
"""Bytes that one thread checks: enough to read on, small enough to spread a large tensor over threads."""


class Stored(NamedTuple):
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


class Section(Protocol):
    """Bytes of a file that are checked together."""

    start: int
    stop: int

    def update(self, piece: memoryview) -> None:
        """Takes the bytes, in order."""

    def damages(self) -> Iterator[tuple[str | None, int, str]]:
        """Key, offset and kind of what is wrong, after all bytes; also if some could not be read."""


def stored_items(parts: Mapping[int | None, Metadata]) -> dict[str, list[Stored]]:
    """The items in each file, in its order."""
    files: dict[str, list[Stored]] = defaultdict(list)
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
                files[item.file].append(Stored(key, item, shape))
    for stored in files.values():
        stored.sort(key=lambda one: one.item.offset)
    return files


class _Blocks:
    """Some blocks of an item, compared with their digests."""

    def __init__(self, stored: Stored, start: int, stop: int) -> None:
        item = stored.item
        self.start, self.stop = item.offset + start, item.offset + stop
        self._key = stored.key
        self._step = item.block
        first = start // self._step
        self._expected = item.digests[8 * first : 8 * -(-stop // self._step)]
        self.digester = Digester(item.block)

    def update(self, piece: memoryview) -> None:
        self.digester.update(piece)

    def damages(self) -> Iterator[tuple[str | None, int, str]]:
        found = self.digester.digests()
        for number in range(-(-(self.stop - self.start) // self._step)):
            place = slice(8 * number, 8 * number + 8)
            if found[place] != self._expected[place]:
                first = self.start + number * self._step
                stop = min(first + self._step, self.stop)
                yield self._key, first, f"bytes {first:,} to {stop:,} are not what was saved"


class _TensorSection:
    """A tensor with its header, which holds tensorizer's hashes of both; of an encrypted one, nonce and MACs."""

    def __init__(self, stored: Stored, entry: Entry[Stored]) -> None:
        self.start, self.stop = entry.header_offset, entry.offset + entry.length
        self._stored = stored
        self._entry = entry
        self._header = b""
        self._blocks = _Blocks(stored, 0, entry.length)
        self._hashes = TensorHashes(entry.header, self._blocks.digester)

    def update(self, piece: memoryview) -> None:
        missing = len(self._entry.header) - len(self._header)
        self._header += bytes(piece[:missing])
        data = piece[missing:]
        if self._stored.item.nonce_and_macs:
            self._blocks.update(data)
        else:
            self._hashes.update(data)

    def damages(self) -> Iterator[tuple[str | None, int, str]]:
        found = list(self._blocks.damages())
        yield from found
        nonce_and_macs = self._stored.item.nonce_and_macs
        if found:
            return
        hashes = self._hashes
        expected = (
            self._entry.with_macs(nonce_and_macs)
            if nonce_and_macs
            else self._entry.with_hashes(hashes.crc32, hashes.sha256.digest())
        )
        if self._header != expected:
            what = "nonce and MACs" if nonce_and_macs else "the CRC-32 and SHA-256"
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


def block_sections(items: Sequence[Stored]) -> Iterator[Section]:
    for stored in items:
        step = stored.item.block
        step *= max(1, AT_ONCE // step)
        for start in range(0, stored.item.length, step):
            yield _Blocks(stored, start, min(start + step, stored.item.length))


def keyless(part: Metadata) -> Cipher | None:
    """What the layout of encrypted files depends on; the key it does not."""
    record = part.storage_data.get("encryption")
    if record is None:
        return None
    return Cipher(b"", None if record["derivation"] is None else Derivation(*record["derivation"]))


def file_sections(items: Sequence[Stored], nbytes: int, cipher: Cipher | None) -> Iterator[Section]:
    layout = lay_out(items, cipher)
    yield _Fixed(0, layout.head, "the index of its tensors")
    for stored, entry in zip(items, layout.entries, strict=True):
        yield _TensorSection(stored, entry)
    yield _Fixed(nbytes - len(END), END, "its end")
