"""Finds out which ranks have not come to what all ranks of a group do, so that errors name them."""

from __future__ import annotations

import re
import time
from concurrent.futures import TimeoutError as FutureTimeout

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from .._threads import in_background
from .._torch_compat import group_store, group_timeout

__all__ = ["RollCall", "is_of_ranks"]

_LOOK_SECONDS = 2.0  # those that have just come say so within that
_STORE_SECONDS = 5.0  # a store on a host that is out of reach does not answer
_SHOWN = 8
_CLOSED = "pair closure"  # gloo's words for a group in which something has timed out before


def is_of_ranks(error: BaseException) -> bool:
    """Returns whether an error is that of a collective: a rank has not come, or has ended."""
    return isinstance(error, RuntimeError) and re.search(rf"gloo/|{_CLOSED}", str(error)) is not None


class RollCall:
    """Finds out for whom the ranks of a group have waited in vain.

    Each rank counts what all of them do together, and puts the number into the store of the group when it comes there.
    Where that would cost training time, it does so only when it has waited for `patience`.

    Args:
        group: Of the ranks.
        name: Of what is counted: there may be several counts.

    Attributes:
        timeout: Of the group's collectives, as it was made.
        patience: A tenth of that.
    """

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self._group, self._rank = group, dist.get_rank(group)
        self._store = PrefixStore(f"dcp_tensorizer/{name}", group_store(group))
        self.timeout = group_timeout(group)
        self.patience = self.timeout / 10

    def here(self, number: int) -> None:
        """Says that this rank has come to what has this number."""
        self._store.set(str(self._rank), str(number))

    def explain(self, number: int, error: RuntimeError, what: str) -> str:
        """Says for whom a collective has waited that has failed, and how long.

        Args:
            number: Of what the ranks did.
            error: Of the collective.
            what: The others were waited for "to do" that.
        """
        who = f"rank {dist.get_global_rank(self._group, self._rank)}"
        if _CLOSED in str(error):
            return f"{who}: the ranks have lost each other before. Start the job again"
        words = str(error).partition(" This is typically caused")[0]  # torch says more, which helps nobody
        if "timed out" not in words.lower():
            return f"{who} waited for the others to {what}: another rank has ended, or made other calls. {words}"
        seconds = f"{self.timeout.total_seconds():g} s, the timeout of the job's process group,"
        waited = f"{who} has waited {seconds} for the others to {what}"
        looking = in_background(lambda: self._look(number), name="roll-call", daemon=True)
        try:
            absent, silent = looking.result(_STORE_SECONDS)
        except (FutureTimeout, RuntimeError):
            return f"{waited}. The job's store does not answer either: this host, or the one with the store, is cut off"
        if absent:
            return f"{waited}. {_have(absent)} not come: stopped, busy with something else, or cut off"
        if silent:
            return f"{waited}. {_have(silent)} not been heard of since: stopped, or cut off"
        return f"{waited}. All of them have come: the network between them may be down. {words}"

    def _look(self, number: int) -> tuple[list[int], list[int]]:
        """The ranks of the job that have not come, and those that have not given up either.

        Those who are just about to do so are given some time.
        """
        self.here(number)
        self._store.set(f"{self._rank}-waits-no-more", str(number))
        others = [rank for rank in range(self._group.size()) if rank != self._rank]
        end = time.monotonic() + min(_LOOK_SECONDS, self.patience.total_seconds())
        while True:
            silent = [rank for rank in others if not self._has(f"{rank}-waits-no-more", number)]
            absent = [rank for rank in silent if not self._has(str(rank), number)]
            if not silent or time.monotonic() > end:
                job = [[dist.get_global_rank(self._group, rank) for rank in ranks] for ranks in (absent, silent)]
                return job[0], job[1]
            time.sleep(0.05)

    def _has(self, key: str, number: int) -> bool:
        return self._store.check([key]) and int(self._store.get(key)) >= number


def _have(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"Rank {shown} has" if len(ranks) == 1 else f"Ranks {shown} have"
