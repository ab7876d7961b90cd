"""Every state in which a crash may leave a directory, worked out from what an operation does to the file system.

POSIX promises little: a file's bytes are durable after its fsync, a directory's entries after the directory's fsync,
and a rename happens as a whole or not at all. Any other change before the crash may be there or not, in any
combination. Many file systems keep more order than that, but a program that relies on it loses data on another one.
"""

from __future__ import annotations

import itertools
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

__all__ = ["Crash", "Recording", "crash_states", "materialise", "recorded"]

Entry = tuple[int, str]
"""A directory's inode, and a name in it."""

_EVENTS = {"open", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate"}
_active: list[Callable[[], None]] = []


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _active and event in _EVENTS and (event != "open" or _writes(arguments)):
        _active[-1]()


def _writes(arguments: tuple[object, ...]) -> bool:
    flags = arguments[2] if len(arguments) > 2 else 0
    return isinstance(flags, int) and bool(flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR))


sys.addaudithook(_audit)  # it cannot be removed, and does nothing without a recording


@dataclass(frozen=True)
class Snapshot:
    """A directory tree: its entries, and the bytes of its files; directories have none."""

    entries: dict[Entry, int]
    contents: dict[int, bytes | None]


@dataclass
class Recording:
    """The effects of an operation: a snapshot before each of its calls, and which inodes it made durable, and when.

    Attributes:
        root: The inode of the recorded directory.
        snapshots: In order, one for each call and one at the end.
        synced: For each fsync, the number of the snapshot after it, and the inode.
    """

    root: int = 0
    snapshots: list[Snapshot] = field(default_factory=list)
    synced: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Crash:
    """The files that may exist after a crash: paths of files with their bytes, and of directories with None."""

    files: tuple[tuple[str, bytes | None], ...]


@contextmanager
def recorded(root: Path) -> Iterator[Recording]:
    """Records what the block does below ``root``, in this process."""
    recording = Recording(os.stat(root).st_ino)
    kept: dict[int, int] = {}  # an open descriptor of each inode: so that none is used again
    busy = False

    def snap() -> None:
        nonlocal busy
        if not busy:
            busy = True
            recording.snapshots.append(_snapshot(root, kept))
            busy = False

    def fsync(descriptor: int, fsync: Callable[[int], None] = os.fsync) -> None:
        fsync(descriptor)
        snap()
        recording.synced.append((len(recording.snapshots) - 1, os.fstat(descriptor).st_ino))

    _active.append(snap)
    try:
        with mock.patch("os.fsync", fsync):
            snap()
            yield recording
            snap()
    finally:
        _active.pop()
        for descriptor in kept.values():
            os.close(descriptor)


def _snapshot(root: Path, kept: dict[int, int]) -> Snapshot:
    entries: dict[Entry, int] = {}
    contents: dict[int, bytes | None] = {}
    folders = [root]
    while folders:
        folder = folders.pop()
        inode = os.stat(folder).st_ino
        for name in os.listdir(folder):
            path = folder / name
            state = os.lstat(path)
            entries[inode, name] = state.st_ino
            if state.st_ino not in kept:
                kept[state.st_ino] = os.open(path, os.O_RDONLY)
            if stat.S_ISDIR(state.st_mode):
                contents[state.st_ino] = None
                folders.append(path)
            else:
                contents[state.st_ino] = path.read_bytes()
    return Snapshot(entries, contents)


def crash_states(recording: Recording, start: int = 0) -> Iterator[Crash]:
    """Every state in which a crash during the recorded operation may leave the directory, each once.

    The state at the beginning is taken to be durable. ``start``: the crash comes after at least so many calls.
    """
    seen: set[Crash] = set()
    for end in range(start, len(recording.snapshots)):
        pending = list(_pending(recording, end))
        contents = {inode: _versions(recording, inode, end) for inode in _inodes(recording, end)}
        for chosen in itertools.product((False, True), repeat=len(pending)):
            entries = dict(_durable_entries(recording, end, pending))
            for change, happened in zip(pending, chosen, strict=True):
                if happened:
                    _apply(entries, change[1])
            for state in _with_contents(recording.root, entries, contents):
                if state not in seen:
                    seen.add(state)
                    yield state


Change = dict[Entry, int | None]


def _changes(recording: Recording, end: int) -> Iterator[tuple[int, Change]]:
    """Each call's changes of directories: after which snapshot, and entries with their new inodes, None if removed."""
    for number in range(end):
        before, after = (recording.snapshots[number + n].entries for n in (0, 1))
        changed = {entry for entry in before.keys() | after.keys() if before.get(entry) != after.get(entry)}
        if changed:
            yield number + 1, {entry: after.get(entry) for entry in changed}


def _pending(recording: Recording, end: int) -> Iterator[tuple[int, Change]]:
    """The changes before a snapshot that no fsync of their directory has made durable."""
    for number, change in _changes(recording, end):
        folders = {folder for folder, _ in change}
        if any(not _synced(recording, folder, number, end) for folder in folders):
            yield number, change


def _synced(recording: Recording, inode: int, start: int, end: int) -> bool:
    return any(start <= at <= end and inode == which for at, which in recording.synced)


def _durable_entries(recording: Recording, end: int, pending: list[tuple[int, Change]]) -> dict[Entry, int]:
    entries = dict(recording.snapshots[0].entries)
    for change in _changes(recording, end):
        if change not in pending:
            _apply(entries, change[1])
    return entries


def _apply(entries: dict[Entry, int], change: Change) -> None:
    for entry, inode in change.items():
        if inode is None:
            entries.pop(entry, None)
        else:
            entries[entry] = inode


def _inodes(recording: Recording, end: int) -> set[int]:
    return {inode for snapshot in recording.snapshots[: end + 1] for inode in snapshot.contents}


def _versions(recording: Recording, inode: int, end: int) -> list[bytes | None]:
    """The bytes that a file may have: those of its last fsync, those of later writes, and half of these."""
    history = [snapshot.contents.get(inode, b"") for snapshot in recording.snapshots[: end + 1]]
    if inode in recording.snapshots[0].contents:
        last = 0
    else:
        last = max((at for at, which in recording.synced if which == inode and at <= end), default=-1)
    durable = history[last] if last >= 0 else (None if history[-1] is None else b"")
    versions = [durable]
    for number, content in enumerate(history[last + 1 :], last + 1):
        if content is None:
            return [None]
        if inode not in recording.snapshots[number].contents:  # not there yet, or removed
            continue
        if content not in versions:
            half = len(content) // 2
            versions += [content, content[:half] + bytes(len(content) - half)]
    return versions


def _with_contents(root: int, entries: dict[Entry, int], contents: dict[int, list[bytes | None]]) -> Iterator[Crash]:
    """A state for each combination of the versions of the files that can be reached."""
    paths: list[tuple[str, int]] = []
    folders = [("", root)]
    while folders:
        prefix, folder = folders.pop()
        for (where, name), inode in sorted(entries.items()):
            if where == folder:
                paths.append((prefix + name, inode))
                if contents[inode] == [None]:
                    folders.append((f"{prefix}{name}/", inode))
    for versions in itertools.product(*(contents[inode] for _, inode in paths)):
        yield Crash(tuple((path, version) for (path, _), version in zip(paths, versions, strict=True)))


def materialise(state: Crash, folder: Path) -> None:
    """Makes a directory that holds a state."""
    folder.mkdir()
    for path, content in state.files:
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)
