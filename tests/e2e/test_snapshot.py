"""What `async_save` returns from is a snapshot: nothing that training does afterwards reaches the checkpoint."""

import copy
import io
import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter

from ..lab.ranks import run_ranks
from ..lab.states import assert_same
from .training import full, random_tensor

MODES = ("THREAD", "PROCESS")
WORLD = 2


@dataclass
class Progress:
    """A plain object with mutable members."""

    tokens: list = field(default_factory=lambda: [1, 2, 3])
    seen: dict = field(default_factory=lambda: {"shard": 7})


class HeldPlanner(DefaultSavePlanner):
    """Lets a save look at its state dict when it is released, not before."""

    def __init__(self):
        super().__init__()
        self.released = threading.Event()

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        assert self.released.wait(20)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


def _state(rank):
    """Live training state of every kind; tensors that are not DTensors are under a key of their rank's own."""
    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(rank)
    model = nn.Linear(5, 3)
    adam = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 5)).sum().backward()
    adam.step()
    huge = random_tensor(torch.float64, (1000,), 5)
    own = {
        "model": model.state_dict(keep_vars=True),
        "optim": adam.state_dict()["state"],
        "scalar": torch.tensor(2.5 + rank),
        "shared": random_tensor(torch.int32, (9,), rank).share_memory_(),
        "list": [random_tensor(torch.bfloat16, (3,), rank + 10), torch.tensor(3)],
        "tuple": (random_tensor(torch.float16, (2, 2), rank + 20), {"deep": torch.tensor(-0.0)}),
        "view": huge[3:5],
        "expanded": random_tensor(torch.float32, (1, 4), 6).expand(3, 4),
        "transposed": random_tensor(torch.float32, (4, 6), 7).t(),
        "empty": torch.empty(0, 3, dtype=torch.bfloat16),
        "stream": io.BytesIO(b"dataloader %d" % rank),
        "object": Progress(),
        "array": random_tensor(torch.uint8, (16,), 8).numpy(),
        "plain": [1, [2, 3], {"lr": 0.1}],
    }
    return {
        f"rank{rank}": own,
        "sharded": distribute_tensor(random_tensor(torch.float32, (5, 4), 1), mesh, [Shard(0)]),
        "replicated": distribute_tensor(random_tensor(torch.bfloat16, (3,), 2), mesh, [Replicate()]),
        "dtensor_scalar": distribute_tensor(torch.tensor(1.25), mesh, [Replicate()]),
    }


def _mutate(value):
    """Changes everything that can be changed, in place."""
    if isinstance(value, DTensor):
        _mutate(value.to_local())
    elif isinstance(value, torch.Tensor):
        with torch.no_grad():
            storage = value.untyped_storage()
            torch.empty(0, dtype=torch.uint8).set_(storage).bitwise_not_()
    elif isinstance(value, io.BytesIO):
        value.seek(0)
        value.write(b"overwritten")
    elif isinstance(value, Progress):
        value.tokens.append(4)
        value.seen["shard"] = 8
    elif isinstance(value, dict | list | tuple):
        for key, item in list(value.items()) if isinstance(value, dict) else enumerate(value):
            _mutate(item)
            if isinstance(item, int | float):
                value[key] = item + 1
    elif isinstance(value, np.ndarray):
        value.fill(0)


def _save_mutate_load(rank, folder):
    outcomes = {}
    with TensorizerStorageWriter() as writer:
        for mode in MODES:
            state = _state(rank.index)
            before = copy.deepcopy(full(state))
            planner = HeldPlanner() if mode == "THREAD" else None  # the other's process takes seconds to start
            future = dcp.async_save(
                state,
                checkpoint_id=folder / mode,
                storage_writer=writer,
                planner=planner,
                process_group=rank.saves,
                async_checkpointer_type=AsyncCheckpointerType[mode],
            )
            _mutate(state)
            if planner is not None:
                planner.released.set()
            future.result()
            after = copy.deepcopy(full(state))
            target = _state(rank.index)
            _mutate(target)
            own = target[f"rank{rank.index}"]
            own["expanded"] = own["expanded"].clone()  # elements that share memory cannot be loaded into
            dist.barrier()
            dcp.load(target, storage_reader=TensorizerStorageReader(folder / mode, allow_pickle=True))
            outcomes[mode] = before, after, full(target)
    return outcomes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """By rank and mode: the state before, after it was mutated, and as it was loaded."""
    return run_ranks(WORLD, _save_mutate_load, tmp_path_factory.mktemp("snapshot"))


@pytest.mark.promise("copied-when-returned")
@pytest.mark.parametrize("mode", MODES)
def test_mutating_everything_at_once_changes_nothing_in_the_checkpoint(outcomes, mode):
    """Every live tensor and object is changed as soon as async_save returns, and the checkpoint has the old values."""
    for outcome in outcomes:
        before, _, loaded = outcome[mode]
        assert_same(loaded, before)


def test_the_mutation_reaches_everything(outcomes):
    """Nothing in the live state was left as it was, so that the test above means something."""
    for rank, outcome in enumerate(outcomes):
        before, after, _ = outcome["THREAD"]
        own_before, own_after = before.pop(f"rank{rank}"), after.pop(f"rank{rank}")
        for old, new in ((before, after), (own_before, own_after)):
            for key in old:
                if key != "empty":
                    with pytest.raises(AssertionError):
                        assert_same(new[key], old[key])
