"""Cases of a simulated world. The step ``save`` leaves its checkpoint, and a small one, for the step ``load``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..case import Case, leave
from .model import Model
from .watch import Stopped
from .world import time_coordination, time_load, write_checkpoint

_SMALL = (2, Model(1))


def measure(case: Case, folder: Path) -> list[Any]:
    contender, ranks, place = case["contender"], case["size"], Path(case["place"])
    model = Model(case["layers"])
    try:
        if case["step"] == "save":
            write_checkpoint(contender, place / "small", *_SMALL)
            return [time_coordination(contender, place / "whole", ranks, model)]
        small_ranks, small = _SMALL
        time_load(contender, place / "small", 1, small_ranks, small)  # so that all imports are done
        return [time_load(contender, place / "whole", ranks // 2, ranks, model)]
    except Stopped as stopped:
        leave([{"stopped": str(stopped)}])  # its threads may still run
