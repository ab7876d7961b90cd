"""The asynchronous-saving recipe's second example, on four ranks, with its futures dropped."""

import io
import logging
import threading
from collections import defaultdict
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tensorizer import TensorDeserializer
from torch.distributed.checkpoint import _async_thread_executor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.fsdp import fully_shard

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter

from ..lab.ranks import eventually, run_ranks
from ..lab.states import assert_same
from ..lab.waiting import Gate, HeldPlanner, in_thread
from .training import AppState, ToyModel, full, train

STEPS = 6
WORLD = 4


def _train_and_save(rank, folder):
    torch.manual_seed(rank.index)
    model = fully_shard(ToyModel())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    records = []
    writer = TensorizerStorageWriter(cache_staged_state_dict=True, path=folder / "unused")
    for step in range(STEPS):
        train(model, optimizer)
        records.append(full(AppState(model, optimizer).state_dict()))
        state_dict = {"app": AppState(model, optimizer)}
        dcp.async_save(
            state_dict, storage_writer=writer, checkpoint_id=str(folder / f"step{step}"), process_group=rank.saves
        )
    writer.close()
    with TensorizerStorageWriter(path=folder / "latest") as writer:
        for _ in range(STEPS):
            train(model, optimizer)
            records.append(full(AppState(model, optimizer).state_dict()))
            dcp.async_save({"app": AppState(model, optimizer)}, storage_writer=writer, process_group=rank.saves)
    return records if rank.index == 0 else None


def _load(rank, folders):
    torch.manual_seed(1000 + rank.index)
    loaded = []
    for folder in folders:
        model = fully_shard(ToyModel())
        model.oddities.zero_()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.7)
        dcp.load({"app": AppState(model, optimizer)}, storage_reader=TensorizerStorageReader(folder))
        loaded.append(full(AppState(model, optimizer).state_dict()))
    return loaded


def _save_on_groups(rank, folder):
    """Saves on a group for saves, and then twice without one; returns what was logged of each save."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("dcp_tensorizer")
    logger.addHandler(handler)
    warned = []
    with TensorizerStorageWriter() as writer:
        for step, group in enumerate([rank.saves, None, None]):
            path = folder / f"step{step}"
            dcp.async_save(
                {"step": torch.tensor(step)}, storage_writer=writer, checkpoint_id=path, process_group=group
            ).result()
            warned.append([said for said in records if str(path) in said and "default process group" in said])
    logger.removeHandler(handler)
    return warned


def _clean_up_too_early(rank, folder):
    """Ends as the recipe does: the process group goes away under the last saves, and nothing is closed.

    One of them is writing by then; of another one the thread has not run yet; and one is held back before it writes.
    """
    logging.getLogger("dcp_tensorizer").addHandler(logging.FileHandler(folder / f"{rank.index}.log"))
    groups = {"begun": rank.saves} | {name: dist.new_group(backend="gloo") for name in ("not begun", "held")}
    planners = {"held": HeldPlanner(gate := Gate())}
    writers = {name: TensorizerStorageWriter(folder / name) for name in groups}

    def save(name, step):
        state_dict = {f"rank{rank.index}": torch.full((1 << 24,), step)}
        planner = planners.get(name) if step == 2 else None
        return dcp.async_save(state_dict, storage_writer=writers[name], process_group=groups[name], planner=planner)

    def save_beside(name):
        """What one thread saves is saved in order."""
        in_thread(lambda: save(name, 2)).join()

    for name in groups:
        save(name, 1).result()
    save_beside("held")
    gate.wait_reached()
    save_beside("begun")
    assert eventually(lambda: len(list((folder / "begun").glob(f"__{rank.index}_*"))) == 2)
    destroyed = threading.Event()
    begin = _async_thread_executor.save_wrapper

    def begin_late(*args, **options):
        destroyed.wait()
        return begin(*args, **options)

    _async_thread_executor.save_wrapper = begin_late
    save_beside("not begun")
    dist.destroy_process_group()
    destroyed.set()
    gate.open()


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """What the job left: its checkpoints, and the whole state as it was at each save."""
    folder = tmp_path_factory.mktemp("recipe")
    records = run_ranks(WORLD, _train_and_save, folder)[0]
    return folder, records


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_checkpoint_holds_its_own_step_on_any_number_of_ranks(job, world_size):
    """Overlapping saves keep their own steps, Adam's state included, however many ranks load them."""
    folder, records = job
    folders = [folder / f"step{step}" for step in range(STEPS)] + [folder / "latest"]
    expected = [*records[:STEPS], records[-1]]
    for loaded in run_ranks(world_size, _load, folders):
        for step, (state, record) in enumerate(zip(loaded, expected, strict=True)):
            assert_same(state, record, f"step{step}")


def test_recorded_steps_differ(job):
    """The records that checkpoints are compared with are not all alike."""
    _, records = job
    weights = [record["model"]["net1.weight"] for record in records]
    assert all(not torch.equal(a, b) for a, b in pairwise(weights))


def test_saves_leave_nothing_but_their_checkpoints(job):
    """A checkpoint's directory holds the files of its last save, and the writer's unused path does not exist."""
    folder, _ = job
    assert sorted(path.name for path in folder.iterdir()) == ["latest", *(f"step{step}" for step in range(STEPS))]
    for checkpoint in folder.iterdir():
        names = sorted(path.name for path in checkpoint.iterdir())
        assert names[0] == ".metadata"
        assert [name.split("_")[2] for name in names[1:]] == [str(rank) for rank in range(WORLD)]


@pytest.mark.parametrize("step", range(STEPS))
def test_stock_tensorizer_opens_every_data_file(job, step):
    """Each rank's file opens in tensorizer with its hashes verified, and holds that rank's shards."""
    folder, records = job
    expected, _ = flatten_state_dict({"app": records[step]})
    found = defaultdict(list)
    for path in sorted((folder / f"step{step}").glob("*.tensors")):
        rank = int(path.name.split("_")[2])
        with TensorDeserializer(path, verify_hash=True, device="cpu") as file:
            for name in file.keys():  # noqa: SIM118
                found[name].append(rank)
                _check(file[name], expected[name], rank if _is_sharded(name) else None)
    assert found.keys() == expected.keys()
    sharded = set(filter(_is_sharded, expected))
    assert {name for name, ranks in found.items() if ranks == list(range(WORLD))} == sharded
    assert all(len(found[name]) == 1 for name in found.keys() - sharded)


def test_a_save_on_the_group_of_training_is_warned_of(tmp_path):
    """The recipe gives saves no group of their own, and hangs on CPUs: rank 0 says why at the first such save."""
    of_rank_0, of_rank_1 = run_ranks(2, _save_on_groups, tmp_path)
    assert [len(said) for said in of_rank_0] == [0, 1, 0]
    assert 'process_group=dist.new_group(backend="gloo")' in of_rank_0[1][0]
    assert of_rank_1 == [[], [], []]


@pytest.fixture(scope="module")
def cleaned_up_too_early(tmp_path_factory):
    """What a job left that destroyed its process group under its last saves."""
    folder = tmp_path_factory.mktemp("early")
    run_ranks(2, _clean_up_too_early, folder)
    return folder


@pytest.mark.promise("group-destroyed", reason="what is on storage")
@pytest.mark.parametrize("save", ["begun", "not begun", "held"])
def test_a_process_group_destroyed_under_the_last_save(cleaned_up_too_early, save):
    """The recipe's own clean-up neither hangs nor damages: one save or the other is there, with all ranks' data."""
    loaded = {f"rank{index}": torch.zeros(1 << 24, dtype=torch.int64) for index in range(2)}
    dcp.load(loaded, storage_reader=TensorizerStorageReader(cleaned_up_too_early / save))
    (step,) = torch.cat(list(loaded.values())).unique().tolist()
    assert step in ((1,) if save == "held" else (1, 2))


@pytest.mark.promise("group-destroyed")
@pytest.mark.parametrize("save", ["begun", "not begun", "held"])
def test_a_save_that_is_lost_at_the_end_is_in_the_log(cleaned_up_too_early, save):
    """Nothing was closed and no future looked at, and rank 0 says which save was lost and what to do."""
    path = cleaned_up_too_early / save
    loaded = {"rank0": torch.zeros(1 << 24, dtype=torch.int64)}
    dcp.load(loaded, storage_reader=TensorizerStorageReader(path))
    lines = (cleaned_up_too_early / "0.log").read_text().splitlines()
    lost = [line for line in lines if f"the save to {path} " in line and "destroy_process_group()" in line]
    assert len(lost) == (1 if loaded["rank0"][0] == 1 else 0), lines
    assert lost or save != "held"


def _check(stored, expected, shard):
    if not isinstance(expected, torch.Tensor):
        assert torch.load(io.BytesIO(stored.numpy().tobytes())) == expected
    else:
        assert_same(stored, expected if shard is None else expected.chunk(WORLD)[shard])


def _is_sharded(name):
    return name.startswith("app.model.net") or name.endswith((".exp_avg", ".exp_avg_sq"))
