"""What stays in a local folder: what is not on the remote yet, and the newest checkpoint that is."""

from __future__ import annotations

import time
from contextlib import suppress

from .._format.layout import metadata_file_name
from .._storage.local import LocalStorage
from ..errors import CheckpointError
from .queue import LOST, REMOTE, TOLD, WRITING, Entry, Queue, Record, Writing

__all__ = ["arrive", "clean_up", "drop", "free", "undo"]

_FORGET_SECONDS = 60.0  # who follows a save looks when it arrived: its record stays so long


def arrive(queue: Queue, entry: Entry, record: Record, named: set[str]) -> None:
    """Removes local copies when a checkpoint is on the remote: all that are there, but those of the newest.

    Its record says that it is there when this is done: so whoever has waited for it finds nothing half removed.

    Args:
        queue: Of the local folder.
        entry, record: Of the checkpoint.
        named: The data files that it has on the remote.
    """
    done = queue.records({REMOTE})
    _, kept = max([(entry.number, record.place), *((e.number, r.place) for e, r in done)])
    for other, of_other in done:
        files = of_other.files if of_other.commit is None else of_other.commit.files
        is_before = other.number < entry.number and _metadata_of(of_other) == _metadata_of(record)
        is_replaced = is_before and not named & set(files)
        if of_other.place != kept or is_replaced:
            drop(queue, other, of_other, forget=_is_old(other))
    if record.place != kept:
        drop(queue, entry, record, forget=False)
    queue.move(entry, REMOTE)


def _metadata_of(record: Record) -> tuple[str, str]:
    """Where the metadata of a save is, and its name: one save replaces another only if it has the same."""
    return record.place, metadata_file_name() if record.commit is None else record.commit.name


def _is_old(entry: Entry) -> bool:
    return time.time() - entry.changed > _FORGET_SECONDS


def free(queue: Queue) -> bool:
    """Removes every local copy of what is on the remote, to make room. Whether there was any."""
    dropped = [drop(queue, e, r, forget=_is_old(e)) for e, r in queue.records({REMOTE}) if _is_here(queue, r)]
    return any(dropped)


def _is_here(queue: Queue, record: Record) -> bool:
    return any((queue.root / record.place / name).exists() for name in record.files)


def drop(queue: Queue, entry: Entry, record: Record, *, forget: bool = True) -> bool:
    """Removes a rank's local files, and then the record of them; whether it did. Not while somebody loads them."""
    folder = queue.root / record.place
    local = LocalStorage(folder)
    if not folder.is_dir():
        if forget:
            queue.remove(entry)
        return False
    try:
        lock = local.lock_directory()
    except CheckpointError:
        return False
    try:
        if local.locks_are_visible and not lock.is_exclusive:
            return False
        local.remove(*record.files)
    except OSError:
        return False
    finally:
        lock.release()
    with suppress(OSError):
        while folder != queue.root:  # empty folders go as well
            folder.rmdir()
            folder = folder.parent
    if forget:
        queue.remove(entry)
    return True


def clean_up(queue: Queue) -> None:
    """Removes what saves have left whose process died while it wrote, and the records of what was given up."""
    queue.sweep()
    entries = queue.entries()
    for entry in entries:
        if entry.state == WRITING:
            with queue.claimed(entry) as is_dead:
                record = queue.record(entry) if is_dead else None
                if record is not None:
                    _remove_written(queue, record)
                    queue.remove(entry)
        elif entry.state in (LOST, TOLD):
            record = queue.record(entry)
            if entry.state == TOLD and record is not None:
                drop(queue, entry, record)


def undo(writing: Writing) -> None:
    """Removes what a save has left here that ends without success, and its record. Idempotent.

    Of one that was handed over to the flush nothing goes.
    """
    if writing.is_unfinished:
        _remove_written(writing.queue, writing.record)
        writing.abort()  # last: whoever comes after a death knows where to look


def _remove_written(queue: Queue, record: Record) -> None:
    """Removes the files of a save that had not ended, and their folder, if it is empty and no other save is there."""
    local = LocalStorage(queue.root / record.place)
    with suppress(CheckpointError, OSError):
        names = [file.name for file in local.listing()[0]]
        local.remove(*(n for n in names if n.startswith(f"__{record.rank}_") and n.endswith(f"_{record.id}.tensors")))
        lock = local.lock_directory()
        try:
            if lock.is_exclusive or not local.locks_are_visible:
                local.remove_directory()
        finally:
            lock.release()
