"""Which file system a path is on, as the kernel lists the mounts of this process."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

__all__ = ["file_system"]

_MOUNTS = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(rb"\\([0-7]{3})")


def file_system(path: Path, mounts: Path = _MOUNTS) -> str:
    """The type of the file system that a path is on; empty if that is unknown."""
    real = os.path.realpath(path)
    nearest, kind = "", ""
    with suppress(OSError), mounts.open("rb") as lines:
        for line in lines:
            fields, _, rest = line.partition(b" - ")
            mount = _unescaped(fields.split(b" ")[4])
            is_inside = real == mount or real.startswith(mount.rstrip("/") + "/")
            if is_inside and len(mount) >= len(nearest):
                nearest, kind = mount, rest.split(b" ")[0].decode("ascii", "replace")
    return kind


def _unescaped(field: bytes) -> str:
    """A path of the list. What would end a field is escaped there; all else is as it is, in any encoding."""
    return os.fsdecode(_ESCAPE.sub(lambda found: bytes([int(found[1], 8) & 0xFF]), field))
