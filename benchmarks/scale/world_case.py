"""A simulated world, in a process of its own: prints its measurements as one line of JSON.

A case of the step ``save`` leaves the checkpoint, and a small one, for cases of the step ``load``.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from .model import Model
from .watch import Stopped
from .world import time_coordination, time_load, write_checkpoint

_SMALL = (2, Model(1))


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """One step of a case; ``stopped`` says what it took too much of."""
    contender, ranks, folder = case["contender"], case["size"], Path(case["folder"])
    model = Model(case["layers"])
    try:
        if case["step"] == "save":
            write_checkpoint(contender, folder / "small", *_SMALL)
            return dict(time_coordination(contender, folder / "whole", ranks, model))
        small_ranks, small = _SMALL
        time_load(contender, folder / "small", 1, small_ranks, small)  # so that all that is imported has been
        return dict(time_load(contender, folder / "whole", ranks // 2, ranks, model))
    except Stopped as stopped:
        return {"stopped": str(stopped)}


def main() -> None:
    warnings.simplefilter("ignore")
    print(json.dumps([measure(json.loads(sys.argv[1]))]), flush=True)
    os._exit(0)  # what was stopped may have threads that go on


if __name__ == "__main__":
    main()
