"""Finds states whose trainers are gone: which keepers have them, and which of them a rank can load.

Each rank decides for itself, because a rank may read a checkpoint alone. The decision depends only on the memory of its
machine, so all ranks of a machine decide alike. If machines decide differently, the comparison of their plans fails.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from .._index.container import find_index
from .._runtime.forks import Descriptor, in_child
from .._runtime.threads import ranks_of_node
from .._storage.base import Storage
from .._storage.open import absolute_path
from .._tensor_file.names import metadata_file_name
from ..errors import CheckpointError, ReadError, describe
from .checkpoint import KeptCheckpoint
from .client import KeeperConnection, connect_to_keepers
from .peers import this_host
from .protocol import KeptContent, KeptHead
from .replicas import RemotePart
from .runtime_directory import SAVES, identity, job_name, location_of
from .wire import Address

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger("dcp_tensorizer")

_LOOK_SECONDS = 5.0  # a keeper answers in a millisecond if it gets a core
_DEATH_SECONDS = 5.0  # the time that a keeper gets to see that its trainer is gone
_CLAIM_SECONDS = 0.05  # the pause between two claims


@dataclass(frozen=True)
class KeptInfo:
    """A save whose trainer is gone, and whose state is still in memory.

    Attributes:
        path: Where it was being saved.
        save_id: The id of the save.
        started: When the save began, in UTC.
        world_size: How many ranks saved.
        ranks: The ranks whose state is in memory, on this machine or on those of the process group.
    """

    path: str
    save_id: str
    started: datetime
    world_size: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class KeptParts:
    """A state in memory: the head of each rank's part."""

    by_rank: dict[int, KeptHead]

    @property
    def head(self) -> KeptHead:
        """The head of any one rank's part."""
        return next(iter(self.by_rank.values()))

    @property
    def is_whole(self) -> bool:
        return len(self.by_rank) == self.head.world_size

    def serves(self, ranks: Collection[int], world_size: int) -> bool:
        """Returns whether these ranks can load the state from these parts: the whole state, or each its own part."""
        return self.is_whole or (self.head.world_size == world_size and self.by_rank.keys() >= set(ranks))


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

    def states(self, wanted: Callable[[KeptHead], bool] = lambda head: True) -> list[KeptParts]:
        """The wanted states. A state whose folder has been replaced by another one is left out."""
        states: dict[str, dict[int, KeptHead]] = {}
        for head in self.heads:
            if wanted(head) and _is_there(head):
                states.setdefault(head.id, {})[head.rank] = head
        return [KeptParts(by_rank) for by_rank in states.values()]

    @property
    def held(self) -> list[Held]:
        """The parts that these keepers give to other hosts."""
        found = [keeper.found for keeper in self._keepers]
        return [Held(of_keeper.address, of_keeper.heads) for of_keeper in found if of_keeper.address is not None]

    @property
    def heads(self) -> list[KeptHead]:
        """The heads of all parts that these keepers have."""
        return [head for keeper in self._keepers for head in keeper.found.heads]

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


class Held(NamedTuple):
    """The parts of states that a keeper has, and the address by which other hosts reach it."""

    address: Address
    heads: tuple[KeptHead, ...]


def places_of(keepers: Iterable[Held]) -> dict[str, dict[int, list[Address]]]:
    """The addresses of keepers that have the parts of states, by the state's id and the part's rank."""
    places: dict[str, dict[int, list[Address]]] = {}
    for address, head in [(keeper.address, head) for keeper in keepers for head in keeper.heads]:
        of_rank = places.setdefault(head.id, {}).setdefault(head.rank, [])
        if address not in of_rank:
            of_rank.append(address)
    return places


def _is_there(head: KeptHead) -> bool:
    """Returns whether the folder of a save is still the same one; True for a manager, which checks its folder itself.

    On the host that kept the state, device and inode must be the same. Other hosts number devices in another way.
    """
    if not head.path:
        return True
    there = identity(os.path.dirname(head.path))
    if head.folder is None or head.host in ("", this_host()):
        return head.folder in (None, there)
    return there is not None and head.folder[1] == there[1]


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


def list_kept(folder: str | os.PathLike[str], *, process_group: ProcessGroup | None = None) -> tuple[KeptInfo, ...]:
    """Lists the saves below a folder whose states dead trainers have left in memory.

    They are those of writers with ``survive``. `CheckpointManager` finds its own. Some of the saves may be committed.

    Args:
        folder: A local path, or a URL.
        process_group: A group of the job's ranks with a CPU backend; each rank makes the call. Then states in the
            memory of all their hosts are listed, the same on all ranks, if every rank can load them. Later loads in
            this process also read copies from other hosts. None: only the memory of this machine.

    Returns:
        The saves, the newest first.

    Raises:
        WriteError: the path is relative, and there is no working directory.
    """
    name = location_of(absolute_path(folder))

    def is_below(head: KeptHead) -> bool:
        return head.path.startswith(f"{name}/")

    found = _orphans(is_below)
    try:
        if process_group is None:
            states = found.states(is_below)
        else:
            elsewhere.exchange(found, process_group)
            states = elsewhere.states(is_below)
    finally:
        found.close()
    return tuple(sorted(map(_info, states), key=lambda info: info.started, reverse=True))


class Elsewhere:
    """The states in memory on all hosts of the job, as the ranks have told each other.

    For each rank: the heads on its host, and the parts that the keepers there give to other hosts.
    """

    def __init__(self, found: Sequence[tuple[Sequence[KeptHead], Sequence[Held]]] = ()) -> None:
        self.take(found)

    def exchange(self, found: Predecessors, group: ProcessGroup) -> None:
        """Gathers the states that all ranks have found on their hosts. Each rank makes the call."""
        import torch.distributed as dist  # here, because a look at this machine alone does not need it

        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, (found.heads, found.held), group=group)
        self.take(gathered)

    def take(self, found: Sequence[tuple[Sequence[KeptHead], Sequence[Held]]]) -> None:
        """Replaces the states found before by those that each rank has found now."""
        self._found = [heads for heads, _ in found]
        self._places = places_of(keeper for _, held in found for keeper in held)

    def states(self, wanted: Callable[[KeptHead], bool] = lambda head: True) -> list[KeptParts]:
        """The wanted states that all ranks can load, each from its own host or from others."""
        by_id: dict[str, dict[int, KeptHead]] = {}
        for head in (head for heads in self._found for head in heads if wanted(head)):
            by_id.setdefault(head.id, {}).setdefault(head.rank, head)
        found = [KeptParts(dict(sorted(by_rank.items()))) for by_rank in by_id.values()]
        return [state for state in found if state.is_whole and self._serves_all(state) and _is_there(state.head)]

    def _serves_all(self, state: KeptParts) -> bool:
        """Returns whether each rank reaches the parts it needs. A keeper without an address serves only its host."""
        given = self._places.get(state.head.id, {}).keys()
        for rank, heads in enumerate(self._found):
            reached = given | {head.rank for head in heads if head.id == state.head.id}
            parts = KeptParts({other: head for other, head in state.by_rank.items() if other in reached})
            if not reached or not parts.serves([rank], len(self._found)):
                return False
        return True

    def places(self, head: KeptHead) -> dict[int, list[Address]]:
        """The keepers that give parts of a state to other hosts, by the ranks of the parts."""
        return self._places.get(head.id, {})

    def own_places(self, head: KeptHead, rank: int, world_size: int) -> dict[int, list[Address]]:
        """The keepers of the parts that a rank needs: its own part, or all if another number of ranks had saved."""
        places = self.places(head)
        return places if head.world_size != world_size else {rank: places[rank]} if rank in places else {}

    def forget(self, ids: Collection[str]) -> None:
        """Forgets states whose keepers are ended."""
        self._found = [[head for head in heads if head.id not in ids] for heads in self._found]


elsewhere = Elsewhere()
"""The states on other hosts, as far as this process knows them."""


def find_orphan(
    path: str | Path, storage: Storage, rank: int, world_size: int, damaged: Collection[tuple[int, str]] = ()
) -> KeptCheckpoint | None:
    """Finds the state of a save that was killed, if it is newer than the checkpoint at its path.

    ``path`` is absolute, and ``storage`` is that directory. ``damaged`` is as in `Predecessors.open`. Returns None if
    this rank can load no state by itself. If there is a state, the log says why.
    """
    name = location_of(path)

    def is_there(head: KeptHead) -> bool:
        return head.path == name

    found = _orphans(is_there)
    shared = elsewhere.states(is_there)
    if not found and not shared:
        return None
    try:
        states = shared or found.states(is_there)
        if not states:
            logger.warning("%s is in memory, but its folder is another one now: it is not used", name)
        elif (chosen := _newest(states, storage, rank, world_size)) is not None:
            places = elsewhere.own_places(chosen, rank, world_size)
            checkpoint = found.open(chosen.id, rank, f"{name} (in memory)", places, damaged)
            loaded.add(chosen, found.nbytes)
            logger.info("%s is loaded from memory, where an ended process has left it", name)
            return checkpoint
    except Exception as error:  # whatever is wrong with the state in memory, storage remains
        logger.warning("%s is in memory, but cannot be loaded from there: %s", name, describe(error))
    finally:
        found.close()
    return None


class Loaded:
    """The states that this process has loaded from memory. They stay there, in case it dies before it has saved.

    Attributes:
        is_replaced: On the coordinator: a save has been committed since.
        last_number: The largest number of these states; 0 if there is none.
    """

    def __init__(self) -> None:
        self.is_replaced = False
        self.last_number = 0
        self._sizes: dict[str, int] = {}
        in_child(self, Loaded._release)

    def _release(self) -> None:
        """Forgets the states in a forked child, without freeing them: the parent may still need them."""
        self._sizes.clear()

    @property
    def nbytes(self) -> int:
        """The size of the largest state; 0 if there is none."""
        return max(list(self._sizes.values()), default=0)

    def add(self, head: KeptHead, nbytes: int) -> None:
        """Adds a state that has been loaded."""
        self.is_replaced = False
        self.last_number = max(self.last_number, head.number)
        self._sizes[head.id] = nbytes

    def release(self) -> None:
        """Frees the memory of these states, which are no longer needed."""
        released, self._sizes = self._sizes, {}
        if released:
            elsewhere.forget(released)
            _orphans(lambda head: head.id in released).end()


loaded = Loaded()
"""The states that this process has loaded."""


def committed_id(storage: Storage) -> str | None:
    """The id of the committed save; None if there is none, and empty if its index cannot be read."""
    try:
        index = find_index(storage, metadata_file_name())
    except CheckpointError:
        return ""
    return None if index is None else str(index.head.save_id)


def _orphans(wanted: Callable[[KeptHead], bool]) -> Predecessors:
    """The keepers that have lost their trainer and hold a wanted state of a save."""
    found, silent = connect_to_keepers(job_name(SAVES), _LOOK_SECONDS)
    for path in silent:
        logger.warning("the keeper at %s does not answer, because it is stopped: its states are not looked at", path)
    orphans = [keeper for keeper in found if keeper.found.is_orphaned and any(map(wanted, keeper.found.heads))]
    for keeper in found:
        if keeper not in orphans:
            keeper.close()
    return Predecessors(orphans)


def _info(state: KeptParts) -> KeptInfo:
    head = state.head
    started = datetime.fromtimestamp(head.number / 1e9, timezone.utc)
    return KeptInfo(head.path, head.id, started, head.world_size, tuple(sorted(state.by_rank)))


def _newest(states: Sequence[KeptParts], storage: Storage, rank: int, world_size: int) -> KeptHead | None:
    """The newest state that continues from the checkpoint at the path, if all ranks of this machine can load it."""
    now = committed_id(storage)
    for state in sorted(states, key=lambda state: state.head.number, reverse=True):
        head = state.head
        if head.id == now:
            return head if state.is_whole else None  # otherwise storage, which has all of the same state
        if now == "" or head.replaces != now:
            logger.warning(
                "%s is in memory, but another save has been committed there since: it is not used", storage.path
            )
        elif state.serves(_ranks_here(rank, world_size), world_size):
            return head
        else:
            logger.warning("%s is in memory, but not for all ranks: it is not used", storage.path)
    return None


def _ranks_here(rank: int, world_size: int) -> set[int]:
    """The ranks of this machine, according to the launcher; all ranks if the launcher does not say."""
    count, position = ranks_of_node(), os.environ.get("LOCAL_RANK", "")
    if count is None or not position.isdecimal():
        return set(range(world_size))
    first = rank - int(position)
    return set(range(first, first + count))
