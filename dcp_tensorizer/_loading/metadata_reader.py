"""Reads a checkpoint's index from its storage."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from .._format.index import find_index
from .._format.index_reader import Index
from .._format.index_rows import Head
from .._format.layout import metadata_file_name
from .._storage.base import Storage
from ..errors import CheckpointError, MetadataError

__all__ = ["read_head", "read_index", "read_metadata", "unreadable"]


def read_index(storage: Storage, rank: int | None = None) -> Index | None:
    """Reads and checks a checkpoint's index: that of all ranks, or one rank's own. None if there is none.

    Of a large one, the places of each rank are read when they are wanted.

    Raises:
        MetadataError: it is damaged, or of another format.
        ReadError: it cannot be read.
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
    """Reads and checks the head of the index of all ranks; raises what `read_index` does. None if there is none."""
    file = find_index(storage, metadata_file_name())
    return None if file is None else file.head


def read_metadata(storage: Storage, rank: int | None = None) -> Metadata | None:
    """All that the index says, as `Index.stored_metadata` gives it; raises what `read_index` does."""
    index = read_index(storage, rank)
    return None if index is None else index.stored_metadata()


def unreadable(error: CheckpointError, meta: StorageMeta | None = None) -> Metadata:
    """The metadata of a checkpoint that cannot be read: whoever looks into it is told why.

    DCP shows it to the planner, before it lets the storage raise the error.
    """
    return Metadata(_Unreadable(error), planner_data={}, storage_meta=meta)


class _Unreadable(dict[str, Any]):
    """Raises an error, whatever is asked."""

    def __init__(self, error: CheckpointError) -> None:
        super().__init__()
        self._error = error

    def _raise(self, *arguments: object) -> NoReturn:
        raise self._error

    __contains__ = __getitem__ = __iter__ = __len__ = get = items = keys = values = _raise
