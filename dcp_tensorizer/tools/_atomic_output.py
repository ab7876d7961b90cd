"""Results that appear whole or not at all: written under another name beside their own, and renamed."""

from __future__ import annotations

import fnmatch
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from .._format.encoder import Parts
from .._storage.base import Storage
from .._storage.local import LocalStorage
from .._storage.open import absolute_path, open_storage
from .._storage.redact import redact
from ..errors import ConversionError, NotCommitted, WriteError

_SHOWN = 50  # characters of a result's name that are in its temporary one, for errors


def beside(path: str, options: Mapping[str, Any]) -> tuple[Storage, str]:
    """The storage of the directory that a file is in, and the file's name there.

    Raises:
        ConversionError: a URL ends before that name, or has no directory.
        WriteError: it cannot be the name of a file.
    """
    if _is_url(path):
        folder, _, name = path.rpartition("/")
        if not name or folder.endswith(":/"):
            raise ConversionError(f"{redact(path)} names no file in a directory")
        return open_storage(folder, options), name
    absolute = Path(absolute_path(path))
    return LocalStorage(absolute.parent), absolute.name


def shown_path(path: str) -> str:
    """The name of a result in metadata and messages: not where it is written first, and without credentials."""
    return redact(str(absolute_path(path)))


def _is_url(path: str) -> bool:
    return "://" in path or "::" in path


@contextmanager
def new_directory(path: str, options: Mapping[str, Any], files: str) -> Iterator[Storage]:
    """A directory that gets its name when everything is in it; on other storage, its files are removed after a failure.

    Args:
        path: Its path, or URL.
        options: For the fsspec filesystem of a URL.
        files: A pattern, as in a shell, of the names that will be written, without the one that completes the result.
            After a failure, only files of such names are removed: all others are foreign.

    Raises:
        ConversionError: there is something at the path, or a file system begins there.
        WriteError: it cannot be written.
    """
    storage = open_storage(path, options)
    with suppress(NotCommitted):
        if any(storage.listing()):
            raise ConversionError(f"{storage.path} exists, and is not empty: choose another destination")
    if isinstance(storage, LocalStorage):
        real = Path(os.path.realpath(storage.location))
        if real.exists() and not real.is_dir():
            raise ConversionError(f"{storage.path} exists, and is not a directory: choose another destination")
        if _is_working_directory(real):
            raise ConversionError(f"{storage.path} is the working directory, and would be replaced: name another one")
        if real.is_mount():
            raise ConversionError(f"{storage.path} is a mount point, and so cannot be replaced: name a directory in it")
        with _renamed(real) as temporary:
            temporary.mkdir()
            if real.exists():  # it may be for one user's eyes only
                _take_over(real, temporary)
            yield LocalStorage(temporary)
            _sync(temporary)
        return
    storage.make_directory()
    try:
        yield storage
    except BaseException:
        with suppress(Exception):
            names = [file.name for file in storage.listing()[0]]
            storage.discard(*(name for name in names if fnmatch.fnmatchcase(name, files)))
        raise


@contextmanager
def new_file(path: str, options: Mapping[str, Any]) -> Iterator[tuple[Storage, str]]:
    """A file that gets its name when it is complete; on other storage, a file appears only then anyway.

    Raises:
        ConversionError: there is something at the path.
        WriteError: it cannot be written.
    """
    storage, name = beside(path, options)
    if storage.head(name) is not None:
        raise ConversionError(f"{storage.path}/{name} exists: choose another destination")
    if isinstance(storage, LocalStorage):
        real = Path(os.path.realpath(Path(storage.location) / name))
        with _renamed(real) as temporary:
            yield LocalStorage(real.parent), temporary.name
    else:
        yield storage, name


@contextmanager
def written_file(storage: Storage, name: str, nbytes: int) -> Iterator[Callable[[memoryview], None]]:
    """Writes a file of ``nbytes`` bytes: gives a function that takes them in order, piece by piece.

    Raises:
        WriteError: it cannot be written; there is none then.
    """
    try:
        sink = storage.create(name, nbytes, sync=True)
    except OSError as error:
        raise WriteError(storage.scrub(f"cannot create {storage.path}/{name}: {error}")) from error
    parts = Parts(nbytes, sink, filling=2, writing=sink.concurrency)
    offset = 0

    def write_piece(piece: memoryview) -> None:
        nonlocal offset
        if piece.nbytes:
            parts.fill(offset, np.frombuffer(piece, dtype=np.uint8))
            offset += piece.nbytes

    try:
        yield write_piece
        parts.finish()
        sink.complete()
    except BaseException as error:
        parts.abandon(error)
        sink.abort()
        if isinstance(error, OSError):
            raise WriteError(storage.scrub(f"cannot write {storage.path}/{name}: {error}")) from error
        raise


def _is_working_directory(path: Path) -> bool:
    with suppress(OSError):  # one of the two is not there
        return path.samefile(os.curdir)
    return False


def _take_over(old: Path, new: Path) -> None:
    """Gives a directory the owner, the mode and the extended attributes of the one that it is to replace."""
    state = old.stat()
    with suppress(OSError):
        os.chown(new, state.st_uid, state.st_gid)
    shutil.copystat(old, new)


def _sync(folder: Path) -> None:
    """Makes a directory's files and names durable, whoever wrote them: torch's own writer does not flush before it."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _renamed(path: Path) -> Iterator[Path]:
    """A name beside ``path`` for what is renamed to it at the end, or removed after a failure.

    Directories that are missing above it are made, and after a failure removed unless others have put something there.
    """
    # A name has 255 bytes at most, and a character four of them: of a long name, the beginning must do.
    temporary = path.parent / f".{path.name[:_SHOWN]}.{uuid.uuid4().hex}.tmp"
    made: list[Path] = []
    try:
        made = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.rename(temporary, path)
        LocalStorage(path.parent).sync_directory()
    except OSError as error:
        raise WriteError(f"cannot write {path}: {error}") from error
    finally:
        with suppress(OSError):  # nothing is there, nor could it be
            if temporary.is_dir():
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                temporary.unlink(missing_ok=True)
        for folder in made:
            with suppress(OSError):  # the result is there, or something of others
                folder.rmdir()
