"""The package's version, also in a tree that is not installed. It is written into every index."""

from __future__ import annotations

__version__ = "0.1.0"
INDEX_VERSION = 1
"""The version of `.metadata` that this release writes and reads."""


def environment() -> str:
    """Describes what a bug report needs: the package and its format, Python, torch, tensorizer, the installed extras.

    It imports none of them.
    """
    import platform  # not at the top: these take longer than the package itself, and few imports need them
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
