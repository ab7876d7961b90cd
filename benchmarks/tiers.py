"""Saves to a local disk that are flushed to a slow remote, beside the same saves to the local disk alone.

``python -m benchmarks.tiers``: a state of ``--gigabytes`` is saved every ``--every`` seconds beside a training loop.
The remote is SeaweedFS behind a proxy that forwards ``--remote`` GB/s. Both kinds run in turn, as processes.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
import threading
import time
import uuid
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import SaveReport, TensorizerStorageWriter
from tests.servers import s3_server
from tests.tcp_proxy import TcpProxy

from .harness import cell, machine, rewrite, run_cases, spread, store, stored, table
from .pages import opening

_TENSORS = 50
_KINDS = ("local disk alone", "local disk first, then the remote")
_WHAT = (
    "what a local disk in front of a slow remote costs a save: how long training waits, and how long it takes until "
    "the save is durable. The same saves go to the local disk alone in the same run."
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiers", description=__doc__)
    parser.add_argument(
        "--gigabytes", type=float, default=0.08, help="of the state; more than the remote can take waits"
    )
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two saves")
    parser.add_argument("--remote", type=float, default=0.05, help="GB/s that the remote takes")
    parser.add_argument("--saves", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", help="where to save; the temporary directory otherwise")
    parser.add_argument("--redraw", action="store_true", help="the page from the stored results, without measuring")
    options = parser.parse_args()
    if options.redraw:
        rewrite("tiers", _render(stored("tiers")))
        return
    scale = {"gigabytes": options.gigabytes, "every": options.every, "remote": options.remote, "saves": options.saves}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, tempfile.TemporaryDirectory() as data:
        with s3_server(Path(data)) as server, closing(SlowProxy(server.endpoint, options.remote * 1e9)) as proxy:
            reached = {"bucket": server.bucket, "options": server.options(f"http://127.0.0.1:{proxy.port}")}
            cases = [{"kind": kind, "scale": scale, "folder": folder, "server": reached} for kind in _KINDS]
            results = run_cases(__spec__.name, cases, options.rounds)
        content = {"machine": machine(folder), "scale": scale, "results": results}
    store("tiers", content, _render(content))


class SlowProxy(TcpProxy):
    """Forwards so many bytes a second, over all connections and in both directions."""

    def __init__(self, endpoint: str, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._turn = threading.Lock()
        self._free_at = 0.0
        super().__init__(int(endpoint.rpartition(":")[2]))

    def _pump(self, source: socket.socket, target: socket.socket, number: int) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                with self._turn:
                    self._free_at = max(time.monotonic(), self._free_at) + len(data) / self._rate
                    wait = self._free_at - time.monotonic()
                time.sleep(max(0.0, wait))
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()


def _case(case: dict[str, Any]) -> dict[str, Any]:
    """One run of one kind: the seconds of each save."""
    scale = case["scale"]
    reports: list[SaveReport] = []
    elements = int(scale["gigabytes"] * 1e9 / 4 / _TENSORS)
    state = {f"t{n}": torch.rand(elements) for n in range(_TENSORS)}
    with tempfile.TemporaryDirectory(dir=case["folder"]) as folder:
        path, options = f"{folder}/local", dict[str, Any]()
        if case["kind"] == _KINDS[1]:
            path, local = f"s3://{case['server']['bucket']}/{uuid.uuid4().hex}", path
            options = {"local": local, "max_unflushed": scale["saves"], "storage_options": case["server"]["options"]}
        with TensorizerStorageWriter(path, on_report=reports.append, **options) as writer:
            writer.prewarm(state)
            stalls = [_save(writer, path, state, number, scale["every"]) for number in range(scale["saves"])]
            last = time.time()
            assert writer.wait_remote()
    durable = [report.seconds for report in reports if report.remote_durable_at is None]
    arrived = [report for report in reports if report.remote_durable_at is not None]
    order = sorted(arrived, key=lambda report: report.remote_durable_at or 0.0)
    assert [_number(report.path) for report in order] == list(range(len(arrived))), "they arrived in another order"
    lags = [(report.remote_durable_at or 0.0) - report.durable_at for report in arrived]
    return {"stalls": stalls[2:], "durable": durable[2:], "lags": lags, "drained": time.time() - last}


def _number(path: str) -> int:
    return int(path.rpartition("-")[2])


def _save(writer: TensorizerStorageWriter, path: str, state: dict[str, Any], number: int, every: float) -> float:
    """Saves, and trains until the next save; returns how long training waited."""
    started = time.perf_counter()
    dcp.async_save(state, storage_writer=writer, checkpoint_id=f"{path}/step-{number}")
    stall = time.perf_counter() - started
    matrix = torch.rand(256, 256)
    while time.perf_counter() - started < every:
        matrix = matrix @ matrix / 256
    return stall


def _render(content: dict[str, Any]) -> str:
    scale = content["scale"]
    by_kind = {
        kind: [r["ranks"] for r in content["results"] if r["case"]["kind"] == kind and "ranks" in r] for kind in _KINDS
    }
    rows = []
    for kind, found in by_kind.items():
        stalls, durable = ([value for one in found for value in one[name]] for name in ("stalls", "durable"))
        lags = [value for one in found for value in one["lags"]]
        rows.append([kind, *(cell(spread(values), "{:.3f}".format) for values in (stalls, durable, lags))])
    what = (
        f"{scale['saves']} saves of {scale['gigabytes']:g} GB, one every {scale['every']:g} s, to a remote that takes "
        f"{scale['remote']:g} GB/s. The first two of each run are not counted."
    )
    header = opening("A local disk first", content["machine"], _WHAT, what, "tiers")
    heads = ("", "stall, s", "until durable, s", "then until on the remote, s")
    return "\n\n".join([header, table(heads, rows)])


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        print(json.dumps(_case(json.loads(sys.argv[1]))))
    else:
        main()
