"""A rank's write items in column form: a few arrays instead of a dozen objects per item."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import operator
import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from .._runtime.torch_compat import PART_NAMES, layout_of, plain_local, write_items
from .._tensor_file.dtypes import check_plannable
from .._tensor_file.regions import Integers

KINDS = (WriteItemType.TENSOR, WriteItemType.SHARD, WriteItemType.BYTE_IO)
"""The kinds of write items. `Table.kinds` has indices into this tuple."""

_BYTE_IO = KINDS.index(WriteItemType.BYTE_IO)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
_FIELDS = {
    WriteItem: {"index", "type", "bytes_io_data", "tensor_data"},
    TensorWriteData: {"chunk", "properties", "size"},
    ChunkStorageMetadata: {"offsets", "sizes"},
    MetadataIndex: {"fqn", "offset", "index"},
    SavePlan: {"items", "storage_data", "planner_data", "usable"},
}
# If torch's classes have other fields, columns cannot hold everything, and torch's planner makes the plan.
_UNDERSTOOD = all({field.name for field in dataclasses.fields(cls)} == names for cls, names in _FIELDS.items())
_properties = operator.attrgetter(*[field.name for field in dataclasses.fields(TensorProperties)])


class Unsupported(Exception):
    """Failure to put a plan or metadata into compact form, for example because an item is of a user's class."""


class Spec(NamedTuple):
    """The properties that all chunks of a tensor share: the shape, and the fields of ``TensorProperties``."""

    shape: tuple[int, ...]
    properties: tuple[Any, ...]


def spec_of(size: Iterable[int], properties: TensorProperties) -> Spec:
    """Returns the spec of a tensor; raises `Unsupported` if the properties are of a user's class."""
    if type(properties) is not TensorProperties:
        raise Unsupported
    return Spec(tuple(size), _properties(properties))


class PlannedChunk(NamedTuple):
    """The properties of a write item except its key; usually equal for tensors of one shape and sharding."""

    kind: int  # see `KINDS`
    spec: Spec | None  # None for an object
    start: tuple[int, ...]  # of the chunk
    size: tuple[int, ...]


class Row(NamedTuple):
    key: str
    chunk: PlannedChunk
    hint: int  # ``MetadataIndex.index``; -1: none


_OBJECT = PlannedChunk(_BYTE_IO, None, (), ())


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """The part of a plan that is usually equal on all ranks."""

    keys: list[str]  # each key once, in the order of their first items
    key_numbers: Integers  # of each item
    kinds: Integers  # of each item, see `KINDS`
    spec_numbers: Integers  # of each item; -1 for an object
    specs: list[Spec]
    data: Any  # the planner's data, possibly packed

    @functools.cached_property
    def planner_data(self) -> Any:
        return unpack_paths(self.data) if isinstance(self.data, (PackedPaths, Pickled)) else self.data


@dataclasses.dataclass(frozen=True, eq=False)
class Columns:
    table: Table
    dims: Integers  # the number of dimensions of each item's chunk; -1 for an object
    starts: Integers  # a row per item, with zeros after its dimensions
    sizes: Integers  # likewise

    def __len__(self) -> int:
        return len(self.dims)

    def rows(self, hints: Integers) -> Iterator[Row]:
        table, width = self.table, self.starts.shape[1]
        numbers = np.column_stack([table.kinds, table.spec_numbers, self.dims, self.starts, self.sizes]).tolist()
        chunks: dict[tuple[int, ...], PlannedChunk] = {}
        for key, of_chunk, hint in zip(table.key_numbers.tolist(), map(tuple, numbers), hints.tolist(), strict=True):
            chunk = chunks.get(of_chunk)
            if chunk is None:
                kind, spec, dims, *bounds = of_chunk
                start, size = tuple(bounds[:dims]), tuple(bounds[width : width + dims])
                chunk = chunks[of_chunk] = (
                    _OBJECT if kind == _BYTE_IO else PlannedChunk(kind, table.specs[spec], start, size)
                )
            yield Row(table.keys[key], chunk, hint)

    def with_data(self, planner_data: Any) -> Columns:
        return dataclasses.replace(self, table=dataclasses.replace(self.table, data=planner_data))

    def select(self, rows: Integers) -> Columns:
        table = self.table
        chosen = dataclasses.replace(
            table,
            key_numbers=table.key_numbers[rows],
            kinds=table.kinds[rows],
            spec_numbers=table.spec_numbers[rows],
        )
        return Columns(chosen, self.dims[rows], self.starts[rows], self.sizes[rows])


def columns_of(items: Iterable[WriteItem], planner_data: Any) -> tuple[Columns, Integers]:
    """Returns the columns of items, and their hints (``MetadataIndex.index``; -1: none). Raises `Unsupported`."""
    return columns_of_rows(map(row_of, items), planner_data)


def columns_of_rows(items: Iterable[Row], planner_data: Any) -> tuple[Columns, Integers]:
    """Returns the same as `columns_of`, for rows. Holds no reference to a row."""
    keys: dict[str, int] = {}
    chunks: dict[PlannedChunk, int] = {}
    numbers: list[tuple[int, int, int]] = []
    for key, chunk, hint in items:
        numbers.append((keys.setdefault(key, len(keys)), chunks.setdefault(chunk, len(chunks)), hint))
    key_numbers, chunk_numbers, hints = np.array(numbers, dtype=np.int64).reshape(-1, 3).T.copy()
    specs: dict[Spec, int] = {}
    of_chunks: list[list[int]] = []
    width = max((len(chunk.size) for chunk in chunks), default=0)
    for kind, spec, start, size in chunks:
        number, dims = (-1, -1) if spec is None else (specs.setdefault(spec, len(specs)), len(size))
        unused = (0,) * (width - len(size))
        of_chunks.append([kind, number, dims, *start, *unused, *size, *unused])
    columns = np.array(of_chunks, dtype=np.int64).reshape(-1, 3 + 2 * width)[chunk_numbers]
    kinds, spec_numbers, dims_of_items = columns[:, :3].T.copy()
    table = Table(list(keys), key_numbers, kinds, spec_numbers, list(specs), planner_data)
    starts, sizes = columns[:, 3 : 3 + width].copy(), columns[:, 3 + width :].copy()
    return Columns(table, dims_of_items, starts, sizes), hints


def row_of(item: WriteItem) -> Row:
    """Returns the row of an item; raises `Unsupported` if columns cannot hold it."""
    index, data = item.index, item.tensor_data
    if (
        not _UNDERSTOOD
        or type(item) is not WriteItem
        or type(index) is not MetadataIndex
        or type(index.fqn) is not str
        or item.type not in _KIND_NUMBERS
        or item.bytes_io_data is not None
        or not (index.index is None or (type(index.index) is int and index.index >= 0))
    ):
        raise Unsupported
    if item.type == WriteItemType.BYTE_IO:
        if data is not None or index.offset is not None or index.index is not None:
            raise Unsupported
        return Row(index.fqn, _OBJECT, -1)
    if type(data) is not TensorWriteData or type(data.chunk) is not ChunkStorageMetadata:
        raise Unsupported
    start, size = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    if index.offset is None or tuple(index.offset) != start or len(start) != len(size):
        raise Unsupported
    hint = -1 if index.index is None else index.index
    chunk = PlannedChunk(_KIND_NUMBERS[item.type], spec_of(data.size, data.properties), start, size)
    return Row(index.fqn, chunk, hint)


def item_of(row: Row) -> WriteItem:
    (kind, spec, start, size), hint = row.chunk, row.hint
    if spec is None:
        return WriteItem(MetadataIndex(row.key), KINDS[kind])
    chunk = ChunkStorageMetadata(torch.Size(start), torch.Size(size))
    data = TensorWriteData(chunk, TensorProperties(*spec.properties), torch.Size(spec.shape))
    return WriteItem(MetadataIndex(row.key, chunk.offsets, None if hint < 0 else hint), KINDS[kind], tensor_data=data)


# --- paths of keys in nested state dicts (planner_data) ---------------------------------------------------------------

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[str | int, ...]).decode


class PackedPaths(NamedTuple):
    """Paths of flattened keys, each as bytes, because a tuple for each would slow down the garbage collector."""

    keys: list[str] | None  # None: those of the plan's items
    paths: list[bytes]  # of each key


class Pickled(NamedTuple):
    """A pickle of planner data that cannot be packed as paths."""

    data: bytes


def pack_paths(planner_data: Any, keys: list[str]) -> PackedPaths | Pickled:
    """Packs planner data for sending: as paths if possible, otherwise as a pickle. ``keys`` are the plan's keys.

    Equal paths give equal bytes, unlike pickles, which depend on the identity of strings.
    """
    if type(planner_data) is dict and _are_paths(planner_data):
        try:
            paths = [_encode(path) for path in planner_data.values()]
        except UnicodeEncodeError:  # a lone surrogate
            pass
        else:
            own = list(planner_data)
            return PackedPaths(None if own == keys else own, paths)
    return Pickled(pickle.dumps(planner_data, pickle.HIGHEST_PROTOCOL))


def with_keys(packed: PackedPaths | Pickled, keys: list[str]) -> PackedPaths | Pickled:
    return packed._replace(keys=keys) if isinstance(packed, PackedPaths) and packed.keys is None else packed


def unpack_paths(packed: PackedPaths | Pickled) -> Any:
    if isinstance(packed, Pickled):
        return pickle.loads(packed.data)
    assert packed.keys is not None
    return {key: _decode(path) for key, path in zip(packed.keys, packed.paths, strict=True)}


def merge_paths(packed: Iterable[PackedPaths | Pickled]) -> dict[str, Any]:
    """Returns the paths of all ranks in torch's order. If several ranks have a key, the lowest rank's path is used."""
    merged: dict[str, Any] = {}
    last = None
    for paths in reversed(list(packed)):
        if paths is last:  # most ranks share one object
            continue
        last = paths
        if isinstance(paths, Pickled):
            merged.update({key: (value,) for key, value in unpack_paths(paths).items()})
        else:
            assert paths.keys is not None
            merged.update(zip(paths.keys, paths.paths, strict=True))
    return {key: _decode(value) if type(value) is bytes else value[0] for key, value in merged.items()}


def _are_paths(planner_data: dict[Any, Any]) -> bool:
    """Returns whether all keys are strings, and all values tuples of strings and of numbers of 64 bits."""
    if set(map(type, planner_data)) - {str} or set(map(type, planner_data.values())) - {tuple}:
        return False
    parts = itertools.chain.from_iterable(planner_data.values())
    others = [part for part in parts if type(part) is not str]  # few parts are numbers: list indices
    return all(type(part) is int and -(2**63) <= part < 2**63 for part in others)


# --- write items of a state dict as rows ------------------------------------------------------------------------------
#
# These are the items of torch's planner, made without most of the objects that torch makes.


def rows_of(state_dict: Mapping[str, Any], *, is_coordinator: bool) -> Iterator[Row]:
    """Yields the rows of a state dict. Holds no reference to a row. Raises as `row_of` and `check_plannable` do.

    torch makes a dozen objects per tensor, and computes which part of a DTensor a rank has. This function calls torch
    once for all tensors that are alike.
    """
    chunks: dict[Any, PlannedChunk] = {}
    for key, value in state_dict.items():
        # Equal for tensors whose items differ only in their keys; None if the items depend on more than this.
        alike: Any = None
        if type(value) in _PLAIN and not value.is_nested and PART_NAMES.isdisjoint(value.__dict__):
            alike = value.shape, _properties(TensorProperties.create_from_tensor(value))
        elif (local := plain_local(value)) is not None and (layout := layout_of(value)) is not None:
            alike = layout, _properties(TensorProperties.create_from_tensor(local))
        chunk = None if alike is None else chunks.get(alike)
        if chunk is not None and type(key) is str:
            yield Row(key, chunk, -1)
            continue
        if isinstance(value, torch.Tensor):
            check_plannable(key, value)
        rows = list(map(row_of, write_items(key, value, is_coordinator=is_coordinator)))
        if alike is not None and len(rows) == 1 and rows[0].hint == -1:
            chunks[alike] = rows[0].chunk
        yield from rows


# --- columns as bytes, which DCP carries from rank to rank ------------------------------------------------------------

_LEVEL = 1  # of zlib's compression: enough, because most numbers repeat
_DTYPES = ("<i1", "<i2", "<i4", "<i8")


@dataclasses.dataclass(frozen=True)
class EncodedColumns:
    digest: bytes
    table: bytes  # the `Table`; equal bytes on ranks with equal tables
    chunks: bytes  # the other columns
    may_refer: bool = False  # the rank retains the columns, and understands a response that refers to them

    def decode_table(self, tables: dict[bytes, Table]) -> Table:
        """Returns the table from ``tables``. If it is not there, decodes the table and adds it."""
        table = tables.get(self.table)
        if table is None:
            keys, numbers, specs, packed = unpack(self.table)
            key_numbers, kinds, spec_numbers = map(unpack_integers, numbers)
            made, data = [spec_of(*spec) for spec in specs], with_keys(packed, keys)
            table = tables[self.table] = Table(keys, key_numbers, kinds, spec_numbers, made, data)
        return table

    def decode(self, tables: dict[bytes, Table]) -> Columns:
        table = self.decode_table(tables)
        width, *packed = unpack(self.chunks)
        dims, starts, sizes = map(unpack_integers, packed)
        return Columns(table, dims, starts.reshape(len(dims), width), sizes.reshape(len(dims), width))


def encode(columns: Columns, *, may_refer: bool = False) -> EncodedColumns:
    """Encodes columns as bytes. Equal columns have equal digests."""
    table = columns.table
    numbers = [pack_integers(column) for column in (table.key_numbers, table.kinds, table.spec_numbers)]
    # `TensorProperties` can pickle memory formats.
    specs = [(spec.shape, TensorProperties(*spec.properties)) for spec in table.specs]
    shared = pack((table.keys, numbers, specs, pack_paths(table.planner_data, table.keys)))
    packed = [pack_integers(column) for column in (columns.dims, columns.starts, columns.sizes)]
    chunks = pack((columns.starts.shape[1], *packed))
    digest = hashlib.blake2b(shared, digest_size=16)
    digest.update(chunks)
    return EncodedColumns(digest.digest(), shared, chunks, may_refer)


def pack(content: object) -> bytes:
    return zlib.compress(pickle.dumps(content, pickle.HIGHEST_PROTOCOL), _LEVEL)


def unpack(data: bytes) -> Any:
    """Unpacks what `pack` packed, on another rank of the same job."""
    return pickle.loads(zlib.decompress(data))


def pack_integers(numbers: Integers) -> tuple[str, bytes]:
    low, high = (int(numbers.min()), int(numbers.max())) if numbers.size else (0, 0)
    dtype = next(name for name in _DTYPES if np.iinfo(name).min <= low and high <= np.iinfo(name).max)
    return dtype, numbers.astype(dtype).tobytes()


def unpack_integers(packed: tuple[str, bytes]) -> Integers:
    return np.frombuffer(packed[1], packed[0]).astype(np.int64)
