"""Reads a checkpoint's metadata from its storage."""

from __future__ import annotations

from torch.distributed.checkpoint.metadata import Metadata

from .._format.layout import metadata_file_name
from .._format.metadata import decode
from .._storage.base import Storage
from ..errors import MetadataError

__all__ = ["read_metadata"]


def read_metadata(storage: Storage, rank: int | None = None) -> Metadata | None:
    """Reads and checks a checkpoint's metadata: that of all ranks, or one rank's own. None if there is none.

    Raises:
        MetadataError: it is damaged, or of another format.
        ReadError: it cannot be read.
    """
    name = metadata_file_name(rank)
    data = storage.read(name)
    if data is None:
        return None
    metadata = decode(data, f"{storage.path}/{name}")
    own = metadata.storage_data["rank"]
    if own != rank:
        whose = "all ranks" if own is None else f"rank {own}"
        raise MetadataError(f"{storage.path}/{name} is the metadata of {whose}: files were exchanged, or renamed")
    return metadata
