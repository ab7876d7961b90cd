"""Columns as bytes, which DCP carries from rank to rank."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import zlib
from typing import Any

import numpy as np
from torch.distributed.checkpoint.metadata import TensorProperties

from .._format.runs import Integers
from .columns import Columns, Table, pack_paths, spec_of, with_keys

_LEVEL = 1  # enough, because most numbers repeat
_DTYPES = ("<i1", "<i2", "<i4", "<i8")


@dataclasses.dataclass(frozen=True)
class EncodedColumns:
    """A rank's columns as bytes."""

    digest: bytes  # of the contents
    table: bytes  # the `Table`; equal bytes on ranks with equal tables
    places: bytes  # the other columns
    may_refer: bool = False  # the rank remembers the columns, and understands an answer that refers to them

    def decode_table(self, tables: dict[bytes, Table]) -> Table:
        """Decodes the part that ranks usually share; ``tables`` are those that were decoded already, to which it is
        added.
        """
        table = tables.get(self.table)
        if table is None:
            table = tables[self.table] = _unpack_table(self.table)
        return table

    def decode(self, tables: dict[bytes, Table]) -> Columns:
        """The columns; ``tables`` as in `decode_table`."""
        table = self.decode_table(tables)
        width, *packed = unpack(self.places)
        dims, starts, sizes = map(unpack_integers, packed)
        return Columns(table, dims, starts.reshape(len(dims), width), sizes.reshape(len(dims), width))


def encode(columns: Columns, *, may_refer: bool = False) -> EncodedColumns:
    """Columns as bytes; equal columns have equal digests."""
    table, places = _pack_table(columns.table), _pack_places(columns)
    digest = hashlib.blake2b(table, digest_size=16)
    digest.update(places)
    return EncodedColumns(digest.digest(), table, places, may_refer)


def pack(content: object) -> bytes:
    """Pickles and compresses."""
    return zlib.compress(pickle.dumps(content, pickle.HIGHEST_PROTOCOL), _LEVEL)


def unpack(data: bytes) -> Any:
    """Unpacks what `pack` packed, on another rank of the same job."""
    return pickle.loads(zlib.decompress(data))


def pack_integers(numbers: Integers) -> tuple[str, bytes]:
    """Integers as bytes, each in as few as needed."""
    low, high = (int(numbers.min()), int(numbers.max())) if numbers.size else (0, 0)
    dtype = next(name for name in _DTYPES if np.iinfo(name).min <= low and high <= np.iinfo(name).max)
    return dtype, numbers.astype(dtype).tobytes()


def unpack_integers(packed: tuple[str, bytes]) -> Integers:
    """Unpacks what `pack_integers` packed."""
    return np.frombuffer(packed[1], packed[0]).astype(np.int64)


def _pack_table(table: Table) -> bytes:
    numbers = [pack_integers(column) for column in (table.key_numbers, table.kinds, table.spec_numbers)]
    specs = [(spec.shape, TensorProperties(*spec.properties)) for spec in table.specs]  # which pickles memory formats
    return pack((table.keys, numbers, specs, pack_paths(table.planner_data, table.keys)))


def _unpack_table(data: bytes) -> Table:
    keys, numbers, specs, packed = unpack(data)
    key_numbers, kinds, spec_numbers = map(unpack_integers, numbers)
    return Table(keys, key_numbers, kinds, spec_numbers, [spec_of(*spec) for spec in specs], with_keys(packed, keys))


def _pack_places(columns: Columns) -> bytes:
    numbers = [pack_integers(column) for column in (columns.dims, columns.starts, columns.sizes)]
    return pack((columns.starts.shape[1], *numbers))
