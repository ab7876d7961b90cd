"""A compact form of DCP's ``state_dict_metadata``: each layout and each set of properties is stored once, and tensors
refer to it by number.

Tensors of one shape are usually sharded in the same way. So this form is small for any number of ranks, whereas DCP has
an object per chunk.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from .._runtime.recent import Recent
from .._tensor_file.dtypes import dtype_name
from .._tensor_file.regions import Integers, Region
from ..errors import WriteError
from .layouts import ChunkLayout, expand, runs_of
from .locations import RankLocations, hashes_of
from .schema import (
    Entries,
    ObjectEntry,
    Properties,
    Run,
    Section,
    TensorEntry,
    decode_places,
    encode_rows,
    from_key,
    to_key,
)


@dataclass(frozen=True, eq=False)
class StateRules:
    """The entries of a state dict in compact form. The properties are DCP's own objects, and must not be changed."""

    keys: list[Any]
    rows: Integers  # for each key, the numbers of its properties and its layout; both -1 for an object
    properties: list[TensorProperties]
    layouts: list[ChunkLayout]

    @classmethod
    def of(cls, described: Mapping[Any, Any]) -> StateRules:
        """Makes the compact form of DCP's entries. Raises `WriteError`, naming the key, if an entry is invalid."""
        properties: list[TensorProperties] = []
        layouts: list[ChunkLayout] = []
        known_properties: dict[Any, int] = {}
        known_chunks: dict[tuple[Any, ...], int] = {}
        rows: list[tuple[int, int]] = []
        for key, entry in described.items():
            if isinstance(entry, BytesStorageMetadata):
                rows.append((-1, -1))
                continue
            try:
                if not isinstance(entry, TensorStorageMetadata):
                    raise TypeError(
                        f"the planner's metadata has a {type(entry).__module__}.{type(entry).__qualname__} for it, "
                        f"not a TensorStorageMetadata or a BytesStorageMetadata"
                    )
                number = known_properties.setdefault(tuple(vars(entry.properties).values()), len(properties))
                if number == len(properties):
                    _row(entry.properties)  # checked early, so that an error can name the key
                    properties.append(entry.properties)
                # Comparing tuples takes a tenth of the time of making arrays of them.
                chunks = entry.chunks
                same = (tuple(entry.size), *[tuple(c.offsets) for c in chunks], *[tuple(c.sizes) for c in chunks])
                if same not in known_chunks:
                    layout = ChunkLayout.of(entry.size, ((chunk.offsets, chunk.sizes) for chunk in chunks))
                    known_chunks[same] = len(layouts)
                    layouts.append(layout)
                rows.append((number, known_chunks[same]))
            except (TypeError, ValueError, OverflowError) as error:
                raise _undescribed(key, error) from error
        return cls(list(described), np.array(rows, dtype=np.int64).reshape(-1, 2), properties, layouts)

    def described(self) -> dict[Any, Any]:
        """Returns DCP's entries, made anew at each call, so that the caller may change them."""
        lists = [layout.chunks() for layout in self.layouts]
        entries: dict[Any, Any] = {}
        for key, (properties, layout) in zip(self.keys, self.rows.tolist(), strict=True):
            if layout < 0:
                entries[key] = BytesStorageMetadata()
                continue
            own, size = copy.copy(self.properties[properties]), torch.Size(self.layouts[layout].shape)
            entries[key] = TensorStorageMetadata(own, size, list(lists[layout]))
        return entries

    @functools.cached_property
    def packed_keys(self) -> list[bytes]:
        """The MessagePack of each key. Raises `WriteError` if a key cannot be stored."""
        return [_packed(key) for key in self.keys]

    @functools.cached_property
    def property_rows(self) -> list[Properties]:
        return list(map(_row, self.properties))

    @functools.cached_property
    def digest(self) -> bytes:
        """The digest of everything that an index records of the entries."""
        state = xxhash.xxh3_128(encode_rows((self.packed_keys, self.property_rows)))
        state.update(self.rows.tobytes())
        for layout in self.layouts:
            state.update(layout.identity)
        return state.digest()


def _packed(key: Any) -> bytes:
    try:
        return encode_rows(to_key(key))
    except (TypeError, ValueError, OverflowError) as error:
        raise _undescribed(key, error) from error


def _undescribed(key: Any, error: Exception) -> WriteError:
    return WriteError(f"{key!r} cannot be described in a checkpoint's metadata: {error}")


def _row(properties: TensorProperties) -> Properties:
    return Properties(
        dtype_name(properties.dtype),
        _torch_name(getattr(properties, "layout", torch.strided)),
        bool(getattr(properties, "requires_grad", False)),
        _torch_name(getattr(properties, "memory_format", torch.contiguous_format)),
        bool(getattr(properties, "pin_memory", False)),
        getattr(properties, "strides", None),
    )


@functools.cache
def _torch_name(value: torch.layout | torch.memory_format) -> str:
    return str(value).removeprefix("torch.")


# --- writing the section of entries -----------------------------------------------------------------------------------


def entries_section(rules: StateRules, parts: Sequence[RankLocations], recent: Recent[bytes] | None = None) -> bytes:
    """Returns the section of a state dict's entries. Raises `WriteError`, naming the key, if a key cannot be stored.

    ``parts`` are the ranks' reports. If several ranks wrote a chunk, the section refers to the last rank's copy.
    ``recent`` caches the sections of the last saves, to reuse them for equal contents.
    """
    name = (rules.digest, *(part.table_digest for part in parts))
    section = None if recent is None else recent.find(name)
    if section is None:
        section = encode_rows(_entries(rules, parts))
    if recent is not None:
        recent.add(name, section)
    return section


def _entries(rules: StateRules, parts: Sequence[RankLocations]) -> Entries:
    layouts = [rules.layouts[layout] if layout >= 0 else None for _, layout in rules.rows.tolist()]
    wanted: list[int] = []
    for packed_key, layout in zip(rules.packed_keys, layouts, strict=True):
        wanted += hashes_of(packed_key, _OF_OBJECT if layout is None else layout.packed_offsets)
    owners, are_tensors = _owners_of(np.array(wanted, dtype="<u8"), parts)
    entries: list[TensorEntry | ObjectEntry] = []
    runs: list[list[Run]] = []
    known: dict[bytes, int] = {}  # the numbers of the runs, by the owners that they encode
    first = 0
    for key, layout, (properties, number) in zip(rules.keys, layouts, rules.rows.tolist(), strict=True):
        if layout is None:
            entries.append(ObjectEntry(to_key(key), int(owners[first])))
            first += 1
            continue
        chunks = slice(first, first + len(layout))
        run = known.setdefault(owners[chunks].tobytes(), len(runs))
        if run == len(runs):
            runs.append(runs_of(owners[chunks]))
        is_whole = bool(are_tensors[chunks].all()) and layout.is_covered
        entries.append(TensorEntry(to_key(key), properties, number, run, is_whole))
        first = chunks.stop
    made = Entries(rules.property_rows, [layout.to_row() for layout in rules.layouts], runs, entries)
    try:
        check_numbers(made, sum(len(part.table) + len(part.digests) + len(part.seals) for part in parts))
    except ValueError as error:
        raise WriteError(
            f"no reader would load this checkpoint: {error}. In the planner's metadata, list only chunks that some "
            f"rank saves."
        ) from None
    return made


def _owners_of(wanted: np.ndarray, parts: Sequence[RankLocations]) -> tuple[np.ndarray, np.ndarray]:
    """Returns for each item the number of the report that locates it, and whether it is stored as a tensor's elements.

    ``wanted`` has the items' hashes. The number is an index in ``parts``, or -1 if no rank has stored the item.
    """
    rows = [decode_places(part.section) for part in parts]
    hashes = np.frombuffer(b"".join(row.hashes for row in rows), dtype="<u8")
    if not len(hashes):
        return np.full(len(wanted), -1), np.zeros(len(wanted), dtype=bool)
    owners = np.repeat(np.arange(len(rows)), [len(row.hashes) // 8 for row in rows])
    is_tensor = np.frombuffer(b"".join(row.kinds for row in rows), dtype="u1") == 0
    order = np.argsort(hashes, kind="stable")  # stable: of equal hashes, the last rank's comes last
    hashes = hashes[order]
    found = np.maximum(np.searchsorted(hashes, wanted, side="right") - 1, 0)
    is_there = hashes[found] == wanted
    return np.where(is_there, owners[order][found], -1), is_there & is_tensor[order][found]


_OF_OBJECT = (encode_rows(None),)


# --- reading entries --------------------------------------------------------------------------------------------------

SPARE_NUMBERS = 1 << 20
"""The count of numbers that the entries may have for chunks without locations. See `check_numbers`."""


def check_numbers(rows: Entries, places_nbytes: int) -> None:
    """Raises `ValueError`, before any run is expanded, if the entries have far more chunks than the ranks have located.

    DCP's metadata lists each chunk of each tensor, even if tensors share a layout. A location takes at least 34 of the
    ``places_nbytes`` bytes. A chunk in up to 16 dimensions takes at most 34 numbers, for itself, its owner, its
    offsets and its sizes.
    """
    of_layouts = [
        row.count + sum(run[2] for side in (row.offsets, row.sizes) for runs in side or () for run in runs)
        for row in rows.layouts
    ]
    of_owners = [sum(run[2] for run in runs) for runs in rows.owners]
    tensors = [entry for entry in rows.entries if type(entry) is TensorEntry]
    of_tensors = sum(of_layouts[entry.layout] + of_owners[entry.owners] for entry in tensors)
    count, limit = max(of_tensors, sum(of_layouts) + sum(of_owners)), SPARE_NUMBERS + places_nbytes
    if count > limit:
        raise ValueError(
            f"its tensors have too many chunks for the data that it locates: describing the chunks takes {count:,} "
            f"numbers, and {places_nbytes:,} bytes of locations allow {limit:,}"
        )


@dataclass(frozen=True, eq=False)
class TensorValue:
    """The description of one or more tensors of an index."""

    layout: ChunkLayout
    owners: np.ndarray  # for each chunk, the number of its section of locations; -1: none
    is_whole: bool  # the chunks hold each element once, and all are stored
    properties: Properties

    @functools.cached_property
    def only_owner(self) -> int | None:
        """The number of the section with the tensor's location if the tensor is one chunk; otherwise None."""
        return int(self.owners[0]) if self.layout.is_one else None

    def located(self) -> Iterator[tuple[tuple[int, ...], int]]:
        return zip((region.start for region in self.layout.regions), self.owners.tolist(), strict=True)

    def chunks_in(self, offset: tuple[int, ...], region: Region) -> list[int]:
        """Returns the numbers of the chunks to read for ``region``, a part of the chunk at ``offset`` in the metadata.

        The region is relative to ``offset``.
        """
        if self.is_whole:
            return self.layout.touched_by(region.moved(offset))
        same = np.flatnonzero((self.layout.starts == np.array(offset, dtype="i8")).all(axis=1))
        return same[-1:].tolist()  # type: ignore[no-any-return]


Value = TensorValue | int
"""A tensor, or the number of an object's section of locations (-1: none)."""


def values_of(rows: Entries, parts: Sequence[Section]) -> dict[Any, Value]:
    """Returns each value of the state dict by key. Raises `ValueError` or `LookupError` if the section is invalid.

    ``parts`` are the sections of locations.
    """
    check_numbers(rows, sum(section.nbytes for section in parts))
    part_count = len(parts)
    layouts = [ChunkLayout.from_row(row) for row in rows.layouts]
    owners = [expand(runs) for runs in rows.owners]
    if any(len(of) and not -1 <= int(of.min()) <= int(of.max()) < part_count for of in owners):
        raise ValueError("an item refers to a section of locations that the index does not have")
    known: dict[tuple[int, int, int, bool], TensorValue] = {}
    values: dict[Any, Value] = {}
    for entry in rows.entries:
        key = entry.key if type(entry.key) is str else from_key(entry.key)
        if isinstance(entry, ObjectEntry):
            if entry.owner >= part_count:
                raise ValueError(f"{key!r} refers to a section of locations that the index does not have")
            values[key] = entry.owner
            continue
        name = entry.layout, entry.owners, entry.properties, entry.is_whole
        if name not in known:
            layout, own = layouts[entry.layout], owners[entry.owners]
            if len(layout) != len(own):
                raise ValueError(f"{key!r} has {len(layout):,} chunks, and {len(own):,} locations")
            known[name] = TensorValue(layout, own, entry.is_whole, rows.properties[entry.properties])
        values[key] = known[name]
    if len(values) < len(rows.entries):
        raise ValueError("a key occurs twice")
    return values
