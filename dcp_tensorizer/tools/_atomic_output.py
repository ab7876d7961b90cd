"""Creates the file or directory that a conversion writes. A local one has a temporary name until it is complete."""

from __future__ import annotations

import fnmatch
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .._storage.base import Storage
from .._storage.local import LocalStorage
from .._storage.open import absolute_path, open_storage
from .._storage.redact import redact
from .._tiers.target import subpath_of
from ..errors import ConversionError, NotCommitted, WriteError

_SHOWN = 50  # characters of the final name in a temporary name, so that error messages show which file it is


def beside(path: str, options: Mapping[str, Any]) -> tuple[Storage, str]:
    """Returns the storage of a file's directory, and the file's name in it."""
    absolute = absolute_path(path)
    if isinstance(absolute, Path):
        return LocalStorage(absolute.parent), absolute.name
    folder, _, name = path.rpartition("/")
    if not name or folder.endswith(":/"):
        raise ConversionError(f"{redact(path)} names no file in a directory. Add a file name.")
    return open_storage(folder, options), name


def check_apart(output: str | os.PathLike[str], sources: Iterable[str | os.PathLike[str]]) -> None:
    """Raises `ConversionError` if an output is one of the paths that a command reads, or is inside one of them."""
    for source in sources:
        if (inside := subpath_of(_real(source), _real(output))) is not None:
            relation = "is inside" if inside else "is"
            raise ConversionError(
                f"the output {shown_path(os.fspath(output))} {relation} {shown_path(os.fspath(source))}, which is an "
                f"input. Choose another output."
            )


def _real(path: str | os.PathLike[str]) -> str:
    """Returns a local path, or that of a ``file:`` URL, without links; other URLs as they are."""
    absolute = absolute_path(path)
    return os.path.realpath(absolute) if isinstance(absolute, Path) else absolute


def shown_path(path: str) -> str:
    """Returns an absolute path, or a URL without credentials, for metadata and messages, as `Storage.path` has it."""
    return redact(str(absolute_path(path)))


@contextmanager
def new_directory(target: str, options: Mapping[str, Any], files: str) -> Iterator[Storage]:
    """Creates a directory. After a failure, if the storage is not local, removes the new files that match ``files``."""
    storage = open_storage(target, options)
    with suppress(NotCommitted):
        if any(storage.listing()):
            raise ConversionError(f"{storage.path} exists and is not empty. Choose another destination.")
    if isinstance(storage, LocalStorage):
        real, is_here = Path(os.path.realpath(storage.location)), False
        if real.exists() and not real.is_dir():
            raise ConversionError(f"{storage.path} exists and is not a directory. Choose another destination.")
        with suppress(OSError):  # the target or the working directory does not exist
            is_here = real.samefile(os.curdir)
        if is_here:
            raise ConversionError(
                f"{storage.path} is the working directory and would be replaced. Choose another destination."
            )
        if real.is_mount():
            raise ConversionError(f"{storage.path} is a mount point and cannot be replaced. Name a directory in it.")
        with _renamed(real) as temporary:
            temporary.mkdir()
            if real.exists():  # the rename replaces this empty directory: preserve its owner, mode and ACL
                state = real.stat()
                with suppress(OSError):
                    os.chown(temporary, state.st_uid, state.st_gid)
                shutil.copystat(real, temporary)
            yield LocalStorage(temporary)
            # torch's own writer calls fsync before it flushes Python's buffers.
            for path in (*temporary.iterdir(), temporary):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
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
    storage, name = beside(path, options)
    if storage.head(name) is not None:
        raise ConversionError(f"{storage.path}/{name} exists. Choose another destination.")
    if isinstance(storage, LocalStorage):
        real = Path(os.path.realpath(Path(storage.location) / name))
        with _renamed(real) as temporary:
            yield LocalStorage(real.parent), temporary.name
    else:
        yield storage, name


@contextmanager
def _renamed(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside ``path``. Then renames that path to ``path`` or, after a failure, removes it.

    Creates missing parent directories. After a failure, removes those that are still empty.
    """
    # A file name has at most 255 bytes, and a character takes up to four: truncate long names.
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
        with suppress(OSError):  # an error here must not replace the error that ended the block
            if temporary.is_dir():
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                temporary.unlink(missing_ok=True)
        for folder in made:
            with suppress(OSError):  # never created, or not empty: it holds the result or unrelated files
                folder.rmdir()
