"""What the ranks of a job agree on, by collectives on a group that nothing else uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from .._torch_compat import group_timeout
from ..errors import CheckpointError, WriteError, describe
from .roll_call import RollCall

__all__ = ["Agreement", "make_group", "make_groups"]

_T = TypeVar("_T")


def make_groups(process_group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Makes two gloo groups of the same ranks: for saves, whose collectives run on their thread, and for agreements.

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
    return make_group(process_group), make_group(process_group)


def make_group(process_group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Makes a gloo group of the same ranks, with their timeout: gloo's own default is 30 minutes."""
    ranks = None if process_group is None else dist.get_process_group_ranks(process_group)
    like = dist.group.WORLD if process_group is None else process_group
    assert like is not None
    made: dist.ProcessGroup = dist.new_group(
        ranks, timeout=group_timeout(like), backend="gloo", use_local_synchronization=ranks is not None
    )
    return made


class Agreement:
    """Decisions that are the same on every rank. Every rank must ask for each of them.

    Args:
        group: Of the ranks; None where there is only this one.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self._calls = None if group is None else RollCall(group, "agreement")
        self._number = 0

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
        if self._group is None or self._calls is None:
            return list(numbers)
        self._number += 1
        tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        try:
            work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
            assert work is not None
            try:
                work.wait(self._calls.patience)
            except RuntimeError:
                if work.is_completed():
                    raise
                self._calls.here(self._number)  # not before: this is asked for at each step of training
                work.wait()
        except RuntimeError as error:
            raise self._gone(error) from error
        return cast("list[int]", tensor.tolist())

    def gathered(self, own: _T) -> list[_T]:
        """What each rank gives, in the order of the ranks.

        Raises:
            WriteError: a rank is gone.
        """
        if self._group is None:
            return [own]
        self._come()
        box: list[Any] = [None] * dist.get_world_size(self._group)
        try:
            dist.all_gather_object(box, own, group=self._group)
        except RuntimeError as error:
            raise self._gone(error) from error
        return box

    def decided(self, decide: Callable[[], _T]) -> _T:
        """What the first rank decides; the others do not call ``decide``. What it raises is raised on every rank.

        Raises:
            WriteError: a rank is gone.
        """
        self._come()
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
                raise self._gone(error) from error
        result, failure = box
        if failure is not None:
            raise failure
        return cast("_T", result)

    def _come(self) -> None:
        """Says that this rank has come to the next agreement."""
        if self._calls is not None:
            self._number += 1
            self._calls.here(self._number)

    def _gone(self, error: RuntimeError) -> WriteError:
        assert self._calls is not None
        what = "make the same call of the manager"
        return WriteError(f"the ranks could not agree: {self._calls.explain(self._number, error, what)}")
