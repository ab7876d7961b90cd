"""Reads a checkpoint's metadata from its storage."""

from __future__ import annotations

from torch.distributed.checkpoint.metadata import Metadata

from .._format.layout import metadata_file_name
from .._format.metadata import decode
from .._storage.base import Storage

__all__ = ["read_metadata"]


def read_metadata(storage: Storage, rank: int | None = None) -> Metadata | None:
    """Reads and checks a checkpoint's metadata: that of all ranks, or one rank's own. None if there is none.

    Raises:
        MetadataError: it is damaged, or of another format.
        UntrustedObject: it names a type that has no place in a checkpoint's metadata.
        ReadError: it cannot be read.
    """
    name = metadata_file_name(rank)
    data = storage.read(name)
    return None if data is None else decode(data, f"{storage.path}/{name}")
