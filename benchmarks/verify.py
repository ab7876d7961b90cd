"""How fast checkpoints are verified, against the machine's own limits: cold O_DIRECT reads, and tensorizer's hashes.

``python -m benchmarks.verify``, with ``--folder`` on the file system to be measured.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import uuid
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import TensorizerStorageWriter
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._tools.checkpoint_view import read_parts
from dcp_tensorizer._tools.verify import verify

from .harness import cell, machine, spread, store, table
from .limits import direct_read_seconds, evict, hash_seconds

_TENSORS, _ELEMENTS = 300, 1_790_000
_THREADS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to put the checkpoint")
    options = parser.parse_args()
    state = {f"layer.{n}": torch.rand(_ELEMENTS) for n in range(_TENSORS)}
    seconds: dict[str, list[float]] = {name: [] for name in ("O_DIRECT read", "verify", "hashes", "verify --full")}
    with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd()) as name:
        folder = Path(name) / uuid.uuid4().hex
        with TensorizerStorageWriter(folder) as writer:
            dcp.save(state, storage_writer=writer, no_dist=True)
        (path,) = folder.glob("*.tensors")
        nbytes = path.stat().st_size
        storage = open_storage(folder)
        parts = read_parts(storage)
        for _ in range(options.rounds):
            evict(folder)
            seconds["O_DIRECT read"].append(direct_read_seconds(path, nbytes, _THREADS))
            evict(folder)
            seconds["verify"].append(verify(storage, parts).seconds)
            seconds["hashes"].append(hash_seconds(state, os.cpu_count() or 1))
            evict(folder)
            seconds["verify --full"].append(verify(storage, parts, full=True).seconds)
    summary = {name: spread(nbytes / 1e9 / value for value in values) for name, values in seconds.items()}
    medians = {name: values["median"] for name, values in summary.items() if values is not None}
    slower = min(medians["O_DIRECT read"], medians["hashes"])
    ratios = [
        ("verify / cold O_DIRECT reads", ">= 0.9", f"{medians['verify'] / medians['O_DIRECT read']:.2f}"),
        ("verify --full / the slower of reads and hashes", ">= 0.9", f"{medians['verify --full'] / slower:.2f}"),
    ]
    rows = [(name, cell(values, "{:.2f}".format)) for name, values in summary.items()]
    text = f"{table(('', 'GB/s'), rows)}\n\n{table(('ratio of medians', 'wanted', 'measured'), ratios)}"
    store("verify", {"machine": machine(), "ratios": ratios, "summary": summary, "seconds": seconds}, text)


if __name__ == "__main__":
    main()
