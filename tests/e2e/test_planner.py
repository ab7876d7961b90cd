"""`SavePlanner` on real ranks: what is saved with it is what torch's planner saves, with either storage writer."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_tensorizer import SavePlanner, TensorizerStorageReader, TensorizerStorageWriter

from ..lab.ranks import attempt, in_turn, run_ranks
from ..lab.states import assert_same
from .test_layouts import LAYOUTS, Uneven
from .training import AppState, full, random_tensor

WORLD = 4


def _tensors(rank, seed):
    """One and two dimensions of a mesh, uneven shards, replicas, ranks of a mesh of their own, scalars and objects."""
    line, square = init_device_mesh("cpu", (WORLD,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    corner = dist.device_mesh.DeviceMesh("cpu", [0, 2])

    def tensor(*shape, dtype=torch.float32):
        return random_tensor(dtype, shape, seed)

    return {
        "rows": distribute_tensor(tensor(8, 3), line, [Shard(0)]),
        "uneven": distribute_tensor(tensor(5, 3, dtype=torch.bfloat16), line, [Shard(0)]),
        "few": distribute_tensor(tensor(2, 3), line, [Shard(0)]),
        "columns": distribute_tensor(tensor(3, 7), line, [Shard(1)]),
        "square": distribute_tensor(tensor(6, 4), square, [Shard(0), Shard(1)]),
        "hybrid": distribute_tensor(tensor(6, 4), square, [Replicate(), Shard(0)]),
        "replicated": distribute_tensor(tensor(6), square, [Replicate(), Replicate()]),
        "corner": DTensor.from_local(tensor(2, 2), corner, [Shard(0)], run_check=False),
        "plain": {"weight": tensor(4), "steps": [torch.tensor(seed), torch.tensor(seed + 1)]},
        "objects": {"lr": 0.1, "name": "run", f"rank{rank.index}": {"seed": seed}},
    }


def _models(rank):
    for wrap in LAYOUTS.values():
        torch.manual_seed(0)
        model = wrap(Uneven(7), rank.world_size)
        yield {"app": AppState(model, torch.optim.Adam(model.parameters(), lr=0.1)).state_dict()}


def _states(rank):
    yield from _models(rank)
    yield _tensors(rank, 1)
    yield {"model": torch.ones(3)} if rank.index else {}


def _differences(ours, theirs):
    """The fields in which two pieces of metadata differ; ids of saves and paths do."""
    assert isinstance(ours, Metadata)
    fields = [field.name for field in dataclasses.fields(Metadata) if field.name != "storage_meta"]
    differ = [name for name in fields if getattr(ours, name) != getattr(theirs, name)]
    if list(ours.state_dict_metadata) != list(theirs.state_dict_metadata):
        differ.append("order")
    return differ


def _save_with_torchs_writer(rank, folder):
    """Each state with torch's planner, and twice with ours; then what ours saved is loaded."""
    planner, differ = SavePlanner(), []
    for number, state in enumerate(_states(rank)):
        theirs = dcp.save(state, storage_writer=FileSystemWriter(folder / f"{number} torch"))
        for time in range(2):
            path = folder / f"{number} {time}"
            ours = dcp.save(state, storage_writer=FileSystemWriter(path), planner=planner)
            differ += _differences(ours, theirs)
            differ += _differences(FileSystemReader(path).read_metadata(), theirs)
    loaded = _tensors(rank, 2)
    dcp.load(loaded, storage_reader=FileSystemReader(folder / f"{len(LAYOUTS)} 1"))
    assert_same(full(loaded), full(_tensors(rank, 1)))
    return differ


def test_torchs_writer_makes_the_same_checkpoint(saved):
    """The metadata is equal on all ranks and in the file, places of data included, also at the second save."""
    folder, results = saved
    assert results["torch"] == [[]] * WORLD
    for path in (folder / "torch").glob("*/.metadata"):
        assert b"dcp_tensorizer" not in path.read_bytes()


def _save_with_our_writer(rank, folder, mode):
    """Each state with either planner; then what ours saved is loaded."""
    planner, differ = SavePlanner(), []
    options = {"process_group": rank.saves, "async_checkpointer_type": AsyncCheckpointerType[mode]}
    with TensorizerStorageWriter(thread_count=1) as writer:
        for number, state in enumerate(_states(rank)):
            path = folder / str(number)
            theirs = dcp.async_save(state, checkpoint_id=path, storage_writer=writer, **options).result()
            for _ in range(2):
                future = dcp.async_save(state, checkpoint_id=path, storage_writer=writer, planner=planner, **options)
                ours = future.result()
                differ += _differences(ours, theirs)
                assert ours.storage_data is None
    loaded = _tensors(rank, 2)
    dcp.load(loaded, storage_reader=TensorizerStorageReader(folder / str(len(LAYOUTS))))
    assert_same(full(loaded), full(_tensors(rank, 1)))
    return differ


@pytest.mark.parametrize("mode", ["THREAD", "PROCESS"])
def test_our_writer_saves_the_same(saved, mode):
    """In a thread, and in DCP's own process, which gets a copy of the planner with each save."""
    assert saved[1][mode] == [[]] * WORLD


def _save_alone(rank, folder):
    """Without collectives, and each rank by itself, between saves of all ranks; all with one planner."""
    planner, differ = SavePlanner(), []
    state = _tensors(rank, 1)
    plain = {"plain": state["plain"], "objects": state["objects"]}
    roads = [{}, {"use_collectives": False}, {"no_dist": True}, {}]
    for number, road in enumerate(roads):
        own = f" {rank.index}" if "no_dist" in road else ""
        saved = state if "no_dist" not in road else plain
        theirs = dcp.save(saved, storage_writer=FileSystemWriter(folder / f"{number} torch{own}"), **road)
        for time in range(2):
            path = folder / f"{number} {time}{own}"
            ours = dcp.save(saved, storage_writer=FileSystemWriter(path), planner=planner, **road)
            differ += _differences(ours, theirs)
            with TensorizerStorageWriter(f"{path} ours", thread_count=1) as writer:
                ours = dcp.save(saved, storage_writer=writer, planner=planner, **road)
            theirs.storage_data, kept = None, theirs.storage_data
            differ += _differences(ours, theirs)
            theirs.storage_data = kept
    return differ


def test_ranks_that_save_alone(saved):
    """Their plans go nowhere; then all ranks save together again."""
    assert saved[1]["alone"] == [[]] * WORLD


def _save_wrong_plan(rank, folder):
    """A save whose plan is wrong, between two that are not."""
    line = init_device_mesh("cpu", (WORLD,))
    good = {"x": distribute_tensor(torch.ones(8), line, [Shard(0)])}
    planner = SavePlanner()
    dcp.save(good, storage_writer=FileSystemWriter(folder / "first"), planner=planner)
    bad = {"x": distribute_tensor(torch.ones(9), line, [Shard(0)])}
    failure = attempt(lambda: dcp.save(bad, storage_writer=FileSystemWriter(folder / "bad"), planner=_Shifted()))
    dcp.save(good, storage_writer=FileSystemWriter(folder / "last"), planner=planner)
    return {number: str(error) for number, error in failure.causes.items()}


class _Shifted(SavePlanner):
    """Plans chunks one row further on than they are."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            chunk = dataclasses.replace(item.tensor_data.chunk, offsets=torch.Size([item.index.offset[0] + 1]))
            data = dataclasses.replace(item.tensor_data, chunk=chunk)
            items.append(
                dataclasses.replace(item, index=dataclasses.replace(item.index, offset=chunk.offsets), tensor_data=data)
            )
        return dataclasses.replace(plan, items=items)


def test_all_ranks_hear_what_is_wrong_with_a_plan(saved):
    """The error names the key and the rank; nothing is hung, and the planner before it goes on."""
    fault = "a part lies outside the tensor's shape (9,): (3,) at (7,) (planned by rank 2)"
    for causes in saved[1]["wrong"]:
        assert causes == {0: f"'x' cannot be saved: {fault}"}


def _sent_tables(rank, path, planner_class):
    """Saves the same state three times, and once another; whether this rank sent where its data is each time."""
    state = {
        f"w{n}": distribute_tensor(torch.full((8, 4), float(n)), init_device_mesh("cpu", (WORLD,)), [Shard(0)])
        for n in range(3)
    }
    planner, sent = planner_class(), []

    class Watched(TensorizerStorageWriter):
        def write_data(self, plan, planner):
            future = super().write_data(plan, planner)
            sent.extend(bool(result.storage_data.table) for result in future.value())
            return future

    with Watched(path) as writer:
        for number in range(3):
            where = {"checkpoint_id": path / str(number % 2)}
            dcp.async_save(state, storage_writer=writer, planner=planner, process_group=rank.saves, **where).result()
        state["w0"] = torch.ones(2)
        dcp.async_save(state, storage_writer=writer, planner=planner, process_group=rank.saves).result()
    for folder in (path, path / "0", path / "1"):
        loaded = {key: torch.zeros_like(value) for key, value in state.items() if key != "w0"}
        dcp.load(loaded, storage_reader=TensorizerStorageReader(folder))
        assert all(torch.equal(full(loaded[key]), full(state[key])) for key in loaded)
    return sent


@pytest.mark.parametrize("planner", [SavePlanner, DefaultSavePlanner])
def test_where_data_lies_is_sent_once(planner, saved):
    """Ranks whose data lies as in the save before send digests alone, wherever they save; checkpoints are whole."""
    assert saved[1][planner.__name__] == [[True] * 4] + [[True, False, False, True]] * (WORLD - 1)


def _alternate(rank, folder):
    """Saves with one planner, in turns with all ranks and with all but the first; returns what each save holds."""
    some = dist.new_group(range(1, WORLD), backend="gloo")
    planner, state, found = SavePlanner(), {"w": torch.full((3,), 5.0), f"rank{rank.index}": rank.index}, []
    for number in range(4):
        path, group = folder / str(number), some if number % 2 else rank.saves
        if rank.index or group is rank.saves:
            dcp.save(state, storage_writer=TensorizerStorageWriter(path), planner=planner, process_group=group)
        dist.barrier()
        found.append(sorted(TensorizerStorageReader(path).stored_metadata().state_dict_metadata))
    return found


def test_one_planner_for_saves_of_two_groups(saved):
    """Each group has a coordinator of its own, which does not know what the other one has been sent."""
    all_keys = [*(f"rank{number}" for number in range(WORLD)), "w"]
    assert saved[1]["groups"] == [[all_keys, all_keys[1:]] * 2] * WORLD


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of all saves of this module, each on the same four ranks, and by name what each rank found."""
    folder = tmp_path_factory.mktemp("planned")
    calls = {
        "torch": (_save_with_torchs_writer,),
        "THREAD": (_save_with_our_writer, "THREAD"),
        "PROCESS": (_save_with_our_writer, "PROCESS"),
        "alone": (_save_alone,),
        "wrong": (_save_wrong_plan,),
        "groups": (_alternate,),
        "SavePlanner": (_sent_tables, SavePlanner),
        "DefaultSavePlanner": (_sent_tables, DefaultSavePlanner),
    }
    by_rank = run_ranks(WORLD, in_turn, *((fn, folder / name, *args) for name, (fn, *args) in calls.items()))
    return folder, dict(zip(calls, map(list, zip(*by_rank, strict=True)), strict=True))
