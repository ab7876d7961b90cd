"""The ranks that exchange what they read: their collectives, and how each hears of another one's error."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
import xxhash

from .._torch_compat import group_devices
from ..errors import CheckpointError, ReadError, describe
from .validate import ReadFrom

__all__ = ["ExchangeGroup", "Told", "Vote", "identity_of", "members_of", "reads_alone"]

logger = logging.getLogger("dcp_tensorizer")

_T = TypeVar("_T")
_ID_BYTES = 16


def members_of(group: object) -> dist.ProcessGroup | None:
    """A process group, if this rank and others are in it.

    Raises:
        TypeError: it is none.
    """
    if group is None or group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"exchange must be a process group, or None, and is {type(group).__name__}")
    return group if group.size() > 1 else None


def identity_of(group: dist.ProcessGroup | None) -> tuple[str, int]:
    """What is the same on all ranks of a group, and on no others; and how many they are."""
    if group is None:
        return "", 0
    ranks = dist.get_process_group_ranks(group)
    return xxhash.xxh3_128_hexdigest(f"{group.group_name} {ranks}".encode()), len(ranks)


def reads_alone(path: str, group: dist.ProcessGroup | None, carried: Sequence[object]) -> bool:
    """Whether a rank exchanges nothing, though it could: so it is where each rank loads for itself.

    Args:
        path: Of the checkpoint, for messages.
        group: In which this rank exchanges.
        carried: The ``storage_data`` of the plan of each rank that loads with it.

    Raises:
        ReadError: only some of those that are to exchange do: they would wait for the others.
    """
    if len(carried) == 1:
        if group is not None:
            logger.info("%s: the %d ranks exchange nothing, as each of them loads for itself", path, group.size())
        return group is not None
    plans = [data for data in carried if isinstance(data, ReadFrom)]
    loading = Counter(plan.group for plan in plans)
    for rank, plan in enumerate(plans):
        if plan.group and loading[plan.group] != plan.group_size:
            raise ReadError(
                f"{path}: rank {rank} is to exchange what it reads with {plan.group_size - 1} others, of which "
                f"{loading[plan.group] - 1} load with it and have been given the same group: pass exchange= on all of "
                f"its ranks, and dcp.load a process_group that has all of them"
            )
    return False


@dataclass(frozen=True)
class Vote:
    """What a rank tells the others before they exchange anything.

    Attributes:
        error: Why it cannot go on.
        reason: Why it exchanges no tensors, though it can go on.
        setting: What must be the same on all ranks.
        wants: How much it wants.
        is_on_gpu: All its targets are.
    """

    error: CheckpointError | None = None
    reason: str = ""
    setting: tuple[Any, ...] = ()
    wants: int = 0
    is_on_gpu: bool = False


class Told(Exception):
    """Every rank knows of the error."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class ExchangeGroup:
    """A process group, whose ranks all call the same methods in the same order.

    Args:
        group: The ranks.
        path: Of the checkpoint, for messages.

    Attributes:
        size: How many ranks there are.
        rank: This one's number in the group.
    """

    def __init__(self, group: dist.ProcessGroup, path: str) -> None:
        self._group, self._path = group, path
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._devices = group_devices(group)

    def device(self, *, prefers_gpu: bool = False) -> torch.device:
        """Where the memory lies that is exchanged."""
        others = sorted(self._devices - {"cpu"})
        if "cpu" in self._devices and not (prefers_gpu and others):
            return torch.device("cpu")
        return torch.device(others[0], torch.accelerator.current_device_index())

    def votes(self, vote: Vote, error: BaseException | None = None) -> list[Vote]:
        """The votes of all ranks.

        Args:
            vote: This rank's.
            error: Why this rank cannot go on.

        Raises:
            Told: a rank cannot go on; with this one's own error, or that of the first that cannot.
            ReadError: a rank is gone.
        """
        votes = self.tell(vote if error is None else Vote(error=_portable(error)))
        if error is not None:
            raise Told(error)
        for rank, other in enumerate(votes):
            if other.error is not None:
                raise Told(type(other.error)(f"rank {rank} of the exchange: {other.error}"))
        return votes

    def tell(self, vote: Vote) -> list[Any]:
        """Takes part in `votes`, and raises nobody's error."""
        votes: list[Any] = [None] * self.size
        self._call(lambda: dist.all_gather_object(votes, vote, group=self._group))
        return votes

    def fail(self, error: BaseException | None) -> NoReturn:
        """Raises what `votes` does, when every rank knows that one of them has failed; ``error`` is this one's."""
        self.votes(Vote(), error)
        raise AssertionError("a rank has failed, and does not say why")

    def common(self, ids: Sequence[bytes], count: int) -> list[bytes]:
        """The ids that all ranks have, in the first rank's order.

        Args:
            ids: Those that this rank has, of 16 bytes each.
            count: How many the first rank has.

        Raises:
            ReadError: a rank is gone.
        """
        if not count:
            return []
        own = set(ids)
        content = bytearray(b"".join(ids) if self.rank == 0 else count * _ID_BYTES)
        listed = torch.frombuffer(content, dtype=torch.uint8).to(self.device())
        first = dist.get_global_rank(self._group, 0)
        self._call(lambda: dist.broadcast(listed, src=first, group=self._group))
        data = listed.cpu().numpy().tobytes()
        names = [data[start : start + _ID_BYTES] for start in range(0, len(data), _ID_BYTES)]
        mask = torch.tensor([name in own for name in names], dtype=torch.uint8, device=self.device())
        self._call(lambda: dist.all_reduce(mask, op=dist.ReduceOp.MIN, group=self._group))
        return [name for name, is_common in zip(names, mask.tolist(), strict=True) if is_common]

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Fills ``received`` with what each rank has sent; raises `ReadError` if a rank is gone."""
        self._call(lambda: dist.all_gather_into_tensor(received, sent, group=self._group))

    def _call(self, collective: Callable[[], _T]) -> _T:
        try:
            return collective()
        except RuntimeError as error:
            gone = ReadError(
                f"{self._path}: rank {self.rank} of {self.size} could not exchange what it reads. Another rank has "
                f"ended, or loads something else: {error}"
            )
            gone.__cause__ = error
            raise Told(gone) from error


def _portable(error: BaseException) -> CheckpointError:
    """An error that other ranks can be told: of one of this package's own types, since others may not be pickled."""
    kinds = (kind for kind in type(error).__mro__ if kind.__module__ == CheckpointError.__module__)
    kind: type[CheckpointError] = next(kinds, CheckpointError)  # an interrupt, say: it is not the checkpoint's fault
    return kind(describe(error))
