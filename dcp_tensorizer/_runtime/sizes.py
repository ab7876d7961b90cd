"""Numbers of bytes in words."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Bytes in decimal units: ``1.5 GB``."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    value, units = nbytes / 1000, ["kB", "MB", "GB", "TB", "PB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {units[0]}"
