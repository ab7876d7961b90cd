"""What a keeper is told of a staged state, and does not look into: which items it has, and where in memory each is."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.distributed.checkpoint.planner import WriteItem

from .messages import Keep

__all__ = ["KeptItem", "KeptPlan", "kept_plan"]


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


class KeptPlan(NamedTuple):
    """What a kept state has.

    Attributes:
        items: All of them.
        planner_data: As in the rank's ``SavePlan``.
    """

    items: Sequence[KeptItem]
    planner_data: Any

    def pickled(self) -> bytes:
        """As a keeper is given it."""
        return pickle.dumps(self, protocol=pickle.HIGHEST_PROTOCOL)


def kept_plan(state: Keep) -> KeptPlan:
    """What a kept state has. It was kept by a process of this user, or else nobody would have connected to it."""
    plan: KeptPlan = pickle.loads(state.description)
    return plan
