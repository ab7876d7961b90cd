"""A view of a checkpoint of any format: its tensors, the places of their chunks, and its objects.

Tensors appear whole, however they were sharded: a region of a tensor is put together from the chunks that it touches.
So a read by regions takes memory for one region, not for a tensor or a checkpoint.
"""

from __future__ import annotations

import functools
import math
import mmap
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from .._formats.catalog import Catalog, check_chunks, check_length
from .._formats.own import read_metadata
from .._formats.recognise import nothing_committed
from .._index.schema import item_key
from .._loading.plan import ReadTarget
from .._loading.run import copy_elements, fetch
from .._runtime.forks import free_in_child
from .._storage.base import Storage
from .._tensor_file.dtypes import dtype_name, host_bytes, named_dtype
from .._tensor_file.encryption import Cipher, check_decryption, unlock
from .._tensor_file.names import (
    StoredItem,
    data_file_rank,
    is_data_file_name,
    is_metadata_file_name,
    metadata_file_name,
)
from .._tensor_file.regions import Region, part_of, regions_of_range
from ..errors import ConversionError, DecryptionError, MetadataError

if TYPE_CHECKING:
    from .._index.schema import SaveRecord
    from .._tensor_file.encryption import DecryptionParams


BLOCK = 32 << 20
"""Bytes of a tensor to read at once: several reads of a disk's or an object store's best size."""

Path = tuple[str | int, ...]
"""The path to a value in the nested state dict: keys of dicts, and indices of lists."""


def key_of(path: Path) -> str:
    """The key of the value at a path in the nested state dict."""
    return ".".join(map(str, path))


class NonStringKey(str):
    """The name of a dict's key that is not a string. DCP's formats have only names; ``torch.save`` keeps the keys."""

    value: Any

    def __new__(cls, value: Any, name: str | None = None) -> NonStringKey:
        made = super().__new__(cls, str(value) if name is None else name)
        made.value = value
        return made


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor."""

    key: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[Region], torch.Tensor]  # reads a region in C order, on the CPU; raises `ReadError`
    chunks: tuple[Chunk, ...] = ()  # empty if the stored bytes are not the tensor's elements

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read_all(self) -> torch.Tensor:
        """Reads all of it; raises `ReadError`."""
        return self.read(whole(self.shape))


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A value that is not a tensor, or a tensor subclass that only its own class can take apart."""

    key: str
    path: Path
    nbytes: int
    # the bytes of ``torch.save``; for a tensor in several chunks, those of each, joined; raises `ReadError`
    read: Callable[[], bytes]
    item: StoredItem | None = None  # the place of the bytes, or of the first chunk; None in other formats
    fault: str = ""  # why it cannot be converted, as the end of a sentence; empty if it can


StoredValue = StoredTensor | StoredObject


@dataclass(frozen=True)
class CheckpointView:
    """A checkpoint of any format."""

    path: str
    format: str
    values: Mapping[str, StoredValue]  # in the checkpoint's order
    saved: float | None = None  # seconds since the epoch, by its own record; None if it has none

    @functools.cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The values that are tensors."""
        return {key: value for key, value in self.values.items() if isinstance(value, StoredTensor)}

    @functools.cached_property
    def objects(self) -> Mapping[str, StoredObject]:
        """The other values."""
        return {key: value for key, value in self.values.items() if isinstance(value, StoredObject)}

    @property
    def paths(self) -> dict[str, Path]:
        """The path of each value in the nested state dict."""
        return {key: value.path for key, value in self.values.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def blocks_of(tensor: StoredTensor, nbytes: int = BLOCK) -> Iterator[Region]:
    """Cuts a tensor into regions of at most ``nbytes`` bytes, in C order. Each is one run of elements."""
    count = math.prod(tensor.shape)
    row = math.prod(tensor.shape[1:])
    step = max(1, nbytes // tensor.dtype.itemsize)
    step -= step % row if 0 < row <= step else 0  # whole rows, if they fit
    for start in range(0, count, step):
        yield from regions_of_range(start, min(start + step, count), tensor.shape)


def read_parts(storage: Storage) -> dict[int | None, Metadata]:
    """Reads a checkpoint's metadata: that of all ranks under the key None, or by rank if each saved for itself.

    Raises `NotCommitted` if there is none, `MetadataError` if it is damaged, or that of a rank is missing, as far as a
    listing shows, and `CheckpointError` if it cannot be read.
    """
    metadata = read_metadata(storage)
    if metadata is not None:
        return {None: metadata}
    parts: dict[int | None, Metadata] = {}
    while (part := read_metadata(storage, len(parts))) is not None:
        parts[len(parts)] = part
    if not parts:
        raise nothing_committed(storage)
    _check_ranks(storage, len(parts))
    return parts


def _check_ranks(storage: Storage, count: int) -> None:
    """Raises `MetadataError` for files of ranks from ``count`` on, whose metadata is lost, or not committed yet."""
    known = {metadata_file_name(rank) for rank in range(count)}
    for name in (file.name for file in storage.listing()[0]):
        is_others = data_file_rank(name) >= count if is_data_file_name(name) else is_metadata_file_name(name)
        if is_others and name not in known:
            raise MetadataError(
                f"{storage.path} lacks {metadata_file_name(count)}, the metadata of rank {count}, although there is "
                f"{name}: the save never finished, or files were lost"
            )


def data_files(parts: Mapping[int | None, Metadata]) -> dict[str, int]:
    """The names and sizes of a checkpoint's data files (see `read_parts`)."""
    return {name: nbytes for part in parts.values() for name, nbytes in part.storage_data["files"].items()}


def saved_at(parts: Mapping[int | None, Metadata]) -> float:
    """The time of a save by the checkpoint's own record, in seconds since the epoch (see `read_parts`)."""
    return float(max(part.storage_data["saved_at"] for part in parts.values())) / 1e9


def record_of(parts: Mapping[int | None, Metadata]) -> SaveRecord | None:
    """The manager's record of a save; None if it was saved without a manager (see `read_parts`)."""
    return next((part.storage_data["record"] for part in parts.values()), None)


def unlock_parts(
    storage: Storage, parts: Mapping[int | None, Metadata], key: DecryptionParams | None
) -> dict[int | None, Cipher | None]:
    """The keys of a checkpoint's parts (see `read_parts`), made from the user's key.

    Raises `DecryptionError` if the key is missing or wrong, or if nothing is encrypted, and `TypeError` if it is none.
    """
    if key is not None:
        check_decryption(key)
    ciphers: dict[int | None, Cipher | None] = {}
    last: Cipher | None = None
    for rank, part in parts.items():
        ciphers[rank] = last = unlock(key, part.storage_data.get("encryption"), storage.path, last)
    return ciphers


def plain_tensor(
    storage: Storage,
    path: Path,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    place: tuple[str, int],
    strides: tuple[tuple[int, ...], int] | None = None,
) -> StoredTensor:
    """Makes a tensor whose elements lie in a file of another format, without digests.

    Its key is made of ``path``. ``place`` is the file, and the offset of the first element; ``strides`` as in `Chunk`.
    """
    key = key_of(path)
    count = math.prod(shape)
    if strides is not None and count:
        count = strides[1] + 1 + sum((n - 1) * step for n, step in zip(shape, strides[0], strict=True))
    item = StoredItem(place[0], key, place[1], count * dtype.itemsize, dtype_name(dtype), "tensor", b"")
    chunk = Chunk(whole(shape), item, strides)
    read = functools.partial(read_region, storage, key, dtype, [chunk], verify=False)
    return StoredTensor(key, path, dtype, shape, read, (chunk,))


def view_of(storage: Storage, path: str, format_name: str, catalog: Catalog) -> CheckpointView:
    """A view of a checkpoint of tensors, by the catalog that loads use."""
    values: dict[str, StoredValue] = {}
    for key, entry in catalog.metadata().state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        origin = torch.Size([0] * len(entry.size))
        index = MetadataIndex(key, origin)
        (pieces,) = catalog.locate([ReadItem(LoadItemType.TENSOR, index, origin, index, origin, entry.size)])
        chunks = tuple(Chunk(piece.part, piece.item) for piece in pieces)
        dtype = entry.properties.dtype
        read = functools.partial(read_region, storage, key, dtype, chunks, verify=False)
        values[key] = StoredTensor(key, (key,), dtype, tuple(entry.size), read, chunks)
    return CheckpointView(path, format_name, values)


def refused(source: str, path: Path, fault: str) -> StoredObject:
    """Makes a value that cannot be read, so that the other values can be converted without it.

    ``source`` is the file, for messages; ``fault`` as in `StoredObject`.
    """
    key = key_of(path)

    def read() -> bytes:
        raise ConversionError(f"{source}: {key!r} {fault}, which cannot be read")

    return StoredObject(key, path, 0, read, fault=fault)


def named_paths(keys: Mapping[Any, Any]) -> dict[Any, tuple[str, Path]]:
    """The name of each key, and its path in the nested state dict, as DCP's planner recorded it.

    ``keys`` has the ``planner_data`` of each key's metadata.
    """
    taken = {key for key in keys if isinstance(key, str)}
    named: dict[Any, tuple[str, Path]] = {}
    for key, planner_data in keys.items():
        if isinstance(key, str):
            named[key] = key, recorded_path(planner_data, key)
            continue
        name = str(key)
        while name in taken:
            name += "_"
        taken.add(name)
        named[key] = name, (NonStringKey(key, name),)
    return named


def recorded_path(planner_data: Any, key: str) -> Path:
    """The path of a key's value in the nested state dict, as DCP's planner recorded it."""
    path = planner_data.get(key) if isinstance(planner_data, dict) else None
    if not isinstance(path, tuple) or any(
        type(part) is not str and not (type(part) is int and 0 <= part < 2**63) for part in path
    ):
        return (key,)
    return path if key_of(path) == key else (key,)


# --- joining chunks into regions --------------------------------------------------------------------------------------

_KEPT_BY_MALLOC = 1 << 20  # bytes
_PIECE = 32 << 20  # bytes of a file to read at once for elements that are not adjacent


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor that is stored by itself.

    ``strides`` are the strides of its elements among the stored ones, and the offset of the first. None: the elements
    are stored in C order, from the start.
    """

    region: Region
    item: StoredItem
    strides: tuple[tuple[int, ...], int] | None = None
    cipher: Cipher | None = None  # None if it is not encrypted, or there is no key


def whole(shape: Sequence[int]) -> Region:
    """All of a tensor."""
    return Region((0,) * len(shape), tuple(shape))


def read_region(
    storage: Storage, key: str, dtype: torch.dtype, chunks: Sequence[Chunk], region: Region, *, verify: bool
) -> torch.Tensor:
    """Puts a region of a tensor together.

    Raises `ReadError` if bytes cannot be read, or with ``verify`` if they do not match their digests, and
    `DecryptionError` if it is encrypted and there is no key.
    """
    target = _empty(region.size, dtype)
    targets: dict[Cipher | None, list[ReadTarget]] = defaultdict(list)
    for chunk in chunks:
        common = region.intersect(chunk.region)
        if common is None:
            continue
        part = part_of(target, common, region)
        if chunk.strides is not None:
            copy_elements(part, part_of(STRIDED.read(storage, key, chunk, common), common, chunk.region))
            continue
        if chunk.item.nonce_and_macs and chunk.cipher is None:
            raise DecryptionError(f"{storage.path}: {key!r} is encrypted: give its key (--key-file)")
        targets[chunk.cipher].append(
            ReadTarget.of(key, chunk.item, chunk.region.size, common.within(chunk.region), part)
        )
    for cipher, parts in targets.items():
        fetch(storage, parts, verify=verify, cipher=cipher)
    return target


def _empty(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Makes a tensor whose memory returns to the system when it is freed. malloc would keep some for each thread."""
    nbytes = math.prod(size) * dtype.itemsize
    if nbytes < _KEPT_BY_MALLOC:
        return torch.empty(size, dtype=dtype, device="cpu")
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).view(dtype).view(size)


class StridedCache:
    """Keeps the last chunk that was read whole because its elements are not stored in C order.

    If a tensor is read in blocks, the next block needs the chunk, too.
    """

    def __init__(self) -> None:
        self._lock = free_in_child(threading.Lock())
        self._chunk: Chunk | None = None
        self._elements: torch.Tensor | None = None

    def read(self, storage: Storage, key: str, chunk: Chunk, region: Region) -> torch.Tensor:
        """Reads the whole chunk of a region. After the region at its end, the chunk is dropped."""
        with self._lock:
            elements = self._elements if self._chunk is chunk else None
            self._chunk = self._elements = None  # first, so that two are never in memory
            if elements is None:
                elements = _read_strided(storage, key, chunk)
            ends = zip(region.start, region.size, chunk.region.start, chunk.region.size, strict=True)
            if any(a + n != b + m for a, n, b, m in ends):
                self._chunk, self._elements = chunk, elements
        return elements


STRIDED = StridedCache()


def _read_strided(storage: Storage, key: str, chunk: Chunk) -> torch.Tensor:
    """Reads a whole chunk whose elements are not stored in C order."""
    assert chunk.strides is not None
    strides, first = chunk.strides
    dtype = named_dtype(chunk.item.dtype)
    line = Chunk(Region((0,), (chunk.item.length // dtype.itemsize,)), chunk.item)

    def read_line(start: int, count: int) -> torch.Tensor:
        return read_region(storage, key, dtype, [line], Region((start,), (count,)), verify=False)

    if line.region.size[0] <= math.prod(chunk.region.size):
        return read_line(0, line.region.size[0]).as_strided(chunk.region.size, strides, first)
    # For example a few columns of a large matrix: only these stay in memory, not the bytes between them.
    elements = _empty(chunk.region.size, dtype)
    _gather(elements, strides, first, read_line)
    return elements


def _gather(
    target: torch.Tensor, strides: tuple[int, ...], first: int, read_line: Callable[[int, int], torch.Tensor]
) -> None:
    """Reads elements that are not adjacent, in pieces: by halves, quarters, and so on."""
    extents = [(n - 1) * step for n, step in zip(target.shape, strides, strict=True)]
    count = 1 + sum(extents)
    if count * target.itemsize <= _PIECE:
        copy_elements(target, read_line(first, count).as_strided(target.shape, strides, 0))
        return
    dim = max(range(len(extents)), key=extents.__getitem__)
    half = target.shape[dim] // 2
    _gather(target.narrow(dim, 0, half), strides, first, read_line)
    _gather(target.narrow(dim, half, target.shape[dim] - half), strides, first + half * strides[dim], read_line)


# --- values of this package's checkpoints -----------------------------------------------------------------------------
#
# With ``use_collectives=False`` no rank knows what the other ranks save. If they have saved different chunks of a
# tensor, these make up the tensor. Equal values become one value. If the values of a key differ, all of them appear,
# under keys that begin with the rank, such as ``rank1.generator``.

_OF_SUBCLASS = "is a tensor of a subclass, which only its own class can take apart"


def view_checkpoint(
    storage: Storage,
    parts: Mapping[int | None, Metadata],
    ciphers: Mapping[int | None, Cipher | None] | None = None,
) -> CheckpointView:
    """Opens a view of a checkpoint of this package, with ``parts`` of `read_parts` and ``ciphers`` of `unlock_parts`.

    Raises `MetadataError`, naming the key, if the stored chunks of a tensor do not make it up. Without ciphers, reading
    encrypted values raises `DecryptionError`.
    """
    stored = _values_of_ranks(storage, parts, ciphers or {})
    values: dict[str, StoredValue] = {}
    for stored_key, (key, path) in named_paths({key: value.planner_data for key, value in stored.items()}).items():
        value = stored[stored_key]
        chunks = tuple(value.chunks.values())
        if value.is_tensor:
            check_chunks(storage.path, key, value.entry.size, [chunk.region for chunk in chunks])
            dtypes = [chunk.item.dtype for chunk in chunks if chunk.item.length]
            dtype = named_dtype(dtypes[0]) if dtypes else value.entry.properties.dtype
            read = functools.partial(read_region, storage, key, dtype, chunks, verify=True)
            if value.conflict:
                read, chunks = functools.partial(_refuse, f"{storage.path}: {value.conflict}"), ()
            values[key] = StoredTensor(key, path, dtype, tuple(value.entry.size), read, chunks)
        else:
            nbytes = sum(chunk.item.length for chunk in chunks)
            read_object = functools.partial(_read_bytes, storage, key, chunks)
            item = chunks[0].item if chunks else None
            fault = _OF_SUBCLASS if item is not None and item.kind == "wrapper" else ""
            values[key] = StoredObject(key, path, nbytes, read_object, item, fault)
    return CheckpointView(storage.path, "dcp_tensorizer", values, saved_at(parts))


@dataclass(frozen=True, slots=True)
class _Value:
    """A value, as one rank or all ranks together have stored it."""

    planner_data: Any  # DCP's, with the key's path
    entry: Any  # the value's entry in DCP's metadata
    chunks: dict[torch.Size | None, Chunk]  # by their offset in the value
    conflict: str = ""  # why it cannot be read

    @property
    def is_tensor(self) -> bool:
        kinds = {chunk.item.kind for chunk in self.chunks.values()}
        return self._size is not None and kinds <= {"tensor"}

    @property
    def is_whole(self) -> bool:
        held = sum(math.prod(chunk.region.size) for chunk in self.chunks.values())
        return self._size is None or held == math.prod(self._size)

    def may_be_one_with(self, other: _Value) -> bool:
        """Returns whether both are objects, or both are chunks of tensors of one shape."""
        return self._size == other._size

    @property
    def _size(self) -> torch.Size | None:
        return self.entry.size if isinstance(self.entry, TensorStorageMetadata) else None


def _values_of_ranks(
    storage: Storage, parts: Mapping[int | None, Metadata], ciphers: Mapping[int | None, Cipher | None]
) -> dict[Any, _Value]:
    of_ranks: dict[Any, dict[int | None, _Value]] = {}
    for rank, metadata in parts.items():
        for key, entry in metadata.state_dict_metadata.items():
            chunks = _chunks(storage, metadata, key, entry, ciphers.get(rank))
            of_ranks.setdefault(key, {})[rank] = _Value(metadata.planner_data, entry, chunks)
    values: dict[Any, _Value] = {}
    apart: dict[Any, dict[int | None, _Value]] = {}
    for key, own in of_ranks.items():
        if _are_one(storage, str(key), list(own.values())):
            values[key] = _put_together(list(own.values()))
        elif all(value.is_whole for value in own.values()):
            apart[key] = own
        else:
            ranks = ", ".join(map(str, own))
            conflict = f"of {key!r}, ranks {ranks} saved for themselves (use_collectives=False) parts that differ"
            values[key] = replace(_put_together(list(own.values())), conflict=conflict)
    for key, own in apart.items():
        for rank, value in own.items():
            name = f"rank{rank}.{key}"
            while name in of_ranks or name in values:
                name += "_"
            path = recorded_path(value.planner_data, key) if isinstance(key, str) else (key,)
            values[name] = replace(value, planner_data={name: (f"rank{rank}", *path)})
    return values


def _are_one(storage: Storage, key: str, values: Sequence[_Value]) -> bool:
    """Returns whether ranks have stored parts or copies of the same value."""
    one = _put_together(values)
    return all(
        values[0].may_be_one_with(value)
        and all(_are_same(storage, key, one.chunks[place], chunk) for place, chunk in value.chunks.items())
        for value in values
    )


def _put_together(values: Sequence[_Value]) -> _Value:
    """Puts a value together from the ranks' parts. If several ranks have a part, the first one's is used."""
    chunks: dict[torch.Size | None, Chunk] = {}
    for value in values:
        if values[0].may_be_one_with(value):
            chunks = value.chunks | chunks
    return replace(values[0], chunks=chunks)


def _are_same(storage: Storage, key: str, a: Chunk, b: Chunk) -> bool:
    """Returns whether two chunks hold the same bytes."""
    if a is b:
        return True
    if a.region != b.region or (a.item.length, a.item.dtype, a.item.kind) != (b.item.length, b.item.dtype, b.item.kind):
        return False
    if not a.item.nonce_and_macs and not b.item.nonce_and_macs:
        return a.item.digests == b.item.digests
    if a.cipher is None or b.cipher is None:  # digests are of encrypted bytes, so that equality shows only with the key
        return True
    return _read_bytes(storage, key, [a]) == _read_bytes(storage, key, [b])


def _refuse(error: str, region: Region) -> torch.Tensor:
    raise ConversionError(error)


def _chunks(
    storage: Storage, metadata: Metadata, key: Any, entry: Any, cipher: Cipher | None
) -> dict[torch.Size | None, Chunk]:
    """The stored parts of a value, by their offset in it."""
    sizes: dict[torch.Size | None, tuple[int, ...]] = {None: ()}
    if isinstance(entry, TensorStorageMetadata):
        sizes = {chunk.offsets: tuple(chunk.sizes) for chunk in entry.chunks}
    chunks: dict[torch.Size | None, Chunk] = {}
    for offset, size in sizes.items():
        item = metadata.storage_data["items"].get(item_key(MetadataIndex(key, offset)))
        if item is None:
            raise MetadataError(f"{storage.path} has no data for {key!r} at offset {offset}")
        if item.kind == "tensor":
            check_length(storage.path, key, item, size)
        chunks[offset] = Chunk(Region(tuple(offset or ()), size), item, cipher=cipher)
    return chunks


def _read_bytes(storage: Storage, key: str, chunks: Sequence[Chunk]) -> bytes:
    """The stored bytes of some chunks, joined."""
    content = bytearray()
    for chunk in chunks:
        dtype = named_dtype(chunk.item.dtype)
        line = replace(chunk, region=Region((0,), (chunk.item.length // dtype.itemsize,)))
        content += host_bytes(read_region(storage, key, dtype, [line], line.region, verify=True))
    return bytes(content)
