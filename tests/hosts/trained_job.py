"""A job that trains a model with FSDP2 on several hosts, and tells what it saves and restores.

It can stand still in a phase of a save, so that what a test does to a host meets exactly that phase.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from dcp_tensorizer import CheckpointManager, CopyOptions, SaveLimits, unwrap
from dcp_tensorizer._saving.save import Save
from dcp_tensorizer._saving.writer_client import WriterClient
from dcp_tensorizer._staging.state_tree import TensorList

from ..lab.seams import status_of_copy
from .lab import SHARED, Host, Job, Lab

__all__ = ["PHASES", "go_on", "start"]

PHASES = ("training", "staging", "copy", "write", "flush", "commit", "after the commit")
"""Where the job can stand still. There is a copy with ``copies=2`` and no flush without ``local``."""

_WIDTH, _LAYERS = 256, 3
_OPTIONS = {
    "save_every": 8,
    "keep_latest": 2,
    "survive": 600,
    "survive_every": 1,
    "copies": 2,
    "copy_options": {"rate": 2e6},
}
_STEP_SECONDS = 0.01
_LONGEST_WRITE = 0.02  # seconds after the request in which a writer process is stopped
_STANDS = 600.0

# Stops processes until a file is there or the trainer is gone: else they would keep their locks for ever.
_STOP = """
go=$1 trainer=$2; shift 2
kill -STOP "$@"
while [ ! -e "$go" ] && kill -0 "$trainer"; do sleep 0.05; done
kill -CONT "$@"
"""


def main(words: str) -> None:
    """One rank: resumes from what it finds, and makes steps, to the last one or until it is killed.

    ``words`` are options of the manager in JSON, and: ``folder``; ``name`` of what is told; ``more``: so many steps;
    ``phase`` in which to stand still, ``after`` so many steps; ``timeout`` of the group, and ``patience`` of saves, in
    seconds.
    """
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO, force=True)
    options = _OPTIONS | json.loads(words)
    options["copy_options"] = CopyOptions(**options.get("copy_options", {}))
    folder, name, more = options.pop("folder"), options.pop("name"), options.pop("more", 0)
    phase, after, patience = options.pop("phase", ""), options.pop("after", 0), options.pop("patience", 60.0)
    seconds = options.pop("timeout", 30.0)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    rank = int(os.environ["RANK"])
    log = os.open(SHARED / f"{name}-events", os.O_WRONLY | os.O_APPEND)

    def tell(event: str, step: int, **more: object) -> None:
        entry = {"event": event, "step": step, "rank": rank, "host": os.environ["HOST"]} | more
        os.write(log, f"{json.dumps(entry)}\n".encode())

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))
    training = _Training()
    halt = _Halt(phase, lambda: tell("at", training.step), SHARED / f"{name}-go")
    limits = SaveLimits(timeout=patience, max_consecutive_failures=None)

    def report(of_save: Any) -> None:
        if of_save.remote_durable_at is not None and rank == 0:
            tell("remote", int(of_save.path.rpartition("-")[2]))

    try:
        with CheckpointManager(folder, limits=limits, on_report=report, **options) as manager:
            first = manager.restore(training.state) or 0
            tell("restored", first, right=training.is_at(first))
            training.step = first
            copies = manager._survival.copies
            ordered: dict[str, int] = {}
            while not more or training.step < first + more:
                step = training.next()
                halt.is_armed = step >= first + after
                halt.at("training")
                future = manager.save(step, training.state)
                if future is not None:
                    future.add_done_callback(lambda done, step=step: _told(done, step, rank, halt, tell))
                if copies.ordered:
                    ordered.setdefault(copies.ordered, step)
                if found := ordered.pop(copies.confirmed, 0):
                    tell("copied", found)
                if halt.is_due("copy") and copies.is_ready and status_of_copy(manager).is_running:
                    halt.at("copy", stands=False)
                tell("made", step)
                time.sleep(_STEP_SECONDS)
    except BaseException as error:
        tell("raised", training.step, words=str(unwrap(error) if isinstance(error, Exception) else error)[:500])
        raise
    tell("ended", training.step)
    os.close(log)
    dist.destroy_process_group()


def _told(done: Any, step: int, rank: int, halt: _Halt, tell: Callable[..., None]) -> None:
    """Tells the outcome of a save; where there is a flush it begins now."""
    error = done.exception()
    if rank == 0:
        tell("failed", step, words=str(error)[:300]) if error else tell("committed", step)
    if not error and halt.is_due("flush"):
        threading.Thread(target=halt.at_writer_process, args=["flush"], daemon=True).start()


class _Training:
    """A model and its optimizer, whose every number tells its place and the step."""

    def __init__(self) -> None:
        model = nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)])
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        self.step = 0
        weights, moments = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
        self.state: dict[str, Any] = {"model": weights, "optimizer": moments, "step": 0}
        states: Any = moments["state"]
        values: list[Any] = [*weights.values()]
        values += [state[name] for state in states.values() for name in ("exp_avg", "exp_avg_sq")]
        self._parts = [(value.to_local(), _places(value)) for value in values]

    def next(self) -> int:
        """Makes a step; returns its number."""
        self.step += 1
        for number, (part, places) in enumerate(self._parts):
            torch.add(places, self.step * 64 + number, out=part)
        self.state["step"] = self.step
        return self.step

    def is_at(self, step: int) -> bool:
        """Returns whether all is as after a step; after none it need not be anything."""
        right = all(torch.equal(part, places + step * 64 + n) for n, (part, places) in enumerate(self._parts))
        return step == 0 or (right and self.state["step"] == step)


def _places(value: DTensor) -> torch.Tensor:
    """This rank's part of a tensor whose numbers are their places in the whole."""
    whole = torch.arange(value.numel(), dtype=value.dtype).reshape(value.shape)
    return distribute_tensor(whole, value.device_mesh, value.placements, src_data_rank=None).to_local()


class _Halt:
    """Stands still once in a phase, until a file appears."""

    def __init__(self, phase: str, tell: Callable[[], None], go: Path) -> None:
        self._phase, self._tell, self._go = phase, tell, go
        self.is_armed = False
        own = {
            "staging": (TensorList, "fill"),
            "commit": (Save, "_complete"),
            "after the commit": (Save, "_committed"),
            "write": (WriterClient, "write"),
        }
        if phase in own:
            owner, name = own[phase]
            setattr(owner, name, self._halting(phase, getattr(owner, name)))

    def is_due(self, phase: str) -> bool:
        return self.is_armed and self._phase == phase

    def at(self, phase: str, *, stands: bool = True) -> None:
        """Stands still, if this is the phase."""
        if self.is_due(phase):
            self._phase = ""
            self._tell()
            deadline = time.monotonic() + _STANDS
            while stands and not self._go.exists() and time.monotonic() < deadline:
                time.sleep(0.001)

    def at_writer_process(self, phase: str) -> None:
        """The writer process stands still, wherever it is."""
        time.sleep(random.uniform(0.0, _LONGEST_WRITE))
        if not self.is_due(phase):
            return
        found = [p.pid for p in psutil.Process().children() if any("_writer_process.worker" in w for w in p.cmdline())]
        stopping = subprocess.Popen(["sh", "-c", _STOP, "sh", self._go, str(os.getpid()), *map(str, found)])
        self.at(phase)
        stopping.wait()

    def _halting(self, phase: str, function: Callable[..., object]) -> Callable[..., object]:
        def halting(*arguments: Any, **options: Any) -> object:
            if phase != "write":
                self.at(phase)
            elif self.is_due(phase):
                threading.Thread(target=self.at_writer_process, args=[phase], daemon=True).start()
            return function(*arguments, **options)

        return halting


def start(
    lab: Lab,
    ranks: Sequence[Host],
    *,
    how: str = "forked",
    environment: Mapping[str, str] | None = None,
    name: str = "run",
    **options: object,
) -> Job:
    """Starts the job, with a rank on each host, which may be there twice; what it tells begins anew.

    ``how``: ``forked`` from a process that has imported everything, ``ranks``, or ``torchrun``.
    """
    (lab.shared / f"{name}-go").unlink(missing_ok=True)
    told = lab.shared / f"{name}-events"
    told.unlink(missing_ok=True)
    told.touch()
    told.chmod(0o666)
    words = json.dumps({"folder": str(SHARED / name)} | options | {"name": name})
    if how == "forked":
        return lab.forked(ranks, main, words, environment=environment)
    if how == "ranks":
        return lab.ranks(ranks, "-m", __name__, words, environment=environment)
    hosts = list(dict.fromkeys(ranks))
    processes = len(ranks) // len(hosts)
    return lab.torchrun(hosts, "-m", __name__, words, processes=processes, environment=environment)


def go_on(lab: Lab, name: str = "run") -> None:
    """Lets go on what stands still."""
    (lab.shared / f"{name}-go").touch()


if __name__ == "__main__":
    main(sys.argv[1])
