"""Recognises the format of a directory by file names and first bytes; makes errors for paths without a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .._index.container import is_index, looks_like_pickle
from .._tensor_file.layout import MAGIC
from .._tensor_file.names import is_data_file_name, metadata_file_name
from ..errors import CheckpointError, NotCommitted
from .safetensors_header import INDEX, SINGLE

if TYPE_CHECKING:
    from .._storage.base import Storage

DirectoryFormat = Literal["dcp_tensorizer", "dcp", "safetensors"]
"""This package's format, that of torch's own storage, or safetensors files."""

_HEAD_BYTES = 64
_SHOWN_NAMES = 5


def format_of(storage: Storage, rank: int) -> DirectoryFormat | None:
    """Returns the format of the checkpoint in a directory; None if there is no checkpoint.

    If there is no metadata of all ranks, uses the metadata of ``rank``. Raises `NotCommitted` if there is no directory,
    and `ReadError` if it cannot be read.
    """
    for name in (metadata_file_name(), metadata_file_name(rank)):
        head = storage.read(name, _HEAD_BYTES)
        if head is not None:
            return "dcp" if looks_like_pickle(head) and not is_index(head) else "dcp_tensorizer"
    if any(storage.head(name) is not None for name in (INDEX, SINGLE)):  # some storages have no listing
        return "safetensors"
    return "safetensors" if any(file.name.endswith(".safetensors") for file in storage.listing()[0]) else None


def contents(storage: Storage) -> str:
    """Describes the contents of a directory by some names. Raises what `Storage.listing` raises."""
    files, folders = storage.listing()
    names = sorted([file.name for file in files] + [f"{folder}/" for folder in folders])
    if not names:
        return "it is empty"
    more = len(names) - _SHOWN_NAMES
    return "it holds " + ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def nothing_committed(storage: Storage) -> NotCommitted:
    """Returns the error for a path that holds no committed checkpoint, naming what it holds instead, if possible."""
    return NotCommitted(f"{storage.path} holds no committed checkpoint: {_instead(storage)}.")


def not_committed(path: str) -> NotCommitted:
    """Returns the error for a path that holds no committed checkpoint, without reading the path."""
    return NotCommitted(
        f"{path} holds no committed checkpoint: there is no {metadata_file_name()}. The path is wrong, or the save "
        f"that wrote there never finished."
    )


def has_data(storage: Storage) -> bool:
    """Returns whether a directory has data of one of this package's saves. Raises what `Storage.listing` raises."""
    return any(is_data_file_name(file.name) for file in storage.listing()[0])


def _instead(storage: Storage) -> str:
    name = metadata_file_name()
    head = storage.file_in_place()
    if head is not None:
        return f"it is a file {kind_of_file(head)}"
    try:
        if has_data(storage):
            return (
                f"it holds data without {name}. There are three possible causes. The save that wrote the data never "
                f"finished, or is not finished yet. The directory is a local copy (local=) of a checkpoint that is, or "
                f"will be, on the remote storage: read the checkpoint there. A copy left out hidden files, as "
                f"`cp step/* ...` does: copy the directory itself, with `cp -r`"
            )
        return f"there is no {name}, and {contents(storage)}. The path is wrong, or a save there never finished"
    except NotCommitted:
        return "there is no such directory"
    except CheckpointError:
        return f"there is no {name}. The path is wrong, or the save that wrote there never finished"


def kind_of_file(head: bytes) -> str:
    """Describes a file that was passed instead of a checkpoint, with advice."""
    if head.startswith(b"PK\3\4"):
        return (
            "like those that torch.save writes: load it with torch.load, or convert it to a checkpoint with "
            "`dcp-tensorizer convert`"
        )
    if looks_like_pickle(head):
        return (
            "in the pickle format, which torch.save wrote before torch 1.6: load it with torch.load, save it again "
            "with torch.save, and convert the new file"
        )
    if head.startswith(MAGIC) or is_index(head):
        return "like those of a checkpoint: pass the directory of the checkpoint"
    if head[8:10] == b'{"':
        return (
            "in the safetensors format: convert it to a checkpoint with `dcp-tensorizer convert`, or pass its "
            "directory to open_reader"
        )
    return (
        "in no format that this package recognises, and a checkpoint is a directory. `dcp-tensorizer convert` reads "
        "more formats"
    )
