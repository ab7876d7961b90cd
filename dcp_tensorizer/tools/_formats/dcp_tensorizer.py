"""Writes this package's format from a single process, each tensor as one chunk."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ..._index.write import encode
from ..._saving.commit import commit, put_records
from ..._saving.write_plan import Item, in_files, plan_files, stored_names, write_results
from ..._storage.base import TIMEOUT
from ..._tensor_file.dtypes import host_bytes
from ..._writer_process.jobs import FileJob
from ..._writer_process.options import SaveOptions
from ..._writer_process.protocol import TensorSource
from .._atomic_output import new_directory, shown_path
from .._view import CheckpointView
from .common import ConvertOptions, tensors_at_once
from .torch_file import check_names, check_paths


def check(view: CheckpointView, options: ConvertOptions) -> None:
    check_paths(view)
    check_names(view)


def write(view: CheckpointView, path: str, storage_options: Mapping[str, Any], options: ConvertOptions) -> None:
    save_id = uuid.uuid4().hex
    items = _items(view)
    keys = {item.name: item.fqn for item in items}

    def bytes_of(source: TensorSource) -> memoryview:
        key = keys[source.name]
        return host_bytes(view.tensors[key].read_all()) if key in view.tensors else memoryview(view.objects[key].read())

    with (
        new_directory(path, storage_options, f"__*_{save_id}.tensors") as storage,
        storage.lock_directory() as lock,  # against `_gc.collect`, as a save does
    ):
        lock.share(TIMEOUT)
        sources = (item.source() for item in in_files(items, is_encrypted=False))
        files = plan_files(sources, 0, save_id, storage.max_file_bytes)
        put_records(storage, [save_id])
        options_of_files = SaveOptions(thread_count=tensors_at_once(view.tensors.values()))
        done = FileJob(storage, files, bytes_of, options_of_files).run()
        parts = [result.storage_data for result in write_results(items, done, 0)]
        meta = StorageMeta(shown_path(path), save_id=save_id)
        metadata = Metadata(_described(view), view.paths, storage_meta=meta, version=CURRENT_DCP_VERSION)
        files_of_save = {file.name: file.nbytes for file in done.files}
        commit(storage, encode(metadata, parts), files_of_save, save_id=save_id, sync=True)


def _items(view: CheckpointView) -> list[Item]:
    """Returns the items of a save, with meta tensors: each tensor is read right before it is written."""
    items = []
    keys = [*view.tensors, *view.objects]
    for key, name in zip(keys, stored_names(keys), strict=True):
        if (tensor := view.tensors.get(key)) is not None:
            meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            items.append(Item((key, (0,) * len(tensor.shape)), name, "tensor", meta))
        else:
            meta = torch.empty(view.objects[key].nbytes, dtype=torch.uint8, device="meta")
            items.append(Item((key, None), name, "object", meta))
    return items


def _described(view: CheckpointView) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = dict.fromkeys(
        view.values, BytesStorageMetadata()
    )
    for key, tensor in view.tensors.items():
        size = torch.Size(tensor.shape)
        chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        described[key] = TensorStorageMetadata(TensorProperties(tensor.dtype), size, [chunk])
    return described
