"""What a save costs in the frameworks that people train with: by this package, and in the framework's own way.

``.venv-frameworks/bin/python -m benchmarks.frameworks``, after ``make frameworks`` has made that environment; with
``--folder`` on the file system to be measured. ``--redraw`` makes the page again from the stored results.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .harness import cell, machine, rewrite, run_cases, spread, store, stored, table
from .pages import glossary, opening, round_count

_LINES = {
    "accelerate": ("`install()`", 2),
    "lightning": ("`TensorizerFabricStrategy`", 2),
    "torchtitan": ("`TensorizerCheckpointManager.Config`", 2),
}
_OWN = {
    "accelerate": "`save_state` under FSDP2, which calls `dcp.save` and waits",
    "lightning": "`Fabric.save` with `ModelParallelStrategy`, which calls `dcp.save` and waits",
    "torchtitan": '`CheckpointManager` with `async_mode="async"`, which calls `dcp.async_save`',
}
_WHAT = (
    "two ranks on the CPU train a model of {layers} layers with AdamW, {gigabytes:.2f} GB in all. They save each step. "
    "torchtitan's manager runs without torchtitan's trainer, which needs a GPU."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=3, help="saves that are measured, in each round")
    parser.add_argument("--layers", type=int, default=8, help="of 16.8 MB; AdamW's state is twice as large again")
    parser.add_argument("--folder", default=None, help="where to put the checkpoints")
    parser.add_argument("--redraw", action="store_true", help="from the stored results, without measuring")
    options = parser.parse_args()
    if options.redraw:
        rewrite("frameworks", render(stored("frameworks")))
        return
    shared = {"saves": options.saves, "layers": options.layers, "folder": options.folder or str(Path.cwd())}
    cases = [{"framework": name, "ours": ours, **shared} for name in _LINES for ours in (True, False)]
    content = {
        "machine": machine(options.folder),
        "versions": {name: version(name) for name in _LINES},
        "layers": options.layers,
        "results": run_cases("benchmarks.frameworks_case", cases, options.rounds),
    }
    store("frameworks", content, render(content))


def render(content: dict[str, Any]) -> str:
    """The page of results."""
    results = content["results"]
    rows = []
    for name, (what, lines) in _LINES.items():
        for ours in (True, False):
            found = [r for r in results if (r["case"]["framework"], r["case"]["ours"]) == (name, ours)]
            way = f"this package: {what}" if ours else "its own"
            count = str(lines) if ours else "-"
            rows.append((f"{name} {content['versions'][name]}", way, count, *_measured(found)))
    nbytes = [sum(rank["nbytes"] for rank in r["ranks"]) for r in results if "ranks" in r]
    what = _WHAT.format(layers=content["layers"], gigabytes=max(nbytes, default=0) / 1e9)
    how_often = f"{round_count(results)} rounds, each with one process of every kind."
    header = ("framework", "way", "lines to write", "training waits (s)", "durable after (s)", "resumed bit for bit")
    return "\n\n".join(
        [
            opening("Frameworks", content["machine"], what, how_often, "frameworks"),
            glossary("What is compared with", _OWN),
            table(header, rows),
        ]
    )


def _measured(results: list[dict[str, Any]]) -> Iterable[str]:
    """Of one way: stall and time to durable, each of the slowest rank of a save, and whether all loads were equal."""
    ranks = [result["ranks"] for result in results if "ranks" in result]
    for figure in ("stalls", "durable"):
        slowest = (max(times) for found in ranks for times in zip(*(rank[figure] for rank in found), strict=True))
        yield cell(spread(slowest), "{:.3f}".format)
    failed = [result["error"] for result in results if "error" in result]
    equal = bool(ranks) and all(rank["equal"] for found in ranks for rank in found)
    yield f"failed: {failed[0]}" if failed else "yes" if equal else "no"


if __name__ == "__main__":
    main()
