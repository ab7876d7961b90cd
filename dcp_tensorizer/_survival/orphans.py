"""States whose process is gone: which of them a rank can load, and the one that was being saved to a path."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from .._format.index import find_index
from .._format.layout import metadata_file_name
from .._storage.base import Storage
from .._storage.open import absolute_path
from .._storage.redact import redact
from ..errors import CheckpointError, ReadError
from .keeper_process import Visit, visits
from .kept_checkpoint import KeptCheckpoint
from .messages import KeptHead
from .runtime_directory import identity, job_name, location_of, runtime_directory

__all__ = ["KeptInfo", "Orphan", "committed_id", "find_orphan", "holders", "list_kept", "reachable"]

logger = logging.getLogger("dcp_tensorizer")


class Orphan(NamedTuple):
    """What a process that is gone was saving.

    Attributes:
        checkpoint: It, as a checkpoint.
        visits: Connections to the keepers that have it. They wait for this process as long as these are open.
        nbytes: Of the buffer of this rank.
    """

    checkpoint: KeptCheckpoint
    visits: list[Visit]
    nbytes: int


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


def list_kept(folder: str | os.PathLike[str]) -> tuple[KeptInfo, ...]:
    """The saves to a folder's checkpoints whose states dead trainers have left in this machine's memory.

    Those of writers with ``survive``; `CheckpointManager` finds its own. A save may be committed all the same.

    Args:
        folder: That the checkpoints are in: a local path, or a URL.

    Returns:
        The newest comes first. Pass its path to `open_reader`.

    Raises:
        WriteError: the path is relative, and there is no working directory.
    """
    heads: dict[str, list[KeptHead]] = {}
    for visit in visits(runtime_directory(), job_name(location_of(absolute_path(folder))[1])):
        if visit.found.is_orphaned:
            for head in visit.found.heads:
                heads.setdefault(head.id, []).append(head)
        visit.close()
    newest_first = sorted(heads.values(), key=lambda of_ranks: -of_ranks[0].number)
    return tuple(_info(sorted(of_ranks, key=lambda head: head.rank)) for of_ranks in newest_first)


def find_orphan(path: str | Path, storage: Storage, rank: int, world_size: int) -> Orphan | None:
    """What was being saved to a path when the processes that saved it were killed, if it is newer than what is there.

    Args:
        path: Of the checkpoint; absolute.
        storage: What is there now.
        rank: That loads, one of ``world_size``.

    Returns:
        None if there is nothing that this rank can load by itself. The log says why, if there is something.
    """
    folder, name = location_of(path)
    found = [visit for visit in visits(runtime_directory(), job_name(folder)) if _orphaned(visit, name)]
    orphan = None
    try:
        states = [head for head in reachable(found, rank, world_size).values() if head.path == name]
        if found and (newest := _newest(states, storage, folder)) is not None:
            contents = [visit.take(newest.id) for visit in holders(found, newest.id, rank)]
            checkpoint = KeptCheckpoint(f"{redact(name)} (in memory)", contents)
            orphan = Orphan(checkpoint, found, contents[-1][0].state.nbytes)
            logger.info("%s is loaded from memory, where a process that is gone has left it", redact(name))
    except CheckpointError as error:
        logger.warning("%s is in memory, and cannot be loaded from there: %s", redact(name), str(error))
    if orphan is None:
        for visit in found:
            visit.close()
    return orphan


def committed_id(storage: Storage) -> str | None:
    """The id of the save that is committed; None if there is none, and empty if it is none of this package's."""
    try:
        index = find_index(storage, metadata_file_name())
    except CheckpointError:
        return ""
    return None if index is None else str(index.head.save_id)


def reachable(found: Sequence[Visit], rank: int, world_size: int) -> dict[str, KeptHead]:
    """The states that a rank can load by itself from this machine's memory, by their ids."""
    by_id: dict[str, dict[int, KeptHead]] = {}
    for visit in found:
        for head in visit.found.heads:
            by_id.setdefault(head.id, {})[head.rank] = head
    states = {}
    for number, of_ranks in by_id.items():
        head = next(iter(of_ranks.values()))
        if len(of_ranks) == head.world_size or (head.world_size == world_size and rank in of_ranks):
            states[number] = head
    return states


def holders(found: Sequence[Visit], number: str, rank: int) -> list[Visit]:
    """The keepers on this machine that have a part of a state, that of this rank's number last."""
    by_rank = {head.rank: visit for visit in found for head in visit.found.heads if head.id == number}
    return [by_rank[other] for other in sorted(by_rank, key=lambda other: (other == rank, other))]


def _info(heads: Sequence[KeptHead]) -> KeptInfo:
    head = heads[0]
    started = datetime.fromtimestamp(head.number / 1e9, timezone.utc)
    return KeptInfo(head.path, head.id, started, head.world_size, tuple(other.rank for other in heads))


def _orphaned(visit: Visit, name: str) -> bool:
    """Whether a keeper waits for somebody to load a path. If not, the connection is closed."""
    try:
        if any(head.path == name for head in visit.found.heads) and visit.claim(name):
            return True
    except ReadError:  # it has just ended
        pass
    visit.close()
    return False


def _newest(states: Sequence[KeptHead], storage: Storage, folder: str) -> KeptHead | None:
    """The newest state that goes on from what is at the path."""
    if not states:
        logger.info("%s: what is in memory is not all that this rank needs", storage.path)
        return None
    newest = max(states, key=lambda head: (head.number, head.id))
    if newest.folder not in (None, identity(folder)):
        logger.warning("%s is in memory, and its folder is another one now: it is not used", storage.path)
        return None
    if committed_id(storage) not in (newest.id, newest.replaces):
        logger.warning("%s is in memory, and another save is committed there since: it is not used", storage.path)
        return None
    return newest
