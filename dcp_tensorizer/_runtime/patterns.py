"""Shell-style patterns of keys, such as ``model.*.weight``, in which ``*`` also matches dots."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable

_KEPT = 1 << 16  # compiled patterns: a caller may pass one pattern per key. Up to Python 3.10, `fnmatch` keeps 256


def matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Returns whether one of the names matches one of the patterns."""
    return any(_compiled(pattern)(name) for name in names for pattern in patterns)


@functools.lru_cache(_KEPT)
def _compiled(pattern: str) -> Callable[[str], object]:
    return re.compile(fnmatch.translate(pattern)).match
