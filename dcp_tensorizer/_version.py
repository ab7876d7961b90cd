"""The version of the package, also for a source tree that is not installed. Every index records it."""

from __future__ import annotations

__version__ = "0.1.0"
INDEX_VERSION = 1
"""The version of ``.metadata`` that this release writes and reads."""


def environment() -> str:
    """Describes the environment for bug reports: the package and its format, Python, torch, tensorizer and extras.

    Does not import them.
    """
    import platform  # on use: importing these takes longer than importing the package
    import re
    from importlib import metadata

    def release(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    try:
        requirements = metadata.requires("dcp_tensorizer") or []
    except metadata.PackageNotFoundError:  # a tree that is not installed
        requirements = []
    wanted: dict[str, list[str]] = {}
    for requirement in requirements:
        name, extra = re.match(r"[\w.-]+", requirement), re.search(r"extra == ['\"](\w+)", requirement)
        if name and extra:
            wanted.setdefault(extra[1], []).append(name[0])
    extras = [extra for extra, names in sorted(wanted.items()) if all(release(name) for name in names)]
    return (
        f"dcp_tensorizer {__version__} (format {INDEX_VERSION}), Python {platform.python_version()}, "
        f"torch {release('torch')}, tensorizer {release('tensorizer')}, extras: {', '.join(extras) or 'none'}"
    )
