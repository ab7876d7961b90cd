"""Tests of an exchange between ranks that are threads: the values that arrive, and data that is damaged in transit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from dcp_tensorizer import ReadError
from dcp_tensorizer._loading import exchange
from dcp_tensorizer._loading.exchange import Exchange, ExchangeVote
from dcp_tensorizer._loading.plan import ReadLimits, ReadTarget
from dcp_tensorizer._runtime.threads import in_background

from ...lab.seams import stored_item
from ...lab.waiting import WAIT

LIMITS = ReadLimits(max_gap_bytes=0)
RANKS = 2


class Group:
    """The group of one rank, with the methods of `ExchangeGroup`. The ranks share ``box`` and ``barrier``.

    ``damage`` changes the data that this rank receives.
    """

    size = RANKS

    def __init__(self, rank: int, box: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self._box, self._barrier = rank, box, barrier
        self.damage: Callable[[torch.Tensor], object] = lambda received: None

    def _gather(self, value: Any) -> list[Any]:
        self._box[self.rank] = value
        self._barrier.wait(WAIT)
        values = list(self._box)
        self._barrier.wait(WAIT)
        return values

    def device(self, *, prefers_gpu: bool = False) -> torch.device:
        return torch.device("cpu")

    def votes(self, vote: ExchangeVote, error: BaseException | None = None) -> list[ExchangeVote]:
        assert error is None
        return self._gather(vote)

    def common(self, ids: Sequence[bytes], count: int) -> list[bytes]:
        first, *others = self._gather(list(ids))
        return [name for name in first if all(name in other for other in others)]

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        received.copy_(torch.cat(self._gather(sent.clone())))
        self.damage(received)


def exchanged(
    monkeypatch: pytest.MonkeyPatch,
    content: torch.Tensor,
    damage: Callable[[torch.Tensor], object] = lambda received: None,
    *,
    verify: bool = True,
) -> list[tuple[int, int, list[int]] | BaseException]:
    """Both ranks load a tensor; ``damage`` changes what the first one receives.

    Returns for each rank the bytes that it has read and received, and its values, or else its error.
    """
    box, barrier = [None] * RANKS, threading.Barrier(RANKS)
    groups = [Group(rank, box, barrier) for rank in range(RANKS)]
    groups[0].damage = damage
    monkeypatch.setattr(exchange, "ExchangeGroup", lambda group, path: group)

    def fetch(targets: Sequence[ReadTarget], **options: Any) -> int:
        for target in targets:
            start = target.region.start[0]
            target.tensor.copy_(content[start : start + target.tensor.numel()])
        return sum(target.tensor.numel() for target in targets)

    def load(group: Any) -> tuple[int, int, list[int]]:
        tensor = torch.zeros_like(content)
        target = ReadTarget.of_bytes("x", stored_item(content.numel(), digests=bytes(8)), 0, tensor)
        with Exchange(group, "path", fetch, LIMITS, verify=verify, in_memory={}) as ranks:
            nbytes = ranks.read([]) + ranks.read([target])
        return nbytes, ranks.received_bytes, tensor.tolist()

    running = [in_background(lambda group=group: load(group), daemon=True) for group in groups]
    return [future.exception(WAIT) or future.result() for future in running]


def test_one_rank_reads_what_both_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of one block is read by one rank. The other one, which has nothing to read, receives it."""
    content = torch.arange(1000).to(torch.uint8)
    (read, received, values), (other_read, other_received, other_values) = exchanged(monkeypatch, content)
    assert {(read, received), (other_read, other_received)} == {(1000, 0), (0, 1000)}
    assert values == other_values == content.tolist()


@pytest.mark.parametrize("verify", [True, False])
def test_data_that_is_damaged_in_transit(monkeypatch: pytest.MonkeyPatch, verify: bool) -> None:
    """A changed byte is an error on the rank that receives it, naming the sender, unless nothing is verified."""

    def damage(received: torch.Tensor) -> None:
        received.view(RANKS, -1)[1, exchange._HEADER + 5] ^= 1

    content = torch.arange(1000).to(torch.uint8)
    damaged, whole = exchanged(monkeypatch, content, damage, verify=verify)
    assert isinstance(whole, tuple)
    if verify:
        assert isinstance(damaged, ReadError)
        assert "data from rank 1 of the exchange was damaged in transit" in str(damaged)
    else:
        assert isinstance(damaged, tuple)
        assert [n for n, (found, sent) in enumerate(zip(damaged[2], whole[2], strict=True)) if found != sent] == [5]
