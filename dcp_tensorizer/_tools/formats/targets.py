"""Writes what a checkpoint holds in each of the formats, without ever holding more than a tensor a thread."""

from __future__ import annotations

import fnmatch
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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

from ..._format.chunks import Region
from ..._format.encoder import encode
from ..._format.layout import INDEX_CAPACITY, StoredItem, index_entry_size
from ..._format.tensorizer_file import lay_out
from ..._memory.tensor_bytes import dtype_name, host_bytes
from ..._saving.commit import commit
from ..._saving.file_planner import plan_files, stored_names
from ..._storage.base import TIMEOUT, Storage
from ..._threads import cores
from ..._torch_compat import flatten_state_dict
from ..._writer_process.messages import TensorSource
from ..._writer_process.write_job import FileJob
from ...errors import ConversionError, WriteError
from ..atomic_output import new_directory, new_file, shown_path, write_stream
from ..checkpoint_view import CheckpointView, NonStringKey, Path, StoredTensor, blocks_of
from ..chunk_reader import whole
from . import safetensors as safetensors_module
from .dcp import write_checkpoint
from .torch_file import nested, skeleton

__all__ = ["TARGETS", "Options", "Target"]

_AT_ONCE = 512 << 20  # bytes of tensors in memory, unless a single one is larger


@dataclass(frozen=True)
class Options:
    """How to convert; each format takes what concerns it.

    Attributes:
        select: Patterns, as in a shell, of the keys to convert; ``*`` also matches dots. Empty: all.
        strip_prefix: What to cut from the beginning of keys that have it.
        dtype: What to convert floating-point tensors to.
        source_format: One of `FORMATS`; None: look.
        shard_bytes: safetensors: the most in a file, but for tensors that are larger by themselves.
        tensor_parallel: tensorizer: into how many files to split, one for each rank of an inference server.
        split: tensorizer: the dimension along which to split the tensors whose keys match a pattern; the first one
            that matches counts, and others are whole in each file.
        buffers: tensorizer: patterns of the keys that are a module's buffers, and not its parameters; tensors of
            integers are buffers anyway.
    """

    select: Sequence[str] = ()
    strip_prefix: str = ""
    dtype: torch.dtype | None = None
    source_format: str | None = None
    shard_bytes: int = 5_000_000_000
    tensor_parallel: int = 1
    split: Mapping[str, int] = field(default_factory=dict)
    buffers: Sequence[str] = ("*running_mean", "*running_var")


@dataclass(frozen=True, slots=True)
class Target:
    """A format.

    Attributes:
        check: Fails if the format cannot hold some contents, before anything is written.
        write: Writes them to a path, with options for its filesystem.
    """

    check: Callable[[CheckpointView, Options], None]
    write: Callable[[CheckpointView, str, Mapping[str, Any], Options], None]


# --- tensorizer ----------------------------------------------------------------------------------------------------


def _check_tensorizer(contents: CheckpointView, options: Options) -> None:
    _check_no_objects(contents, "a tensorizer file")
    for tensor in contents.tensors.values():
        if not tensor.nbytes and _numpy_lacks(tensor.dtype):
            raise ConversionError(
                f"{tensor.key!r} has no elements, and tensorizer cannot read a file with such a tensor of "
                f"{tensor.dtype}: leave it out"
            )
    named = [t.key for t in contents.tensors.values()]
    if (bad := next((k for k, n in zip(named, stored_names(named), strict=True) if k != n), None)) is not None:
        raise ConversionError(f"{bad!r} cannot be a name in a tensorizer file: leave it out, or strip a prefix")
    for pattern in options.split:
        if not any(fnmatch.fnmatchcase(tensor.key, pattern) for tensor in contents.tensors.values()):
            raise ConversionError(f"no key matches {pattern!r}, which is to be split")
    for tensor in contents.tensors.values():
        dim = _dim_of(tensor.key, options)
        if dim is None:
            continue
        extent = tensor.shape[dim] if -len(tensor.shape) <= dim < len(tensor.shape) else None
        if extent is None or extent % options.tensor_parallel:
            raise ConversionError(
                f"{tensor.key!r} of shape {tensor.shape} cannot be split into {options.tensor_parallel} equal "
                f"parts along dimension {dim}"
            )


def _dim_of(key: str, options: Options) -> int | None:
    """The dimension along which a tensor is split, None if it is whole in each file."""
    return next((dim for pattern, dim in options.split.items() if fnmatch.fnmatchcase(key, pattern)), None)


def _write_tensorizer(
    contents: CheckpointView, path: str, storage_options: Mapping[str, Any], options: Options
) -> None:
    tensors = list(contents.tensors.values())
    if options.tensor_parallel == 1:
        with new_file(path, storage_options) as (storage, name):
            _write_tensorizer_file(storage, name, tensors, options)
        return
    with new_directory(path, storage_options, "model-rank-*.tensors") as storage:
        for rank in range(options.tensor_parallel):
            shard = [_part(tensor, rank, options) for tensor in tensors]
            _write_tensorizer_file(storage, f"model-rank-{rank:03}.tensors", shard, options)


def _write_tensorizer_file(storage: Storage, name: str, tensors: Sequence[StoredTensor], options: Options) -> None:
    sources = [_source(t.key, t)._replace(kind=_module_kind(t, options)) for t in tensors]
    capacity = max(INDEX_CAPACITY, sum(index_entry_size(s.name, len(s.shape)) for s in sources))
    layout = lay_out(sources, capacity=capacity)
    by_key = {tensor.key: tensor for tensor in tensors}
    try:
        sink = storage.create(name, layout.nbytes, sync=True)
        encode(layout, lambda source: _bytes_of(by_key[source.name]), sink, _threads(tensors))
    except OSError as error:
        raise WriteError(storage.scrub(f"cannot write {storage.path}/{name}: {error}")) from error


def _part(tensor: StoredTensor, rank: int, options: Options) -> StoredTensor:
    """What one rank has of a tensor."""
    dim = _dim_of(tensor.key, options)
    if dim is None:
        return tensor
    dim %= len(tensor.shape)
    extent = tensor.shape[dim] // options.tensor_parallel

    def read(region: Region) -> torch.Tensor:
        start = tuple(n + rank * extent * (d == dim) for d, n in enumerate(region.start))
        return tensor.read(Region(start, region.size))

    return replace(tensor, shape=(*tensor.shape[:dim], extent, *tensor.shape[dim + 1 :]), read=read, chunks=())


def _module_kind(tensor: StoredTensor, options: Options) -> str:
    is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    named = any(fnmatch.fnmatchcase(tensor.key, pattern) for pattern in options.buffers)
    return "parameter" if is_number and not named else "buffer"


def _numpy_lacks(dtype: torch.dtype) -> bool:
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:
        return True
    return False


# --- safetensors ---------------------------------------------------------------------------------------------------


def _check_safetensors(contents: CheckpointView, options: Options) -> None:
    _check_no_objects(contents, "safetensors")
    for tensor in contents.tensors.values():
        if safetensors_module.dtype_name(tensor.dtype) is None:
            raise ConversionError(
                f"{tensor.key!r} is of {tensor.dtype}, which safetensors has not: leave it out, or convert it"
            )
        if tensor.key == "__metadata__":
            raise ConversionError("'__metadata__' cannot be a key in safetensors: leave it out")


def _write_safetensors(
    contents: CheckpointView, path: str, storage_options: Mapping[str, Any], options: Options
) -> None:
    tensors = list(contents.tensors.values())
    if path.endswith(".safetensors"):
        (shard,) = safetensors_module.shards(tensors, sum(tensor.nbytes for tensor in tensors))
        with new_file(path, storage_options) as (storage, name):
            _write_safetensors_file(storage, name, shard)
        return
    shards = safetensors_module.shards(tensors, options.shard_bytes)
    names = safetensors_module.shard_names(len(shards))
    with new_directory(path, storage_options, "model*.safetensors") as storage:
        for name, shard in zip(names, shards, strict=True):
            _write_safetensors_file(storage, name, shard)
        if len(shards) > 1:
            index = safetensors_module.index(list(zip(names, shards, strict=True)))
            storage.put(safetensors_module.INDEX, index, sync=True)


def _write_safetensors_file(storage: Storage, name: str, tensors: Sequence[StoredTensor]) -> None:
    head = safetensors_module.header(tensors)
    nbytes = len(head) + sum(tensor.nbytes for tensor in tensors)
    pieces = (host_bytes(tensor.read(region)) for tensor in tensors for region in blocks_of(tensor))
    write_stream(storage, name, nbytes, (piece for part in ([memoryview(head)], pieces) for piece in part))


# --- torch.save, torch's DCP format, and dcp_tensorizer's -----------------------------------------------------------


def _write_torch(contents: CheckpointView, path: str, storage_options: Mapping[str, Any], options: Options) -> None:
    with new_file(path, storage_options) as (storage, name):
        write_stream(storage, name, *skeleton(contents))


def _write_dcp(contents: CheckpointView, path: str, storage_options: Mapping[str, Any], options: Options) -> None:
    with new_directory(path, storage_options, "__*.distcp") as storage:
        write_checkpoint(contents, storage.location, storage_options, shown_path(path))


def _write_dcp_tensorizer(
    contents: CheckpointView, path: str, storage_options: Mapping[str, Any], options: Options
) -> None:
    save_id = uuid.uuid4().hex
    tensors, objects = contents.tensors, contents.objects
    names = dict(zip([*tensors, *objects], stored_names([*tensors, *objects]), strict=True))
    keys = {name: key for key, name in names.items()}
    sources = [_source(names[key], tensor) for key, tensor in tensors.items() if tensor.nbytes]
    sources += [TensorSource(names[k], "uint8", (o.nbytes,), o.nbytes, "object") for k, o in objects.items()]

    def bytes_of(source: TensorSource) -> memoryview:
        key = keys[source.name]
        return memoryview(objects[key].read()) if key in objects else _bytes_of(tensors[key])

    with new_directory(path, storage_options, f"__*_{save_id}.tensors") as storage, _locked(storage):
        files = plan_files(sources, 0, save_id, storage.max_file_bytes)
        threads = _threads(list(tensors.values()))
        places = FileJob(storage, files, bytes_of, sync=True, threads=threads).run().places()
        written = []
        for key, entry in _described(contents).items():
            offset = torch.Size([0] * len(entry.size)) if isinstance(entry, TensorStorageMetadata) else None
            empty = StoredItem.empty(dtype_name(tensors[key].dtype) if key in tensors else "")
            written.append((MetadataIndex(key, offset), *places.get(names[key], (empty, 0))))
        metadata = Metadata(
            _described(contents),
            contents.paths,
            storage_meta=StorageMeta(checkpoint_id=shown_path(path), save_id=save_id),
        )
        commit(storage, metadata, written, rank=None, sync=True)


@contextmanager
def _locked(storage: Storage) -> Iterator[None]:
    """Keeps who collects leftovers away, as a save does."""
    lock = storage.lock_directory()
    try:
        lock.share(TIMEOUT)
        yield
    finally:
        lock.release()


def _described(contents: CheckpointView) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
    """DCP's words for what is there: each tensor one chunk."""
    found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for key, tensor in contents.tensors.items():
        size = torch.Size(tensor.shape)
        chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        found[key] = TensorStorageMetadata(TensorProperties(tensor.dtype), size, [chunk])
    return found | dict.fromkeys(contents.objects, BytesStorageMetadata())


# --- what several need ---------------------------------------------------------------------------------------------


def _check_no_objects(contents: CheckpointView, what: str) -> None:
    if contents.objects:
        key = next(iter(contents.objects))
        others = f" (and {len(contents.objects) - 1:,} more)" if len(contents.objects) > 1 else ""
        raise ConversionError(
            f"{key!r}{others} is not a tensor, which {what} cannot hold: leave it out with a selection"
        )


def _check_dcp_tensorizer(contents: CheckpointView, options: Options) -> None:
    _check_paths(contents)
    _check_names(contents)


def _check_torch(contents: CheckpointView, options: Options) -> None:
    _check_paths(contents)
    _check_lists(contents)


def _check_dcp(contents: CheckpointView, options: Options) -> None:
    _check_dcp_tensorizer(contents, options)
    _check_lists(contents)


def _check_paths(contents: CheckpointView) -> None:
    """All keys must be one state dict: none below a value, and each container either a dict or a list."""
    is_list: dict[Path, bool] = {(): False}
    for key, path in contents.paths.items():
        for depth, part in enumerate(path):
            if is_list.setdefault(path[:depth], type(part) is int) != (type(part) is int):
                raise ConversionError(f"{key!r} would be in a dict that is a list for other keys: leave it out")
    for key, path in contents.paths.items():
        if path in is_list:
            raise ConversionError(f"{key!r} cannot be a value, and hold the values of other keys, too: leave it out")


def _check_names(contents: CheckpointView) -> None:
    """DCP has only names for the keys of dicts."""
    for key, path in contents.paths.items():
        for part in path:
            if isinstance(part, NonStringKey):
                raise ConversionError(
                    f"{key!r} is below {part.value!r} in a dict, a key of type {type(part.value).__name__} that would "
                    f"become a string: leave it out, or convert to torch"
                )


def _check_lists(contents: CheckpointView) -> None:
    """Lists must be whole, or taking the nested state dict apart gives other keys."""
    values = dict.fromkeys(contents.objects) | {key: torch.empty(0, device="meta") for key in contents.tensors}
    found, _ = flatten_state_dict(nested(values, contents.paths))
    if odd := sorted(found.keys() ^ values.keys()):
        raise ConversionError(f"{odd[0]!r} belongs to a list of which not all is to be converted: take all, or none")


def _source(name: str, tensor: StoredTensor) -> TensorSource:
    return TensorSource(name, dtype_name(tensor.dtype), tensor.shape, tensor.nbytes)


def _bytes_of(tensor: StoredTensor) -> memoryview:
    return host_bytes(tensor.read(whole(tensor.shape)))


def _threads(tensors: Sequence[StoredTensor]) -> int:
    """As many tensors as this are in memory at once."""
    largest = max((tensor.nbytes for tensor in tensors), default=1)
    return max(1, min(4, cores(), _AT_ONCE // max(1, largest)))


TARGETS = {
    "dcp_tensorizer": Target(_check_dcp_tensorizer, _write_dcp_tensorizer),
    "tensorizer": Target(_check_tensorizer, _write_tensorizer),
    "safetensors": Target(_check_safetensors, _write_safetensors),
    "torch": Target(_check_torch, _write_torch),
    "dcp": Target(_check_dcp, _write_dcp),
}
