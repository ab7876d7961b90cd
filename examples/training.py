"""A training job that saves while it trains: a template for your own job.

FSDP2 shards model and optimizer over the ranks. Every few steps, each rank passes its shards to a `CheckpointManager`,
and continues training. A killed job resumes from its newest checkpoint, on any number of ranks.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dcp_tensorizer import CheckpointManager
from dcp_tensorizer.progress import ProgressLine

from .model import ByteTransformer, batch, python_sources
from .record import Loaded, Reporter, Saved, Saving, Stepped

__all__ = ["Job", "train", "train_on_host"]

_BATCH = 6  # windows of text in a step, over all ranks: 3 ranks take 2 each, 2 ranks take 3
_LEARNING_RATE = 1e-3
_SEED = 0
_SURVIVE_SECONDS = 60.0


@dataclass(frozen=True)
class Job:
    """What to train, and where to save it."""

    steps: int
    rendezvous: Path
    checkpoints: Path | None = None
    """The folder for checkpoints; None: neither save nor resume."""
    save_every: int = 0
    """Steps between two saves; 0: save nothing."""
    survives: bool = False
    """Hold each step in memory, for the next run."""
    copies: int = 1
    """Number of hosts that hold each step in memory."""


class App(Stateful):
    """Everything that a job needs to resume: the model, the optimizer and the number of its last step.

    DCP calls `state_dict` and `load_state_dict`.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.step = state_dict["step"]


def save(app: App, manager: CheckpointManager, every: int, report: Reporter) -> None:
    """Saves if a save is due, and returns when the state is copied. Call it after each optimizer step."""
    step, checkpoint = app.step, Path(manager.path(app.step))
    digest = "" if step % every else state_digest(app)  # for the demo's check; your job needs none
    started = time.monotonic()
    future = manager.save(step, {"app": app})
    if future is None:
        return
    report(Saving(step, time.monotonic() - started, digest))

    def done(_: object) -> None:
        if future.exception() is None:
            nbytes = sum(file.stat().st_size for file in checkpoint.iterdir())
            report(Saved(step, time.monotonic() - started, nbytes))

    future.add_done_callback(done)


def train(rank: int, world: int, job: Job, connection: Connection) -> None:
    """Runs one rank of the job, from its start or a checkpoint to its last step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{job.rendezvous.resolve()}", rank=rank, world_size=world)
    report = Reporter(connection if rank == 0 else None)
    app = build(world)
    with nullcontext() if job.checkpoints is None else open_manager(job) as manager:
        if manager is not None:
            load(app, manager, report)
        for loss in steps(app, job.steps, rank, world):
            report(Stepped(app.step, loss))
            if manager is not None and job.save_every:
                save(app, manager, job.save_every, report)
    dist.barrier()  # Python must not end while gloo's threads still hold tensors of the last collective
    dist.destroy_process_group()


def train_on_host(job: Job, connection: Connection) -> None:
    """Runs `train` as a rank that a launcher has started on a host."""
    train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), job, connection)


def open_manager(job: Job) -> CheckpointManager:
    """Makes the manager of a job's checkpoints. Close it before ``destroy_process_group``."""
    assert job.checkpoints is not None
    return CheckpointManager(
        job.checkpoints,
        name="step-{:06}",
        save_every=job.save_every or None,
        survive=_SURVIVE_SECONDS if job.survives else 0,
        survive_every=1 if job.survives else None,
        copies=job.copies,
        reader_options={"on_progress": ProgressLine("   loading")},
    )


def build(world: int) -> App:
    """Returns the model and the optimizer, sharded over all ranks."""
    torch.manual_seed(_SEED)  # every rank makes the same model, and holds its own shards
    model = ByteTransformer()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return App(model, torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True))


def steps(app: App, last: int, rank: int, world: int) -> Iterator[float]:
    """Trains up to step ``last``; yields the loss of each batch, averaged over the ranks."""
    text = python_sources()
    while app.step < last:
        app.step += 1
        loss = app.model(batch(text, app.step, _BATCH, rank, world))
        loss.backward()
        app.optimizer.step()
        app.optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        yield total.item() / world


def load(app: App, manager: CheckpointManager, report: Reporter) -> None:
    """Loads the newest checkpoint, on any number of ranks: each rank reads the bytes of its own shards."""
    dist.barrier()  # so that the measured time does not include waiting for ranks that have yet to start
    started = time.monotonic()
    if manager.restore({"app": app}) is not None:
        report(Loaded(app.step, time.monotonic() - started, state_digest(app)))


def state_digest(app: App) -> str:
    """Returns the SHA-256 of the whole state, which is the same on any number of ranks. Collective."""
    digest = hashlib.sha256()
    for key, value in _leaves(app.state_dict()):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        content = whole.numpy().data if isinstance(whole, torch.Tensor) else repr(whole).encode()
        digest.update(key.encode())
        digest.update(content)
    return digest.hexdigest()


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name in sorted(value):
            yield from _leaves(value[name], f"{key}/{name}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{key}/{number}")
    else:
        yield key, value
