"""What a keeper is told of a staged state, and does not look into: which items it has, and where in memory each is."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import NamedTuple

from torch.distributed.checkpoint.planner import WriteItem

from .messages import Keep

__all__ = ["KeptItem", "kept_items"]


class KeptItem(NamedTuple):
    """An item of a kept state.

    Attributes:
        plan: What a planner makes of it.
        name, kind, dtype: As in a `StoredItem`.
        extent: The number of its bytes among the extents; None if it has none.
    """

    plan: WriteItem
    name: str
    kind: str
    dtype: str
    extent: int | None


def kept_items(state: Keep) -> Sequence[KeptItem]:
    """The items of a kept state. It was kept by a process of this user, or else nobody would have connected to it."""
    items: list[KeptItem] = pickle.loads(state.description)
    return items
