"""The pair of a local folder and the remote one to which it is flushed: LOCAL/x on a node is a copy of PATH/x."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._runtime.threads import Patience
from .._storage.base import TIMEOUT, Storage
from .._storage.open import absolute_path, open_storage
from .._storage.redact import redact
from .._storage.urls import is_in_process
from ..errors import WriteError

_LONGEST_LOOK = 20.0
"""Seconds. A longer pause between two looks at a flush does not count as waiting. A slow disk takes less, and so does
the time between two tries.
"""


@dataclass(frozen=True, slots=True, repr=False)  # it contains secrets
class FlushTarget:
    """A local folder, and the remote one to which it is flushed.

    The remote is a path or URL, which `open_storage` opens with ``options``. A wait for it ends after ``timeout``
    seconds.
    """

    local: str
    remote: str
    options: Mapping[str, Any]
    timeout: float = TIMEOUT

    @property
    def name(self) -> str:
        """The remote folder without credentials, for records and messages."""
        return redact(self.remote).rstrip("/")

    def patience(self) -> Patience:
        """The time limit for a flush that makes no progress."""
        return Patience(self.timeout, _LONGEST_LOOK)

    def open(self, place: str = "") -> Storage:
        """The remote storage of a place; raises `WriteError`."""
        root = Path(self.remote) if self.remote.startswith("/") else self.remote
        storage = open_storage(root, self.options, self.timeout)
        if storage.in_process:
            raise WriteError(_in_process(self.name))
        return below(storage, place)

    def folder(self, place: str = "") -> Path:
        """The local folder of a place."""
        return Path(self.local, place)


def below(root: Storage, place: str) -> Storage:
    """The storage of a place below a root."""
    for name in filter(None, place.split("/")):
        root = root.child(name)
    return root


def place_of(root: str | os.PathLike[str], path: str | os.PathLike[str]) -> str | None:
    """A path relative to a root, with slashes. Empty for the root itself; None for a path elsewhere."""
    above, below = (os.fspath(end).rstrip("/") for end in (root, path))
    if above == below:
        return ""
    if not below.startswith(above + "/"):
        return None
    place = below[len(above) + 1 :]
    return None if {"", ".", ".."} & set(place.split("/")) else place


def _in_process(name: str) -> str:
    return f"{name} is in the memory of one process, and another one flushes the local folder. Save without local="


def target_of(
    path: str | os.PathLike[str] | None, local: object, options: Mapping[str, Any], timeout: float
) -> FlushTarget:
    """The target of a writer or a reader with a local folder.

    Raises `TypeError` unless the local folder is a path, `ValueError` if it is a URL, if there is no path to mirror, if
    that is in memory, or if one contains the other, and `WriteError` if one is relative and there is no working
    directory.
    """
    if not isinstance(local, str | os.PathLike) or not isinstance(os.fspath(local), str):
        raise TypeError(f"local must be a str or an os.PathLike, got {type(local).__name__}")
    if path is None:
        raise ValueError("local= needs a path to mirror. Pass path= as well")
    here, remote = absolute_path(local), os.fspath(absolute_path(path))
    if not isinstance(here, Path):
        raise ValueError("local must be a folder on a disk of this machine, got a URL")
    if is_in_process(remote):
        raise ValueError(_in_process(redact(remote)))
    if place_of(here, remote) is not None or place_of(remote, here) is not None:
        raise ValueError(f"local={os.fspath(here)!r} and path={redact(remote)!r} must not contain each other")
    return FlushTarget(os.fspath(here), remote, dict(options), timeout)
