"""Checkpoints of any chunks, as several ranks would have saved them, made by one process."""

from __future__ import annotations

import functools
import io
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_tensorizer._format.chunks import Region
from dcp_tensorizer._format.encryption import Cipher
from dcp_tensorizer._format.layout import StoredItem
from dcp_tensorizer._memory.tensor_bytes import host_bytes
from dcp_tensorizer._saving.commit import commit
from dcp_tensorizer._saving.file_planner import plan_files, stored_names
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._tools.chunk_reader import whole
from dcp_tensorizer._writer_process.messages import TensorSource
from dcp_tensorizer._writer_process.write_job import FileJob

from .support import dtype_name

ODD = {
    "half": [Region((0, 0), (3, 4)), Region((3, 0), (2, 4))],
    "columns": [Region((0, 0), (5, 1)), Region((0, 1), (5, 3))],
}
INDEX = MetadataIndex("w", torch.Size([0]))


def metadata_of(save_id: str = "s", **planner_data: Any) -> Metadata:
    """DCP's metadata of one tensor, ``w``."""
    size = torch.Size([4])
    entry = TensorStorageMetadata(
        TensorProperties(dtype=torch.bfloat16), size, [ChunkStorageMetadata(torch.Size([0]), size)]
    )
    return Metadata({"w": entry}, planner_data={"w": ("w",), **planner_data}, storage_meta=StorageMeta("/x", save_id))


def item_in(file: str) -> StoredItem:
    """Where ``w`` is."""
    return StoredItem(file, "w", 300_000, 8, "bfloat16", "tensor", b"12345678")


def make_checkpoint(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    objects: Mapping[str, Any] | None = None,
    chunks: Mapping[str, Sequence[Region]] | None = None,
    cipher: Cipher | None = None,
    options: Mapping[str, Any] | None = None,
    **committing: Any,
) -> Path:
    """Saves tensors whole, or in the chunks that are given for a key: the first on rank 0, the second on rank 1, ...

    With ``rank``, that rank commits for itself, and its data is the first.
    """
    first = committing.get("rank") or 0
    storage = open_storage(path, options)
    storage.make_directory()
    save_id = uuid.uuid4().hex
    items: dict[int, list[tuple[MetadataIndex, torch.Tensor, str]]] = {}
    described: dict[str, Any] = {}
    for key, tensor in tensors.items():
        regions = (chunks or {}).get(key, [whole(tensor.shape)])
        for rank, region in enumerate(regions, first):
            part = tensor[tuple(slice(a, a + n) for a, n in zip(region.start, region.size, strict=True))]
            items.setdefault(rank, []).append((MetadataIndex(key, torch.Size(region.start)), part, "tensor"))
        described[key] = TensorStorageMetadata(
            TensorProperties(tensor.dtype),
            tensor.shape,
            [ChunkStorageMetadata(torch.Size(region.start), torch.Size(region.size)) for region in regions],
        )
    for key, value in (objects or {}).items():
        stream = io.BytesIO()
        torch.save(value, stream)
        blob = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)
        items.setdefault(first, []).append((MetadataIndex(key), blob, "object"))
        described[key] = BytesStorageMetadata()
    written = []
    for rank, own in items.items():
        names = stored_names([index.fqn for index, _, _ in own])
        by_name = dict(zip(names, own, strict=True))
        files = plan_files(
            (
                TensorSource(name, dtype_name(t.dtype), tuple(t.shape), t.nbytes, kind)
                for name, (_, t, kind) in by_name.items()
                if t.numel()
            ),
            rank,
            save_id,
        )
        contents = functools.partial(_contents, by_name)
        job = FileJob(storage, files, contents, sync=False, threads=1, cipher=cipher)
        places = job.run().places()
        for name, (index, tensor, kind) in by_name.items():
            written.append((index, *places.get(name, (StoredItem.empty(dtype_name(tensor.dtype), kind), 0))))
    paths = {key: tuple(key.split(".")) for key in described}
    metadata = Metadata(described, paths, storage_meta=StorageMeta(str(path), save_id))
    record = None if cipher is None else cipher.record()
    commit(storage, metadata, written, **{"rank": None, "sync": False, "encryption": record, **committing})
    return Path(path)


def _contents(own: Mapping[str, tuple[MetadataIndex, torch.Tensor, str]], source: TensorSource) -> memoryview:
    return host_bytes(own[source.name][1])
