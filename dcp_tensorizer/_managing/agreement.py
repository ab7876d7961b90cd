"""What the ranks of a job agree on, by collectives on a group that nothing else uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ..errors import CheckpointError, WriteError, describe

__all__ = ["Agreement", "make_groups"]

_T = TypeVar("_T")


def make_groups(process_group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Two gloo groups of the same ranks: one for saves, whose collectives run on their thread, and one for agreements.

    Args:
        process_group: The ranks; None for all.

    Returns:
        The groups; None and None where there are no ranks.

    Raises:
        ValueError: there is a group, and no process group was initialised.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None:
            raise ValueError("process_group is given, and torch.distributed is not initialised")
        return None, None
    ranks = None if process_group is None else dist.get_process_group_ranks(process_group)
    saves, agreements = (
        dist.new_group(ranks, backend="gloo", use_local_synchronization=ranks is not None) for _ in range(2)
    )
    return saves, agreements


class Agreement:
    """Decisions that are the same on every rank. Every rank must ask for each of them.

    Args:
        group: Of the ranks; None where there is only this one.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return 1 if self._group is None else self._group.size()

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that decides."""
        return self.rank == 0

    def largest(self, *numbers: int) -> list[int]:
        """The largest that any rank has given, of each.

        Raises:
            WriteError: a rank is gone.
        """
        if self._group is None:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        try:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise _gone(self.rank, error) from error
        return cast("list[int]", tensor.tolist())

    def gathered(self, own: _T) -> list[_T]:
        """What each rank gives, in the order of the ranks.

        Raises:
            WriteError: a rank is gone.
        """
        if self._group is None:
            return [own]
        box: list[Any] = [None] * dist.get_world_size(self._group)
        try:
            dist.all_gather_object(box, own, group=self._group)
        except RuntimeError as error:
            raise _gone(self.rank, error) from error
        return box

    def decided(self, decide: Callable[[], _T]) -> _T:
        """What the first rank decides; the others do not call ``decide``. What it raises is raised on every rank.

        Raises:
            WriteError: a rank is gone.
        """
        box: list[Any] = [None, None]
        if self.is_first:
            try:
                box = [decide(), None]
            except Exception as error:
                if self._group is None:
                    raise
                box = [None, error if isinstance(error, CheckpointError) else CheckpointError(describe(error))]
        if self._group is not None:
            first = dist.get_global_rank(self._group, 0)
            try:
                dist.broadcast_object_list(box, src=first, group=self._group, device=torch.device("cpu"))
            except RuntimeError as error:
                raise _gone(self.rank, error) from error
        result, failure = box
        if failure is not None:
            raise failure
        return cast("_T", result)


def _gone(rank: int, error: RuntimeError) -> WriteError:
    return WriteError(
        f"rank {rank}: the ranks could not agree: another rank has ended, or it called the manager differently. Every "
        f"rank must make the same calls: {error}"
    )
