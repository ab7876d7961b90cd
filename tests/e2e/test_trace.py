"""Traces of real ranks: what is read back is what the reports say."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._runtime.spans import PARENTS
from dcp_tensorizer.tools import trace
from dcp_tensorizer.trace import TraceFile

from ..lab.ranks import run_ranks

WORLD = 4


def _save_and_load(rank, folder):
    """Saves twice by way of a local folder, and loads; returns the reports."""
    state = {"w": distribute_tensor(torch.ones(64, 4096), init_device_mesh("cpu", (rank.world_size,)), [Shard(0)])}
    reports, record = [], TraceFile(folder / "spans")

    def on_report(report):
        record(report)
        reports.append(report)

    local = folder / f"node-{rank.index}"
    with TensorizerStorageWriter(folder / "remote", local=local, on_report=on_report) as writer:
        for step in (1, 2):
            path = folder / "remote" / f"step-{step}"
            dcp.async_save(state, storage_writer=writer, checkpoint_id=path, process_group=rank.saves).result()
        assert writer.wait_remote(60)
    dist.barrier()
    reader = TensorizerStorageReader(folder / "remote" / "step-2", on_report=on_report)
    dcp.load(state, storage_reader=reader)
    return reports


def test_the_trace_of_four_ranks_is_what_their_reports_say(tmp_path):
    """Spans lie in the one that contains them, rows only nest, and lengths are those of the reports."""
    reports = run_ranks(WORLD, _save_and_load, tmp_path)
    traced = trace([tmp_path / "spans"], tmp_path / "trace.json")
    assert (traced.saves, traced.loads, traced.ranks, traced.hosts) == (2 * WORLD, WORLD, WORLD, 1)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for rank, of_rank in enumerate(reports):
        spans = [event for event in events if event["ph"] == "X" and event["pid"] == rank]
        _check_rows(spans)
        saves = [report for report in of_rank if getattr(report, "remote_durable_at", "") is None]
        flushed = [report for report in of_rank if getattr(report, "remote_durable_at", None)]
        assert (len(saves), len(flushed), len(of_rank)) == (2, 2, 5)
        for report in saves:
            _check_save(report, [span for span in spans if span["args"]["id"] == report.save_id])
        for report in flushed:
            (flush,) = [s for s in spans if s["args"]["id"] == report.save_id and s["name"] == "flush"]
            assert flush["dur"] == pytest.approx((report.remote_durable_at - report.durable_at) * 1e6, abs=10)
        (load,) = [report for report in of_rank if hasattr(report, "load_id")]
        _check_load(load, [span for span in spans if span["args"]["id"] == load.load_id])
    # On one clock: no rank's part is durable before the coordinator begins to commit it.
    for path in {event["args"]["path"] for event in events if event["name"] == "commit"}:
        of_save = [event for event in events if event["ph"] == "X" and event["args"]["path"] == path]
        (commit,) = [event for event in of_save if event["name"] == "commit"]
        writes = [event for event in of_save if event["name"] == "write"]
        assert len(writes) == WORLD
        assert max(event["ts"] + event["dur"] for event in writes) <= commit["ts"]


def _check_rows(spans):
    """In a row, two spans are one after the other, or one is in the other."""
    for one in spans:
        for other in (span for span in spans if span["tid"] == one["tid"]):
            (begin, end), (first, last) = _ends(one), _ends(other)
            assert end <= first or last <= begin or begin <= first <= last <= end or first <= begin <= end <= last


def _check_save(report, spans):
    named = {span["name"]: span for span in spans if span["name"] not in ("file", "encode", "finish")}
    commits = ["agree", "commit"] if report.rank == 0 else []
    expected = ["wait", "save", "stage", "plan", "write", "files", *commits, "flush"]
    assert sorted(named) == sorted(expected)
    for span in spans:
        parents = [p for p in spans if p["name"] == PARENTS[span["name"]] and _same_file(p, span)]
        assert len(parents) == (1 if PARENTS[span["name"]] else 0)
        for parent in parents:
            assert _ends(parent)[0] <= _ends(span)[0] <= _ends(span)[1] <= _ends(parent)[1], (parent, span)
    order = [named[name]["ts"] for name in ("wait", "stage", "plan", "write", *commits, "flush")]
    assert order == sorted(order)
    lengths = {"wait": report.wait_seconds, "stage": report.stage_seconds, "plan": report.plan_seconds}
    lengths |= {"commit": report.commit_seconds} if commits else {}
    for name, seconds in lengths.items():
        assert named[name]["dur"] == pytest.approx(seconds * 1e6, abs=0.01)
    resolved = named["write"]["dur"] - named["files"]["dur"]
    assert resolved == pytest.approx(report.resolve_seconds * 1e6, abs=0.01)
    files = [span for span in spans if span["name"] == "file"]
    assert len(files) == report.files == 1
    assert files[0]["args"]["bytes"] >= named["save"]["args"]["bytes"] == report.nbytes == 16 * 4096 * 4


def _check_load(report, spans):
    named = {span["name"]: span for span in spans}
    assert sorted(named) == ["load", "metadata", "prepare", "read", "read file"]
    for name in ("metadata", "prepare", "read", "read file"):
        parent = named[PARENTS[name]]
        assert _ends(parent)[0] <= _ends(named[name])[0] <= _ends(named[name])[1] <= _ends(parent)[1]
    assert named["load"]["dur"] == pytest.approx(report.seconds * 1e6, abs=0.01)
    assert named["read"]["dur"] == pytest.approx(report.read_seconds * 1e6, abs=0.01)
    assert named["metadata"]["dur"] + named["prepare"]["dur"] == pytest.approx(report.plan_seconds * 1e6, abs=0.01)
    assert named["read file"]["args"]["bytes"] == report.nbytes
    assert 0 < report.verify_seconds <= report.read_seconds


def _ends(span):
    return span["ts"], round(span["ts"] + span["dur"], 3)


def _same_file(parent, span):
    return parent["name"] != "file" or parent["args"]["file"] == span["args"]["file"]
