"""Merges the spans of all ranks and processes into one trace for Perfetto or ``chrome://tracing``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .._runtime.spans import Span
from .._runtime.validation import check_paths
from ..errors import NotCommitted, ReadError
from ._atomic_output import beside, check_apart

_Path = str | os.PathLike[str]

_TRACKS = ("training", "save", "load", "writer process", "files", "read", "flush")
_TRACK_OF = {
    "wait": "training",
    "stage": "training",
    "files": "writer process",
    "file": "files",
    "encode": "files",
    "finish": "files",
    "flush": "flush",
    "load": "load",
    "metadata": "load",
    "prepare": "load",
    "read": "load",
    "read file": "read",
}
"""The track of a span, by its name. Other spans are on the track ``save``."""
_ROWS = 1000  # maximum number of rows per track


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """The result of `trace`.

    Attributes:
        path: The trace file.
        saves: Number of saves, counted on each rank: a save of four ranks counts as four.
        loads: Number of loads, counted on each rank.
        ranks: Number of ranks.
        hosts: Number of hosts.
        spans: Number of spans.
        seconds: Time from the beginning of the first span to the end of the last.
    """

    path: str
    saves: int
    loads: int
    ranks: int
    hosts: int
    spans: int
    seconds: float


def trace(sources: Sequence[_Path], output: _Path = "trace.json") -> Traced:
    """Merges the files of `dcp_tensorizer.trace.TraceFile` into a trace for https://ui.perfetto.dev.

    The processes of a host share a clock. Clocks of different hosts are aligned by the wall-clock time.

    Args:
        sources: Trace files, or folders of trace files. Each file counts once.
        output: The trace: a local path, or a URL. An existing file is replaced.

    Raises:
        TypeError, ValueError: ``sources`` is not a list of paths, or is empty.
        ConversionError: ``output`` is a URL that lacks a directory or a file name, or is one of the trace files.
        NotCommitted: a source is neither a trace file nor a folder with one, or the files hold neither a save nor a
            load.
        ReadError: a file cannot be read, or is not a trace file.
        WriteError: the trace cannot be written.
    """
    sources = check_paths("sources", sources)
    if not sources:
        raise ValueError("sources is empty. Name at least one trace file or folder.")
    found = [file for source in sources for file in _files(Path(os.path.expanduser(source)))]
    files = {os.path.realpath(file): file for file in found}
    check_apart(output, files)
    records = [record for file in files.values() for record in _records(file)]
    if not records:
        raise NotCommitted(f"{', '.join(map(str, sources))}: the trace files hold no save and no load")
    # Convert all spans to the clock of the first record's host, with one offset per host. Seconds since the epoch,
    # stored as floats, would be rounded to a quarter of a microsecond.
    offsets: dict[str, float] = {}
    on_clock = []
    for record in records:
        offset = offsets.setdefault(record.boot, record.clock_offset) - records[0].clock_offset
        moved = (span._replace(began=span.began + offset, ended=span.ended + offset) for span in record.spans)
        on_clock.append(record._replace(spans=tuple(moved)))
    spans = [span for record in on_clock for span in record.spans]
    began = min(span.began for span in spans)
    content = {
        "displayTimeUnit": "ms",
        "otherData": {"began": began + records[0].clock_offset},
        "traceEvents": list(_events(on_clock, began)),
    }
    storage, name = beside(os.fspath(output), {})
    storage.make_directory()
    storage.put(name, json.dumps(content).encode(), sync=False)
    return Traced(
        path=f"{storage.path}/{name}",
        saves=len({(record.rank, record.id) for record in records if record.kind != "load"}),
        loads=sum(record.kind == "load" for record in records),
        ranks=len({record.rank for record in records}),
        hosts=len({record.boot for record in records}),
        spans=len(spans),
        seconds=max(span.ended for span in spans) - began,
    )


class _Record(NamedTuple):
    """One line of a trace file."""

    kind: str
    id: str
    path: str
    rank: int
    host: str
    boot: str
    pid: int
    clock_offset: float
    spans: tuple[Span, ...]


def _files(source: Path) -> list[Path]:
    files = sorted(source.glob("*.spans.jsonl")) if source.is_dir() else [source]
    if not files or not files[0].exists():
        raise NotCommitted(
            f"{source} is neither a trace file nor a folder with one. Pass TraceFile(folder) as on_report on each "
            f"rank, and then pass that folder to trace."
        )
    return files


def _records(file: Path) -> Iterator[_Record]:
    """Yields the records of a file. Skips a truncated last line, which a killed process may leave."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeError) as error:
        raise ReadError(f"cannot read {file}: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
            spans = tuple(Span(*span) for span in fields.pop("spans"))
            record = _Record(**fields, spans=spans)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if number == len(lines) and not line.endswith("\n"):
                return
            raise ReadError(f"line {number} of {file} is not a report of spans: {error}") from None
        # The report of a flush repeats the spans of its save. Only the last span is new.
        yield record._replace(spans=spans[-1:]) if record.kind == "flush" else record


def _events(records: Sequence[_Record], began: float) -> Iterator[dict[str, Any]]:
    """Yields the events of the trace: a process per rank, with rows in which spans nest or follow each other."""
    free: dict[tuple[int, str], list[float]] = {}  # the time at which each row of a track becomes free
    for rank, host in sorted({(record.rank, record.host) for record in records}):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} on {host}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for record in sorted(records, key=lambda record: record.spans[0].began):
        bundles: dict[tuple[str, str], list[Span]] = {}  # spans of one track and file nest, and so share a row
        for span in record.spans:
            bundles.setdefault((_TRACK_OF.get(span.name, "save"), span.file), []).append(span)
        for (track, _), spans in bundles.items():
            rows = free.setdefault((record.rank, track), [])
            known, starts = len(rows), min(span.began for span in spans)
            row = next((row for row, moment in enumerate(rows) if moment <= starts), known)
            rows[row : row + 1] = [max(span.ended for span in spans)]
            thread = 1 + _TRACKS.index(track) * _ROWS + row
            if row == known:
                name = track if not row else f"{track} {row + 1}"
                yield {"ph": "M", "name": "thread_name", "pid": record.rank, "tid": thread, "args": {"name": name}}
                order = {"sort_index": thread}
                yield {"ph": "M", "name": "thread_sort_index", "pid": record.rank, "tid": thread, "args": order}
            for span in spans:
                begin, end = (round((moment - began) * 1e6, 3) for moment in (span.began, span.ended))
                yield {
                    "ph": "X",
                    "name": span.name,
                    "cat": record.kind,
                    "pid": record.rank,
                    "tid": thread,
                    "ts": begin,
                    "dur": round(end - begin, 3),
                    "args": _arguments(record, span),
                }


def _arguments(record: _Record, span: Span) -> dict[str, Any]:
    arguments: dict[str, Any] = {"path": record.path, "id": record.id}
    if span.file:
        arguments["file"] = span.file
    if span.nbytes:
        arguments |= {"bytes": span.nbytes, "GB/s": round(span.nbytes / 1e9 / max(span.seconds, 1e-9), 3)}
    if span.verify_seconds:
        arguments["verify seconds of all threads"] = round(span.verify_seconds, 6)
    return arguments
