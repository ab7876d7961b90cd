"""The page with the two headline ratios of every run, from the lines of ``results/history.jsonl``.

One run shows only one hour. An hour later, the disk and the memory of a virtual machine may be faster or slower.
"""

from __future__ import annotations

import json

from .harness import RESULTS, cell, spread, table

_HEADLINES = {
    ("save", "speed to disk in training / torch, THREAD"): "durable throughput while training runs / torch "
    "`FileSystemWriter`, thread",
    ("load", "warm speed / torch FileSystemReader's"): "verified load from the page cache / torch `FileSystemReader`",
}
_WHAT = (
    "How far the two headline ratios vary from one run to another. The workload and the machine's size are the same. "
    "The hour, the code and the state of disk and memory are not. The newest run comes first. Each run of a benchmark "
    "adds a line with all of its ratios to `history.jsonl`."
)


def render() -> str:
    lines = [json.loads(line) for line in (RESULTS / "history.jsonl").read_text().splitlines()][::-1]
    parts = ["# The same figures on other days", _WHAT]
    for (benchmark, title), words in _HEADLINES.items():
        runs = [run for run in lines if run["benchmark"] == benchmark]
        values = [float(run["ratios"][title]) for run in runs]
        rows = [
            (run["commit"], run["date"], str(run["cores"]), f"{value:.2f}")
            for run, value in zip(runs, values, strict=True)
        ]
        total = ("all", "", "", cell(spread(values), "{:.2f}".format))
        parts += [f"## {words[0].upper()}{words[1:]}", table(("commit", "date", "cores", title), [*rows, total])]
    return "\n\n".join(parts)
