"""Finds states whose trainers are gone: which keepers have them, and which of them all ranks can load."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from types import MappingProxyType

from .._runtime.forks import Descriptor
from ..errors import ReadError, describe
from .checkpoint import KeptCheckpoint
from .client import KeeperConnection
from .protocol import Found, KeptContent, KeptHead
from .replicas import RemotePart
from .wire import Address

logger = logging.getLogger("dcp_tensorizer")

_DEATH_SECONDS = 5.0  # the time that a keeper gets to see that its trainer is gone
_CLAIM_SECONDS = 0.05  # the pause between two claims


class Predecessors:
    """The keepers of earlier trainers on this machine. ``nbytes`` is the size of the buffer that `open` has opened."""

    def __init__(self, keepers: Sequence[KeeperConnection] = ()) -> None:
        self.nbytes = 0
        self._keepers = list(keepers)

    def __bool__(self) -> bool:
        return bool(self._keepers)

    def claim(self, run: str) -> str:
        """Reserves the keepers for a run of the job. Returns why one refuses: another run is alive; otherwise empty."""
        deadline = time.monotonic() + _DEATH_SECONDS
        for keeper in self._keepers:
            while True:
                try:
                    if keeper.claim(run):
                        break
                except ReadError:  # it has just ended
                    break
                if time.monotonic() > deadline:
                    return (
                        f"another run of this job is alive (its trainer is process {keeper.found.trainer} on "
                        f"{socket.gethostname()}), or another one is being started: end it first. Two runs would "
                        f"replace each other's checkpoints"
                    )
                time.sleep(_CLAIM_SECONDS)
        return ""

    @property
    def found(self) -> list[Found]:
        """The parts of states that these keepers have."""
        return [keeper.found for keeper in self._keepers]

    def open(
        self,
        state_id: str,
        rank: int,
        path: str,
        elsewhere: Mapping[int, Sequence[Address]] = MappingProxyType({}),
        damaged: Collection[tuple[int, str]] = (),
    ) -> KeptCheckpoint:
        """Opens a state as a checkpoint. If several ranks have the same item, ``rank`` gets its own.

        ``elsewhere`` says where other hosts have parts, by the parts' ranks. ``damaged`` are the rank and the place of
        parts that are not used. Raises `ReadError` if no keeper has the state any more, or it cannot be read.
        """
        places: dict[int, list[KeeperConnection | Address]] = {}
        for keeper in self._keepers:
            for head in keeper.found.heads:
                if head.id == state_id:
                    places.setdefault(head.rank, []).append(keeper)
        here = {keeper.found.address for keeper in self._keepers}
        for other, addresses in elsewhere.items():
            places.setdefault(other, []).extend(address for address in addresses if address not in here)
        parts: list[tuple[KeptContent, Descriptor | RemotePart]] = []
        used: dict[int, str] = {}
        try:
            for other in sorted(places, key=lambda other: (other == rank, other)):
                usable = [place for place in places[other] if (other, _name_of(place)) not in damaged]
                place, part = _taken(usable, state_id, other)
                used[other] = _name_of(place)
                parts.append(part)
            checkpoint = KeptCheckpoint(path, parts)
        except BaseException as error:
            for _, buffer in parts:
                (buffer.release if isinstance(buffer, RemotePart) else buffer.close)()
            if not isinstance(error, Exception):  # a KeyboardInterrupt
                raise
            # For example, it was kept by another release.
            raise ReadError(f"{path} cannot be read: {describe(error)}") from error
        checkpoint.places = used
        last = parts[-1][1]
        self.nbytes = parts[-1][0].state.nbytes if isinstance(last, Descriptor) else 0
        return checkpoint

    def forget_all_but(self, state_id: str) -> None:
        """Lets the keepers forget all other states."""
        for keeper in self._keepers:
            keeper.forget_all_but(state_id)

    def end(self) -> None:
        """Ends the keepers, and frees their memory, because the states are no longer wanted. Idempotent."""
        self.nbytes = 0
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.end()

    def close(self) -> None:
        """Closes the connections, and leaves the keepers as they are. Idempotent."""
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.close()


def _name_of(place: KeeperConnection | Address) -> str:
    """The name of a place that has a part, for messages."""
    if isinstance(place, Address):
        return f"the keeper at {place!r}"
    return f"the keeper of process {place.found.trainer} on {socket.gethostname()}"


def _taken(
    places: Sequence[KeeperConnection | Address], state_id: str, rank: int
) -> tuple[KeeperConnection | Address, tuple[KeptContent, Descriptor | RemotePart]]:
    """Takes a part from the first place that gives it; raises `ReadError` if none does."""
    failure = ReadError(f"no undamaged copy of rank {rank}'s part is left")
    for place in places:
        try:
            if isinstance(place, KeeperConnection):
                return place, place.take(state_id, rank)
            remote = RemotePart(place, state_id, rank)
            return place, (remote.record(), remote)
        except ReadError as error:
            failure = error
            logger.warning("rank %d's part is not taken from %s: %s", rank, _name_of(place), str(error))
    raise failure


class AllMemory:
    """The states in the memory of all hosts of the job. ``found`` has, for each rank, the keepers on its host."""

    def __init__(self, found: Sequence[Sequence[Found]]) -> None:
        self._found = found
        self._parts: dict[str, dict[int, KeptHead]] = {}
        self._places: dict[str, dict[int, list[Address]]] = {}
        for keeper in chain.from_iterable(found):
            for head in keeper.heads:
                self._parts.setdefault(head.id, {}).setdefault(head.rank, head)
                if keeper.address is not None:
                    places = self._places.setdefault(head.id, {}).setdefault(head.rank, [])
                    places += [keeper.address] * (keeper.address not in places)

    def states(self) -> list[KeptHead]:
        """The states that all ranks can load, each from its own host or from others, by the heads of their first parts.

        A keeper without an address serves only its own host.
        """
        first = [parts[min(parts)] for parts in self._parts.values()]
        return [head for head in first if self._is_whole(head) and self._serves_all(head)]

    def places(self, head: KeptHead, rank: int | None = None) -> dict[int, list[Address]]:
        """The keepers that give parts of a state to other hosts, by the parts' ranks; with ``rank`` those it needs."""
        places = self._places.get(head.id, {})
        return places if rank is None else {part: places[part] for part in self._needed(head, rank) if part in places}

    def _is_whole(self, head: KeptHead) -> bool:
        return len(self._parts[head.id]) == head.world_size

    def _serves_all(self, head: KeptHead) -> bool:
        given = set(self._places.get(head.id, ()))
        for rank, keepers in enumerate(self._found):
            here = {part.rank for keeper in keepers for part in keeper.heads if part.id == head.id}
            if not given | here >= self._needed(head, rank):
                return False
        return True

    def _needed(self, head: KeptHead, rank: int) -> set[int]:
        """The parts that a rank needs: its own, or all if another number of ranks had saved."""
        return {rank} if head.world_size == len(self._found) else set(range(head.world_size))
