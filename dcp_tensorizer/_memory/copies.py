"""Copies of states on other hosts, from which a job resumes after the loss of a host.

If no copy is in progress, the keepers copy the state that all ranks stage next. A state counts as copied once the parts
of all ranks are copied.

Each rank sends its host and the address of its keeper to all others. Every rank computes the partners from these values
alone, so that the results are the same on all ranks.
"""

from __future__ import annotations

import fcntl
import functools
import ipaddress
import logging
import math
import os
import secrets
import socket
import struct
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from .._runtime.channel import Done
from .._runtime.memory_limit import available_memory
from .._runtime.torch_compat import store_host
from .._runtime.validation import check_count, check_number, check_type, plain, set_fields
from .._storage.local import boot_id
from .._tensor_file.encryption import require_libsodium
from ..errors import CheckpointError, WriteError
from .client import KeeperProcess
from .protocol import Copy, CopyStatus, OpenToPeers, Plain
from .replicas import RESERVE
from .wire import SECRET_BYTES, Address

if TYPE_CHECKING:
    from .._job.ranks import Agreement

logger = logging.getLogger("dcp_tensorizer")

DEFAULT_RATE = 500e6
"""Default limit on the bytes that each host sends for copies in a second."""
LEAST_RATE = 1e6
"""Minimum of `CopyOptions.rate`, because a partner gives up after a minute of silence."""
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
_ANY_PORT = 9  # to look up a route; no packet is sent


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions:
    """Options of the copies that a manager with ``copies=2`` makes on other hosts. The options of hosts may differ.

    Attributes:
        rate: Maximum number of bytes a second that this host sends for copies, at least 1e6; None: no limit.
        failure_domain: Name of the failure domain of this host, such as its rack. Copies go to a host in another
            failure domain. By default each host is a failure domain of its own.
        interface: The network interface for copies, by its name or its address. By default the interface towards the
            coordinator; if that is the loopback interface, as it may be on the coordinator's host, the interface
            towards another host.

    Raises:
        TypeError: an option has the wrong type, or is an empty string.
        ValueError: the rate is too low, or not finite.
    """

    rate: float | None = DEFAULT_RATE
    failure_domain: str | None = None
    interface: str | None = None

    def __post_init__(self) -> None:
        if self.rate is not None:
            rate = check_number(self.rate, "rate must be a number of bytes a second, or None")
            if not LEAST_RATE <= rate < math.inf:
                raise ValueError(
                    f"rate must be None, or finite and at least {LEAST_RATE:g} bytes a second, got {self.rate!r}."
                )
            set_fields(self, rate=rate)
        for name, value in (("failure_domain", self.failure_domain), ("interface", self.interface)):
            if value is not None and (not isinstance(value, str) or not value):
                raise TypeError(f"{name} must be a string that is not empty, or None, got {value!r}.")
            set_fields(self, **{name: plain(value)})


def check_copies(copies: object, options: object, seconds: float) -> tuple[int, CopyOptions]:
    """Checks ``copies`` and ``copy_options``, and returns them. ``seconds`` is the value of ``survive``.

    Raises `WriteError` if ``copies`` is 2 and libsodium, which encrypts copies, is missing.
    """
    copies = check_count("copies", copies)
    options = check_type("copy_options", options, CopyOptions)
    if copies not in (1, 2):
        raise ValueError(f"copies must be 1 or 2, the number of hosts that hold a state, got {copies!r}.")
    if copies == 2:
        if not seconds:
            raise ValueError("copies=2 needs survive=. Pass both.")
        require_libsodium()
    return copies, options


class MemoryVote(NamedTuple):
    """Facts about a rank's states in memory. After the all-reduce, a fact is true if it is true of any rank."""

    has_failed: bool = False  # the newest state could not be held
    ends: bool = False  # the rank has stopped holding states
    copy_runs: bool = False  # a copy is in progress
    copy_failed: bool = False  # the last copy has failed, or was not begun
    copies_end: bool = False  # this rank can no longer copy its states
    is_superseded: bool = False  # a later run of the job has claimed the keeper that holds this rank's copies


NOTHING_IN_MEMORY = MemoryVote()


class PeerCopies:
    """Copies of a rank's states on another host. Does nothing with ``copies=1``.

    Attributes:
        is_on: Whether states are copied. The same on all ranks.
        confirmed: The id of the newest state that is copied from all ranks; empty without such a state.
        ordered: The id of the state that is to be copied, or is being copied; empty without such a state. The same on
            all ranks.
        is_ready: Whether a copy can be ordered: all ranks have partners, and all hosts have memory for the replicas.
        problem: Why this rank can no longer copy its states; otherwise empty. If set, copies end on all ranks at the
            next step.
    """

    def __init__(self, agreement: Agreement, copies: int, options: CopyOptions) -> None:
        self.is_on = copies > 1
        self.is_ready = False
        self.confirmed = self.ordered = self.problem = ""
        self._agreement = agreement
        self._options = options
        self._peers: list[Peer] = []
        self._partner_of: list[int] = []
        self._partner: Address | None = None
        self._rate = 0.0
        self._tries = 0
        self._begun = ""  # the last state that this rank's keeper has begun to copy
        self._logged = ""  # why a copy failed, in the last log record

    # --- all ranks together -----------------------------------------------------------------------------------------

    def find_partners(self, keeper: KeeperProcess | None) -> None:
        """Finds each rank's partner, and opens the keepers to each other.

        Collective; a rank without a keeper passes None. Raises `WriteError` if a rank is gone.
        """
        if not self.is_on:
            return
        rank, options = self._agreement.rank, self._options
        peers = self._agreement.gathered(introduce(options, keeper))
        routes = routes_to_others(peers)
        if any(routes):
            peers = self._agreement.gathered(introduce(options, keeper, routes[rank]))
        self._peers, self._partner_of = peers, partners(peers)
        if not self._partner_of:
            what = "on one host" if options.failure_domain is None else "in one failure domain"
            self._end(f"all ranks are {what}, and replicas need another one")
            return
        if problem := next((f"rank {n}: {peer.problem}" for n, peer in enumerate(peers) if peer.keeper is None), ""):
            self._end(problem)
            return
        self._partner = peers[self._partner_of[rank]].keeper
        ranks_of_host = Counter(peer.host for peer in peers)
        self._rate = (options.rate or 0.0) / ranks_of_host[peers[rank].host]
        if self._agreement.is_first:
            logger.info(
                "states are copied between %d hosts; those of this host go to the host of rank %d",
                len(ranks_of_host),
                self._partner_of[0],
            )

    def check_memory(self, nbytes: int, missing: int) -> bool:
        """Checks whether the replicas fit on all hosts. Returns whether to call it again.

        Collective. Each rank passes the size of its part of a state, and the number of staging buffers that it has yet
        to allocate. The second call, once the memory of earlier runs' states is freed, is final.
        """
        if not self.is_on or self.is_ready:
            return False
        memory = self._agreement.gathered((nbytes, missing, available_memory()))
        why = lack_of_memory(self._peers, self._partner_of, memory, RESERVE)
        self.is_ready = not why
        self._tries += 1
        if why and self._tries > 1:
            self._end(why)
        return bool(why) and self.is_on

    def advance(self, vote: MemoryVote) -> None:
        if not self.is_on:
            return
        if vote.copies_end:
            self._end(self.problem or "another rank has stopped copying its states")
        elif self.ordered and not vote.copy_runs:
            if not vote.copy_failed:
                self.confirmed = self.ordered
            self.ordered = ""

    def order(self, state_id: str) -> None:
        """Orders a copy of the state that is staged next, if copies are possible and none is in progress."""
        if self.is_ready and not self.ordered:
            self.ordered = state_id

    # --- this rank --------------------------------------------------------------------------------------------------

    def start(self, keeper: KeeperProcess) -> None:
        """Begins the ordered copy of a state that the keeper holds. Other ranks learn of a failure at the next step."""
        assert self._partner is not None
        try:
            keeper.ask(Copy(self.ordered, self._partner, self._rate, self.confirmed), Done)
        except WriteError as error:
            logger.info("a state is not copied to another host: %s", str(error))
        else:
            self._begun = self.ordered

    def forget(self, keeper: KeeperProcess | None) -> None:
        """Removes the copies of this rank's states.

        Call it before a restore, when the job goes back to an earlier step, and when copies end.
        """
        self.confirmed = ""
        if self._begun and keeper is not None and keeper.is_ours:
            try:
                keeper.ask(Plain.DROP_COPIES, Done)
            except WriteError as error:
                logger.warning("copies of states on another host could not be removed: %s", str(error))
        self._begun = ""

    def vote(self, keeper: KeeperProcess | None) -> MemoryVote:
        if not self.is_on:
            return MemoryVote()
        if self.problem or not self.ordered:
            return MemoryVote(copies_end=bool(self.problem))
        if keeper is None or self._begun != self.ordered:
            return MemoryVote(copy_failed=True)
        try:
            status = keeper.ask(Plain.COPY_STATUS, CopyStatus)
        except WriteError:
            return MemoryVote(copy_failed=True)
        if status.problem and status.problem != self._logged:
            self._logged = status.problem
            log = logger.info if status.is_given_up else logger.warning
            log("a state was not copied to another host: %s", status.problem)
        if status.is_full:
            self.problem = status.problem
        return MemoryVote(
            copy_runs=status.is_running,
            copy_failed=bool(status.problem),
            copies_end=bool(self.problem),
            is_superseded=status.is_claimed,
        )

    def _end(self, why: str) -> None:
        self.is_on, self.is_ready, self.ordered = False, False, ""
        logger.warning("states are not copied to other hosts, as with copies=1: %s", why)


# --- the partners of all ranks ----------------------------------------------------------------------------------------


class Peer(NamedTuple):
    """A rank's host and keeper, as sent to the other ranks."""

    host: str  # the result of `this_host`
    domain: str  # the failure domain, which hosts that may fail together share
    address: str  # the IP address of its host; empty if none was found
    problem: str = ""  # why other hosts cannot reach its keeper
    keeper: Address | None = None  # its keeper's address for other hosts; None if they cannot reach it


def introduce(options: CopyOptions, keeper: KeeperProcess | None, towards: str = "") -> Peer:
    """Opens this rank's keeper to other hosts. Returns the `Peer` of this rank. Idempotent.

    Without the option ``interface``, the keeper listens on the interface towards the host ``towards``, by default the
    coordinator's.
    """
    host = this_host()
    domain = host if options.failure_domain is None else f"domain {options.failure_domain}"
    peer = Peer(host, domain, "")
    try:
        if options.interface is not None:
            address = address_of(options.interface)
        else:
            towards = towards or os.environ.get("MASTER_ADDR", "")
            if not towards:
                group = dist.group.WORLD  # its store is on the coordinator's host
                towards = (store_host(group) if group is not None else None) or socket.gethostname()
            address = address_towards(towards)
        peer = peer._replace(address=address)
        if is_local(address):
            raise OSError(f"{address} is a loopback address. Pass CopyOptions(interface=...) with another interface")
    except OSError as error:
        return peer._replace(problem=f"it has no address that other hosts can reach: {error}")
    if keeper is None:
        return peer._replace(problem="it has no keeper")
    try:
        request = OpenToPeers(address, secrets.token_bytes(SECRET_BYTES))
        return peer._replace(keeper=keeper.ask(request, Address))
    except CheckpointError as error:
        return peer._replace(problem=str(error))


def routes_to_others(peers: Sequence[Peer]) -> list[str]:
    """Returns an address of another host for each rank whose own address is a loopback address or empty.

    Returns "" for each other rank, and if no other host has a usable address. On the coordinator's host, its own name
    may resolve to a loopback address. Then the route to another host gives the interface.
    """
    is_alone = [is_local(peer.address) for peer in peers]
    addresses = dict[str, str]()
    for peer, alone in zip(peers, is_alone, strict=True):
        if not alone:
            addresses.setdefault(peer.host, peer.address)
    return [
        next((address for host, address in addresses.items() if host != peer.host), "") if alone else ""
        for peer, alone in zip(peers, is_alone, strict=True)
    ]


def partners(peers: Sequence[Peer]) -> list[int]:
    """Returns, for each rank, the rank whose keeper holds its replicas. With one failure domain, returns an empty list.

    The domains form a ring, in the order of their first ranks. Each host has a partner host in the next domain, whose
    keepers hold the replicas of the host's ranks.
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


def lack_of_memory(
    peers: Sequence[Peer], partner_of: Sequence[int], memory: Sequence[tuple[int, int, int | None]], reserve: int
) -> str:
    """Returns why the replicas of the last and the next state do not fit on some host, or an empty string if they fit.

    ``memory`` has for each rank the bytes of its state, the number of staging buffers that it has yet to allocate, and
    the available bytes on its host, or None if unknown. On each host, ``reserve`` bytes must remain.
    """
    ranks_of, held_by = defaultdict[str, list[int]](list), defaultdict[str, int](int)
    for rank, peer in enumerate(peers):
        ranks_of[peer.host].append(rank)
        held_by[peers[partner_of[rank]].host] += 2 * memory[rank][0]
    for host, ranks in ranks_of.items():
        bounds = [available for rank in ranks if (available := memory[rank][2]) is not None]
        staging, needed = sum(nbytes * missing for nbytes, missing, _ in map(memory.__getitem__, ranks)), held_by[host]
        if bounds and staging + needed + reserve > min(bounds):
            return (
                f"the host of rank {ranks[0]} has {min(bounds):,} bytes of memory available. Replicas there take "
                f"{needed:,}, staging buffers {staging:,} more, and {reserve:,} must remain"
            )
    return ""


# --- hosts and addresses ----------------------------------------------------------------------------------------------


@functools.cache
def this_host() -> str:
    """Returns a name for this boot of this host. Ranks with the same name lose their memory together.

    The host name is not enough: clones of a machine may share it, and a restart does not change it.
    """
    boot = ""
    with suppress(OSError):
        boot = boot_id().strip()
    return f"{boot} {os.uname().nodename}"


def address_towards(other: str) -> str:
    """Returns the address of this host on the interface towards another host. Raises `OSError`."""
    found = socket.getaddrinfo(other, _ANY_PORT, type=socket.SOCK_DGRAM)
    for number, (family, kind, protocol, _, target) in enumerate(found):
        try:
            with socket.socket(family, kind, protocol) as sock:
                sock.connect(target)  # finds the route without sending a packet
                return str(sock.getsockname()[0])
        except OSError:
            if number + 1 == len(found):
                raise
    raise OSError(f"{other} has no address")


def address_of(interface: str) -> str:
    """Returns the IPv4 address of an interface of this host, or an IP address unchanged. Raises `OSError`."""
    with suppress(ValueError):
        return str(ipaddress.ip_address(interface))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError as error:
            raise OSError(f"the interface {interface!r} has no IPv4 address ({error.strerror})") from error


def is_local(address: str) -> bool:
    return not address or ipaddress.ip_address(address).is_loopback
