"""A workload shaped like MLPerf Storage's checkpointing, smaller: `python -m benchmarks.mlperf` (about 8 minutes).

Eight ranks each write what one of them has of a model and its optimizer, ten times, with an fsync each; then all of it
is read ten times from a cold disk. It is no result of MLPerf: the model is cut down to 0.5 GB a rank.
`--redraw` makes the page again from the stored results, and measures nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from .harness import cell, machine, rates, rewrite, run_cases, spread, store, stored, table
from .mlperf_case import CONTENDERS
from .pages import glossary, goals, opening

_OURS, _DCP, _PLAIN = CONTENDERS
_WHAT = (
    "{ranks} ranks on one machine each save 195 fp16 tensors and three large fp32 ones, {gigabytes:.2f} GB a rank, "
    "{times} times. Each save is durable before the next begins. Then each rank loads each of the checkpoints; the "
    "page cache is emptied before. This is shaped like the checkpointing of MLPerf Storage, with a model cut down, and "
    "is no result of it."
)
_WHO = {
    _OURS: "`dcp.save` and `dcp.load` with this package. It checks all checksums.",
    _DCP: "the same with torch's own writer and reader.",
    _PLAIN: "a file of each rank by `torch.save` and `fsync`, read by `torch.load`: what MLPerf Storage runs.",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--megabytes", type=int, default=500, help="of each rank")
    parser.add_argument("--folder", help="where to save: on the file system to be measured", default=None)
    parser.add_argument("--redraw", action="store_true", help="from the stored results, without measuring")
    options = parser.parse_args()
    if options.redraw:
        rewrite("mlperf", render(stored("mlperf")))
        return
    with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd()) as folder:
        base = {"ranks": options.ranks, "times": options.times, "rank_bytes": options.megabytes * 10**6}
        cases = [{"contender": name, **base, "folder": folder} for name in CONTENDERS]
        results = run_cases("benchmarks.mlperf_case", cases, 1)
    content = {"machine": machine(options.folder), "results": results}
    store("mlperf", content, render(content))


def summarise(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By contender: bytes of all ranks, seconds of writes and reads; or the error."""
    found = {}
    for result in results:
        name = result["case"]["contender"]
        if "error" in result:
            found[name] = {"error": result["error"]}
            continue
        first = result["ranks"][0]  # each time is from barrier to barrier: rank 0's stand for all
        found[name] = {
            "bytes": sum(rank["bytes"] for rank in result["ranks"]),
            "write": spread(first["writes"]),
            "read": spread(first["reads"]),
            "intact": all(rank["intact"] for rank in result["ranks"]),
        }
    return found


def render(content: dict[str, Any]) -> str:
    """The page of results."""
    case = content["results"][0]["case"]
    summary = summarise(content["results"])
    what = _WHAT.format(ranks=case["ranks"], times=case["times"], gigabytes=case["rank_bytes"] / 1e9)
    how_often = f"{case['times']} writes, then {case['times']} reads, of each contender, one contender after the other."
    rows = []
    for name, entry in summary.items():
        if "error" in entry:
            rows.append((name, "-", "-", entry["error"]))
            continue
        write, read = (cell(rates(entry[kind], entry["bytes"]), "{:.2f}".format) for kind in ("write", "read"))
        rows.append((name, write, read, "yes" if entry["intact"] else "NO"))
    return "\n\n".join(
        [
            opening("MLPerf-shaped checkpoints", content["machine"], what, how_often, "mlperf"),
            glossary("Who was measured", _WHO),
            table(("contender", "write (GB/s)", "read, cold (GB/s)", "read what was written"), rows),
            goals(_ratios(summary)),
        ]
    )


def _ratios(summary: dict[str, dict[str, Any]]) -> list[tuple[str, str, str]]:
    def median(name: str, kind: str) -> float:
        values = summary.get(name, {}).get(kind)
        return values["median"] if values else float("nan")

    wanted = {"write": ">= 3", "read": ">= 2"}
    return [
        (f"{kind} / {peer}", wanted[kind], f"{median(peer, kind) / median(_OURS, kind):.2f}")
        for kind in wanted
        for peer in (_DCP, _PLAIN)
    ]


if __name__ == "__main__":
    main()
