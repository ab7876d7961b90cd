"""A local folder and the remote folder that it is flushed to: the checkpoint LOCAL/x becomes REMOTE/x.

``subpath`` is the path x of a checkpoint, relative to both folders and with slashes; empty for the folders themselves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._runtime.threads import ProgressTimeout
from .._storage.base import TIMEOUT, Storage
from .._storage.open import absolute_path, open_storage
from .._storage.redact import redact
from .._storage.urls import is_in_process, one_spelling
from ..errors import WriteError

_LONGEST_PAUSE = 20.0
"""Of a pause between two checks of a flush, at most this many seconds count towards the flush's timeout.

So a suspended job does not time out. Slow disks and the waits between two attempts take less than that.
"""


@dataclass(frozen=True, slots=True, repr=False)  # it contains secrets
class FlushTarget:
    """A local folder, and the remote folder that it is flushed to.

    ``remote`` is a path or URL, which `open_storage` opens with ``options``. A flush without progress times out after
    ``timeout`` seconds.
    """

    local: str
    remote: str
    options: Mapping[str, Any]
    timeout: float = TIMEOUT

    @property
    def name(self) -> str:
        """Returns the remote folder in one spelling, without credentials, for records and messages."""
        return one_spelling(redact(self.remote)).rstrip("/")

    def progress_timeout(self) -> ProgressTimeout:
        return ProgressTimeout(self.timeout, _LONGEST_PAUSE)

    def open(self, subpath: str = "") -> Storage:
        """Opens the remote folder, or the directory of a checkpoint in it; raises `WriteError`."""
        root = Path(self.remote) if self.remote.startswith("/") else self.remote
        storage = open_storage(root, self.options, self.timeout)
        if storage.in_process:
            raise WriteError(_in_process(self.name))
        return below(storage, subpath)

    def folder(self, subpath: str = "") -> Path:
        return Path(self.local, subpath)


def below(root: Storage, subpath: str) -> Storage:
    for name in filter(None, subpath.split("/")):
        root = root.child(name)
    return root


def subpath_of(root: str | os.PathLike[str], path: str | os.PathLike[str]) -> str | None:
    """Returns a path relative to a root: empty for the root itself, None if the path is not below the root."""
    above, below = (one_spelling(os.fspath(end)).rstrip("/") for end in (root, path))
    if above == below:
        return ""
    if not below.startswith(above + "/"):
        return None
    subpath = below[len(above) + 1 :]
    return None if {"", ".", ".."} & set(subpath.split("/")) else subpath


def _in_process(name: str) -> str:
    return f"{name} is in the memory of one process, but another process flushes the local folder. Omit local=."


def target_of(
    path: str | os.PathLike[str] | None, local: object, options: Mapping[str, Any], timeout: float
) -> FlushTarget:
    """Returns the target of a writer or reader with a local folder.

    Raises `TypeError` or `ValueError` if the two paths cannot be used together or have the wrong type, and
    `WriteError` if `absolute_path` fails.
    """
    if not isinstance(local, str | os.PathLike) or not isinstance(os.fspath(local), str):
        raise TypeError(f"local must be a str or an os.PathLike, got {type(local).__name__}")
    if path is None:
        raise ValueError("local= requires path=, the folder that it mirrors. Pass both")
    here, remote = absolute_path(local), os.fspath(absolute_path(path))
    if not isinstance(here, Path):
        raise ValueError("local must be a local folder, got a URL")
    if is_in_process(remote):
        raise ValueError(_in_process(redact(remote)))
    if subpath_of(here, remote) is not None or subpath_of(remote, here) is not None:
        raise ValueError(f"local={os.fspath(here)!r} and path={redact(remote)!r} must not contain each other")
    return FlushTarget(os.fspath(here), remote, dict(options), timeout)
