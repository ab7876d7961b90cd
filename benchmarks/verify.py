"""How fast checkpoints are verified, against the machine's own limits: cold O_DIRECT reads, and tensorizer's hashes.

``python -m benchmarks.verify``
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import TensorizerStorageWriter
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer.tools._verify import verify_files
from dcp_tensorizer.tools._view import read_parts

from .harness import Content, cell, figure, quotient, run, spread, table
from .limits import direct_read_seconds, evict, hash_seconds
from .pages import Goal, glossary, goals, medians, page

_ELEMENTS = 1_790_000
_THREADS = 8


def measure(options: argparse.Namespace, folder: Path) -> Content:
    state = {f"layer.{n}": torch.rand(_ELEMENTS) for n in range(options.tensors)}
    seconds: dict[str, list[float]] = {name: [] for name in _ROWS}
    with TensorizerStorageWriter(folder / "checkpoint") as writer:
        dcp.save(state, storage_writer=writer, no_dist=True)
    (path,) = folder.glob("*/*.tensors")
    nbytes = path.stat().st_size
    storage = open_storage(folder / "checkpoint")
    parts = read_parts(storage)
    for _ in range(options.rounds):
        evict(folder)
        seconds["O_DIRECT read"].append(direct_read_seconds(path, nbytes, _THREADS))
        evict(folder)
        seconds["verify"].append(verify_files(storage, parts).seconds)
        seconds["hashes"].append(hash_seconds(state, os.cpu_count() or 1))
        evict(folder)
        seconds["verify --full"].append(verify_files(storage, parts, full=True).seconds)
    summary = {name: spread(nbytes / 1e9 / value for value in values) for name, values in seconds.items()}
    return {"ratios": medians(ratios(summary)), "summary": summary, "seconds": seconds}


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


def ratios(summary: dict[str, Any]) -> list[Goal]:
    """The figures that this package promises, of one run."""
    reads, hashes = figure(summary, "O_DIRECT read"), figure(summary, "hashes")
    slower = min(filter(None, (reads, hashes)), key=lambda values: values["median"])
    return [
        ("verify / raw reads", ">= 0.9", quotient(figure(summary, "verify"), reads)),
        (
            "verify --full / the slower of raw reads and checksums",
            ">= 0.9",
            quotient(figure(summary, "verify --full"), slower),
        ),
    ]


def render(content: Content) -> str:
    """The page of results."""
    summary, rounds = content["summary"], len(content["seconds"]["verify"])
    rows = [(title, cell(summary[name], "{:.2f}".format)) for name, title in _ROWS.items()]
    return page(
        content,
        "Verifying",
        _WHAT,
        f"{rounds} rounds, each with one of every kind.",
        f"verify --rounds {rounds}",
        glossary("What was measured", _WHO),
        table(("", "speed (GB/s)"), rows),
        goals(ratios(summary), form="{:.2f}".format),
    )


OPTIONS = {
    "rounds": {"type": int, "default": 5},
    "tensors": {"type": int, "default": 300, "help": "of 7 MB each"},
}

if __name__ == "__main__":
    run("verify", measure, render, about=__doc__, options=OPTIONS)
