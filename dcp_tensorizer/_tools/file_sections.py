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
    # The tensors lie where the hashes in their headers have left them; padding may make both layouts the same.
    layouts = [lay_out(tensors, cipher, sha256=sha256) for sha256 in (False, True)]
    offsets = [keyed.item.offset for keyed in items]
    fitting = [layout for layout in layouts if [entry.offset for entry in layout.entries] == offsets] or layouts[:1]
    yield _Constant(0, fitting[0].head, "the index of its tensors")
    for (key, item, _), *entries in zip(items, *(layout.entries for layout in fitting), strict=True):
        yield _TensorWithHeader(key, item, entries)
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
    """A tensor with its header, which holds tensorizer's hashes of both; of an encrypted one, nonce and MACs.

    Args:
        key: The tensor's.
        item: The tensor.
        entries: It may be stored like any of these, at one place, with these hashes or those.
    """

    def __init__(self, key: str, item: StoredItem, entries: Sequence[Entry[TensorSource]]) -> None:
        self._entry, *self._others = entries
        self.start, self.stop = self._entry.header_offset, self._entry.offset + self._entry.length
        self._key = key
        self._nonce_and_macs = item.nonce_and_macs
        self._header = b""
        self._blocks = _Blocks(key, item, 0, self._entry.length)
        self._hashes: TensorHashes | None = None

    def update(self, piece: memoryview) -> None:
        missing = len(self._entry.header) - len(self._header)
        self._header += bytes(piece[:missing])
        if missing <= piece.nbytes and not self._nonce_and_macs:
            self._hashes = self._hashes or self._begin_hashes()
        (self._hashes or self._blocks).update(piece[missing:])

    def _begin_hashes(self) -> TensorHashes:
        """Of the kinds that the header holds; as the first layout says if it holds none that are known."""
        for other in self._others:
            start, zero = other.hashes_offset, other.with_hashes(0, bytes(32))
            if self._header[start:][:4] == zero[start:][:4]:  # how many, and of which kind the first is
                self._entry = other
        return TensorHashes(self._entry.header, self._blocks.digester, sha256=self._entry.has_sha256)

    def problems(self) -> Iterator[Problem]:
        damaged_blocks = list(self._blocks.problems())
        yield from damaged_blocks
        if damaged_blocks:
            return
        if self._nonce_and_macs:
            what, expected = "nonce and MACs", self._entry.with_macs(self._nonce_and_macs)
        else:
            what = "the CRC-32 and SHA-256" if self._entry.has_sha256 else "the CRC-32"
            hashes = self._hashes or self._begin_hashes()
            expected = self._entry.with_hashes(*hashes.values())
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
