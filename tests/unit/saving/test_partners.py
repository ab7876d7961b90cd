"""The partners of ranks for copies on other hosts, and what a writer's coordinator tells its ranks of them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dcp_tensorizer import TensorizerStorageWriter
from dcp_tensorizer._memory.peers import Peer, Room
from dcp_tensorizer._memory.replicas import RESERVE
from dcp_tensorizer._memory.wire import Address
from dcp_tensorizer._saving import partners as partners_module
from dcp_tensorizer._saving.keeping import Keeping, KeepingRank, KeptState
from dcp_tensorizer._saving.partners import CopyOptions, arrange, introduce

COPIES = CopyOptions(2, rate=4e6)
STATE = KeptState("a", 1, 4, None, has_saved=False)


def keeper(number: int) -> Address:
    return Address(f"10.0.0.{number}", 5, bytes([number]))


def rank(host: str, number: int, address: str = "10.0.0.1") -> Peer:
    return Peer(host, host, address, keeper=keeper(number))


FOUR = [rank("x", 0), rank("x", 1), rank("y", 2), rank("y", 3)]


def rooms(nbytes: int, available: int) -> list[KeepingRank | None]:
    return [KeepingRank(one, Room(nbytes, 0, available)) for one in FOUR]


def test_partners_and_rates() -> None:
    """Each rank's is on the next host; the ranks of a host share what it may send."""
    found = arrange(FOUR, COPIES)
    assert [found.partner(n) for n in range(4)] == [keeper(2), keeper(3), keeper(0), keeper(1)]
    assert [found.rate(n, COPIES) for n in range(4)] == [2e6] * 4
    assert found.rate(0, COPIES._replace(rate=None)) == 0


def test_why_there_are_none() -> None:
    """One host alone, one domain, or a keeper that is not reached."""
    assert arrange(FOUR[:2], COPIES).why == "all ranks are on one host, and no other one can hold replicas"
    same = [one._replace(domain="rack") for one in FOUR]
    assert arrange(same, COPIES._replace(failure_domain="rack")).why.startswith("all ranks are in one failure domain")
    broken = [*FOUR[:3], Peer("y", "y", "", "it has no keeper")]
    found = arrange(broken, COPIES)
    assert (found.why, found.partner(0)) == ("rank 3: it has no keeper", None)


def test_an_address_that_leads_a_host_to_itself() -> None:
    """Others are told as the way to go; it is never listened on."""
    own = introduce(COPIES._replace(interface="127.0.0.1"), None)
    assert own.keeper is None and "127.0.0.1 leads each host to itself. Pass interface=" in own.problem
    found = arrange([own, rank("y", 1, "10.0.0.7")], COPIES)
    assert [found.towards(n) for n in range(2)] == ["10.0.0.7", ""]


def test_what_many_ranks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each address is looked at twice at most, however many ranks there are."""
    looks = list[str]()
    monkeypatch.setattr(partners_module, "is_local", lambda address: looks.append(address) or not address)
    many = [rank(f"host {n // 8}", 0, "10.0.0.1" if n % 8 else "") for n in range(4096)]
    found = arrange(many, COPIES)
    told = [(found.partner(n), found.rate(n, COPIES), found.towards(n)) for n in range(4096)]
    assert told == [(keeper(0), 5e5, "" if n % 8 else "10.0.0.1") for n in range(4096)]
    assert len(looks) <= 2 * 4096


def test_what_a_coordinator_tells_its_ranks(caplog: pytest.LogCaptureFixture) -> None:
    """Partners, if there is room for one replica of each; afterwards replicas have that room. It warns once."""
    copies = Keeping().copies
    assert [s.partner for s in copies.arranged(COPIES, STATE, rooms(100, 250 + RESERVE))] == [
        keeper(n) for n in (2, 3, 0, 1)
    ]
    assert copies.arranged(COPIES, STATE, rooms(100, 0))[0].rate == 2e6
    assert caplog.messages == []
    for _ in range(2):
        assert {s.partner for s in copies.arranged(COPIES, STATE, rooms(200, 250 + RESERVE))} == {None}
        assert copies.arranged(COPIES, STATE, [*rooms(100, RESERVE)[:3], None]) == [STATE] * 4
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "the host of rank " in caplog.messages[0] and "not all ranks have copies=2" in caplog.messages[1]


def test_ranks_that_find_each_other_in_the_second_save(caplog: pytest.LogCaptureFixture) -> None:
    """One whose own name leads to itself is told the way to another; if that does not help, there is a warning."""
    copies, room = Keeping().copies, Room(1, 0, None)
    lost = Peer("x", "x", "127.0.0.1", "it has no address")
    ranks: list[KeepingRank | None] = [KeepingRank(lost, room), KeepingRank(rank("y", 1, "10.0.0.7"), room)]
    told = copies.arranged(COPIES, STATE, ranks)
    assert [(s.partner, s.towards) for s in told] == [(None, "10.0.0.7"), (None, "")] and caplog.messages == []
    copies.arranged(COPIES, STATE, ranks)
    assert caplog.messages == ["states are not copied to other hosts, as with copies=1: rank 0: it has no address"]


def test_a_writer_checks_the_options(tmp_path: Path) -> None:
    """They are those of the manager."""
    with pytest.raises(ValueError, match="copies=2 needs survive="):
        TensorizerStorageWriter(tmp_path, copies=2)
    with pytest.raises(ValueError, match=r"at least 1e[+]06 bytes a second"):
        TensorizerStorageWriter(tmp_path, copies=2, survive=60, copy_rate=7.0)
    assert "copies=2" in repr(TensorizerStorageWriter(tmp_path, copies=2, survive=60))
