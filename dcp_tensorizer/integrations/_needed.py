"""Imports of libraries that are not installed with this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed(by: str, install: str) -> Iterator[None]:
    """Adds the importer (``by``) and the package to ``install`` to an `ImportError` of the ``with`` block."""
    try:
        yield
    except ImportError as error:
        message = f"{by} cannot import what it needs ({error}): pip install '{install}'"
        raise type(error)(message, name=error.name, path=error.path) from error
