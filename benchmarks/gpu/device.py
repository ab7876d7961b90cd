"""The GPU that the cases measure; in a rehearsal it is the CPU, which shows that they run, and nothing of speed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

REHEARSAL = os.environ.get("DCP_TENSORIZER_REHEARSAL") == "1"
GPU = torch.device("cpu") if REHEARSAL else torch.device("cuda", 0)
KIND = GPU.type


def synchronize() -> None:
    """Waits for everything that is queued on the GPU."""
    if not REHEARSAL:
        torch.cuda.synchronize()


def timed(work: Callable[[], object]) -> float:
    """Seconds of some work and of all that it queues."""
    synchronize()
    started = time.perf_counter()
    kept = work()
    synchronize()
    seconds = time.perf_counter() - started
    del kept
    return seconds


def pinned(nbytes: int) -> torch.Tensor:
    """Pinned host memory, of torch's own making."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=not REHEARSAL)


def describe() -> dict[str, object]:
    """The GPU's name and memory, and the machine's memory as it is now: a balloon may hold some of it."""
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
