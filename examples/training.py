"""A training job that saves without stopping: what to copy into your own.

FSDP2 shards model and optimizer over the ranks; every few steps each rank hands its shards to
``dcp.async_save`` and trains on. A job that has died takes up again from its newest checkpoint, on as many ranks as
there are then.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter

from .model import ByteTransformer, batch, python_sources
from .record import Loaded, Reporter, Saved, Saving, Stepped

__all__ = ["Job", "newest_checkpoint", "remove_unfinished", "train"]

_BATCH = 6  # windows of text in a step, over all ranks: 3 ranks take 2 each, 2 ranks take 3
_LEARNING_RATE = 1e-3
_SEED = 0


@dataclass(frozen=True)
class Job:
    """What to train, and where to keep it."""

    steps: int
    rendezvous: Path
    checkpoints: Path | None = None
    """The folder for checkpoints; None: save nothing."""
    save_every: int = 0
    resume_from: Path | None = None


class App(Stateful):
    """Everything that a job needs to go on: model, optimizer and how far it has come.

    DCP calls `state_dict` and `load_state_dict` by itself.
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


class Saver:
    """Saves a job's state every few steps, while it trains on."""

    def __init__(self, folder: Path, every: int, report: Reporter) -> None:
        self._folder = folder
        self._every = every
        self._report = report
        # One writer for the whole job: it keeps its buffer and its process between saves.
        self._writer = TensorizerStorageWriter()
        # A group for the saves alone: their collectives run on a thread of their own, and gloo aborts when two
        # threads use one group. Where FSDP runs on NCCL, any gloo group will do.
        self._group = dist.new_group(backend="gloo")
        self._warm = False
        self._save: Future[Any] | None = None

    def after_step(self, app: App) -> None:
        """To be called when the optimizer has done its step."""
        if not self._warm:
            # Allocates the buffer, so that the first save takes no longer than the others. Not before the first step:
            # get_state_dict would have an optimizer without state take a step to make some, and Adam counts it
            # (github.com/pytorch/pytorch/issues/164929).
            self._writer.prewarm(app.state_dict())
            self._warm = True
        if app.step % self._every == 0:
            self.save(app)

    def save(self, app: App) -> None:
        """Returns when the state is copied; the rest goes on in the background."""
        step, checkpoint = app.step, self._folder / f"step-{app.step:06}"
        digest = state_digest(app)  # for the demo's check; your job needs none
        started = time.monotonic()
        self._raise_if_failed()
        save = dcp.async_save(
            {"app": app}, checkpoint_id=checkpoint, storage_writer=self._writer, process_group=self._group
        )
        self._report(Saving(step, time.monotonic() - started, digest))
        save.add_done_callback(lambda save: self._done(save, step, checkpoint, time.monotonic() - started))
        self._save = save

    def close(self) -> None:
        """Waits for the last save. To be called before ``destroy_process_group``, which would fail it."""
        self._raise_if_failed()
        self._writer.close()

    def _raise_if_failed(self) -> None:
        """The error of a save is in its future. It is long over, as a rule; if not, the next one would wait anyway."""
        if self._save is not None:
            self._save.result()

    def _done(self, save: Future[Any], step: int, checkpoint: Path, seconds: float) -> None:
        """Called on the save's thread."""
        if save.exception() is None:
            nbytes = sum(file.stat().st_size for file in checkpoint.iterdir())
            self._report(Saved(step, seconds, nbytes))


def train(rank: int, world: int, job: Job, connection: Connection) -> None:
    """One rank of the job, from its start or a checkpoint to its last step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{job.rendezvous.resolve()}", rank=rank, world_size=world)
    report = Reporter(connection if rank == 0 else None)
    saver = Saver(job.checkpoints, job.save_every, report) if job.checkpoints else None
    app = build(world)
    if job.resume_from:
        load(app, job.resume_from, report)
    for loss in steps(app, job.steps, rank, world):
        report(Stepped(app.step, loss))
        if saver:
            saver.after_step(app)
    if saver:
        saver.close()
    dist.destroy_process_group()


def build(world: int) -> App:
    """Model and optimizer, sharded over all ranks."""
    torch.manual_seed(_SEED)  # every rank makes the same model, and keeps its shards of it
    model = ByteTransformer()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return App(model, torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True))


def steps(app: App, last: int, rank: int, world: int) -> Iterator[float]:
    """Trains up to a step; yields the loss of each batch, averaged over the ranks."""
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


def load(app: App, checkpoint: Path, report: Reporter) -> None:
    """Loads a checkpoint onto however many ranks there are now: each reads the bytes of its own shards."""
    dist.barrier()  # so that the time is that of the loading, not of waiting for ranks that have yet to start
    started = time.monotonic()
    tqdm.monitor_interval = 0  # no thread of its own: one that lives on when the interpreter ends can abort the process
    with tqdm(desc="   loading", unit="B", unit_scale=True, leave=False, disable=dist.get_rank() != 0) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        dcp.load({"app": app}, storage_reader=TensorizerStorageReader(checkpoint, on_progress=show))
    report(Loaded(app.step, time.monotonic() - started, state_digest(app)))


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint to resume from. A checkpoint is whole when it has a ``.metadata``, which is written last."""
    return max((path.parent for path in folder.glob("step-*/.metadata")), default=None)


def remove_unfinished(folder: Path) -> None:
    """Removes what a killed job was in the middle of saving. To be called when no job is running."""
    for checkpoint in folder.glob("step-*"):
        if not (checkpoint / ".metadata").exists():
            shutil.rmtree(checkpoint)


def state_digest(app: App) -> str:
    """SHA-256 of the whole state, the same on any number of ranks; a collective."""
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
