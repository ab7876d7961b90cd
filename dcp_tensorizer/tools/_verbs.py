"""The public functions of the commands. Each combines functions of the modules beside it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from .._format.encryption import check_decryption
from .._storage.base import Storage
from .._storage.local import LocalStorage
from .._storage.open import open_storage
from ..errors import NotCommitted
from . import _diff, _find, _gc, _verify
from ._atomic_output import beside
from ._diff import Difference
from ._formats.registry import open_all
from ._inspect import Inspection, inspect_view
from ._report.build import build, in_order_of_steps
from ._verify import Verified
from ._view import data_files, read_parts, unlock_parts, view_checkpoint

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from .._format.encryption import DecryptionParams

_Path = str | os.PathLike[str]
_Options = Mapping[str, Any] | None
_Progress = Callable[[int, int], object]


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A directory with a checkpoint, or with what a save has left of one.

    Attributes:
        path: Without credentials.
        step: The last number in the directory's name.
        saved: When it was saved, in UTC: by its own record, which copies keep. Without one, when a file in it was last
            written. None if the storage does not tell.
        state: ``committed``: whole. ``unfinished``: a save is under way there, or has died. ``unflushed``: it is in a
            local folder (``local=...``), and not on the remote yet. ``flushed``: the local copy of what the remote has.
            ``incomplete``: data files that its metadata names are missing or of other sizes, as in a copy under way.
            ``torch``: written by torch's own ``FileSystemWriter``. ``unreadable``: damaged, or of another format.
        nbytes: Bytes of all files in it.
        shared_nbytes: Bytes of those that also have names elsewhere, and take space once (``reuse_unchanged``).
        ranks, tensors, objects: How many ranks wrote it, and how many values it has; None if it is not committed.
        leftover_nbytes: Bytes of files that are not part of the checkpoint, as far as a listing shows.
    """

    path: str
    step: int | None
    saved: datetime | None
    state: _find.State
    nbytes: int
    shared_nbytes: int
    ranks: int | None
    tensors: int | None
    objects: int | None
    leftover_nbytes: int


@dataclass(frozen=True, slots=True)
class Collected:
    """The files that `collect` has removed from a directory, or would remove, or why it has not.

    Attributes:
        path: The directory, without credentials.
        whole: True for a whole checkpoint; False for the leftovers of dead saves.
        files: Paths below the directory.
        nbytes: Bytes of these files, except those that also have names elsewhere, whose space is not freed.
        kept: Why they are still there; None if they are removed.
        failed: They are kept because they could not be listed or removed, not because somebody may need them.
    """

    path: str
    whole: bool
    files: tuple[str, ...]
    nbytes: int
    kept: str | None
    failed: bool


@dataclass(frozen=True, slots=True)
class Reported:
    """The result of `report`.

    Attributes:
        path: The page, without credentials.
        checkpoints: The paths of the checkpoints, in the order of the page.
        tensors: How many tensors the page shows.
        nbytes: Size of the page.
        seconds: How long it took.
    """

    path: str
    checkpoints: tuple[str, ...]
    tensors: int
    nbytes: int
    seconds: float


def list_checkpoints(path: _Path, *, storage_options: _Options = None) -> tuple[CheckpointInfo, ...]:
    """The checkpoints in a directory and in those below it: directory by directory, the highest step first.

    Links to directories are not followed.

    Args:
        path: The directory.
        storage_options: Passed to the fsspec filesystem of a URL.

    Raises:
        NotCommitted: there is no such directory.
        ReadError: it cannot be listed.
    """
    return tuple(_info(listed) for listed in _find.find(open_storage(path, storage_options)))


def inspect(
    checkpoint: _Path,
    pattern: str = "*",
    *,
    storage_options: _Options = None,
    encryption: DecryptionParams | None = None,
) -> Inspection:
    """Lists the contents of a checkpoint: its tensors, where each chunk of them is, its objects, its files.

    Args:
        checkpoint: The checkpoint.
        pattern: Which keys to look at, as in a shell: ``model.*.weight``.
        storage_options: Passed to the fsspec filesystem of a URL.
        encryption: The key of an encrypted checkpoint; without it, the values of objects are not shown.

    Raises:
        NotCommitted: there is no checkpoint.
        UnsupportedFormat: it is of another format, or of a newer version.
        DecryptionError: the key is wrong, or the checkpoint is not encrypted.
        CheckpointError: it is damaged, or cannot be read; or no key matches.
    """
    if encryption is not None:
        check_decryption(encryption)
    storage = open_storage(checkpoint, storage_options)
    parts = _read_parts(storage)
    ciphers = None if encryption is None else unlock_parts(storage, parts, encryption)
    return inspect_view(view_checkpoint(storage, parts, ciphers), data_files(parts), pattern)


def verify(
    checkpoint: _Path,
    *,
    full: bool = False,
    storage_options: _Options = None,
    on_progress: _Progress = lambda done, total: None,
) -> Verified:
    """Compares a checkpoint's files with what was saved. Encrypted ones need no key.

    Args:
        checkpoint: The checkpoint.
        full: Check every byte of the files, and tensorizer's own hashes, instead of only the digests of the data.
        storage_options: Passed to the fsspec filesystem of a URL.
        on_progress: Called with the bytes that were read and the bytes in all; by several threads, one at a time.

    Raises:
        NotCommitted: there is no checkpoint.
        UnsupportedFormat: it is of another format, or of a newer version.
        MetadataError: its metadata is damaged, so that there is nothing to compare with.
        ReadError: it cannot be read, which says nothing of damage; or it was replaced or removed while it was verified.
    """
    storage = open_storage(checkpoint, storage_options)
    return _verify.verify(storage, _read_parts(storage), full=full, progress=on_progress)


def diff(
    before: _Path,
    after: _Path,
    *,
    storage_options: _Options = None,
    encryption: DecryptionParams | None = None,
    on_progress: _Progress = lambda done, total: None,
) -> Difference:
    """Compares two checkpoints, of any of the formats that `convert` reads and however they are sharded.

    Tensors in the same chunks with the same stored digests are the same, and are not read: `verify` finds damage.

    Args:
        before: A checkpoint.
        after: Another one.
        storage_options: Passed to the fsspec filesystems of URLs.
        encryption: The key, if one of them is encrypted.
        on_progress: Called with the bytes that were compared and the bytes in all.

    Raises:
        NotCommitted: there is no checkpoint.
        DecryptionError: a key is missing or wrong, or neither checkpoint is encrypted.
        CheckpointError: one of them is damaged, or cannot be read.
    """
    if encryption is not None:
        check_decryption(encryption)
    old, new = open_all((before, after), storage_options or {}, encryption, look_at_files=True)
    return _diff.diff(old, new, on_progress)


def report(
    checkpoints: Sequence[_Path],
    output: _Path = "report.html",
    *,
    storage_options: _Options = None,
    encryption: DecryptionParams | None = None,
    on_progress: _Progress = lambda done, total: None,
) -> Reported:
    """Writes a page about one or several checkpoints: sizes, norms, extremes, histograms, and how they move.

    The page is one HTML file that makes no request. Each block of a tensor is read once. A tensor whose digests are the
    same as in the checkpoint before is not read again.

    Args:
        checkpoints: Of any of the formats that `convert` reads. They are sorted by the steps in their names, if all
            have one and no two the same.
        output: The page: a local path, or a URL. An older file is replaced.
        storage_options: Passed to the fsspec filesystems of URLs.
        encryption: The key, if any of them is encrypted. The page is not encrypted.
        on_progress: Called with the bytes that were read and the bytes in all.

    Raises:
        ValueError: there are no checkpoints.
        NotCommitted: there is no checkpoint at one of the paths.
        DecryptionError: a key is missing or wrong, or no checkpoint is encrypted.
        WriteError: the page cannot be written.
        CheckpointError: one of the checkpoints is damaged, or cannot be read.
    """
    if not checkpoints:
        raise ValueError("checkpoints is empty: name at least one")
    if encryption is not None:
        check_decryption(encryption)
    started = time.monotonic()
    options = storage_options or {}
    views = in_order_of_steps(open_all(checkpoints, options, encryption))
    page = build(views, on_progress)
    storage, name = beside(os.fspath(output), options)
    storage.make_directory()
    storage.put(name, page, sync=True)
    keys = {key for view in views for key in view.tensors}
    seconds = time.monotonic() - started
    return Reported(f"{storage.path}/{name}", tuple(view.path for view in views), len(keys), len(page), seconds)


def collect(
    path: _Path,
    *,
    keep_latest: int | None = None,
    older_than: float | None = None,
    only_data: bool = False,
    dry_run: bool = False,
    storage_options: _Options = None,
    keep: int | None = None,
) -> tuple[Collected, ...]:
    """Removes old checkpoints in a directory and below it, and what dead saves have left there.

    A checkpoint goes if it is neither among the ``keep_latest`` newest nor among those with the ``keep_latest`` highest
    steps of its directory, and is older than ``older_than``. With neither of the two, only leftovers go. The newest
    committed checkpoint never goes, nor does one that a link there leads to.

    Args:
        path: The directory.
        keep_latest: How many checkpoints to keep in each directory; at least 1.
        older_than: Seconds since a checkpoint was saved, by its own record.
        only_data: Leave the files in a checkpoint's directory that this package did not write, and the directory.
        dry_run: Remove nothing, and return what would be removed.
        storage_options: Passed to the fsspec filesystem of a URL.
        keep: Older name of ``keep_latest``.

    Raises:
        ValueError: ``keep_latest`` is less than 1.
        NotCommitted: there is no such directory.
        ReadError: it cannot be listed.
    """
    keep_latest = keep if keep_latest is None else keep_latest
    if keep_latest is not None and keep_latest < 1:
        raise ValueError(f"keep_latest={keep_latest} must be at least 1: the newest checkpoint always stays")
    storage = open_storage(path, storage_options)
    planned = _gc.plan_collection(storage, keep_latest, older_than, only_data=only_data)
    return tuple(_collected(removal if dry_run else _gc.collect(removal)) for removal in planned)


def _read_parts(storage: Storage) -> dict[int | None, Metadata]:
    try:
        return read_parts(storage)
    except NotCommitted as error:
        is_file = isinstance(storage, LocalStorage) and os.path.isfile(storage.real_path)
        hint = " Of the commands, convert, diff and report read files." if is_file else _find.where_below(storage)
        raise NotCommitted(f"{error}{hint}") from None


def _info(listed: _find.Listed) -> CheckpointInfo:
    return CheckpointInfo(
        listed.path,
        listed.step,
        None if listed.saved is None else datetime.fromtimestamp(listed.saved, timezone.utc),
        listed.state,
        listed.nbytes,
        listed.shared_nbytes,
        listed.ranks,
        listed.tensors,
        listed.objects,
        sum(file.nbytes for file in listed.leftovers),
    )


def _collected(removal: _gc.Removal) -> Collected:
    names = tuple(file.name for file in removal.files)
    return Collected(removal.path, removal.whole, names, removal.nbytes, removal.kept or None, removal.failed)
