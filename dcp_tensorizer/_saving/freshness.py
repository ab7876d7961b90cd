"""Whether a save differs from the one before: a job that saves one state again and again has lost its training."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Mapping, Sequence

from .._format.keys import ItemKey
from .._format.layout import StoredItem
from .._memory.tensor_bytes import named_dtype

__all__ = ["Freshness", "warn_if_stale"]

logger = logging.getLogger("dcp_tensorizer")

_DIGEST_BYTES = 8  # the last digest of a tensor is of all of it
_KEYS_SENT = 3  # by each rank
_KEYS_SHOWN = 5


class Freshness:
    """Compares the digests of a rank's floating-point tensors with those of its save before.

    Attributes:
        must_change: Patterns of the keys that are compared, as `fnmatch` has them.
    """

    def __init__(self) -> None:
        self.must_change: tuple[str, ...] = ("*",)
        self._step: int | None = None
        self._digests: dict[ItemKey, bytes] = {}

    def compare(self, step: int, places: Mapping[ItemKey, StoredItem]) -> tuple[str, ...] | None:
        """Compares a save with the one before, and remembers it.

        Args:
            step: Of the save.
            places: Where everything is that the rank has written.

        Returns:
            The keys of the first tensors if none has changed; nothing if one has; None if there is nothing to compare.
        """
        before, self._digests = self._digests, {k: v.digests[-_DIGEST_BYTES:] for k, v in places.items() if _counts(v)}
        step_before, self._step = self._step, step
        watched = [key for key in self._digests if any(fnmatch.fnmatchcase(str(key[0]), p) for p in self.must_change)]
        if step_before in (None, step) or not watched:
            return None
        if any(before.get(key) != self._digests[key] for key in watched):
            return ()
        return tuple(str(key) for key, _ in watched[:_KEYS_SENT])


def warn_if_stale(path: str, step: int, unchanged: Sequence[tuple[str, ...] | None]) -> None:
    """Logs a warning if no rank has saved a tensor that differs from its save before.

    Args:
        path: Of the checkpoint.
        step: Of the save.
        unchanged: What `Freshness.compare` has found, by rank.
    """
    found = [keys for keys in unchanged if keys is not None]
    if found and all(found):
        keys = list(dict.fromkeys(key for keys in found for key in keys))
        logger.warning(
            "%s: step %d holds the same values as the save before, in every floating-point tensor that was compared "
            "(%s): is the state that is saved the one that is trained?",
            path,
            step,
            ", ".join(map(repr, keys[:_KEYS_SHOWN])) + (", ..." if len(keys) > _KEYS_SHOWN else ""),
        )


def _counts(item: StoredItem) -> bool:
    """Whether an item is a floating-point tensor whose digests are of its elements, and not of what a nonce made."""
    if item.kind != "tensor" or not item.digests or item.nonce_and_macs:
        return False
    dtype = named_dtype(item.dtype)
    return dtype.is_floating_point or dtype.is_complex
