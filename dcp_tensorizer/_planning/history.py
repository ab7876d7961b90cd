"""What a planner remembers of the saves before: so that repeats need neither be sent nor planned again."""

from __future__ import annotations

import uuid
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..errors import WriteError
from .columns import Columns
from .wire import Encoded

if TYPE_CHECKING:
    from .plan import Answer, Reference

__all__ = ["History"]

# A job that saves model and optimizer apart, each with something beside it, alternates between four plans. The
# coordinator remembers more saves than the ranks, as some may have failed after it had planned them.
_SAVES = 4
_SAVES_OF_COORDINATOR = 4 * _SAVES


class History:
    """What a planner has sent as a rank, and what it has received and planned as the coordinator.

    Plans are known by their contents. So it does not matter in what order different state dicts are saved.

    Attributes:
        id: Identifies the planner as a coordinator.
    """

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self._world: weakref.ref[Any] | None = None
        self._sent: tuple[Columns, bytes] | None = None
        self._is_answered = True
        self._known: deque[Reference] = deque(maxlen=_SAVES)
        self._received: deque[dict[bytes, Encoded]] = deque(maxlen=_SAVES_OF_COORDINATOR)
        self._planned: deque[tuple[object, Any]] = deque(maxlen=_SAVES_OF_COORDINATOR)

    def begin(self) -> None:
        """A save begins: after one that was not planned, and in another process group, plans are sent whole again."""
        if not self._is_answered or not self._is_same_world():
            self._known.clear()
        self._is_answered = True

    def _is_same_world(self) -> bool:
        world = dist.group.WORLD if dist.is_available() else None
        same = (None if self._world is None else self._world()) is world
        self._world = None if world is None else weakref.ref(world)
        return same

    # --- as a rank ----------------------------------------------------------------------------------------------

    def sending(self, columns: Columns, digest: bytes) -> Reference | None:
        """What to send in the place of these columns; None: send them."""
        self._sent, self._is_answered = (columns, digest), False
        return next((reference for reference in self._known if reference.digest == digest), None)

    def answered(self, answer: Answer) -> Columns:
        """The columns that an answer refers to; the coordinator knows them from now on."""
        assert self._sent is not None and self._sent[1] == answer.reference.digest
        self._known.append(answer.reference)
        return self._sent[0]

    def end(self) -> None:
        """The save is planned, also where the answer refers to nothing."""
        self._is_answered = True

    # --- as the coordinator -------------------------------------------------------------------------------------

    def received(self, rank: int, reference: Reference) -> Encoded:
        """The columns that a rank refers to.

        Raises:
            WriteError: they are not known.
        """
        for plans in reversed(self._received):
            if reference.coordinator == self.id and reference.digest in plans:
                return plans[reference.digest]
        raise WriteError(
            f"rank {rank} refers to a plan that this coordinator does not know: its planner has saved with another "
            f"process group. The next save sends the whole plan. Use one planner for each process group."
        )

    def find(self, key: object) -> Any:
        """What has been planned for these contents; None if nothing has."""
        return next((result for known, result in reversed(self._planned) if known == key), None)

    def planned(self, key: object, plans: Sequence[Encoded], result: Any) -> None:
        """Remembers what ranks have sent, and what has come of it."""
        referable = {plan.digest: plan for plan in plans if plan.may_refer}
        if referable:  # saves of this rank alone must not push others out
            self._received.append(referable)
        self._planned.append((key, result))
