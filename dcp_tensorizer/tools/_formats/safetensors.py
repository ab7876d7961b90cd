"""Reads and writes safetensors files by ranges, so that no tensor is in memory as a whole.

The safetensors library reads only local files, and writes only tensors that are in memory.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from ..._formats.hugging_face import ModelCatalog
from ..._formats.safetensors import SafetensorsLayout, fault_of, file_names, index_of, lay_out, saved_offsets, shards
from ..._formats.safetensors_header import INDEX, SINGLE
from ..._formats.weight_files import read_weight_file
from ..._publish.model import written_file
from ..._storage.base import Storage
from ..._tensor_file.dtypes import host_bytes
from ...errors import ConversionError
from .._atomic_output import new_directory, new_file
from .._view import BLOCK, CheckpointView, StoredTensor, blocks_of, view_of
from .common import ConvertOptions, check_no_objects, naming

_PARTS = "shard-*.safetensors"  # the files of torch's HuggingFaceStorageWriter(save_distributed=True)


# --- reading ----------------------------------------------------------------------------------------------------------


def read_directory(storage: Storage) -> CheckpointView:
    """Opens the tensors of a model (see `ModelCatalog`). Joins tensors that several files hold in parts."""
    return view_of(storage, storage.path, "safetensors", ModelCatalog(storage))


def read(storage: Storage, name: str) -> CheckpointView:
    path, file = f"{storage.path}/{name}", read_weight_file(storage, name)
    with naming(storage, path):
        offsets = saved_offsets(file.notes)
    is_part = bool(offsets) and fnmatch.fnmatchcase(name, _PARTS)  # torch records offsets in unsharded files, too
    if is_part or any(map(any, offsets.values())):
        raise ConversionError(f"{path} has only one rank's parts of the tensors of a save. Name the directory instead.")
    return view_of(storage, path, "safetensors", ModelCatalog(storage, files=[file]))


# --- writing ----------------------------------------------------------------------------------------------------------


def check(view: CheckpointView, options: ConvertOptions) -> None:
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
    tensors = list(view.tensors.values())
    is_one_file = path.endswith(".safetensors")
    try:
        files = [lay_out(of_file) for of_file in ([tensors] if is_one_file else shards(tensors, options.shard_bytes))]
    except ValueError as error:
        raise ConversionError(f"{path}: {error}") from None
    if is_one_file:
        with new_file(path, storage_options) as (storage, name):
            _write_file(storage, name, files[0], block_bytes)
        return
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
