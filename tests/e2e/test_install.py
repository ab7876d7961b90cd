"""torch's own storage replaced on several ranks."""

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_tensorizer import installed
from dcp_tensorizer._format.index import is_index

from .ranks import run_ranks

WORLD = 2


def _state(mesh, value):
    return {"w": distribute_tensor(torch.arange(10.0) * value, mesh, [Shard(0)]), "n": int(value)}


def _save_and_load(rank, folder):
    """Every way to save, and by each what was loaded again by both ways to load."""
    mesh = init_device_mesh("cpu", (WORLD,))
    process = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    results = {}
    with installed():
        for value, (name, made, options) in enumerate(
            [("id", 0, {}), ("writer", 1, {}), ("process, id", 0, process), ("process, writer", 1, process)], start=1
        ):
            path = folder / name
            where = {"storage_writer": FileSystemWriter(path)} if made else {"checkpoint_id": path}
            dcp.async_save(_state(mesh, value), **where, process_group=rank.saves, **options).result()
            loaded = []
            for source in ({"checkpoint_id": path}, {"storage_reader": FileSystemReader(path)}):
                state = _state(mesh, 0)
                dcp.load(state, **source, process_group=rank.saves)
                loaded.append((state["w"].full_tensor().tolist(), state["n"]))
            results[name] = is_index((path / ".metadata").read_bytes()), loaded
    return results


def test_every_way_to_save_and_load(tmp_path):
    """By a checkpoint_id and by a FileSystemWriter, on a thread and in a process of torch's: all are ours."""
    for results in run_ranks(WORLD, _save_and_load, tmp_path):
        for value, (ours, loaded) in enumerate(results.values(), start=1):
            assert ours
            assert loaded == [([float(value * i) for i in range(10)], value)] * 2
