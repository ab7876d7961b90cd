"""torchft heals replicas by this package's transport: its own tests of transports, and real replicas."""

import inspect
import unittest
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.checkpointing import CheckpointTransport
from torchft.checkpointing.transport_test import make_state_dict, run_multi_recovery_test
from torchft.coordination import LighthouseServer

from dcp_tensorizer.integrations.torchft import TensorizerTransport

from ..lab.ranks import eventually, run_ranks
from .jobs import digests


def test_methods_take_what_those_of_torchft_take():
    """Methods take each argument of torchft's interface by position and by name."""
    methods = [name for name, value in vars(CheckpointTransport).items() if inspect.isfunction(value)]
    assert len(methods) == 5
    for name in methods:
        theirs, ours = getattr(CheckpointTransport, name), getattr(TensorizerTransport, name)
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


def _recover(rank):
    device = torch.device("cpu")
    run_multi_recovery_test(
        unittest.TestCase(), lambda *_: TensorizerTransport(lambda: make_state_dict(device)), device
    )
    return True


def test_the_test_of_transports_in_the_release_passes():
    """torchft's own test of transports passes, with DTensors and a timeout."""
    assert run_ranks(1, _recover, distributed=False) == [True]


def _train(rank, lighthouse, folder, in_place):
    """Trains a replica until both have done three steps together; the second joins after three steps of the first."""
    torch.manual_seed(rank.index)
    model = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.Linear(50, 7))
    inner = torch.optim.AdamW(model.parameters())

    def state():
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load(saved):
        model.load_state_dict(saved["model"])
        inner.load_state_dict(saved["optimizer"])

    if rank.index:
        assert eventually((folder / "third step").exists)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    transport = TensorizerTransport((lambda: {"user": {"default": state()}}) if in_place else None)
    manager = Manager(
        pg=ProcessGroupGloo(),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=state,
        replica_id=str(rank.index),
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=timedelta(seconds=60),
        checkpoint_transport=transport,
    )
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    together, first = 0, None
    while together < 3:
        optimizer.zero_grad()
        wrapped(torch.rand(2, 30)).sum().backward()
        optimizer.step()
        if first is None:
            first = manager.current_step()
        together += manager.num_participants() == 2
        if manager.current_step() >= 3:
            (folder / "third step").touch()
    found = manager.current_step(), first, digests(state())
    manager.shutdown()
    return found


@pytest.mark.parametrize("in_place", [True, False])
def test_a_replica_that_joins_has_the_state_of_the_other(tmp_path, in_place):
    """A replica that joins with other weights and no optimizer state has the state of the first."""
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=100)
    try:
        found = run_ranks(2, _train, lighthouse.address(), tmp_path, in_place, distributed=False)
    finally:
        lighthouse.shutdown()
    (step, first, state), (other_step, other_first, other_state) = found
    assert first == 1
    assert other_first >= 4
    assert step == other_step >= other_first + 2
    assert state == other_state
    assert sum(path[0] == "optimizer" for path in state) > 8
