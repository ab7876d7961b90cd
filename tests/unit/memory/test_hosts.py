"""Names of hosts, and the partners that hold replicas."""

from __future__ import annotations

import socket

import pytest

from dcp_tensorizer._memory.copies import (
    Peer,
    address_of,
    address_towards,
    is_local,
    lack_of_memory,
    partners,
    this_host,
)
from dcp_tensorizer._storage.local import boot_id


def peers(hosts: str, domains: str = "") -> list[Peer]:
    """Returns ranks on hosts and in domains with names of one letter."""
    return [Peer(host, domain, "10.0.0.1") for host, domain in zip(hosts, domains or hosts, strict=True)]


@pytest.mark.parametrize(
    ("hosts", "domains", "expected"),
    [
        ("aabb", "", [2, 3, 0, 1]),
        ("abab", "", [1, 0, 3, 2]),
        ("abc", "", [1, 2, 0]),
        ("aaabb", "", [3, 4, 3, 0, 1]),
        ("abcd", "xxyy", [2, 3, 0, 1]),
        ("abcd", "xyxy", [1, 0, 3, 2]),
        ("abc", "xxy", [2, 2, 0]),
        ("aabb", "xyxy", [1, 0, 3, 2]),
        ("aaaa", "", []),
        ("ab", "xx", []),
        ("a", "", []),
    ],
)
def test_partners(hosts: str, domains: str, expected: list[int]) -> None:
    """The partner of a rank is in the next failure domain, by default the next host. One domain has no partners."""
    assert partners(peers(hosts, domains)) == expected


def test_hosts() -> None:
    """A machine after a restart is another host, and so is a clone with another name."""
    assert this_host().split(" ")[0] == boot_id().strip()
    assert this_host().endswith(socket.gethostname())


def test_addresses() -> None:
    """An interface is found by its name or its address, and otherwise by the route to another host."""
    assert address_of("lo") == address_of("127.0.0.1") == address_towards("127.0.0.1") == "127.0.0.1"
    assert address_of("::1") == "::1"
    assert is_local("127.0.1.1") and is_local("::1") and is_local("") and not is_local("10.0.0.1")
    with pytest.raises(OSError, match=r"'nothere0' has no IPv4 address \(No such device\)"):
        address_of("nothere0")


def test_memory_of_hosts() -> None:
    """A host needs memory for two replicas of each state that it holds, its staging buffers, and a reserve."""
    hosts, partner_of = peers("aab"), [2, 2, 0]
    memory: list[tuple[int, int, int | None]] = [(100, 1, 550), (100, 1, None), (200, 2, 850)]
    words = "550 bytes of memory available. Replicas there take 400, staging buffers 200 more, and 0 must remain"
    assert lack_of_memory(hosts, partner_of, memory, 0) == f"the host of rank 0 has {words}"
    memory[0] = (100, 1, 600)
    assert lack_of_memory(hosts, partner_of, memory, 0) == ""
    assert lack_of_memory(hosts, partner_of, memory, 1).startswith("the host of rank 0 has 600")
    memory[0] = (100, 1, None)
    assert lack_of_memory(hosts, partner_of, memory, 50) == ""
    assert lack_of_memory(hosts, partner_of, memory, 51).startswith("the host of rank 2 has 850")
