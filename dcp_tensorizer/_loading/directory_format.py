"""What a directory holds, seen from its names and first bytes."""

from __future__ import annotations

from typing import Literal

from .._format.index import is_index, looks_like_pickle
from .._format.layout import metadata_file_name
from .._storage.base import Storage

__all__ = ["DirectoryFormat", "contents", "format_of"]

DirectoryFormat = Literal["dcp_tensorizer", "dcp", "safetensors"]
"""Of this package, of torch's own storage, or tensors in files of safetensors."""

_HEAD_BYTES = 64
_SHOWN_NAMES = 5


def format_of(storage: Storage, rank: int) -> DirectoryFormat | None:
    """The format of a directory's checkpoint; None if it holds none.

    Args:
        storage: The directory.
        rank: Whose own metadata counts, where there is none of all ranks.

    Raises:
        ReadError: it cannot be read.
    """
    for name in (metadata_file_name(), metadata_file_name(rank)):
        head = storage.read(name, _HEAD_BYTES)
        if head is not None:
            return "dcp" if looks_like_pickle(head) and not is_index(head) else "dcp_tensorizer"
    return "safetensors" if any(file.name.endswith(".safetensors") for file in storage.listing()[0]) else None


def contents(storage: Storage) -> str:
    """A few of the names in a directory, for an error; raises what `Storage.listing` does."""
    files, folders = storage.listing()
    names = sorted([file.name for file in files] + [f"{folder}/" for folder in folders])
    if not names:
        return "it is empty"
    more = len(names) - _SHOWN_NAMES
    return "it holds " + ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
