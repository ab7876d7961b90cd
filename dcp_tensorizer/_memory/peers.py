"""Tells the hosts of a job apart, and arranges which of them holds whose replicas."""

from __future__ import annotations

import fcntl
import functools
import ipaddress
import os
import socket
import struct
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from .._storage.local import boot_id
from .wire import Address

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
_ANY_PORT = 9  # to ask for a route; nothing is sent there


class Peer(NamedTuple):
    """A rank, as it introduces itself to the others."""

    host: str  # the result of `this_host`
    domain: str  # the failure domain: hosts that may fail together have the same
    address: str  # the IP address of its host; empty if none was found
    problem: str = ""  # why other hosts do not reach its keeper
    keeper: Address | None = None  # its keeper's address for other hosts; None if they do not reach it


@functools.cache
def this_host() -> str:
    """A name for this host since it started. Ranks whose hosts have the same name lose their memory together.

    The machine's own name is not enough: clones of a machine may share it, and a restart does not change it.
    """
    boot = ""
    with suppress(OSError):
        boot = boot_id().strip()
    return f"{boot} {os.uname().nodename}"


def partners(peers: Sequence[Peer]) -> list[int]:
    """For each rank, the rank whose keeper holds its replicas; empty if there is only one failure domain.

    The domains form a ring, in the order of their first ranks. Each host has a partner host in the next domain. The
    keepers there hold the replicas of its ranks. By default each host is a domain.
    """
    domains: dict[str, dict[str, list[int]]] = {}
    for rank, peer in enumerate(peers):
        domains.setdefault(peer.domain, {}).setdefault(peer.host, []).append(rank)
    if len(domains) < 2:
        return []
    ring = [list(hosts.values()) for hosts in domains.values()]
    found = [0] * len(peers)
    for number, hosts in enumerate(ring):
        following = ring[(number + 1) % len(ring)]
        for position, ranks in enumerate(hosts):
            theirs = following[position % len(following)]
            for local, rank in enumerate(ranks):
                found[rank] = theirs[local % len(theirs)]
    return found


def address_towards(other: str) -> str:
    """The address of this host on the interface that leads to another host; raises `OSError`."""
    found = socket.getaddrinfo(other, _ANY_PORT, type=socket.SOCK_DGRAM)
    for number, (family, kind, protocol, _, place) in enumerate(found):
        try:
            with socket.socket(family, kind, protocol) as sock:
                sock.connect(place)  # sends nothing, but finds the route
                return str(sock.getsockname()[0])
        except OSError:
            if number + 1 == len(found):
                raise
    raise OSError(f"{other} has no address")


def address_of(interface: str) -> str:
    """The address of an interface of this host; an address stays as it is. Raises `OSError` if there is none."""
    with suppress(ValueError):
        return str(ipaddress.ip_address(interface))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)[20:24])


def is_local(address: str) -> bool:
    """Returns whether an address is empty or a loopback address, which other hosts cannot use."""
    return not address or ipaddress.ip_address(address).is_loopback


class Room(NamedTuple):
    """The memory of a rank's host, and what this rank needs of it."""

    nbytes: int  # the size of a state of this rank
    missing: int  # how many staging buffers it has yet to allocate
    available: int | None  # the bytes that are available; None if that is not known


def lack_of_room(
    peers: Sequence[Peer], partner_of: Sequence[int], rooms: Sequence[Room], reserve: int, replicas: int = 2
) -> str:
    """Says why the replicas of the last and the next state do not fit on some host; empty if they fit everywhere.

    On each host ``reserve`` bytes are left to other programs.
    """
    ranks_of, held_by = defaultdict[str, list[int]](list), defaultdict[str, int](int)
    for rank, peer in enumerate(peers):
        ranks_of[peer.host].append(rank)
        held_by[peers[partner_of[rank]].host] += replicas * rooms[rank].nbytes
    for host, ranks in ranks_of.items():
        bounds = [room.available for rank in ranks if (room := rooms[rank]).available is not None]
        if not bounds:
            continue
        staging, needed = sum(rooms[rank].missing * rooms[rank].nbytes for rank in ranks), held_by[host]
        if staging + needed + reserve > min(bounds):
            return (
                f"the host of rank {ranks[0]} has {min(bounds):,} bytes of memory available. Replicas there take "
                f"{needed:,}, staging buffers {staging:,} more, and {reserve:,} are left to others"
            )
    return ""
