"""Tests of the plan of an exchange: ranks read each byte once, in whole blocks, and about equal amounts."""

from __future__ import annotations

import itertools

import pytest
import torch

from dcp_tensorizer._loading.exchange import ExchangeRequest, Window, requests_of, spans_of, total_bytes
from dcp_tensorizer._loading.plan import ReadLimits, ReadTarget
from dcp_tensorizer._tensor_file.names import StoredItem
from dcp_tensorizer._tensor_file.regions import Region

LIMITS = ReadLimits(max_gap_bytes=0)


def _target(length: int, offset: int = 0, region: Region | None = None, file: str = "a") -> ReadTarget:
    item = StoredItem(file, "x", offset, length, "uint8", "tensor", bytes(8 * (-(-length // (64 << 10)))))
    region = region or Region((0,), (length,))
    return ReadTarget.of("x", item, (length,), region, torch.empty(region.size, dtype=torch.uint8))


def _requests(*lengths: int) -> list[ExchangeRequest]:
    offsets = itertools.accumulate(lengths, initial=0)
    targets = [_target(length, offset) for length, offset in zip(lengths, offsets, strict=False)]
    return list(requests_of(targets, LIMITS, verify=True).values())


@pytest.mark.parametrize("lengths", [(10 << 20,), (5, 1, 300_000, 64 << 10), (7,) * 500, (3 << 20, 3, 3 << 20)])
@pytest.mark.parametrize("window_bytes", [1 << 20, 64 << 20])
def test_each_byte_is_read_once(lengths: tuple[int, ...], window_bytes: int) -> None:
    """The ranks' parts are in the order of the requests, begin on blocks, and at multiples of 64 in their windows."""
    requests = _requests(*lengths)
    spans = spans_of(requests, 3, window_bytes)
    parts = [part for span in spans for window in span for part in window.parts]
    numbers = {request.id: number for number, request in enumerate(requests)}
    read = [(numbers[part.request.id], byte) for part in parts for byte in (part.start, part.stop)]
    assert read == sorted(read)
    for request in requests:
        own = [(part.start, part.stop) for part in parts if part.request is request]
        assert own[0][0] == 0
        assert own[-1][1] == request.item.length
        assert all(before[1] == after[0] for before, after in itertools.pairwise(own))
        assert all(start % request.item.block == 0 for start, _ in own)
    assert all(part.position % 64 == 0 for part in parts)
    assert all(window.nbytes <= window_bytes for span in spans for window in span)


def test_ranks_read_about_equal_amounts() -> None:
    """The largest share is at most a tenth above the mean."""
    requests = _requests(*[5 << 20] * 30, *[999] * 1000)
    shares = [
        sum(p.stop - p.start for window in span for p in window.parts) for span in spans_of(requests, 4, 64 << 20)
    ]
    assert sum(shares) == total_bytes(requests)
    assert max(shares) < 1.1 * sum(shares) / 4


def test_a_window_can_be_cut_into_pieces() -> None:
    """The pieces of a window, cut at multiples of 64, have all bytes of its requests in order."""
    requests = _requests(100_000, 77, 200_001)
    ((window,),) = spans_of(requests, 1, 64 << 20)
    assert len(window.parts) == len(requests)  # consecutive bytes of a tensor are one read
    pieces = [part for start in range(0, window.nbytes, 6400) for part in window.between(start, start + 6400)]
    for request in requests:
        own = [part for part in pieces if part.request is request]
        assert sum(part.stop - part.start for part in own) == request.item.length
        assert all(before.stop == after.start for before, after in itertools.pairwise(own))
    assert Window([]).nbytes == 0


def test_requests_are_compared_by_their_bytes() -> None:
    """Targets in other memory or order have the same requests; another region, location or file is another request."""
    targets = [_target(1 << 20), _target(1 << 20, 1 << 20)]
    requests = requests_of(targets, LIMITS, verify=True)
    assert list(requests_of(targets[::-1], LIMITS, verify=True)) == list(requests)
    other = _target(1 << 20, 1 << 20, Region((0,), (70_000,)))
    found = requests_of([other], LIMITS, verify=True)
    assert not set(found) & set(requests)
    assert [request.intervals for request in found.values()] == [[(0, 128 << 10)]]  # two whole blocks
    assert not set(requests_of([_target(1 << 20, file="b")], LIMITS, verify=True)) & set(requests)
