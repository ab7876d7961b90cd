"""A state in memory as a checkpoint: an index, and files that are in memory.

So a state is loaded and verified like a checkpoint on storage: by any number of ranks, with any sharding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from .._formats.own import decode
from .._index.locations import RankLocations
from .._index.schema import ItemKey
from .._index.write import encode
from .._runtime.forks import Descriptor
from .._runtime.interpreter import collector_paused
from .._runtime.threads import cores
from .._saving.write_plan import resolve
from .._staging.staged_save import StagedStateDict
from .._storage.base import FileInfo, MemoryReader, RangeReader, ReadTuning, Sink, Storage
from .._storage.local_io import read_into
from .._tensor_file.dtypes import host_bytes
from .._tensor_file.names import (
    StoredItem,
    block_size,
    data_file_name,
    data_file_rank,
    is_data_file_name,
    metadata_file_name,
)
from ..errors import WriteError
from ..planner import SavePlanner
from ..reader import TensorizerStorageReader
from .protocol import Extent, StateHead, StatePart
from .replicas import RemotePart

_READER_OPTIONS = ("verify", "allow_pickle", "thread_count", "on_progress", "on_report")
"""The reader options that apply to checkpoints in memory."""
_SLICE = 1 << 20  # small enough to be hashed while it is in the processor's cache
_STREAMS = 4  # the minimum number of parallel reads from other hosts, even with fewer cores here


class StateCheckpoint(Storage):
    """Ranks' parts of a state in memory, as the read-only directory of a checkpoint.

    Args:
        path: The checkpoint's name in messages.
        parts: The parts of the ranks, each with its buffer on this host or another host. `close` closes the buffers.
            If several parts have the same item, a load reads it from the last of them. So pass the loading rank's part
            last.

    Attributes:
        is_whole: Whether the parts of all ranks are included.
        holders: The holder of each rank's part, for messages.

    Raises:
        CheckpointError: a part's description is damaged or of another version, or no index can be made from the parts.
    """

    def __init__(self, path: str, parts: Sequence[tuple[StatePart, Descriptor | RemotePart]]) -> None:
        head = parts[0][0].head
        self.holders: dict[int, str] = {}
        self.is_whole = len(parts) == head.world_size
        self.path = self.location = path
        is_remote = any(isinstance(buffer, RemotePart) for _, buffer in parts)
        threads = max(cores(), _STREAMS) if is_remote else cores()
        self.reads = ReadTuning(max_threads=threads, min_threads=threads, slice_bytes=_SLICE)
        self._files: dict[str, memoryview] = {}
        self._buffers = {
            _names(part.head)[0]: buffer if isinstance(buffer, RemotePart) else _Buffer(buffer, part.nbytes)
            for part, buffer in parts
        }
        indexes = [decode(part.description, f"the index of rank {part.head.rank}'s part") for part, _ in parts]
        # The path of each key in the nested state dict, merged as by torch's planner. None if a part's planner data is
        # not a dict.
        paths: dict[str, Any] | None = None
        if all(isinstance(index.planner_data, dict) for index in indexes):
            paths = {key: path for index in reversed(indexes) for key, path in index.planner_data.items()}
        metadata = Metadata({}, planner_data=paths, storage_meta=StorageMeta(save_id=head.id))
        for index in indexes:
            _add_entries(index.state_dict_metadata, metadata.state_dict_metadata)
        locations = [self._add(part, index) for (part, _), index in zip(parts, indexes, strict=True)]
        self._files[metadata_file_name()] = memoryview(encode(metadata, locations, record=head.record))

    def part_in(self, words: str) -> int | None:
        """Returns the rank whose file an error message names, or None."""
        ranks = (
            data_file_rank(name) for name in self._files | self._buffers if is_data_file_name(name) and name in words
        )
        return next(ranks, None)

    def close(self) -> None:
        """Closes the buffers. No reads may follow."""
        for buffer in self._buffers.values():
            buffer.release()

    def _add(self, part: StatePart, index: Metadata) -> RankLocations:
        names = _names(part.head)
        self._files[names[1]] = memoryview(part.inline)
        digests = {
            (names[extent.is_inline], extent.offset, extent.nbytes): digests
            for extent, digests in zip(part.extents, part.digests, strict=True)
        }
        locations = {
            key: item._replace(digests=digests[item.file, item.offset, item.length]) if item.file else item
            for key, item in index.storage_data["items"].items()
        }
        return RankLocations.of(part.head.rank, locations, {names[0]: part.nbytes, names[1]: len(part.inline)})

    def open(self, name: str) -> RangeReader:
        return self._buffers.get(name) or MemoryReader(self._files[name])

    def read(self, name: str, most: int | None = None) -> bytes | None:
        content = self._files.get(name)
        return None if content is None else bytes(content[:most])

    def head(self, name: str) -> int | None:
        content = self._buffers.get(name) or self._files.get(name)
        return None if content is None else content.nbytes

    def listing(self) -> tuple[list[FileInfo], list[str]]:
        return [
            FileInfo(name, content.nbytes, None, None) for name, content in (self._files | self._buffers).items()
        ], []

    def child(self, name: str) -> NoReturn:
        raise WriteError(f"{self.path} has no directories")

    def create(self, name: str, nbytes: int, *, sync: bool) -> Sink:
        raise OSError(f"{self.path} cannot be written to")

    def put(self, name: str, data: bytes, *, sync: bool, replace: bool = True, save_id: str = "") -> None:
        raise WriteError(f"{self.path} cannot be written to")

    def remove(self, *names: str) -> None:
        raise OSError(f"{self.path} cannot be written to")


class _Buffer(RangeReader):
    """Staging buffer of another process, read as a file, because a mapping would take time in addition to the copy."""

    def __init__(self, descriptor: Descriptor, nbytes: int) -> None:
        self._descriptor = descriptor
        self.nbytes = nbytes

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        read_into(self._descriptor.number, buffers, offset)

    def release(self) -> None:
        """Closes the descriptor. `close` does not, because a checkpoint's file may be opened again."""
        self._descriptor.close()


class StateReader(TensorizerStorageReader):
    """Reader of a state in memory. Each rank plans and reads without the others.

    The checkpoint may lack parts that this rank does not load. Reader options that do not apply to memory are ignored.
    """

    def __init__(self, checkpoint: StateCheckpoint, options: Mapping[str, Any]) -> None:
        known = {name: value for name, value in options.items() if name in _READER_OPTIONS}
        super().__init__("/", **known, page_cache=False)  # memory has no page cache, and ranges are read once
        self._open = lambda path: checkpoint
        self.checkpoint = checkpoint

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Sets up without collectives, so that only the items that this rank loads must exist."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **(kwargs | {"use_collectives": False}))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the planned items, and releases the memory, so that a reader that lives longer does not hold it."""
        try:
            return super().read_data(plan, planner)
        finally:
            self.checkpoint.close()


def _names(head: StateHead) -> list[str]:
    """Returns the names of the files of a rank's state: of its buffer, and of the bytes that are not in the buffer."""
    return [data_file_name(head.rank, number, head.id) for number in (0, 1)]


# --- the description of a state ---------------------------------------------------------------------------------------
#
# The description is an index of one rank's part; a checkpoint's index describes all parts. Keepers pass the description
# on without decoding it. Its digests are zeros. The real digests are known later: they are in `StatePart.digests`.


@collector_paused()
def state_part(head: StateHead, staged: StagedStateDict, planner: SavePlanner) -> StatePart:
    """Describes a staged state dict for a keeper, with all items of this rank.

    These include items that other ranks would write to storage. Raises `CheckpointError`, with the key, if an item
    cannot be saved.
    """
    buffer = staged.staged_save.buffer
    assert buffer is not None, "the state is copied"
    # `StagedStateDict.items` would bind the state to a save; `dict` copies it without calling `items`.
    planner.set_up_planner(dict(staged))
    plan, names = planner.create_local_plan(), _names(head)
    entries: dict[str, Any] = {}
    locations: dict[ItemKey, StoredItem] = {}
    extents, inline = list[Extent](), bytearray()
    for planned, item in zip(plan.items, resolve(plan, planner, buffer), strict=True):
        location = StoredItem.empty(item.dtype, item.kind)
        if item.has_bytes:
            offset, nbytes = buffer.locate(item.tensor), item.tensor.nbytes
            extents.append(Extent(offset is None, len(inline) if offset is None else offset, nbytes))
            if offset is None:
                inline += host_bytes(item.tensor)
            is_inline, start, _ = extents[-1]
            count = -(-nbytes // block_size(nbytes))
            digests = bytes(8 * (count + (count > 1)))
            location = StoredItem(names[is_inline], item.name, start, nbytes, item.dtype, item.kind, digests)
        data = planned.tensor_data
        entry = (
            BytesStorageMetadata() if data is None else TensorStorageMetadata(data.properties, data.size, [data.chunk])
        )
        _add_entries({planned.index.fqn: entry}, entries)
        locations[item.key] = location
    paths = plan.planner_data if isinstance(plan.planner_data, dict) else None
    metadata = Metadata(entries, planner_data=paths, storage_meta=StorageMeta(save_id=head.id))
    files = {names[0]: buffer.nbytes, names[1]: len(inline)}
    description = encode(metadata, [RankLocations.of(head.rank, locations, files)])
    digests_follow = staged.staged_save.on_written is not None
    return StatePart(head, buffer.nbytes, tuple(extents), description, bytes(inline), digests_follow)


def _add_entries(entries: Mapping[str, Any], known: dict[str, Any]) -> None:
    """Adds a rank's entries to the metadata of the state dict. Several ranks may have the same chunk."""
    for key, entry in entries.items():
        tensor = known.setdefault(key, entry)
        if tensor is not entry and isinstance(entry, TensorStorageMetadata):
            tensor.chunks += [chunk for chunk in entry.chunks if chunk not in tensor.chunks]
