"""The cost of a save, for logs and for users' own metrics, and a warning if saved states do not change."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .._index.schema import ItemKey
from .._runtime.progress import TransferProgress, call
from .._runtime.spans import Span, clock_offset
from .._runtime.validation import check_callable
from .._tensor_file.dtypes import named_dtype
from .._tensor_file.names import StoredItem

if TYPE_CHECKING:
    from .._writer_process.protocol import WriteDone

logger = logging.getLogger("dcp_tensorizer")

_SHOWN_SECONDS = 0.001
_FAILED = "on_report failed; the save did not"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """Report of one save on one rank. Durations are wall-clock seconds; those of the writer process overlap each other.

    Attributes:
        path: The checkpoint's path, without credentials.
        save_id: Identifies the save; part of the names of its files.
        rank: The rank that reports.
        nbytes: Bytes of this rank's tensors and objects, written or reused.
        reused_nbytes: The part of ``nbytes`` that was in files of an earlier save, and was not written again
            (``reuse_unchanged``).
        files: Number of data files that this rank wrote or reused.
        attempts: 1, or 2 if the writer process died and everything was written again.
        started_at: When staging, or a save without staging, began (``time.time()``).
        seconds: Time from ``started_at`` to ``durable_at``.
        wait_seconds: Time in `stage` before ``started_at``, until the previous save was over and the writer process had
            been started.
        stage_seconds: Time in `stage` for the copy, including any wait because of ``max_unflushed``; 0 for a
            synchronous save.
        plan_seconds: Time in DCP's planning and its collectives.
        resolve_seconds: Time in this process from the finished plan to the request to the writer process, and from its
            response to the results for DCP.
        hash_seconds: Time in the process that writes, until all hashes were known; writes overlap this time.
        write_seconds: Time in write calls and fsync, which overlaps ``hash_seconds``.
        commit_seconds: Time to commit the save; None on ranks that do not commit.
        durable_at: When this rank's data, and on the coordinator the checkpoint, was durable (``time.time()``).
        remote_durable_at: With ``local``, when the whole checkpoint had arrived at the path; None before that, and
            without ``local``.
        spans: The steps as spans of time, including those of the writer process and of each file; the whole save comes
            first. `TraceFile` writes them to a file.
        clock_offset: Seconds to add to the times of ``spans`` to get those of ``time.time()``.
    """

    path: str
    save_id: str
    rank: int
    nbytes: int
    reused_nbytes: int
    files: int
    attempts: int
    started_at: float
    seconds: float
    stage_seconds: float
    plan_seconds: float
    resolve_seconds: float
    hash_seconds: float
    write_seconds: float
    commit_seconds: float | None
    durable_at: float
    remote_durable_at: float | None = None
    wait_seconds: float = 0.0
    spans: tuple[Span, ...] = field(default=(), repr=False)
    clock_offset: float = 0.0

    @property
    def stall_seconds(self) -> float:
        """Seconds that training waited in `stage`: ``wait_seconds`` and ``stage_seconds`` together."""
        return self.wait_seconds + self.stage_seconds

    @property
    def gigabytes_per_second(self) -> float:
        """`nbytes` divided by `seconds`, in units of 10^9 bytes per second."""
        return self.nbytes / 1e9 / self.seconds if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        waited = f"wait {self.wait_seconds:.3f}, " if self.wait_seconds >= _SHOWN_SECONDS else ""
        commit = "" if self.commit_seconds is None else f", commit {self.commit_seconds:.3f}"
        retried = "" if self.attempts == 1 else f", {self.attempts} attempts"
        reused = f", {self.reused_nbytes / 1e6:,.1f} MB of it reused" if self.reused_nbytes else ""
        return (
            f"{self.path}: rank {self.rank} wrote {self.nbytes / 1e6:,.1f} MB in {self.files} file(s){reused}{retried} "
            f"(seconds: {waited}stage {self.stage_seconds:.3f}, plan {self.plan_seconds:.3f}, resolve "
            f"{self.resolve_seconds:.3f}, hash {self.hash_seconds:.3f}, write {self.write_seconds:.3f}{commit})"
        )


def report_of(spans: Sequence[Span], done: WriteDone, *, path: str, save_id: str, rank: int) -> SaveReport:
    """Returns the report of a save, or of a rank's part in it, whose last span has just ended.

    ``spans`` are the spans of staging (none without staging), "plan", "write", the spans of ``done`` and, on a rank
    that commits, "agree" and "commit".
    """
    of = {span.name: span for span in spans}
    write, offset = of["write"], clock_offset()
    began, ended = of.get("stage", of["plan"]).began, of.get("commit", write).ended
    started_at, durable_at = began + offset, ended + offset
    return SaveReport(
        path=path,
        save_id=save_id,
        rank=rank,
        nbytes=write.nbytes,
        reused_nbytes=sum(item.length for file in done.files if file.adopted for item in file.tensors),
        files=len(done.files),
        attempts=done.attempts,
        started_at=started_at,
        seconds=durable_at - started_at,
        wait_seconds=of["wait"].seconds if "wait" in of else 0.0,
        stage_seconds=of["stage"].seconds if "stage" in of else 0.0,
        plan_seconds=of["plan"].seconds,
        resolve_seconds=max(0.0, write.seconds - done.seconds),
        hash_seconds=done.hash_seconds,
        write_seconds=done.write_seconds,
        commit_seconds=of["commit"].seconds if "commit" in of else None,
        durable_at=durable_at,
        spans=(Span("save", began, ended, nbytes=write.nbytes), *spans),
        clock_offset=offset,
    )


@functools.cache  # once in a process
def warn_of_other_process() -> None:
    """Warns that the callbacks of a writer are not called in PROCESS mode."""
    logger.warning(
        "on_report and on_progress are not called with AsyncCheckpointerType.PROCESS, because another process saves. "
        "Use AsyncCheckpointerType.THREAD to get reports."
    )


class Reports:
    """The user's callbacks of a writer, which get the progress and the report of each save.

    Attributes:
        last: The last report; None before the first save.
    """

    def __init__(
        self,
        on_report: Callable[[SaveReport], object] | None = None,
        on_progress: Callable[[int, int], object] | None = None,
    ) -> None:
        check_callable("on_report", on_report)
        check_callable("on_progress", on_progress)
        self.on_report = on_report
        self.on_progress = on_progress
        self.last: SaveReport | None = None

    @contextmanager
    def progress(self, path: str, nbytes: Callable[[], int]) -> Iterator[Callable[[int], None]]:
        """Yields a function that reports the bytes written so far. ``nbytes`` returns the number of bytes to write."""
        transfer, total = TransferProgress("saving", path, self.on_progress), functools.cache(nbytes)
        is_shown = self.on_progress is not None and total() > 0
        if is_shown:
            transfer(0, total())
        yield lambda done: transfer(min(done, total()), total())
        if is_shown:
            transfer(total(), total())

    def publish(self, report: SaveReport) -> None:
        """Logs a report, and passes it to ``on_report``. An error in ``on_report`` is only logged."""
        self.last = report
        logger.info("%s", report)
        call(self.on_report, report, otherwise=_FAILED)

    def arrived(self, report: SaveReport, moment: float) -> None:
        """Reports a save again when the remote has it."""
        began, ended = report.durable_at - report.clock_offset, moment - report.clock_offset
        flush = Span("flush", began, ended, nbytes=report.nbytes)
        report = dataclasses.replace(report, remote_durable_at=moment, spans=(*report.spans, flush))
        if self.last is None or self.last.save_id == report.save_id:
            self.last = report
        logger.info("%s is on the remote, %.1f s after it was durable", report.path, moment - report.durable_at)
        call(self.on_report, report, otherwise=_FAILED)


# --- stale states: if every save has the same values, the saved state is not the trained one --------------------------

_DIGEST_BYTES = 8  # a tensor's last digest covers all of it
_KEYS_SENT = 3  # per rank
_KEYS_SHOWN = 5


class Freshness:
    """Comparison of a rank's floating-point and complex tensors with those of its previous save, by their digests.

    ``must_change`` are patterns of the keys to compare, as in `fnmatch`.
    """

    def __init__(self) -> None:
        self.must_change: tuple[str, ...] = ("*",)
        self._step: int | None = None
        self._digests: dict[ItemKey, bytes] = {}

    def compare(self, step: int, written: Mapping[ItemKey, StoredItem]) -> tuple[str, ...] | None:
        """Compares a save with the previous one, and stores the new digests for the next comparison.

        ``written`` has all items that the rank has written. If no compared tensor has changed, returns the first keys;
        if one has, an empty tuple; if there is nothing to compare, or no previous save of another step, None.
        """
        before, self._digests = self._digests, {}
        for key, item in written.items():
            # The digests of encrypted data differ in every save.
            if item.kind == "tensor" and item.digests and not item.nonce_and_macs:
                dtype = named_dtype(item.dtype)
                if dtype.is_floating_point or dtype.is_complex:
                    self._digests[key] = item.digests[-_DIGEST_BYTES:]
        step_before, self._step = self._step, step
        watched = [key for key in self._digests if any(fnmatch.fnmatchcase(str(key[0]), p) for p in self.must_change)]
        if step_before in (None, step) or not watched:
            return None
        if any(before.get(key) != self._digests[key] for key in watched):
            return ()
        return tuple(str(key) for key, _ in watched[:_KEYS_SENT])


def warn_if_stale(path: str, step: int, unchanged: Sequence[tuple[str, ...] | None]) -> None:
    """Logs a warning if every compared tensor of every rank equals that of the rank's previous save.

    ``unchanged`` are the results of `Freshness.compare` by rank.
    """
    found = [keys for keys in unchanged if keys is not None]
    if found and all(found):
        keys = list(dict.fromkeys(key for keys in found for key in keys))
        logger.warning(
            "%s: step %d holds the same values as the previous save, in every floating-point tensor that was compared "
            "(%s). Check that the saved state is the one that is trained.",
            path,
            step,
            ", ".join(map(repr, keys[:_KEYS_SHOWN])) + (", ..." if len(keys) > _KEYS_SHOWN else ""),
        )
