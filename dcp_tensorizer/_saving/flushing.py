"""The trainer's view of the flush of a local folder: reports saves that have arrived, and waits for the others.

The writer process flushes. This module reads the state of each save from the folder's records, which outlive any
process.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from torch.distributed.checkpoint.metadata import StorageMeta

from .._runtime.forks import free_in_child
from .._runtime.process_context import ProcessContext, environment
from .._runtime.threads import NEVER, Deadline, ProgressTimeout, in_background
from .._storage.urls import one_spelling
from .._tiers.queue import LOST, OPEN, REMOTE, REPORTED, UNFLUSHED, FlushEntry, FlushRecord, Queue
from .._tiers.target import FlushTarget
from ..errors import ReadError, WriteError, listed
from .report import SaveReport
from .writer_client import WriterClient

logger = logging.getLogger("dcp_tensorizer")

_POLL_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class _Followed:
    queue: Queue
    entry: FlushEntry
    report: SaveReport
    on_arrival: Callable[[SaveReport, float], object]
    future: Future[float]


_following: weakref.WeakValueDictionary[str, _Followed] = weakref.WeakValueDictionary()
"""The saves of this process that `Flushing.follow` follows, by their ids. `_received` confirms and removes them."""


class CommittedMeta(StorageMeta):
    """The ``StorageMeta`` of a committed save, which informs the other ranks of the commit.

    DCP has no hook for that. But after the commit DCP sends the metadata to all ranks: unpickling this object on a rank
    records the commit there (`Queue.confirm`), and returns an ordinary ``StorageMeta``. Until the remote has the
    confirmed save, or the timeout is over, the rank sends no later save. The loss of a confirmed save is an error.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.checkpoint_id, self.save_id, self.load_id, self.modules)


def _received(*fields: Any) -> StorageMeta:
    meta = StorageMeta(*fields)
    followed = None if meta.save_id is None else _following.pop(meta.save_id, None)
    if followed is not None:
        followed.queue.confirm(followed.entry)
    return meta


class Flushing:
    """The flush of one local folder, shared by the writers of an engine that save there with equal options.

    Attributes:
        target: The local folder, and the folder on the remote that it mirrors.
        queue: The records of the folder.
        unknown: Why the states of the open records are unknown, as of the last `open_records`; empty if they are known.
    """

    def __init__(self, client: WriterClient, target: FlushTarget) -> None:
        self.target = target
        self.queue = Queue(target.folder())
        self._client = client
        self._followed: dict[str, _Followed] = {}
        self._futures: dict[str, Future[float]] = {}
        self._given_up: list[str] = []
        self._trouble = ("", "")  # the record and the text of the last warning
        self._environment: dict[str, str] = {}  # of the last request to flush
        # reentrant, because on_report and signal handlers may wait for the remote
        self._lock = free_in_child(threading.RLock())
        self._is_watching = False
        self._has_ended = False
        self._has_named_others = False
        self.unknown = ""
        self._unwritable = (
            f"{self.queue.folder} cannot be written to, so it is unknown which of its checkpoints {target.name} has"
        )

    def resume(self) -> None:
        """Requests that the writer process flush all unflushed saves in the folder, including those of dead jobs.

        A background thread then reports each save that arrives or is given up.
        """
        self._has_ended = False
        states = set[str]()
        with suppress(ReadError):  # `open_records` logs it
            states = {entry.state for entry in self.queue.entries()}
            if states & OPEN and not self._has_named_others:
                self._has_named_others = True
                self._name_others()
        if states & OPEN:
            self._request()
        if states & {*OPEN, LOST} or self._followed:
            with self._lock:
                if not self._is_watching:
                    self._is_watching = True
                    in_background(self._run, name="flush-watch", daemon=True)

    def _name_others(self) -> None:
        """Logs a warning that names the checkpoints that dead jobs left in the folder for other remotes."""
        others: dict[str, set[str]] = {}
        for _, record in self.queue.records(OPEN):
            if one_spelling(record.remote) != self.target.name and not self.queue.is_alive(record.writer):
                others.setdefault(record.remote, set()).add(record.subpath or ".")
        for remote, subpaths in others.items():
            logger.warning(
                "%s holds checkpoints that have not reached %s: %s. This run saves to %s, so it neither loads nor "
                "flushes them. To flush them, start a job that saves to %s with the same local folder.",
                *(self.target.local, remote, listed(sorted(subpaths)), self.target.name, remote),
            )

    def follow(self, entry: FlushEntry, report: SaveReport, on_arrival: Callable[[SaveReport, float], object]) -> None:
        """Calls ``on_arrival`` when the remote has a save of this rank, with the report and the time of arrival.

        The time of arrival is a value of ``time.time()``. ``entry`` is the record of the rank's part.
        """
        future: Future[float] = Future()
        followed = _following[report.save_id] = _Followed(self.queue, entry, report, on_arrival, future)
        self._followed[entry.stem] = followed
        waited_for = {save_id: other for save_id, other in self._futures.items() if not other.done()}
        self._futures = waited_for | {report.save_id: future}

    def report_lost(self, words: str) -> None:
        """Logs ``words``, which describe the loss of a checkpoint. The next call to `check` raises them as an error."""
        logger.error("%s", words)
        self._given_up.append(words)

    def future(self, save_id: str) -> Future[float] | None:
        """Returns a future of the time when a save arrives on the remote.

        The future fails if the save is given up or can no longer be followed. Returns None if the flush has no part of
        this rank to send, or if the future was done before `follow` was called for a later save.
        """
        return self._futures.get(save_id)

    def open_records(self) -> list[tuple[FlushEntry, FlushRecord]]:
        """Returns the records of saves that the remote does not have yet.

        If the disk cannot be written to, only the writer process knows the states of the saves. If the disk cannot be
        read, returns an empty list: if a single rank raised an error here, the other ranks would wait for this rank. In
        both cases sets `unknown`, and logs it once.
        """
        before, found = self.unknown, list[tuple[FlushEntry, FlushRecord]]()
        try:
            found = self.queue.records(OPEN, self.target.name)
            self.unknown = "" if not found or self.queue.is_writable else self._unwritable
        except ReadError as error:
            self.unknown = str(error)
        if self.unknown and not before:
            logger.error("%s. Until that changes, this rank does not wait for the flush", self.unknown)
        return found

    def unflushed(self) -> int:
        """Returns the number of checkpoints that are in the local folder and not on the remote; 0 if that is unknown.

        A rank that does not commit counts checkpoints whose files it has not sent yet: the committing rank waits for
        these files.
        """
        counts: Counter[int] = Counter()
        for entry, record in self.open_records():
            counts[entry.rank] += entry.state == UNFLUSHED or record.commit is not None
        return 0 if self.unknown else max(counts.values(), default=0)

    def wait(
        self,
        deadline: Deadline = NEVER,
        *,
        until: Callable[[], bool] | None = None,
        progress: Callable[[], object] = lambda: None,
        timeout: ProgressTimeout | None = None,
        every: float = _POLL_SECONDS / 4,
    ) -> bool:
        """Waits until the remote has everything, or until ``until`` returns true.

        Gives up, and returns False, at the deadline, or when nothing has made progress for too long.

        Args:
            deadline: When to give up in any case.
            until: The condition to wait for, instead of waiting until the remote has everything.
            progress: Returns a value that changes while anything besides the flush makes progress.
            timeout: The timeout without progress; by default the target's.
            every: Seconds between two checks.

        Raises:
            ReadError: without ``until``, the folder cannot be read, or cannot be written to, so it is unknown whether
                the remote has everything.
        """
        before: object = None
        timeout = timeout or self.target.progress_timeout()
        while True:
            left = self.open_records()
            if until is None and self.unknown:
                raise ReadError(f"{self.unknown}. Fix the disk, or check the remote.")
            if until() if until is not None else not left:
                break
            now = left, progress()
            if now != before:
                before = now
                timeout.renew()
            if deadline.left == 0 or timeout.is_over():
                return False
            time.sleep(deadline.within(every))
        self._check_folder()  # reports arrived saves before the caller continues
        return True

    def check(self) -> None:
        """Raises `WriteError` if the flush has given up a checkpoint since the last call."""
        given_up, self._given_up = self._given_up, []
        if given_up:
            raise WriteError(given_up[0] + (f" (and {len(given_up) - 1} more)" if len(given_up) > 1 else ""))

    def end(self, deadline: Deadline) -> None:
        """Waits until this node's part of the flush is done. On timeout, logs the number of checkpoints left."""
        if count := self.unflushed():
            logger.info("%s: waiting for the flush of %d checkpoint(s)", self.target.name, count)
        if not self.wait(deadline, until=lambda: not self.unflushed()):
            logger.error(
                "checkpoints in %s that have not reached %s: %d. Start a job with the same local folder to flush them.",
                *(self.target.local, self.target.name, self.unflushed()),
            )

    def stop(self) -> None:
        """Prevents the writer process from being restarted only for the flush."""
        self._has_ended = True
        if self._lock.acquire(timeout=1.0):  # waits for a thread that is just starting the process
            self._lock.release()

    def _request(self) -> None:
        context = ProcessContext.here()
        self._environment = dict(context.environment)
        try:
            process = self._client.ensure_process()
            # On another thread, which continues while a signal handler interrupts the caller: if the handler closes the
            # writer, `close` waits for this request.
            ask = functools.partial(process.ask, self.target, None, self.target.timeout, context)
            in_background(ask, daemon=True).result()
        except WriteError as error:
            logger.warning("%s: cannot resume the flush: %s", self.target.name, str(error))

    def _run(self) -> None:
        while True:
            time.sleep(_POLL_SECONDS)
            # The folder may be unreadable for a while, or a callback may raise, even SystemExit.
            with suppress(BaseException), self._lock:
                if not self._check_folder():
                    self._is_watching = False
                    return
                if not self._has_ended:
                    # If the environment, such as a key in it, has changed, request a failing flush again.
                    is_outdated = environment() != self._environment and any(
                        self.queue.trouble(entry) for entry in self.queue.entries() if entry.state in OPEN
                    )
                    if not self._client.is_running or is_outdated:
                        self._request()

    def _check_folder(self) -> bool:
        """Reports saves that have arrived, were given up or can no longer be followed, and warns of failing flushes.

        Returns whether any saves may be left that must be followed or flushed.
        """
        if not self._lock.acquire(timeout=1.0):
            return True
        try:
            entries = {entry.stem: entry for entry in self.queue.entries()}
            is_unknown = bool(self._followed) and not self.queue.is_writable
            for stem, followed in list(self._followed.items()):
                entry = entries.get(stem)
                is_over = entry is None or entry.state == REMOTE or (is_unknown and entry.state in OPEN)
                if not is_over or self._followed.pop(stem, None) is None:
                    continue
                if entry is None:
                    self._report_missing(
                        followed,
                        f"its record in {self.queue.folder} was removed: the save was given up, or a newer save has "
                        f"replaced it",
                    )
                elif entry.state == REMOTE:
                    try:
                        followed.on_arrival(followed.report, entry.changed)
                    finally:
                        followed.future.set_result(entry.changed)
                else:
                    self._report_missing(followed, self._unwritable)
            for entry in entries.values():
                if entry.state in (LOST, REPORTED):
                    self._report_given_up(entry)
                elif entry.state in OPEN:
                    trouble = entry.stem, self.queue.trouble(entry) or ""
                    if trouble[1] and trouble != self._trouble:
                        self._trouble = trouble
                        logger.warning("%s: a flush has failed, retrying: %s", self.target.name, trouble[1])
            return bool(self._followed) or any(entry.state in OPEN for entry in entries.values())
        except Exception:  # the folder may be unreadable for a while, or a callback has raised
            return True
        finally:
            self._lock.release()

    def _report_missing(self, followed: _Followed, reason: str) -> None:
        """Reports a save that this process can no longer follow to the remote.

        Only a rank that commits counts the save as given up: on another rank, the save may have been replaced or
        deleted in the meantime.
        """
        report = followed.report
        words = f"rank {report.rank} cannot confirm that {report.path} is on the remote: {reason}"
        commits = report.commit_seconds is not None
        logger.log(logging.ERROR if commits else logging.WARNING, "%s", words)
        if commits:
            self._given_up.append(words)
        followed.future.set_exception(WriteError(words))

    def _report_given_up(self, entry: FlushEntry) -> None:
        record, followed = self.queue.record(entry), self._followed.pop(entry.stem, None)
        if record is None:
            checkpoint = f"a checkpoint of {self.target.name}"
            reason = f"its record {entry.stem} in {self.queue.folder} was removed or cannot be read"
        else:
            checkpoint, reason = f"{self.target.name}/{record.subpath}", record.reason
        words = f"rank {entry.rank}'s part of {checkpoint} is given up, and will not be on the remote: {reason}"
        if followed is not None:
            self._given_up.append(words)
            followed.future.set_exception(WriteError(words))
        if entry.state == LOST:
            with suppress(OSError):
                self.queue.move(entry, REPORTED)  # so that only one process reports it
                logger.error("%s", words)
                if followed is None:
                    self._given_up.append(words)
