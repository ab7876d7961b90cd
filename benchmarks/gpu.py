"""What saves and loads cost on a GPU, against the bus, the disk, torch's own ways, and torch_checkpointing.

``python -m benchmarks.gpu`` on a machine with a GPU, with ``--folder`` on the file system to be measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from .harness import cell, machine, run_cases, spread, store, table

TRAINERS = (
    "no saves",
    "dcp_tensorizer",
    "dcp_tensorizer, overlap",
    "dcp_tensorizer, device",
    "torch DefaultStager, async",
    "torch DefaultStager, async, PROCESS",
    "torch_checkpointing",
)
LOADERS = ("dcp_tensorizer", "torch FileSystemReader", "tensorizer TensorDeserializer")
LIMITS = ("O_DIRECT read", "host to device")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=None, help="where to put checkpoints")
    parser.add_argument("--scale", type=float, default=1.0, help="of the model and the states; less for a try-out")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=220, help="in all; what does not fit in fails")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu needs a CUDA GPU and a CUDA build of torch")
    with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd()) as folder:
        shared = {"scale": options.scale, "folder": folder}
        cases = [
            {"what": "staging", "name": "", **shared},
            *({"what": "training", "name": name, **shared} for name in TRAINERS),
            *({"what": "load", "name": name, **shared} for name in LOADERS),
            *({"what": "limits", "name": name, **shared} for name in LIMITS),
        ]
        results = run_cases("benchmarks.gpu_case", cases, options.rounds, options.seconds)
    gpu = torch.cuda.get_device_properties(0)
    about = machine() | {
        "gpu": gpu.name,
        "gpu_memory_gib": round(gpu.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
    }
    text = f"{gpu.name}, torch {torch.__version__}, scale {options.scale:g}.\n\n{_report(results)}"
    store("gpu", {"machine": about, "results": results}, text)
    if failed := [result["case"] for result in results if "error" in result]:
        sys.exit(f"{len(failed)} cases failed: {failed}")


def _values(results: list[dict[str, Any]], what: str, name: str, field: str) -> dict[str, float] | None:
    """Of all rounds, and all saves or loads in each."""
    of_case = [r["ranks"] for r in results if "ranks" in r and (r["case"]["what"], r["case"]["name"]) == (what, name)]
    return spread(value for ranks in of_case for value in ranks.get(field, []))


def _report(results: list[dict[str, Any]]) -> str:
    staging = [
        (field, cell(_values(results, "staging", "", field), "{:.2f}".format))
        for field in ("plain pinned copy", "staging, large tensors", "staging, thousands of small ones too", "ratio")
    ]
    training = [
        (
            name,
            cell(_values(results, "training", name, "step_ms"), "{:.1f}".format),
            cell(_values(results, "training", name, "stall_ms"), "{:.1f}".format),
            cell(_values(results, "training", name, "slowdown_percent"), "{:.1f}".format),
            cell(_values(results, "training", name, "durable_s"), "{:.1f}".format),
            cell(_values(results, "training", name, "child_gpu_mib"), "{:.0f}".format),
        )
        for name in TRAINERS
    ]
    loads = [
        (name, cell(_values(results, what, name, "gb_per_s"), "{:.2f}".format))
        for what, names in (("load", LOADERS), ("limits", LIMITS))
        for name in names
    ]
    header = ("", "step, ms", "stall in async_save, ms", "slowdown over 10 steps, %", "durable after, s", "child, MiB")
    return "\n\n".join(
        [
            "Staging, GB/s: median (least-greatest).",
            table(("", "GB/s"), staging),
            "A training step, and what a save does to it. The slowdown counts everything, the stall and what `lock` "
            "or the wait for `staging_completion` costs too, over the save and the ten steps after it.",
            table(header, training),
            "Loads to the GPU, GB/s, from cold files; and the limits: the disk's, and the bus's from pinned memory.",
            table(("", "GB/s"), loads),
        ]
    )


if __name__ == "__main__":
    main()
