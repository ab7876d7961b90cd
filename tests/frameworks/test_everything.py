"""All that a job has to remember, in one checkpoint: nothing of it is lost when the job is killed."""

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

from ..e2e.training import assert_same, full
from .jobs import die, run_job


class _Random(torch.utils.data.Dataset):
    """Items that are random in the workers."""

    def __len__(self):
        return 64

    def __getitem__(self, number):
        return torch.full((8,), float(number)) + torch.rand(8)


class _Generators(Stateful):
    """The states of the generators of Python, NumPy and torch."""

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
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


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
        self.loader = StatefulDataLoader(_Random(), batch_size=2, shuffle=True, num_workers=2)
        self.batches = None
        rank = f"rank-{dist.get_rank()}"
        self.state = {
            "trained": _Trained(self.model, self.optimizer),
            "average": self.average,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "step": 0,
            rank: {"loader": self.loader, "generators": _Generators()},
        }

    def train(self):
        """One step; what it was given, and what it has drawn."""
        self.batches = self.batches or iter(self.loader)
        batch = next(self.batches)
        self.scaler.scale(self.model(batch).square().sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.average.update_parameters(self.model)
        self.scheduler.step()
        self.state["step"] += 1
        return batch, random.random(), np.random.rand(3), torch.rand(3)
