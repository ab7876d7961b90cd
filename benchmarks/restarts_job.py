"""A job under ``torchrun --max-restarts=1`` whose first rank is killed once, with the times of its restart.

For `benchmarks.restarts`. Argument: a JSON object with ``folder``, ``survive``, ``gib`` of all ranks, and ``log``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcp_tensorizer import CheckpointManager

_IMPORTED = time.time()
_STEPS = 4
_TENSORS = 100


def _started() -> float:
    """Returns the start of this process, by ``time.time()``. `psutil` computes it from the system's start time, which
    is wrong on a machine that was suspended.
    """
    ticks = int(Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[19])
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def main(job: dict[str, Any]) -> None:
    dist.init_process_group("gloo")
    moments = {"started": _started(), "imported": _IMPORTED, "connected": time.time()}
    rank, log = dist.get_rank(), Path(job["log"])
    elements = int(job["gib"] * 2**30 / 4 / _TENSORS / dist.get_world_size())
    state: dict[str, Any] = {f"t{rank}.{n}": torch.zeros(elements) for n in range(_TENSORS)}
    moments["made"] = time.time()
    with CheckpointManager(job["folder"], survive=job["survive"], stop_signals=()) as manager:
        restored = manager.restore(state) or 0
        moments["restored"] = time.time()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            _train_and_die(manager, state, rank, log)
        assert all(float(tensor[-1]) == restored for tensor in state.values())
        (log / f"{rank}.json").write_text(json.dumps({**moments, "step": restored}))


def _train_and_die(manager: CheckpointManager, state: dict[str, Any], rank: int, log: Path) -> None:
    """Trains until the last step but one is on storage and the last one is staged. Then rank 0 kills itself."""
    for step in range(1, _STEPS + 1):
        for tensor in state.values():
            tensor += 1
        manager.save(step, state, wait=step < _STEPS)
    dist.barrier()
    if rank == 0:
        (log / "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()  # fails: the other rank is gone


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
