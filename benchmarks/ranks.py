"""What the ranks of a case have measured, on its way to the process that has started them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

__all__ = ["leave_results", "left_results"]

_NAME = "result.json"


def leave_results(folder: str | Path, mine: Any, group: dist.ProcessGroup | None = None) -> None:
    """Has the first rank write down what every rank has measured; every rank calls it."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    if dist.get_rank(group) == 0:
        Path(folder, _NAME).write_text(json.dumps(gathered))


def left_results(folder: str | Path) -> str:
    """What `leave_results` has written: a JSON array, in the order of the ranks."""
    return Path(folder, _NAME).read_text()
