"""Every road that DCP offers to and from a storage: its modes, planners, stagers and kinds of path."""

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_tensorizer import MetadataError, TensorizerStorageReader, TensorizerStorageWriter

from ..lab.ranks import attempt, run_ranks
from ..lab.states import assert_same
from .training import full, random_tensor

WORLD = 2
ROADS = (
    "async_save",
    "async_save in a process",
    "async_save in a process, once more",
    "async_save with torch's stager",
    "async_save without collectives",
    "save",
    "save without collectives",
    "save to a file URL",
    "async_save without ranks",
    "save without ranks",
)
CACHED = ("first", "other values", "other dtype", "other shape", "first again")


class Counter(Stateful):
    """Counts batches, and keeps their lengths."""

    def __init__(self, count, lengths):
        self.count = count
        self.lengths = lengths

    def state_dict(self):
        return {"count": self.count, "lengths": self.lengths}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]
        self.lengths = state_dict["lengths"]


def _state(mesh, seed):
    """A sharded, a replicated and a nested tensor, objects, and a stateful value."""
    return {
        "model": {
            "sharded": distribute_tensor(random_tensor(torch.float32, (5, 3), seed), mesh, [Shard(0)]),
            "plain": random_tensor(torch.bfloat16, (4, 4), seed + 1),
            "list": [random_tensor(torch.float64, (), seed + 2), {"deep": random_tensor(torch.int8, (3,), seed + 3)}],
        },
        "step": seed,
        "name": f"run {seed}",
        "counter": Counter(seed, torch.tensor([seed, seed])),
    }


def _plain(state):
    """A state's values, gathered, in builtin containers."""
    return full({key: value.state_dict() if isinstance(value, Counter) else value for key, value in state.items()})


def _own(rank, seed):
    """A state of one rank's own, for saves that know of no other rank."""
    return {"model": random_tensor(torch.float32, (3,), seed + rank.index), "step": seed}


def _travel(rank, folder):
    """Saves and loads on every road; returns what was saved and what was loaded."""
    mesh = init_device_mesh("cpu", (WORLD,))
    outcomes = {}
    with TensorizerStorageWriter() as writer:
        for seed, road in enumerate(ROADS, 100):
            alone = road.endswith("without ranks")
            target = folder / road / str(rank.index) if alone else folder / road
            state = _own(rank, seed) if alone else _state(mesh, seed)
            _save(rank, road, state, f"file://{target}" if "URL" in road else target, writer)
            dist.barrier()
            loaded = _own(rank, 0) if alone else _state(mesh, 0)
            dcp.load(
                loaded,
                storage_reader=TensorizerStorageReader(target),
                process_group=None if alone else rank.saves,
                no_dist=alone,
            )
            outcomes[road] = (state, loaded) if alone else (_plain(state), _plain(loaded))
    return outcomes


def _save(rank, road, state, path, writer):
    options = {"checkpoint_id": path, "storage_writer": writer, "process_group": rank.saves}
    options["use_collectives"] = "without collectives" not in road
    if road.endswith("without ranks"):
        options |= {"process_group": None, "no_dist": True}
    if road.startswith("save"):
        dcp.save(state, **options)
        return
    if "in a process" in road:
        options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
    if "torch's stager" in road:
        options["async_stager"] = DefaultStager(StagingOptions(False, False, False, False))
    dcp.async_save(state, **options).result()


def _save_with_cached_plans(rank, folder):
    """Saves with one writer and plan caching while values, dtypes and shapes change."""
    mesh = init_device_mesh("cpu", (WORLD,))
    outcomes = {}
    with TensorizerStorageWriter() as writer:
        for seed, case in enumerate(CACHED):
            dtype = torch.bfloat16 if case == "other dtype" else torch.float32
            shape = (7, 3) if case == "other shape" else (5, 3)
            state = {
                "sharded": distribute_tensor(random_tensor(dtype, shape, seed), mesh, [Shard(0)]),
                "plain": random_tensor(dtype, shape, seed),
                f"rank{rank.index}": {"step": seed},
            }
            dcp.async_save(
                state,
                checkpoint_id=folder / case,
                storage_writer=writer,
                planner=DefaultSavePlanner(enable_plan_caching=True),
                process_group=rank.saves,
            )
            outcomes[case] = [full(state)]
    dist.barrier()
    for case, (expected,) in outcomes.items():
        loaded = {"plain": torch.zeros_like(expected["plain"]), f"rank{rank.index}": {"step": None}}
        loaded["sharded"] = distribute_tensor(torch.zeros_like(expected["sharded"]), mesh, [Shard(0)])
        dcp.load(loaded, storage_reader=TensorizerStorageReader(folder / case), process_group=rank.saves)
        outcomes[case].append(full(loaded))
    return outcomes


def _load_step(_, folder):
    return attempt(lambda: dcp.load({"step": 0}, storage_reader=TensorizerStorageReader(folder)))


@pytest.fixture(scope="module")
def travelled(tmp_path_factory):
    """The folder and, by rank and road, what was saved and what was loaded."""
    folder = tmp_path_factory.mktemp("roads")
    return folder, run_ranks(WORLD, _travel, folder)


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    """By rank and case, what was saved with cached plans and what was loaded."""
    return run_ranks(WORLD, _save_with_cached_plans, tmp_path_factory.mktemp("cached"))


@pytest.mark.parametrize("road", ROADS)
def test_what_is_saved_on_any_road_is_loaded(travelled, road):
    """Each of DCP's ways to save gives a checkpoint that loads bit-exact."""
    for saved, loaded in (outcomes[road] for outcomes in travelled[1]):
        assert_same(loaded, saved)


def test_without_collectives_each_rank_commits_its_own_part(travelled):
    """With use_collectives=False there is one .metadata for each rank, and none for all."""
    folder, _ = travelled
    for road in ("async_save without collectives", "save without collectives"):
        names = sorted(path.name for path in (folder / road).iterdir() if path.suffix != ".tensors")
        assert names == ["__0.metadata", "__1.metadata"]


@pytest.mark.parametrize("world_size", [1, 3])
def test_without_collectives_another_number_of_ranks_cannot_load(travelled, world_size):
    """What two ranks saved without collectives is a named error on one rank and on three, on all of them."""
    folder = travelled[0] / "async_save without collectives"
    failures = [_load_step(None, folder)] if world_size == 1 else run_ranks(world_size, _load_step, folder)
    for failure in failures:
        assert failure.causes.keys() == set(range(world_size))
        for cause in failure.causes.values():
            assert type(cause) is MetadataError
            assert f"a number of ranks that differs from the {world_size}" in str(cause)


def _load_otherwise(rank, folder):
    """Loads what was saved by rows, each rank by itself, into columns, and into whole tensors."""
    mesh = init_device_mesh("cpu", (WORLD,))
    rows, columns = (distribute_tensor(torch.zeros(5, 3), mesh, [Shard(dim)]) for dim in (0, 1))
    found = []
    for target in (columns, torch.zeros(5, 3), rows):
        state = {"model": {"sharded": target}}
        failure = attempt(lambda state=state: dcp.load(state, storage_reader=TensorizerStorageReader(folder)))
        found.append((failure, full(state)["model"]["sharded"]))
    return found


def test_without_collectives_another_sharding_cannot_load(travelled):
    """A rank has only its own part: a target that wants more is an error that names the key, and is not changed."""
    expected = random_tensor(torch.float32, (5, 3), 100 + ROADS.index("save without collectives"))
    for found in run_ranks(WORLD, _load_otherwise, travelled[0] / "save without collectives"):
        for failure, value in found[:2]:
            (cause,) = failure.causes.values()
            assert type(cause) is MetadataError
            assert "'model.sharded'" in str(cause) and "with another sharding" in str(cause)
            assert not value.any()
        failure, value = found[2]
        assert failure.causes == {}
        assert_same(value, expected)


@pytest.mark.parametrize("case", CACHED)
def test_cached_plans(cached, case):
    """With plan caching each save holds its own values, dtypes and shapes."""
    for saved, loaded in (outcomes[case] for outcomes in cached):
        assert_same(loaded, saved)


def test_a_part_of_a_checkpoint_loads_into_a_part_of_a_state(tmp_path):
    """With allow_partial_load keys that were not saved are left alone, and keys not asked for are not read."""
    with TensorizerStorageWriter(tmp_path) as writer:
        dcp.save({"a": torch.arange(4.0), "b": torch.arange(3), "c": "text"}, storage_writer=writer)
    loaded = {"a": torch.zeros(4), "new": torch.full((2,), 7.0), "other": "kept"}
    dcp.load(
        loaded,
        storage_reader=TensorizerStorageReader(tmp_path),
        planner=DefaultLoadPlanner(allow_partial_load=True),
    )
    assert_same(loaded, {"a": torch.arange(4.0), "new": torch.full((2,), 7.0), "other": "kept"})


@pytest.mark.parametrize("cache", [True, False])
def test_saves_of_growing_and_shrinking_states(tmp_path, cache):
    """One writer saves states whose size changes, with or without a buffer kept between saves."""
    sizes = (3, 100_000, 7, 300_000)
    states = [{"a": random_tensor(torch.uint8, (size,), size), f"key{size}": size} for size in sizes]
    with TensorizerStorageWriter(cache_staged_state_dict=cache) as writer:
        for size, state in zip(sizes, states, strict=True):
            dcp.async_save(state, checkpoint_id=tmp_path / str(size), storage_writer=writer)
    for size, state in zip(sizes, states, strict=True):
        loaded = {"a": torch.zeros(size, dtype=torch.uint8), f"key{size}": None}
        dcp.load(loaded, storage_reader=TensorizerStorageReader(tmp_path / str(size)))
        assert_same(loaded, state)


def _urls(folder):
    return {
        "memory": (f"memory://{folder}/checkpoint", {}),
        "file": (f"file://{folder}/checkpoint", {}),
        "awkward local path": (f"{folder}/a*b [1]/?#", {}),
        "simplecache": (f"simplecache::file://{folder}/checkpoint", {"simplecache": {"cache_storage": f"{folder}/c"}}),
    }


@pytest.mark.parametrize("kind", _urls(""))
def test_any_path(tmp_path, kind):
    """Local paths and fsspec URLs of any kind are saved to, on both roads, and loaded from."""
    path, options = _urls(tmp_path)[kind]
    with TensorizerStorageWriter(storage_options=options) as writer:
        dcp.save(_tensors(1), checkpoint_id=f"{path}/save", storage_writer=writer)
        dcp.async_save(_tensors(2), checkpoint_id=f"{path}/async_save", storage_writer=writer).result()
    for seed, name in enumerate(("save", "async_save"), 1):
        loaded = _tensors(0)
        dcp.load(loaded, storage_reader=TensorizerStorageReader(f"{path}/{name}", storage_options=options))
        assert_same(loaded, _tensors(seed))


def _tensors(seed):
    return {"weight": random_tensor(torch.float32, (33, 5), seed), "zero": torch.tensor(-0.0).half(), "step": seed}


def test_a_memory_checkpoint_is_overwritten(tmp_path):
    """In memory:// as on disk, a second save replaces the first, its files too."""
    url = f"memory://{tmp_path}/twice"
    with TensorizerStorageWriter(url) as writer:
        for value in (1.0, 2.0):
            dcp.async_save({"a": torch.full((3,), value)}, storage_writer=writer).result()
    loaded = {"a": torch.zeros(3)}
    dcp.load(loaded, storage_reader=TensorizerStorageReader(url))
    assert_same(loaded["a"], torch.full((3,), 2.0))
    assert len(fsspec.filesystem("memory").ls(f"{tmp_path}/twice")) == 2
