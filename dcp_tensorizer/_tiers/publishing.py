"""The commit on the remote: ``.metadata`` appears there when every file of every rank is there with its size."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping

from .._format.index import data_files, find_index, read_head
from .._format.index_rows import Head
from .._storage.base import Refused, Storage
from .._threads import in_threads
from ..errors import MetadataError, WriteError
from .queue import Commit

__all__ = ["Superseded", "is_superseded", "missing_files", "named_files", "publish"]


class Superseded(WriteError):
    """A checkpoint will never be on the remote: somebody has saved there since."""


def missing_files(remote: Storage, names: Iterable[str], sizes: Mapping[str, int]) -> set[str]:
    """Those files that are not there with their sizes; raises `ReadError`."""
    names = sorted(names)
    found = in_threads(remote.head, names)
    return {name for name, nbytes in zip(names, found, strict=True) if nbytes != sizes[name]}


def named_files(remote: Storage, name: str) -> set[str]:
    """The data files that a metadata file names; empty if there is none, or if it is not one of this package's.

    Raises:
        ReadError: it cannot be read.
    """
    head = _committed(remote, name)
    return set() if head is None else set(data_files(head))


def publish(
    remote: Storage,
    index: bytes,
    commit: Commit,
    earlier: Container[str],
    check: Callable[[], object] = lambda: None,
) -> set[str] | None:
    """Makes a save the checkpoint at its place on the remote. All of its files must be there by now.

    To do so again is harmless: an answer may have been lost, or a process may have died in between.

    Args:
        remote: Where.
        index: The metadata.
        commit: What is committed.
        earlier: Ids of saves that are known to be earlier ones, whatever the clock said.
        check: Called just before the metadata is put: it raises if that must not be done any more. What another run
            puts there after that is not replaced, as far as the storage can tell (`Storage.put_if`).

    Returns:
        The files of the checkpoint that it has replaced; None if it was there already.

    Raises:
        Superseded: a checkpoint is there that was saved later than this one, or that must not be replaced.
        CheckpointError: it could not be put now (a full disk, say), or nobody knows whether it is there or will be.
    """
    own = read_head(index, commit.name)
    before = remote.read(commit.name)
    there = _head(before, commit.name)
    if there is not None and there.save_id == own.save_id:
        return None
    if there is not None and _is_later(there, own, earlier):
        raise Superseded(f"{remote.path} holds a checkpoint that was saved later, by another job: it stays")
    replaced = set() if there is None else set(data_files(there)) - set(commit.files)
    check()
    try:
        if not commit.overwrite:
            remote.put(commit.name, index, sync=True, replace=False, save_id=str(own.save_id or ""))
        elif not remote.put_if(commit.name, before, index, save_id=str(own.save_id or "")):
            raise Refused(f"{remote.path}: another run has saved there just now")  # the next try looks at that
    except Refused as error:  # also for a full disk, which is no reason to give a save up
        there = _committed(remote, commit.name)
        if there is not None and there.save_id == own.save_id:  # an attempt before this one has come to it meanwhile
            return None
        if not commit.overwrite and remote.head(commit.name) is not None:
            raise Superseded(str(error)) from error
        raise
    return replaced


def is_superseded(remote: Storage, index: bytes, name: str) -> bool:
    """Whether the remote holds a checkpoint under a metadata file's name that was saved later than this one.

    Raises:
        MetadataError, ReadError: this one is damaged, or the remote cannot be read.
    """
    there = _committed(remote, name)
    return there is not None and _is_later(there, read_head(index, name), ())


def _is_later(there: Head, own: Head, earlier: Container[str]) -> bool:
    """Whether what is there was saved later, as far as clocks and branches say."""
    return there.saved_at > own.saved_at and there.save_id not in earlier and not _has_left(own, there)


def _has_left(own: Head, there: Head) -> bool:
    """Whether the job has left the branch of a checkpoint before it saved its own, whatever the clocks said."""
    if own.record is None or there.record is None or not there.record.branch:
        return False
    return there.record.branch[-1][0] in {name for name, _ in own.record.branch[:-1]}


def _head(data: bytes | None, name: str) -> Head | None:
    """The head of metadata; None if there is none, or if it is not this package's."""
    try:
        return None if data is None else read_head(data, name)
    except MetadataError:  # a checkpoint of torch's, say, which any save replaces
        return None


def _committed(remote: Storage, name: str) -> Head | None:
    """The head of a metadata file; None if there is none, or if it is not one of this package's.

    Raises:
        ReadError: it cannot be read.
    """
    try:
        file = find_index(remote, name)
    except MetadataError:  # a checkpoint of torch's, say, which any save replaces
        return None
    return None if file is None else file.head
