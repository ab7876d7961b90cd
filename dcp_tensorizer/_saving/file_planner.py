"""Which tensors go into which of a rank's files, and under which names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .._format.layout import INDEX_CAPACITY, data_file_name, index_entry_size
from .._storage.base import UNLIMITED
from .._writer_process.messages import FileRequest, TensorSource

__all__ = ["plan_files", "stored_names"]

_MAX_NAME = 1024  # longer ones would fill a file's index with a few entries


def stored_names(keys: Sequence[Any]) -> list[str]:
    """Names for tensors in tensorizer files: the keys themselves where those are unique strings that can be stored."""
    used: set[str] = set()
    names = []
    for number, key in enumerate(keys):
        name = key if _storable(key) and key not in used else f"__item_{number}__"
        while name in used:
            name += "_"
        used.add(name)
        names.append(name)
    return names


def plan_files(
    sources: Iterable[TensorSource],
    rank: int,
    save_id: str,
    max_file_bytes: int = UNLIMITED,
    index_capacity: int = INDEX_CAPACITY,
    first: int = 0,
) -> tuple[FileRequest, ...]:
    """Distributes tensors over files.

    Another file begins when the index of a tensorizer file is full, or with the tensor that would make it hold more
    than ``max_file_bytes``. A tensor that is larger than that has a file to itself. Files are numbered from ``first``.
    """
    files: list[list[TensorSource]] = []
    room = nbytes = 0
    for source in sources:
        entry = index_entry_size(source.name, len(source.shape))
        if entry > room or nbytes + source.nbytes > max_file_bytes:
            files.append([])
            room, nbytes = index_capacity, 0
        files[-1].append(source)
        room -= entry
        nbytes += source.nbytes
    return tuple(FileRequest(data_file_name(rank, n, save_id), tuple(file)) for n, file in enumerate(files, first))


def _storable(key: Any) -> bool:
    """Whether tensorizer can hold a name and give it back: not empty, and not taken for its own JSON paths."""
    if not isinstance(key, str):
        return False
    try:
        return 0 < len(key.encode()) <= _MAX_NAME and not key.startswith("\x1e")
    except UnicodeEncodeError:
        return False
