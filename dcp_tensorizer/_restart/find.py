"""States whose process is gone: which of them a rank can load, and the one that was being saved to a path.

Each rank decides for itself, because one may read a checkpoint alone. What it decides depends only on what is on its
machine, so that the ranks of a machine decide alike. Machines that differ are found out when plans are compared.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from .._format.names import metadata_file_name
from .._index.container import find_index
from .._runtime.forks import in_child
from .._runtime.threads import ranks_of_node
from .._storage.base import Storage
from .._storage.open import absolute_path
from ..errors import CheckpointError, describe
from .checkpoint import KeptCheckpoint
from .client import Visit, visits
from .protocol import KeptContent, KeptHead
from .runtime_directory import SAVES, identity, job_name, location_of

logger = logging.getLogger("dcp_tensorizer")

_LOOK_SECONDS = 5.0  # a keeper answers in a millisecond, where it has a core


@dataclass(frozen=True)
class KeptInfo:
    """A save whose trainer is gone, and whose state is in this machine's memory.

    Attributes:
        path: Where it was being saved.
        save_id: Of the save.
        started: When the save began, in UTC.
        world_size: How many ranks saved.
        ranks: Those whose state is on this machine.
    """

    path: str
    save_id: str
    started: datetime
    world_size: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class _State:
    """A state in this machine's memory: the head of each rank's part."""

    by_rank: dict[int, KeptHead]

    @property
    def head(self) -> KeptHead:
        """The head of any one rank's part."""
        return next(iter(self.by_rank.values()))

    @property
    def is_whole(self) -> bool:
        return len(self.by_rank) == self.head.world_size


def list_kept(folder: str | os.PathLike[str]) -> tuple[KeptInfo, ...]:
    """The saves below a folder whose states dead trainers have left in this machine's memory.

    Those of writers with ``survive``; `CheckpointManager` finds its own. A save may be committed all the same.

    Args:
        folder: A local path, or a URL.

    Returns:
        The newest comes first.

    Raises:
        WriteError: the path is relative, and there is no working directory.
    """
    name = location_of(absolute_path(folder))

    def is_below(head: KeptHead) -> bool:
        return head.path.startswith(f"{name}/")

    found = _orphans(is_below)
    for visit in found:
        visit.close()
    infos = (_info(state) for state in _states(found, is_below))
    return tuple(sorted(infos, key=lambda info: info.started, reverse=True))


def find_orphan(path: str | Path, storage: Storage, rank: int, world_size: int) -> KeptCheckpoint | None:
    """Finds the state that was being saved to a path when its processes were killed, if it is newer than what is there.

    Args:
        path: Of the checkpoint; absolute.
        storage: Its current contents.
        rank: That loads, one of ``world_size``.

    Returns:
        None if there is nothing that this rank can load by itself. The log says why, if there is something.
    """
    name = location_of(path)

    def is_there(head: KeptHead) -> bool:
        return head.path == name

    found = _orphans(is_there)
    if not found:
        return None
    try:
        states = _states(found, is_there)
        if not states:
            logger.warning("%s is in memory, and its folder is another one now: it is not used", name)
            return None
        chosen = _newest(states, storage, rank, world_size)
        if chosen is None:
            return None
        contents = taken(holders(found, chosen.id, rank), chosen.id)
        checkpoint = KeptCheckpoint(f"{name} (in memory)", contents)
        loaded.add(chosen, contents[-1][0].state.nbytes)
    except Exception as error:  # whatever is wrong with what is in memory: storage is there
        logger.warning("%s is in memory, and cannot be loaded from there: %s", name, describe(error))
        return None
    finally:
        for visit in found:
            visit.close()
    logger.info("%s is loaded from memory, where an ended process has left it", name)
    return checkpoint


class Loaded:
    """The states that this process has loaded from memory. They stay there, for when it dies before it has saved.

    Attributes:
        is_replaced: On the coordinator: a save has been committed since.
        last_number: The largest of their numbers; 0 if there is none.
    """

    def __init__(self) -> None:
        self.is_replaced = False
        self.last_number = 0
        self._sizes: dict[str, int] = {}
        in_child(self, Loaded._let_go)

    def _let_go(self) -> None:
        """Lets go in a forked child: its parent may need them still."""
        self._sizes.clear()

    @property
    def nbytes(self) -> int:
        """The bytes of the largest one; 0 if there is none."""
        return max(self._sizes.values(), default=0)

    def add(self, head: KeptHead, nbytes: int) -> None:
        """One more has been loaded."""
        self.is_replaced = False
        self.last_number = max(self.last_number, head.number)
        self._sizes[head.id] = nbytes

    def release(self) -> None:
        """Frees their memory, which is no longer needed."""
        numbers = set(self._sizes)
        self._sizes.clear()
        for visit in _orphans(lambda head: head.id in numbers) if numbers else ():
            visit.end()


loaded = Loaded()
"""Those of this process."""


def committed_id(storage: Storage) -> str | None:
    """The id of the save that is committed; None if there is none, and empty if that is not known."""
    try:
        index = find_index(storage, metadata_file_name())
    except CheckpointError:
        return ""
    return None if index is None else str(index.head.save_id)


def reachable(found: Sequence[Visit], rank: int, world_size: int) -> dict[str, KeptHead]:
    """The states that a rank can load by itself from this machine's memory, by their ids."""
    return {
        state.head.id: state.head
        for state in _states(found, lambda head: True)
        if state.is_whole or (state.head.world_size == world_size and rank in state.by_rank)
    }


def holders(found: Sequence[Visit], number: str, rank: int) -> list[Visit]:
    """The keepers on this machine that have a part of a state, that of this rank's number last."""
    by_rank = {head.rank: visit for visit in found for head in visit.found.heads if head.id == number}
    return [by_rank[other] for other in sorted(by_rank, key=lambda other: (other == rank, other))]


def taken(found: Sequence[Visit], number: str) -> list[tuple[KeptContent, int]]:
    """Takes the parts of a state from its keepers, with the descriptors of the buffers, which are the caller's to
    close.

    Raises:
        ReadError: one of them does not have it any more.
    """
    contents: list[tuple[KeptContent, int]] = []
    try:
        for visit in found:
            contents.append(visit.take(number))
    except BaseException:
        for _, fd in contents:
            os.close(fd)
        raise
    return contents


def _orphans(wanted: Callable[[KeptHead], bool]) -> list[Visit]:
    """Connections to the keepers whose trainers are gone, and that have a state that is wanted."""
    found, silent = visits(job_name(SAVES), _LOOK_SECONDS)
    for path in silent:
        logger.warning("what a keeper has in memory is not looked at: it does not answer at %s, so it is stopped", path)
    orphans = [visit for visit in found if visit.found.is_orphaned and any(map(wanted, visit.found.heads))]
    for visit in found:
        if visit not in orphans:
            visit.close()
    return orphans


def _states(found: Sequence[Visit], wanted: Callable[[KeptHead], bool]) -> list[_State]:
    """Groups the parts of each state that is wanted; of saves, only where the folder is the one that they went to."""
    states: dict[str, dict[int, KeptHead]] = {}
    for head in (head for visit in found for head in visit.found.heads):
        if wanted(head) and (not head.path or head.folder in (None, identity(os.path.dirname(head.path)))):
            states.setdefault(head.id, {})[head.rank] = head
    return [_State(by_rank) for by_rank in states.values()]


def _info(state: _State) -> KeptInfo:
    head = state.head
    started = datetime.fromtimestamp(head.number / 1e9, timezone.utc)
    return KeptInfo(head.path, head.id, started, head.world_size, tuple(sorted(state.by_rank)))


def _newest(states: Sequence[_State], storage: Storage, rank: int, world_size: int) -> KeptHead | None:
    """The newest state that goes on from what is at the path, if all ranks of this machine can load it."""
    now = committed_id(storage)
    for state in sorted(states, key=lambda state: state.head.number, reverse=True):
        head = state.head
        if head.id == now:
            return head if state.is_whole else None  # storage has the same, and all of it
        if now == "" or head.replaces != now:
            logger.warning("%s is in memory, and another save is committed there since: it is not used", storage.path)
        elif state.is_whole or (
            head.world_size == world_size and state.by_rank.keys() >= _ranks_here(rank, world_size)
        ):
            return head
        else:
            logger.warning("%s is in memory, but not for all ranks: it is not used", storage.path)
    return None


def _ranks_here(rank: int, world_size: int) -> set[int]:
    """The ranks of this machine, as a launcher says; all if none says anything."""
    count, position = ranks_of_node(), os.environ.get("LOCAL_RANK", "")
    if count is None or not position.isdecimal():
        return set(range(world_size))
    first = rank - int(position)
    return set(range(first, first + count))
