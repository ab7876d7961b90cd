"""The collectives of a save in which several ranks write files together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from .._runtime.torch_compat import group_devices
from .._tensor_file.regions import Integers
from ..errors import WriteError

_T = TypeVar("_T")


class RankGroup:
    """The ranks of one save; ``group`` is None for a rank that saves alone. Methods raise `WriteError` if a rank is
    gone.
    """

    def __init__(self, group: dist.ProcessGroup | None, path: str) -> None:
        self._group, self._path = group, path
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._device = torch.device("cpu")
        if group is not None and "cpu" not in (devices := group_devices(group)):
            self._device = torch.device(min(devices), torch.accelerator.current_device_index())

    def gather(self, numbers: Sequence[int]) -> Integers:
        """Gathers a row of numbers from each rank."""
        own = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        if self._group is None:
            return np.array([numbers], dtype=np.int64)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        self._call(lambda: dist.all_gather(rows, own, group=self._group))
        return torch.stack(rows).cpu().numpy()

    def swap(self, content: np.ndarray, sent: Sequence[int], received: Sequence[int]) -> np.ndarray:
        """Sends bytes to each rank, and returns the bytes received from all, one after the other.

        ``content`` is in the order of the receiving ranks; ``sent`` and ``received`` are the sizes by rank.
        """
        incoming = torch.empty(sum(received), dtype=torch.uint8, device=self._device)
        outgoing = torch.from_numpy(content).to(self._device)
        self._call(lambda: dist.all_to_all_single(incoming, outgoing, list(received), list(sent), group=self._group))
        return incoming.cpu().numpy()

    def _call(self, collective: Callable[[], _T]) -> _T:
        try:
            return collective()
        except RuntimeError as error:
            raise WriteError(
                f"{self._path}: rank {self.rank} of {self.size} could not exchange what it writes. Another rank has "
                f"ended, or saves something else: {error}"
            ) from error
