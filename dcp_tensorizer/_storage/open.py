"""Opens the storage that a path or a URL names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import WriteError
from .base import TIMEOUT, Storage
from .local import LocalStorage


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
    resolved = absolute_path(path)
    if isinstance(resolved, Path):
        return LocalStorage(resolved)
    from .fsspec import open_url  # not for local paths: a writer process for each of a node's ranks would feel it

    opened = open_url(resolved, options or {}, timeout)
    return LocalStorage(opened) if isinstance(opened, Path) else opened


def absolute_path(path: str | os.PathLike[str], directory: str | None = None) -> str | Path:
    """An absolute path, which names the same place in another working directory, or the URL as it is.

    Args:
        path: As for `open_storage`. A ``~`` is a name as any other.
        directory: What a relative path is relative to; by default the working directory.

    Raises:
        WriteError: it cannot be the name of a file, or is relative, and there is no working directory.
    """
    text = os.fspath(path)
    if _is_local(path):
        return Path(_absolute(text, directory))
    protocol, _, rest = text.partition("://")
    if protocol in ("file", "local") and not rest.startswith(("/", "~")):  # fsspec expands a ~
        return f"{protocol}://{_absolute(rest, directory)}"
    return text


def _absolute(path: str, directory: str | None) -> str:
    try:
        if not path:
            raise ValueError("it is empty")
        if b"\0" in os.fsencode(path):
            raise ValueError("it holds a NUL")
        joined = path if os.path.isabs(path) else os.path.join(directory or os.getcwd(), path)
        plain = os.path.normpath(joined)
        # `link/..` is the parent of what the link leads to, as the system, torch and everybody else has it.
        leads_elsewhere = os.pardir in joined.split(os.sep) and os.path.realpath(joined) != os.path.realpath(plain)
        return os.path.realpath(joined) if leads_elsewhere else plain
    except ValueError as error:
        raise WriteError(f"{path!r} is no path: {error}") from error
    except OSError as error:
        raise WriteError(f"{path!r} is a relative path, and there is no working directory: {error}") from error


def is_location(path: object) -> bool:
    """Returns whether `open_storage` can make something of it: a local path, or a URL of a protocol that fsspec knows.

    Nothing is looked for there. Whether the protocol's library is installed shows when the URL is opened.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        return False
    if _is_local(path):
        return True
    from .fsspec import is_known

    return is_known(os.fspath(path))


def _is_local(path: str | os.PathLike[str]) -> bool:
    return isinstance(path, os.PathLike) or ("://" not in path and "::" not in path)
