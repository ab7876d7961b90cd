"""Tensors that describe which part of a tensor they are, by all ways to save, on real ranks."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from dcp_tensorizer import (
    CheckpointManager,
    Export,
    LoadPlanner,
    SafetensorsStorageWriter,
    SavePlanner,
    TensorizerStorageReader,
    TensorizerStorageWriter,
    installed,
)

from ..differential.run import scribble
from ..differential.values import HOW_DESCRIBED, Described, Maker, Meshes, Sharded
from ..lab.ranks import run_ranks
from ..lab.states import filled

SHAPE = (8, 3)
SEED = 5


def _specs(seed):
    """By key: each kind, in one block a rank and in several, all of a rank in an order of their own; and by strides."""
    specs = {
        f"{how}.{pieces}": Described("float32", SHAPE, how, pieces, 1, seed)
        for how in HOW_DESCRIBED
        for pieces in (1, 2)
    }
    return {**specs, "strided": Sharded("float32", SHAPE, "ss", seed)}


def _loadable(how):
    """torch compares the stored size with that of a plain tensor, except where fields give another."""
    return "local" in how or how in ("fields", "strided")


def _rounds(rank, folder):
    """What each way has saved, as whole tensors and as parts of this rank."""
    maker = Maker(rank.index, Meshes(rank.world_size))
    full = filled(torch.float32, SHAPE, SEED)

    def state():
        return {key: maker.make(spec) for key, spec in _specs(SEED).items()}

    def with_writer(path, is_async, planner, **options):
        with TensorizerStorageWriter(path, **options) as writer:
            saved, how = state(), {"storage_writer": writer, "process_group": rank.saves, "planner": planner()}
            if options.get("staging") == "shared":
                for tensor in saved.values():
                    _local(tensor).share_memory_()
            if is_async:
                future = dcp.async_save(saved, **how)
                if isinstance(future, AsyncSaveResponse):
                    future.staging_completion.result()
                    future = future.upload_completion
                if "staging" not in options:  # where it is, training waits
                    scribble(saved)
                future.result()
            else:
                dcp.save(saved, **how)

    def under_install(path):
        with installed():
            dcp.save(state(), checkpoint_id=path)

    def with_manager(path):
        with CheckpointManager(path, export=Export(f"{path}-exported-{{}}", every=1)) as manager:
            for step in (1, 2):  # what the first save has shown of the plan is used by the second
                manager.save(step, {"model": state()}, wait=True)
            loaded = {"model": blanks()}
            manager.restore(loaded)
            return loaded["model"]

    def blanks():
        """Targets: whole tensors, and parts like those that were saved."""
        made = {key: torch.zeros(SHAPE) for key in _specs(0)}
        for key, spec in _specs(0).items():
            if _loadable(key.partition(".")[0]):
                made[key] = maker.make(spec)
                _local(made[key]).zero_()
        return made

    def wrong(values):
        expected = state()
        return [
            key
            for key, value in values.items()
            if not torch.equal(_local(value), _local(expected[key]) if _loadable(key.partition(".")[0]) else full)
        ]

    saves = {
        "sync": lambda path: with_writer(path, False, DefaultSavePlanner),
        "sync, own planner": lambda path: with_writer(path, False, SavePlanner),
        "async": lambda path: with_writer(path, True, DefaultSavePlanner),
        "async, own planner": lambda path: with_writer(path, True, SavePlanner),
        "overlap": lambda path: with_writer(path, True, SavePlanner, overlap_staging=True),
        "shared": lambda path: with_writer(path, True, SavePlanner, staging="shared"),
        "install": under_install,
    }
    found = {}
    for name, save in saves.items():
        path = f"{folder}/{name}"
        save(path)
        for planner in (DefaultLoadPlanner, LoadPlanner):
            loaded = blanks()
            dcp.load(loaded, storage_reader=TensorizerStorageReader(path), planner=planner())
            found[f"{name}, read by {planner.__name__}"] = wrong(loaded)
    found["manager"] = wrong(with_manager(f"{folder}/manager"))
    for is_async in (False, True):
        path = f"{folder}/exported-{is_async}"
        with SafetensorsStorageWriter(path) as writer:
            save = dcp.async_save if is_async else dcp.save
            future = save(state(), storage_writer=writer, process_group=rank.saves)
            if is_async:
                future.result()
    if rank.index == 0:
        for name in ("exported-False", "exported-True", "manager-exported-2"):
            values = load_file(f"{folder}/{name}/model.safetensors")
            found[name] = [key for key in _specs(0) if not torch.equal(values[key], full)]
    return found


def _local(tensor):
    return getattr(tensor, "_local_tensor", tensor).as_subclass(torch.Tensor)


@pytest.fixture(scope="module")
def rounds(tmp_path_factory):
    return run_ranks(2, _rounds, tmp_path_factory.mktemp("described"))


def test_every_way_to_save_stores_what_dcp_save_does(rounds):
    """Each part comes back on its rank, and as a part of the whole tensor."""
    for found in rounds:
        assert {name: keys for name, keys in found.items() if keys} == {}
    assert len(rounds[0]) == 18
