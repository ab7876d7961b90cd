"""The cost of a load, for logs and for users' own metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._runtime.progress import call
from .._runtime.spans import Span, clock_offset

logger = logging.getLogger("dcp_tensorizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Report of one load on one rank. Seconds are wall-clock time.

    Attributes:
        path: The checkpoint's path, without credentials.
        save_id: The id of the save that wrote the checkpoint; empty if the checkpoint does not name it.
        load_id: The reader's `TensorizerStorageReader.load_id`.
        rank: The rank that reports.
        items: The number of tensors, parts of tensors, and objects that this rank loaded.
        nbytes: Bytes that this rank read; whole blocks if the load verifies, or if the checkpoint is encrypted.
        received_bytes: Bytes that this rank received from others; see ``exchange`` of `TensorizerStorageReader`.
        started_at: When the load began (``time.time()``).
        seconds: The time from the start of the load, before the metadata is read, to its end.
        plan_seconds: The part of ``seconds`` before the first tensor or object is read: metadata, DCP's planning and
            collectives, and checks.
        read_seconds: The rest of ``seconds``: reading, verifying, converting and, with ``exchange``, exchanging.
        verify_seconds: The time for comparing digests or decrypting, summed over threads.
        spans: The time spans of the load, its parts and each file, the whole load first. `TraceFile` writes
            them to a file.
        clock_offset: The seconds to add to the times of spans to get ``time.time()``.
    """

    path: str
    save_id: str
    load_id: str
    rank: int
    items: int
    nbytes: int
    started_at: float
    seconds: float
    plan_seconds: float
    read_seconds: float
    received_bytes: int = 0
    verify_seconds: float = 0.0
    spans: tuple[Span, ...] = field(default=(), repr=False)
    clock_offset: float = 0.0

    @property
    def gigabytes_per_second(self) -> float:
        """The average speed: ``nbytes`` divided by ``seconds``, in units of 10^9 bytes per second."""
        return self.nbytes / 1e9 / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"{self.path}: rank {self.rank} loaded {self.items:,} item(s), {self.nbytes / 1e6:,.1f} MB in "
            f"{self.seconds:.3f} s, {self.gigabytes_per_second:.2f} GB/s (seconds: plan {self.plan_seconds:.3f}, read "
            f"{self.read_seconds:.3f})"
        )


class LoadClock:
    """A clock for a load that begins now."""

    def __init__(self) -> None:
        self._started_at = time.time()
        self._began = self._has_metadata = self._began_reading = time.perf_counter()
        self.reads: list[Span] = []  # several threads append

    def has_metadata(self) -> None:
        """Records that the metadata has been read."""
        self._has_metadata = time.perf_counter()

    def begin_reading(self) -> None:
        """Records that planning has ended."""
        self._began_reading = time.perf_counter()

    def report(self, **facts: Any) -> LoadReport:
        """Returns the report of a load that ends now. ``facts`` are its other fields."""
        ended = time.perf_counter()
        reads, self.reads = self.reads, []
        verifying = sum(span.verify_seconds for span in reads)
        nbytes = facts["nbytes"]
        spans = (
            Span("load", self._began, ended, nbytes=nbytes),
            Span("metadata", self._began, self._has_metadata),
            Span("prepare", self._has_metadata, self._began_reading),
            Span("read", self._began_reading, ended, nbytes=nbytes, verify_seconds=verifying),
            *_by_file(reads),
        )
        return LoadReport(
            **facts,
            started_at=self._started_at,
            seconds=ended - self._began,
            plan_seconds=self._began_reading - self._began,
            read_seconds=ended - self._began_reading,
            verify_seconds=verifying,
            spans=spans,
            clock_offset=clock_offset(),
        )


def _by_file(reads: Sequence[Span]) -> Iterator[Span]:
    of_file: dict[str, list[Span]] = {}
    for read in reads:
        of_file.setdefault(read.file, []).append(read)
    for file, spans in of_file.items():
        yield Span(
            spans[0].name,
            min(span.began for span in spans),
            max(span.ended for span in spans),
            file,
            sum(span.nbytes for span in spans),
            sum(span.verify_seconds for span in spans),
        )


def publish(report: LoadReport, on_report: Callable[[LoadReport], object] | None) -> None:
    """Logs a report, and calls the user's callback. Errors of the callback are only logged."""
    logger.info("%s", report)
    call(on_report, report, otherwise="on_report failed; the load did not")
