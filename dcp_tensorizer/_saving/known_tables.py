"""Tables of places that the coordinator knows from saves before: a rank need not send its own again.

A rank offers the digests of its last tables beside its plan. The coordinator answers, beside the plan that it sends
back, with those that it knows. It keeps them until the save is over. The answer names the rank's save. So one that a
planner has kept from another save, or one of another coordinator, counts for nothing: then the rank sends its table.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch.distributed.checkpoint.planner import SavePlan

from .._forks import free_in_child
from .._format.places import RankPlaces
from ..errors import WriteError

if TYPE_CHECKING:
    from .keeping import KeptState

__all__ = ["KnownTables", "Offer", "SaveTables"]

_OFFERED = 4  # a job may save its model and its optimizer in turn, each with something beside it
_MAX_BYTES = 256 << 20  # 34 bytes an item: 7 million items of all ranks


class Offer(NamedTuple):
    """In ``SavePlan.storage_data``: the id of a rank's save, and digests of tables.

    Attributes:
        state: In the answer: what the ranks keep in memory, if they do.
        save: In the answer: the id of the coordinator's save.
    """

    save_id: str
    digests: tuple[bytes, ...]
    state: KeptState | None = None
    save: str = ""


class KnownTables:
    """What a rank remembers of its tables, and a coordinator of those of all ranks. Tables are known by contents.

    Args:
        max_bytes: The most that a coordinator keeps.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._own: deque[bytes] = deque(maxlen=_OFFERED)
        self._tables: OrderedDict[bytes, bytes] = OrderedDict()
        self._nbytes = 0
        self._lock = free_in_child(threading.Lock())  # saves may be side by side

    @property
    def own(self) -> tuple[bytes, ...]:
        """The digests of this rank's last tables."""
        return tuple(self._own)

    def find(self, digest: bytes) -> bytes | None:
        """A table; None if it is not known."""
        return self._tables.get(digest)

    def add_own(self, digest: bytes) -> None:
        """Remembers a table of this rank's."""
        if digest not in self._own:
            self._own.append(digest)

    def keep(self, parts: Iterable[RankPlaces]) -> None:
        """Keeps the tables of a save, in place of the oldest ones."""
        with self._lock:
            for part in parts:
                if part.table_digest in self._tables:
                    self._tables.move_to_end(part.table_digest)
                else:
                    self._tables[part.table_digest] = part.table
                    self._nbytes += len(part.table)
            while self._nbytes > self._max_bytes:
                self._nbytes -= len(self._tables.popitem(last=False)[1])


class SaveTables:
    """The tables of one save.

    Args:
        save_id: The rank's.
    """

    def __init__(self, known: KnownTables, save_id: str) -> None:
        self._known = known
        self._save_id = save_id
        self._promised: dict[bytes, bytes] = {}

    def offer(self, plan: SavePlan) -> SavePlan:
        """On a rank: its plan, with what it could leave out."""
        return _with(plan, Offer(self._save_id, self._known.own))

    def answer(self, plan: SavePlan, state: KeptState | None = None) -> SavePlan:
        """On the coordinator: a rank's plan, with what that may leave out, and what all ranks keep in memory."""
        offer = plan.storage_data
        if not isinstance(offer, Offer):
            return plan
        found = {digest: table for digest in offer.digests if (table := self._known.find(digest)) is not None}
        self._promised.update(found)
        return _with(plan, Offer(offer.save_id, tuple(found), state, self._save_id))

    def told(self, plan: SavePlan) -> KeptState | None:
        """On a rank: what the coordinator has said of the state that all ranks keep in memory."""
        answer = plan.storage_data
        return answer.state if isinstance(answer, Offer) and answer.save_id == self._save_id else None

    def save_of(self, plan: SavePlan) -> str:
        """On a rank: the id of the coordinator's save; empty if that is not known."""
        answer = plan.storage_data
        return answer.save if isinstance(answer, Offer) and answer.save_id == self._save_id else ""

    def shortened(self, part: RankPlaces, plan: SavePlan) -> RankPlaces:
        """On a rank: what to send of what it has written."""
        self._known.add_own(part.table_digest)
        answer = plan.storage_data
        is_known = isinstance(answer, Offer) and answer.save_id == self._save_id and part.table_digest in answer.digests
        return part._replace(table=b"") if is_known else part

    def completed(self, parts: Sequence[RankPlaces]) -> list[RankPlaces]:
        """On the coordinator: what ranks have written, with what they have left out.

        Raises:
            WriteError: it has not promised to know that; names the rank.
        """
        whole = [part if part.table else part._replace(table=self._promised_to(part)) for part in parts]
        self._known.keep(whole)
        return whole

    def _promised_to(self, part: RankPlaces) -> bytes:
        try:
            return self._promised[part.table_digest]
        except KeyError:
            raise WriteError(
                f"rank {part.rank} has left out where its data is, and the coordinator does not know it: plans of "
                f"two saves were mixed up. Give each save the planner's own plans."
            ) from None


def _with(plan: SavePlan, offer: Offer) -> SavePlan:
    plan = copy.copy(plan)
    object.__setattr__(
        plan, "storage_data", offer
    )  # `dataclasses.replace` would ask for what is decoded when asked for
    return plan
