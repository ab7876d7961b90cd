"""safetensors files, read and written by ranges, so that no tensor must be in memory as a whole.

The safetensors library reads only local files, and writes only tensors that are in memory. The layout of files is in
`_formats.safetensors`.
"""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..._formats.safetensors import (
    SafetensorsLayout,
    fault_of,
    file_names,
    in_torch,
    index_of,
    lay_out,
    saved_offsets,
    shards,
)
from ..._formats.safetensors_header import INDEX, SINGLE, Header, TensorRecord, read_header, read_index
from ..._index.layouts import Region
from ..._loading.validate import check_chunks
from ..._publish.model import written_file
from ..._storage.base import Storage
from ..._tensor_file.dtypes import host_bytes
from ...errors import ConversionError, NotCommitted
from .._atomic_output import new_directory, new_file
from .._view import BLOCK, CheckpointView, StoredTensor, blocks_of, plain_tensor, read_region
from .common import ConvertOptions, by_key, check_no_objects, naming

_PARTS = "shard-*.safetensors"  # the files of torch's HuggingFaceStorageWriter(save_distributed=True)


# --- reading ----------------------------------------------------------------------------------------------------------


def is_directory(storage: Storage) -> bool:
    """Returns whether a directory is laid out as by Hugging Face, or as by torch, which saves a file for each rank."""
    return any(storage.head(name) is not None for name in (INDEX, SINGLE)) or bool(_parts(storage))


def _parts(storage: Storage) -> list[str]:
    """The files of several ranks that torch has saved."""
    with suppress(NotCommitted):
        return sorted(file.name for file in storage.listing()[0] if fnmatch.fnmatchcase(file.name, _PARTS))
    return []


def read_directory(storage: Storage) -> CheckpointView:
    """The tensors of all files in a directory: from the file that the index names, or put together from parts.

    Raises `ConversionError` if a file is of another kind, damaged, or lacks a tensor of the index, `MetadataError` if
    the parts of a tensor do not make it up, and `ReadError` if a file cannot be read.
    """
    if storage.head(INDEX) is None and storage.head(SINGLE) is None:
        return CheckpointView(storage.path, "safetensors", _put_together(storage, _parts(storage)))
    file_of: dict[str, str] = {}
    if (index := storage.read(INDEX)) is not None:
        with naming(storage, f"{storage.path}/{INDEX}"):
            file_of = read_index(index)
            if any("/" in name or name.startswith(".") for name in file_of.values()):
                raise ValueError("it names files that are not beside it")
    names = [SINGLE] if index is None else sorted(set(file_of.values()))
    tensors: dict[tuple[str, str], StoredTensor] = {}
    for name in names:
        tensors |= {(key, name): tensor for key, tensor in read(storage, name).tensors.items()}
    for key, name in file_of.items():
        if (key, name) not in tensors:
            raise ConversionError(
                f"{storage.path}/{name} lacks {key!r}, which {INDEX} says to be there: files were exchanged, or are "
                f"not all of one model"
            )
    chosen = {key: tensor for (key, name), tensor in tensors.items() if file_of.get(key, name) == name}
    return CheckpointView(storage.path, "safetensors", chosen)


def _put_together(storage: Storage, names: Iterable[str]) -> dict[str, StoredTensor]:
    """The tensors whose parts are in several files."""
    parts: dict[str, list[tuple[tuple[int, ...], StoredTensor]]] = {}
    for name in names:
        header, saved = _opened(storage, name)
        with naming(storage, f"{storage.path}/{name}"):
            for key, part in _tensors(storage, name, header):
                begin = saved.get(key, (0,) * len(part.shape))
                others = [other for _, other in parts.setdefault(key, [])]
                if any((o.dtype, len(o.shape)) != (part.dtype, len(begin)) for o in [part, *others]):
                    raise ValueError(f"its part of {key!r} is not of one tensor with those of other files")
                parts[key].append((begin, part))
    return {key: _whole(storage, key, of_key) for key, of_key in parts.items()}


def _whole(storage: Storage, key: str, parts: Sequence[tuple[tuple[int, ...], StoredTensor]]) -> StoredTensor:
    ends = [[start + size for start, size in zip(begin, part.shape, strict=True)] for begin, part in parts]
    shape = tuple(max(extents) for extents in zip(*ends, strict=True))
    dtype = parts[0][1].dtype
    chunks = [replace(part.chunks[0], region=Region(begin, part.shape)) for begin, part in parts]
    check_chunks(storage.path, key, shape, [chunk.region for chunk in chunks])
    read = functools.partial(read_region, storage, key, dtype, chunks, verify=False)
    return StoredTensor(key, (key,), dtype, shape, read, tuple(chunks))


def read(storage: Storage, name: str) -> CheckpointView:
    """The tensors of a file.

    Raises `ConversionError` if it is of another kind, damaged, or has only parts of tensors, and `ReadError` if it
    cannot be read.
    """
    path = f"{storage.path}/{name}"
    header, saved = _opened(storage, name)
    is_part = bool(saved) and fnmatch.fnmatchcase(name, _PARTS)  # torch notes the offsets in whole files, too
    if is_part or any(map(any, saved.values())):
        raise ConversionError(f"{path} has parts of tensors, one rank's of a distributed save: name its directory")
    with naming(storage, path):
        tensors = by_key(tensor for _, tensor in _tensors(storage, name, header))
    return CheckpointView(path, "safetensors", tensors)


def _opened(storage: Storage, name: str) -> tuple[Header, dict[str, tuple[int, ...]]]:
    """The header of a file, and the offsets of its tensors in whole tensors."""
    with naming(storage, f"{storage.path}/{name}"), storage.reading(name) as reader:
        header = read_header(reader.read_range, storage.head(name) or 0)
        return header, saved_offsets(header.notes)


def _tensors(storage: Storage, name: str, header: Header) -> Iterator[tuple[str, StoredTensor]]:
    base = len(header.content)
    return ((key, _tensor(storage, name, key, entry, base)) for key, entry in header.tensors.items())


def _tensor(storage: Storage, name: str, key: str, entry: TensorRecord, base: int) -> StoredTensor:
    try:
        dtype, shape = in_torch(entry.dtype, entry.shape)
    except ValueError as error:
        raise ValueError(f"{key!r} {error}") from None
    start, stop = entry.data_offsets
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{key!r} of shape {entry.shape} has {stop - start:,} bytes stored")
    return plain_tensor(storage, (key,), dtype, shape, (name, base + start))


# --- writing ----------------------------------------------------------------------------------------------------------


def check(view: CheckpointView, options: ConvertOptions) -> None:
    """Raises `ConversionError` for objects, and for dtypes and keys that the format does not have."""
    check_no_objects(view, "safetensors")
    for tensor in view.tensors.values():
        if (fault := fault_of(tensor.key, tensor.dtype, tensor.shape)) is not None:
            raise ConversionError(f"{tensor.key!r} {fault}")


def write(
    view: CheckpointView,
    path: str,
    storage_options: Mapping[str, Any],
    options: ConvertOptions,
    block_bytes: int = BLOCK,
) -> None:
    """Writes a file if the path ends in ``.safetensors``; otherwise a directory in Hugging Face's layout."""
    tensors = list(view.tensors.values())
    if path.endswith(".safetensors"):
        with new_file(path, storage_options) as (storage, name):
            _write_file(storage, name, lay_out(tensors), block_bytes)
        return
    files = [lay_out(of_file) for of_file in shards(tensors, options.shard_bytes)]
    names = [SINGLE] if len(files) == 1 else file_names(len(files))
    with new_directory(path, storage_options, "model*.safetensors") as storage:
        for name, file in zip(names, files, strict=True):
            _write_file(storage, name, file, block_bytes)
        if len(files) > 1:
            index = index_of({name: file.tensors for name, file in zip(names, files, strict=True)})
            storage.put(INDEX, index, sync=True)


def _write_file(storage: Storage, name: str, layout: SafetensorsLayout[StoredTensor], block_bytes: int) -> None:
    with written_file(storage, name, layout.nbytes) as write_piece:
        write_piece(memoryview(layout.header))
        for tensor in layout.tensors:
            for region in blocks_of(tensor, block_bytes):
                write_piece(host_bytes(tensor.read(region)))
