"""What a job that has died has left in local folders: who has it, and whether it can be loaded.

Each rank sees the local folder of its own node. So they tell each other what they have.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from .._saving.flushing import Flushing
from .._storage.local import LocalStorage
from .._threads import Deadline
from .._tiers.publishing import missing_files
from .._tiers.queue import OPEN, Commit, Entry, Record
from ..errors import CheckpointError, ReadError
from .agreement import Agreement

__all__ = ["settle"]

logger = logging.getLogger("dcp_tensorizer")

_CLAIM_SECONDS = 5.0
_LOOK_SECONDS = 0.05
_ASK_SECONDS = 5.0  # so that no collective waits for longer than a group allows


def settle(flushing: Flushing | None, agreement: Agreement) -> None:
    """Has flushed what a job before has left, and waits for it where it could not be loaded otherwise.

    Where all ranks see one local folder, it is loaded from there. What a lost node had is given up, with an error in
    the log. Every rank calls it.

    Raises:
        WriteError: a rank is gone.
    """
    if flushing is None:
        return
    own = flushing.open_records()
    can_list = flushing.is_readable
    held = {name for _, record in own for name in _whole(flushing, record)}
    commits = [(entry, record, record.commit) for entry, record in own if record.commit is not None]
    saves = [set(commit.files) for _, _, commit in commits]
    everybody = agreement.gathered((held, saves, can_list))
    all_held = set().union(*(files for files, _, _ in everybody))
    if all(can_list for _, _, can_list in everybody):  # or else it may be there: the flush gives it its time
        for entry, record, commit in commits:
            _give_up_lost(flushing, entry, record, commit, all_held)
    flushing.resume()
    is_far = any(not files <= held for _, saves, _ in everybody for files in saves)
    (must_wait,) = agreement.largest(int(is_far))
    if must_wait:
        _wait(flushing, agreement)


def _whole(flushing: Flushing, record: Record) -> set[str]:
    """The files of a record that are there. What cannot be read counts: the flush tries that for a while."""
    local, whole = LocalStorage(flushing.target.folder(record.place)), set[str]()
    for name, nbytes in record.files.items():
        try:
            found = local.head(name)
        except ReadError:
            found = nbytes
        if found == nbytes:
            whole.add(name)
    return whole


def _give_up_lost(flushing: Flushing, entry: Entry, record: Record, commit: Commit, held: Iterable[str]) -> None:
    """Gives a save up if some of its files are on no node of this job, nor on the remote."""
    missing = commit.files.keys() - set(held)
    if not missing:
        return
    try:
        missing = missing_files(flushing.target.open(record.place), missing, commit.files)
    except CheckpointError as error:  # then it is waited for
        logger.warning("%s/%s cannot be looked at: %s", flushing.target.name, record.place, str(error))
        return
    reason = f"no node of this job has {min(missing, default='')}: the node that saved it is lost"
    deadline = time.monotonic() + _CLAIM_SECONDS
    while missing and time.monotonic() < deadline:
        now = next((e for e in flushing.entries() if e.stem == entry.stem and e.state in OPEN), None)
        if now is None:  # another rank of this node was first
            return
        with flushing.queue.claimed(now) as is_free:
            if is_free:
                _give_up(flushing, now, record, reason)
                return
        time.sleep(_LOOK_SECONDS)  # it is flushed, by another job say


def _give_up(flushing: Flushing, entry: Entry, record: Record, reason: str) -> None:
    try:
        flushing.queue.give_up(entry, record, reason)
    except CheckpointError as error:  # then the flush gives it up; the other ranks wait for this one
        logger.warning("%s/%s cannot be given up: %s", flushing.target.name, record.place, str(error))


def _wait(flushing: Flushing, agreement: Agreement) -> None:
    """Waits until no rank has anything to commit on the remote, or nothing has gone on for the timeout anywhere."""
    logger.info(
        "%s: waiting for what the job before has left in local folders, which no node has as a whole",
        flushing.target.name,
    )
    patience, before = flushing.target.patience(), flushing.progress()
    while True:
        is_over = flushing.wait(Deadline(_ASK_SECONDS), until=lambda: not flushing.unflushed())
        now = flushing.progress()
        if now != before:
            before = now
            patience.renew()
        is_stuck = patience.is_over()
        (goes_on,) = agreement.largest(int(not is_over and not is_stuck))
        if not goes_on:
            return
