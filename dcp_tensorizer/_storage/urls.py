"""The protocols of URLs."""

from __future__ import annotations

import re

from ..errors import WriteError
from .redact import redact

# fsspec's protocols that cannot write, or, like zip, cannot both write and read
_READ_ONLY = frozenset(("data", "git", "github", "http", "https", "libarchive", "tar", "zip"))

_SPELLINGS = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "ssh": "sftp"}  # several names of one protocol


def one_spelling(url: str) -> str:
    """Returns a URL with the usual name of its protocol: ``s3://`` instead of ``s3a://``. Returns a path as it is."""
    protocol, separator, rest = url.partition("://")
    return f"{_SPELLINGS.get(protocol, protocol)}{separator}{rest}"


def protocols_of(url: str) -> list[str]:
    """Returns the protocols of a URL: one, or several that are chained by ``::``. A path has none.

    As in fsspec, a word in a chain is a protocol, and a single letter is a Windows drive.
    """
    parts = url.split("::")
    words = [part for part in parts if len(parts) > 1 and re.fullmatch("[a-z]{2,}", part)]
    return words + [part.partition("://")[0] for part in parts if part.find("://") > 1]


def is_in_process(url: str) -> bool:
    """Returns whether a URL names the memory of this process, directly or behind a cache."""
    return "memory" in protocols_of(url)


def check_writable(url: str) -> None:
    """Raises `WriteError` if fsspec can only read a URL; does nothing for paths."""
    if read_only := _READ_ONLY.intersection(protocols_of(url)):
        raise WriteError(
            f"cannot write to {redact(url)}: {' and '.join(sorted(read_only))} URLs are read-only. Save to a local "
            f"path, or to a URL such as s3:// or sftp://."
        )
