"""Which storage a URL names; the only module that imports fsspec."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ._s3 import S3Storage
from ._sftp import SftpStorage
from ._storage import Storage, redact
from ._stream import StreamStorage
from .errors import WriteError

__all__ = ["open_url"]

_TRIES = 10  # so that requests can be tried again, with waits between, before time is up


def open_url(url: str, options: Mapping[str, Any], timeout: float) -> Storage | Path:
    """The storage that a URL names, or the local path.

    Filesystems are made afresh, not taken from fsspec's cache: with credentials as they are now, without listings.

    Args:
        url: Of the directory.
        options: For the filesystem.
        timeout: Seconds after which a wait for it is given up; connections that are silent for a tenth of that are
            renewed, where the filesystem leaves that to us (S3 and SFTP).

    Raises:
        WriteError: its protocol is unknown, its library is missing, or its server cannot be reached.
    """
    scrub = Scrubber(options)
    patience = timeout / _TRIES
    try:
        import fsspec.core
        from fsspec.implementations.local import LocalFileSystem

        protocol = fsspec.utils.get_protocol(url)
        options = {"skip_instance_cache": True} | dict(options)
        if protocol in ("sftp", "ssh"):
            options = {"timeout": patience, "banner_timeout": patience} | options
            host, slash, path = url.partition("://")[2].partition("/")
            filesystem, _ = fsspec.core.url_to_fs(f"{protocol}://{host}/", **options)  # which would cut "?" and "#" off
            return SftpStorage(filesystem, slash + path, url, scrub, patience)
        filesystem, root = fsspec.core.url_to_fs(url, **options)
        if type(filesystem) is LocalFileSystem:
            return Path(root)
        if protocol in ("s3", "s3a") and "session" not in options:  # a session is aiobotocore's, and s3fs's to use
            return S3Storage(filesystem, root, url, scrub, patience)
        return StreamStorage(filesystem, root, url, scrub)
    except Exception as error:
        message = scrub(f"cannot open {url}: {type(error).__name__}: {error}")
        raise WriteError(
            f"{message} (is the package for this kind of URL installed, and are storage_options right?)"
        ) from None


class Scrubber:
    """Removes credentials from a text: those in URLs, and every longer string or number among the storage options."""

    def __init__(self, options: Mapping[str, Any] | None) -> None:
        self._secrets = sorted(_strings(options or {}), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        text = redact(text)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


_OPEN_KEY = re.compile("endpoint|region")


def _strings(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [text for key, item in value.items() if not _OPEN_KEY.search(str(key)) for text in _strings(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _strings(item)]
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)  # a password of digits
    return (
        [value] if isinstance(value, str) and len(value) >= 6 and not value.startswith(("http://", "https://")) else []
    )
