"""A picture of a save of four ranks, drawn from its trace: ``python -m benchmarks.trace``.

Each rank saves 64 MB in tensors of 4 MB, twice, to a folder that it mirrors from a local one. The second save is drawn,
because the first one also starts the writer process. ``docs/guides/trace.svg`` is the result; the trace itself stays in
``build/trace.json``, and Perfetto shows it, too.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_tensorizer import TensorizerStorageWriter
from dcp_tensorizer.tools import trace
from dcp_tensorizer.trace import TraceFile

from . import charts

_ROOT = Path(__file__).resolve().parent.parent
_RANKS = 4
_TENSORS, _ROWS = 64, 1024  # of 4 MB, sharded
# Okabe and Ito's colours, by span; those within others are drawn over them.
_COLOURS = {
    "wait": "#9aa1a8",
    "stage": "#d55e00",
    "plan": "#e69f00",
    "write": "#56b4e9",
    "agree": "#eceef0",
    "commit": "#009e73",
    "encode": "#0072b2",
    "finish": "#cc79a7",
    "flush": "#f0e442",
}
_MEANINGS = {
    "wait": "wait: for the save before",
    "stage": "stage: training waits for the copy",
    "plan": "plan: DCP's collectives",
    "write": "write: from the plan to durable files",
    "agree": "agree: until all ranks have written",
    "commit": "commit",
    "encode": "file, encode: hashing, and most of the writing",
    "finish": "file, finish: its last parts, and fsync",
    "flush": "flush: from the local folder to the path",
}
_ROWS_OF_RANK = ("training", "save", "files", "flush")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        mp.spawn(_save, args=(Path(name),), nprocs=_RANKS)
        output = _ROOT / "build" / "trace.json"
        print(trace([Path(name) / "spans"], output))
    draw(json.loads(output.read_text())["traceEvents"], _ROOT / "docs" / "guides" / "trace.svg")


def _save(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=_RANKS)
    mesh, group = init_device_mesh("cpu", (_RANKS,)), dist.new_group(backend="gloo")
    state = {f"{n}": distribute_tensor(torch.rand(_ROWS, _ROWS), mesh, [Shard(0)]) for n in range(_TENSORS)}
    options: dict[str, Any] = {"local": folder / f"node-{rank}", "on_report": TraceFile(folder / "spans")}
    with TensorizerStorageWriter(folder / "run", **options) as writer:
        for step in (1, 2):
            path = folder / "run" / f"step-{step}"
            dcp.async_save(state, storage_writer=writer, checkpoint_id=path, process_group=group).result()
            writer.wait_remote()
            dist.barrier()
    dist.destroy_process_group()


def draw(events: Sequence[dict[str, Any]], output: Path) -> None:
    """Draws the last save of a trace, with a group of rows for each rank."""
    plt = charts.plt
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X" and event["name"] in _COLOURS]
    last = max((e for e in events if e["ph"] == "X"), key=lambda event: event["ts"])["args"]["path"]
    spans = [span for span in spans if span["args"]["path"] == last]
    zero = min(span["ts"] for span in spans)
    # The text stays text, and the same trace gives the same file.
    with mpl.rc_context({**charts.STYLE, "svg.fonttype": "none", "svg.hashsalt": "trace"}):
        figure, axes = plt.subplots(figsize=(9, 4.8), layout="constrained")
        labels: list[str] = []
        for rank in range(_RANKS):
            for row in _ROWS_OF_RANK:
                drawn = [s for s in spans if s["pid"] == rank and rows[rank, s["tid"]].partition(" ")[0] == row]
                for span in sorted(drawn, key=lambda span: list(_COLOURS).index(span["name"])):
                    place = (span["ts"] - zero) / 1e3, span["dur"] / 1e3
                    axes.broken_barh([place], (len(labels) - 0.4, 0.8), color=_COLOURS[span["name"]], linewidth=0)
                labels.append(f"rank {rank}   {row}" if row == _ROWS_OF_RANK[0] else row)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("milliseconds")
        for rank in range(1, _RANKS):
            axes.axhline(rank * len(_ROWS_OF_RANK) - 0.5, color="#7a828c", linewidth=0.5)
        handles = [charts.Patch(color=_COLOURS[name], label=meaning) for name, meaning in _MEANINGS.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=7.5)
        figure.savefig(output, metadata={"Date": None, "Creator": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
