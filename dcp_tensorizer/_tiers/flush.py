"""Flushes a local folder to the remote in the order of its saves: for each save, first the files, then the metadata.

The state of each save is in its record in the local folder (see `queue`), so that another process can continue if this
one dies. Repeating a step changes nothing on a remote that already has the files.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from .._index.container import IndexFile, committed, read_head
from .._index.schema import Head
from .._runtime.direct_memory import direct_memory
from .._runtime.forks import free_in_child
from .._runtime.process_context import environment
from .._runtime.threads import ProgressTimeout, in_threads
from .._storage.base import RangeReader, Refused, Sink, Storage, temporary_file_name
from .._storage.lease import read_lease
from .._storage.local import LocalStorage
from .._tensor_file.names import data_file_rank, metadata_file_name
from ..errors import CheckpointError, MetadataError, ReadError, WriteError, describe, listed_ranks
from .queue import (
    OPEN,
    REMOTE,
    SENT,
    UNFLUSHED,
    Commit,
    FlushEntry,
    FlushRecord,
    Queue,
)
from .target import FlushTarget, below

_FIRST_WAIT = 0.2
_LONGEST_WAIT = 10.0  # between two attempts, or two checks for the files of other nodes
_PROGRESS_SECONDS = 5.0


class Flusher:
    """Flusher of one local folder. Before each part of a file and each commit, it calls ``gate``, which may block."""

    def __init__(self, target: FlushTarget, gate: Callable[[], None] = lambda: None) -> None:
        self.target = target
        self._gate = gate
        self._queue = Queue(target.folder())
        self._missing: dict[str, set[str]] = {}  # for each commit, the files that were missing on the remote
        self._waits: dict[str, ProgressTimeout] = {}  # for each commit, the timeout for its missing files
        self._failing: dict[str, ProgressTimeout] = {}  # for each record, the timeout for its unreadable local files
        self._wait = _FIRST_WAIT
        self._root: Storage | None = None
        self._environment: dict[str, str] = {}  # the environment in which the remote was opened
        self._is_clean = False

    def step(self) -> float | None:
        """Does all work that can be done now.

        Returns the seconds until the next attempt. If all saves are on the remote or given up, and the disk has
        recorded that, returns None.
        """
        if not self._is_clean:
            self._queue.clean_up()
            self._is_clean = True
        is_damaged = self._lose_unreadable()
        before = self._open()
        for entry, record in before:
            if entry.state == UNFLUSHED and not self._is_held_back(entry, record):
                self._try(self._send, entry, record)
                self._commit_sent()
        self._commit_sent()
        left = self._open()
        if self._queue.retry() and not left and not is_damaged:
            self._root = None
            return None
        is_same = [entry.name for entry, _ in left] == [entry.name for entry, _ in before]
        self._wait = min(_LONGEST_WAIT, 2 * self._wait) if is_same else _FIRST_WAIT
        return self._wait

    def _open(self) -> list[tuple[FlushEntry, FlushRecord]]:
        return self._queue.records(OPEN, self.target.name)

    def _lose_unreadable(self) -> bool:
        """Gives up saves whose records have been unreadable for too long.

        Returns whether other unreadable records remain to be retried.
        """
        is_damaged = False
        for entry in self._queue.entries():
            if entry.state in OPEN and self._queue.record(entry) is None and (damage := self._queue.damage(entry)):
                self._queue.set_trouble(entry, damage)
                if self._is_hopeless(entry):
                    self._queue.give_up(entry, FlushRecord(self.target.name, "", entry.rank, entry.id), damage)
                else:
                    is_damaged = True
        return is_damaged

    def _is_held_back(self, entry: FlushEntry, record: FlushRecord) -> bool:
        """Returns whether a part must not be sent yet, because an earlier save is not on the remote yet.

        A part that is sent too early could take the space that earlier saves need. Then no save could be committed.
        """
        for other, earlier in self._open():
            if other.number >= entry.number or (earlier.subpath == record.subpath and earlier.rank != record.rank):
                continue
            committed = (other, earlier) if earlier.commit is not None else self._committed_here(earlier)
            if committed is not None:
                is_expected = committed[0].state in OPEN
            else:  # the coordinator is on another node: this node does not learn whether that node gives up the save
                is_recent = time.time() - other.changed <= self.target.timeout
                is_expected = is_recent and self._queue.is_confirmed(other)
            if is_expected:
                return True
        return False

    def _try(self, operation: Callable[..., object], entry: FlushEntry, *details: object) -> None:
        """Runs an operation on a record unless another process has locked or moved it. Records failures for a retry."""
        with self._queue.claimed(entry) as is_free:
            if not is_free:
                return
            try:
                operation(entry, *details)
            except Exception as error:
                text = describe(error)
                self._queue.set_trouble(entry, text if self._root is None else self._root.scrub(text))
                self._root = None  # so that the next attempt uses new connections and credentials

    # --- files -------------------------------------------------------------------------------------------------

    def _send(self, entry: FlushEntry, record: FlushRecord) -> None:
        self._gate()
        if self._ends_with_its_save(entry, record):
            return
        remote, local = self._remote(record.subpath), LocalStorage(self.target.folder(record.subpath))
        remote.make_directory()
        files = record.files
        is_first = self._queue.trouble(entry) is None
        if self._queue.set_trouble(entry, "") and is_first:
            missing = set(files)
        else:  # an earlier attempt has not succeeded, or the disk has refused the record of this one
            missing = missing_files(remote, files, files)
            discard(remote, *missing)
        gone = {name for name in missing if local.head(name) != files[name]}
        if gone and (lost := missing_files(remote, gone, files)):
            self._give_up(entry, record, f"{local.path}/{min(lost)} is missing, or does not have the recorded size")
            return
        missing -= gone
        try:
            with remote.lock_directory() as lock:
                lock.share(self.target.timeout)
                gate = self._reporting(entry)
                for name in sorted(missing):
                    copy_file(local, remote, name, files[name], gate)
        except Unreadable as error:
            if not self._is_hopeless(entry):
                raise
            self._give_up(entry, record, str(error))
            return
        self._failing.pop(entry.stem, None)
        self._queue.move(entry, SENT)
        self._queue.set_trouble(entry, None)

    def _is_hopeless(self, entry: FlushEntry) -> bool:
        """Returns whether the timeout for unreadable local files is over, so that their save is given up.

        The first call for a record starts the timeout.
        """
        return self._failing.setdefault(entry.stem, self.target.progress_timeout()).is_over()

    def _reporting(self, entry: FlushEntry) -> Callable[[], None]:
        last = time.monotonic()

        def gate() -> None:
            nonlocal last
            self._gate()
            if time.monotonic() - last > _PROGRESS_SECONDS:
                last = time.monotonic()
                self._queue.progress(entry)

        return gate

    # --- checkpoints -------------------------------------------------------------------------------------------

    def _commit_sent(self) -> None:
        """Commits complete saves, in order, and checks what other nodes have committed."""
        is_next = True
        for entry, record in self._open():
            commit = record.commit
            if commit is not None:
                if is_next and entry.state == SENT:
                    self._try(self._commit, entry, record, commit)
                is_next = is_next and self._queue.state(entry) not in OPEN
            elif entry.state == SENT:
                self._try(self._check_arrival, entry, record)

    def _commit(self, entry: FlushEntry, record: FlushRecord, commit: Commit) -> None:
        remote = self._remote(record.subpath)
        # If a check below raises, the next attempt starts with a new timeout.
        timeout = self._waits.pop(entry.stem, None) or self.target.progress_timeout()
        before = self._missing.get(entry.stem, set(commit.files))
        missing = missing_files(remote, before, commit.files)
        if len(missing) < len(before):
            timeout.renew()
            self._queue.progress(entry)
        if not missing and len(before) < len(commit.files):  # files that were found long ago may be missing now
            missing = missing_files(remote, commit.files, commit.files)
        self._missing[entry.stem] = missing
        if missing:
            self._waits[entry.stem] = timeout
            if timeout.is_over():
                ranks = sorted({data_file_rank(name) for name in missing})
                seconds = f"{self.target.timeout:g} s"
                reason = (
                    f"data of rank(s) {listed_ranks(ranks)} ({min(missing)}) is missing on the remote, and nothing has "
                    f"arrived there for {seconds}"
                )
                self._give_up(entry, record, f"{reason}: a node is lost, or no job flushes its local folder")
            return
        self._gate()
        try:
            index = self._index(entry)
            if index is not None:
                known = {other.id for other in self._queue.entries() if other.number < entry.number}
                replaced = publish(remote, index, commit, known, self._check_owner)
            elif set(commit.files) <= named_files(remote, commit.name):
                replaced = None
            else:
                raise Superseded(f"{self._queue.folder}/{entry.stem}.index is missing or damaged")
        except Superseded as error:
            self._give_up(entry, record, str(error))
            return
        if replaced is None:  # another process committed the save, and died before it recorded that
            # The files of earlier saves from this folder whose metadata had the same path.
            earlier = [r for e, r in self._queue.records() if e.number < entry.number and r.subpath == record.subpath]
            commits = [r.commit for r in earlier if r.commit is not None and r.commit.name == commit.name]
            replaced = {name for other in commits for name in other.files} - set(commit.files)
        with suppress(OSError):  # files that cannot be removed only take space
            remote.remove(*replaced)
        self._queue.set_trouble(entry, None)
        arrive(self._queue, entry, record, set(commit.files))

    def _check_owner(self) -> None:
        """Checks that no other run has taken the lease of the remote folder.

        Raises `Superseded` if a run that does not save to this local folder has the lease, and `Refused`, `ReadError`
        or `OSError` if that is unknown.
        """
        for name, runs in self._queue.runs().items():
            lease = read_lease(self._remote(""), name)
            if lease is None or lease.id in runs:
                continue
            who = f"process {lease.process} on host {lease.host} took the lease at {lease.claimed_at}"
            if not self._queue.is_writable:
                raise Refused(
                    f"{self.target.name} now belongs to another run, and {self._queue.folder} cannot be written to, so "
                    f"it is unknown whether that run saves to {self.target.local}: {who}"
                )
            raise Superseded(
                f"{self.target.name} now belongs to another run, which does not save to {self.target.local}: {who}"
            )

    def _index(self, entry: FlushEntry) -> bytes | None:
        """Reads the metadata of a checkpoint. If it is lost or damaged, returns None.

        Raises `ReadError` if a retry may help.
        """
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

    def _check_arrival(self, entry: FlushEntry, record: FlushRecord) -> None:
        committed = self._committed_here(record)
        if committed is None:  # the coordinator is on another node
            # Find later saves before reading the metadata. Saves are committed in order: if a later save is already on
            # the remote, and metadata that is read afterwards does not name these files, no metadata ever will.
            # The later save may belong to any rank, because a job may resume with fewer ranks. A part that was sent
            # very recently is left for a later check.
            is_recent = time.time() - entry.changed <= self.target.timeout / 10
            later = [r for e, r in self._queue.records({REMOTE}) if e.number > entry.number and not is_recent]
            named = named_files(self._remote(record.subpath), metadata_file_name())
            if not named & set(record.files):
                if later:
                    # Only the saves of one writer are ordered. The files of other writers may still be needed.
                    if record.writer and any(other.writer == record.writer for other in later):
                        discard(self._remote(record.subpath), *record.files)
                    self._queue.drop(entry, record)
                return
        else:
            other, of_other = committed
            if other.state in OPEN or self._ends_with_its_save(entry, record) or of_other.commit is None:
                return
            named = set(of_other.commit.files)
        self._queue.set_trouble(entry, None)
        arrive(self._queue, entry, record, named)

    def _ends_with_its_save(self, entry: FlushEntry, record: FlushRecord) -> bool:
        """If the save was given up, gives up this rank's part; returns whether the save was given up."""
        committed = None if record.commit is not None else self._committed_here(record)
        if committed is None or committed[0].state in (*OPEN, REMOTE):
            return False
        self._give_up(entry, record, committed[1].reason)
        return True

    def _committed_here(self, record: FlushRecord) -> tuple[FlushEntry, FlushRecord] | None:
        for entry, other in self._queue.records():
            if other.commit is not None and set(other.commit.files) & set(record.files):
                return entry, other
        return None

    def _give_up(self, entry: FlushEntry, record: FlushRecord, reason: str) -> None:
        files = record.files if record.commit is None else record.commit.files
        self._queue.give_up(entry, record, reason)
        with suppress(OSError, CheckpointError):
            discard(self._remote(record.subpath), *files)
        self._queue.drop(entry, record, forget=False)

    def _remote(self, subpath: str) -> Storage:
        now = environment()
        if self._root is None or now != self._environment:
            self._root, self._environment = self.target.open(), now
        return below(self._root, subpath)


# --- copying a file to the remote -------------------------------------------------------------------------------------

_AT_ONCE = 4  # parts in flight; more would take memory from training, which does not wait for the flush


class Unreadable(WriteError):
    """Failure to read the local copy, as opposed to a failure of the remote."""


def copy_file(source: Storage, target: Storage, name: str, nbytes: int, gate: Callable[[], None]) -> None:
    """Copies a file of ``nbytes`` bytes durably.

    The size of the file must prove that it is complete. So the file has a temporary name until then, if the storage can
    rename files. Otherwise the parts are written in order, unless the storage shows only complete files. ``gate`` is
    called before each part, and may block or raise.

    Raises `Unreadable` if the local file cannot be read, and `CheckpointError` or `OSError` if the copy fails. After an
    error, call `discard`: parts of the copy may be left.
    """
    begun = _begun_name(name) if target.renames else name
    try:
        reader = source.open_uncached(name)
    except OSError as error:
        raise Unreadable(f"cannot open {source.path}/{name}: {error}") from error
    try:
        sink = target.create(begun, nbytes, sync=True)
        try:
            at_once = _AT_ONCE if target.renames or target.uploads_are_hidden else 1
            _copy_parts(reader, f"{source.path}/{name}", sink, nbytes, gate, at_once)
            sink.complete()
        except BaseException:
            sink.abort()
            raise
    finally:
        reader.close()
    if target.renames:
        target.rename(begun, name)


def discard(target: Storage, *names: str) -> None:
    """Removes files that a flush has copied, completely or in part; raises `OSError`."""
    begun = [_begun_name(name) for name in names] if target.renames else []
    target.discard(*names, *begun)


def _begun_name(name: str) -> str:
    return temporary_file_name(name, "flush")


def _copy_parts(
    reader: RangeReader, path: str, sink: Sink, nbytes: int, gate: Callable[[], None], at_once: int
) -> None:
    starts = list(range(0, nbytes, sink.part_bytes))
    threads = 1 if sink.in_order else min(at_once, sink.concurrency, len(starts))
    numbers = iter(enumerate(starts))
    stopped = False

    def work() -> None:
        nonlocal stopped
        memory = direct_memory(min(sink.part_bytes, nbytes))
        try:
            for number, start in iter(lambda: next(numbers, None), None):
                gate()
                if stopped:
                    return
                part = memory[: min(sink.part_bytes, nbytes - start)]
                try:
                    reader.read_into([part], start)
                except (OSError, EOFError) as error:  # an error of the local disk, not of the remote
                    raise Unreadable(f"cannot read {path}: {error}") from error
                sink.put_part(number, part)
        except BaseException:
            stopped = True
            raise

    if threads == 1:
        work()
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="flush") as pool:
        for done in [pool.submit(work) for _ in itertools.repeat(None, threads)]:
            done.result()


# --- removing local copies, except of the newest checkpoint -----------------------------------------------------------


def arrive(queue: Queue, entry: FlushEntry, record: FlushRecord, named: set[str]) -> None:
    """Records that a checkpoint is on the remote.

    Before that, removes the local copies of all checkpoints that are on the remote, except the newest. In this order, a
    process that waits for the record to change never finds an incomplete copy. ``named`` are the data files of the
    checkpoint on the remote.
    """
    done = queue.records({REMOTE})
    _, kept = max([(entry.number, record.subpath), *((e.number, r.subpath) for e, r in done)])
    for other, of_other in done:
        files = of_other.files if of_other.commit is None else of_other.commit.files
        is_before = other.number < entry.number and _metadata_of(of_other) == _metadata_of(record)
        is_replaced = is_before and not named & set(files)
        if of_other.subpath != kept or is_replaced:
            queue.drop(other, of_other, forget=other.is_old)
    if record.subpath != kept:
        queue.drop(entry, record, forget=False)
    queue.move(entry, REMOTE)


def _metadata_of(record: FlushRecord) -> tuple[str, str]:
    """Returns the folder and the name of a save's metadata. A save replaces an earlier one if both are equal."""
    return record.subpath, metadata_file_name() if record.commit is None else record.commit.name


# --- the commit on the remote -----------------------------------------------------------------------------------------


class Superseded(WriteError):
    """A checkpoint will never be on the remote: its metadata is lost, or another checkpoint or run takes precedence."""


def missing_files(remote: Storage, names: Iterable[str], sizes: Mapping[str, int]) -> set[str]:
    """Returns the files that are missing, or whose sizes differ from ``sizes``; raises `ReadError`."""
    names = sorted(names)
    found = in_threads(remote.head, names)
    return {name for name, nbytes in zip(names, found, strict=True) if nbytes != sizes[name]}


def named_files(remote: Storage, name: str) -> set[str]:
    """Returns the data files that a metadata file of this package names; raises `ReadError`.

    If the metadata file does not exist, is damaged, or was written by another package, returns an empty set.
    """
    there = _committed(remote, name)
    return set() if there is None else set(there.files)


def publish(
    remote: Storage,
    index: bytes,
    commit: Commit,
    earlier: Container[str],
    check: Callable[[], object] = lambda: None,
) -> set[str] | None:
    """Commits a save on the remote. All of its files must be there.

    Idempotent: call it again after a lost response or the death of a process.

    Args:
        earlier: Ids of saves that are known to be earlier, whatever their times.
        check: Called just before the metadata is put; raises if it must not be put. Metadata that another run puts
            after the check is not replaced, if the storage can detect it (`Storage.put_if`).

    Returns:
        The files of the replaced checkpoint, or None if the save was committed before.

    Raises:
        Superseded: the remote has a checkpoint that was saved later, or that must not be replaced.
        CheckpointError: the metadata cannot be put now (for example, the disk is full), or the outcome is unknown.
    """
    own = read_head(index, commit.name)
    before = remote.read(commit.name)
    try:
        there = None if before is None else IndexFile(commit.name, read_head(before, commit.name), before)
    except MetadataError:  # it is damaged, or another package wrote it: it belongs to no later save
        there = None
    if there is not None and there.head.save_id == own.save_id:
        return None
    if there is not None and _is_later(there.head, own, earlier):
        raise Superseded(f"{remote.path} already holds a later checkpoint of another job, which is not replaced")
    replaced = set() if there is None else set(there.files) - set(commit.files)
    check()
    try:
        if not commit.overwrite:
            remote.put(commit.name, index, sync=True, replace=False, save_id=str(own.save_id or ""))
        elif not remote.put_if(commit.name, before, index, save_id=str(own.save_id or "")):
            raise Refused(f"{remote.path}: another run has just saved there")  # the next attempt examines that save
    except Refused as error:  # may also be a full disk, which is no reason to give up the save
        there = _committed(remote, commit.name)
        if there is not None and there.head.save_id == own.save_id:  # an earlier attempt has taken effect
            return None
        if not commit.overwrite and remote.head(commit.name) is not None:
            raise Superseded(str(error)) from error
        raise
    return replaced


def is_superseded(remote: Storage, index: bytes, name: str) -> bool:
    """Returns whether the remote has metadata of this name that was saved later than ``index``.

    If the remote cannot be read, returns False. Raises `MetadataError` if ``index`` is damaged.
    """
    own = read_head(index, name)
    with suppress(ReadError):
        there = _committed(remote, name)
        return there is not None and _is_later(there.head, own, ())
    return False


def _is_later(there: Head, own: Head, earlier: Container[str]) -> bool:
    """Returns whether the checkpoint on the remote is later than the save to commit.

    Compares their branches and serials, and if these do not decide, their times. ``earlier`` as in `publish`.
    """
    branch, own_branch = (() if head.record is None else head.record.branch for head in (there, own))
    has_left = bool(branch) and branch[-1][0] in {
        name for name, _ in own_branch[:-1]
    }  # the job left the branch of the other save before this save
    if there.save_id in earlier or has_left:
        return False
    serial, own_serial = (0 if head.record is None else head.record.serial for head in (there, own))
    if serial and own_serial and serial != own_serial:
        return serial > own_serial
    return there.saved_at > own.saved_at


def _committed(remote: Storage, name: str) -> IndexFile | None:
    """Reads an index as `committed` does, but returns None if it is damaged, or another package wrote it."""
    try:
        return committed(remote, name)
    except MetadataError:
        return None


# --- the thread that flushes while the writer process has no save -----------------------------------------------------
#
# The thread has the priority of its process. With a lower one, it could wait long for a busy core, and meanwhile hold
# the GIL, which a new save needs.

_BUSY_SECONDS = 0.05
_TROUBLE_SECONDS = 10.0


class FlushThread:
    """Thread that flushes local folders, one after the other. When nothing is left to flush, it waits for `add`.

    ``is_busy`` returns whether a save is in progress. The thread pauses during saves.
    """

    def __init__(self, is_busy: Callable[[], bool] = lambda: False) -> None:
        self._is_busy = is_busy
        self._changed = free_in_child(threading.Condition())
        self._requests = 0
        self._flushers: dict[tuple[str, str], Flusher] = {}
        self._thread: threading.Thread | None = None

    def add(self, target: FlushTarget) -> None:
        """Adds a folder to flush, or replaces the options of a known one."""
        with self._changed:
            self._requests += 1
            flusher = self._flushers.get((target.local, target.name))
            if flusher is None or flusher.target != target:
                self._flushers[target.local, target.name] = Flusher(target, self._gate)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="flush", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                requests, flushers = self._requests, dict(self._flushers)
            waits: dict[tuple[str, str], float | None] = {}
            for key, flusher in flushers.items():
                try:
                    waits[key] = flusher.step()
                except Exception:  # the local folder may be readable later
                    waits[key] = _TROUBLE_SECONDS
            with self._changed:
                if self._requests == requests:  # otherwise `add` was called in the meantime
                    self._flushers = {key: flusher for key, flusher in flushers.items() if waits[key] is not None}
                    self._changed.wait(min((wait for wait in waits.values() if wait is not None), default=None))

    def _gate(self) -> None:
        while self._is_busy():
            time.sleep(_BUSY_SECONDS)
