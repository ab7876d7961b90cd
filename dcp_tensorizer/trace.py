"""Trace files with the spans of saves and loads, for Perfetto: `TraceFile`, an ``on_report``."""

from __future__ import annotations

import functools
import json
import os
import socket
import threading
from pathlib import Path

from ._loading.report import LoadReport
from ._runtime.forks import free_in_child
from ._runtime.spans import Span
from ._saving.report import SaveReport
from ._storage.local import boot_id

__all__ = ["Span", "TraceFile"]


class TraceFile:
    """A callback that writes the spans of reports to files, which ``dcp-tensorizer trace`` converts for Perfetto.

    Pass a `TraceFile` to each writer and reader, on all ranks::

        trace = TraceFile("run/trace")
        manager = CheckpointManager("run", on_report=trace, reader_options={"on_report": trace})

    Each process appends one line per report to its own file.

    Args:
        folder: A local folder, created if necessary. All ranks may use the same folder. If hosts use different
            folders, pass all of them to the command.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(os.path.abspath(os.path.expanduser(folder)))
        self._lock = free_in_child(threading.Lock())

    def __call__(self, report: SaveReport | LoadReport) -> None:
        """Appends the spans of a report. Raises `OSError` if the file cannot be written."""
        host, boot = _host()
        if isinstance(report, LoadReport):
            kind, number = "load", report.load_id
        else:
            kind, number = "save" if report.remote_durable_at is None else "flush", report.save_id
        line = {
            "kind": kind,
            "id": number,
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
                # A full disk, or a killed process with the same pid (in containers), may have left an incomplete line.
                if file.seek(0, os.SEEK_END):
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":
                        file.seek(0)
                        file.truncate(file.read().rfind(b"\n") + 1)
                file.write(json.dumps(line).encode() + b"\n")


@functools.cache
def _host() -> tuple[str, str]:
    """Returns the name of this host, and the id of its last boot, which identifies its clock."""
    try:
        return socket.gethostname(), boot_id().strip()
    except OSError:  # not Linux
        return socket.gethostname(), socket.gethostname()
