"""What the GPU tests share."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dcp_tensorizer import TensorizerStorageReader

GPU = torch.device("cuda", 0)
WAIT = 120.0


def random_state(count: int, elements: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of random values on the GPU."""
    generator = torch.Generator(GPU).manual_seed(seed)
    return {f"t{n}": torch.rand(elements, device=GPU, generator=generator) for n in range(count)}


def delay() -> None:
    """Keeps the current stream busy for some 50 ms."""
    torch.cuda._sleep(100_000_000)


def load_into(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    dcp.load(state, storage_reader=TensorizerStorageReader(path))
    return state


def gpu_devices_open(pid: int) -> list[str]:
    """The GPUs that a process has opened: each that it has a context on, at least."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if re.fullmatch(r"/dev/(nvidia\d+|nvidia-uvm|dri/render.*|kfd|dxg)", target):
            found.add(target)
    return sorted(found)
