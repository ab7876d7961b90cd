"""Finishes saves that a dead job left in local folders: flushes them, leaves them there to be loaded, or gives them up.

Each rank sees only the local folder of its own node. So the ranks exchange lists of the saves that they have.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from .._runtime.threads import Deadline
from .._saving.flushing import Flushing
from .._storage.local import LocalStorage
from .._tensor_file.names import is_data_file_name, metadata_file_name, save_id_in
from .._tiers.flush import discard, missing_files, named_files
from .._tiers.queue import REPORTED, SENT, FlushEntry, FlushRecord, remove_unused
from ..errors import CheckpointError, ReadError, listed_ranks
from .ranks import Agreement

logger = logging.getLogger("dcp_tensorizer")

_CLAIM_SECONDS = 5.0
_POLL_SECONDS = 0.05
# The longest wait of a rank between two collectives. Ranks that are done wait in the next collective for the others,
# and must not reach the group's timeout.
_WAIT_SECONDS = 5.0


class UnflushedPart(NamedTuple):
    """One rank's part of an unflushed save."""

    record: FlushRecord
    is_confirmed: bool = False  # the rank knows that the save is committed; another rank may have the commit record
    is_alive: bool = False  # the writer that saved the part is alive
    is_sent: bool = False  # the part was once on the remote

    @property
    def committed(self) -> Mapping[str, int] | None:
        """Returns the files of all ranks if this is the coordinator's part, and otherwise None."""
        return None if self.record.commit is None else self.record.commit.files


class LocalSaves(NamedTuple):
    """Unflushed saves in a rank's local folder."""

    held: set[str]  # the files of these saves that are complete in the folder
    parts: list[UnflushedPart]
    can_list: bool  # the rank can list its folder


class _Loss(NamedTuple):
    """A save that will not reach the remote."""

    subpath: str
    files: set[str]  # the save's files, as far as the ranks know them
    reason: str
    is_known: bool  # the save is known to have been committed, and has not been deleted since


def finish_unflushed(flushing: Flushing | None, agreement: Agreement) -> set[str]:
    """Continues the flush of saves of an earlier job. Waits for the flush if a save can be loaded only from the remote.

    If each rank has all files of a save in its local folder, the save can be loaded from there. If a lost node had a
    part of a save, and the part is not on the remote, the save is given up, and its files on the remote are removed.

    Collective. Returns the ids of the given-up saves, the same on all ranks. Raises `WriteError` if a rank is gone.
    """
    if flushing is None:
        return set()
    own, queue = flushing.open_records(), flushing.queue
    can_list = bool(own) or not flushing.unknown  # a disk that cannot be written to may be readable
    held = {name for _, record in own for name in _whole(flushing, record)}
    parts = [
        UnflushedPart(record, queue.is_confirmed(entry), queue.is_alive(record.writer), entry.state == SENT)
        for entry, record in own
    ]
    everybody = agreement.gathered(LocalSaves(held, parts, can_list))
    losses = list[_Loss]()
    # If a rank cannot list its folder, the flush gives up lost saves later.
    if all(left.can_list for left in everybody) and _suspects(everybody):
        losses = agreement.decided(lambda: _losses(flushing, _suspects(everybody)))
    for loss in losses:
        for entry, record in own:
            files = record.files if record.commit is None else record.commit.files
            if record.subpath == loss.subpath and loss.files & files.keys():
                _give_up(flushing, entry, record, loss.reason)
    flushing.resume()
    is_far = any(
        part.committed is not None and not part.committed.keys() <= held for left in everybody for part in left.parts
    )
    (must_wait,) = agreement.largest(int(is_far))  # after this collective, all ranks have given up the lost saves
    for loss in losses:
        if agreement.is_first:
            _clear(flushing, loss)
        if loss.is_known:
            flushing.report_lost(
                f"{flushing.target.name}/{loss.subpath} is given up, and will not be on the remote: {loss.reason}"
            )
        elif agreement.is_first:
            logger.warning(
                "%s/%s: %s. The files of this save are removed from the remote",
                flushing.target.name,
                loss.subpath,
                loss.reason,
            )
    if must_wait:
        _wait(flushing, agreement)
    return {save_id_in(name) for loss in losses for name in loss.files}


def _whole(flushing: Flushing, record: FlushRecord) -> set[str]:
    """Returns the files of a flush record that are complete in the local folder.

    Unreadable files count as complete, because the flush retries them.
    """
    local, whole = LocalStorage(flushing.target.folder(record.subpath)), set[str]()
    for name, nbytes in record.files.items():
        try:
            found = local.head(name)
        except ReadError:
            found = nbytes
        if found == nbytes:
            whole.add(name)
    return whole


def _suspects(everybody: Sequence[LocalSaves]) -> list[tuple[list[UnflushedPart], set[str]]]:
    """Finds the saves that seem to be lost. Returns parts of each, and its files that are known to be missing.

    If some files of a committed save are on no node of this job, returns the coordinator's part, and these files. If
    the nodes have parts of a save whose commit record none of them has, returns these parts, and no files. Saves of a
    living writer do not count, because a job may load the saves of another job.
    """
    held = set[str]().union(*(left.held for left in everybody))
    # All ranks of a node list the same records.
    parts = list({(part.record.rank, part.record.id): part for left in everybody for part in left.parts}.values())
    named = set[str]().union(*(part.committed or () for part in parts))
    suspects = [
        ([part], files.keys() - held)
        for part in parts
        if (files := part.committed) is not None and not part.is_alive and files.keys() - held
    ]
    orphans = dict[tuple[str, str], list[UnflushedPart]]()
    for part in parts:
        record = part.record
        if record.commit is None and not named & record.files.keys():
            orphans.setdefault((record.subpath, min(map(save_id_in, record.files), default="")), []).append(part)
    return suspects + [(of_save, set()) for of_save in orphans.values() if not any(part.is_alive for part in of_save)]


def _losses(flushing: Flushing, suspects: Sequence[tuple[list[UnflushedPart], set[str]]]) -> list[_Loss]:
    """Finds the suspects that are not on the remote either. If the remote cannot be read, they do not count as lost."""
    losses = []
    for parts, missing in suspects:
        subpath, commit = parts[0].record.subpath, parts[0].committed
        try:
            remote = flushing.target.open(subpath)
            if commit is not None:
                missing = missing_files(remote, missing, commit)
                reason = f"no node of this job has {min(missing, default='')}: the node that saved it is lost"
                if missing:
                    losses.append(_Loss(subpath, set(commit), reason, is_known=True))
                continue
            files = {name for part in parts for name in part.record.files}
            if files & named_files(remote, metadata_file_name()):
                continue  # the save is on the remote, and only the local record is outdated
            were_there = bool(files) and all(part.is_sent for part in parts)
            was_deleted = were_there and all(remote.head(name) is None for name in files)
        except CheckpointError as error:
            logger.warning("%s/%s cannot be read: %s", flushing.target.name, subpath, str(error))
            continue
        ranks = listed_ranks([part.record.rank for part in parts])
        reason = f"no node of this job has its metadata, only data of rank(s) {ranks}: "
        is_known = any(part.is_confirmed for part in parts) and not was_deleted
        if was_deleted:
            reason += "its files were on the remote, and have been deleted there"
        else:
            reason += f"{'' if is_known else 'the save never finished, or '}the coordinator's node is lost"
        losses.append(_Loss(subpath, files, reason, is_known))
    return losses


def _give_up(flushing: Flushing, entry: FlushEntry, record: FlushRecord, reason: str) -> None:
    """Gives up one rank's part of a lost save, unless a flush has locked its record for too long."""
    deadline = time.monotonic() + _CLAIM_SECONDS
    while time.monotonic() < deadline:
        now = next((e for e, _ in flushing.open_records() if e.stem == entry.stem), None)
        if now is None:  # another rank of this node has given it up
            return
        with flushing.queue.claimed(now) as is_free:
            if is_free:
                flushing.queue.give_up(now, record, reason, REPORTED)
                flushing.queue.drop(now._replace(state=REPORTED), record)
                return
        time.sleep(_POLL_SECONDS)  # a flush is in progress, perhaps of another job


def _clear(flushing: Flushing, loss: _Loss) -> None:
    """Removes the files of a lost save from the remote, including those of lost nodes.

    Finds the latter by the save's id in their names.
    """
    with suppress(CheckpointError, OSError):
        remote = flushing.target.open(loss.subpath)
        ids, found = {save_id_in(name) for name in loss.files}, set[str]()
        with suppress(CheckpointError):
            found = {file.name for file in remote.listing()[0] if is_data_file_name(file.name)}
        discard(remote, *loss.files, *(name for name in found if save_id_in(name) in ids))
        remove_unused(remote)


def _wait(flushing: Flushing, agreement: Agreement) -> None:
    """Waits until each rank has flushed its saves, or its flush has made no progress within the timeout."""
    logger.info(
        "%s: waiting for the flush of saves that an earlier job left in local folders: not every node has all of their "
        "files",
        flushing.target.name,
    )
    timeout, before = flushing.target.progress_timeout(), flushing.open_records()
    while True:
        is_over = flushing.wait(Deadline(_WAIT_SECONDS), until=lambda: not flushing.unflushed())
        now = flushing.open_records()
        if now != before:
            before = now
            timeout.renew()
        is_stuck = timeout.is_over()
        (goes_on,) = agreement.largest(int(not is_over and not is_stuck))
        if not goes_on:
            return
