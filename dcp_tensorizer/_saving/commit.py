"""The commit: ``.metadata`` is replaced atomically, and only then what it replaced is removed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from .._format.encryption import Cipher
from .._format.index import data_file_names
from .._format.layout import (
    StoredItem,
    data_file_rank,
    is_data_file_name,
    is_metadata_file_name,
    is_temporary_file_name,
    metadata_file_name,
)
from .._format.metadata import ItemKey, encode, item_key
from .._memory.garbage import collector_paused
from .._storage.base import DirectoryLock, Refused, Storage
from .._threads import in_threads
from ..errors import CheckpointError, WriteError

__all__ = ["begin", "commit", "leftovers", "remove", "replaced_files"]


def begin(storage: Storage, timeout: float) -> DirectoryLock:
    """Locks a directory for a save, on the coordinator, before any rank writes; removes what dead saves left there.

    A save belongs to its coordinator. Where no coordinator has a save under way, files that no metadata names can never
    become part of a checkpoint.

    Raises:
        WriteError: the directory cannot be opened, or another save cleans up there for longer than ``timeout`` seconds.
    """
    lock = storage.lock_directory()
    with suppress(Exception):
        remove(storage, leftovers(storage, lock.leftovers() or []))
    lock.share(timeout)
    return lock


def leftovers(storage: Storage, names: Sequence[str]) -> list[str]:
    """The files of saves that are not committed, among those in a directory.

    Raises:
        CheckpointError: which ones those are cannot be told.
    """
    kept: set[str] = set()
    for name in names:
        if is_metadata_file_name(name):
            kept |= _named_files(storage, name)
    return [name for name in names if (is_data_file_name(name) and name not in kept) or is_temporary_file_name(name)]


def commit(
    storage: Storage,
    metadata: Metadata,
    items: Iterable[tuple[MetadataIndex, StoredItem, int]],
    *,
    rank: int | None,
    sync: bool,
    overwrite: bool = True,
    cipher: Cipher | None = None,
) -> None:
    """Makes a save the checkpoint at its path. All of its data must be durable by now.

    The files of the checkpoint that it replaces (`replaced_files`, asked before) can then be removed.

    Args:
        storage: The checkpoint's directory.
        metadata: DCP's, with the save's id in its ``storage_meta``; it is not changed, because with plan caching the
            planner hands the same one out again.
        items: Index, place and size of its file for every item written, of all ranks.
        rank: None, or the rank that commits its own part when ranks save without collectives.
        sync: Make the metadata durable.
        overwrite: Replace a checkpoint at the path; otherwise that is an error, also where another job has committed
            one since the save began.
        cipher: The key of an encrypted checkpoint.

    Raises:
        WriteError: nothing has been committed, what was committed before is untouched, and the save's files are
            removed. Or it may have been, or will be, as after a lost answer: then all files stay.
    """
    assert metadata.storage_meta is not None and metadata.storage_meta.save_id is not None
    files: dict[str, int] = {}
    places: dict[ItemKey, StoredItem] = {}
    with collector_paused():
        for index, item, file_nbytes in items:
            places[item_key(index)] = item
            if item.file:
                files[item.file] = file_nbytes
    content = {"files": files, "items": places}
    try:
        check_data(storage, files)
        data = _encoded(storage, dataclasses.replace(metadata, storage_data=content), rank, cipher)
        storage.put(metadata_file_name(rank), data, sync=sync, replace=overwrite)
    except Refused as error:
        remove(storage, files)
        raise WriteError(str(error)) from error.__cause__


def check_data(storage: Storage, files: Mapping[str, int]) -> None:
    """Looks that the data of all ranks is where the metadata will say, as every load will look.

    Raises:
        Refused: some is not; names its ranks, and why that may be.
    """
    names = list(files)
    try:
        sizes = in_threads(storage.head, names)
    except CheckpointError as error:
        raise Refused(f"{storage.path}: cannot look whether all data is there: {error}") from error
    missing = [name for name, size in zip(names, sizes, strict=True) if size != files[name]]
    if missing:
        ranks = sorted({data_file_rank(name) for name in missing})
        raise Refused(
            f"{storage.path} lacks data that was just written there, of rank{'s' if len(ranks) > 1 else ''} "
            f"{', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''} ({missing[0]}): the ranks do not "
            f"share this path (a relative path in different working directories, a disk of each machine's own), or "
            f"the directory was moved or emptied meanwhile. Nothing is committed."
        )


def replaced_files(storage: Storage, rank: int | None) -> set[str]:
    """The data files of the checkpoint that `commit` would replace now.

    They can be asked for while data is being written. Of a checkpoint that another job commits in between, the files
    are then left behind.
    """
    with suppress(Exception):  # not one of ours, or it cannot be read: no reason to fail a save that is committed
        return _named_files(storage, metadata_file_name(rank))
    return set()


@collector_paused()
def _encoded(storage: Storage, metadata: Metadata, rank: int | None, cipher: Cipher | None) -> bytes:
    try:
        return encode(metadata, rank=rank, cipher=cipher)
    except Exception as error:
        raise Refused(f"{storage.path}: the checkpoint's metadata cannot be stored: {error}") from error


def remove(storage: Storage, names: Iterable[str]) -> None:
    """Removes files that belong to no checkpoint; what cannot be removed only costs space."""
    names = tuple(names)
    try:
        storage.remove(*names)
    except Exception:
        for name in names:  # one that cannot be removed does not keep the others
            with suppress(Exception):
                storage.remove(name)


def _named_files(storage: Storage, name: str) -> set[str]:
    """The data files that a metadata file names, read from its head alone.

    Raises:
        CheckpointError: it is damaged, not one of ours, or cannot be read.
    """
    data = storage.read(name)
    return set() if data is None else data_file_names(data, name)
