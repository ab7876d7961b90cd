"""The partners of ranks for copies on other hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dcp_tensorizer._memory import copies as copies_module
from dcp_tensorizer._memory.copies import CopyOptions, Peer, arrange, introduce
from dcp_tensorizer._memory.wire import Address

COPIES = CopyOptions(rate=4e6)


def keeper(number: int) -> Address:
    return Address(f"10.0.0.{number}", 5, bytes([number]))


def rank(host: str, number: int, address: str = "10.0.0.1") -> Peer:
    return Peer(host, host, address, keeper=keeper(number))


FOUR = [rank("x", 0), rank("x", 1), rank("y", 2), rank("y", 3)]


def test_partners_and_rates() -> None:
    """Each rank's is on the next host; the ranks of a host share what it may send."""
    found = arrange(FOUR, COPIES)
    assert [found.partner(n) for n in range(4)] == [keeper(2), keeper(3), keeper(0), keeper(1)]
    assert [found.rate(n, COPIES) for n in range(4)] == [2e6] * 4
    assert found.rate(0, replace(COPIES, rate=None)) == 0


def test_why_there_are_none() -> None:
    """One host alone, one domain, or a keeper that is not reached."""
    assert arrange(FOUR[:2], COPIES).why == "all ranks are on one host, and no other one can hold replicas"
    same = [one._replace(domain="rack") for one in FOUR]
    assert arrange(same, replace(COPIES, failure_domain="rack")).why.startswith("all ranks are in one failure domain")
    broken = [*FOUR[:3], Peer("y", "y", "", "it has no keeper")]
    found = arrange(broken, COPIES)
    assert (found.why, found.partner(0)) == ("rank 3: it has no keeper", None)


def test_an_address_that_leads_a_host_to_itself() -> None:
    """Others are told as the way to go; it is never listened on."""
    own = introduce(replace(COPIES, interface="127.0.0.1"), None)
    assert own.keeper is None and "127.0.0.1 is a loopback address. Pass interface=" in own.problem
    found = arrange([own, rank("y", 1, "10.0.0.7")], COPIES)
    assert [found.towards(n) for n in range(2)] == ["10.0.0.7", ""]


def test_what_many_ranks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each address is looked at twice at most, however many ranks there are."""
    looks = list[str]()
    monkeypatch.setattr(copies_module, "is_local", lambda address: looks.append(address) or not address)
    many = [rank(f"host {n // 8}", 0, "10.0.0.1" if n % 8 else "") for n in range(4096)]
    found = arrange(many, COPIES)
    told = [(found.partner(n), found.rate(n, COPIES), found.towards(n)) for n in range(4096)]
    assert told == [(keeper(0), 5e5, "" if n % 8 else "10.0.0.1") for n in range(4096)]
    assert len(looks) <= 2 * 4096
