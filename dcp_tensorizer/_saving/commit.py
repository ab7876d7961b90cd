"""The commit, which replaces ``.metadata`` atomically, and the removal of files that no ``.metadata`` names."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import msgspec

from .._formats.safetensors_header import ADAPTER, INDEX, SINGLE, files_named
from .._index.container import committed
from .._index.locations import RankLocations
from .._runtime.threads import in_threads
from .._storage.base import DirectoryLock, Refused, SharedFile, Storage, temporary_file_name
from .._tensor_file.encryption import Cipher, find_other_key
from .._tensor_file.names import (
    data_file_rank,
    is_data_file_name,
    is_metadata_file_name,
    is_record_file_name,
    is_temporary_file_name,
    is_temporary_file_of,
    metadata_file_name,
    name_of_temporary,
    record_file_name,
    save_id_in,
)
from ..errors import CheckpointError, ReadError, WriteError, listed_ranks


def begin(storage: Storage, timeout: float) -> DirectoryLock:
    """Locks a directory for a save before any rank writes, and removes the files of dead saves.

    Removes files only if no other save is in progress there: then these files can never become part of a checkpoint.
    Raises `WriteError` if the directory cannot be opened, or if another save's clean-up holds the directory's lock for
    longer than ``timeout`` seconds.
    """
    lock = storage.lock_directory()
    with suppress(Exception):
        if lock.is_exclusive:
            remove(storage, dead_files(storage, [file.name for file in storage.listing()[0]]))
    lock.share(timeout)
    return lock


def put_records(storage: Storage, save_ids: Iterable[str]) -> None:
    """Writes a record of each save into the directory, as a small file, if possible.

    If a record is in the directory that it names, and no process has locked that directory, the record's save is over.
    """
    for save_id in set(save_ids):
        storage.put_record(record_file_name(save_id))


def remove_records(storage: Storage, save_ids: Iterable[str]) -> None:
    """Removes the records of saves whose files have been removed, or are named by the metadata."""
    if storage.locks_are_visible:  # other storages have no records, and checking costs requests
        remove(storage, map(record_file_name, set(save_ids)))


def drop_record(storage: Storage, save_id: str) -> None:
    """Removes the record of a failed save, unless files of the save are left: the record proves that these are dead."""
    if storage.locks_are_visible:
        with suppress(Exception):  # if the directory cannot be listed, the record stays
            names = [file.name for file in storage.listing()[0]]
            data = [name for name in names if is_data_file_name(name) and save_id_in(name) == save_id]
            if not data and not any(is_temporary_file_of(name, [save_id]) for name in names):
                remove_records(storage, [save_id])


def dead_files(storage: Storage, names: Sequence[str]) -> list[str]:
    """Returns the files of a directory that belong to saves with records, and that no metadata names.

    Call it only if no other save is in progress in the directory: then these files provably belong to dead saves. Other
    files may be copies in progress, or belong to a save whose lock is not visible. Raises `CheckpointError` if the
    metadata or records cannot be read.
    """
    records = {save_id_in(name) for name in names if is_record_file_name(name) and storage.is_record(name)}
    return _leftovers(storage, names, lambda name: save_id_in(name) in records) if records else []


def leftovers(storage: Storage, names: Sequence[str]) -> list[str]:
    """Returns the files of uncommitted saves in a directory, records last.

    Raises `CheckpointError` if the metadata or records cannot be read.
    """
    return _leftovers(storage, names, lambda name: True)


def _leftovers(storage: Storage, names: Sequence[str], is_wanted: Callable[[str], bool]) -> list[str]:
    kept: set[str] = set()
    for name in names:
        if is_metadata_file_name(name):
            kept |= _named_files(storage, name)
    temporary = [name for name in names if is_temporary_file_name(name) and is_wanted(name)]
    data = [name for name in names if is_data_file_name(name) and name not in kept and is_wanted(name)]
    records = [name for name in names if is_record_file_name(name) and is_wanted(name)]
    known = set(map(save_id_in, (*temporary, *records)))
    beside = [name for name in names if name not in temporary and is_temporary_file_of(name, known)]
    of_models = files_of_models(storage, names, [*temporary, *marks_of_uploads(recorded_uploads(storage, records))])
    return [*of_models, *data, *temporary, *beside, *records]


def files_of_models(storage: Storage, names: Sequence[str], temporary: Iterable[str]) -> list[str]:
    """Returns the safetensors files that saves have marked as their own, and that belong to no model.

    A killed save wrote these files without an index that names them, or was about to remove them. ``names`` are all
    files of the directory; ``temporary`` are the temporary names with which saves mark files. Raises `CheckpointError`
    if the index cannot be read.
    """
    pairs = [(name_of_temporary(mark), mark) for mark in temporary]
    there = {name for name in names if name.endswith(".safetensors")}
    found = {name for name, mark in pairs if name in there and storage.is_marked(name, mark)}
    if not found:
        return []
    try:
        kept = {SINGLE, ADAPTER} | files_named(storage.read(INDEX))
    except ValueError:
        return []
    return sorted(found - kept)


def commit(
    storage: Storage,
    index: bytes,
    files: Mapping[str, int],
    replaced: Callable[[], set[str]] = set,
    *,
    save_id: str,
    rank: int | None = None,
    sync: bool,
    overwrite: bool = True,
    check: Callable[[], object] = lambda: None,
    is_owned: bool = False,
) -> set[str]:
    """Commits a save as the checkpoint at its path, and removes the save's records.

    All data of the save must be durable. Returns the data files of the replaced checkpoint, which can now be removed.

    Args:
        storage: The checkpoint's directory.
        index: The contents of ``.metadata``.
        files: The sizes of the files of all ranks.
        replaced: Returns the files of the checkpoint that was at the path while the data was written
            (`replaced_files`).
        save_id: The id of the save.
        rank: If ranks save without collectives, the rank that commits its own part; otherwise None.
        sync: Make the metadata durable.
        overwrite: Replace a checkpoint at the path. If False, an existing checkpoint is an error, even one that another
            job has committed since the save began.
        check: Called just before the metadata is written, after `check_data`, which may take seconds. Raises `Refused`
            if the save must no longer be committed.
        is_owned: ``check`` ensures that only this run uses the directory. Metadata that another run writes after the
            check is not replaced, as far as the storage can detect that (`Storage.put_if`).

    Raises:
        WriteError: nothing is committed, the previous checkpoint is untouched, and the save's files are removed; or the
            outcome is unknown, as after a lost response, and all files stay.
    """
    name, old_files = metadata_file_name(rank), replaced()
    if storage.locks_are_visible:  # a second check is cheap, and another job may have saved here since
        old_files = old_files | replaced_files(storage, rank)
    old_saves = set(map(save_id_in, old_files))
    put_records(storage, old_saves)
    try:
        check_data(storage, files)
        before = storage.read(name) if is_owned and overwrite else None
        check()
        if not is_owned or not overwrite:
            storage.put(name, index, sync=sync, replace=overwrite, save_id=save_id)
        elif not storage.put_if(name, before, index, sync=sync, save_id=save_id):
            raise Refused(f"{storage.path}: another run has just saved there. Give each run its own path.")
    except Exception as error:  # not KeyboardInterrupt, after which the save may be committed
        # `ReadError`: the metadata to replace, or what ``check`` reads, cannot be read, so nothing was written.
        if isinstance(error, Refused | ReadError):
            remove_with_records(storage, files)
        remove_records(storage, old_saves)  # the previous checkpoint stays
        if isinstance(error, ReadError):
            raise WriteError(f"cannot write {storage.path}/{name}: {error}") from error
        if isinstance(error, Refused):
            raise WriteError(str(error)) from error.__cause__
        raise
    remove_records(storage, map(save_id_in, files))
    return old_files


def check_data(storage: Storage, files: Mapping[str, int]) -> None:
    """Checks that all ranks' data files exist with the given sizes. If not, raises `Refused`, naming the ranks."""
    names = list(files)
    try:
        sizes = in_threads(storage.head, names)
    except CheckpointError as error:
        raise Refused(f"{storage.path}: cannot check whether all data files exist: {error}") from error
    missing = [name for name, size in zip(names, sizes, strict=True) if size != files[name]]
    if missing:
        ranks = sorted({data_file_rank(name) for name in missing})
        raise Refused(
            f"{storage.path} lacks data that rank{'s' if len(ranks) > 1 else ''} {listed_ranks(ranks)} just wrote "
            f"({missing[0]}), so the save is not committed. Either the ranks do not share this path (it is relative to "
            f"different working directories, or on each machine's local disk), or the directory was moved or emptied "
            f"during the save. Pass a path that all ranks share."
        )


def replaced_files(storage: Storage, rank: int | None) -> set[str]:
    """Returns the data files of the checkpoint that `commit` would replace now."""
    with suppress(Exception):  # foreign or unreadable metadata must not make the save fail
        return _named_files(storage, metadata_file_name(rank))
    return set()


def remove(storage: Storage, names: Iterable[str]) -> bool:
    """Removes files that belong to no checkpoint; returns whether all are removed.

    Raises no errors, because files that stay only take space.
    """
    names = tuple(names)
    with suppress(Exception):
        storage.remove(*names)
        return True
    are_gone = True
    for name in names:  # one by one, so that one failure does not stop the other removals
        try:
            storage.remove(name)
        except Exception:
            are_gone = False
    return are_gone


def remove_with_records(storage: Storage, names: Iterable[str]) -> None:
    names = tuple(names)
    remove(storage, names)
    remove_records(storage, map(save_id_in, names))


def _named_files(storage: Storage, name: str) -> set[str]:
    """Raises `CheckpointError` if the metadata cannot be read."""
    file = committed(storage, name)
    return set() if file is None else set(file.files)


# --- uploads of a model's files, for storages without locks that show whether a save is in progress -------------------
#
# A save records its files before it begins their uploads. Once the uploads have begun, it records their ids too.

_decode = msgspec.json.Decoder(dict[str, str]).decode


def put_uploads(storage: Storage, save_id: str, uploads: Mapping[str, str]) -> None:
    """Records the uploads of a save: by file name, the id of each upload (`SharedFile.token`). Raises `WriteError`.

    The id of an upload that has not begun is empty.
    """
    if storage.uploads_are_hidden:
        storage.put(record_file_name(save_id), msgspec.json.encode(uploads), sync=True)


def put_replaced(storage: Storage, names: Iterable[str]) -> list[str]:
    """Records which saves wrote the files that the calling save is about to remove; returns the ids of those saves."""
    if not storage.uploads_are_hidden:
        return []
    names = sorted(names)
    replaced: dict[str, dict[str, str]] = defaultdict(dict)
    for name, save_id in zip(names, in_threads(storage.owner, names), strict=True):
        if save_id is not None:
            replaced[save_id][name] = ""  # the upload is complete
    for save_id, files in replaced.items():
        with suppress(CheckpointError):
            storage.put(record_file_name(save_id), msgspec.json.encode(files), sync=True)
    return list(replaced)


def remove_uploads(storage: Storage, *save_ids: str) -> None:
    """Removes the records of `put_uploads` and `put_replaced`. Raises `OSError` if a removal fails."""
    if storage.uploads_are_hidden:
        storage.remove(*map(record_file_name, save_ids))


def recorded_uploads(storage: Storage, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Returns the uploads in the record files among ``names``: for each save id, the uploads' ids by file name."""
    found = {}
    for name in filter(is_record_file_name, names) if storage.uploads_are_hidden else ():
        with suppress(CheckpointError, msgspec.MsgspecError):
            found[save_id_in(name)] = _decode(storage.read(name) or b"{}")
    return found


def marks_of_uploads(recorded: Mapping[str, Iterable[str]]) -> list[str]:
    return [temporary_file_name(name, save_id) for save_id, names in recorded.items() for name in names]


def abort_uploads(storage: Storage, recorded: Mapping[str, Mapping[str, str]]) -> bool:
    """Aborts `recorded_uploads`; returns whether all of them are gone."""
    with suppress(OSError):
        for save_id, uploads in recorded.items():
            for name, token in uploads.items():
                storage.abort_shared(SharedFile(name, token, 0, save_id))
        return True
    return False


# --- encryption keys: with different ones on the ranks, no reader could load the checkpoint ---------------------------


def agree_on_key(cipher: Cipher | None, parts: Sequence[RankLocations]) -> None:
    """Raises `WriteError` if a rank's key differs from that of the coordinator's ``cipher``."""
    other = find_other_key(cipher, ((part.rank, part.check) for part in parts))
    if other is not None:
        raise WriteError(
            f"the encryption key of rank {other} differs from the coordinator's, or only one of these ranks has a key. "
            f"Give every rank's writer the same EncryptionParams, made on one rank and sent to the others, or derived "
            f"from one passphrase and one salt: EncryptionParams.from_string(passphrase, salt=...)."
        )


# --- removing a checkpoint, in an order that never shows half of one ----------------------------------------


def withdraw(storage: Storage, names: Sequence[str]) -> None:
    """Removes the metadata. The directory then holds no checkpoint, and its other files count as leftovers.

    ``names`` are all files in the directory. Raises `OSError` if the metadata cannot be removed.
    """
    put_records(storage, map(save_id_in, filter(is_data_file_name, names)))
    storage.remove(*filter(is_metadata_file_name, names))
    storage.sync_directory()  # so that a crash may leave data without metadata, but never the reverse


def remove_files(storage: Storage, names: Sequence[str]) -> None:
    """Removes all files but the metadata, and then the directory if it is empty.

    Raises `OSError` if a removal fails.
    """
    storage.remove(*itertools.filterfalse(is_metadata_file_name, names))
    remove_records(storage, map(save_id_in, filter(is_data_file_name, names)))
    storage.remove_directory()


# --- files of a save that has failed on another rank ------------------------------------------------------------------
#
# A rank whose own part fails removes its files. The other ranks learn of the failure from DCP's error, after they have
# written their files. If locks are visible, the next save or restore removes these files. On other storages only the
# rank that wrote a file knows of that file, so each rank removes its own files.

_MARK = "_dcp_tensorizer_before_commit"  # attribute of an error that goes to the other ranks


class WrittenFiles:
    def __init__(self) -> None:
        self._storage: Storage | None = None
        self._names: tuple[str, ...] = ()

    def set(self, storage: Storage, names: Iterable[str]) -> None:
        """Records files that this rank has written, and that no other rank removes."""
        self._storage, self._names = storage, tuple(names)

    def remove(self) -> None:
        """Removes the recorded files of a save that will never be committed. Idempotent."""
        if self._storage is not None:
            remove_with_records(self._storage, self._names)
        self._storage, self._names = None, ()


def failed_before_commit(error: BaseException) -> None:
    """Marks an error that goes to all ranks: this rank's part has failed, so the commit never begins."""
    vars(error)[_MARK] = True


def is_uncommitted(error: BaseException) -> bool:
    """Returns whether an error that DCP has raised proves that a save was not committed, and will not be.

    A failure of the commit itself proves nothing, because the storage's response may have been lost.
    """
    failures = getattr(error, "failures", None)
    causes = [cause for cause, _ in failures.values()] if isinstance(failures, Mapping) else [error]
    return any(_MARK in vars(cause) for cause in causes)
