"""What a rank has written for a save that then failed on another rank: it is removed by the rank that wrote it.

A rank whose own part fails leaves nothing behind. The others have written theirs by then, and learn of it from DCP's
error. Where everybody sees a lock, the next save or restore removes what they have left. Elsewhere nobody else can know
whose files those are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .._storage.base import Storage
from .commit import remove_with_records

__all__ = ["WrittenFiles", "failed_before_commit", "is_uncommitted"]

_MARK = "_dcp_tensorizer_before_commit"  # in an error that goes to the other ranks


class WrittenFiles:
    """The files of one rank in one save."""

    def __init__(self) -> None:
        self._storage: Storage | None = None
        self._names: tuple[str, ...] = ()

    def note(self, storage: Storage, names: Iterable[str]) -> None:
        """The rank has written these, and nobody else will remove them."""
        self._storage, self._names = storage, tuple(names)

    def remove(self) -> None:
        """Removes them: the save was not committed, and will not be. Idempotent; what cannot be removed stays."""
        if self._storage is not None:
            remove_with_records(self._storage, self._names)
        self._storage, self._names = None, ()


def failed_before_commit(error: BaseException) -> None:
    """Notes in an error, which goes to all ranks, that a rank's part has failed: so the commit was never begun."""
    vars(error)[_MARK] = True


def is_uncommitted(error: BaseException) -> bool:
    """Whether what DCP raises says that a save was not committed, and will not be.

    A failure of the commit itself does not say so: its answer may have been lost.
    """
    failures = getattr(error, "failures", None)
    causes = [cause for cause, _ in failures.values()] if isinstance(failures, Mapping) else [error]
    return any(_MARK in vars(cause) for cause in causes)
