"""torchft's transport over the keeper process, without torchft: two replicas, in one process or in two."""

import os
import signal
from collections import OrderedDict
from contextlib import closing
from datetime import timedelta

import msgspec
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dcp_tensorizer import ChecksumMismatch, ReadError, StagingError, StateMismatch, UntrustedObject, WriteError
from dcp_tensorizer._memory.replicas import Read
from dcp_tensorizer._memory.wire import Address
from dcp_tensorizer.integrations import torchft
from dcp_tensorizer.integrations.torchft import TensorizerTransport, _state_id

from ..lab.ranks import eventually, run_ranks
from ..lab.states import ALL_DTYPES, filled
from .training import bits

SECONDS = timedelta(seconds=60)
AT_ONCE = timedelta(milliseconds=10)


@pytest.fixture
def make():
    """Makes transports, which are shut down after the test."""
    made = []

    def make(*args, **options):
        made.append(TensorizerTransport(*args, **options))
        return made[-1]

    yield make
    for transport in made:
        transport.shutdown()


def healed(source, target, state, step=1):
    """The state that the target receives when the source sends it."""
    source.send_checkpoint([1], step, state, SECONDS)
    received = target.recv_checkpoint(0, source.metadata(), step, SECONDS)
    source.disallow_checkpoint()
    return received


def test_a_state_arrives_as_it_is(make):
    """Values of every dtype, and containers of every kind, empty ones among them."""
    state = {
        "user": {
            "default": OrderedDict(
                tensors={dtype: filled(dtype, (3, 5)) for dtype in ALL_DTYPES},
                optimizer={"state": {}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}]},
                odd=[torch.ones(4, 6).t(), (torch.tensor(3), None), [], torch.empty(0, 7, dtype=torch.bfloat16)],
            )
        },
        "torchft": {"step": 5, "batches_committed": 10},
        7: "seven",
    }
    received = healed(make(), make(), state)
    assert received["torchft"] == state["torchft"]
    assert received[7] == "seven"
    found, expected = received["user"]["default"], state["user"]["default"]
    assert type(found) is OrderedDict
    assert found["optimizer"] == expected["optimizer"]
    for dtype, tensor in expected["tensors"].items():
        assert found["tensors"][dtype].dtype == dtype
        assert torch.equal(bits(found["tensors"][dtype]), bits(tensor))
    assert torch.equal(found["odd"][0], torch.ones(6, 4))
    assert torch.equal(found["odd"][1][0], torch.tensor(3))
    assert found["odd"][1][1] is None
    assert found["odd"][2] == []
    assert found["odd"][3].shape == (0, 7)


def test_what_is_sent_may_change_at_once(make):
    """What is received is the state at the moment of the call, until another one is sent."""
    source, target = make(), make()
    state = {"weight": torch.zeros(300_000), "step": torch.tensor(1)}
    source.send_checkpoint([1], 1, state, SECONDS)
    state["weight"] += 1
    assert not target.recv_checkpoint(0, source.metadata(), 1, SECONDS)["weight"].any()
    source.send_checkpoint([1], 2, state, SECONDS)
    assert target.recv_checkpoint(0, source.metadata(), 2, SECONDS)["weight"].all()
    with pytest.raises(ReadError, match="does not hold this part"):
        target.recv_checkpoint(0, source.metadata(), 1, AT_ONCE)


def test_tensors_of_any_size_arrive(make):
    """Parts of a range need not follow each other: between them is the alignment of tensors, or what nobody wants."""
    state = {f"w{number}": torch.arange(300_001 + 7 * number).to(torch.uint8) for number in range(12)}
    received = healed(make(), make(), state)
    assert all(torch.equal(received[key], tensor) for key, tensor in state.items())


def test_a_tensor_without_memory_is_not_filled_in_place(make):
    """A meta tensor is replaced by a new one with the values."""
    own = {"weight": torch.empty(4, device="meta")}
    assert torch.equal(healed(make(), make(lambda: own), {"weight": torch.arange(4.0)})["weight"], torch.arange(4.0))


def test_tensors_that_are_there_are_filled_in_place(make):
    """Where key, shape and dtype are the same; others are new."""
    own = {"weight": torch.zeros(1000), "other": torch.zeros(3), "cast": torch.zeros(2), "step": 0}
    state = {"weight": torch.rand(1000), "other": torch.rand(4), "cast": torch.ones(2, dtype=torch.float64), "step": 9}
    received = healed(make(), make(lambda: own), state)
    assert received["weight"] is own["weight"]
    assert torch.equal(own["weight"], state["weight"])
    for key in ("other", "cast"):
        assert torch.equal(received[key], state[key])
        assert not own[key].any()
    assert received["step"] == 9


def test_a_state_that_is_not_offered_is_waited_for(make):
    """As long as the timeout says: the replica that sends may be later."""
    source, target = make(), make()
    with pytest.raises(ReadError, match=r"does not hold this part of the state \(timed out after 0.01 s\)"):
        target.recv_checkpoint(0, source.metadata(), 1, AT_ONCE)
    source.send_checkpoint([1], 1, {"weight": torch.ones(10)}, SECONDS)
    source.disallow_checkpoint()
    with pytest.raises(ReadError, match="timed out"):
        target.recv_checkpoint(0, source.metadata(), 1, AT_ONCE)


def test_the_memory_is_freed_when_all_have_it(make):
    """The keeper has no other descriptor of it, and the trainer no mapping."""
    source, target = make(), make()
    healed(source, target, {"weight": torch.ones(1_000_000)})
    keeper = psutil.Process(source._keeper.pid)
    folders = [f"/proc/{keeper.pid}/fd", "/proc/self/fd"]

    def buffers():
        found = []
        for folder in folders:
            for name in os.listdir(folder):
                try:
                    place, size = os.readlink(f"{folder}/{name}"), os.stat(f"{folder}/{name}").st_size
                except FileNotFoundError:  # the descriptor of the listing
                    continue
                found += [place] if "memfd:dcp_tensorizer" in place and size >= 4_000_000 else []
        return found

    assert eventually(lambda: not buffers()), buffers()


def test_who_does_not_know_the_secret_reads_nothing(make):
    """The metadata has it; a transport of another kind has other metadata."""
    source, target = make(), make()
    source.send_checkpoint([1], 1, {"weight": torch.ones(10)}, SECONDS)
    host, port, _ = source.metadata().split(",")
    _, _, other = target.metadata().split(",")
    with pytest.raises(ReadError, match=r"cannot read rank .* from the keeper"):
        target.recv_checkpoint(0, f"{host},{port},{other}", 1, AT_ONCE)
    with pytest.raises(ReadError, match="the other replica uses another transport"):
        target.recv_checkpoint(0, "http://host:1234/checkpoint/", 1, AT_ONCE)


def test_a_secret_serves_for_one_state(make):
    """The metadata stays as long as the state is offered, and before; torchft asks for it in each step.

    The keeper stays, too: while another one started, other replicas could finish a step without this one.
    """
    source, target = make(), make()
    before, keeper = source.metadata(), source._keeper.pid
    source.send_checkpoint([1], 1, {"weight": torch.ones(10)}, SECONDS)
    assert source.metadata() == before
    source.disallow_checkpoint()
    address = msgspec.json.decode(before, type=Address)  # as any reader of the metadata in a log can do
    with closing(address.connect()) as connected:
        after = source.metadata()
        assert (after != before, source._keeper.pid) == (True, keeper)
        with pytest.raises(ConnectionError):
            connected.ask(Read(_state_id(2), 0), object)
    source.send_checkpoint([1], 2, {"weight": torch.ones(10)}, SECONDS)
    with pytest.raises(ReadError, match=r"cannot read rank .* from the keeper"):
        target.recv_checkpoint(0, before, 2, AT_ONCE)
    assert target.recv_checkpoint(0, after, 2, SECONDS)["weight"].all()


def test_an_environment_with_other_values_than_text(make, monkeypatch):
    """As torchft's own tests put it in the place of the process's: the keeper starts without these."""
    monkeypatch.setattr(os, "environ", {**os.environ, "MASTER_PORT": 29500, 7: "seven"})
    assert healed(make(), make(), {"weight": torch.ones(10)})["weight"].all()


def test_objects_that_could_run_code_are_refused(make):
    """By name, and nothing has changed; ``allow_pickle`` allows them."""
    own = {"weight": torch.zeros(10)}
    source = make()
    source.send_checkpoint([1], 1, {"weight": torch.ones(10), "own": frozenset([1]), "code": print}, SECONDS)
    with pytest.raises(UntrustedObject, match=r"\['code'\].*print"):
        make(lambda: own).recv_checkpoint(0, source.metadata(), 1, SECONDS)
    assert not own["weight"].any()
    target = make(reader_options={"allow_pickle": True})
    assert target.recv_checkpoint(0, source.metadata(), 1, SECONDS)["code"] is print


def test_what_cannot_be_sent_is_named(make):
    """A value that cannot be pickled, and tensors without values."""
    with pytest.raises(WriteError, match=r"\['model'\]\['bad'\].*pickle"):
        make().send_checkpoint([1], 1, {"model": {"bad": lambda: 0}}, SECONDS)
    with pytest.raises(StagingError, match=r"\['model'\]\['bad'\]"):
        make().send_checkpoint([1], 1, {"model": {"bad": torch.empty(2, device="meta")}}, SECONDS)


def test_damaged_memory_is_not_received(make):
    """The digests are those of the moment it was sent."""
    source, target = make(), make()
    source.send_checkpoint([1], 1, {"weight": torch.ones(10_000)}, SECONDS)
    address = source.metadata()
    target.recv_checkpoint(0, address, 1, SECONDS)
    (buffer,) = source._keeper.held.values()
    os.pwrite(buffer.fd, b"damage", 5_000)
    with pytest.raises(ChecksumMismatch, match=r"\['weight'\]"):
        target.recv_checkpoint(0, address, 1, SECONDS)


def test_a_keeper_that_died_is_replaced(make):
    """The next metadata is that of another one. A state that was offered by the old one is an error, for torchft to
    try again.
    """
    source, target = make(), make()
    before = source.metadata()
    source.send_checkpoint([1], 1, {"weight": torch.ones(10)}, SECONDS)
    os.kill(source._keeper.pid, signal.SIGKILL)
    source._keeper._popen.wait()
    with pytest.raises(ReadError, match=r"cannot read rank .* from the keeper"):
        target.recv_checkpoint(0, before, 1, AT_ONCE)
    source.disallow_checkpoint()
    assert source.metadata() != before
    assert healed(source, target, {"weight": torch.ones(10)}, 2)["weight"].all()


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ({"lighthouse": "10.0.0.1", "here": "10.0.0.2"}, "10.0.0.1"),
        ({"lighthouse": "127.0.0.1", "here": "10.0.0.2"}, "10.0.0.2"),
        ({"here": "127.0.1.1", "192.0.2.1": "10.0.0.3"}, "10.0.0.3"),
        ({"lighthouse": "::1", "here": "127.0.1.1"}, "127.0.0.1"),
    ],
)
def test_the_address_is_one_that_other_hosts_reach(monkeypatch, addresses, expected):
    """Towards the lighthouse, by the host's name, or by the default route; none of these may lead back to itself."""

    def towards(name):
        if name not in addresses:
            raise OSError("no route")
        return addresses[name]

    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://lighthouse:29510")
    monkeypatch.setattr(torchft.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(torchft, "address_towards", towards)
    assert torchft._own_address() == expected


def sharded(seed, *, with_steps):
    """A model and an optimizer on a mesh of this replica."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    model = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.Linear(50, 7))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    if with_steps:
        model(torch.ones(2, 30)).sum().backward()
        optimizer.step()
    return model, optimizer


def nested(model, optimizer):
    return {"user": {"default": {"model": model.state_dict(), "optimizer": optimizer.state_dict()}}}


def heal(rank, folder):
    """Two replicas: the first one sends, and trains on; the second one receives."""
    dist.init_process_group("gloo", f"file://{folder}/store-{rank.index}", rank=0, world_size=1)
    model, optimizer = sharded(rank.index, with_steps=rank.index == 0)
    place, done = folder / "metadata", folder / "done"
    transport = TensorizerTransport(lambda: nested(model, optimizer))
    if rank.index == 0:
        expected = [part.clone() for part in parts(nested(model, optimizer))]
        transport.send_checkpoint([1], 3, nested(model, optimizer), SECONDS)
        (folder / "new").write_text(transport.metadata())
        (folder / "new").rename(place)
        model(torch.ones(2, 30)).sum().backward()  # while it is read
        optimizer.step()
        assert eventually(done.exists)
    else:
        assert eventually(place.exists)
        received = transport.recv_checkpoint(0, place.read_text(), 3, SECONDS)
        default = received["user"]["default"]
        moment = default["optimizer"]["state"][0]["exp_avg"]
        assert isinstance(moment, DTensor)
        assert moment.placements == model[0].weight.placements
        model.load_state_dict(default["model"])
        optimizer.load_state_dict(default["optimizer"])
        expected = [part.clone() for part in parts(nested(model, optimizer))]
        bare = TensorizerTransport()
        with pytest.raises(StateMismatch, match="Pass TensorizerTransport the state_dict"):
            bare.recv_checkpoint(0, place.read_text(), 3, SECONDS)
        bare.shutdown()
        done.touch()
    transport.shutdown()
    dist.destroy_process_group()
    return expected


def parts(state):
    leaves = torch.utils._pytree.tree_leaves(state)
    return [leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def test_a_sharded_replica_gets_the_state_of_its_own_mesh(tmp_path):
    """In processes of their own, each with a mesh: also the state of an optimizer that has none."""
    sent, received = run_ranks(2, heal, tmp_path, distributed=False)
    assert len(sent) == len(received) > 8
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(sent, received, strict=True))
