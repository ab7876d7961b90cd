"""Checkpoints of any chunks, as several ranks would have saved them, made by one process."""

from __future__ import annotations

import functools
import io
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_tensorizer._index.locations import RankLocations
from dcp_tensorizer._index.schema import ItemKey, item_key
from dcp_tensorizer._index.write import encode
from dcp_tensorizer._saving.commit import commit
from dcp_tensorizer._saving.write_plan import Item, plan_files, stored_names, write_results
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._tensor_file.dtypes import host_bytes
from dcp_tensorizer._tensor_file.encryption import Cipher
from dcp_tensorizer._tensor_file.names import StoredItem, data_file_rank
from dcp_tensorizer._tensor_file.regions import Region
from dcp_tensorizer._writer_process.jobs import FileJob
from dcp_tensorizer._writer_process.options import SaveOptions
from dcp_tensorizer._writer_process.protocol import TensorSource
from dcp_tensorizer.tools._formats.registry import open_checkpoint
from dcp_tensorizer.tools._view import whole

ODD = {
    "half": [Region((0, 0), (3, 4)), Region((3, 0), (2, 4))],
    "columns": [Region((0, 0), (5, 1)), Region((0, 1), (5, 3))],
}


def metadata_of(save_id: str = "s", **planner_data: Any) -> Metadata:
    """DCP's metadata of one tensor, ``w``."""
    size = torch.Size([4])
    entry = TensorStorageMetadata(
        TensorProperties(dtype=torch.bfloat16), size, [ChunkStorageMetadata(torch.Size([0]), size)]
    )
    return Metadata({"w": entry}, planner_data={"w": ("w",), **planner_data}, storage_meta=StorageMeta("/x", save_id))


def item_in(file: str) -> StoredItem:
    """The location of ``w``."""
    return StoredItem(file, "w", 0, 4, "bfloat16", "tensor", b"12345678")


def parts_of(files: Mapping[str, int], items: Mapping[ItemKey, StoredItem], **options: Any) -> list[RankLocations]:
    """What the ranks that wrote some files report to the coordinator; items without bytes belong to the first rank."""
    by_rank: dict[int, dict[ItemKey, StoredItem]] = {data_file_rank(name): {} for name in files}
    for key, item in items.items():
        by_rank.setdefault(data_file_rank(item.file) if item.file else 0, {})[key] = item
    return [
        RankLocations.of(rank, own, {n: size for n, size in files.items() if data_file_rank(n) == rank}, **options)
        for rank, own in sorted(by_rank.items())
    ]


def make_checkpoint(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    objects: Mapping[str, Any] | None = None,
    chunks: Mapping[str, Sequence[Region]] | None = None,
    cipher: Cipher | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    sha256: bool = False,
    **committing: Any,
) -> Path:
    """Saves tensors whole, or in the chunks that are given for a key: the first on rank 0, the second on rank 1, ...

    With ``rank``, that rank commits by itself, and the first chunks are its own.
    """
    first = committing.get("rank") or 0
    storage = open_storage(path, options)
    storage.make_directory()
    save_id = uuid.uuid4().hex
    values: dict[int, list[tuple[MetadataIndex, torch.Tensor, str]]] = {}
    described: dict[str, Any] = {}
    for key, tensor in tensors.items():
        regions = (chunks or {}).get(key, [whole(tensor.shape)])
        for rank, region in enumerate(regions, first):
            part = tensor[tuple(slice(a, a + n) for a, n in zip(region.start, region.size, strict=True))]
            values.setdefault(rank, []).append((MetadataIndex(key, torch.Size(region.start)), part, "tensor"))
        described[key] = TensorStorageMetadata(
            TensorProperties(tensor.dtype),
            tensor.shape,
            [ChunkStorageMetadata(torch.Size(region.start), torch.Size(region.size)) for region in regions],
        )
    for key, value in (objects or {}).items():
        stream = io.BytesIO()
        torch.save(value, stream)
        blob = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)
        values.setdefault(first, []).append((MetadataIndex(key), blob, "object"))
        described[key] = BytesStorageMetadata()
    parts = []
    for rank, own in values.items():
        names = stored_names([index.fqn for index, _, _ in own])
        items = [
            Item(item_key(index), name, kind, tensor) for (index, tensor, kind), name in zip(own, names, strict=True)
        ]
        contents = {item.name: item.tensor for item in items}
        files = plan_files((item.source() for item in items if item.has_bytes), rank, save_id)
        bytes_of = functools.partial(_bytes_of, contents)
        job = FileJob(
            storage, files, bytes_of, SaveOptions(sync_files=False, thread_count=1, cipher=cipher, sha256=sha256)
        )
        parts += [result.storage_data for result in write_results(items, job.run(), rank)]
    paths = {key: tuple(key.split(".")) for key in described}
    metadata = Metadata(described, paths, storage_meta=StorageMeta(str(path), save_id))
    options = {"sync": False, **committing}
    commit(storage, *index_and_files(metadata, parts, options.get("rank"), cipher), save_id=save_id, **options)
    return Path(path)


def save_wrapper(path: Path, chunks: list[bytes]) -> None:
    """A tensor of a subclass, with two elements in each chunk."""
    storage = open_storage(path)
    storage.make_directory()
    parts = []
    for rank, content in enumerate(chunks):
        source = TensorSource("w", "uint8", (len(content),), len(content), "wrapper")
        files = plan_files([source], rank, "a" * 32)
        options = SaveOptions(sync_files=False, thread_count=1)
        job = FileJob(storage, files, lambda _, content=content: memoryview(content), options)  # type: ignore[misc]
        (file,) = job.run().files
        parts.append(RankLocations.of(rank, {("w", (2 * rank,)): file.tensors[0]}, {file.name: file.nbytes}))
    regions = [ChunkStorageMetadata(torch.Size([2 * rank]), torch.Size([2])) for rank in range(len(chunks))]
    described = {"w": TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([2 * len(chunks)]), regions)}
    metadata = Metadata(described, {"w": ("w",)}, storage_meta=StorageMeta(str(path), "a" * 32))
    commit(storage, *index_and_files(metadata, parts), save_id="a" * 32, sync=False)


def index_and_files(
    metadata: Metadata, parts: Sequence[RankLocations], rank: int | None = None, cipher: Cipher | None = None
) -> tuple[bytes, dict[str, int]]:
    """The contents of ``.metadata``, and the sizes of the ranks' files, as a commit takes them."""
    return encode(metadata, parts, rank=rank, cipher=cipher), dict(file for part in parts for file in part.files)


def _bytes_of(contents: Mapping[str, torch.Tensor], source: TensorSource) -> memoryview:
    return host_bytes(contents[source.name])


def tensors_of(path: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint of any format."""
    return {key: tensor.read_all() for key, tensor in open_checkpoint(path, {}).tensors.items()}


@st.composite
def regions(draw: st.DrawFn, shape: Sequence[int]) -> Region:
    """A region of a tensor; it has elements if the tensor has some."""
    bounds = [sorted(draw(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)))) for n in shape]
    return Region(tuple(a for a, _ in bounds), tuple(b - a + 1 for a, b in bounds))
