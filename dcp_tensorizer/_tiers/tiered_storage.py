"""A checkpoint that is read from the nearest copy: each file from the local folder if it is complete there.

A save that is committed locally, but not on the remote yet, is visible if this node's local folder has the files of all
ranks. If several nodes have parts of such a save, it is visible on no node, so that all ranks find the same checkpoint.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from .._storage.base import DirectoryLock, FileInfo, RangeReader, ReadTuning, Sink, Storage
from .._storage.local import LocalStorage
from .._storage.open import absolute_path, open_storage
from .._storage.redact import redact
from ..errors import MetadataError, NotCommitted, ReadError
from .flush import is_superseded
from .queue import OPEN, REMOTE, Commit, FlushEntry, Queue
from .target import FlushTarget, subpath_of, target_of

_WHOLE = OPEN | {REMOTE}


class _Copies(NamedTuple):
    sizes: Mapping[str, int]  # the files that are complete here
    indexes: Mapping[str, bytes]  # the metadata of checkpoints that are complete here, but not on the remote yet


class NearestStorage(Storage):
    """A directory on the remote, of which this node may have a copy. Writes only to the remote.

    ``remote`` is the directory itself, not the remote folder of ``target``.
    """

    def __init__(self, target: FlushTarget, remote: Storage, subpath: str) -> None:
        self.remote = remote
        self._target = target
        self._subpath = subpath
        self._local = LocalStorage(target.folder(subpath))
        self.path, self.location = remote.path, remote.location
        self.in_process, self.max_file_bytes = remote.in_process, remote.max_file_bytes
        self.connection = remote.connection

    @property
    def reads(self) -> ReadTuning:  # type: ignore[override]
        return self._local.reads if self._copies.sizes else self.remote.reads

    @property
    def locks_are_visible(self) -> bool:  # type: ignore[override]
        return self._local.locks_are_visible if self._copies.sizes else self.remote.locks_are_visible

    @functools.cached_property
    def _copies(self) -> _Copies:
        queue, sizes = Queue(self._target.folder()), dict[str, int]()
        commits: dict[str, tuple[FlushEntry, Commit]] = {}
        for entry, record in queue.records(_WHOLE, self._target.name):
            if record.subpath != self._subpath:
                continue
            sizes |= {name: nbytes for name, nbytes in record.files.items() if self._size(name) == nbytes}
            if record.commit is not None and entry.state in OPEN:
                commits[record.commit.name] = entry, record.commit
        whole = {name: entry for name, (entry, commit) in commits.items() if commit.files.items() <= sizes.items()}
        indexes = dict[str, bytes]()
        for name, entry in whole.items():
            with suppress(MetadataError):  # the flush also gives up a save without metadata
                index = queue.index(entry)
                # A disk that cannot be written to may not have recorded that the remote has a later checkpoint.
                if queue.is_writable or not is_superseded(self.remote, index, name):
                    indexes[name] = index
        return _Copies(sizes, indexes)

    def _size(self, name: str) -> int | None:
        try:
            return self._local.head(name)
        except ReadError:  # the disk is damaged
            return None

    def child(self, name: str) -> Storage:
        return NearestStorage(self._target, self.remote.child(name), f"{self._subpath}/{name}".lstrip("/"))

    def linked_directories(self) -> list[str]:
        with suppress(NotCommitted):  # the directory may be in the local folder alone
            return self.remote.linked_directories()
        return []

    def listing(self) -> tuple[list[FileInfo], list[str]]:
        files: list[FileInfo] = []
        folders: list[str] = []
        try:
            files, folders = self.remote.listing()
        except NotCommitted:
            if not self._below() and not self._copies.indexes:
                raise
        known = {file.name for file in files}
        copies = {**self._copies.sizes, **{name: len(index) for name, index in self._copies.indexes.items()}}
        files += [FileInfo(name, nbytes, None, None) for name, nbytes in copies.items() if name not in known]
        return files, sorted({*folders, *self._below()})

    def _below(self) -> set[str]:
        """Returns the names of the subfolders with saves that are not on the remote yet."""
        queue = Queue(self._target.folder())
        subpaths = {record.subpath for _, record in queue.records(OPEN, self._target.name)}
        prefix = f"{self._subpath}/" if self._subpath else ""
        return {subpath[len(prefix) :].partition("/")[0] for subpath in subpaths if subpath.startswith(prefix)} - {""}

    def read(self, name: str, most: int | None = None) -> bytes | None:
        index = self._copies.indexes.get(name)
        return self.remote.read(name, most) if index is None else index[:most]

    def read_range(self, name: str, offset: int, nbytes: int) -> bytes:
        index = self._copies.indexes.get(name)
        if index is None:
            return super().read_range(name, offset, nbytes)
        if len(index) < offset + nbytes:
            raise MetadataError(f"{self.path}/{name} is {offset + nbytes - len(index):,} bytes too short")
        return index[offset : offset + nbytes]

    def head(self, name: str) -> int | None:
        if name in self._copies.indexes:
            return len(self._copies.indexes[name])
        return self._copies.sizes.get(name) or self.remote.head(name)

    def open(self, name: str) -> RangeReader:
        if name in self._copies.sizes:
            try:
                return self._local.open(name)
            except OSError:  # for example, another process has removed the copy of an older checkpoint
                return self.remote.open(name)
        return self.remote.open(name)

    def opened_path(self, name: str) -> str:
        return (self._local if name in self._copies.sizes else self.remote).opened_path(name)

    def lock_directory(self) -> DirectoryLock:
        return self._local.lock_directory() if self._copies.sizes else self.remote.lock_directory()

    def make_directory(self) -> None:
        self.remote.make_directory()

    def create(self, name: str, nbytes: int, *, sync: bool) -> Sink:
        return self.remote.create(name, nbytes, sync=sync)

    def put(self, name: str, data: bytes, *, sync: bool, replace: bool = True, save_id: str = "") -> None:
        self.remote.put(name, data, sync=sync, replace=replace, save_id=save_id)

    def remove(self, *names: str) -> None:
        self.remote.remove(*names)

    def scrub(self, text: str) -> str:
        return self.remote.scrub(text)


# --- opening a path or its nearest copy -------------------------------------------------------------------------------


def nearest(
    path: str | os.PathLike[str],
    options: Mapping[str, Any] | None,
    timeout: float,
    local: str | os.PathLike[str] | None,
) -> Callable[[str | os.PathLike[str]], Storage]:
    """Returns a function that opens the storage of a checkpoint, or of the folder of checkpoints, by its path.

    The function raises `WriteError` if the storage cannot be opened. With a local folder, it raises `ReadError` if the
    path that it gets is neither ``path`` nor below it.

    Args:
        path: The folder that the local folder mirrors.

    Raises:
        TypeError, ValueError, WriteError: see `target_of`.
    """
    options = dict(options or {})
    if local is None:
        return functools.partial(open_storage, options=options, timeout=timeout)
    target = target_of(path, local, options, timeout)

    def open_nearest(path: str | os.PathLike[str]) -> Storage:
        subpath = subpath_of(target.remote, absolute_path(path))
        if subpath is None:
            raise ReadError(
                f"{redact(os.fspath(path))} is not below {target.name}, which {target.local} mirrors. Give the reader "
                f"a path below {target.name}, or omit local=."
            )
        return NearestStorage(target, target.open(subpath), subpath)

    return open_nearest
