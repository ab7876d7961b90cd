"""Checks, before a load changes any target, that the checkpoint is whole and fits the ranks that load it."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from .._formats.recognise import nothing_committed
from .._runtime.threads import in_threads
from .._runtime.torch_compat import local_elements
from .._storage.base import Storage
from .._tensor_file.names import metadata_file_name
from ..errors import CheckpointError, MetadataError, ReadError, listed

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
