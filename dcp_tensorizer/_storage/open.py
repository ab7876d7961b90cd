"""Which storage a path names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .base import TIMEOUT, Storage
from .fsspec import open_url
from .local import LocalStorage

__all__ = ["open_storage"]


def open_storage(
    path: str | os.PathLike[str], options: Mapping[str, Any] | None = None, timeout: float = TIMEOUT
) -> Storage:
    """The storage that ``path`` names: a local path, or any URL that fsspec opens.

    Args:
        path: Local path (``str`` or path-like, taken literally) or URL.
        options: Passed to the fsspec filesystem; ignored for local paths.
        timeout: Seconds after which a wait for the storage is given up.

    Raises:
        WriteError: the URL's protocol is unknown, or its library is missing.
    """
    text = os.fspath(path)
    if isinstance(path, os.PathLike) or ("://" not in text and "::" not in text):
        return LocalStorage(Path(os.path.abspath(text)))
    opened = open_url(text, options or {}, timeout)
    return LocalStorage(opened) if isinstance(opened, Path) else opened
