"""The partners of ranks for copies on other hosts."""

from __future__ import annotations

import logging
import socket
from typing import Any

import pytest

from dcp_tensorizer._memory import copies as copies_module
from dcp_tensorizer._memory.copies import CopyOptions, Peer, PeerCopies, introduce, routes_to_others
from dcp_tensorizer._memory.wire import Address

COPIES = CopyOptions(rate=4e6)


class _OneOf:
    """Agreement of one rank of several, which send ``peers``."""

    def __init__(self, rank: int, peers: list[Peer]) -> None:
        self.rank, self.is_first, self._peers = rank, rank == 0, peers

    def gathered(self, own: Any) -> list[Any]:
        return self._peers


def copies_of(rank: int, peers: list[Peer], options: CopyOptions = COPIES) -> PeerCopies:
    agreement: Any = _OneOf(rank, peers)
    copies = PeerCopies(agreement, 2, options)
    copies.find_partners(None)
    return copies


def keeper(number: int) -> Address:
    return Address(f"10.0.0.{number}", 5, bytes([number]))


def rank(host: str, number: int, address: str = "10.0.0.1") -> Peer:
    return Peer(host, host, address, keeper=keeper(number))


FOUR = [rank("x", 0), rank("x", 1), rank("y", 2), rank("y", 3)]


def test_partners_and_rates() -> None:
    """Each rank's partner is on the next host; the ranks of a host share the rate."""
    found = [copies_of(n, FOUR) for n in range(4)]
    assert [(copies._partner, copies._rate) for copies in found] == [(keeper(n), 2e6) for n in (2, 3, 0, 1)]
    assert copies_of(0, FOUR, CopyOptions(rate=None))._rate == 0


@pytest.mark.parametrize(
    ("peers", "domain", "why"),
    [
        (FOUR[:2], None, "all ranks are on one host, and replicas need another one"),
        ([one._replace(domain="rack") for one in FOUR], "rack", "all ranks are in one failure domain"),
        ([*FOUR[:3], Peer("y", "y", "", "it has no keeper")], None, "rank 3: it has no keeper"),
    ],
    ids=["one host", "one domain", "a keeper that is not reached"],
)
def test_why_there_are_none(peers: list[Peer], domain: str | None, why: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without partners no state is copied, and the warning has the reason."""
    with caplog.at_level(logging.WARNING):
        copies = copies_of(0, peers, CopyOptions(rate=4e6, failure_domain=domain))
    assert not copies.is_on
    assert f"as with copies=1: {why}" in caplog.text


def test_an_address_that_leads_a_host_to_itself() -> None:
    """A rank with such an address gets that of another host as its route, and its keeper never listens on it."""
    own = introduce(CopyOptions(interface="127.0.0.1"), None)
    assert own.keeper is None and "127.0.0.1 is a loopback address. Pass CopyOptions(interface=...)" in own.problem
    assert routes_to_others([own, rank("y", 1, "10.0.0.7")]) == ["10.0.0.7", ""]


def test_the_interface_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leads to the given host, and otherwise to the coordinator: by MASTER_ADDR, or by this host's own name."""
    asked = list[str]()
    monkeypatch.setattr(copies_module, "address_towards", lambda other: asked.append(other) or "10.0.0.5")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.9")
    own = introduce(CopyOptions(), None, "10.0.0.7")
    assert (own.address, own.problem) == ("10.0.0.5", "it has no keeper")
    introduce(CopyOptions(), None)
    monkeypatch.delenv("MASTER_ADDR")
    introduce(CopyOptions(), None)
    assert asked == ["10.0.0.7", "10.0.0.9", socket.gethostname()]


def test_routes_of_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each address is checked once, however many ranks there are."""
    checked = list[str]()
    monkeypatch.setattr(copies_module, "is_local", lambda address: checked.append(address) or not address)
    many = [rank(f"host {n // 8}", 0, "10.0.0.1" if n % 8 else "") for n in range(4096)]
    assert routes_to_others(many) == ["" if n % 8 else "10.0.0.1" for n in range(4096)]
    assert len(checked) == 4096
