"""Reads a checkpoint's index from its storage."""

from __future__ import annotations

import functools

from torch.distributed.checkpoint.metadata import Metadata

from .._format.index import FIRST_BYTES, open_index
from .._format.index_reader import Index
from .._format.index_rows import Head
from .._format.layout import metadata_file_name
from .._storage.base import Storage
from ..errors import MetadataError

__all__ = ["read_head", "read_index", "read_metadata"]


def read_index(storage: Storage, rank: int | None = None) -> Index | None:
    """Reads and checks a checkpoint's index: that of all ranks, or one rank's own. None if there is none.

    Of a large one, the places of each rank are read when they are wanted.

    Raises:
        MetadataError: it is damaged, or of another format.
        ReadError: it cannot be read.
    """
    name = metadata_file_name(rank)
    data = storage.read(name, FIRST_BYTES)
    if data is None:
        return None
    path = f"{storage.path}/{name}"
    index = Index(open_index(path, data, functools.partial(storage.read_range, name)))
    own = index.head.rank
    if own != rank:
        whose = "all ranks" if own is None else f"rank {own}"
        raise MetadataError(f"{path} is the metadata of {whose}: files were exchanged, or renamed")
    return index


def read_head(storage: Storage) -> Head | None:
    """Reads and checks the head of the index of all ranks; raises what `read_index` does. None if there is none."""
    name = metadata_file_name()
    data = storage.read(name, FIRST_BYTES)
    if data is None:
        return None
    return open_index(f"{storage.path}/{name}", data, functools.partial(storage.read_range, name)).head


def read_metadata(storage: Storage, rank: int | None = None) -> Metadata | None:
    """All that the index says, as `Index.stored_metadata` gives it; raises what `read_index` does."""
    index = read_index(storage, rank)
    return None if index is None else index.stored_metadata()
