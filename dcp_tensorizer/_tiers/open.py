"""Opens what is loaded: from a path, or from the nearest copy where a local folder mirrors it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .._storage.base import Storage
from .._storage.open import absolute_path, open_storage
from .._storage.redact import redact
from ..errors import ReadError
from .nearest import NearestStorage
from .target import place_of, target_of

__all__ = ["Opener"]


class Opener:
    """Opens checkpoints by their paths.

    Args:
        path: That the local folder mirrors.
        options, timeout: As for `open_storage`.
        local: The local folder; None if there is none.

    Raises:
        TypeError, ValueError, WriteError: see `target_of`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: Mapping[str, Any] | None,
        timeout: float,
        local: str | os.PathLike[str] | None,
    ) -> None:
        self._options, self._timeout = dict(options or {}), timeout
        self._target = None if local is None else target_of(path, local, self._options, timeout)

    def __call__(self, path: str | os.PathLike[str]) -> Storage:
        """The storage of a checkpoint.

        Raises:
            WriteError: it cannot be opened.
            ReadError: it is not below the path that the local folder mirrors.
        """
        if self._target is None:
            return open_storage(path, self._options, self._timeout)
        place = place_of(self._target.remote, absolute_path(path))
        if place is None:
            raise ReadError(
                f"{redact(os.fspath(path))} is not below {self._target.name}, which {self._target.local} mirrors: give "
                f"the reader that path, or no local folder"
            )
        return NearestStorage(self._target, self._target.open(place), place)
