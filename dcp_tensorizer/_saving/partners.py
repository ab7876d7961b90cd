"""Finds the keepers on other hosts that hold copies of the ranks' states, from what all ranks say of themselves.

Each rank introduces itself: its host, and where its keeper is reached. The caller sends the introductions to the other
ranks. The arrangement follows from the introductions alone. So every rank that has them all arranges the same.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist

from .._memory.client import KeeperProcess
from .._memory.peers import Peer, address_of, address_towards, is_local, partners, this_host
from .._memory.wire import SECRET_BYTES, Address
from .._runtime.torch_compat import store_host
from .._writer_process.options import CopyOptions
from ..errors import CheckpointError


class Arrangement(NamedTuple):
    """The partners of all ranks. ``why`` says why there are none; empty if there are."""

    peers: Sequence[Peer]  # all ranks
    partner_of: Sequence[int]
    why: str
    beside: Mapping[str, int]  # how many ranks each host has
    addresses: Mapping[str, str]  # one of each host by which others reach it, for those that have one

    def partner(self, rank: int) -> Address | None:
        """The keeper that holds the copies of a rank; None if there is none."""
        return None if self.why else self.peers[self.partner_of[rank]].keeper

    def rate(self, rank: int, options: CopyOptions) -> float:
        """The bytes a second that a rank may send; 0 for any number."""
        return (options.rate or 0.0) / self.beside[self.peers[rank].host]

    def towards(self, rank: int) -> str:
        """The address of another host, for a rank whose own leads to itself; empty if that is not so, or none is known.

        The coordinator's own name may lead it to itself alone: the route to another host says more.
        """
        own = self.peers[rank]
        others = (address for host, address in self.addresses.items() if host != own.host)
        return next(others, "") if is_local(own.address) else ""


def introduce(options: CopyOptions, keeper: KeeperProcess | None, towards: str = "") -> Peer:
    """Lets a rank's keeper be reached from other hosts, on the interface towards one of them; idempotent."""
    host = this_host()
    domain = host if options.failure_domain is None else f"domain {options.failure_domain}"
    peer = Peer(host, domain, "")
    try:
        if options.interface is not None:
            address = address_of(options.interface)
        else:
            address = address_towards(towards or _coordinator())
        peer = peer._replace(address=address)
        if is_local(address):
            raise OSError(f"{address} leads each host to itself. Pass interface=")
    except OSError as error:
        return peer._replace(problem=f"it has no address that others can reach: {error}")
    if keeper is None:
        return peer._replace(problem="it has no keeper")
    try:
        return peer._replace(keeper=keeper.open_to_peers(address, secrets.token_bytes(SECRET_BYTES)))
    except CheckpointError as error:
        return peer._replace(problem=str(error))


def arrange(peers: Sequence[Peer], options: CopyOptions) -> Arrangement:
    """Arranges the partners of all ranks, which are in their order."""
    partner_of = partners(peers)
    why = next((f"rank {n}: {peer.problem}" for n, peer in enumerate(peers) if peer.keeper is None), "")
    if not partner_of:
        what = "on one host" if options.failure_domain is None else "in one failure domain"
        why = f"all ranks are {what}, and no other one can hold replicas"
    addresses = dict[str, str]()
    for peer in peers:
        if peer.host not in addresses and not is_local(peer.address):
            addresses[peer.host] = peer.address
    return Arrangement(peers, partner_of, why, Counter(peer.host for peer in peers), addresses)


def _coordinator() -> str:
    """The name or the address of the host by which the ranks have found each other."""
    if address := os.environ.get("MASTER_ADDR"):
        return address
    group = dist.group.WORLD
    return (store_host(group) if group is not None else None) or socket.gethostname()
