"""Tests of the votes of an exchange, and of its group."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from dcp_tensorizer import CheckpointError, ChecksumMismatch, ReadError
from dcp_tensorizer._loading.exchange import (
    ExchangeGroup,
    ExchangeVote,
    ReadFrom,
    SharedFailure,
    identity_of,
    reads_alone,
)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Yields a process group that has only this rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


class _Unsendable(ChecksumMismatch):
    """An error of the user that cannot be pickled, and is not made from one message."""

    def __init__(self, path: str, rank: int) -> None:
        super().__init__(f"{path} is refused on rank {rank}")
        self.raised_by = lambda: rank


def test_any_error_can_be_sent(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed rank raises its own error; the others get its message, in the nearest class of this package."""
    sent: list[ExchangeVote] = []
    gather = dist.all_gather_object

    def gathered(votes: list[ExchangeVote], vote: ExchangeVote, group: dist.ProcessGroup) -> None:
        gather(votes, vote, group=group)
        sent.extend(votes)

    monkeypatch.setattr(dist, "all_gather_object", gathered)
    for error in (_Unsendable("a", 1), KeyError("b"), ReadError("c")):
        with pytest.raises(SharedFailure) as caught:
            ExchangeGroup(group, "path").votes(ExchangeVote(), error)
        assert caught.value.error is error
    errors = [(type(vote.error), str(vote.error)) for vote in sent]
    assert errors == [
        (ChecksumMismatch, "a is refused on rank 1"),
        (CheckpointError, "KeyError: 'b'"),
        (ReadError, "c"),
    ]


def test_gloo_exchanges_in_host_memory(group: dist.ProcessGroup) -> None:
    """gloo lists CUDA among its devices, but copies GPU memory to the host, so the exchange uses host memory."""
    assert "cuda" in {device.type for device in group._device_types}
    assert ExchangeGroup(group, "path").device(prefers_gpu=True) == torch.device("cpu")


def test_all_ranks_of_a_group_must_load(group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture) -> None:
    """Ranks may have several groups; a rank that is missing, or has another group or none, is an error."""
    pair, other, none = ReadFrom("id", "pair", 2), ReadFrom("id", "other", 2), ReadFrom("id")
    assert not reads_alone("path", None, [none, none])
    assert not reads_alone("path", group, [pair, other, none, other, pair])
    for carried in ([pair, none], [pair, other], [pair, pair, other]):
        with pytest.raises(ReadError, match="Pass exchange= on all of its ranks"):
            reads_alone("path", group, carried)
    caplog.set_level(logging.INFO, "dcp_tensorizer")
    assert reads_alone("path", group, [None])  # the planner dropped the storage_data
    assert not reads_alone("path", None, [None])
    assert "exchange nothing" in caplog.text
    name, size = identity_of(group)
    assert (len(name), size) == (32, 1)
    assert identity_of(None) == ("", 0)
