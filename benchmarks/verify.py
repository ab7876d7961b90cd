"""How fast checkpoints are verified, against the machine's own limits: cold O_DIRECT reads, and tensorizer's hashes.

``python -m benchmarks.verify``, with ``--folder`` on the file system to be measured. ``--redraw`` makes the page again
from the stored results, and measures nothing.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import TensorizerStorageWriter
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer.tools._verify import verify
from dcp_tensorizer.tools._view import read_parts

from .harness import cell, compare, machine, rewrite, spread, store, stored, table
from .limits import direct_read_seconds, evict, hash_seconds
from .pages import glossary, goals, opening

_TENSORS, _ELEMENTS = 300, 1_790_000
_THREADS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to put the checkpoint")
    parser.add_argument("--redraw", action="store_true", help="from the stored results, without measuring")
    options = parser.parse_args()
    if options.redraw:
        rewrite("verify", render(stored("verify")))
    else:
        content = measure(options.folder, options.rounds)
        store("verify", content, render(content))


def measure(where: str | None, rounds: int) -> dict[str, Any]:
    state = {f"layer.{n}": torch.rand(_ELEMENTS) for n in range(_TENSORS)}
    seconds: dict[str, list[float]] = {name: [] for name in _ROWS}
    with tempfile.TemporaryDirectory(dir=where or Path.cwd()) as name:
        folder = Path(name) / uuid.uuid4().hex
        with TensorizerStorageWriter(folder) as writer:
            dcp.save(state, storage_writer=writer, no_dist=True)
        (path,) = folder.glob("*.tensors")
        nbytes = path.stat().st_size
        storage = open_storage(folder)
        parts = read_parts(storage)
        for _ in range(rounds):
            evict(folder)
            seconds["O_DIRECT read"].append(direct_read_seconds(path, nbytes, _THREADS))
            evict(folder)
            seconds["verify"].append(verify(storage, parts).seconds)
            seconds["hashes"].append(hash_seconds(state, os.cpu_count() or 1))
            evict(folder)
            seconds["verify --full"].append(verify(storage, parts, full=True).seconds)
    summary = {name: spread(nbytes / 1e9 / value for value in values) for name, values in seconds.items()}
    return {"machine": machine(where), "ratios": ratios(summary), "summary": summary, "seconds": seconds}


_ROWS = {
    "O_DIRECT read": "raw reads: O_DIRECT, by 8 threads",
    "verify": "`dcp-tensorizer verify`",
    "hashes": "tensorizer's checksums alone, on all cores, of data in memory",
    "verify --full": "`dcp-tensorizer verify --full`",
}
_WHAT = (
    "how fast a checkpoint of 2.1 GB (300 tensors of 7 MB) is verified. Its files are not in the page cache, so "
    "the disk is read. No peer is measured here. The raw reads and the checksums alone are the machine's own limits."
)
_WHO = {
    "verify": "reads all tensors and checks the checksums that this package keeps for blocks.",
    "verify --full": "reads every byte of the files and checks tensorizer's own checksums, too.",
}


def ratios(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The figures that this package promises, from medians of one run."""
    medians = {name: values["median"] for name, values in summary.items() if values is not None}
    slower = min(medians["O_DIRECT read"], medians["hashes"])
    return [
        ("verify / raw reads", ">= 0.9", f"{medians['verify'] / medians['O_DIRECT read']:.2f}"),
        ("verify --full / the slower of raw reads and checksums", ">= 0.9", f"{medians['verify --full'] / slower:.2f}"),
    ]


def _note(summary: dict[str, Any]) -> str:
    """What the ranges say about verifying and raw reads."""
    overlap = compare(summary["O_DIRECT read"], summary["verify"], more_is_better=True) == "overlap"
    shown = "The ranges of verify and of raw reads overlap. So this run does not show which of the two is faster."
    return shown if overlap else ""


def render(content: dict[str, Any]) -> str:
    """The page of results."""
    summary, rounds = content["summary"], len(content["seconds"]["verify"])
    rows = [(title, cell(summary[name], "{:.2f}".format)) for name, title in _ROWS.items()]
    how_often = f"{rounds} rounds, each with one of every kind."
    return "\n\n".join(
        [
            opening("Verifying", content["machine"], _WHAT, how_often, f"verify --rounds {rounds}"),
            glossary("What was measured", _WHO),
            table(("", "speed (GB/s)"), rows),
            goals(ratios(summary), _note(summary)),
        ]
    )


if __name__ == "__main__":
    main()
