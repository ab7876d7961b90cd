"""The GPU that the cases measure. A rehearsal uses the CPU: it shows that the cases run, but not their speed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

REHEARSAL = os.environ.get("DCP_TENSORIZER_REHEARSAL") == "1"
GPU = torch.device("cpu") if REHEARSAL else torch.device("cuda", 0)
KIND = GPU.type


def synchronize() -> None:
    if not REHEARSAL:
        torch.cuda.synchronize()


def timed(work: Callable[[], object]) -> float:
    """Returns the seconds of some work, including what it queues on the GPU."""
    synchronize()
    started = time.perf_counter()
    kept = work()
    synchronize()
    seconds = time.perf_counter() - started
    del kept
    return seconds


def pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=not REHEARSAL)


def describe() -> dict[str, object]:
    """Describes the GPU and the memory of the machine. A balloon may hold some of that memory."""
    with open("/proc/meminfo") as lines:
        memory = {line.split(":")[0]: int(line.split()[1]) // 1024 for line in lines}
    found: dict[str, object] = {"rehearsal": REHEARSAL, "torch": str(torch.__version__), "cores": os.cpu_count()}
    found |= {f"{name}_mib": memory[name] for name in ("MemTotal", "MemFree", "MemAvailable")}
    if not REHEARSAL:
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_memory_gib": round(properties.total_memory / 2**30, 1)}
        found |= {"cuda": torch.version.cuda, "driver": _driver()}
    return found


def _driver() -> str:
    try:
        with open("/proc/driver/nvidia/version") as version:
            return version.readline().strip()
    except OSError:
        return "unknown"
