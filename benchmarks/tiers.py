"""Saves to a local disk that are flushed to a slow remote, beside the same saves to the local disk alone.

``python -m benchmarks.tiers``: a state of ``--gigabytes`` is saved every ``--every`` seconds beside a training loop.
The remote is SeaweedFS behind a proxy that forwards ``--remote`` GB/s. Both kinds run in turn, as processes.
"""

from __future__ import annotations

import argparse
import socket
import threading
import time
import uuid
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import TensorizerStorageWriter
from dcp_tensorizer.writer import SaveReport
from tests.lab.faults import TcpProxy
from tests.lab.servers import s3_server

from .case import Case
from .harness import Content, Spread, cell, quotient, run, run_cases, spread, table
from .pages import Goal, goals, page

_TENSORS = 50
_KINDS = ("local disk alone", "local disk first, then the remote")
_WHAT = (
    "what a local disk in front of a slow remote costs a save: how long training waits, and how long it takes until "
    "the save is durable. The same saves go to the local disk alone in the same run."
)


def measure(options: argparse.Namespace, folder: Path) -> Content:
    scale = {"gigabytes": options.gigabytes, "every": options.every, "remote": options.remote, "saves": options.saves}
    (folder / "remote").mkdir()
    with s3_server(folder / "remote") as server, closing(SlowProxy(server.endpoint, options.remote * 1e9)) as proxy:
        reached = {"bucket": server.bucket, "options": server.options(f"http://127.0.0.1:{proxy.port}")}
        cases = [{"kind": kind, "scale": scale, "folder": str(folder), "server": reached} for kind in _KINDS]
        return {"scale": scale, "results": run_cases(measure_case, cases, options.rounds)}


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


def measure_case(case: Case, folder: Path) -> dict[str, Any]:
    """One run of one kind: the seconds of each save."""
    scale = case["scale"]
    reports: list[SaveReport] = []
    elements = int(scale["gigabytes"] * 1e9 / 4 / _TENSORS)
    state = {f"t{n}": torch.rand(elements) for n in range(_TENSORS)}
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


def render(content: Content) -> str:
    """The page of results."""
    scale = content["scale"]
    found = {kind: {name: _values(content["results"], kind, name) for name in _FIGURES} for kind in _KINDS}
    alone, tiered = (found[kind] for kind in _KINDS)
    wanted: list[Goal] = [
        (f"{words}: with the remote / the local disk alone", "", quotient(tiered[name], alone[name]))
        for name, words in (("stalls", "stall"), ("durable", "time until durable"))
    ]
    rows = [[kind, *(cell(found[kind][name], "{:.3f}".format) for name in _FIGURES)] for kind in _KINDS]
    return page(
        content,
        "A local disk first",
        _WHAT,
        f"{scale['saves']} saves of {scale['gigabytes']:g} GB, one every {scale['every']:g} s, to a remote that takes "
        f"{scale['remote']:g} GB/s. The first two of each run are not counted.",
        "tiers",
        table(("", *_FIGURES.values()), rows),
        goals(wanted),
    )


def _values(results: list[dict[str, Any]], kind: str, name: str) -> Spread | None:
    measured = [result["ranks"] for result in results if result["case"]["kind"] == kind and "ranks" in result]
    return spread(value for one in measured for value in one[name])


_FIGURES = {"stalls": "stall, s", "durable": "until durable, s", "lags": "then until on the remote, s"}
OPTIONS = {
    "gigabytes": {"type": float, "default": 0.08, "help": "of the state; more than the remote can take waits"},
    "every": {"type": float, "default": 2.0, "help": "seconds between two saves"},
    "remote": {"type": float, "default": 0.05, "help": "GB/s that the remote takes"},
    "saves": {"type": int, "default": 15},
    "rounds": {"type": int, "default": 1},
}

if __name__ == "__main__":
    run("tiers", measure, render, about=__doc__, options=OPTIONS)
