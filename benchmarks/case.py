"""Runs one case in a separate process: ``python -m benchmarks.case MODULE:FUNCTION CASE``, the case as JSON.

The function gets the case and an empty folder, and returns its measurements as values that JSON can hold: a list with
the measurements of each rank, or any other value. `harness.run_case` runs this module, and reads the last line that it
prints.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

Case = dict[str, Any]
Work = Callable[[Case, Path], Any]
"""Measures a case in a folder."""

_WAITS = timedelta(minutes=10)  # for ranks that read 5 GB from a cold disk


def in_ranks(
    work: Work, world: int, case: Case, folder: Path, *, environment: Mapping[str, str] = {}, group: bool = True
) -> list[Any]:
    """Runs a function of a module on several ranks; returns the measurements of each.

    The ranks share ``folder``. Without ``group``, the function makes the process group.
    """
    import torch.multiprocessing as mp

    os.environ |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(world), **environment}
    mp.spawn(_rank, args=(work, world, case, str(folder), group), nprocs=world)
    found: list[Any] = json.loads(_file(work, folder).read_text())
    return found


def _rank(rank: int, work: Work, world: int, case: Case, folder: str, group: bool) -> None:
    import torch
    import torch.distributed as dist

    quiet()
    os.environ["RANK"] = str(rank)
    if group:
        meeting = f"file://{folder}/{work.__name__}.rendezvous"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=_WAITS)
        torch.set_num_threads(1)
    mine = work(case, Path(folder))
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, mine)
    if rank == 0:
        _file(work, Path(folder)).write_text(json.dumps(gathered))
    dist.barrier()
    dist.destroy_process_group()


def _file(work: Work, folder: Path) -> Path:
    return folder / f"{work.__name__}.json"


def leave(measured: Any) -> NoReturn:
    """Prints the measurements and ends this process without waiting for threads. The case must name a ``folder``."""
    print(json.dumps(measured), flush=True)
    os._exit(0)


def quiet() -> None:
    """Silences warnings and logs, so that only results are printed."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    case = json.loads(sys.argv[2])
    quiet()
    work: Work = getattr(importlib.import_module(module), name)
    with tempfile.TemporaryDirectory(dir=case.get("folder"), ignore_cleanup_errors=True) as folder:
        print(json.dumps(work(case, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
