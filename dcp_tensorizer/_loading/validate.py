"""Checks, before a load changes any target, that the checkpoint is whole and fits the ranks that load it."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from .._index.container import find_index, is_index, looks_like_pickle
from .._index.layouts import Region, covers
from .._index.read import Index
from .._index.schema import Head, item_key
from .._runtime.threads import in_threads
from .._runtime.torch_compat import local_elements
from .._storage.base import Storage
from .._tensor_file.dtypes import named_dtype
from .._tensor_file.layout import MAGIC
from .._tensor_file.names import StoredItem, is_data_file_name, metadata_file_name
from ..errors import CheckpointError, MetadataError, NotCommitted, ReadError, listed

logger = logging.getLogger("dcp_tensorizer")


class ReadFrom(NamedTuple):
    """The part of a rank's load plan that tells the coordinator which save it is for."""

    save_id: str
    group: str = ""  # name and ranks of the ``exchange`` group; empty for none
    group_size: int = 0


def check_one_save(path: str, carried: Sequence[object]) -> None:
    """Checks that the plans of all ranks are for one save; raises `MetadataError` if they are not, or if that is
    unknown.
    """
    if len(carried) < 2:
        return
    lost = [rank for rank, data in enumerate(carried) if not isinstance(data, ReadFrom)]
    if lost:
        raise MetadataError(
            f"{path}: the planner's create_global_plan dropped the storage_data of the plan of rank {lost[0]}, which "
            f"is needed to verify that all ranks read one checkpoint. Make new plans by dataclasses.replace"
        )
    ids = [data.save_id for data in carried if isinstance(data, ReadFrom)]
    others = [rank for rank, save_id in enumerate(ids) if save_id != ids[0]]
    if others:
        raise MetadataError(
            f"{path} was overwritten while its metadata was read: rank {others[0]} found another save there than rank "
            f"0. No target has changed. Load it again, or load another checkpoint."
        )


def not_committed(path: str) -> NotCommitted:
    """The error for a path that holds no committed checkpoint."""
    return NotCommitted(
        f"{path} holds no committed checkpoint: there is no {metadata_file_name()}. The path is wrong, or the save "
        f"that wrote there never finished."
    )


EMPTY_DICT = (
    "the state has an empty dict there, which loads nothing. If it is of a new optimizer, give the optimizer "
    "itself to CheckpointManager.restore, or use get_optimizer_state_dict of torch.distributed.checkpoint.state_dict. "
    "Other dicts need the keys that are to be loaded"
)
"""Explains the problem of `keys_below_empty_dicts`, and what to do."""


def recorded_paths(metadata: Metadata) -> Mapping[str, Sequence[str | int]]:
    """The paths of keys in the nested state dict that was saved; empty if the metadata has none."""
    return metadata.planner_data if isinstance(metadata.planner_data, dict) else {}


def keys_below_empty_dicts(state: Mapping[str, Any], keys: Iterable[str], metadata: Metadata) -> list[str]:
    """The checkpoint's keys in dicts that are empty in the state: DCP loads nothing into these, without an error.

    ``keys`` are those that the checkpoint has and the state lacks.
    """
    empty = set(_empty_dicts(state, ()))
    if not empty:
        return []
    paths = recorded_paths(metadata)
    path_of = {key: tuple(map(str, paths.get(key) or key.split("."))) for key in keys}
    return [key for key, path in path_of.items() if any(path[:depth] in empty for depth in range(1, len(path)))]


def warn_of_empty_dicts(path: str, planner: LoadPlanner) -> None:
    """Warns about keys that are not loaded because the state has an empty dict in their place, such as of a new
    optimizer.
    """
    if not isinstance(planner, DefaultLoadPlanner) or not planner.flatten_state_dict or planner.metadata is None:
        return
    more = planner.metadata.state_dict_metadata.keys() - planner.state_dict.keys()
    if more and (lost := sorted(keys_below_empty_dicts(planner.original_state_dict, more, planner.metadata))):
        logger.warning("%s has %s, and %s", path, listed(lost), EMPTY_DICT)


def _empty_dicts(container: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    members = container.items() if isinstance(container, Mapping) else enumerate(container)
    for name, member in members:
        if isinstance(member, Mapping) and not member:
            yield (*path, str(name))
        elif isinstance(member, (Mapping, list)):
            yield from _empty_dicts(member, (*path, str(name)))


def stored_item(path: str, metadata: Metadata, index: MetadataIndex) -> StoredItem:
    """The location of a chunk or object; raises `MetadataError`, naming the key, if the metadata has none."""
    place = metadata.storage_data["items"].get(item_key(index))
    if place is None:
        raise MetadataError(f"{path} has no data for {index.fqn!r} at offset {index.offset}")
    return place  # type: ignore[no-any-return]


def check_chunks(path: str, key: str, shape: Sequence[int], regions: Sequence[Region]) -> None:
    """Raises `MetadataError`, naming the key, unless the stored chunks of a tensor hold each of its elements once."""
    if not covers(shape, regions):
        held = sum(math.prod(region.size) for region in regions)
        raise MetadataError(
            f"{path}: the stored chunks of {key!r} do not make up its {math.prod(shape):,} elements: they hold "
            f"{held:,}, and a rank's part is missing or stored twice"
        )


def check_coverage(path: str, index: Index, keys: Iterable[str]) -> None:
    """Checks the chunks of every tensor among ``keys`` like `check_chunks`, unless the save has found them whole."""
    incomplete = index.incomplete_layouts()
    for key in incomplete.keys() & keys:
        check_chunks(path, key, incomplete[key].shape, incomplete[key].regions)


def check_length(path: str, key: str, item: StoredItem, shape: tuple[int, ...]) -> None:
    """Raises `MetadataError`, naming the key, unless a stored tensor has the size of its shape and dtype."""
    if math.prod(shape) * named_dtype(item.dtype).itemsize != item.length:
        raise MetadataError(f"{path}: {key!r} of shape {shape} has {item.length:,} bytes stored")


def check_world_size(storage: Storage, has_own: bool, world_size: int) -> None:
    """Checks that a checkpoint whose ranks each saved for themselves is loaded by as many ranks.

    All ranks look at the same files, so that all find the same. ``has_own`` says whether this rank's own metadata
    exists. Raises `NotCommitted` if not even the first rank's exists, and `MetadataError` if another number of ranks
    saved it.
    """
    if storage.head(metadata_file_name(0)) is None:
        raise nothing_committed(storage)
    has_last = storage.head(metadata_file_name(world_size - 1)) is not None
    if not has_own or not has_last or storage.head(metadata_file_name(world_size)) is not None:
        raise MetadataError(
            f"{storage.path} was saved with use_collectives=False, each rank for itself, by another number of ranks "
            f"than the {world_size} that load it: load it with as many"
        )


def check_own_parts(path: str, metadata: Metadata, plan: LoadPlan, targets: Mapping[str, Any]) -> None:
    """Checks that a rank saved for itself all that its targets hold, because it cannot see what other ranks saved.

    Of a target that is larger than the stored tensor, only what lies inside of that counts. Raises `MetadataError`,
    naming the key, if it saved other parts.
    """
    # A planner may read a part more than once.
    parts = {(i.dest_index.fqn, i.dest_index.offset, i.dest_offsets, i.lengths) for i in plan.items}
    planned: Counter[str] = Counter()
    for key, _, _, lengths in parts:
        planned[key] += math.prod(lengths)
    for key, target in targets.items():
        entry = metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            continue
        needed = local_elements(target, entry.size)
        if planned[key] != needed:
            raise MetadataError(
                f"{path} holds {planned[key]:,} of the {needed:,} elements of {key!r} that this rank loads: it was "
                f"saved with use_collectives=False, each rank for itself, with another sharding, or with the ranks in "
                f"another order; load it as it was saved"
            )


def check_files(storage: Storage, sizes: Mapping[str, int], names: Iterable[str]) -> None:
    """Checks that data files exist with their sizes; raises `ReadError`, naming the file."""
    ordered = sorted(names)
    for name, nbytes in zip(ordered, in_threads(storage.head, ordered), strict=True):
        expected = sizes[name]
        if nbytes != expected:
            state = "is missing" if nbytes is None else f"has {nbytes:,} bytes instead of {expected:,}"
            raise ReadError(
                f"{storage.path}/{name} {state}. The checkpoint is damaged, or is being overwritten: load another one."
            )


# --- the format of a directory, by its names and first bytes ----------------------------------------------------------

DirectoryFormat = Literal["dcp_tensorizer", "dcp", "safetensors"]
"""This package's format, that of torch's own storage, or safetensors files."""

_HEAD_BYTES = 64
_SHOWN_NAMES = 5


def format_of(storage: Storage, rank: int) -> DirectoryFormat | None:
    """The format of a directory's checkpoint; None if it holds none. Raises `ReadError` if it cannot be read.

    ``rank``'s own metadata counts if there is none of all ranks.
    """
    for name in (metadata_file_name(), metadata_file_name(rank)):
        head = storage.read(name, _HEAD_BYTES)
        if head is not None:
            return "dcp" if looks_like_pickle(head) and not is_index(head) else "dcp_tensorizer"
    return "safetensors" if any(file.name.endswith(".safetensors") for file in storage.listing()[0]) else None


def contents(storage: Storage) -> str:
    """Some of the names in a directory, for an error; raises what `Storage.listing` raises."""
    files, folders = storage.listing()
    names = sorted([file.name for file in files] + [f"{folder}/" for folder in folders])
    if not names:
        return "it is empty"
    more = len(names) - _SHOWN_NAMES
    return "it holds " + ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def nothing_committed(storage: Storage) -> NotCommitted:
    """The error for a path that holds no committed checkpoint; it says what is there instead, as far as that can be
    seen.
    """
    return NotCommitted(f"{storage.path} holds no committed checkpoint: {_instead(storage)}.")


def has_data(storage: Storage) -> bool:
    """Returns whether a directory has data of one of this package's saves; raises what `Storage.listing` raises."""
    return any(is_data_file_name(file.name) for file in storage.listing()[0])


def _instead(storage: Storage) -> str:
    name = metadata_file_name()
    head = storage.file_in_place()
    if head is not None:
        return f"it is a file {kind_of_file(head)}"
    try:
        if has_data(storage):
            return (
                f"data lies there without {name}. The save that wrote it never finished, or is not finished yet, or a "
                f"copy has left out hidden files, as `cp step/* ...` does: copy the directory itself, by `cp -r`"
            )
        return f"there is no {name}, and {contents(storage)}. The path is wrong, or a save there never finished"
    except NotCommitted:
        return "there is no such directory"
    except CheckpointError:
        return f"there is no {name}. The path is wrong, or the save that wrote there never finished"


def kind_of_file(head: bytes) -> str:
    """Describes a file that was given instead of a checkpoint, and says what to do."""
    if head.startswith(b"PK\3\4") or looks_like_pickle(head):
        return "of torch.save: load it by torch.load, or make a checkpoint of it by `dcp-tensorizer convert`"
    if head.startswith(MAGIC) or is_index(head):
        return "of a checkpoint: give the directory that it is in"
    if head[8:10] == b'{"':
        return "of safetensors: make a checkpoint of it by `dcp-tensorizer convert`, or give open_reader its directory"
    return "of another kind, and checkpoints are directories. `dcp-tensorizer convert` reads more formats"


# --- reading the index ------------------------------------------------------------------------------------------------


def read_index(storage: Storage, rank: int | None = None) -> Index | None:
    """Reads and checks a checkpoint's index: that of all ranks, or one rank's own. None if there is none.

    The places of a large one are read on demand. Raises `MetadataError` if it is damaged or of another format, and
    `ReadError` if it cannot be read.
    """
    name = metadata_file_name(rank)
    file = find_index(storage, name)
    if file is None:
        return None
    index = Index(file)
    own = index.head.rank
    if own != rank:
        whose = "all ranks" if own is None else f"rank {own}"
        raise MetadataError(f"{file.path} is the metadata of {whose}: files were exchanged, or renamed")
    return index


def read_head(storage: Storage) -> Head | None:
    """Reads and checks the head of the index of all ranks; None if there is none. Raises what `read_index` raises."""
    file = find_index(storage, metadata_file_name())
    return None if file is None else file.head


def read_metadata(storage: Storage, rank: int | None = None) -> Metadata | None:
    """The whole index, as `Index.stored_metadata` returns it; raises what `read_index` raises."""
    index = read_index(storage, rank)
    return None if index is None else index.stored_metadata()


def unreadable(error: CheckpointError, meta: StorageMeta | None = None) -> Metadata:
    """Metadata that stands for an unreadable checkpoint's: any access raises the reason.

    DCP shows it to the planner before it lets the storage raise the error.
    """
    return Metadata(_Unreadable(error), planner_data={}, storage_meta=meta)


class _Unreadable(dict[str, Any]):
    """Raises an error on any access."""

    def __init__(self, error: CheckpointError) -> None:
        super().__init__()
        self._error = error

    def _raise(self, *arguments: object) -> NoReturn:
        raise self._error

    __contains__ = __getitem__ = __iter__ = __len__ = get = items = keys = values = _raise
