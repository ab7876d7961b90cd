"""Traces: the spans of all processes on one clock, in rows in which spans nest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dcp_tensorizer import ConversionError, NotCommitted, ReadError
from dcp_tensorizer.tools import Traced, trace

SAVE = [
    ["wait", 9.0, 10.0],
    ["save", 10.0, 20.0, "", 6_000_000_000],
    ["stage", 10.0, 11.0],
    ["plan", 11.5, 12.0],
    ["write", 12.0, 18.0],
    ["files", 12.5, 17.5],
    ["file", 13.0, 16.0, "a", 6_000_000_000],
    ["encode", 13.0, 15.0, "a"],
    ["finish", 15.0, 16.0, "a"],
    ["file", 15.0, 17.0, "b"],
    ["file", 16.0, 17.5, "c"],
    ["agree", 18.0, 19.0],
    ["commit", 19.0, 20.0],
]


def write(file: Path, *records: dict[str, Any], end: str = "\n") -> None:
    """Writes a trace file; fields that a record lacks are those of a save of rank 0."""
    common = {"kind": "save", "id": "s", "path": "/c", "rank": 0, "host": "h", "boot": "1", "pid": 1, "spans": SAVE}
    file.write_text("\n".join(json.dumps(common | {"clock_offset": 0.0} | record) for record in records) + end)


def events(output: Path, rank: int = 0) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns the spans of a rank, by name and file."""
    content = json.loads(output.read_text())
    found = [event for event in content["traceEvents"] if event["ph"] == "X" and event["pid"] == rank]
    return {(event["name"], event["args"].get("file", "")): event for event in found}


def test_a_save_in_rows(tmp_path: Path) -> None:
    """Times begin at the first span, and files that overlap have separate rows, which later files reuse."""
    write(tmp_path / "h-1.spans.jsonl", {})
    traced = trace([tmp_path], tmp_path / "trace.json")
    assert traced == Traced(
        path=f"{tmp_path}/trace.json", saves=1, loads=0, ranks=1, hosts=1, spans=len(SAVE), seconds=11.0
    )
    spans = events(tmp_path / "trace.json")
    assert [(name, spans[name, ""]["ts"], spans[name, ""]["dur"]) for name in ("wait", "save", "commit")] == [
        ("wait", 0.0, 1e6),
        ("save", 1e6, 1e7),
        ("commit", 1e7, 1e6),
    ]
    assert spans["save", ""]["args"] == {"path": "/c", "id": "s", "bytes": 6_000_000_000, "GB/s": 0.6}
    rows = {key: event["tid"] for key, event in spans.items()}
    assert rows["file", "a"] == rows["encode", "a"] == rows["finish", "a"] == rows["file", "c"] != rows["file", "b"]
    assert rows["save", ""] == rows["plan", ""] == rows["write", ""] == rows["agree", ""] == rows["commit", ""]
    assert rows["wait", ""] == rows["stage", ""] != rows["save", ""]
    named = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["name"] == "thread_name"]
    assert {event["tid"]: event["args"]["name"] for event in named} == {
        rows["wait", ""]: "training",
        rows["save", ""]: "save",
        rows["files", ""]: "writer process",
        rows["file", "a"]: "files",
        rows["file", "b"]: "files 2",
    }


def test_ranks_of_a_host_share_its_clock(tmp_path: Path) -> None:
    """Ranks of a host share its clock even if the time was set; other hosts are aligned by wall-clock time."""
    first = {"rank": 0, "clock_offset": 1000.0}
    beside = {"rank": 1, "clock_offset": 5000.0}
    other = {"rank": 2, "host": "i", "boot": "2", "clock_offset": 1002.5}
    write(tmp_path / "a.spans.jsonl", first, beside)
    write(tmp_path / "b.spans.jsonl", other)
    traced = trace([tmp_path / "a.spans.jsonl", tmp_path / "b.spans.jsonl"], tmp_path / "trace.json")
    assert (traced.ranks, traced.hosts, traced.seconds) == (3, 2, 13.5)
    began = [events(tmp_path / "trace.json", rank)["save", ""]["ts"] for rank in range(3)]
    assert began == [1e6, 1e6, 3.5e6]
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"] == {"began": 1009.0}


def test_a_flush_is_added_to_its_save(tmp_path: Path) -> None:
    """The report of a flush repeats the spans of the save, which are drawn once."""
    write(tmp_path / "h.spans.jsonl", {}, {"kind": "flush", "spans": [*SAVE, ["flush", 20.0, 25.0]]})
    traced = trace([tmp_path], tmp_path / "trace.json")
    assert (traced.saves, traced.spans, traced.seconds) == (1, len(SAVE) + 1, 16.0)
    assert events(tmp_path / "trace.json")["flush", ""]["dur"] == 5e6


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    """A truncated last line is skipped; damage elsewhere is an error with file and line."""
    file = tmp_path / "h.spans.jsonl"
    write(file, {}, end='\n{"kind": "sa')
    assert trace([tmp_path], tmp_path / "trace.json").saves == 1
    write(file, {}, end='\n{"kind": "sa\n')
    with pytest.raises(ReadError, match=rf"^line 2 of {file} is not a report of spans: "):
        trace([tmp_path], tmp_path / "trace.json")


def test_a_file_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    """A file that is a source itself, in a folder that is a source, and behind a link, counts once."""
    (tmp_path / "spans").mkdir()
    write(file := tmp_path / "spans" / "h-1.spans.jsonl", {"kind": "load"}, {})
    (tmp_path / "link").symlink_to(file)
    traced = trace([tmp_path / "spans", file, tmp_path / "link"], tmp_path / "trace.json")
    assert (traced.saves, traced.loads, traced.spans) == (1, 1, 2 * len(SAVE))


def test_a_trace_replaces_no_file_that_it_reads(tmp_path: Path) -> None:
    """An output that is one of the trace files is refused, and the file stays."""
    write(file := tmp_path / "h-1.spans.jsonl", {})
    before = file.read_bytes()
    with pytest.raises(
        ConversionError, match=rf"^the output {file} is {file}, which is an input\. Choose another output\.$"
    ):
        trace([tmp_path], file)
    assert file.read_bytes() == before


def test_there_must_be_something_to_trace(tmp_path: Path) -> None:
    """No sources, no files and files without a report are errors."""
    with pytest.raises(ValueError, match="sources is empty"):
        trace([])
    with pytest.raises(NotCommitted, match="is neither a trace file nor a folder with one"):
        trace([tmp_path])
    (tmp_path / "h.spans.jsonl").touch()
    with pytest.raises(NotCommitted, match="hold no save and no load"):
        trace([tmp_path])


NAMES = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}
"""The metadata events of the Trace Event Format that are used, each with its argument."""


def test_each_event_is_of_the_trace_event_format(tmp_path: Path) -> None:
    """All events have the Trace Event Format, and spans of a row nest or follow each other."""
    other = {"rank": 1, "host": "g", "boot": "2", "clock_offset": 5.0}
    write(tmp_path / "h-1.spans.jsonl", {}, {"kind": "flush", "spans": [*SAVE, ["flush", 20.0, 30.0]]}, other)
    trace([tmp_path], tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text(), parse_constant=pytest.fail)
    assert content.keys() == {"traceEvents", "displayTimeUnit", "otherData"}
    assert content["displayTimeUnit"] in ("ms", "ns")
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    named = set()
    for event in content["traceEvents"]:
        assert type(event["pid"]) is int and isinstance(event["args"], dict)
        if event["ph"] == "M":
            (argument,) = event["args"].items()
            assert argument[0] == NAMES[event["name"]]
            assert type(argument[1]) is (str if argument[0] == "name" else int)
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
            continue
        assert event.keys() == {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"}
        assert (event["ph"], type(event["name"]), type(event["cat"]), type(event["tid"])) == ("X", str, str, int)
        assert event["ts"] >= 0 and event["dur"] >= 0
        rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert rows.keys() == named
    for spans in rows.values():
        around: list[tuple[float, float]] = []
        for began, ended in sorted(spans, key=lambda span: (span[0], -span[1])):
            while around and around[-1][1] <= began:
                around.pop()
            assert not around or ended <= around[-1][1]
            around.append((began, ended))
