"""What the text of a URL says of the place, before anything is opened or imported."""

from __future__ import annotations

import re

from ..errors import WriteError
from .redact import redact

__all__ = ["check_writable", "is_in_process", "protocols_of"]

_READ_ONLY = frozenset(("data", "git", "github", "http", "https"))  # of fsspec


def protocols_of(url: str) -> list[str]:
    """The protocols of a URL: one, or several that are chained by ``::``. A path has none.

    As fsspec has it, a word in a chain is a protocol, and a single letter is a drive of Windows, never a protocol.
    """
    parts = url.split("::")
    words = [part for part in parts if len(parts) > 1 and re.fullmatch("[a-z]{2,}", part)]
    return words + [part.partition("://")[0] for part in parts if part.find("://") > 1]


def is_in_process(url: str) -> bool:
    """Whether it is the memory of one process, which no other can reach, also behind a cache."""
    return "memory" in protocols_of(url)


def check_writable(url: str) -> None:
    """Raises `WriteError` if fsspec only reads what a URL names; does nothing for paths."""
    if read_only := _READ_ONLY.intersection(protocols_of(url)):
        raise WriteError(
            f"nothing can be written to {redact(url)}, because {' and '.join(sorted(read_only))} is only read: save to "
            f"a local path, or to a URL as of s3:// or sftp://"
        )
