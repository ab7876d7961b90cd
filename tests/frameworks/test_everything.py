"""One checkpoint has the whole state of a job, and a killed job loses none of it."""

import random

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchdata.stateful_dataloader import StatefulDataLoader

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter

from ..e2e.training import full
from ..lab.states import assert_same
from .jobs import die, run_job


class _Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        return torch.full((8,), number / 64)


class _Generators(Stateful):
    """The states of the random number generators of Python, NumPy and torch."""

    def state_dict(self):
        return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}

    def load_state_dict(self, state):
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])


class _Trained(Stateful):
    """The model and its optimizer."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class _Job:
    def __init__(self, seed):
        for seed_it in (random.seed, np.random.seed, torch.manual_seed):
            seed_it(seed)
        self.model = nn.Sequential(nn.Linear(8, 33), nn.Dropout(), nn.Linear(33, 8))
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        fully_shard(self.average)
        fully_shard(self.model)
        groups = [{"params": self.model[0].parameters(), "lr": 0.1}, {"params": self.model[2].parameters()}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        warm_up = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=2)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(self.optimizer, [warm_up, cosine], [2])
        data = torch.Generator().manual_seed(seed)  # a new iterator draws from it, and not from torch's own
        self.loader = StatefulDataLoader(
            _Numbers(), batch_size=2, shuffle=True, num_workers=2, generator=data, multiprocessing_context="fork"
        )
        self.batches = None
        self.step = 0
        rank = dist.get_rank()
        self.state = {
            "trained": _Trained(self.model, self.optimizer),
            "average": self.average,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "job": self,
            f"loader-{rank}": self.loader,
            f"generators-{rank}": _Generators(),
        }

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]

    def train(self):
        """Trains one step; returns its batch, and random numbers drawn in it."""
        self.batches = self.batches or iter(self.loader)
        batch = next(self.batches)
        self.scaler.scale(self.model(batch).square().sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.average.update_parameters(self.model)
        self.scheduler.step()
        self.step += 1
        return batch, random.random(), np.random.rand(3), torch.rand(3)

    def now(self):
        """Returns the whole state, gathered on every rank."""
        return full({key: value.state_dict() for key, value in self.state.items()})


def _train_and_die(rank, folder):
    """Saves after four steps; writes the state then and after three more steps."""
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    job = _Job(seed=rank)
    writer = TensorizerStorageWriter()
    for _ in range(4):
        job.train()
    saved = job.now()
    future = dcp.async_save(job.state, storage_writer=writer, checkpoint_id=folder / "4", process_group=group)
    steps = [job.train() for _ in range(3)]
    future.result()
    torch.save((saved, steps, job.now()), folder / f"state-{rank}")
    dcp.async_save(job.state, storage_writer=writer, checkpoint_id=folder / "7", process_group=group)
    die()


def _resume(rank, folder):
    dist.init_process_group("gloo")
    job = _Job(seed=10 + rank)
    dcp.load(job.state, storage_reader=TensorizerStorageReader(folder / "4"))
    return job.now(), [job.train() for _ in range(3)], job.now()


def test_a_killed_job_goes_on_as_if_nothing_had_been(tmp_path):
    """A resumed job has the state of the save, and of the killed job three steps later."""
    run_job(2, _train_and_die, tmp_path, killed=True)
    for rank, resumed in enumerate(run_job(2, _resume, tmp_path)):
        expected = torch.load(tmp_path / f"state-{rank}", weights_only=False)
        assert expected[0]["job"] == {"step": 4}
        assert_same(list(resumed), list(expected))
