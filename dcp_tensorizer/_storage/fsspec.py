"""Which storage a URL names; the only module that imports fsspec."""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import WriteError
from .base import Storage
from .redact import Scrubber
from .retry import patience_of
from .s3 import S3Storage
from .stream import StreamStorage

__all__ = ["open_url"]

_AZURE = ("az", "abfs", "abfss")
_SHARED: dict[str, Any] = {}
_SHARING = threading.Lock()


def open_url(url: str, options: Mapping[str, Any], timeout: float) -> Storage | Path:
    """The storage that a URL names, or the local path.

    Filesystems are made afresh, not taken from fsspec's cache: with credentials as they are now, without listings. But
    for Azure's: adlfs never frees one, and each has connections of its own.

    Args:
        url: Of the directory.
        options: For the filesystem.
        timeout: Seconds after which a wait for it is given up; connections that are silent for a tenth of that are
            renewed, where the filesystem leaves that to us.

    Raises:
        WriteError: its protocol is unknown, its library is missing, or its server cannot be reached.
    """
    scrub = Scrubber(options)
    url = re.sub(r"(?<=[^:/])/+$", "", url)
    try:
        import fsspec.core
        from fsspec.implementations.local import LocalFileSystem

        protocol = fsspec.utils.get_protocol(url)
        if protocol in ("sftp", "ssh"):
            from .sftp import SftpStorage

            return SftpStorage(url, options, scrub, timeout)
        options = {"skip_instance_cache": True} | _timeouts(protocol, timeout) | dict(options)
        if protocol in _AZURE:
            filesystem, root = _shared(protocol, url, options)
        else:
            filesystem, root = fsspec.core.url_to_fs(url, **options)
        if type(filesystem) is LocalFileSystem:
            return Path(root)
        if protocol in ("s3", "s3a") and "session" not in options:  # a session is aiobotocore's, and s3fs's to use
            return S3Storage(filesystem, root, url, scrub, timeout)
        return StreamStorage(filesystem, root, url, scrub, timeout)
    except Exception as error:
        if re.match("sftp://|ssh://", url):  # a password that is not percent-encoded may have slashes
            url = re.sub("://.*@", "://", url)
        message = scrub(f"cannot open {url}: {type(error).__name__}: {error}")
        raise WriteError(
            f"{message} (is the package for this kind of URL installed, and are storage_options right?)"
        ) from None


def _shared(protocol: str, url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """A filesystem that whoever gives the same options in this process shares, and the path in it."""
    import fsspec

    kind = fsspec.get_filesystem_class(protocol)
    given = kind._get_kwargs_from_urls(url) | dict(options)
    key = fsspec.utils.tokenize(kind, os.getpid(), given)  # its event loop is not there in a forked child
    with _SHARING:
        if key not in _SHARED:
            _SHARED[key] = kind(**given)
        filesystem = _SHARED[key]
    filesystem.invalidate_cache()
    return filesystem, kind._strip_protocol(url)


def _timeouts(protocol: str, timeout: float) -> dict[str, float]:
    """Those options by which filesystems that connect by themselves end their waits."""
    if protocol in ("gs", "gcs"):
        return {"requests_timeout": timeout / 2}  # of a whole request, and not of silence
    if protocol in _AZURE:
        return dict.fromkeys(("connection_timeout", "read_timeout"), math.ceil(patience_of(timeout)))
    return {}
