"""Reads a kept state as a checkpoint like any other: an index, and files that are in memory.

So it is planned, read and verified as one on storage is: onto any number of ranks, and any sharding.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem

from .._format.names import StoredItem, data_file_name, metadata_file_name
from .._index.locations import RankPlaces
from .._index.schema import item_key
from .._index.writer import encode
from .._runtime.forks import Descriptor
from .._runtime.threads import cores
from .._storage.base import FileInfo, MemoryReader, RangeReader, ReadTuning, Sink, Storage
from .._storage.local_io import read_into
from ..errors import WriteError
from .protocol import Keep, KeptContent

_SLICE = 1 << 20  # what is copied is hashed while it is in the processor's cache


class KeptCheckpoint(Storage):
    """The kept states of ranks, as a checkpoint's directory. Nothing is written there.

    Args:
        path: For messages.
        states: Of the ranks, each with its buffer, which is closed here. Of what several of them have, the last one's
            is loaded: that of the rank that loads.

    Attributes:
        is_whole: The states of all ranks are there.

    Raises:
        CheckpointError: an item cannot be described; names its key.
    """

    def __init__(self, path: str, states: Sequence[tuple[KeptContent, Descriptor]]) -> None:
        self.is_whole = len(states) == states[0][0].state.head.world_size
        self.path = self.location = path
        self.reads = ReadTuning(max_threads=cores(), min_threads=cores(), slice_bytes=_SLICE)
        self._files: dict[str, memoryview] = {}
        self._buffers = {_names(content)[0]: _Buffer(buffer, content.state.nbytes) for content, buffer in states}
        plans = [kept_plan(content.state) for content, _ in states]
        meta = StorageMeta(save_id=states[0][0].state.head.id)
        metadata = Metadata({}, planner_data=_merged(plans), storage_meta=meta)
        described = metadata.state_dict_metadata
        parts = [self._add(content, plan, described) for (content, _), plan in zip(states, plans, strict=True)]
        record = states[0][0].state.head.record
        self._files[metadata_file_name()] = memoryview(encode(metadata, parts, record=record))

    def close(self) -> None:
        """Lets go of the memory: nothing is read any more."""
        for buffer in self._buffers.values():
            buffer.let_go()

    def _add(self, content: KeptContent, plan: KeptItems, known: dict[str, Any]) -> RankPlaces:
        """Adds a rank's state; returns where everything is."""
        state, head = content.state, content.state.head
        names = _names(content)
        self._files[names[1]] = memoryview(state.inline)
        places = {}
        for item in plan.items:
            _describe(item, known)
            places[item_key(item.plan.index)] = _place(item, names, content)
        return RankPlaces.of(head.rank, places, {names[0]: state.nbytes, names[1]: len(state.inline)})

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
    """A staging buffer of another process.

    It is read as a file: mapping it first takes as long as copying it.
    """

    def __init__(self, descriptor: Descriptor, nbytes: int) -> None:
        self._descriptor = descriptor
        self.nbytes = nbytes

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        read_into(self._descriptor.number, buffers, offset)

    def let_go(self) -> None:
        """Closes it for good; `close` is for those who may open it again."""
        self._descriptor.close()


def _names(content: KeptContent) -> list[str]:
    """The files that a rank's state is in: its buffer, and what is not in that."""
    head = content.state.head
    return [data_file_name(head.rank, number, head.id) for number in (0, 1)]


def _merged(plans: Sequence[KeptItems]) -> Any:
    """The paths of keys of all ranks, as torch's planner merges them; None where planners have something else."""
    if not all(isinstance(plan.planner_data, dict) for plan in plans):
        return None
    return {key: path for plan in reversed(plans) for key, path in plan.planner_data.items()}


def _describe(item: KeptItem, known: dict[str, Any]) -> None:
    """Adds an item to the metadata of the state dict. Ranks may have the same ones."""
    key, data = item.plan.index.fqn, item.plan.tensor_data
    if data is None:
        known.setdefault(key, BytesStorageMetadata())
        return
    tensor = known.setdefault(key, TensorStorageMetadata(data.properties, data.size, []))
    if data.chunk not in tensor.chunks:
        tensor.chunks.append(data.chunk)


def _place(item: KeptItem, names: Sequence[str], content: KeptContent) -> StoredItem:
    """The location of an item, in the first file, a buffer, or the second one."""
    if item.extent is None:
        return StoredItem.empty(item.dtype, item.kind)
    extent = content.state.extents[item.extent]
    file, digests = names[extent.is_inline], content.digests[item.extent]
    return StoredItem(file, item.name, extent.offset, extent.nbytes, item.dtype, item.kind, digests)


# --- the plan of a kept state -----------------------------------------------------------------------------------------
#
# The keeper passes it on without decoding it: the items, and where in memory each is.


class KeptItem(NamedTuple):
    """An item of a kept state.

    Attributes:
        plan: As the planner made it.
        name, kind, dtype: As in a `StoredItem`.
        extent: The number of its bytes among the extents; None if it has none.
    """

    plan: WriteItem
    name: str
    kind: str
    dtype: str
    extent: int | None


class KeptItems(NamedTuple):
    """The items of a kept state."""

    items: Sequence[KeptItem]
    planner_data: Any

    def pickled(self) -> bytes:
        """The pickle that a keeper is given."""
        return pickle.dumps(self, protocol=pickle.HIGHEST_PROTOCOL)


def kept_plan(state: Keep) -> KeptItems:
    """Reads the items of a kept state. A process of this user kept it: connections to others are refused."""
    plan: KeptItems = pickle.loads(state.description)
    return plan
