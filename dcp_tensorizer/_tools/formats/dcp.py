"""torch's own DCP format, read by ranges and without its pickles' powers, and written a tensor at a time.

Its data files are what ``torch.save`` made of each write item, one after the other; ``.metadata`` is a pickle that
says where each is.
"""

from __future__ import annotations

import functools
import io
import mmap
import os
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from ..._format.chunks import Region
from ..._format.metadata import unpickle
from ..._loading.scatter import copy_elements
from ..._loading.validate import check_chunks, chunk_regions
from ..._storage.base import Storage
from ..._torch_compat import FsspecWriter, StorageInfo
from ...errors import CheckpointError, ConversionError, MetadataError, ReadError, WriteError
from ..checkpoint_view import CheckpointView, Path, StoredObject, StoredTensor, value_path
from ..chunk_reader import Chunk, read_region, whole
from .torch_file import FileView, load_fake, locate, nested

__all__ = ["read_checkpoint", "write_checkpoint"]

_MORE_CLASSES: dict[tuple[str, str], Any] = {
    (cls.__module__, cls.__qualname__): cls for cls in (MetadataIndex, StorageInfo)
} | {
    # A path is only a text here. It is a class of another module in each release of Python.
    (module, name): pathlib.PurePosixPath
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "PurePosixPath")
}


def read_checkpoint(storage: Storage, pickled: bytes) -> CheckpointView:
    """The contents of a checkpoint that torch's own writer made.

    Args:
        storage: Its directory.
        pickled: Its ``.metadata``.

    Raises:
        MetadataError: that is damaged, or describes what this cannot read, or no file holds.
        UntrustedObject: it would need code to run.
    """
    path = f"{storage.path}/.metadata"
    metadata = unpickle(pickled, path, _MORE_CLASSES)
    if not isinstance(metadata.storage_data, dict):
        raise MetadataError(f"{path} is not what torch's FileSystemWriter writes")
    places = {(index.fqn, index.offset): info for index, info in metadata.storage_data.items()}
    size_of = functools.cache(storage.head)
    tensors, objects = {}, {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            info = _checked(places.get((key, None)), key, path)
            if info.offset + info.length > (nbytes := size_of(info.relative_path) or 0):
                raise MetadataError(
                    f"{storage.path}/{info.relative_path} is missing, or too short to hold {key!r}: it has {nbytes:,} "
                    f"bytes"
                )
            read = functools.partial(_read_bytes, storage, info, key)
            objects[key] = StoredObject(key, value_path(metadata, key), info.length, read)
        elif isinstance(entry, TensorStorageMetadata):
            tensors[key] = _tensor(storage, (key, value_path(metadata, key)), entry, places)
        else:
            raise MetadataError(f"{path} describes {key!r} in a way that torch's FileSystemWriter does not")
    return CheckpointView(storage.path, "dcp", tensors, objects)


def write_checkpoint(contents: CheckpointView, path: str, options: Mapping[str, Any], name: str) -> None:
    """Writes a checkpoint as ``dcp.save`` would, from one process; tensors are read when it is their turn.

    Args:
        contents: What to write.
        path: A local directory, or a URL.
        options: For the fsspec filesystem of a URL.
        name: What its metadata calls the path.

    Raises:
        CheckpointError: it cannot be read or written.
    """
    values: dict[str, Any] = {
        key: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for key, tensor in contents.tensors.items()
    }
    values |= dict.fromkeys(contents.objects)
    # With copies made ahead, tensors would be asked for before the one before them is written.
    writer: _Named = (
        _UrlWriter(path, per_thread_copy_ahead=0, **options) if "://" in path else _Named(path, per_thread_copy_ahead=0)
    )
    writer.name = name
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that there is only one process: so it should be
            save(
                nested(values, contents.paths),
                storage_writer=writer,
                planner=_Planner(contents),
                no_dist=True,
            )
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, CheckpointError):
            raise cause from None
        raise WriteError(f"cannot write {contents.path} as torch's own format: {cause}") from error


class _Named(FileSystemWriter):
    """Does not put the path that it was given, which may have a password in it, into ``.metadata``."""

    name: str

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.name, save_id=self.save_id)


class _UrlWriter(_Named, FsspecWriter):
    pass


class _Planner(DefaultSavePlanner):
    """Gives a value when its turn to be written has come; the state dict holds only shapes.

    torch's writer keeps every tensor until the file is complete, although it has no use for those that are written: so
    they all share the memory of the largest one.
    """

    def __init__(self, contents: CheckpointView) -> None:
        super().__init__()
        self._contents = contents
        self._memory = mmap.mmap(-1, max((tensor.nbytes for tensor in contents.tensors.values()), default=0) or 1)

    def lookup_object(self, index: MetadataIndex) -> Any:
        tensor = self._contents.tensors.get(index.fqn)
        if tensor is None or not tensor.nbytes:
            return tensor and tensor.read(whole(tensor.shape))
        elements = torch.frombuffer(self._memory, dtype=torch.uint8, count=tensor.nbytes).view(tensor.dtype)
        copy_elements(elements.view(tensor.shape), tensor.read(whole(tensor.shape)))
        return elements.view(tensor.shape)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  (torch's name)
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._contents.objects[write_item.index.fqn].read())
        return object


_Places = Mapping[tuple[str, Any], Any]


def _tensor(storage: Storage, named: tuple[str, Path], entry: TensorStorageMetadata, places: _Places) -> StoredTensor:
    """A tensor whose chunks are looked for in their files when it is read."""
    key = named[0]
    path = f"{storage.path}/.metadata"
    shape, dtype = tuple(entry.size), entry.properties.dtype
    regions = chunk_regions(entry)
    infos = [_checked(places.get((key, chunk.offsets)), key, path) for chunk in entry.chunks]
    check_chunks(path, key, shape, regions)
    chunks = list(zip(regions, infos, strict=True))

    @functools.cache
    def located(number: int) -> Chunk:
        return _located(storage, key, *chunks[number])

    def read(region: Region) -> torch.Tensor:
        found = [located(number) for number, (own, _) in enumerate(chunks) if own.intersect(region) is not None]
        return read_region(storage, key, dtype, found, region, verify=False)

    return StoredTensor(*named, dtype, shape, read)


def _located(storage: Storage, key: str, region: Region, info: StorageInfo) -> Chunk:
    """Where the elements of a chunk are."""
    path = f"{storage.path}/{info.relative_path}"
    try:
        reader = storage.open(info.relative_path)
    except OSError as error:
        raise ReadError(storage.scrub(f"cannot open {path} (for {key!r}): {error}")) from error
    try:
        value = load_fake(FileView(reader, info.offset, info.length), f"{path} (for {key!r})")
    except (OSError, EOFError) as error:
        raise ReadError(storage.scrub(f"cannot read {path} (for {key!r}): {error}")) from error
    finally:
        reader.close()
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != region.size:
        raise ReadError(f"{path} does not hold {key!r} of shape {region.size} at byte {info.offset:,}")
    stored = locate(storage, (key,), value, (info.relative_path, info.offset))
    if not stored.chunks:
        raise ConversionError(f"{key!r} in {path} is conjugated or negated, which cannot be converted")
    return Chunk(region, stored.chunks[0].item, stored.chunks[0].strides)


def _read_bytes(storage: Storage, info: StorageInfo, key: str) -> bytes:
    content = bytearray(info.length)
    path = f"{storage.path}/{info.relative_path}"
    try:
        reader = storage.open(info.relative_path)
        try:
            reader.read_into([memoryview(content)], info.offset)
        finally:
            reader.close()
    except (OSError, EOFError) as error:
        raise ReadError(storage.scrub(f"cannot read {path} (for {key!r}): {error}")) from error
    return bytes(content)


def _checked(info: Any, key: str, path: str) -> StorageInfo:
    """A place in a data file, as far as a hostile one could do harm."""
    if not isinstance(info, StorageInfo):
        raise MetadataError(f"{path} has no data for {key!r}")
    if info.transform_descriptors:
        transforms: Sequence[str] = info.transform_descriptors
        raise ConversionError(f"{key!r} is stored transformed ({', '.join(map(str, transforms))}): load and save it")
    name = info.relative_path
    if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", ".."):
        raise MetadataError(f"{path} names a data file {name!r} that is not beside it")
    if any(type(number) is not int or number < 0 for number in (info.offset, info.length)):
        raise MetadataError(f"{path} has no data for {key!r}, but {info.length!r} bytes at {info.offset!r}")
    return info
