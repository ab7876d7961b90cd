"""Resharding: whatever parallelism a state was saved under, it loads under any other, with Adam's state."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._loading import deliver
from dcp_tensorizer._loading.run import fetch

from ..lab.ranks import in_turn, run_ranks
from ..lab.states import assert_same
from .training import AppState, full, random_tensor

WORLD = 4
FULL = StateDictOptions(full_state_dict=True)


class Uneven(nn.Module):
    """Rows that ranks share evenly, and in another dtype rows that they do not: of three, the last of four has none.

    Not unevenly throughout: torch does not distribute a dimension that FSDP and TP both shard, unless it is even.
    """

    def __init__(self, rows):
        super().__init__()
        self.net1 = nn.Linear(6, 8)
        self.net2 = nn.Linear(8, rows, dtype=torch.bfloat16)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def _ddp(model, world_size):
    return DistributedDataParallel(model)


def _fsdp(model, world_size):
    for layer in (model.net1, model.net2):
        fully_shard(layer)
    return fully_shard(model)


def _hsdp(model, world_size):
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    for layer in (model.net1, model.net2):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _tp(model, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    return parallelize_module(model, mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})


def _fsdp_and_tp(model, world_size):
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
    for layer in (model.net1, model.net2):
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def _fsdp1(model, world_size):
    for name in ("net1", "net2"):
        layer = FullyShardedDataParallel(getattr(model, name), use_orig_params=True, device_id=torch.device("cpu"))
        setattr(model, name, layer)
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def _plain(model, world_size):
    return model


LAYOUTS = {"ddp": _ddp, "fsdp": _fsdp, "hsdp": _hsdp, "tp": _tp, "fsdp and tp": _fsdp_and_tp, "fsdp1": _fsdp1}
# torch's planner cannot load model and optimizer of FSDP1 together on a rank that has no rows of a parameter.
PAIRS = [(source, target, 7 if "fsdp1" in (source, target) else 3) for source in LAYOUTS for target in LAYOUTS]


def _build(wrap, world_size, rows):
    model = wrap(Uneven(rows), world_size)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def _reference(rows):
    """The whole state, of any bits that its dtypes can have."""
    model, optimizer = _build(_plain, 1, rows)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = AppState(model, optimizer).state_dict()
    tensors = list(state["model"].values())
    tensors += [tensor for states in state["optim"]["state"].values() for tensor in states.values()]
    for seed, tensor in enumerate(tensors):
        tensor.detach().copy_(random_tensor(tensor.dtype, tensor.shape, seed))
    return state


def _gathered(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer, options=FULL)
    return full({"model": model_state, "optim": optimizer_state})


def _save_models(rank, folder):
    with TensorizerStorageWriter() as writer:
        for name, rows in sorted({(source, rows) for source, _, rows in PAIRS}):
            reference = _reference(rows)
            model, optimizer = _build(LAYOUTS[name], rank.world_size, rows)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=reference["model"],
                optim_state_dict=reference["optim"],
                options=FULL,
            )
            dcp.async_save(
                {"app": AppState(model, optimizer)},
                checkpoint_id=folder / f"{name} {rows}",
                storage_writer=writer,
                process_group=rank.saves,
            )
    dist.barrier()
    return _load_models(rank, folder)


def _load_models(rank, folder):
    """Loads what every layout saved into every layout."""
    loaded = {}
    for source, target, rows in PAIRS:
        model, optimizer = _build(LAYOUTS[target], rank.world_size, rows)
        reader = TensorizerStorageReader(folder / f"{source} {rows}")
        dcp.load({"app": AppState(model, optimizer)}, storage_reader=reader)
        loaded[source, target, rows] = _gathered(model, optimizer)
    return loaded


TENSORS = {
    "three rows": (torch.bfloat16, (3, 10)),
    "uneven": (torch.float32, (5, 7)),
    "bytes": (torch.float8_e4m3fn, (1, 9)),
    "large": (torch.float32, (301, 257)),
    "deep": (torch.complex64, (3, 2, 5, 4)),
}
PLACEMENTS = {
    "rows": ((WORLD,), [Shard(0)]),
    "columns": ((WORLD,), [Shard(1)]),
    "replicated": ((WORLD,), [Replicate()]),
    "rows of columns": ((2, 2), [Shard(0), Shard(1)]),
    "columns of rows": ((2, 2), [Shard(1), Shard(0)]),
    "rows of rows": ((2, 2), [Shard(0), Shard(0)]),
    "replicated columns": ((2, 2), [Replicate(), Shard(1)]),
}


def _sources():
    return {
        f"{name}, {placement}": random_tensor(dtype, shape, seed)
        for seed, (name, (dtype, shape)) in enumerate(TENSORS.items())
        for placement in PLACEMENTS
    }


def _reshard(rank, folder):
    """Saves each tensor under each placement, and loads all of them into each."""
    meshes = {shape: init_device_mesh("cpu", shape) for shape in ((WORLD,), (2, 2))}
    state = {}
    for key, value in _sources().items():
        shape, placements = PLACEMENTS[key.split(", ")[1]]
        state[key] = _distribute(value, meshes[shape], placements)
    with TensorizerStorageWriter(folder) as writer:
        dcp.async_save(state, storage_writer=writer, process_group=rank.saves).result()
    loaded = {}
    for name, (shape, placements) in PLACEMENTS.items():
        target = {key: _zeros(value, meshes[shape], placements) for key, value in _sources().items()}
        dcp.load(target, storage_reader=TensorizerStorageReader(folder), process_group=rank.saves)
        loaded[name] = full(target)
    on_meta = {key: torch.empty_like(value, device="meta") for key, value in _sources().items()}
    dcp.load(on_meta, storage_reader=TensorizerStorageReader(folder), process_group=rank.saves)
    loaded["meta"] = on_meta
    return loaded


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folder, and by rank what each layout loaded of each, on four ranks."""
    folder = tmp_path_factory.mktemp("layouts")
    return folder, run_ranks(WORLD, _save_models, folder)


@pytest.fixture(scope="module")
def resharded(tmp_path_factory):
    """The folder, and by rank and placement the tensors that were loaded."""
    folder = tmp_path_factory.mktemp("placements")
    return folder, run_ranks(WORLD, _reshard, folder)


@pytest.mark.parametrize(("source", "target", "rows"), PAIRS)
def test_every_layout_loads_into_every_layout(models, source, target, rows):
    """Model and Adam saved under one parallelism are bit-exact under another, on all four ranks."""
    for loaded in models[1]:
        assert_same(loaded[source, target, rows], _reference(rows))


def test_every_layout_of_four_ranks_loads_into_every_layout_of_two(models):
    """What four ranks saved is bit-exact on two, under every parallelism."""
    for loaded in run_ranks(2, _load_models, models[0]):
        for (source, target, rows), state in loaded.items():
            assert_same(state, _reference(rows), f"{source} -> {target}")


@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_loads_into_a_plain_model(models, source):
    """What four ranks saved loads without any rank into a plain model."""
    model, optimizer = _build(_plain, 1, 7)
    dcp.load({"app": AppState(model, optimizer)}, storage_reader=TensorizerStorageReader(models[0] / f"{source} 7"))
    assert_same(AppState(model, optimizer).state_dict(), _reference(7))


@pytest.mark.parametrize("placement", [*PLACEMENTS, "meta"])
def test_every_placement_loads_into_every_placement(resharded, placement):
    """Rows, columns, replicas and two-dimensional shards, uneven and empty ones too, load as any other.

    Targets on the meta device are given memory, as DCP does.
    """
    for loaded in resharded[1]:
        assert_same(loaded[placement], _sources())


def test_every_placement_loads_into_plain_tensors(resharded):
    """Whole tensors are put together from shards of every placement."""
    loaded = {key: torch.zeros_like(value) for key, value in _sources().items()}
    dcp.load(loaded, storage_reader=TensorizerStorageReader(resharded[0]))
    assert_same(loaded, _sources())


def _targets():
    """For one stored tensor of (6, 4): targets, and what they should hold."""
    source = random_tensor(torch.float32, (6, 4), 1)
    finite = torch.linspace(-3, 3, 24).reshape(6, 4)
    return {
        "transposed": (source, torch.zeros(4, 6).t()),
        "a part of a larger tensor": (source, torch.zeros(8, 9)[1:7, 2:6]),
        "every second element": (source, torch.zeros(12, 8)[::2, ::2]),
        "requires grad": (source, nn.Parameter(torch.zeros(6, 4))),
        "another layout that requires grad": (source, nn.Parameter(torch.zeros(4, 6)).t()),
        "bfloat16": (finite, torch.zeros(6, 4, dtype=torch.bfloat16)),
        "float64": (finite, torch.zeros(6, 4, dtype=torch.float64)),
        "float16 and transposed": (finite, torch.zeros(4, 6, dtype=torch.float16).t()),
    }


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A checkpoint with the source of every kind of target."""
    folder = tmp_path_factory.mktemp("targets")
    with TensorizerStorageWriter(folder) as writer:
        dcp.save({kind: source for kind, (source, _) in _targets().items()}, storage_writer=writer)
    return folder


@pytest.mark.parametrize("kind", _targets())
def test_every_kind_of_target(stored, kind):
    """A target may have any strides, require grad, or be of another float dtype; it keeps its memory."""
    source, target = _targets()[kind]
    address, flags = target.data_ptr(), (target.requires_grad, target.stride())
    loaded = {kind: target}
    dcp.load(loaded, storage_reader=TensorizerStorageReader(stored))
    assert loaded[kind] is target
    assert (target.data_ptr(), (target.requires_grad, target.stride())) == (address, flags)
    assert_same(target, source.to(target.dtype))


def _distribute(value, mesh, placements):
    if value.itemsize == 1:  # gloo sends no float8
        return distribute_tensor(value.view(torch.uint8), mesh, placements).view(value.dtype)
    return distribute_tensor(value, mesh, placements)


def _zeros(value, mesh, placements):
    return zeros(value.shape, dtype=value.dtype, device_mesh=mesh, placements=placements)


def _load_shared(rank, path, dim):
    """What this rank takes for shared when it loads."""
    mesh = init_device_mesh("cpu", (rank.world_size,))
    state = {"sharded": zeros((400, 700), device_mesh=mesh, placements=[Shard(dim)]), "replicated": torch.zeros(9, 9)}
    found = {}

    def recorded(storage, wanted, **options):
        found.update({w.key: w.shared for w in wanted})
        return fetch(storage, wanted, **options)

    deliver.fetch = recorded
    dcp.load(state, storage_reader=TensorizerStorageReader(path))
    assert torch.equal(state["sharded"].full_tensor(), random_tensor(torch.float32, (400, 700), 1).nan_to_num())
    return found


def _save_shared(rank, path):
    mesh = init_device_mesh("cpu", (rank.world_size,))
    rows = distribute_tensor(random_tensor(torch.float32, (400, 700), 1).nan_to_num(), mesh, [Shard(0)])
    with TensorizerStorageWriter() as writer:
        dcp.save({"sharded": rows, "replicated": torch.zeros(9, 9)}, storage_writer=writer, checkpoint_id=path)


def test_ranks_know_what_they_all_read(tmp_path):
    """So that it comes from the disk once: replicated tensors, columns of rows; not rows, and nothing by one alone."""
    path = str(tmp_path)
    rows, columns = {"sharded": False, "replicated": True}, {"sharded": True, "replicated": True}
    of_two = run_ranks(2, in_turn, (_save_shared, path), (_load_shared, path, 0), (_load_shared, path, 1))
    assert [found for _, *found in of_two] == [[rows, columns]] * 2
    assert run_ranks(4, _load_shared, path, 0) == [rows] * 4
    assert run_ranks(1, _load_shared, path, 0) == [{"sharded": False, "replicated": False}]
