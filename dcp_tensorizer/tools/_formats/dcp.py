"""Reads torch's own DCP format by ranges, without running code, and writes it tensor by tensor."""

from __future__ import annotations

import functools
import io
import mmap
import re
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

from ..._formats.catalog import Piece, check_chunks
from ..._formats.torch_dcp import TorchCatalog
from ..._loading.run import copy_elements
from ..._runtime.torch_compat import FsspecWriter, StorageInfo
from ..._storage.base import Storage
from ..._tensor_file.dtypes import dtype_name
from ..._tensor_file.names import StoredItem, metadata_file_name
from ..._tensor_file.regions import Region, part_of
from ...errors import CheckpointError, ConversionError, MetadataError, WriteError
from .._atomic_output import new_directory, shown_path
from .._view import CheckpointView, Path, StoredObject, StoredTensor, StoredValue, named_paths, read_region, whole
from .common import ConvertOptions, FileRange, naming
from .torch_file import check_lists, check_names, check_paths, load_fake, locate, nested


def read(storage: Storage, pickled: bytes) -> CheckpointView:
    """Opens a checkpoint of torch's own writer, whose ``.metadata`` is ``pickled``."""
    catalog = TorchCatalog(storage, metadata_file_name(), pickled)
    stored = catalog.metadata()
    size_of = functools.cache(storage.head)
    values: dict[str, StoredValue] = {}
    for stored_key, (key, path) in named_paths(dict.fromkeys(stored.state_dict_metadata, stored.planner_data)).items():
        entry = stored.state_dict_metadata[stored_key]
        if isinstance(entry, BytesStorageMetadata):
            info = _untransformed(catalog.info(MetadataIndex(stored_key)), key)
            if info.offset + info.length > (nbytes := size_of(info.relative_path) or 0):
                raise MetadataError(
                    f"{storage.path}/{info.relative_path} is missing, or too short to hold {key!r}: it must have at "
                    f"least {info.offset + info.length:,} bytes, got {nbytes:,}."
                )
            values[key] = StoredObject(key, path, info.length, functools.partial(_read_object, storage, info, key))
        else:
            indices = (MetadataIndex(stored_key, chunk.offsets) for chunk in entry.chunks)
            infos = [_untransformed(catalog.info(index), key) for index in indices]
            values[key] = _tensor(storage, (key, path), entry, infos)
    return CheckpointView(storage.path, "dcp", values)


def check(view: CheckpointView, options: ConvertOptions) -> None:
    check_paths(view)
    check_names(view)
    check_lists(view)
    for tensor in view.tensors.values():
        if not _is_planned(tensor.dtype):
            raise ConversionError(
                f"{tensor.key!r} has dtype {tensor.dtype}, which torch's DCP cannot plan. Leave it out, or convert to "
                f"another format."
            )


@functools.cache
def _is_planned(dtype: torch.dtype) -> bool:
    """Returns whether DCP's planner supports a dtype. The planner calls ``torch.iinfo``, which does not support all."""
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return True
    try:
        torch.iinfo(dtype)
    except TypeError:
        return False
    return True


def write(view: CheckpointView, path: str, storage_options: Mapping[str, Any], options: ConvertOptions) -> None:
    values = dict.fromkeys(view.values) | {
        key: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for key, tensor in view.tensors.items()
    }
    with new_directory(path, storage_options, "__*.distcp") as storage:
        # Without copy-ahead, torch reads a tensor only after it has written the previous one.
        writer: _Writer = (
            _UrlWriter(storage.location, per_thread_copy_ahead=0, **storage_options)
            if "://" in storage.location
            else _Writer(storage.location, per_thread_copy_ahead=0)
        )
        writer.name = shown_path(path)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch warns about a save from a single process
                save(nested(values, view.paths), storage_writer=writer, planner=_ReadingPlanner(view), no_dist=True)
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            # Raise unchanged: a CheckpointError, whose class shows whether it is damage, and a KeyboardInterrupt.
            if isinstance(cause, CheckpointError) or not isinstance(cause, Exception):
                raise cause from cause.__cause__
            message = f"cannot write {shown_path(path)} in torch's own format: {cause}"
            raise WriteError(storage.scrub(message)) from storage.cause(error)


class _Writer(FileSystemWriter):
    """A writer that records ``name`` in ``.metadata`` instead of the path, which may contain a password."""

    name: str

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.name, save_id=self.save_id)


class _UrlWriter(_Writer, FsspecWriter):
    """A writer that takes the path of an SFTP URL literally. fsspec would take what follows a # or ? for an option."""

    def __init__(self, url: str, **options: Any) -> None:
        sftp = re.fullmatch("((?:sftp|ssh)://[^/]*)(/.*)", url, re.DOTALL)
        super().__init__(url if sftp is None else sftp[1], **options)
        if sftp is not None:
            self.path = sftp[2]


class _ReadingPlanner(DefaultSavePlanner):
    """A planner that reads each value right before it is written; the state dict holds only meta tensors.

    torch's writer holds each tensor until the file is complete, even after it has written the tensor. So all tensors
    share one buffer, of the size of the largest.
    """

    def __init__(self, view: CheckpointView) -> None:
        super().__init__()
        self._view = view
        self._memory = mmap.mmap(-1, max((tensor.nbytes for tensor in view.tensors.values()), default=0) or 1)

    def lookup_object(self, index: MetadataIndex) -> Any:
        tensor = self._view.tensors.get(index.fqn)
        if tensor is None or not tensor.nbytes:
            return tensor and tensor.read_all()
        elements = torch.frombuffer(self._memory, dtype=torch.uint8, count=tensor.nbytes).view(tensor.dtype)
        copy_elements(elements.view(tensor.shape), tensor.read_all())
        return elements.view(tensor.shape)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  (torch's name)
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._view.objects[write_item.index.fqn].read())
        return object


def _tensor(
    storage: Storage, named: tuple[str, Path], entry: TensorStorageMetadata, infos: Sequence[StorageInfo]
) -> StoredTensor:
    """Makes a tensor that locates each chunk in its file when the chunk is first read."""
    key = named[0]
    path = f"{storage.path}/.metadata"
    shape, dtype = tuple(entry.size), entry.properties.dtype
    regions = [Region(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
    check_chunks(path, key, shape, regions)
    chunks = list(zip(regions, infos, strict=True))
    pieces = tuple(
        Piece(
            StoredItem(info.relative_path, key, info.offset, info.length, dtype_name(dtype), "tensor", b""),
            region.size,
            whole(region.size),
            region,
        )
        for region, info in chunks
    )

    located = functools.cache(lambda number: _located(storage, key, *chunks[number]))

    def read(region: Region) -> torch.Tensor:
        touched = [
            (own, *located(number)) for number, (own, _) in enumerate(chunks) if own.intersect(region) is not None
        ]
        plain = [stored.chunks[0]._replace(part=own) for own, stored, is_plain in touched if is_plain]
        target = read_region(storage, key, dtype, plain, region, verify=False)
        for own, stored, is_plain in touched:
            if not is_plain and (common := own.intersect(region)) is not None:
                copy_elements(part_of(target, common, region), stored.read(common.within(own)))
        return target

    return StoredTensor(*named, dtype, shape, read, pieces)


def _located(storage: Storage, key: str, region: Region, info: StorageInfo) -> tuple[StoredTensor, bool]:
    """Returns the stored tensor of a chunk, and whether its elements are stored as they are, in C order."""
    path = f"{storage.path}/{info.relative_path}"
    purpose = f" (for {key!r})"
    with naming(storage, path + purpose), storage.reading(info.relative_path, purpose) as reader:
        value = load_fake(FileRange(reader, info.offset, info.length), info.length, path + purpose)
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != region.size:
        raise MetadataError(f"{path} does not hold {key!r} of shape {region.size} at byte {info.offset:,}.")
    is_plain = value.is_contiguous() and not value.is_conj() and not value.is_neg()
    return locate(storage, (key,), value, info.relative_path, info.offset), is_plain


def _read_object(storage: Storage, info: StorageInfo, key: str) -> bytes:
    with storage.reading(info.relative_path, f" (for {key!r})") as reader:
        return reader.read_range(info.offset, info.length)


def _untransformed(info: StorageInfo, key: str) -> StorageInfo:
    """Returns ``info``; raises `ConversionError` if the item is transformed, and so cannot be read by ranges."""
    if info.transform_descriptors:
        raise ConversionError(
            f"{key!r} is stored in a transformed form ({', '.join(info.transform_descriptors)}), and cannot be read "
            f"by ranges. Load it with torch, and save it again."
        )
    return info
