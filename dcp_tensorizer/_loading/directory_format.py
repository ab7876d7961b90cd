"""What a directory holds, seen from its names and first bytes."""

from __future__ import annotations

from typing import Literal

from .._format.index import is_index, looks_like_pickle
from .._format.layout import is_data_file_name, metadata_file_name
from .._format.tensorizer_file import MAGIC
from .._storage.base import Storage
from ..errors import CheckpointError, NotCommitted

__all__ = ["DirectoryFormat", "contents", "format_of", "has_data", "kind_of_file", "nothing_committed"]

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


def nothing_committed(storage: Storage) -> NotCommitted:
    """The error for a path that holds no committed checkpoint: says what is there instead, as far as it can be seen."""
    return NotCommitted(f"{storage.path} holds no committed checkpoint: {_instead(storage)}.")


def has_data(storage: Storage) -> bool:
    """Whether data of a save of this package lies in a directory; raises what `Storage.listing` does."""
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
    """What a file is that was given for a checkpoint, and what to do with it.

    Args:
        head: Its first bytes.
    """
    if head.startswith(b"PK\3\4") or looks_like_pickle(head):
        return "of torch.save: load it by torch.load, or make a checkpoint of it by `dcp-tensorizer convert`"
    if head.startswith(MAGIC) or is_index(head):
        return "of a checkpoint: give the directory that it is in"
    if head[8:10] == b'{"':
        return "of safetensors: make a checkpoint of it by `dcp-tensorizer convert`, or give open_reader its directory"
    return "of another kind, and checkpoints are directories. `dcp-tensorizer convert` reads more formats"
