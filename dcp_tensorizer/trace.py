"""Saves and loads in time: their spans for Perfetto (`TraceFile`), and for OpenTelemetry (`OpenTelemetrySpans`).

Both are an ``on_report`` of writers, readers and managers. They get the record that every save and every load makes
anyway. Without them nothing is kept.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ._loading.report import LoadReport
from ._runtime.extras import needed
from ._runtime.forks import free_in_child
from ._runtime.spans import PARENTS, Span
from ._saving.report import SaveReport
from ._storage.local import boot_id

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

__all__ = ["OpenTelemetrySpans", "Span", "TraceFile"]


class TraceFile:
    """Writes the spans of each report to a file, from which ``dcp-tensorizer trace`` makes a picture.

    Pass one to each writer and reader, with the same folder on all ranks::

        trace = TraceFile("run/trace")
        manager = CheckpointManager("run", on_report=trace, reader_options={"on_report": trace})

    Each process appends to a file of its own, one line for a report, and opens it only for that.

    Args:
        folder: A local folder, which is made if necessary. Ranks of other hosts may use another one: the command takes
            several.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(os.path.abspath(os.path.expanduser(folder)))
        self._lock = free_in_child(threading.Lock())

    def __call__(self, report: SaveReport | LoadReport) -> None:
        """Appends the spans of a report; raises `OSError` if they cannot be written."""
        host, boot = _host()
        line = {
            "kind": _kind(report),
            "id": report.load_id if isinstance(report, LoadReport) else report.save_id,
            "path": report.path,
            "rank": report.rank,
            "host": host,
            "boot": boot,
            "pid": os.getpid(),
            "clock_offset": report.clock_offset,
            "spans": report.spans,
        }
        with self._lock:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / f"{host}-{os.getpid()}.spans.jsonl").open("a+b") as file:
                _drop_cut_line(file)
                file.write(json.dumps(line).encode() + b"\n")


class OpenTelemetrySpans:
    """Passes the spans of each report to OpenTelemetry, as one trace for each save and load of a rank.

    The wait before a save, and its flush, are part of no other span: each is a trace of its own.

    It needs ``opentelemetry-api`` (the extra ``otel``). Where they go is the program's choice, as for all of its spans.
    Names are ``checkpoint.save``, ``checkpoint.stage`` and so on. Attributes are ``checkpoint.path``,
    ``checkpoint.save_id``, ``checkpoint.rank``, ``checkpoint.file`` and ``checkpoint.bytes``.

    Args:
        provider: The tracer provider; None for the program's own.

    Raises:
        ImportError: OpenTelemetry is not installed.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        with needed("OpenTelemetrySpans", "dcp_tensorizer[otel]"):
            from opentelemetry import trace

        self._trace = trace
        self._tracer = trace.get_tracer("dcp_tensorizer", tracer_provider=provider)

    def __call__(self, report: SaveReport | LoadReport) -> None:
        """Makes spans, and ends them."""
        common: dict[str, Any] = {
            "checkpoint.path": report.path,
            "checkpoint.save_id": report.save_id,
            "checkpoint.rank": report.rank,
        }
        made: dict[tuple[str, str], Any] = {}
        for span in _new(report):
            parent = made.get(_parent(span))
            attributes = common | {"checkpoint.bytes": span.nbytes}
            if span.file:
                attributes["checkpoint.file"] = span.file
            one = self._tracer.start_span(
                f"checkpoint.{span.name.replace(' ', '_')}",
                context=None if parent is None else self._trace.set_span_in_context(parent),
                start_time=_nanoseconds(span.began, report),
                attributes=attributes,
            )
            made[span.name, span.file] = one
            one.end(_nanoseconds(span.ended, report))


def _drop_cut_line(file: BinaryIO) -> None:
    """Removes an incomplete last line: of a full disk, or of a killed process that had the same number, as in
    containers.
    """
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


def _kind(report: SaveReport | LoadReport) -> str:
    return "load" if isinstance(report, LoadReport) else "save" if report.remote_durable_at is None else "flush"


def _new(report: SaveReport | LoadReport) -> tuple[Span, ...]:
    """The spans that earlier reports of the same save did not have."""
    return report.spans[-1:] if _kind(report) == "flush" else report.spans


def _parent(span: Span) -> tuple[str, str]:
    """The name and the file of the span that contains a span."""
    parent = PARENTS.get(span.name, "")
    return parent, span.file if parent == "file" else ""


def _nanoseconds(moment: float, report: SaveReport | LoadReport) -> int:
    return int((moment + report.clock_offset) * 1e9)


@functools.cache
def _host() -> tuple[str, str]:
    """The name of this host, and what tells its clock from those of others: the id of its last start."""
    try:
        return socket.gethostname(), boot_id().strip()
    except OSError:  # not Linux
        return socket.gethostname(), socket.gethostname()
