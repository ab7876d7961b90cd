"""Brings what lies in a local folder to the remote: files first, in the order of the saves, and then their metadata.

It keeps nothing in memory that it could not find out again: whoever goes on after a death begins with the records.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from .._format.index import read_head
from .._format.layout import data_file_rank, metadata_file_name
from .._process_context import environment
from .._storage.base import Storage
from .._storage.claim import read_claim
from .._storage.local import LocalStorage
from .._threads import Patience
from ..errors import CheckpointError, MetadataError, ReadError, describe
from .copying import Unreadable, copy_file, discard
from .keeping import arrive, clean_up, drop
from .publishing import Superseded, missing_files, named_files, publish
from .queue import OPEN, REMOTE, SENT, UNFLUSHED, Commit, Entry, Queue, Record
from .target import Target, below

__all__ = ["Flusher"]

_FIRST_WAIT = 0.2
_LONGEST_WAIT = 10.0  # between two looks at what others have to do, or two tries
_PROGRESS_SECONDS = 5.0


class Flusher:
    """Flushes one local folder.

    Args:
        target: Which one, and where to.
        gate: Called before each part of a file; returns when it may go on.
    """

    def __init__(self, target: Target, gate: Callable[[], None] = lambda: None) -> None:
        self.target = target
        self._gate = gate
        self._queue = Queue(target.folder())
        self._missing: dict[str, set[str]] = {}  # of each commit: the files that have not been seen on the remote
        self._waits: dict[str, Patience] = {}  # for them
        self._failing: dict[str, Patience] = {}  # with what cannot be read here
        self._wait = _FIRST_WAIT
        self._root: Storage | None = None
        self._environment: dict[str, str] = {}  # that the remote was opened in
        self._is_clean = False

    def step(self) -> float | None:
        """Does what can be done now.

        Returns:
            Seconds after which to look again; None if everything is on the remote.
        """
        if not self._is_clean:
            clean_up(self._queue)
            self._is_clean = True
        is_damaged = self._lose_unreadable()
        before = self._open()
        for entry, record in before:
            if entry.state == UNFLUSHED and self._is_turn_of(entry, record):
                self._tried(entry, lambda e=entry, r=record: self._send(e, r))  # type: ignore[misc]
                self._settle()
        self._settle()
        left = self._open()
        if not left and not is_damaged:
            self._root = None
            return None
        is_same = [entry.name for entry, _ in left] == [entry.name for entry, _ in before]
        self._wait = min(_LONGEST_WAIT, 2 * self._wait) if is_same else _FIRST_WAIT
        return self._wait

    def _open(self) -> list[tuple[Entry, Record]]:
        """What has to be brought to the remote, in the order of the saves."""
        return self._queue.records(OPEN, self.target.name)

    def _lose_unreadable(self) -> bool:
        """Gives up what has a record that the disk does not give any more; whether it is to be tried again."""
        is_damaged = False
        for entry in self._queue.entries():
            if entry.state in OPEN and self._queue.record(entry) is None and (damage := self._queue.damage(entry)):
                self._queue.set_trouble(entry, damage)
                if self._is_hopeless(entry):
                    self._queue.give_up(entry, Record(self.target.name, "", entry.rank, entry.id), damage)
                else:
                    is_damaged = True
        return is_damaged

    def _is_turn_of(self, entry: Entry, record: Record) -> bool:
        """Whether a part may be sent: not before what was saved earlier is on the remote.

        It could take the room there that this still needs, and then neither would ever be committed.
        """
        before = [(e, r) for e, r in self._open() if e.number < entry.number]
        return not any(
            (other.place != record.place or other.rank == record.rank) and self._is_awaited(e, other)
            for e, other in before
        )

    def _is_awaited(self, entry: Entry, record: Record) -> bool:
        """Whether a part that is not on the remote is of a checkpoint that will be there, as far as is known here."""
        if record.commit is not None:
            return True
        committed = self._committed_here(record)
        if committed is not None:
            return committed[0].state in OPEN
        # Who commits it is on another node: nobody says here that he has given it up.
        return self._queue.is_confirmed(entry) and time.time() - entry.changed <= self.target.timeout

    def _tried(self, entry: Entry, operation: Callable[[], object]) -> None:
        """Does something with a record, if nobody else does. What fails is noted, and tried again later."""
        with self._queue.claimed(entry) as is_free:
            if not is_free:
                return
            try:
                operation()
            except Exception as error:
                text = describe(error)
                self._queue.set_trouble(entry, text if self._root is None else self._root.scrub(text))
                self._root = None  # the next try has connections and credentials of its own

    # --- files -------------------------------------------------------------------------------------------------

    def _send(self, entry: Entry, record: Record) -> None:
        """Brings a rank's files to the remote."""
        self._gate()
        is_first = self._queue.trouble(entry) is None
        if not is_first and self._ends_with_its_save(entry, record):
            return
        remote, local = self._remote(record.place), LocalStorage(self.target.folder(record.place))
        remote.make_directory()
        files = record.files
        self._queue.set_trouble(entry, "")
        if is_first and self._queue.is_writable:
            missing = set(files)
        else:  # this has been tried before, or the folder does not show it
            missing = missing_files(remote, files, files)
            discard(remote, *missing)
        gone = {name for name in missing if local.head(name) != files[name]}
        if gone and (lost := missing_files(remote, gone, files)):
            self._give_up(entry, record, f"{local.path}/{min(lost)} is gone, or not as long as it was")
            return
        missing -= gone
        lock = remote.lock_directory()
        try:
            lock.share(self.target.timeout)
            gate = self._reporting(entry)
            for name in sorted(missing):
                copy_file(local, remote, name, files[name], gate)
        except Unreadable as error:
            if not self._is_hopeless(entry):
                raise
            self._give_up(entry, record, str(error))
            return
        finally:
            lock.release()
        self._failing.pop(entry.stem, None)
        self._queue.move(entry, SENT)
        self._queue.set_trouble(entry, None)

    def _is_hopeless(self, entry: Entry) -> bool:
        """Whether what lies here could not be read for so long that it will not be read any more.

        From a disk that takes no more changes either, nothing is waited for.
        """
        is_over = self._failing.setdefault(entry.stem, self.target.patience()).is_over()
        return is_over or not self._queue.is_writable

    def _reporting(self, entry: Entry) -> Callable[[], None]:
        """The gate, which notes that there is progress."""
        last = time.monotonic()

        def gate() -> None:
            nonlocal last
            self._gate()
            if time.monotonic() - last > _PROGRESS_SECONDS:
                last = time.monotonic()
                self._queue.progress(entry)

        return gate

    # --- checkpoints -------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Commits what is there as a whole, in the order of the saves, and looks what others have committed."""
        is_next = True
        for entry, record in self._open():
            commit = record.commit
            if commit is not None:
                if is_next and entry.state == SENT:
                    self._tried(entry, lambda e=entry, r=record, c=commit: self._commit(e, r, c))  # type: ignore[misc]
                is_next = is_next and self._queue.state(entry) not in OPEN
            elif entry.state == SENT:
                self._tried(entry, lambda e=entry, r=record: self._look(e, r))  # type: ignore[misc]

    def _commit(self, entry: Entry, record: Record, commit: Commit) -> None:
        """Commits a checkpoint on the remote, if all of its files are there."""
        remote = self._remote(record.place)
        patience = self._waits.pop(entry.stem, None) or self.target.patience()  # a look that fails begins the wait anew
        before = self._missing.get(entry.stem, set(commit.files))
        missing = missing_files(remote, before, commit.files)
        if len(missing) < len(before):
            patience.renew()
            self._queue.progress(entry)
        if not missing and len(before) < len(commit.files):  # some were seen long ago: they may be gone since
            missing = missing_files(remote, commit.files, commit.files)
        self._missing[entry.stem] = missing
        if missing:
            self._waits[entry.stem] = patience
            if patience.is_over():
                ranks = sorted({data_file_rank(name) for name in missing})
                listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
                reason = f"data of rank {listed} has not come for {self.target.timeout:g} s ({min(missing)})"
                self._give_up(entry, record, f"{reason}: its node is lost, or nobody flushes its local folder")
            return
        self._gate()
        try:
            index = self._index(entry)
            if index is not None:
                replaced = publish(remote, index, commit, self._ids_before(entry), self._check_owner)
            elif set(commit.files) <= named_files(remote, commit.name):
                replaced = None
            else:
                raise Superseded(f"{self._queue.folder}/{entry.stem}.index is gone, or damaged")
        except Superseded as error:
            self._give_up(entry, record, str(error))
            return
        if replaced is None:  # somebody died here, after that
            replaced = self._replaced_before(entry, record.place, commit.name) - set(commit.files)
        with suppress(OSError):  # what stays only costs space
            remote.remove(*replaced)
        self._queue.set_trouble(entry, None)
        arrive(self._queue, entry, record, set(commit.files))

    def _check_owner(self) -> None:
        """Looks whether the remote folder is, as far as anybody has claimed it, a run's that saves to this local one.

        Otherwise another run goes on there from something else, and what lies here is not what it has.

        Raises:
            Superseded: it is not.
            ReadError: it cannot be read.
        """
        for name, runs in self._queue.runs().items():
            claim = read_claim(self._remote(""), name)
            if claim is not None and claim.id not in runs:
                raise Superseded(
                    f"{self.target.name} is another run's now, which does not save to {self.target.local}: process "
                    f"{claim.process} on host {claim.host} has claimed it at {claim.claimed_at}"
                )

    def _index(self, entry: Entry) -> bytes | None:
        """The metadata of a checkpoint; None if there is none any more. Raises `ReadError`: perhaps later."""
        try:
            index = self._queue.index(entry)
            read_head(index, f"{entry.stem}.index")
        except ReadError:
            if not self._is_hopeless(entry):
                raise
            return None
        except MetadataError:
            return None
        return index

    def _ids_before(self, entry: Entry) -> set[str]:
        return {other.id for other in self._queue.entries() if other.number < entry.number}

    def _replaced_before(self, entry: Entry, place: str, name: str) -> set[str]:
        """The files of what was flushed before under a name of a metadata file: each replaces only its own."""
        before = [r for e, r in self._queue.records() if e.number < entry.number and r.place == place]
        commits = [r.commit for r in before if r.commit is not None and r.commit.name == name]
        return {name for commit in commits for name in commit.files}

    def _look(self, entry: Entry, record: Record) -> None:
        """Looks whether a rank's files are part of a checkpoint on the remote."""
        committed = self._committed_here(record)
        if committed is None:  # on another node
            later = self._passed_over_by(entry)  # before the metadata is read, which cannot name the files after that
            named = named_files(self._remote(record.place), metadata_file_name())
            if not named & set(record.files):
                if later:
                    # Of another writer's saves nobody here knows the order: its files on the remote may be needed yet.
                    if record.writer and any(other.writer == record.writer for other in later):
                        discard(self._remote(record.place), *record.files)
                    drop(self._queue, entry, record)
                return
        else:
            other, of_other = committed
            if other.state in OPEN or self._ends_with_its_save(entry, record) or of_other.commit is None:
                return
            named = set(of_other.commit.files)
        self._queue.set_trouble(entry, None)
        arrive(self._queue, entry, record, named)

    def _ends_with_its_save(self, entry: Entry, record: Record) -> bool:
        """Gives a rank's part up if the save was given up that it is of, where that is known here; whether it was."""
        committed = None if record.commit is not None else self._committed_here(record)
        if committed is None or committed[0].state in (*OPEN, REMOTE):
            return False
        self._give_up(entry, record, committed[1].reason)
        return True

    def _committed_here(self, record: Record) -> tuple[Entry, Record] | None:
        """The record of the rank that commits, if that is on this node."""
        for entry, other in self._queue.records():
            if other.commit is not None and set(other.commit.files) & set(record.files):
                return entry, other
        return None

    def _passed_over_by(self, entry: Entry) -> list[Record]:
        """The later saves from this folder that the remote has, if a save is not of just now.

        Of any rank: a job that goes on may have fewer.
        """
        if time.time() - entry.changed <= self.target.timeout / 10:
            return []
        arrived = self._queue.records({REMOTE})
        return [r for e, r in arrived if e.number > entry.number]

    def _give_up(self, entry: Entry, record: Record, reason: str) -> None:
        """A save, or a rank's part of it, will never be on the remote: what there is goes, on this node and there."""
        files = record.files if record.commit is None else record.commit.files
        self._queue.give_up(entry, record, reason)
        with suppress(OSError, CheckpointError):
            discard(self._remote(record.place), *files)
        drop(self._queue, entry, record, forget=False)

    def _remote(self, place: str) -> Storage:
        now = environment()
        if self._root is None or now != self._environment:
            self._root, self._environment = self.target.open(), now
        return below(self._root, place)
