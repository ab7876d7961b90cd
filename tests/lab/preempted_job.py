"""A job for torchrun that may be stopped at any moment, and `Preempted`, which runs and stops it.

``python -m tests.lab.preempted_job FOLDER LOG STEPS``, started by torchrun. Its steps compute
each element separately, so that its losses are the same on any number of ranks, bit for bit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcp_tensorizer import CheckpointManager

__all__ = ["Preempted", "losses"]

_ROOT = Path(__file__).resolve().parents[2]
_ROWS, _COLUMNS = 12, 1024  # whole rows for each rank, and whole vectors of the processor in each row
_SAVE_EVERY = 40
_SECONDS = 600.0


def _train(weight: torch.Tensor, optimizer: torch.optim.Optimizer, step: int) -> float:
    """A step; returns its loss."""
    generator = torch.Generator().manual_seed(step)
    target: torch.Tensor = torch.rand(_ROWS, _COLUMNS, generator=generator)
    if isinstance(weight, DTensor):
        target = distribute_tensor(target, weight.device_mesh, weight.placements, src_data_rank=None)
    weight.grad = weight.detach() - target
    optimizer.step()
    whole = weight.detach().full_tensor() if isinstance(weight, DTensor) else weight.detach()
    return float(whole.double().square().mean())


def _made(weight: torch.Tensor) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(weight)
    return parameter, torch.optim.AdamW([parameter], lr=1e-2, foreach=False)


def losses(steps: int) -> Iterator[tuple[int, str]]:
    """The steps and losses of an undisturbed run, from its log."""
    weight, optimizer = _made(torch.zeros(_ROWS, _COLUMNS))
    for step in range(1, steps + 1):
        yield step, _train(weight, optimizer, step).hex()


class Preempted:
    """A job that runs on several ranks, until its end or until it is stopped.

    Args:
        folder: The folder for its checkpoints and its log.
        steps: The number of steps of the whole job.
        python: The interpreter of the ranks.
    """

    def __init__(self, folder: Path, steps: int, python: str = sys.executable) -> None:
        self.checkpoints, self._log, self._steps = folder / "checkpoints", folder / "log", steps
        self._environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHON_EXEC": python}
        self._log.touch()

    @property
    def logged(self) -> list[tuple[int, str]]:
        """The steps of all runs, each with its loss; a step that was done twice is listed twice."""
        lines = self._log.read_text().splitlines()
        return [(int(step), loss) for step, loss in (line.split() for line in lines)]

    def run(self, ranks: int, *, stop_at: int | None = None, one_rank: bool = False) -> None:
        """Runs the job until it ends.

        Args:
            ranks: The number of ranks.
            stop_at: The step after which SIGTERM is sent.
            one_rank: Send the signal to one rank, not to torchrun, which sends it to all ranks.
        """
        arguments = ["-m", "tests.lab.preempted_job", self.checkpoints, self._log, self._steps]
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *arguments]
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=_ROOT,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            if stop_at is not None:
                self._stop(process, stop_at, one_rank)
            output, _ = process.communicate(timeout=_SECONDS)
        finally:
            for left in _children(process):
                left.kill()
            process.kill()
            process.wait()
        if process.returncode and (stop_at is None or one_rank):
            raise AssertionError(f"torchrun ended with {process.returncode}\n{output[-4000:]}")

    def _stop(self, process: subprocess.Popen[str], step: int, one_rank: bool) -> None:
        """Sends the signal when the step is in the log."""
        with open(self._log) as log:
            while process.poll() is None:
                line = log.readline()
                if line.endswith("\n") and int(line.split()[0]) >= step:
                    workers = [child for child in _children(process) if "tests.lab.preempted_job" in child.cmdline()]
                    os.kill(workers[step % len(workers)].pid if one_rank else process.pid, signal.SIGTERM)
                    return


def _children(process: subprocess.Popen[str]) -> list[Any]:
    try:
        return psutil.Process(process.pid).children()
    except psutil.NoSuchProcess:
        return []


def main(folder: str, log: str, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight, optimizer = _made(distribute_tensor(torch.zeros(_ROWS, _COLUMNS), mesh, [Shard(0)]))
    weight.grad = torch.zeros_like(weight)
    optimizer.step()  # makes its state, so that there is something to load into
    state = {"weight": weight.detach(), "optimizer": optimizer.state[weight]}
    for value in state["optimizer"].values():
        value.zero_()
    weight.detach().zero_()
    with CheckpointManager(folder, save_every=_SAVE_EVERY, keep_latest=2) as manager, open(log, "a") as lines:
        start = manager.restore(state) or 0
        for step in range(start + 1, steps + 1):
            loss = _train(weight, optimizer, step)
            if dist.get_rank() == 0:
                lines.write(f"{step} {loss.hex()}\n")
                lines.flush()
            manager.save(step, state, metrics={"loss": loss})
            if manager.stopping:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
