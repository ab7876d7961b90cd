"""A rank's load plan, whose items stay where they are used.

DCP sends the plans of all ranks to the coordinator and back. There a planner may change them, and nearly none does: so
the items go there in one piece, which is taken apart only if somebody looks at it, and come back only if somebody did.
"""

from __future__ import annotations

import pickle
import uuid
import zlib
from typing import Any
from weakref import WeakValueDictionary

from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

__all__ = ["KeptPlan"]

_at_home: WeakValueDictionary[str, KeptPlan] = WeakValueDictionary()
"""The plans that ranks of this process have made and still have."""


class KeptPlan(LoadPlan):
    """A load plan; the one that `keep` gives must be kept until it has come back.

    Its fields are those of `LoadPlan`. To change the items elsewhere, set them, or make a new plan.
    """

    def __init__(self, items: list[ReadItem], storage_data: Any = None, planner_data: Any = None) -> None:
        self._items: list[ReadItem] | None = items
        self._packed = b""
        self._token = ""
        self._rank = -1
        self.storage_data = storage_data
        self.planner_data = planner_data

    @classmethod
    def keep(cls, plan: LoadPlan, rank: int, storage_data: Any) -> KeptPlan:
        """The plan of a rank, with other ``storage_data``."""
        kept = cls(plan.items, storage_data, plan.planner_data)
        kept._token, kept._rank = uuid.uuid4().hex, rank
        _at_home[kept._token] = kept
        return kept

    @property
    def items(self) -> list[ReadItem]:
        if self._items is None:
            self._items = pickle.loads(zlib.decompress(self._packed))
        if _at_home.get(self._token) is not self:
            self._token = ""  # whoever has them may change them: so these count from now on
        return self._items

    @items.setter
    def items(self, items: list[ReadItem]) -> None:
        self._items, self._token = items, ""

    def send_to(self, rank: int) -> None:
        """Gives the items along if a planner has given the plan to another rank than the one that made it."""
        if rank != self._rank:
            self.items = self.items

    def __reduce__(self) -> tuple[Any, ...]:
        data = self.storage_data, self.planner_data
        if not self._token:
            return KeptPlan, (self.items, *data)
        if self._items is None:
            return _back, (self._token, *data)
        return _sent, (self._token, self._rank, zlib.compress(pickle.dumps(self._items), 1), *data)


def _sent(token: str, rank: int, packed: bytes, storage_data: Any, planner_data: Any) -> KeptPlan:
    """At the coordinator: the plan with its items in one piece."""
    plan = KeptPlan([], storage_data, planner_data)
    plan._items, plan._packed, plan._token, plan._rank = None, packed, token, rank
    return plan


def _back(token: str, storage_data: Any, planner_data: Any) -> KeptPlan:
    """At the rank that made the plan: with the items that it has kept."""
    return KeptPlan(_at_home[token].items, storage_data, planner_data)
