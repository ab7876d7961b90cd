"""A view of a checkpoint of any format: its unsharded tensors, the locations of their chunks, and its objects."""

from __future__ import annotations

import functools
import math
import mmap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from .._formats.catalog import Catalog, Piece, check_chunks, check_length, no_data
from .._formats.own import read_metadata
from .._formats.recognise import nothing_committed
from .._index.schema import item_key
from .._loading.plan import ReadTarget
from .._loading.run import fetch
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
"""Bytes of a tensor to read at once: several reads of the size at which disks and object stores are fastest."""

Path = tuple[str | int, ...]
"""The path of a value in the nested state dict: dict keys and list indices."""


def key_of(path: Path) -> str:
    return ".".join(map(str, path))


class NonStringKey(str):
    """The name of a dict key that is not a string. DCP's formats store only names; ``torch.save`` stores the keys."""

    value: Any

    def __new__(cls, value: Any, name: str | None = None) -> NonStringKey:
        made = super().__new__(cls, str(value) if name is None else name)
        made.value = value
        return made


@dataclass(frozen=True, slots=True)
class StoredTensor:
    key: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[Region], torch.Tensor]  # reads a region into a CPU tensor in C order; raises `CheckpointError`
    # the stored chunks, which cover the whole tensor; empty if the chunks of several ranks contradict each other, or if
    # `read` casts the tensor or returns one tensor-parallel rank's part
    chunks: tuple[Piece, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read_all(self) -> torch.Tensor:
        return self.read(whole(self.shape))


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A value that is not a tensor, or a tensor whose elements this package cannot read."""

    key: str
    path: Path
    nbytes: int
    # the ``torch.save`` bytes; for a tensor in several chunks, those of all chunks joined; raises `CheckpointError`
    read: Callable[[], bytes]
    # the location of the bytes, or of the first chunk; None if the format is not this package's
    item: StoredItem | None = None
    fault: str = ""  # why it cannot be converted, as the end of a sentence that begins with the key; otherwise empty


StoredValue = StoredTensor | StoredObject


@dataclass(frozen=True)
class CheckpointView:
    path: str
    format: str
    values: Mapping[str, StoredValue]  # in the checkpoint's order
    saved: float | None = None  # the time of the save in seconds since the epoch, if the checkpoint records it

    @functools.cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return {key: value for key, value in self.values.items() if isinstance(value, StoredTensor)}

    @functools.cached_property
    def objects(self) -> Mapping[str, StoredObject]:
        return {key: value for key, value in self.values.items() if isinstance(value, StoredObject)}

    @property
    def paths(self) -> dict[str, Path]:
        return {key: value.path for key, value in self.values.items()}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def blocks_of(tensor: StoredTensor, nbytes: int = BLOCK) -> Iterator[Region]:
    """Splits a tensor into regions of at most ``nbytes`` bytes, in C order. Each region is one run of elements."""
    count = math.prod(tensor.shape)
    row = math.prod(tensor.shape[1:])
    step = max(1, nbytes // tensor.dtype.itemsize)
    step -= step % row if 0 < row <= step else 0  # whole rows, if they fit
    for start in range(0, count, step):
        yield from regions_of_range(start, min(start + step, count), tensor.shape)


def read_parts(storage: Storage) -> dict[int | None, Metadata]:
    """Reads a checkpoint's metadata: a dict with the key None, or with a key per rank if each rank saved by itself.

    Raises `NotCommitted` if there is no metadata, `MetadataError` if it is damaged or if the listing shows files of a
    rank without metadata, and `CheckpointError` if it cannot be read.
    """
    metadata = read_metadata(storage)
    if metadata is not None:
        return {None: metadata}
    parts: dict[int | None, Metadata] = {}
    while (part := read_metadata(storage, len(parts))) is not None:
        parts[len(parts)] = part
    if not parts:
        raise nothing_committed(storage)
    # Files of higher ranks belong to metadata that is lost or not committed yet.
    count = len(parts)
    known = {metadata_file_name(rank) for rank in range(count)}
    for name in (file.name for file in storage.listing()[0]):
        is_further = data_file_rank(name) >= count if is_data_file_name(name) else is_metadata_file_name(name)
        if is_further and name not in known:
            raise MetadataError(
                f"{storage.path} has {name}, but lacks {metadata_file_name(count)}, the metadata of rank {count}: the "
                f"save has not finished, or files were lost. Load another checkpoint."
            )
    return parts


def data_files(parts: Mapping[int | None, Metadata]) -> dict[str, int]:
    """Returns the sizes of a checkpoint's data files by name."""
    return {name: nbytes for part in parts.values() for name, nbytes in part.storage_data["files"].items()}


def saved_at(parts: Mapping[int | None, Metadata]) -> float:
    """Returns the recorded time of a save, in seconds since the epoch."""
    return float(max(part.storage_data["saved_at"] for part in parts.values())) / 1e9


def record_of(parts: Mapping[int | None, Metadata]) -> SaveRecord | None:
    return next((part.storage_data["record"] for part in parts.values()), None)


def unlock_parts(
    storage: Storage, parts: Mapping[int | None, Metadata], key: DecryptionParams | None
) -> dict[str, Cipher | None]:
    """Derives the cipher of each data file from the user's key."""
    if key is not None:
        check_decryption(key)
    ciphers: dict[str, Cipher | None] = {}
    last: Cipher | None = None
    for part in parts.values():
        last = unlock(key, part.storage_data.get("encryption"), storage.path, last)
        ciphers |= dict.fromkeys(part.storage_data["files"], last)
    return ciphers


def plain_tensor(
    storage: Storage, path: Path, dtype: torch.dtype, shape: tuple[int, ...], file: str, offset: int
) -> StoredTensor:
    """Makes a tensor of a format that stores elements in C order, without digests. The key is that of ``path``."""
    key, own = key_of(path), whole(shape)
    nbytes = math.prod(shape) * dtype.itemsize
    piece = Piece(StoredItem(file, key, offset, nbytes, dtype_name(dtype), "tensor", b""), shape, own, own)
    read = functools.partial(read_region, storage, key, dtype, [piece], verify=False)
    return StoredTensor(key, path, dtype, shape, read, (piece,))


def view_of(storage: Storage, path: str, format_name: str, catalog: Catalog) -> CheckpointView:
    """Opens a view of a checkpoint without objects, from the catalog that loads use."""
    values: dict[str, StoredValue] = {}
    for key, entry in catalog.metadata().state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        origin = torch.Size([0] * len(entry.size))
        index = MetadataIndex(key, origin)
        (pieces,) = catalog.locate([ReadItem(LoadItemType.TENSOR, index, origin, index, origin, entry.size)])
        dtype = entry.properties.dtype
        read = functools.partial(read_region, storage, key, dtype, pieces, verify=False)
        values[key] = StoredTensor(key, (key,), dtype, tuple(entry.size), read, tuple(pieces))
    return CheckpointView(path, format_name, values)


def refused(source: str, path: Path, fault: str) -> StoredObject:
    """Makes a value that cannot be read, so that the other values can be converted.

    ``source`` is the file, for messages; ``fault`` is as in `StoredObject`.
    """
    key = key_of(path)

    def read() -> bytes:
        raise ConversionError(f"{source}: {key!r} {fault}, and cannot be read")

    return StoredObject(key, path, 0, read, fault=fault)


def named_paths(keys: Mapping[Any, Any]) -> dict[Any, tuple[str, Path]]:
    """Returns the name of each key, and the path that DCP's planner recorded for it.

    ``keys`` maps each key to the ``planner_data`` of its metadata.
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
    """Returns the path that DCP's planner recorded for a key. If there is none, returns the key as one part."""
    path = planner_data.get(key) if isinstance(planner_data, dict) else None
    if not isinstance(path, tuple) or any(
        type(part) is not str and not (type(part) is int and 0 <= part < 2**63) for part in path
    ):
        return (key,)
    return path if key_of(path) == key else (key,)


# --- joining chunks into regions --------------------------------------------------------------------------------------

_KEPT_BY_MALLOC = 1 << 20  # bytes: smaller tensors are allocated by malloc


def whole(shape: Sequence[int]) -> Region:
    return Region((0,) * len(shape), tuple(shape))


def run_of(item: StoredItem) -> Piece:
    """Returns all elements of an item as one run, in stored order."""
    run = Region((0,), (item.length // named_dtype(item.dtype).itemsize,))
    return Piece(item, run.size, run, run)


def read_region(
    storage: Storage,
    key: str,
    dtype: torch.dtype,
    pieces: Sequence[Piece],
    region: Region,
    *,
    verify: bool,
    ciphers: Mapping[str, Cipher | None] = MappingProxyType({}),
) -> torch.Tensor:
    """Assembles a region of a tensor from the pieces of the whole tensor. ``ciphers`` maps files to ciphers."""
    target = empty(region.size, dtype)
    targets: dict[Cipher | None, list[ReadTarget]] = defaultdict(list)
    for item, shape, stored, own in pieces:
        common = region.intersect(own)
        if common is None:
            continue
        cipher = ciphers.get(item.file)
        if item.nonce_and_macs and cipher is None:
            raise DecryptionError(f"{storage.path}: {key!r} is encrypted. Pass the key (--key-file).")
        here, part = common.within(own).moved(stored.start), part_of(target, common, region)
        targets[cipher].append(ReadTarget.of(key, item, shape, here, part))
    for cipher, of_cipher in targets.items():
        fetch(storage, of_cipher, verify=verify, cipher=cipher)
    return target


def empty(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocates a tensor. When a large tensor is freed, its memory returns to the system; malloc would retain some."""
    nbytes = math.prod(size) * dtype.itemsize
    if nbytes < _KEPT_BY_MALLOC:
        return torch.empty(size, dtype=dtype, device="cpu")
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).view(dtype).view(size)


# --- values of this package's checkpoints -----------------------------------------------------------------------------
#
# With ``use_collectives=False``, no rank knows what the other ranks save. The view combines the chunks of a tensor, and
# merges equal values. If whole values of a key differ, each gets a key with its rank: ``rank1.generator``. If chunks of
# a tensor contradict each other, reading the tensor fails.

_OF_SUBCLASS = "is a tensor of a subclass whose elements only the subclass itself can read"


def view_checkpoint(
    storage: Storage,
    parts: Mapping[int | None, Metadata],
    ciphers: Mapping[str, Cipher | None] = MappingProxyType({}),
) -> CheckpointView:
    """Opens a view of a checkpoint of this package. `read_parts` returns ``parts``, and `unlock_parts` ``ciphers``.

    Raises `MetadataError`, naming the key, if the chunks of a tensor do not cover it exactly. Without ciphers, reading
    an encrypted value raises `DecryptionError`.
    """
    stored = _values_of_ranks(storage, parts, ciphers)
    values: dict[str, StoredValue] = {}
    for stored_key, (key, path) in named_paths({key: value.planner_data for key, value in stored.items()}).items():
        value = stored[stored_key]
        pieces = tuple(value.pieces.values())
        if value.size is not None and all(piece.item.kind == "tensor" for piece in pieces):
            check_chunks(storage.path, key, value.size, [piece.part for piece in pieces])
            dtypes = [piece.item.dtype for piece in pieces if piece.item.length]
            dtype = named_dtype(dtypes[0]) if dtypes else value.entry.properties.dtype
            read = functools.partial(read_region, storage, key, dtype, pieces, verify=True, ciphers=ciphers)
            if value.conflict:
                read, pieces = functools.partial(_refuse, f"{storage.path}: {value.conflict}"), ()
            values[key] = StoredTensor(key, path, dtype, tuple(value.size), read, pieces)
        else:
            nbytes = sum(piece.item.length for piece in pieces)
            read_object = functools.partial(_read_bytes, storage, key, pieces, ciphers)
            item = pieces[0].item if pieces else None
            fault = _OF_SUBCLASS if item is not None and item.kind == "wrapper" else ""
            values[key] = StoredObject(key, path, nbytes, read_object, item, fault)
    return CheckpointView(storage.path, "dcp_tensorizer", values, saved_at(parts))


@dataclass(frozen=True, slots=True)
class _Value:
    """A value as stored by one rank, or merged from several."""

    planner_data: Any
    entry: Any  # in DCP's metadata
    pieces: dict[torch.Size | None, Piece]  # its chunks, by offset in the value
    conflict: str = ""  # why it cannot be read

    @property
    def size(self) -> torch.Size | None:
        return self.entry.size if isinstance(self.entry, TensorStorageMetadata) else None

    @property
    def is_whole(self) -> bool:
        stored = sum(math.prod(piece.shape) for piece in self.pieces.values())
        return self.size is None or stored == math.prod(self.size)


def _values_of_ranks(
    storage: Storage, parts: Mapping[int | None, Metadata], ciphers: Mapping[str, Cipher | None]
) -> dict[Any, _Value]:
    of_ranks: dict[Any, dict[int | None, _Value]] = {}
    for rank, metadata in parts.items():
        for key, entry in metadata.state_dict_metadata.items():
            pieces = _pieces(storage.path, metadata, key, entry)
            of_ranks.setdefault(key, {})[rank] = _Value(metadata.planner_data, entry, pieces)
    values: dict[Any, _Value] = {}
    apart: dict[Any, dict[int | None, _Value]] = {}
    for key, own in of_ranks.items():
        first = next(iter(own.values()))
        of_one_size = [value for value in own.values() if value.size == first.size]
        pieces = {}
        for value in of_one_size:
            pieces = value.pieces | pieces  # if several ranks have a chunk, the lowest rank's counts
        together = replace(first, pieces=pieces)
        if len(of_one_size) == len(own) and all(
            _are_same(storage, str(key), pieces[offset], piece, ciphers)
            for value in own.values()
            for offset, piece in value.pieces.items()
        ):
            values[key] = together
        elif all(value.is_whole for value in own.values()):
            apart[key] = own
        else:
            ranks = ", ".join(map(str, own))
            differ = (
                f"ranks {ranks} each saved all or part of {key!r} (use_collectives=False), but the data does not match."
            )
            values[key] = replace(together, conflict=f"{differ} To convert the other keys, leave it out (--exclude).")
    for key, own in apart.items():
        for rank, value in own.items():
            name = f"rank{rank}.{key}"
            while name in of_ranks or name in values:
                name += "_"
            path = recorded_path(value.planner_data, key) if isinstance(key, str) else (key,)
            values[name] = replace(value, planner_data={name: (f"rank{rank}", *path)})
    return values


def _are_same(storage: Storage, key: str, a: Piece, b: Piece, ciphers: Mapping[str, Cipher | None]) -> bool:
    """Returns whether two chunks hold the same bytes. Without the key of an encrypted chunk, assumes that they do."""
    if a is b:
        return True
    if a.part != b.part or (a.item.length, a.item.dtype, a.item.kind) != (b.item.length, b.item.dtype, b.item.kind):
        return False
    if not a.item.nonce_and_macs and not b.item.nonce_and_macs:
        return a.item.digests == b.item.digests
    if ciphers.get(a.item.file) is None or ciphers.get(b.item.file) is None:
        return True  # digests are of encrypted bytes: comparing the values needs the key
    return _read_bytes(storage, key, [a], ciphers) == _read_bytes(storage, key, [b], ciphers)


def _refuse(error: str, region: Region) -> torch.Tensor:
    raise ConversionError(error)


def _pieces(path: str, metadata: Metadata, key: Any, entry: Any) -> dict[torch.Size | None, Piece]:
    sizes: dict[torch.Size | None, tuple[int, ...]] = {None: ()}
    if isinstance(entry, TensorStorageMetadata):
        sizes = {chunk.offsets: tuple(chunk.sizes) for chunk in entry.chunks}
    pieces: dict[torch.Size | None, Piece] = {}
    for offset, size in sizes.items():
        item = metadata.storage_data["items"].get(item_key(MetadataIndex(key, offset)))
        if item is None:
            raise no_data(path, key, offset)
        if item.kind == "tensor":
            check_length(path, key, item, size)
        pieces[offset] = Piece(item, size, whole(size), Region(tuple(offset or ()), size))
    return pieces


def _read_bytes(storage: Storage, key: str, pieces: Sequence[Piece], ciphers: Mapping[str, Cipher | None]) -> bytes:
    content = bytearray()
    for run in (run_of(piece.item) for piece in pieces):
        dtype = named_dtype(run.item.dtype)
        content += host_bytes(read_region(storage, key, dtype, [run], run.part, verify=True, ciphers=ciphers))
    return bytes(content)
