"""Opens the storage that a URL names. Only this module imports fsspec."""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._forks import free_in_child
from .._process_context import environment
from ..errors import WriteError
from .base import Storage
from .option_names import check_names
from .redact import Scrubber
from .retry import patience_of
from .s3 import S3Storage
from .stream import StreamStorage
from .urls import protocols_of

__all__ = ["is_known", "open_url"]

_AZURE = ("az", "abfs", "abfss")
_EXTRAS = (
    dict.fromkeys(("s3", "s3a"), "s3")
    | dict.fromkeys(("gs", "gcs"), "gcs")
    | dict.fromkeys((*_AZURE, "adl"), "azure")
    | dict.fromkeys(("sftp", "ssh"), "sftp")
)
"""What brings the library of a protocol: ``pip install 'dcp_tensorizer[s3]'``."""
# Where Azure's library looks for keys, proxies and certificates. Not all variables: each change would cost memory.
_AZURE_VARIABLES = re.compile("(AZURE|IDENTITY|MSI|IMDS|SSL|REQUESTS|CURL)_|.*_PROXY$|HOME$", re.IGNORECASE)
_shared_filesystems: dict[str, Any] = {}
_sharing = free_in_child(threading.Lock())


def open_url(url: str, options: Mapping[str, Any], timeout: float) -> Storage | Path:
    """The storage that a URL names, or the local path.

    Filesystems are new ones, not from fsspec's cache: they use the credentials of now, and remember no listings.
    Azure's are the exception: adlfs never frees one, and each has connections of its own.

    Args:
        url: Of the directory.
        options: For the filesystem.
        timeout: Seconds after which a request is given up. A connection that is silent for a tenth of that is
            replaced, where the filesystem leaves that to us.

    Raises:
        WriteError: its protocol is unknown, its library is missing, or its server cannot be reached.
    """
    scrub = Scrubber(options)
    url = re.sub(r"(?<=[^:/])/+$", "", url)
    try:
        return _open(url, options, scrub, timeout)
    except Exception as error:
        if re.match("sftp://|ssh://", url):  # a password that is not percent-encoded may have slashes
            url = re.sub("://.*@", "://", url)
        extra = next((_EXTRAS[protocol] for protocol in protocols_of(url) if protocol in _EXTRAS), None)
        if isinstance(error, ImportError) and extra is not None:
            raise WriteError(
                f"{scrub(f'cannot open {url}')}: its library cannot be imported ({error}): "
                f"pip install 'dcp_tensorizer[{extra}]'"
            ) from None
        message = scrub(f"cannot open {url}: {type(error).__name__}: {error}")
        raise WriteError(
            f"{message} (is the package for this kind of URL installed, and are storage_options right?)"
        ) from None


def is_known(url: str) -> bool:
    """Whether fsspec knows the protocols of a URL: one, or several that are chained by ``::``."""
    import fsspec

    return {*fsspec.available_protocols(), *fsspec.registry}.issuperset(protocols_of(url))


def _open(url: str, options: Mapping[str, Any], scrub: Scrubber, timeout: float) -> Storage | Path:
    import fsspec.core
    from fsspec.implementations.local import LocalFileSystem

    protocol = fsspec.utils.get_protocol(url)
    if protocol in ("sftp", "ssh"):
        from .sftp import SftpStorage

        return SftpStorage(url, options, scrub, timeout)
    check_names(protocol, fsspec.get_filesystem_class(protocol), options)
    options = {"skip_instance_cache": True} | _timeout_options(protocol, timeout) | dict(options)
    if protocol in _AZURE:
        filesystem, root = _shared_filesystem(protocol, url, options)
    else:
        filesystem, root = fsspec.core.url_to_fs(url, **(options | _new_ones_of_chain(url, options)))
    if type(filesystem) is LocalFileSystem:
        return Path(root)
    if protocol in ("s3", "s3a") and "session" not in options:  # a session is aiobotocore's, which only s3fs can use
        return S3Storage(filesystem, root, url, scrub, timeout)
    return StreamStorage(filesystem, root, url, scrub, timeout)


def _new_ones_of_chain(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that keep fsspec from using again, behind the first of a chain of filesystems, what it has once made."""
    behind = protocols_of(url)[1:] if "::" in url else []
    return {name: {"skip_instance_cache": name not in _AZURE} | dict(options.get(name) or {}) for name in behind}


def _shared_filesystem(protocol: str, url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """A filesystem that this process makes once for the same options and keys, and the path in it."""
    import fsspec

    kind = fsspec.get_filesystem_class(protocol)
    arguments = kind._get_kwargs_from_urls(url) | dict(options)
    variables = {name: value for name, value in environment().items() if _AZURE_VARIABLES.match(name)}
    # A forked child has no thread for its event loop.
    key = fsspec.utils.tokenize(kind, os.getpid(), arguments, variables)
    with _sharing:
        if key not in _shared_filesystems:
            _shared_filesystems[key] = kind(**arguments)
        filesystem = _shared_filesystems[key]
    filesystem.invalidate_cache()
    return filesystem, kind._strip_protocol(url)


def _timeout_options(protocol: str, timeout: float) -> dict[str, float]:
    """Options that end the waits of filesystems with connections of their own."""
    if protocol in ("gs", "gcs"):
        return {"requests_timeout": timeout / 2}  # of a whole request, not of silence
    if protocol in _AZURE:
        return dict.fromkeys(("connection_timeout", "read_timeout"), math.ceil(patience_of(timeout)))
    return {}
