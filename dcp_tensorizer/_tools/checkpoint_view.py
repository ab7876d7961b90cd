"""What a checkpoint holds, whatever its format: its tensors, where the bytes of their chunks lie, and its objects.

Tensors are whole here, however they were sharded: any region of one is put together from the chunks that it touches. So
reading by regions needs memory for a region, and not for a tensor or a checkpoint.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from .._format.chunks import Region, regions_of_range
from .._format.encryption import Cipher, unlock
from .._format.layout import StoredItem, data_file_rank, is_data_file_name, is_metadata_file_name, metadata_file_name
from .._loading.directory_format import nothing_committed
from .._loading.metadata_reader import read_metadata
from .._memory.tensor_bytes import dtype_name
from .._storage.base import Storage
from ..errors import ConversionError, MetadataError
from .chunk_reader import Chunk, read_region, whole

if TYPE_CHECKING:
    from .._format.encryption import DecryptionParams

__all__ = [
    "BLOCK",
    "CheckpointView",
    "NonStringKey",
    "StoredObject",
    "StoredTensor",
    "StoredValue",
    "blocks_of",
    "data_files",
    "named_paths",
    "plain_tensor",
    "read_parts",
    "recorded_path",
    "refused",
    "saved_at",
    "unlock_parts",
]

BLOCK = 32 << 20
"""Bytes of a tensor that are worth reading at once: several reads of a disk's or an object store's best size."""

Path = tuple[str | int, ...]
"""Where a value is in the nested state dict: keys of dicts, and indices of lists."""


class NonStringKey(str):
    """The name of a dict's key that is no string: DCP's formats have only the name, ``torch.save`` files have the key.

    Attributes:
        value: The key.
    """

    value: Any

    def __new__(cls, value: Any, name: str | None = None) -> NonStringKey:
        made = super().__new__(cls, str(value) if name is None else name)
        made.value = value
        return made


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor.

    Attributes:
        read: Gives a region of it, in C order on the CPU. Raises `ReadError`.
        chunks: Where it is; empty if its stored bytes are not its elements.
    """

    key: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[Region], torch.Tensor]
    chunks: tuple[Chunk, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read_all(self) -> torch.Tensor:
        """All of it; raises `ReadError`."""
        return self.read(whole(self.shape))


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A value that is not a tensor, or a tensor of a subclass that only its own class can take apart.

    Attributes:
        read: Gives what ``torch.save`` made of it; of a tensor in several chunks, what it made of each, joined. Raises
            `ReadError`.
        item: Where that, or the first chunk, is; None in other formats.
        fault: Why it cannot be converted, as the end of a sentence; empty if it can.
    """

    key: str
    path: Path
    nbytes: int
    read: Callable[[], bytes]
    item: StoredItem | None = None
    fault: str = ""


StoredValue = StoredTensor | StoredObject


@dataclass(frozen=True)
class CheckpointView:
    """A checkpoint.

    Attributes:
        values: By key, in the checkpoint's order.
        saved: When, by its own record, in seconds since the epoch; None if it has none.
    """

    path: str
    format: str
    values: Mapping[str, StoredValue]
    saved: float | None = None

    @functools.cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Those of the values that are tensors."""
        return {key: value for key, value in self.values.items() if isinstance(value, StoredTensor)}

    @functools.cached_property
    def objects(self) -> Mapping[str, StoredObject]:
        """The other values."""
        return {key: value for key, value in self.values.items() if isinstance(value, StoredObject)}

    @property
    def paths(self) -> dict[str, Path]:
        """Where each value is in the nested state dict."""
        return {key: value.path for key, value in self.values.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def blocks_of(tensor: StoredTensor, nbytes: int = BLOCK) -> Iterator[Region]:
    """Cuts a tensor into regions of no more than ``nbytes`` bytes, which are runs of it in C order, in that order."""
    count = math.prod(tensor.shape)
    row = math.prod(tensor.shape[1:])
    step = max(1, nbytes // tensor.dtype.itemsize)
    step -= step % row if 0 < row <= step else 0  # whole rows, where they fit
    for start in range(0, count, step):
        yield from regions_of_range(start, min(start + step, count), tensor.shape)


def read_parts(storage: Storage) -> dict[int | None, Metadata]:
    """A checkpoint's metadata: of all ranks (None), or by rank where each saved for itself.

    Raises:
        NotCommitted: there is none.
        MetadataError: it is damaged, or a rank's is missing, as far as a listing shows.
        CheckpointError: it cannot be read.
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
    """Fails if there are files of a rank from ``count`` on: its metadata is lost, or was not yet committed."""
    known = {metadata_file_name(rank) for rank in range(count)}
    for name in (file.name for file in storage.listing()[0]):
        is_others = data_file_rank(name) >= count if is_data_file_name(name) else is_metadata_file_name(name)
        if is_others and name not in known:
            raise MetadataError(
                f"{storage.path} lacks {metadata_file_name(count)}, the metadata of rank {count}, although there is "
                f"{name}: the save never finished, or files were lost"
            )


def data_files(parts: Mapping[int | None, Metadata]) -> dict[str, int]:
    """The names of a checkpoint's data files, and the bytes in each (see `read_parts`)."""
    return {name: nbytes for part in parts.values() for name, nbytes in part.storage_data["files"].items()}


def saved_at(parts: Mapping[int | None, Metadata]) -> float:
    """When a checkpoint was saved, by its own record: seconds since the epoch (see `read_parts`)."""
    return float(max(part.storage_data["saved_at"] for part in parts.values())) / 1e9


def unlock_parts(
    storage: Storage, parts: Mapping[int | None, Metadata], key: DecryptionParams | None
) -> dict[int | None, Cipher | None]:
    """The keys of a checkpoint's parts (see `read_parts`), made from the one that the user gave.

    Raises:
        DecryptionError: there is no key, a wrong one, or one too many.
    """
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
    """A tensor whose elements lie in some file of another format, without digests.

    Args:
        storage: Where the file is.
        path: In the nested state dict; its key is made of that.
        dtype, shape: The tensor's.
        place: File, and first byte of its elements there.
        strides: See `Chunk.strides`.
    """
    key = ".".join(map(str, path))
    count = math.prod(shape)
    if strides is not None and count:
        count = strides[1] + 1 + sum((n - 1) * step for n, step in zip(shape, strides[0], strict=True))
    item = StoredItem(place[0], key, place[1], count * dtype.itemsize, dtype_name(dtype), "tensor", b"")
    chunk = Chunk(whole(shape), item, strides)
    read = functools.partial(read_region, storage, key, dtype, [chunk], verify=False)
    return StoredTensor(key, path, dtype, shape, read, (chunk,))


def refused(source: str, path: Path, fault: str) -> StoredObject:
    """A value of a file that cannot be read: whoever leaves it out can convert the others.

    Args:
        source: The file, for messages.
        path: In the nested state dict.
        fault: See `StoredObject.fault`.
    """
    key = ".".join(map(str, path))

    def read() -> bytes:
        raise ConversionError(f"{source}: {key!r} {fault}, which cannot be read")

    return StoredObject(key, path, 0, read, fault=fault)


def named_paths(keys: Mapping[Any, Any]) -> dict[Any, tuple[str, Path]]:
    """The name of each key, and where in the nested state dict its value was, as DCP's planner recorded it.

    Args:
        keys: Keys, each with the ``planner_data`` of its metadata.
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
    """Where in the nested state dict the value of a key was, as DCP's planner recorded it."""
    path = planner_data.get(key) if isinstance(planner_data, dict) else None
    if not isinstance(path, tuple) or any(
        type(part) is not str and not (type(part) is int and 0 <= part < 2**63) for part in path
    ):
        return (key,)
    return path if ".".join(map(str, path)) == key else (key,)
