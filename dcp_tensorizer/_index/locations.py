"""The locations of a rank's items: a table in columns, which is fast to read for any number of items."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from .._tensor_file.dtypes import named_dtype
from .._tensor_file.names import MAC_BYTES, NONCE_BYTES, StoredItem
from ..errors import MetadataError, WriteError
from .schema import KINDS, Inline, ItemKey, Places, encode_rows, from_key, to_key

_EMPTY = encode_rows(b"")
_KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


def hash_of(key: Any, offset: Sequence[int] | None) -> int:
    """Returns the hash for looking up an item: XXH3-64 of the MessagePack of its key and its chunk's offset.

    Raises `TypeError` or `OverflowError` for values that cannot be keys.
    """
    return xxhash.xxh3_64_intdigest(encode_rows((to_key(key), offset)))


def hashes_of(packed_key: bytes, packed_offsets: Iterable[bytes]) -> list[int]:
    """Returns `hash_of` for several chunks of a tensor, from the packed key and offsets."""
    start = b"\x92" + packed_key  # the MessagePack of two values begins with this byte
    return [xxhash.xxh3_64_intdigest(start + offset) for offset in packed_offsets]


class InlineItem(NamedTuple):
    """A small item with its bytes, as DCP sends it to the coordinator."""

    hash: int
    item: StoredItem
    """The item without its location. Its ``name`` is empty if the name in the data file is the key."""
    content: bytes


class RankLocations(NamedTuple):
    """A rank's report of what it has written, which DCP sends to the coordinator."""

    rank: int
    files: tuple[tuple[str, int], ...]
    table: bytes
    """The section of locations up to the digests; empty if the coordinator has it cached under ``table_digest``."""
    table_digest: bytes
    """XXH3-128 of the table; equal for equal items in files of equal layout."""
    digests: bytes
    """The digests of the items, joined."""
    seals: bytes
    """The nonces and MACs of encrypted items, joined: the end of the section."""
    inline: tuple[InlineItem, ...] = ()
    check: bytes = b""
    """The check value of the encryption key (`Cipher.check_value`)."""
    unchanged: tuple[str, ...] | None = None
    """The result of `Freshness.compare`."""

    @classmethod
    def of(
        cls,
        rank: int,
        items: Mapping[ItemKey, StoredItem],
        files: Mapping[str, int],
        named: Collection[ItemKey] = frozenset(),
        inline: Sequence[InlineItem] = (),
        check: bytes = b"",
    ) -> RankLocations:
        """Makes the report from items by key.

        Raises `WriteError`, naming the keys, if a key cannot be stored, or if two items have the same hash.

        The keys of ``named`` items are stored in the index, because the state dict might not have them.
        """
        numbers = {name: number for number, name in enumerate(files)} | {"": -1}
        names = {n: item.name for n, ((key, _), item) in enumerate(items.items()) if item.file and item.name != key}
        rows = _table(_hashes(items), items.values(), numbers, names)
        if named:
            rows.keys = {n: (to_key(key[0]), key[1]) for n, key in enumerate(items) if key in named}
        digests, rows.digests, seals, rows.seals = rows.digests, b"", rows.seals, b""
        table = encode_rows(rows)[: -2 * len(_EMPTY)]
        digest = xxhash.xxh3_128_digest(table)
        return cls(rank, tuple(files.items()), table, digest, digests, seals, tuple(inline), check)

    @property
    def section(self) -> bytes:
        """The section of the index that locates each item."""
        return b"".join((self.table, encode_rows(self.digests), encode_rows(self.seals)))


def inline_rows(items: Iterable[InlineItem]) -> Inline:
    """Returns the section of small items. Of several items with the same hash, uses the last."""
    chosen = list({item.hash: item for item in items}.values())
    ends = list(itertools.accumulate((len(item.content) for item in chosen), initial=0))
    stored = [inline.item._replace(offset=offset) for offset, inline in zip(ends, chosen, strict=False)]
    names = {n: item.name for n, item in enumerate(stored) if item.name}
    rows = _table([inline.hash for inline in chosen], stored, {"": 0}, names)
    return Inline(rows, b"".join(inline.content for inline in chosen))


def _table(
    hashes: Sequence[int], stored: Collection[StoredItem], file_numbers: Mapping[str, int], names: dict[int, str]
) -> Places:
    files, _, offsets, sizes, dtypes, kinds, digests, seals = list(zip(*stored, strict=True)) or [()] * 8
    dtype_numbers = {dtype: number for number, dtype in enumerate(dict.fromkeys(dtypes))}
    return Places(
        dtypes=list(dtype_numbers),
        hashes=_column(hashes, "<u8"),
        files=_column([*map(file_numbers.__getitem__, files)], "<i4"),
        offsets=_column(offsets, "<i8"),
        sizes=_column(sizes, "<i8"),
        dtype_numbers=bytes(map(dtype_numbers.__getitem__, dtypes)),
        kinds=bytes(map(_KIND_NUMBERS.__getitem__, kinds)),
        digest_sizes=_column([*map(len, digests)], "<u4"),
        seal_sizes=_column([*map(len, seals)], "<u4") if any(seals) else b"",
        names=names,
        keys={},
        digests=b"".join(digests),
        seals=b"".join(seals),
    )


def _hashes(keys: Iterable[ItemKey]) -> list[int]:
    """Returns the hashes of items. Raises `WriteError`, naming the keys, if two items have the same hash."""
    known: dict[int, Any] = {}
    for key, offset in keys:
        number = checked_hash(key, offset)
        if number in known:
            raise WriteError(
                f"{known[number]!r} and {key!r} have the same hash, by which a load looks up items: rename one of "
                f"these keys."
            )
        known[number] = key
    return list(known)


def checked_hash(key: Any, offset: Sequence[int] | None) -> int:
    """Returns `hash_of` for an item to save. Raises `WriteError`, naming the key, if the key cannot be stored."""
    try:
        return hash_of(key, offset)
    except (TypeError, OverflowError) as error:
        raise WriteError(f"{key!r} cannot be described in a checkpoint's metadata: {error}") from error


def _column(numbers: Sequence[int], dtype: str) -> bytes:
    return np.array(numbers, dtype=dtype).tobytes()


class LocationTable:
    """The locations of a rank's items in its data files. The constructor raises `ValueError` for invalid ones."""

    def __init__(self, rows: Places, files: Sequence[tuple[str, int]], *, is_encrypted: bool) -> None:
        self._rows = rows
        self._file_names = [name for name, _ in files]
        self._file_sizes = [*(nbytes for _, nbytes in files), 0]  # the last entry is for items without bytes
        self._is_encrypted = is_encrypted
        self.hashes = np.frombuffer(rows.hashes, dtype="<u8")
        self._kinds = np.frombuffer(rows.kinds, dtype="u1")
        count = len(self.hashes)
        self._file_numbers = _numbers(rows.files, "<i4", count)
        self._offsets = _numbers(rows.offsets, "<i8", count)
        self._sizes = _numbers(rows.sizes, "<i8", count)
        self._dtype_numbers = _numbers(rows.dtype_numbers, "u1", count)
        self._digest_ends = _ends(rows.digest_sizes, rows.digests, count)
        self._seal_ends = _ends(rows.seal_sizes or bytes(4 * count), rows.seals, count)
        self._check(count)

    def find(self, keys: Iterable[Any], hashes: Iterable[int]) -> Iterator[StoredItem | None]:
        """Yields the location of each item by its key and hash, or None if the table lacks it.

        Raises `ValueError` for an invalid location.
        """
        files, dtypes, located, of_all = self._file_names, self._rows.dtypes, self._located, self._rows.digests
        name_of, is_open = self._rows.names.get, not self._is_encrypted and not self._rows.seals
        for key, row in zip(keys, map(self._row_numbers.get, hashes), strict=True):
            if row is None:
                yield None
                continue
            file, offset, nbytes, dtype, kind, first, last, seal_start, seal_end = located[row]
            if file < 0:
                yield StoredItem.empty(dtypes[dtype], KINDS[kind])
                continue
            name = name_of(row, key)
            if type(name) is not str:
                raise ValueError(f"the data of {key!r} has no name")
            item = StoredItem(files[file], name, offset, nbytes, dtypes[dtype], KINDS[kind], of_all[first:last])
            if not is_open:
                item = item._replace(nonce_and_macs=self._rows.seals[seal_start:seal_end])
                blocks = -(-item.length // item.block) if self._is_encrypted else 0
                sealed = NONCE_BYTES + blocks * MAC_BYTES if blocks else 0
                if seal_end - seal_start != sealed:  # the index may be forged
                    raise ValueError(f"the data of {key!r} is not encrypted in the same way as the checkpoint")
            yield item

    def named(self) -> dict[ItemKey, StoredItem]:
        """Returns the items whose keys are stored in the table, by key."""
        keys = [(from_key(key), offset) for key, offset in self._rows.keys.values()]
        items = self.find([key for key, _ in keys], self.hashes[list(self._rows.keys)].tolist())
        return {key: item for key, item in zip(keys, items, strict=True) if item is not None}

    @functools.cached_property
    def _row_numbers(self) -> dict[int, int]:
        return {item_hash: row for row, item_hash in enumerate(self.hashes.tolist())}

    @functools.cached_property
    def _located(self) -> list[tuple[int, ...]]:
        """The columns as rows of Python numbers, which are faster to access one by one."""
        columns = self._file_numbers, self._offsets, self._sizes, self._dtype_numbers, self._kinds
        ends = self._digest_ends[:-1], self._digest_ends[1:], self._seal_ends[:-1], self._seal_ends[1:]
        return list(zip(*(column.tolist() for column in (*columns, *ends)), strict=True))

    def _check(self, count: int) -> None:
        hashes = np.sort(self.hashes)  # not `np.unique`, whose imports take as long as a small load
        if len(self._kinds) != count or len(hashes) != count or np.any(hashes[1:] == hashes[:-1]):
            raise ValueError("a table of locations has columns of different lengths, or an item twice")
        if not count:
            return
        file_sizes = np.array(self._file_sizes, dtype="i8")
        if self._file_numbers.min() < -1 or self._file_numbers.max() >= len(file_sizes) - 1:
            raise ValueError("a table of locations refers to a file that it does not have")
        ends = file_sizes[self._file_numbers]
        if self._offsets.min() < 0 or self._sizes.min() < 0 or not np.all(self._sizes <= ends - self._offsets):
            raise ValueError("an item is not within its file")
        if self._dtype_numbers.max() >= len(self._rows.dtypes) or self._kinds.max() >= len(KINDS):
            raise ValueError("a table of locations has an unknown dtype or kind")
        others = set(self._dtype_numbers[self._kinds > 0].tolist())
        if any(self._rows.dtypes[number] != "uint8" for number in others):
            raise ValueError("an object has a dtype other than uint8")
        if max((*self._rows.names, *self._rows.keys), default=0) >= count:
            raise ValueError("a table of locations refers to an item that it does not have")


def _numbers(column: bytes, dtype: str, count: int) -> np.ndarray:
    numbers = np.frombuffer(column, dtype=dtype)
    if len(numbers) != count:
        raise ValueError("a table of locations has columns of different lengths")
    return numbers


def _ends(sizes: bytes, content: bytes, count: int) -> np.ndarray:
    """Returns 0, and the end of each item's bytes in ``content``."""
    ends = np.zeros(count + 1, dtype="i8")
    np.cumsum(_numbers(sizes, "<u4", count), dtype="i8", out=ends[1:])
    if int(ends[-1]) != len(content):
        raise ValueError("a table of locations has digests or MACs whose size differs from the recorded one")
    return ends


def known_dtype(name: str, path: str) -> torch.dtype:
    """Returns the dtype of a name. Raises `MetadataError` if this torch does not have it."""
    try:
        return named_dtype(name)
    except TypeError:
        raise MetadataError(
            f"{path} has tensors of dtype {name!r}, which torch {torch.__version__} lacks. Install a newer torch."
        ) from None
