"""The entries of an index: each value of the state dict, how tensors are cut, and who has which chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .chunk_layout import ChunkLayout, check_numbers, expand
from .chunks import Region
from .index_rows import Entries, ObjectEntry, Properties, TensorEntry
from .keys import from_key

__all__ = ["TensorValue", "Value", "values_of"]


class TensorValue(NamedTuple):
    """A tensor.

    Attributes:
        layout: How it is cut into chunks.
        owners: For each chunk the number of the section of places that has it; -1: none.
        is_whole: The chunks hold each element once, and all are stored.
    """

    layout: ChunkLayout
    owners: np.ndarray
    is_whole: bool
    properties: Properties

    def places(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """The offset of each chunk, and who has it."""
        return zip((region.start for region in self.layout.regions), self.owners.tolist(), strict=True)

    def chunks_in(self, offset: tuple[int, ...], region: Region) -> list[int]:
        """The numbers of the chunks to read for a region.

        Args:
            offset: Of the chunk that a load was shown, of which it wants a part.
            region: Which part of that.
        """
        if self.is_whole:
            return self.layout.touched_by(region.moved(offset))
        same = np.flatnonzero((self.layout.starts == np.array(offset, dtype="i8")).all(axis=1))
        return same[-1:].tolist()  # type: ignore[no-any-return]


Value = TensorValue | int
"""A tensor, or the number of the section of places that has an object; -1: none."""


def values_of(rows: Entries, part_count: int) -> dict[Any, Value]:
    """Each value of the state dict by its key.

    Args:
        rows: The section.
        part_count: How many sections of places there are.

    Raises:
        ValueError, LookupError: the section makes no sense.
    """
    check_numbers(rows.layouts, rows.owners)
    layouts = [ChunkLayout.from_row(row) for row in rows.layouts]
    owners = [expand(runs) for runs in rows.owners]
    if any(len(of) and not -1 <= int(of.min()) <= int(of.max()) < part_count for of in owners):
        raise ValueError("the places of something are in no section")
    values: dict[Any, Value] = {}
    for entry in rows.entries:
        key = entry.key if type(entry.key) is str else from_key(entry.key)
        if isinstance(entry, ObjectEntry):
            if entry.owner >= part_count:
                raise ValueError(f"the place of {key!r} is in no section")
            values[key] = entry.owner
        else:
            values[key] = _tensor(key, entry, layouts, owners, rows.properties)
    if len(values) < len(rows.entries):
        raise ValueError("it describes a key twice")
    return values


def _tensor(
    key: Any,
    entry: TensorEntry,
    layouts: Sequence[ChunkLayout],
    owners: Sequence[np.ndarray],
    properties: Sequence[Properties],
) -> TensorValue:
    layout, own = layouts[entry.layout], owners[entry.owners]
    if len(layout) != len(own):
        raise ValueError(f"{key!r} has {len(layout):,} chunks, and {len(own):,} places")
    return TensorValue(layout, own, entry.is_whole, properties[entry.properties])
