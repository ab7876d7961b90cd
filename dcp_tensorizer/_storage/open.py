"""Opens the storage that a path or a URL names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .base import TIMEOUT, Storage
from .fsspec import is_known, open_url
from .local import LocalStorage

__all__ = ["is_location", "open_storage"]


def open_storage(
    path: str | os.PathLike[str], options: Mapping[str, Any] | None = None, timeout: float = TIMEOUT
) -> Storage:
    """The storage that ``path`` names: a local path, or any URL that fsspec opens.

    Args:
        path: Local path (``str`` or path-like, taken literally) or URL.
        options: Passed to the fsspec filesystem; ignored for local paths.
        timeout: Seconds after which a request to the storage is given up.

    Raises:
        WriteError: the URL's protocol is unknown, its library is missing, or its server cannot be reached.
    """
    text = os.fspath(path)
    if _is_local(path):
        return LocalStorage(Path(os.path.abspath(text)))
    opened = open_url(text, options or {}, timeout)
    return LocalStorage(opened) if isinstance(opened, Path) else opened


def is_location(path: object) -> bool:
    """Whether `open_storage` can make something of it: a local path, or a URL of a protocol that fsspec knows.

    Nothing is looked for there. Whether the protocol's library is installed shows when the URL is opened.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        return False
    return _is_local(path) or is_known(os.fspath(path))


def _is_local(path: str | os.PathLike[str]) -> bool:
    return isinstance(path, os.PathLike) or ("://" not in path and "::" not in path)
