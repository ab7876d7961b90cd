"""States that belong to one data-parallel rank, such as those of data loaders: `DataParallelState`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from ._runtime.ranks import rank_of_job, world_size_of_job

__all__ = ["DataParallelState"]

_NAME = re.compile(r"(.*?)\.?\bdata-parallel-\d+-of-(\d+)(?:\.|$)")


class DataParallelState(Stateful):
    """State that differs between data-parallel ranks, such as the state of a data loader or a random generator.

    The key of each state contains the data-parallel rank and the number of data-parallel ranks::

        state = {"app": app, "loader": DataParallelState(loader)}

    So a job with a different number of data-parallel ranks cannot load the state by mistake, which would make it read
    some shares of the data twice. In such a job `CheckpointManager.restore` raises an error before anything changes.
    With ``strict=False`` it warns, and leaves the state unchanged.

    Args:
        value: Object with ``state_dict`` and ``load_state_dict``.
        rank: The data-parallel rank; None for the rank in the default process group. Ranks that share their data, such
            as those of one tensor-parallel group, pass the same rank.
        size: Number of data-parallel ranks; None for the size of the default process group.

    Raises:
        ValueError: the rank is negative, or not less than the size.
    """

    def __init__(self, value: Stateful, rank: int | None = None, size: int | None = None) -> None:
        rank = rank_of_job() if rank is None else rank
        size = world_size_of_job() if size is None else size
        if not 0 <= rank < size:
            raise ValueError(f"rank must be at least 0 and less than size={size}, got {rank}.")
        self._value = value
        self._key = f"data-parallel-{rank}-of-{size}"

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the value, under the rank's key."""
        return {self._key: self._value.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the value's state."""
        self._value.load_state_dict(state_dict[self._key])


def other_sizes(missing: Iterable[str], stored: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Finds missing values that were saved with a different number of data-parallel ranks.

    Returns the names, each with the number of ranks at the save and the current number.
    """
    now = {match[1]: int(match[2]) for key in missing if (match := _NAME.match(key))}
    if not now:
        return {}
    there = {match[1]: int(match[2]) for key in stored if (match := _NAME.match(key))}
    return {name: (there[name], size) for name, size in now.items() if there.get(name, size) != size}
