"""What is in a local directory."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from ..errors import NotCommitted, ReadError
from .base import FileInfo, Shared

__all__ = ["linked_directories", "list_directory"]


def list_directory(folder: Path) -> tuple[list[FileInfo], list[str]]:
    """Its files and its directories; see `Storage.listing`."""
    files, folders = [], []
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False):  # a link would show its directory twice
            folders.append(entry.name)
            continue
        with suppress(OSError):  # removed since then, or a link to nowhere or in a circle
            state = entry.stat()
            if stat.S_ISREG(state.st_mode):
                shared = Shared(state.st_dev, state.st_ino, state.st_nlink) if state.st_nlink > 1 else None
                files.append(FileInfo(entry.name, state.st_size, state.st_mtime, state.st_ctime, shared))
    return files, folders


def linked_directories(folder: Path) -> list[str]:
    """Links to directories that are not in the same directory; see `Storage.linked_directories`."""
    here = os.path.realpath(folder)
    linked = [entry.path for entry in _entries(folder) if entry.is_symlink() and os.path.isdir(entry.path)]
    return [os.path.basename(path) for path in linked if os.path.dirname(os.path.realpath(path)) != here]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotCommitted(f"there is no directory {folder}") from error
    except OSError as error:
        raise ReadError(f"cannot list {folder}: {error}") from error
