"""Uploads of a model's files, where no lock tells whether a save is in progress.

A save leaves a record of its files before it begins their uploads, and then of the uploads. The next save to the same
place aborts them. A save that is still alive then fails. Completed files carry the id of their save. Before another
save replaces them, it writes a record of that save again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress

import msgspec

from .._runtime.threads import in_threads
from .._storage.base import SharedFile, Storage, temporary_file_name
from .._tensor_file.names import is_record_file_name, record_file_name, save_id_in
from ..errors import CheckpointError

_decode = msgspec.json.Decoder(dict[str, str]).decode


def put_uploads(storage: Storage, save_id: str, tokens: Mapping[str, str]) -> None:
    """Leaves a record of the uploads of a save, by the files' names; raises `WriteError`.

    A token is empty before its upload has begun.
    """
    if storage.uploads_are_hidden:
        storage.put(record_file_name(save_id), msgspec.json.encode(tokens), sync=True)


def put_replaced(storage: Storage, names: Iterable[str]) -> list[str]:
    """Leaves records of the saves that have written files, before another one removes them; returns their ids.

    They prove whose the files are that it leaves if it dies. Files that carry no id are in none.
    """
    if not storage.uploads_are_hidden:
        return []
    names = sorted(names)
    replaced: dict[str, dict[str, str]] = defaultdict(dict)
    for name, save_id in zip(names, in_threads(storage.owner, names), strict=True):
        if save_id is not None:
            replaced[save_id][name] = ""  # it is complete
    for save_id, files in replaced.items():
        with suppress(CheckpointError):
            storage.put(record_file_name(save_id), msgspec.json.encode(files), sync=True)
    return list(replaced)


def remove_uploads(storage: Storage, *save_ids: str) -> None:
    """Removes such records; raises `OSError`."""
    if storage.uploads_are_hidden:
        storage.remove(*map(record_file_name, save_ids))


def recorded_uploads(storage: Storage, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """The uploads of saves with a record among the files of a directory: by save, the token of each by its name."""
    found = {}
    for name in filter(is_record_file_name, names) if storage.uploads_are_hidden else ():
        with suppress(CheckpointError, msgspec.MsgspecError):
            found[save_id_in(name)] = _decode(storage.read(name) or b"{}")
    return found


def marks_of_uploads(recorded: Mapping[str, Iterable[str]]) -> list[str]:
    """The temporary names that mark files as those of `recorded_uploads`."""
    return [temporary_file_name(name, save_id) for save_id, names in recorded.items() for name in names]


def abort_uploads(storage: Storage, recorded: Mapping[str, Mapping[str, str]]) -> bool:
    """Aborts `recorded_uploads`; returns whether all of them are gone."""
    with suppress(OSError):
        for save_id, uploads in recorded.items():
            for name, token in uploads.items():
                storage.abort_shared(SharedFile(name, token, 0, save_id))
        return True
    return False
