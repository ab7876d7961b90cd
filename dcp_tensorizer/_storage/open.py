"""Opens the storage that a path or a URL names.

A URL is opened by the package that registered a storage for its protocol, by this package's own storages, or by fsspec,
in this order.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from .._runtime.validation import check_path
from ..errors import CheckpointError, WriteError
from .base import TIMEOUT, Storage
from .local import LocalStorage
from .redact import Scrubber, redact
from .urls import check_writable, protocols_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

STORAGES = "dcp_tensorizer.storages"
"""The group of entry points with which packages register storages."""

_EXTRAS = (
    dict.fromkeys(("s3", "s3a"), "s3")
    | dict.fromkeys(("gs", "gcs"), "gcs")
    | dict.fromkeys(("az", "abfs", "abfss", "adl"), "azure")
    | dict.fromkeys(("sftp", "ssh"), "sftp")
)
"""The extra that installs the library of a protocol: ``pip install 'dcp_tensorizer[s3]'``."""

_SHARED = (["s3"], ["s3a"])
NOT_SHARED = (
    "several processes cannot write one file there. Save the model to a local directory, a network mount or S3, and "
    "copy it to this URL"
)

Opener: TypeAlias = Callable[[str, Mapping[str, Any], float], Storage]
"""Opens a registered storage: takes the URL, the ``storage_options``, and the timeout in seconds.

It may raise any exception. Every save and every load calls it again. For each save that the writer process writes, that
process calls it too.
"""


def open_storage(
    path: str | os.PathLike[str], options: Mapping[str, Any] | None = None, timeout: float = TIMEOUT
) -> Storage:
    """Opens ``path``: a local path, or a URL of a protocol that a package has registered or fsspec knows.

    Args:
        path: Local path (``str`` or path-like, taken literally) or URL.
        options: Passed to the registered opener, to this package's SFTP storage, or to the fsspec filesystem; ignored
            for local paths, including those of ``file:`` URLs.
        timeout: The timeout of an operation of the storage, with all its retries, in seconds.

    Raises:
        WriteError: the path or the URL is invalid, the protocol is unknown, its library is missing, or the storage
            cannot be opened for another reason.
    """
    resolved = absolute_path(path)
    if isinstance(resolved, Path):
        return LocalStorage(resolved)
    url = re.sub(r"(?<=[^:/])/+$", "", resolved)  # a child's name follows one slash
    options, scrub = options or {}, Scrubber(options)
    if points := _registered(url):
        opener, name = _opener(points, url, scrub), points[0].value
        with _named(url, name, scrub):
            storage: object = opener(url, options, timeout)
        if not isinstance(storage, Storage):
            raise WriteError(scrub(f"cannot open {url}: {name} must return a Storage, got {type(storage).__name__}"))
        return storage
    with _translated(url, scrub):
        # Imported only for URLs: these imports take time in the writer process of every rank.
        if (own := _own_storage(url)) is not None:
            return own(url, options, scrub, timeout)
        from .fsspec import open_url

        return open_url(url, options, scrub, timeout)


def check_location(path: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> str | Path:
    """Returns the `absolute_path` of a user's path, after all checks that need no connection.

    Raises:
        TypeError: ``path`` is neither a path nor a URL.
        WriteError: the URL's protocol is unknown, its library is missing, or `absolute_path` failed.
    """
    resolved = absolute_path(path)
    if isinstance(resolved, str):
        scrub = Scrubber(options)
        if points := _registered(resolved):
            _opener(points, resolved, scrub)
        else:
            with _translated(resolved, scrub):
                # The import of the library may raise any exception.
                if _own_storage(resolved) is None:
                    from .fsspec import check_url

                    check_url(resolved)
    return resolved


_OWN_PROTOCOLS = "(sftp|ssh)://[^/]*(/(?!.*::)|$)"  # :: may be part of an IPv6 address, but not of the path


def _own_storage(url: str) -> Callable[[str, Mapping[str, Any], Scrubber, float], Storage] | None:
    """Returns this package's storage class for a URL, or None if fsspec opens the URL. Imports the class's library."""
    if not re.match(_OWN_PROTOCOLS, url):
        return None
    from .sftp import SftpStorage

    return SftpStorage


@contextmanager
def _translated(url: str, scrub: Scrubber) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if re.match("sftp://|ssh://", url):  # a password that is not percent-encoded may contain slashes
            url = re.sub("://.*@", "://", url)
        extra = next((_EXTRAS[protocol] for protocol in protocols_of(url) if protocol in _EXTRAS), None)
        if isinstance(error, ImportError) and extra is not None:
            raise WriteError(
                f"{scrub(f'cannot open {url}')}: its library cannot be imported ({error}): "
                f"pip install 'dcp_tensorizer[{extra}]'"
            ) from None
        advice = ". Check that the package for this kind of URL is installed, and check storage_options."
        if isinstance(error, ConnectionError | TimeoutError):  # of a filesystem that connects at once, such as FTP's
            advice = ""
        raise WriteError(scrub(f"cannot open {url}: {type(error).__name__}: {error}") + advice) from None


def _registered(url: str) -> list[EntryPoint]:
    protocol, separator, _ = url.partition("://")
    if not separator or "::" in url:
        return []
    return [point for point in _entry_points(tuple(sys.path)) if point.name == protocol]


@lru_cache(maxsize=2)
def _entry_points(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Finds the registered storages. Cached by ``sys.path``, because a search reads a file of every package."""
    from importlib.metadata import entry_points  # not for local paths

    return tuple(entry_points(group=STORAGES))


def _opener(points: list[EntryPoint], url: str, scrub: Scrubber) -> Opener:
    if len({point.value for point in points}) > 1:
        named = " and ".join(f"{point.value} of {point.dist.name if point.dist else '?'}" for point in points)
        raise WriteError(scrub(f"cannot open {url}: its protocol is registered by {named}. Uninstall all but one"))
    with _named(url, points[0].value, scrub):
        opener: Opener = points[0].load()
    return opener


@contextmanager
def _named(url: str, opener: str, scrub: Scrubber) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise WriteError(scrub(f"cannot open {url} with {opener}: {type(error).__name__}: {error}")) from None


def path_to_write(
    path: str | os.PathLike[str], options: Mapping[str, Any] | None = None, *, is_shared: bool = False
) -> str | Path:
    """Returns the `absolute_path` of a user's path, after the checks of `check_location`.

    Also raises `WriteError` if the URL is read-only. With ``is_shared``, also raises it for URLs of neither S3 nor a
    registered storage, where several processes cannot write one file.
    """
    check_writable(text := check_path(path))
    if is_shared and _local(path) is None and not _registered(text) and protocols_of(text)[:1] not in _SHARED:
        raise WriteError(f"{redact(text)}: {NOT_SHARED}")
    return check_location(path, options)


def absolute_path(path: str | os.PathLike[str], directory: str | None = None) -> str | Path:
    """Returns a local path, or that of a ``file:`` URL, as an absolute `Path`. Returns other URLs as they are.

    So the path does not depend on the working directory. A relative path is relative to ``directory``, by default the
    working directory. A leading ``~`` is the user's home. Raises `WriteError` if the path is not a valid file name, or
    is relative and there is no working directory.
    """
    text = check_path(path)
    local = _local(path)
    return text if local is None else Path(_absolute(local, directory))


def _absolute(path: str, directory: str | None) -> str:
    try:
        if not path:
            raise ValueError("it is empty")
        if b"\0" in os.fsencode(path):
            raise ValueError("it contains a NUL byte")
        path = os.path.expanduser(path)
        joined = path if os.path.isabs(path) else os.path.join(directory or os.getcwd(), path)
        plain = os.path.normpath(joined)
        # `link/..` is the parent of the link's target, as for the kernel and for torch.
        leads_elsewhere = os.pardir in joined.split(os.sep) and os.path.realpath(joined) != os.path.realpath(plain)
        return os.path.realpath(joined) if leads_elsewhere else plain
    except ValueError as error:
        raise WriteError(f"{path!r} is not a valid path: {error}") from error
    except OSError as error:
        raise WriteError(f"{path!r} is a relative path, and there is no working directory: {error}") from error


def is_location(path: object) -> bool:
    """Returns whether ``path`` is a local path, or a URL of a protocol that a package has registered or fsspec knows.

    Opens nothing, and does not check that the protocol's library is installed.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        return False
    text = os.fspath(path)
    if _local(path) is not None or _registered(text) or re.match(_OWN_PROTOCOLS, text):
        return True
    from .fsspec import is_known

    return is_known(text)


def _local(path: str | os.PathLike[str]) -> str | None:
    """Returns the local path that a path or a ``file:`` URL names; None for other URLs."""
    text = os.fspath(path)
    if isinstance(path, os.PathLike):
        return text
    if "::" in text:
        return None
    protocol, separator, rest = text.partition("://")
    return text if not separator else rest if protocol in ("file", "local") else None
