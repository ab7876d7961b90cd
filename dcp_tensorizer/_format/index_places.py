"""The places in an index: each rank's are read when something of it is wanted, and small values are there at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from .._memory.tensor_bytes import named_dtype
from .._threads import in_threads
from ..errors import MetadataError
from .index import IndexFile, decoded
from .index_rows import Places, Section, decode_inline, decode_places
from .keys import ItemKey
from .layout import StoredItem, metadata_file_name
from .places import PlaceTable, hash_of

__all__ = ["IndexPlaces", "known_dtype"]


class IndexPlaces:
    """Finds where items are.

    Attributes:
        count: Of the sections of places.
        inline_file: The file that small values are in, as their places say.
        inline_content: What is in that.

    Raises:
        MetadataError: the index is damaged.
        ValueError: it makes no sense.
    """

    def __init__(self, file: IndexFile) -> None:
        self._file = file
        self._is_encrypted = file.head.encryption is not None
        self._sections = [section for section in file.head.sections if section.kind == "places"]
        self._tables: dict[int, PlaceTable] = {}
        self.count = len(self._sections)
        self.inline_file = metadata_file_name(file.head.rank)
        self.inline_content = b""
        self._inline: PlaceTable | None = None
        for section in file.head.sections:
            if section.kind == "inline":
                self._inline = self._read_inline(section)

    def load(self, numbers: Iterable[int]) -> None:
        """Reads the sections with these numbers, if they have not been.

        Raises:
            MetadataError, ValueError: they are damaged, or make no sense.
            ReadError: they cannot be read.
        """
        missing = sorted({number for number in numbers if number >= 0} - self._tables.keys())
        sections = [self._sections[number] for number in missing]
        # In memory a section is there at once, and threads would only cost time.
        get_all = map if self._file.read is None else in_threads
        for number, section, content in zip(missing, sections, get_all(self._file.section, sections), strict=True):
            files = [(file.name, file.nbytes) for file in section.files]
            self._tables[number] = self._table(decoded(decode_places, content, self._file.path), files)

    def is_inline(self, key: Any, offset: tuple[int, ...] | None) -> bool:
        """Whether an item stands in the index itself."""
        return self._inline is not None and self._inline.row_of(hash_of(key, offset)) is not None

    def find(self, key: Any, offset: tuple[int, ...] | None, owner: int) -> StoredItem | None:
        """Where an item is best read from; None if it is nowhere.

        Args:
            key: Its key.
            offset: Of its chunk; None for an object.
            owner: The number of the section that has it; -1: none.
        """
        item_hash = hash_of(key, offset)
        if self._inline is not None and (row := self._inline.row_of(item_hash)) is not None:
            return self._inline.item(row, key)
        return None if owner < 0 else self._stored(key, item_hash, owner)

    def stored(self, key: Any, offset: tuple[int, ...] | None, owner: int) -> StoredItem | None:
        """Where an item is in a data file; None if it is in none."""
        return self._stored(key, hash_of(key, offset), owner)

    def _stored(self, key: Any, item_hash: int, owner: int) -> StoredItem | None:
        if owner not in self._tables:
            self.load([owner])
        row = self._tables[owner].row_of(item_hash)
        return None if row is None else self._tables[owner].item(row, key)

    def named(self) -> Iterator[tuple[ItemKey, StoredItem]]:
        """The items of all ranks whose keys stand beside their places."""
        self.load(range(self.count))
        for table in self._tables.values():
            for row, key in table.named():
                yield key, table.item(row, key[0])

    def _read_inline(self, section: Section) -> PlaceTable:
        rows = decoded(decode_inline, self._file.section(section), self._file.path)
        self.inline_content = rows.content
        return self._table(rows.places, [(self.inline_file, len(rows.content))])

    def _table(self, rows: Places, files: Sequence[tuple[str, int]]) -> PlaceTable:
        for name in rows.dtypes:
            known_dtype(name, self._file.path)
        return PlaceTable(rows, files, is_encrypted=self._is_encrypted)


def known_dtype(name: str, path: str) -> torch.dtype:
    """The dtype with a name; raises `MetadataError` if this torch has none."""
    try:
        return named_dtype(name)
    except TypeError:
        raise MetadataError(
            f"{path} has tensors of dtype {name!r}, which torch {torch.__version__} has not: install a newer one"
        ) from None
