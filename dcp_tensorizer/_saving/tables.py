"""Tables of locations that the coordinator knows from earlier saves, so that ranks need not send them again.

A rank's table of locations has the file, offset and length of each item that the rank has written. With its plan, a
rank sends the digests of its last tables. The coordinator responds, in the plan that it returns, with those of the
digests whose tables it has cached, and holds these tables until the save ends. The response names the rank's save. So
if a planner has cached a response from an earlier save, the rank ignores that response, and sends its table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from torch.distributed.checkpoint.planner import SavePlan

from .._index.locations import RankLocations
from .._runtime.recent import Recent
from ..errors import WriteError
from .write_plan import plan_with

SAVES = 4
"""The number of last saves whose tables a rank offers: a job may save its model and its optimizer in turn, and other
states between them."""

_MAX_BYTES = 256 << 20  # of cached tables; with 34 bytes per item, this is 7 million items of all ranks


class Offer(NamedTuple):
    """A rank's message in ``SavePlan.storage_data``: the id of the rank's save, and digests of tables.

    The coordinator's response has the same id, and in ``save`` the id of the coordinator's save.
    """

    save_id: str
    digests: tuple[bytes, ...]
    save: str = ""


class KnownTables:
    """The tables of the last saves. The coordinator caches at most ``max_bytes`` bytes of them.

    Attributes:
        sent: The digests of this rank's own tables.
        cached: On the coordinator, the tables of all ranks, by digest.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self.sent: deque[bytes] = deque(maxlen=SAVES)
        self.cached: Recent[bytes] = Recent(max_bytes, size=len)


class SaveTables:
    """The tables of one save; ``save_id`` is this rank's id of the save."""

    def __init__(self, known: KnownTables, save_id: str) -> None:
        self._known = known
        self._save_id = save_id
        self._promised: dict[bytes, bytes] = {}

    def offer(self, plan: SavePlan) -> SavePlan:
        """On a rank: adds the digests of the rank's last tables to its plan."""
        return plan_with(plan, Offer(self._save_id, tuple(self._known.sent)))

    def answer(self, plan: SavePlan) -> SavePlan:
        """On the coordinator: adds to a rank's plan those of its digests whose tables are cached."""
        offer = plan.storage_data
        if not isinstance(offer, Offer):
            return plan
        found = {digest: table for digest in offer.digests if (table := self._known.cached.find(digest)) is not None}
        self._promised.update(found)
        return plan_with(plan, Offer(offer.save_id, tuple(found), self._save_id))

    def save_of(self, plan: SavePlan) -> str:
        """On a rank: returns the id of the coordinator's save; empty if unknown."""
        answer = plan.storage_data
        return answer.save if isinstance(answer, Offer) and answer.save_id == self._save_id else ""

    def shortened(self, part: RankLocations, plan: SavePlan) -> RankLocations:
        """On a rank: returns the rank's locations, without the table if the coordinator knows it."""
        if part.table_digest not in self._known.sent:
            self._known.sent.append(part.table_digest)
        answer = plan.storage_data
        is_known = isinstance(answer, Offer) and answer.save_id == self._save_id and part.table_digest in answer.digests
        return part._replace(table=b"") if is_known else part

    def completed(self, parts: Sequence[RankLocations]) -> list[RankLocations]:
        """On the coordinator: returns the ranks' locations with their tables.

        Raises `WriteError`, naming the rank, if a table is unknown.
        """
        for part in parts:
            if not part.table and part.table_digest not in self._promised:
                raise WriteError(
                    f"rank {part.rank} has not sent the locations of its data, and the coordinator does not know them: "
                    f"the planner has mixed up the plans of two saves. Use a planner that caches no plans."
                )
        whole = [part if part.table else part._replace(table=self._promised[part.table_digest]) for part in parts]
        for part in whole:
            self._known.cached.add(part.table_digest, part.table)
        return whole
