"""Reads a checkpoint's index from its storage."""

from __future__ import annotations

from torch.distributed.checkpoint.metadata import Metadata

from .._format.index import find_index
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
